"""Tables (CSV, TSV, JSONL, Parquet): a column of images or texts, target columns, optionally a split column.

Every column is reported in `Data.notes`: how it was read, why, and which option changes that.
"""

import csv
import json
import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.sources.base import (
    Data,
    EncodedImages,
    ImageFiles,
    Images,
    Kind,
    Problem,
    Texts,
    problem,
    problem_notes,
)
from vitral.data.tokenizer import tidy
from vitral.errors import DataError

IMAGE_COLUMNS = ("image", "path", "file", "filename", "file_name", "image_path")
TEXT_COLUMNS = ("text", "sentence", "review", "comment", "message", "title")
CAPTION_COLUMNS = ("caption", "description", "transcription")
LABEL_COLUMNS = ("label", "class", "target", "category")
LABELS_COLUMNS = ("labels", "tags")
"""Columns in which a comma always separates two labels."""
CLASS_COLUMNS = ("label", "class", "category")
"""The only columns in which integers are classes."""
MOST_INTEGER_CLASSES = 20
"""A column with more distinct integers holds regression targets."""
INTEGER = re.compile(r"[+-]?\d+")
MISSING = {"", "nan", "NaN", "NAN", "None", "null", "NULL", "NA", "<NA>", "N/A", "n/a"}
"""Cells without a value: never a class."""
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
    """Read a table of images, or of texts if it has a text column and no image column.

    The target type follows from `task` ("regress", "multilabel", "caption", any other name for one class per row).
    Without a task it follows from the cells (see `read_targets`), or from a column named caption.

    Args:
        path: The file. Image paths in it are relative to its folder.
        image_column: Column of image paths, by default the first with a usual name.
        label_column: Column of targets; several are separated by commas.
        task: Name of the task, or None to infer the target type.
        text_column: Column of texts; makes this a table of texts.

    Raises:
        DataError: A column is missing, or no row is usable.
    """
    table = READERS[path.suffix.lower()](path)
    columns = table.columns
    if not table.rows:
        why = f"has no usable row; the first problem: {table.problems[0]['error']}" if table.problems else "has no rows"
        raise DataError(f"{path} {why}.")
    files: list[bytes | Path] = []
    of_texts = text_column is not None or (image_column is None and has_texts(columns))
    asked = [label_column] if not label_column or label_column in columns else label_column.split(",")
    if task is None and label_column is None and not any(name in columns for name in LABEL_COLUMNS + LABELS_COLUMNS):
        task = "caption" if any(name in columns for name in CAPTION_COLUMNS) and not of_texts else None
    usual = (*CAPTION_COLUMNS, *TEXT_COLUMNS) if task == "caption" else (*LABEL_COLUMNS, *LABELS_COLUMNS)
    split = next((name for name in SPLIT_COLUMNS if name in columns), None)
    if of_texts:
        source = find_column(path, columns, text_column, TEXT_COLUMNS, "text", "--text-column")
        names: list[Any] = [f"{path} row {row}" for row in table.rows]
        lines: list[str] = [tidy(value) for value in columns[source]]
        there = [bool(line) for line in lines]
        missing = [problem("empty_source", name, f"{source} is empty") for name in compress(names, map(not_, there))]
        notes = [_source_note(source, "texts to read", text_column, "--text-column")]
    else:
        source = find_column(path, columns, image_column, IMAGE_COLUMNS, "image", "--image-column")
        files = [cell if isinstance(cell, bytes) else path.parent / cell for cell in columns[source]]
        names = [
            f"{path} row {row}" if isinstance(f, bytes) or not columns[source][i] else f
            for i, (row, f) in enumerate(zip(table.rows, files, strict=True))
        ]
        lines = []
        there = [isinstance(f, bytes) or f.is_file() for f in files]
        missing = [problem("missing_image", p, "does not exist") for p in compress(names, map(not_, there))]
        files = list(compress(files, there))
        notes = [_source_note(source, "images", image_column, "--image-column")]
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
    read = read_targets(path, {name: list(compress(columns[name], there)) for name in labels}, task)
    bad = [problem("bad_target", names[row], error) for row, error in read.bad.items()]
    good = [row for row in range(len(names)) if row not in read.bad]
    if not good:
        raise DataError(f"{path} has no row with a usable target; the first: {bad[0]['error']}.")
    problems = [*table.problems, *missing, *bad]
    splits = {
        part: torch.tensor([i for i, row in enumerate(good) if parts[row] == part], dtype=torch.long)
        for part in ("train", "val", "test")
        if part in given
    }
    notes += read.notes
    notes += [f"column {split}: the split of each row, because of its name"] * (split is not None)
    unused = [name for name in columns if name not in (source, split, *labels)]
    notes += [f"not used: {', '.join(unused)} (--label-column NAME chooses the target)"] * bool(unused)
    return Data(
        name=path.stem,
        inputs=Texts([lines[row] for row in good]) if of_texts else _images([(files[row], names[row]) for row in good]),
        targets=read.targets[good],
        classes=read.classes,
        splits=splits,
        notes=[*notes, *problem_notes(problems)],
        kind=read.kind,
        target_names=labels if read.kind == "numbers" else None,
        texts=[read.texts[row] for row in good] if read.texts else None,
        problems=problems,
    )


