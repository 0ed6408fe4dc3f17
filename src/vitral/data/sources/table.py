"""A table (CSV, TSV, Parquet) with a column of image paths or of texts, one or more of what is to be told of them, and
perhaps one of splits.
"""

import csv
import json
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.sources.base import Data, EncodedImages, ImageFiles, Images, Kind, Texts, problem, problem_notes
from vitral.data.tokenizer import tidy
from vitral.errors import DataError

IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "image_path")
TEXT_COLUMNS = ("text", "sentence", "review", "comment", "message", "title")
CAPTION_COLUMNS = ("caption", "description", "transcription")
LABEL_COLUMNS = ("label", "class", "target", "category")
LABELS_COLUMNS = ("labels", "tags")
"""A comma in their cells always stands between two labels."""
SPLIT_COLUMNS = ("split", "part", "set")
SPLIT_NAMES = {"valid": "val", "validation": "val", "training": "train", "testing": "test"}
SWITCH = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}


def load_table(
    path: Path,
    image_column: str | None = None,
    label_column: str | None = None,
    task: str | None = None,
    text_column: str | None = None,
) -> Data:
    """Read the table; paths in it are relative to where it lies. `label_column` may name several, separated by commas.

    What the targets are is told by `task` ("regress", "multilabel", "caption", or anything else for one class each), or
    else by the cells: numbers that are not whole, several labels to a cell, several columns; or by a column that is
    called caption. The table is of texts if it has a text column and no image column, or one is named.
    """
    columns: dict[str, list[Any]] = READERS[path.suffix.lower()](path)
    files: list[bytes | Path] = []
    of_texts = text_column is not None or (image_column is None and has_texts(columns))
    asked = [label_column] if not label_column or label_column in columns else label_column.split(",")
    if task is None and label_column is None and not any(name in columns for name in LABEL_COLUMNS + LABELS_COLUMNS):
        task = "caption" if any(name in columns for name in CAPTION_COLUMNS) and not of_texts else None
    usual = (*CAPTION_COLUMNS, *TEXT_COLUMNS) if task == "caption" else (*LABEL_COLUMNS, *LABELS_COLUMNS)
    split = next((name for name in SPLIT_COLUMNS if name in columns), None)
    if of_texts:
        text = find_column(path, columns, text_column, TEXT_COLUMNS, "text", "--text-column")
        names: list[Any] = [f"{path} row {row}" for row in range(1, len(columns[text]) + 1)]
        lines: list[str] = [tidy(value) for value in columns[text]]
        there = [bool(line) for line in lines]
        missing = [problem("empty_source", name, f"{text} is empty") for name in compress(names, map(not_, there))]
    else:
        image = find_column(path, columns, image_column, IMAGE_COLUMNS, "image", "--image-column")
        files = [cell if isinstance(cell, bytes) else path.parent / cell for cell in columns[image]]
        names, lines = [f"{path} row {i}" if isinstance(f, bytes) else f for i, f in enumerate(files, 1)], []
        there = [isinstance(f, bytes) or f.is_file() for f in files]
        missing = [problem("missing_image", p, "does not exist") for p in compress(names, map(not_, there))]
        files = list(compress(files, there))
    labels = [
        find_column(path, columns, name.strip() if name else None, usual, "label", "--label-column") for name in asked
    ]
    words = map(str.lower, columns[split]) if split else ["train"] * len(names)
    parts = [SPLIT_NAMES.get(word, word) for word in words]
    given = set(parts)
    if "train" not in given or not given <= {"train", "val", "test"}:
        raise DataError(f"{path}: column {split} must hold train, val and test, got {', '.join(sorted(given))}.")
    if not any(there):
        what = "texts, all of them empty" if of_texts else f"images, none of which exists; the first: {names[0]}"
        raise DataError(f"{path} names {len(names)} {what}.")
    names, parts, lines = (list(compress(column, there)) for column in (names, parts, lines or names))
    read = _read_targets(path, {name: list(compress(columns[name], there)) for name in labels}, task)
    bad = [problem("bad_target", names[row], error) for row, error in read.bad.items()]
    good = [row for row in range(len(names)) if row not in read.bad]
    if not good:
        raise DataError(f"{path} has no row with a usable target; the first: {bad[0]['error']}.")
    problems = [*missing, *bad]
    splits = {
        part: torch.tensor([i for i, row in enumerate(good) if parts[row] == part], dtype=torch.long)
        for part in ("train", "val", "test")
        if part in given
    }
    return Data(
        name=path.stem,
        inputs=Texts([lines[row] for row in good]) if of_texts else _images([(files[row], names[row]) for row in good]),
        targets=read.targets[good],
        classes=read.classes,
        splits=splits,
        notes=[*read.notes, *problem_notes(problems)],
        kind=read.kind,
        target_names=labels if read.kind == "numbers" else None,
        texts=[read.texts[row] for row in good] if read.texts else None,
        problems=problems,
    )


