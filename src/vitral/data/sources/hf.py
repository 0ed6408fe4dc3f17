"""A Hugging Face data set: a folder that `save_to_disk` wrote, or `hf-hub:owner/name`, fetched by `datasets`.

Images stay encoded in its files and are decoded by `data/images`, like any other.
"""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.config import HUB
from vitral.data.images import AtLeast, ImageMode, read_image
from vitral.data.sources.base import Data
from vitral.data.sources.table import LABEL_COLUMNS, SPLIT_NAMES, sorted_classes
from vitral.errors import DataError, ImageError


@dataclass(frozen=True)
class HubImages:
    """The image column of one or more parts, one after the other."""

    parts: list[Any]
    column: str
    starts: list[int]

    def __len__(self) -> int:
        return self.starts[-1]

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Decode one image."""
        part = bisect_right(self.starts, index) - 1
        cell = self.parts[part][index - self.starts[part]][self.column]
        if cell is None:
            raise ImageError(f"{self.name(index)} is missing.")
        return read_image(cell["bytes"] or cell["path"], mode, at_least)

    def name(self, index: int) -> str:
        """Number of the row."""
        return f"row {index}"


def is_hf_folder(path: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def load_hf(source: str, image_column: str | None = None, label_column: str | None = None) -> Data:
    """Open the data set and find its columns of images and of labels."""
    parts = _open(source)
    first = next(iter(parts.values()))
    kinds = {name: type(feature).__name__ for name, feature in first.features.items()}
    image = _choose(source, kinds, image_column, [n for n, kind in kinds.items() if kind == "Image"], "image")
    labels = [n for n, kind in kinds.items() if kind == "ClassLabel"] or [n for n in LABEL_COLUMNS if n in kinds]
    label = _choose(source, kinds, label_column, labels, "label")
    values = {part: list(data[label]) for part, data in parts.items()}
    if kinds[label] == "ClassLabel":
        classes = list(first.features[label].names)
        targets = [value for column in values.values() for value in column]
    else:
        words = [str(value) for column in values.values() for value in column]
        classes = sorted_classes(words)
        numbers = {name: i for i, name in enumerate(classes)}
        targets = [numbers[word] for word in words]
    bad = next((value for value in targets if value is None or not 0 <= value < len(classes)), 0)
    if bad:
        raise DataError(f"{source}: column {label} holds {bad}, which is no class; remove those rows.")
    from datasets import Image  # pyright: ignore

    starts = [0, *accumulate(len(data) for data in parts.values())]
    encoded = [data.select_columns([image]).cast_column(image, Image(decode=False)) for data in parts.values()]
    splits = {part: torch.arange(a, b) for part, a, b in zip(parts, starts, starts[1:], strict=False)}
    name = source.removeprefix(HUB).rstrip("/").rpartition("/")[2]
    return Data(name, HubImages(encoded, image, starts), torch.tensor(targets), classes, splits)


def _open(source: str) -> dict[str, Any]:
    """The parts by our names for them, train first."""
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
        raise DataError(f"{source} has no training part, only {', '.join(parts) or 'nothing'}.")
    return known


def _choose(source: str, kinds: dict[str, str], asked: str | None, found: list[str], what: str) -> str:
    if asked in kinds or (not asked and len(found) == 1):
        return asked or found[0]
    problem = f"no column {asked!r}" if asked else f"{len(found) or 'no'} {what} columns"
    raise DataError(f"{source} has {problem}, its columns are {', '.join(kinds)}; name it with --{what}-column.")
