"""Texts with a tag for each word, from CoNLL files, tables and JSONL. Words are what stands between spaces."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.data.sources.base import Data, Texts, problem, problem_notes, read_text
from vitral.data.sources.table import IMAGE_COLUMNS, SPLIT_COLUMNS, find_column, read_parquet
from vitral.data.text import Line, read_lines, split_by_names
from vitral.data.tokenizer import tidy
from vitral.errors import DataError

CONLL = ".conll"
TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
WORD_COLUMNS = ("words", "tokens", "text")
TAG_COLUMNS = ("tags",)
DOCSTART = "-DOCSTART-"
"""Begins a document in CoNLL files; a word of no text."""


def make_tags(name: str, pairs: Sequence[tuple[str, str]], splits: dict[str, Tensor], **more: Any) -> Data:
    """A data set of texts, each with the tags of its words; both have spaces between them."""
    return Data(
        name=name,
        inputs=Texts([tidy(words) for words, _ in pairs]),
        targets=torch.zeros(len(pairs), 0),
        classes=[],
        splits=splits,
        kind="tags",
        texts=[tidy(tags) for _, tags in pairs],
        **more,
    )


def load_tags(path: Path, text_column: str | None = None, label_column: str | None = None) -> Data:
    """Read a table (CSV, TSV, Parquet, JSONL) of texts and their tags, or else a CoNLL file.

    The cells of a table are two strings or two lists. Texts that do not have a tag for each word are left out and
    listed. A column of splits is heeded.
    """
    table = path.suffix.lower() in TABLES
    rows = list(_read_table(path, text_column, label_column) if table else _read_conll(path))
    if not rows:
        raise DataError(f"{path} has no text; it should hold words with their tags.")
    wrong = [_wrong(row) for row in rows]
    good = [row for row, error in zip(rows, wrong, strict=True) if not error]
    problems = [problem(*error) for error in wrong if error]
    if not good:
        raise DataError(f"{path} has no text with a tag for each word; the first problem: {problems[0]['error']}.")
    return make_tags(
        path.stem,
        [(" ".join(row.words), " ".join(row.tags)) for row in good],
        split_by_names(path, "of splits", [row.part for row in good]),
        notes=problem_notes(problems),
        problems=problems,
    )


def is_tags(path: Path) -> bool:
    """Whether a CSV, TSV or JSONL file is of words and tags, by the names of its columns.

    Where the texts are only called text, the cells decide: most must have as many tags as words, and some several.
    """
    try:
        first = next(read_lines(path, headed=True), None)
        columns = set(first.cells) if first else set()
        words = columns & set(WORD_COLUMNS)
        if columns & set(IMAGE_COLUMNS) or not columns & set(TAG_COLUMNS) or not words:
            return False
        rows = list(_read_table(path, None, None)) if words == {"text"} else []
    except DataError:  # whoever reads it next says why it cannot be read
        return False
    fit = [len(row.words) for row in rows if not _wrong(row)]
    return words != {"text"} or (2 * len(fit) > len(rows) and max(fit) > 1)


@dataclass(frozen=True)
class _Row:
    """The words and tags of a text, where it stands, and of which part it is; or why it cannot be read."""

    place: str
    words: list[str]
    tags: list[str]
    part: str = "train"
    error: str = ""


def _wrong(row: _Row) -> tuple[str, str, str] | None:
    """What is wrong with a row: kind, place, error."""
    if row.error:
        return "bad_line", row.place, row.error
    if not row.words:
        return "empty_source", row.place, "the text is empty"
    if len(row.words) != len(row.tags):
        return "bad_target", row.place, f"it has {len(row.words)} words and {len(row.tags)} tags"
    odd = next((word for word in (*row.words, *row.tags) if len(word.split()) != 1), None)
    return None if odd is None else ("bad_target", row.place, f"{odd!r} is not one word")


# ---- CoNLL ----


def _read_conll(path: Path) -> Iterator[_Row]:
    """A word and its tag on a line, in the first and the last column; an empty line ends a text."""
    lines = enumerate(read_text(path).split("\n"), start=1)
    for between, group in groupby(lines, lambda line: not line[1].strip() or line[1].startswith(DOCSTART)):
        if not between:
            yield _sentence(path, list(group))


def _sentence(path: Path, lines: list[tuple[int, str]]) -> _Row:
    cells = [[tidy(cell) for cell in line.split("\t" if "\t" in line else None)] for _, line in lines]
    bare = next((number for (number, _), row in zip(lines, cells, strict=True) if len(row) < 2), None)
    error = f"line {bare} has a word and no tag" if bare else ""
    return _Row(f"{path} line {lines[0][0]}", [row[0] for row in cells], [row[-1] for row in cells], error=error)


# ---- tables ----


def _read_table(path: Path, text_column: str | None, label_column: str | None) -> Iterator[_Row]:
    lines = _parquet_lines(path) if path.suffix.lower() == ".parquet" else list(read_lines(path, headed=True))
    columns = list(next((line.cells for line in lines if not line.error), {}))
    text = find_column(path, columns, text_column, WORD_COLUMNS, "text", "--text-column")
    tags = find_column(path, columns, label_column, TAG_COLUMNS, "tag", "--label-column")
    split = next((name for name in columns if name.lower() in SPLIT_COLUMNS), None)
    for line in lines:
        yield _row(f"{path} line {line.number}", line, text, tags, split)


def _parquet_lines(path: Path) -> list[Line]:
    columns = read_parquet(path)
    rows = zip(*columns.values(), strict=True)
    return [Line(number, dict(zip(columns, row, strict=True))) for number, row in enumerate(rows, start=1)]


def _row(place: str, line: Line, text: str, tags: str, split: str | None) -> _Row:
    absent = [name for name in (text, tags) if name not in line.cells]
    if line.error or absent:
        return _Row(place, [], [], error=line.error or f"it has no {absent[0]}")
    part = line.cells.get(split, "").strip() if split else "train"
    return _Row(place, _items(line.cells[text]), _items(line.cells[tags]), part)


def _items(cell: str) -> list[str]:
    """The words of a cell: what stands between spaces, or the items of a list."""
    try:
        value = json.loads(cell) if cell.startswith("[") else None
    except ValueError:
        value = None
    return [tidy(str(item)) for item in value] if isinstance(value, list) else tidy(cell).split()
