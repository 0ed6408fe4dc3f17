"""Look at every image of a data set before training: what cannot be read, what is twice there, what looks odd."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vitral.data.sources.base import Data, ImageArray, Problem, Texts
from vitral.errors import ImageError


def check_data(data: Data, on_step: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Read every image or text once and report; `problems` counts what somebody should look at."""
    unreadable: list[dict[str, str]] = []
    by_content: dict[str, list[int]] = defaultdict(list)
    sizes: list[tuple[int, int, int]] = []
    for i in range(len(data.inputs)):
        if isinstance(data.inputs, Texts):
            by_content[data.lines[i]].append(i)
            on_step(i + 1, len(data.inputs))
            continue
        try:
            pixels = data.images.read(i, "rgb")
        except ImageError as error:
            unreadable.append({"image": data.images.name(i), "error": str(error)})
            continue
        shape = (pixels.shape[1], pixels.shape[2])
        by_content[hashlib.sha256(repr(shape).encode() + pixels.contiguous().numpy().tobytes()).hexdigest()].append(i)
        sizes.append((*shape, i))
        on_step(i + 1, len(data.inputs))
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
        "extreme_sizes": [data.inputs.name(i) for h, w, i in sizes if min(h, w) < 8 or max(h, w) > 10 * min(h, w)],
        "annotations": _by_kind(data.problems),
    }
    # A text may well have two translations, and a short one come twice.
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
    """Images of each class, or showing it; nothing where the targets are no classes."""
    if data.kind == "label":
        counts = torch.bincount(data.targets, minlength=len(data.classes)).tolist()
    elif data.kind == "labels":
        counts = data.targets.sum(0).long().tolist()
    else:
        return {}
    return dict(zip(data.classes, counts, strict=True))


def _numbers(data: Data) -> dict[str, dict[str, float]]:
    """Smallest, mean and largest of each number of the targets."""
    if data.kind != "numbers":
        return {}
    names = data.target_names or [str(k) for k in range(data.targets.shape[1])]
    columns = zip(names, data.targets.double().unbind(1), strict=True)
    return {n: {"smallest": float(v.min()), "mean": float(v.mean()), "largest": float(v.max())} for n, v in columns}


def _by_kind(problems: list[Problem]) -> dict[str, list[dict[str, str]]]:
    """What the source found wrong with annotations, kind by kind."""
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    for found in problems:
        groups[found["kind"]].append({"image": found["image"], "error": found["error"]})
    return dict(groups)


def _names(data: Data, groups: list[list[int]]) -> list[list[str]]:
    names = (lambda i: f"image {i}") if isinstance(data.inputs, ImageArray) else data.inputs.name
    return [[names(i) for i in group] for group in groups]


def _alike(classes: list[str]) -> list[list[str]]:
    """Class names that differ only in case, spaces, dashes or a plural s: often one class written twice."""
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