def _source_note(column: str, what: str, asked: str | None, flag: str) -> str:
    return f"column {column}: {what}, " + (
        f"as {flag} asks" if asked else f"because of its name; {flag} NAME changes it"
    )


def _images(rows: list[tuple[bytes | Path, Any]]) -> Images:
    """Image files, or images stored in the table itself."""
    paths = [file for file, _ in rows if isinstance(file, Path)]
    if len(paths) == len(rows):
        return ImageFiles(paths)
    return EncodedImages([file for file, _ in rows], [str(name) for _, name in rows])


# ---- targets ----


@dataclass(frozen=True)
class Read:
    """The targets of all rows, and why some rows have none."""

    kind: Kind
    targets: Tensor
    classes: list[str]
    bad: dict[int, str] = field(default_factory=dict)
    """Error by row."""
    notes: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """The text to write for each row."""


def has_texts(columns: Collection[str]) -> bool:
    """Whether a table holds texts rather than images, judged by its column names."""
    return not any(name in columns for name in IMAGE_COLUMNS) and any(name in columns for name in TEXT_COLUMNS)


def is_missing(cell: str) -> bool:
    """Whether a cell has no value: empty, NaN, None, null or NA."""
    return cell.strip() in MISSING


def read_targets(path: str | Path, cells: dict[str, list[str]], task: str | None) -> Read:
    """Interpret the target columns, and note which rule applied and how to override it.

    Without a task, numbers are classes only if they are integers with at most `MOST_INTEGER_CLASSES` distinct values in
    one of `CLASS_COLUMNS`, and regression targets otherwise; several columns of 0 and 1 are one class each; cells with
    separators hold several labels; everything else is one class per row. Missing cells are never a class.
    """
    named = ", ".join(cells)
    if task == "caption":
        return _read_captions(named, next(iter(cells.values())))
    why = f"as --task {task} asks" if task else f"because {reason}" if (reason := _why_numbers(cells)) else ""
    if task == "regress" or (task is None and why):
        override = "; --task classify reads it as classes" if task is None and len(cells) == 1 else ""
        what = "a number to estimate" if len(cells) == 1 else "numbers to estimate"
        return _read_numbers(cells, [f"column {named}: {what}, {why}{override}"])
    if len(cells) > 1:
        if task in (None, "multilabel") and all(
            v.strip().lower() in SWITCH for column in cells.values() for v in column if not is_missing(v)
        ):
            return _read_switches(cells)
        raise DataError(f"{path}: columns {named} must hold 0 and 1, or numbers, to be used together.")
    values = next(iter(cells.values()))
    separator = _separator(values, comma_separates=named in LABELS_COLUMNS)
    if task == "multilabel" or (task is None and separator):
        return _read_lists(path, named, values, separator)
    return _read_classes(path, named, values, why)


