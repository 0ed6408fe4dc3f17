"""Find the problems of a data set before training: unreadable images, duplicates, unusual sizes, bad annotations."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vitral.data.sources.base import Data, ImageArray, Problem, Texts
from vitral.errors import ImageError


def check_data(data: Data, on_step: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Read every image or text once and report all problems; `problems` is their number."""
    unreadable: list[dict[str, str]] = []
    by_content: dict[str, list[int]] = defaultdict(list)
    sizes: list[tuple[int, int, int]] = []
    for i in range(len(data.inputs)):
        on_step(i + 1, len(data.inputs))
        if isinstance(data.inputs, Texts):
            by_content[data.lines[i]].append(i)
            continue
        try:
            pixels = data.images.read(i, "rgb")
        except ImageError as error:
            unreadable.append({"image": data.images.name(i), "error": str(error)})
            continue
        shape = (pixels.shape[1], pixels.shape[2])
        by_content[hashlib.sha256(repr(shape).encode() + pixels.contiguous().numpy().tobytes()).hexdigest()].append(i)
        sizes.append((*shape, i))
    part_of = {int(i): part for part, indices in data.splits.items() for i in indices}
    groups = [group for group in by_content.values() if len(group) > 1]
    leaks = [group for group in groups if len({part_of.get(i) for i in group}) > 1]
    conflicts = [group for group in groups if not all(_same_target(data, group[0], i) for i in group[1:])]
    balance = _balance(data)
    few = max(2, 0.1 * max(balance.values(), default=0))
    report = {
        "data": data.name,
        data.what: len(data.inputs),
        "splits": {part: len(indices) for part, indices in data.splits.items()},
        "kind": data.kind,
        "classes": balance,
        "numbers": _numbers(data),
        "unreadable": unreadable,
        "duplicates": _names(data, groups) if data.what == "images" else [],
        "leaks_between_splits": _names(data, leaks),
        "same_image_other_label": _names(data, conflicts) if data.what == "images" else [],
        "classes_alike_but_for_case": _alike(data.classes or data.mask_classes or []),
        "rare_classes": [name for name, count in balance.items() if count < few],
        "sizes": _sizes(sizes),
        "extreme_sizes": [
            {"image": data.inputs.name(i), "error": f"{data.inputs.name(i)}: {w} x {h} pixels"}
            for h, w, i in sizes
            if min(h, w) < 8 or max(h, w) > 10 * min(h, w)
        ],
        "annotations": _by_kind(data.problems),
    }
    # A text may have two translations, and a short one may occur twice.
    kinds = ["unreadable", "classes_alike_but_for_case", "extreme_sizes"]
    kinds += ["duplicates", "same_image_other_label"]
    kinds += ["leaks_between_splits"] if data.what == "texts" else []
    report["problems"] = sum(len(report[kind]) for kind in kinds) + len(data.problems)
    return report


def _same_target(data: Data, i: int, j: int) -> bool:
    if data.boxes is not None and not torch.equal(data.boxes.rows[i], data.boxes.rows[j]):
        return False
    if data.masks is not None and not torch.equal(data.masks.images.read(i, "grey"), data.masks.images.read(j, "grey")):
        return False
    if data.texts is not None and data.texts[i] != data.texts[j]:
        return False
    return torch.equal(data.targets[i], data.targets[j])


def _balance(data: Data) -> dict[str, int]:
    """Images per class; empty if the targets are not classes."""
    if data.kind == "label":
        counts = torch.bincount(data.targets, minlength=len(data.classes)).tolist()
    elif data.kind == "labels":
        counts = data.targets.sum(0).long().tolist()
    else:
        return {}
    return dict(zip(data.classes, counts, strict=True))


def _numbers(data: Data) -> dict[str, dict[str, float]]:
    """Smallest, mean and largest value of each target number."""
    if data.kind != "numbers":
        return {}
    names = data.target_names or [str(k) for k in range(data.targets.shape[1])]
    columns = zip(names, data.targets.double().unbind(1), strict=True)
    return {n: {"smallest": float(v.min()), "mean": float(v.mean()), "largest": float(v.max())} for n, v in columns}


def _by_kind(problems: list[Problem]) -> dict[str, list[dict[str, str]]]:
    """The annotation problems of the source by kind."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for found in problems:
        groups[found["kind"]].append({"image": found["image"], "error": found["error"]})
    return dict(groups)


def _names(data: Data, groups: list[list[int]]) -> list[list[str]]:
    names = (lambda i: f"image {i}") if isinstance(data.inputs, ImageArray) else data.inputs.name
    return [[names(i) for i in group] for group in groups]


def _alike(classes: list[str]) -> list[list[str]]:
    """Class names that differ only in case, spaces, dashes or a plural s: often one class with two spellings."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in classes:
        plain = name.casefold().replace("_", "").replace("-", "").replace(" ", "")
        groups[plain.removesuffix("s") or plain].append(name)
    return [group for group in groups.values() if len(group) > 1]


def _sizes(sizes: list[tuple[int, int, int]]) -> dict[str, list[int]]:
    if not sizes:
        return {}
    heights, widths = sorted(h for h, _, _ in sizes), sorted(w for _, w, _ in sizes)
    middle = len(sizes) // 2
    return {
        "smallest": [heights[0], widths[0]],
        "median": [heights[middle], widths[middle]],
        "largest": [heights[-1], widths[-1]],
    }