def _images(rows: list[tuple[bytes | Path, Any]]) -> Images:
    """Files by their paths, or what the table itself holds of them."""
    paths = [file for file, _ in rows if isinstance(file, Path)]
    if len(paths) == len(rows):
        return ImageFiles(paths)
    return EncodedImages([file for file, _ in rows], [str(name) for _, name in rows])


# ---- what the cells hold ----


@dataclass(frozen=True)
class _Read:
    """The targets of all rows, and which rows have none, and why."""

    kind: Kind
    targets: Tensor
    classes: list[str]
    bad: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What is to be written of each."""


def has_texts(columns: Collection[str]) -> bool:
    """Whether a table is of texts rather than of images, by the names of its columns."""
    return not any(name in columns for name in IMAGE_COLUMNS) and any(name in columns for name in TEXT_COLUMNS)


def _read_targets(path: Path, cells: dict[str, list[str]], task: str | None) -> _Read:
    named = ", ".join(cells)
    if task == "caption":
        return _read_captions(next(iter(cells.values())))
    if task == "regress" or (task is None and _are_numbers(cells)):
        notes = [] if task else [f"column {named} holds numbers, to be estimated; --task classify makes them classes"]
        return _read_numbers(cells, notes)
    if len(cells) > 1:
        if task in (None, "multilabel") and all(
            v.strip().lower() in SWITCH for column in cells.values() for v in column if v
        ):
            return _read_switches(cells)
        raise DataError(f"{path}: columns {named} must hold 0 and 1, or numbers, to be used together.")
    values = next(iter(cells.values()))
    separator = _separator(values, comma_separates=named in LABELS_COLUMNS)
    if task == "multilabel" or (task is None and separator):
        return _read_lists(path, named, values, separator)
    classes = sorted_classes(values)
    if len(classes) < 2:
        raise DataError(f"{path}: column {named} has only one class ({classes[0] if classes else 'none'}).")
    numbers = {name: i for i, name in enumerate(classes)}
    many = len(classes) > max(len(values) // 2, 20)
    note = f"{len(classes)} classes for {len(values)} rows; texts to write are learnt by --task translate or caption"
    return _Read("label", torch.tensor([numbers[value] for value in values]), classes, notes=[note] * many)


def _read_captions(values: list[str]) -> _Read:
    texts = [tidy(value) for value in values]
    bad = {i: "there is nothing to write" for i, text in enumerate(texts) if not text}
    return _Read("none", torch.zeros(len(texts), 0), [], bad, texts=texts)


def _number(cell: str) -> float | None:
    """A cell as a number, not a number (NaN) if it is empty, None if it is a word."""
    cell = cell.strip()
    try:
        return float(cell) if cell and cell != "None" else math.nan
    except ValueError:
        return None


def _are_numbers(cells: dict[str, list[str]]) -> bool:
    """Whether all cells are numbers, and some of one column not whole, or those of several more than 0 and 1."""
    values = [_number(cell) for column in cells.values() for cell in column]
    finite = [v for v in values if v is not None and math.isfinite(v)]
    if len(finite) == 0 or None in values:
        return False
    return any(not v.is_integer() for v in finite) or (len(cells) > 1 and not set(finite) <= {0.0, 1.0})


def _read_numbers(cells: dict[str, list[str]], notes: list[str]) -> _Read:
    bad: dict[int, str] = {}
    rows = list(zip(*cells.values(), strict=True))
    targets = torch.zeros(len(rows), len(cells))
    for i, row in enumerate(rows):
        for k, (name, cell) in enumerate(zip(cells, row, strict=True)):
            value = _number(cell)
            if value is None or not math.isfinite(value):
                bad[i] = f"{name} is {cell.strip() or 'empty'}, not a finite number"
            else:
                targets[i, k] = value
    return _Read("numbers", targets, [], bad, notes)


def _read_switches(cells: dict[str, list[str]]) -> _Read:
    """A column for each class, 1 where it applies."""
    bad: dict[int, str] = {}
    rows = list(zip(*cells.values(), strict=True))
    targets = torch.zeros(len(rows), len(cells))
    for i, row in enumerate(rows):
        for k, (name, cell) in enumerate(zip(cells, row, strict=True)):
            value = SWITCH.get(cell.strip().lower())
            if value is None:
                bad[i] = f"{name} is {cell.strip() or 'empty'}, not 0 or 1"
            else:
                targets[i, k] = value
    return _Read("labels", targets, list(cells), bad)


def _separator(values: list[str], comma_separates: bool) -> str | None:
    """What separates the labels of a cell: ; or |, "[" for lists in brackets, or a comma that is no part of a name.

    If it is not known to, a comma separates where that leaves no more different labels than there are different cells:
    "cat,dog" beside "dog", and not "tench, Tinca tinca" beside "kite, bird of prey".
    """
    filled = {v.strip() for v in values if v.strip()}
    if filled and all(v.startswith("[") and v.endswith("]") for v in filled):
        return "["
    for mark in ";|":
        if any(mark in v for v in filled):
            return mark
    few = comma_separates or len({w for v in filled for w in _words(v, ",")}) <= len(filled)
    return "," if few and any("," in v for v in filled) else None


def _words(cell: str, separator: str | None) -> list[str]:
    """The labels of a cell."""
    if separator == "[":
        inside = cell.strip().removeprefix("[").removesuffix("]")
        words = inside.split("," if "," in inside else None)
        return [w for word in words if (w := word.strip().strip("'\""))]
    return [w for word in (cell.split(separator) if separator else [cell]) if (w := word.strip())]


def _read_lists(path: Path, column: str, values: list[str], separator: str | None) -> _Read:
    """Several labels to a cell; an empty cell is an image without any."""
    separator = separator or ("," if any("," in v for v in values) else None)
    labels = [_words(value, separator) for value in values]
    classes = sorted_classes(word for words in labels for word in words)
    if not classes:
        raise DataError(f"{path}: column {column} has no label in any row.")
    numbers = {name: i for i, name in enumerate(classes)}
    targets = torch.zeros(len(values), len(classes))
    for target, words in zip(targets, labels, strict=True):
        target[[numbers[word] for word in words]] = 1
    how = "lists in brackets" if separator == "[" else f"labels separated by {separator}" if separator else "one label"
    return _Read("labels", targets, classes, notes=[f"column {column} is read as several labels to an image: {how}"])


def sorted_classes(words: Iterable[str]) -> list[str]:
    """The different words, in order; whole numbers by their value."""
    return sorted(set(words), key=lambda v: (int(v), "") if v.lstrip("-").isdigit() else (0, v))


def find_column(
    path: Path, columns: Collection[str], asked: str | None, usual: tuple[str, ...], what: str, flag: str
) -> str:
    """The column that is asked for, or else the first that has a usual name."""
    name = asked or next((name for name in usual if name in columns), None)
    if name is None or name not in columns:
        wanted = f"column {asked!r}" if asked else f"{what} column ({', '.join(usual)})"
        other = ", or a column of texts with --text-column" if what == "image" else ""
        raise DataError(f"{path} has no {wanted}, its columns are {', '.join(columns)}; name it with {flag}{other}.")
    return name


def _read_csv(path: Path) -> dict[str, list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}).") from error
    if not rows:
        raise DataError(f"{path} has no rows.")
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values():
            raise DataError(f"{path}: line {number} has not as many fields as the first line.")
    return {name: [row[name] for row in rows] for name in rows[0]}


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a Parquet file, lists in their cells as JSON, images that lie in them as bytes."""
    try:
        from pyarrow import parquet  # pyright: ignore
    except ImportError:
        raise DataError(f"{path} needs pyarrow to be read: pip install 'vitral[data]'.") from None
    try:
        table = parquet.read_table(path)
    except Exception as error:
        raise DataError(f"{path} cannot be read as Parquet ({error}).") from error
    return {name: [_cell(value) for value in table[name].to_pylist()] for name in table.column_names}


def _cell(value: Any) -> str | bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and value.keys() >= {"bytes", "path"}:  # as Hugging Face writes images
        return value["bytes"] or value["path"] or ""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list) else str(value)


def _read_json_lines(path: Path) -> dict[str, list[str]]:
    from vitral.data.text import read_lines  # which knows tables too

    lines = list(read_lines(path))
    bad = next((line for line in lines if line.error or set(line.cells) != set(lines[0].cells)), None)
    if bad is not None or not lines:
        why = f"line {bad.number}: {bad.error or 'it has other names than the first'}" if bad else "it has no lines"
        raise DataError(f"{path} cannot be read as a table ({why}).")
    return {name: [line.cells[name] for line in lines] for name in lines[0].cells}


READERS = {
    ".parquet": read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
