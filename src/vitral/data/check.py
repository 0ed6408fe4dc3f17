"""Look at every image of a data set before training: what cannot be read, what is twice there, what looks odd."""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from vitral.data.sources.base import Data, ImageFiles
from vitral.errors import ImageError


def check_data(data: Data, on_step: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """Read every image once and report; `problems` counts what somebody should look at."""
    unreadable: list[dict[str, str]] = []
    by_content: dict[str, list[int]] = defaultdict(list)
    sizes: list[tuple[int, int, int]] = []
    for i in range(len(data.images)):
        try:
            pixels = data.images.read(i, "rgb")
        except ImageError as error:
            unreadable.append({"image": data.images.name(i), "error": str(error)})
            continue
        shape = (pixels.shape[1], pixels.shape[2])
        by_content[hashlib.sha256(repr(shape).encode() + pixels.contiguous().numpy().tobytes()).hexdigest()].append(i)
        sizes.append((*shape, i))
        on_step(i + 1, len(data.images))
    part_of = {int(i): part for part, indices in data.splits.items() for i in indices}
    groups = [group for group in by_content.values() if len(group) > 1]
    leaks = [group for group in groups if len({part_of.get(i) for i in group}) > 1]
    conflicts = [group for group in groups if len({int(data.targets[i]) for i in group}) > 1]
    counts = torch.bincount(data.targets, minlength=len(data.classes)).tolist()
    balance = dict(zip(data.classes, counts, strict=True))
    report = {
        "data": data.name,
        "images": len(data.images),
        "splits": {part: len(indices) for part, indices in data.splits.items()},
        "classes": balance,
        "unreadable": unreadable,
        "duplicates": _names(data, groups),
        "leaks_between_splits": _names(data, leaks),
        "same_image_other_label": _names(data, conflicts),
        "classes_alike_but_for_case": _alike(data.classes),
        "rare_classes": [name for name, count in balance.items() if count < max(2, 0.1 * max(counts))],
        "sizes": _sizes(sizes),
        "extreme_sizes": [data.images.name(i) for h, w, i in sizes if min(h, w) < 8 or max(h, w) > 10 * min(h, w)],
    }
    kinds = ("unreadable", "duplicates", "same_image_other_label", "classes_alike_but_for_case", "extreme_sizes")
    report["problems"] = sum(len(report[kind]) for kind in kinds)
    return report


def _names(data: Data, groups: list[list[int]]) -> list[list[str]]:
    names = data.images.name if isinstance(data.images, ImageFiles) else (lambda i: f"image {i}")
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
