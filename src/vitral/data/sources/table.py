"""A CSV or Parquet file with a column of image paths and a column of labels, and perhaps one of splits."""

import csv
from collections.abc import Iterable
from pathlib import Path

import torch

from vitral.data.sources.base import Data, ImageFiles
from vitral.errors import DataError

IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "image_path")
LABEL_COLUMNS = ("label", "class", "target", "category")
SPLIT_COLUMNS = ("split", "part", "set")
SPLIT_NAMES = {"valid": "val", "validation": "val", "training": "train", "testing": "test"}


def load_table(path: Path, image_column: str | None = None, label_column: str | None = None) -> Data:
    """Read the table; paths in it are relative to where it lies."""
    columns = _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    image = _column(path, columns, image_column, IMAGE_COLUMNS, "image", "--image-column")
    label = _column(path, columns, label_column, LABEL_COLUMNS, "label", "--label-column")
    split = next((name for name in SPLIT_COLUMNS if name in columns), None)
    paths = [path.parent / value for value in columns[image]]
    missing = [str(p) for p in paths if not p.is_file()]
    if missing:
        raise DataError(f"{path} names {len(missing)} images that do not exist, the first: {missing[0]}.")
    classes = sorted_classes(columns[label])
    if len(classes) < 2:
        raise DataError(f"{path}: column {label} has only one class ({classes[0] if classes else 'none'}).")
    numbers = {name: i for i, name in enumerate(classes)}
    targets = torch.tensor([numbers[value] for value in columns[label]])
    parts = [SPLIT_NAMES.get(v.lower(), v.lower()) for v in columns[split]] if split else ["train"] * len(paths)
    unknown = sorted(set(parts) - {"train", "val", "test"})
    if unknown or "train" not in parts:
        raise DataError(f"{path}: column {split} must hold train, val and test, got {', '.join(sorted(set(parts)))}.")
    splits = {
        part: torch.tensor([i for i, p in enumerate(parts) if p == part])
        for part in ("train", "val", "test")
        if part in parts
    }
    return Data(path.stem, ImageFiles(paths), targets, classes, splits)


def sorted_classes(words: Iterable[str]) -> list[str]:
    """The different words, in order; whole numbers by their value."""
    return sorted(set(words), key=lambda v: (int(v), "") if v.lstrip("-").isdigit() else (0, v))


def _column(
    path: Path, columns: dict[str, list[str]], asked: str | None, usual: tuple[str, ...], what: str, flag: str
) -> str:
    name = asked or next((name for name in usual if name in columns), None)
    if name is None or name not in columns:
        wanted = f"column {asked!r}" if asked else f"{what} column ({', '.join(usual)})"
        raise DataError(f"{path} has no {wanted}, its columns are {', '.join(columns)}; name it with {flag}.")
    return name


def _read_csv(path: Path) -> dict[str, list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}).") from error
    if not rows:
        raise DataError(f"{path} has no rows.")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise DataError(f"{path}: line {number} has not as many fields as the first line.")
    return {name: [row[name] for row in rows] for name in rows[0]}


def _read_parquet(path: Path) -> dict[str, list[str]]:
    try:
        from pyarrow import parquet  # pyright: ignore
    except ImportError:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'vitral[data]'.") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}).") from error
    return {name: [str(value) for value in table[name].to_pylist()] for name in table.column_names}
