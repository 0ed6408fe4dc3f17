"""A Hugging Face data set: a folder written by `save_to_disk`, or `hf-hub:owner/name`, fetched by `datasets`.

Images stay encoded in its files and are decoded by `data/images`, like all others.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.config import HUB
from vitral.data.images import AtLeast, ImageMode, read_image
from vitral.data.sources.base import Data, problem, problem_notes
from vitral.data.sources.table import LABEL_COLUMNS, SPLIT_NAMES, Read, read_targets
from vitral.errors import DataError, ImageError


@dataclass(frozen=True)
class HubImages:
    """The image columns of one or more splits, concatenated."""

    parts: list[Any]
    column: str
    starts: list[int]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Decode one image."""
        cell = self._cell(index)
        return read_image(cell["bytes"] or cell["path"], mode, at_least)

    def name(self, index: int) -> str:
        """The row number."""
        return f"row {index}"

    def content(self, index: int) -> bytes:
        """The encoded image."""
        cell = self._cell(index)
        return cell["bytes"] or Path(cell["path"]).read_bytes()

    def _cell(self, index: int) -> dict[str, Any]:
        part = bisect_right(self.starts, index) - 1
        cell = self.parts[part][index - self.starts[part]][self.column]
        if cell is None:
            raise ImageError(f"{self.name(index)} is missing.")
        return cell


def is_hf_folder(path: Path) -> bool:
    """Whether this folder was written by `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def load_hf(
    source: str, image_column: str | None = None, label_column: str | None = None, task: str | None = None
) -> Data:
    """Open the data set and find its image and label columns; rows without a usable label are dropped and counted."""
    parts = _open(source)
    first = next(iter(parts.values()))
    kinds = {name: type(feature).__name__ for name, feature in first.features.items()}
    image = _choose(source, kinds, image_column, [n for n, kind in kinds.items() if kind == "Image"], "image")
    labels = [n for n, kind in kinds.items() if kind == "ClassLabel"] or [n for n in LABEL_COLUMNS if n in kinds]
    label = _choose(source, kinds, label_column, labels, "label")
    values = [value for data in parts.values() for value in data[label]]
    if kinds[label] == "ClassLabel":
        read = _read_class_labels(label, values, list(first.features[label].names))
    else:
        read = read_targets(source, {label: ["" if value is None else str(value) for value in values]}, task)
    good = [row for row in range(len(values)) if row not in read.bad]
    problems = [problem("bad_target", f"{source} row {row}", error) for row, error in read.bad.items()]
    if not good:
        raise DataError(f"{source} has no row with a usable target; the first: {problems[0]['error']}.")
    from datasets import Image  # pyright: ignore

    starts = [0, *accumulate(len(data) for data in parts.values())]
    kept = [[row - a for row in good if a <= row < b] for a, b in pairwise(starts)]
    encoded = [
        data.select_columns([image]).cast_column(image, Image(decode=False)).select(rows)
        for data, rows in zip(parts.values(), kept, strict=True)
    ]
    starts = [0, *accumulate(map(len, kept))]
    splits = {part: torch.arange(a, b) for part, a, b in zip(parts, starts, starts[1:], strict=False)}
    return Data(
        name=source.removeprefix(HUB).rstrip("/").rpartition("/")[2],
        inputs=HubImages(encoded, image, starts),
        targets=read.targets[good],
        classes=read.classes,
        splits=splits,
        notes=[f"column {image}: images", *read.notes, *problem_notes(problems)],
        kind=read.kind,
        target_names=[label] if read.kind == "numbers" else None,
        texts=[read.texts[row] for row in good] if read.texts else None,
        problems=problems,
    )


def _read_class_labels(column: str, values: list[int | None], classes: list[str]) -> Read:
    """Class numbers, whose names the data set declares."""
    bad = {i: f"{column} is {v}, not a class" for i, v in enumerate(values) if v is None or not 0 <= v < len(classes)}
    targets = torch.tensor([0 if i in bad or v is None else v for i, v in enumerate(values)])
    note = f"column {column}: {len(classes)} classes, because the data set declares them"
    return Read("label", targets, classes, bad, [note])


def _open(source: str) -> dict[str, Any]:
    """The splits under the names train, val and test, train first."""
    try:
        import datasets  # pyright: ignore
    except ImportError:
        raise DataError(f"{source} is a Hugging Face data set; to read it: pip install 'vitral[data]'.") from None
    datasets.disable_progress_bars()
    try:
        hub = source.startswith(HUB)
        found = datasets.load_dataset(source.removeprefix(HUB)) if hub else datasets.load_from_disk(source)
    except Exception as error:  # the library raises whatever its readers and the network raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{source} cannot be opened as a Hugging Face data set ({reason}).") from error
    parts = {str(part): data for part, data in found.items()} if isinstance(found, dict) else {"train": found}
    named = {SPLIT_NAMES.get(part, part): data for part, data in parts.items()}
    known = {part: named[part] for part in ("train", "val", "test") if part in named and len(named[part])}
    if "train" not in known:
        raise DataError(f"{source} has no training split, only {', '.join(parts) or 'nothing'}.")
    return known


def _choose(source: str, kinds: dict[str, str], asked: str | None, found: list[str], what: str) -> str:
    if asked in kinds or (not asked and len(found) == 1):
        return asked or found[0]
    problem = f"no column {asked!r}" if asked else f"{len(found) or 'no'} {what} columns"
    raise DataError(f"{source} has {problem}, its columns are {', '.join(kinds)}; name it with --{what}-column.")