def _read_classes(path: str | Path, column: str, values: list[str], why: str) -> Read:
    """One class per row."""
    bad = {
        i: f"{column} is {value.strip() or 'empty'}, not a class" for i, value in enumerate(values) if is_missing(value)
    }
    filled = [value for value in values if not is_missing(value)]
    classes = sorted_classes(filled)
    if len(classes) < 2:
        raise DataError(f"{path}: column {column} has only one class ({classes[0] if classes else 'none'}).")
    numbers = {name: i for i, name in enumerate(classes)}
    if not why and all(INTEGER.fullmatch(name.strip()) for name in classes):
        why = (
            f"because it is named {column} and holds at most {MOST_INTEGER_CLASSES} distinct integers; "
            f"--task regress reads it as a number"
        )
    notes = [f"column {column}: {len(classes)} classes, {why or 'because it holds words'}"]
    if len(classes) > max(len(filled) // 2, 20):
        many = f"{len(classes)} classes for {len(filled)} rows"
        notes.append(f"{many}; --task translate or caption learns to write texts")
    return Read("label", torch.tensor([numbers.get(value, 0) for value in values]), classes, bad, notes)


def _read_captions(column: str, values: list[str]) -> Read:
    texts = [tidy(value) for value in values]
    bad = {i: f"{column} is {text or 'empty'}, not a text" for i, text in enumerate(texts) if is_missing(text)}
    return Read("none", torch.zeros(len(texts), 0), [], bad, [f"column {column}: texts to write"], texts)


def _number(cell: str) -> float | None:
    """A cell as a number, NaN if it is missing, None if it is a word."""
    try:
        return math.nan if is_missing(cell) else float(cell)
    except ValueError:
        return None


def _why_numbers(cells: dict[str, list[str]]) -> str:
    """Why the columns hold regression targets; empty if they hold words or classes."""
    filled = [cell.strip() for column in cells.values() for cell in column if not is_missing(cell)]
    values = [_number(cell) for cell in filled]
    finite = {value for value in values if value is not None and math.isfinite(value)}
    if not finite or None in values:
        return ""
    if len(cells) > 1:
        return "" if finite <= {0.0, 1.0} else "they hold numbers other than 0 and 1"
    column = next(iter(cells))
    fraction = next((cell for cell in filled if not INTEGER.fullmatch(cell)), None)
    if fraction is not None:
        return f"it holds numbers that are not written as integers, such as {fraction}"
    if column.casefold() not in CLASS_COLUMNS:
        return f"it holds integers and is not named {', '.join(CLASS_COLUMNS[:-1])} or {CLASS_COLUMNS[-1]}"
    if len(finite) > MOST_INTEGER_CLASSES:
        return f"it holds {len(finite):,} distinct integers, more than {MOST_INTEGER_CLASSES}"
    return ""


def _read_numbers(cells: dict[str, list[str]], notes: list[str]) -> Read:
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
    return Read("numbers", targets, [], bad, notes)


def _read_switches(cells: dict[str, list[str]]) -> Read:
    """One column per class, 1 if it applies."""
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
    note = (
        f"columns {', '.join(cells)}: one class each, because they hold 0 and 1; --task regress reads them as numbers"
    )
    return Read("labels", targets, list(cells), bad, [note])


def _separator(values: list[str], comma_separates: bool) -> str | None:
    """The separator of the labels in a cell: ; or |, "[" for lists in brackets, or a comma that is not part of a name.

    Unless the column's name decides it, a comma separates only if that yields no more distinct labels than there are
    distinct cells: "cat,dog" next to "dog", but not "tench, Tinca tinca" next to "kite, bird of prey".
    """
    filled = {v.strip() for v in values if not is_missing(v)}
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


def _read_lists(path: str | Path, column: str, values: list[str], separator: str | None) -> Read:
    """Several labels per cell; an empty cell is an image without any label."""
    separator = separator or ("," if any("," in v for v in values) else None)
    labels = [_words(value, separator) for value in values]
    bad = {
        i: f"{column} is {values[i].strip()}, not a class" for i, ws in enumerate(labels) if any(map(is_missing, ws))
    }
    classes = sorted_classes(word for i, words in enumerate(labels) if i not in bad for word in words)
    if not classes:
        raise DataError(f"{path}: column {column} has no label in any row.")
    numbers = {name: i for i, name in enumerate(classes)}
    targets = torch.zeros(len(values), len(classes))
    for i, words in enumerate(labels):
        if i not in bad:
            targets[i, [numbers[word] for word in words]] = 1
    how = "lists in brackets" if separator == "[" else f"labels separated by {separator}" if separator else "one label"
    empty = sum(not words for words in labels)
    none = f"; {empty:,} empty cells are rows without a label" if empty else ""
    note = f"column {column}: several labels per row, {how}{none}; --task classify reads each cell as one class"
    return Read("labels", targets, classes, bad, [note])


def sorted_classes(words: Iterable[str]) -> list[str]:
    """The distinct words in order; integers by their value."""
    return sorted(set(words), key=lambda v: (int(v), "") if v.lstrip("-").isdigit() else (0, v))


def find_column(
    path: Path, columns: Collection[str], asked: str | None, usual: tuple[str, ...], what: str, flag: str
) -> str:
    """The requested column, or else the first with a usual name."""
    name = asked or next((name for name in usual if name in columns), None)
    if name is None or name not in columns:
        wanted = f"column {asked!r}" if asked else f"{what} column ({', '.join(usual)})"
        other = ", or a column of texts with --text-column" if what == "image" else ""
        raise DataError(f"{path} has no {wanted}, its columns are {', '.join(columns)}; name it with {flag}{other}.")
    return name


# ---- files ----


@dataclass(frozen=True)
class Table:
    """The readable rows of a file by column, their numbers in the file from 1, and a problem for each other row."""

    columns: dict[str, list[Any]]
    rows: Sequence[int]
    problems: list[Problem] = field(default_factory=list)


def _read_csv(path: Path) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            lines = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}).") from error
    header = list(reader.fieldnames or [])
    bad = [line for line, row in lines if None in row or None in row.values()]
    good = [(number, row) for number, (line, row) in enumerate(lines, start=1) if line not in set(bad)]
    problems = [problem("bad_line", f"{path} line {line}", f"it does not have {len(header)} fields") for line in bad]
    return Table({name: [row[name] for _, row in good] for name in header}, [number for number, _ in good], problems)


