"""Texts and pairs of texts from files, how they become tokens, and batches of similar lengths."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.config import TextOptions
from vitral.data.sources.base import Data, Problem, Texts, problem, problem_notes, read_text
from vitral.data.sources.table import (
    CAPTION_COLUMNS,
    IMAGE_COLUMNS,
    LABEL_COLUMNS,
    LABELS_COLUMNS,
    SPLIT_COLUMNS,
    SPLIT_NAMES,
    TEXT_COLUMNS,
)
from vitral.data.targets import View
from vitral.data.tokenizer import BPE, Characters, Tokenizer, pad, tidy
from vitral.errors import DataError

USUAL = (
    ("source", "target"), ("src", "tgt"), ("src", "trg"), ("en", "it"), ("english", "italian"), ("input", "output"),
    ("question", "answer"), ("prompt", "completion"), ("text", "target"), ("text", "translation"), ("text", "summary"),
    ("text", "label"),
)  # fmt: skip
"""Columns that are found by themselves, the first pair that is there."""
KNOWN = {*IMAGE_COLUMNS, *TEXT_COLUMNS, *LABEL_COLUMNS, *LABELS_COLUMNS, *CAPTION_COLUMNS}
"""Names that tell a header."""
PARTS = ("train", "val", "test")


def make_pairs(name: str, pairs: Sequence[tuple[str, str]], splits: dict[str, Tensor], **more: Any) -> Data:
    """A data set of texts, each with what it is to become."""
    return Data(
        name=name,
        inputs=Texts([source for source, _ in pairs]),
        targets=torch.zeros(len(pairs), 0),
        classes=[],
        splits=splits,
        kind="none",
        texts=[target for _, target in pairs],
        **more,
    )


# ---- from a file ----


def load_pairs(path: Path, source_column: str | None = None, target_column: str | None = None) -> Data:
    """Read a CSV, TSV or JSONL file; columns with usual names are found, and a column of splits too.

    A TSV file knows no quotes, and if it has two columns it may do without a header. Lines that cannot be read, or have
    an empty source or target, are left out and listed.
    """
    lines = list(read_lines(path))
    if not lines:
        raise DataError(f"{path} has no lines; it should hold a pair of texts on each.")
    source, target, split = _columns(path, lines, source_column, target_column)
    notes = [] if lines[0].header else ["the file has no header: its first column is the source, its second the target"]
    read: list[tuple[str, str, str]] = []
    problems: list[Problem] = []
    for line in lines:
        found = _pair(line, source, target, split)
        if isinstance(found, tuple):
            read.append(found)
        else:
            place = f"{path} line {line.number}"
            problems.append(problem(found.kind, place, found.error))
    if not read:
        raise DataError(f"{path} has no usable pair of texts; the first problem is {problems[0]['error']}.")
    notes += problem_notes(problems)
    splits = split_by_names(path, split, [part for _, _, part in read])
    pairs = [(source, target) for source, target, _ in read]
    return make_pairs(path.stem, pairs, splits, notes=notes, problems=problems)


def split_by_names(path: Path, column: str | None, names: Sequence[str]) -> dict[str, Tensor]:
    """The rows of each part, from what the column of splits holds."""
    parts = [SPLIT_NAMES.get(name.lower(), name.lower()) for name in names]
    if set(parts) - set(PARTS) or "train" not in parts:
        got = ", ".join(sorted(part or "nothing" for part in set(parts)))
        raise DataError(f"{path}: column {column} must hold train, val and test, got {got}; mend it or leave it out.")
    rows = {part: [i for i, p in enumerate(parts) if p == part] for part in PARTS if part in parts}
    return {part: torch.tensor(numbers) for part, numbers in rows.items()}


def is_pairs(path: Path, source_column: str | None, target_column: str | None) -> bool:
    """Whether a table is of pairs of texts, by its columns: not of images, and not of texts with labels."""
    asked = [name for name in (source_column, target_column) if name is not None]
    first = next(read_lines(path, headed=bool(asked)), None)
    if first is None or not first.header:
        return first is not None
    found = _usual(asked if len(asked) == 2 else list(first.cells))
    if found is None or set(first.cells) & set(IMAGE_COLUMNS):
        return False
    return not (found[0].lower() in TEXT_COLUMNS and found[1].lower() in LABEL_COLUMNS)


@dataclass(frozen=True)
class Line:
    """The cells of a line by the names of their columns, or by their places; or why they cannot be read."""

    number: int
    cells: dict[str, str]
    error: str = ""
    header: bool = True


@dataclass(frozen=True)
class _Bad:
    kind: str
    error: str


def _pair(line: Line, source: str, target: str, split: str | None) -> tuple[str, str, str] | _Bad:
    """Source, target and split of a line."""
    if line.error:
        return _Bad("bad_line", line.error)
    absent = [name for name in (source, target) if name not in line.cells]
    if absent:
        return _Bad("bad_line", f"it has no {absent[0]}")
    texts = tidy(line.cells[source]), tidy(line.cells[target])
    if not texts[0]:
        return _Bad("empty_source", f"{source} is empty")
    if not texts[1]:
        return _Bad("empty_target", f"{target} is empty")
    return *texts, line.cells.get(split, "").strip() if split else "train"


def read_lines(path: Path, headed: bool = False) -> Iterator[Line]:
    """The lines of a CSV, TSV or JSONL file; unless it is `headed`, a TSV of two columns may do without a header."""
    tsv = partial(_read_tsv, headed=headed)
    readers = {".csv": _read_csv, ".tsv": tsv, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl}
    if path.suffix.lower() not in readers:
        kind = path.suffix or "no suffix"
        raise DataError(f"{path} is a file of an unknown kind ({kind}); give a CSV, TSV or JSONL file.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            yield from readers[path.suffix.lower()](file)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error}); give a text file in UTF-8.") from error


def _read_csv(file: Iterator[str]) -> Iterator[Line]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    for row in reader:
        if row:
            yield _line(reader.line_num, header, row)


def _read_tsv(file: Iterator[str], headed: bool) -> Iterator[Line]:
    rows = [(n, line.rstrip("\r\n").split("\t")) for n, line in enumerate(file, start=1) if line.strip()]
    if not rows:
        return
    header = [name.strip() for name in rows[0][1]]
    named = headed or len(header) != 2 or _usual(header) is not None or bool(set(header) & KNOWN)
    for number, row in rows[1:] if named else rows:
        yield _line(number, header if named else ["1", "2"], row, named)


def _line(number: int, header: list[str], row: list[str], named: bool = True) -> Line:
    error = "" if len(row) == len(header) else f"it has {len(row)} fields, and {len(header)} are expected"
    return Line(number, dict(zip(header, row, strict=False)), error, named)


def _read_jsonl(file: Iterator[str]) -> Iterator[Line]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            yield Line(number, {}, f"it is no JSON ({error})")
            continue
        if isinstance(value, dict):
            cells = {name: v if isinstance(v, str) else json.dumps(v) for name, v in value.items() if v is not None}
            yield Line(number, dict.fromkeys(value, "") | cells)
        else:
            yield Line(number, {}, "it is no JSON object")


def _usual(columns: Sequence[str]) -> tuple[str, str] | None:
    """The columns with usual names, however they are capitalised."""
    plain = {name.lower(): name for name in columns}
    return next(((plain[a], plain[b]) for a, b in USUAL if a in plain and b in plain), None)


def _columns(path: Path, lines: list[Line], source: str | None, target: str | None) -> tuple[str, str, str | None]:
    """The columns of source, target and split; one that is asked for is paired with its usual partner or the last."""
    first = next((line for line in lines if not line.error), lines[0])
    columns = list(first.cells)
    for asked, flag in ((source, "--text-column"), (target, "--label-column")):
        if asked is not None and asked not in columns:
            has = f"its columns are {', '.join(columns)}" if first.header else "it has no header"
            raise DataError(f"{path} has no column {asked!r}, {has}; name another with {flag}.")
    split = next((name for name in columns if name.lower() in SPLIT_COLUMNS and name not in (source, target)), None)
    if not first.header:
        return source or "1", target or "2", None
    if source is None and target is None:
        source, target = _usual(columns) or (None, None)
    elif source is None or target is None:
        asked = source or target
        others = [name for name in columns if name not in (asked, split)]
        known = [name for name in others if asked and _usual([asked, name])]
        other = others[0] if len(others) == 1 else known[0] if known else None
        source, target = source or other, target or other
    if source is None or target is None:
        raise DataError(
            f"{path} has no columns with usual names ({', '.join(map('/'.join, USUAL[:4]))} ...), its columns are "
            f"{', '.join(columns) or 'none'}; name them with --text-column and --label-column."
        )
    return source, target, split


PIECE = 240
"""Characters of a piece of running text, at most."""


def load_running_text(path: Path) -> Data:
    """Read a text file, to be gone on with: its paragraphs, or its lines where no line is empty, cut where too long.

    A target of 1 says that a piece is the end of its paragraph, 0 that it goes on.
    """
    text = read_text(path).replace("\r\n", "\n")
    mark = "\n\n" if "\n\n" in text.strip() else "\n"
    pieces = [piece for part in text.split(mark) if part.strip() for piece in _pieces(part.strip("\n"))]
    if len(pieces) < 2:
        raise DataError(f"{path} is too short to learn from; it should hold at least two lines or paragraphs.")
    return Data(
        name=path.stem,
        inputs=Texts([piece for piece, _ in pieces]),
        targets=torch.tensor([[float(end)] for _, end in pieces]),
        classes=[],
        splits={"train": torch.arange(len(pieces))},
        kind="none",
        notes=[f"each {'paragraph' if mark != chr(10) else 'line'} is a text of its own"],
    )


def _pieces(text: str, most: int = PIECE) -> Iterator[tuple[str, bool]]:
    """A text in pieces, cut after spaces where there are any, and whether each is the last."""
    while len(text) > most:
        cut = max(text.rfind(" ", 0, most), text.rfind("\n", 0, most)) + 1 or most
        yield text[:cut], False
        text = text[cut:]
    yield text, True


def cut_running_text(data: Data, tokenizer: Tokenizer, most: int) -> Data:
    """Pieces of at most so many tokens; a piece stays in the part that it was in."""
    bad = too_long(tokenizer, data.lines, most)
    if not bad.any():
        return data
    lines, ends = [], []
    splits: dict[str, list[int]] = {part: [] for part in data.splits}
    for part, indices in data.splits.items():
        for i in indices.tolist():
            # A token is at least a character.
            for piece, last in _pieces(data.lines[i], most) if bad[i] else [(data.lines[i], True)]:
                splits[part].append(len(lines))
                lines.append(piece)
                ends.append([float(last) * data.targets[i, 0].item()])
    parts = {part: torch.tensor(numbers, dtype=torch.long) for part, numbers in splits.items()}
    return replace(data, inputs=Texts(lines), targets=torch.tensor(ends), splits=parts)


# ---- tokens ----


@dataclass(frozen=True)
class Tokens:
    """Targets that are tokens: `row(i)` gives those of sample i."""

    count: int
    row: Callable[[int], list[int]]

    def __len__(self) -> int:
        return self.count

    def take(self, index: int, view: View, size: tuple[int, int]) -> Tensor:
        """(T,): text stays what it is wherever the picture goes."""
        return torch.tensor(self.row(index))

    def stack(self, targets: list[Tensor]) -> Tensor:
        """(B, T), PAD after the ends."""
        return pad([target.tolist() for target in targets])[0]

    def warp(self, batch: Tensor, maps: Tensor | None) -> Tensor:
        """Nothing moves."""
        return batch


def tokenized(data: Data, o: TextOptions) -> Data:
    """The data with tokenizers trained on the texts of its training part; as it is where it has no texts."""
    train = data.splits["train"].tolist()
    texts = {
        "source": data.lines if isinstance(data.inputs, Texts) else None,
        "target": data.texts if data.kind != "tags" else None,
    }
    made = {what: train_tokenizer([each[i] for i in train], o) for what, each in texts.items() if each is not None}
    return replace(data, tokenizers=made) if made else data


def train_tokenizer(texts: Sequence[str], o: TextOptions) -> Characters | BPE:
    """A tokenizer of the kind that is asked for."""
    return Characters.train(texts) if o.tokenizer == "characters" else BPE.train(texts, o.vocab_size)


LIMIT = 256
"""Tokens of the longest text, unless more are asked for."""


def longest(tokenizer: Tokenizer, texts: Sequence[str], marks: int) -> int:
    """Tokens to allow for: a quarter more than the longest of the texts has, and as many marks such as EOS."""
    most = 0
    for text in sorted(texts, key=len, reverse=True):
        if len(text) <= most:  # a token is at least a character
            break
        most = max(most, len(tokenizer.encode(text)))
    return min(most + most // 4 + marks, LIMIT)


def reading_length(data: Data, o: TextOptions) -> int:
    """Tokens of the longest text that is read, SOS and EOS among them."""
    train = [data.lines[i] for i in data.splits["train"].tolist()]
    return o.max_length or longest(data.tokenizers["source"], train, 2)


def too_long(tokenizer: Tokenizer, texts: Sequence[str], most: int) -> Tensor:
    """(N,) True for texts of more than `most` tokens."""
    return torch.tensor([len(text) > most and len(tokenizer.encode(text)) > most for text in texts])


# ---- batches ----

POOL = 64
"""Batches that are sorted by length together: more pad less, and mix less."""


def bucketed(
    lengths: Sequence[int] | Tensor, batch_size: int, seed: int, epoch: int, whole: bool = False
) -> list[Tensor]:
    """Batches of the numbers of samples, similar lengths together, every sample once, in an order the seed decides.

    The samples of an epoch are shuffled, sorted by length in pools, cut into batches, and the batches shuffled. Only
    one batch may be smaller than the others; or, if they must be `whole`, the samples that it would hold are left out:
    any of them, not the longest.
    """
    if batch_size < 1:
        raise DataError(f"a batch must hold at least one sample, got a batch size of {batch_size}; ask for 1 or more.")
    lengths = torch.as_tensor(lengths)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator)
    order = order[: len(order) // batch_size * batch_size] if whole else order
    batches: list[Tensor] = []
    for pool in order.split(POOL * batch_size):
        batches += pool[lengths[pool].argsort(stable=True)].split(batch_size)
    batches = [b[torch.randperm(len(b), generator=generator)] for b in batches if len(b)]  # no half is the longer
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