def read_parquet(path: Path) -> dict[str, list[Any]]:
    """The columns of a Parquet file: lists as JSON, images stored in cells as bytes, nulls as empty strings."""
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
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value
    if isinstance(value, dict) and value.keys() >= {"bytes", "path"}:  # as Hugging Face writes images
        return value["bytes"] or value["path"] or ""
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list) else str(value)


def _read_parquet(path: Path) -> Table:
    columns = read_parquet(path)
    return Table(columns, range(1, len(next(iter(columns.values()), [])) + 1))


def _read_json_lines(path: Path) -> Table:
    from vitral.data.text import read_lines  # which imports this module

    lines = list(read_lines(path))
    names = next((set(line.cells) for line in lines if not line.error), set())
    errors = [
        line.error or ("" if set(line.cells) == names else "its names differ from the first line") for line in lines
    ]
    good = [
        (number, line.cells) for number, (line, error) in enumerate(zip(lines, errors, strict=True), 1) if not error
    ]
    bad = [(line.number, error) for line, error in zip(lines, errors, strict=True) if error]
    problems = [problem("bad_line", f"{path} line {number}", error) for number, error in bad]
    columns = {name: [cells[name] for _, cells in good] for name in (good[0][1] if good else ())}
    return Table(columns, [number for number, _ in good], problems)


READERS = {
    ".parquet": _read_parquet,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
}
