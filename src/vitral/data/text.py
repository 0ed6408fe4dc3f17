"""Pairs of texts, from a table or made by rule, and batches of pairs of similar lengths.

Texts stay texts here: what turns them into numbers is in tokenizer.py.
"""

import csv
import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.sources.base import Problem
from vitral.data.sources.table import SPLIT_COLUMNS, SPLIT_NAMES
from vitral.errors import DataError

USUAL = (
    ("source", "target"), ("src", "tgt"), ("src", "trg"), ("en", "it"), ("english", "italian"), ("input", "output"),
    ("question", "answer"), ("prompt", "completion"), ("text", "target"), ("text", "translation"), ("text", "summary"),
    ("text", "label"),
)  # fmt: skip
"""Columns that are found by themselves, the first pair that is there."""
TEXT_PROBLEMS = {
    "bad_line": "lines cannot be read and were left out",
    "empty_source": "lines have an empty source and were left out",
    "empty_target": "lines have an empty target and were left out",
}
"""What can be wrong with a line, and what was done about it."""
PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class TextPairs:
    """Texts, what each is to become, and the splits."""

    name: str
    sources: list[str]
    targets: list[str]
    splits: dict[str, Tensor]
    licence: str = "unknown"
    notes: list[str] = field(default_factory=list)
    """What was decided on the way, to be said to the user."""
    problems: list[Problem] = field(default_factory=list)
    """Lines that were left out: the kind (a key of TEXT_PROBLEMS), where, the error in words."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError(f"{self.name} has no pairs of texts; give at least one.")
        if len(self.sources) != len(self.targets):
            raise DataError(
                f"{self.name} has {len(self.sources)} sources but {len(self.targets)} targets; give one for each."
            )

    def __len__(self) -> int:
        return len(self.sources)

    def describe(self) -> str:
        """One line that says what this is."""
        sizes = "/".join(f"{len(v):,}" for v in self.splits.values())
        return f"{self.name}: {len(self):,} pairs of texts, split {'/'.join(self.splits)} {sizes}"

    def with_splits(self, val_fraction: float, test_fraction: float, seed: int) -> "TextPairs":
        """Cut the parts that are missing from the training part, always the same way, and never between equal sources.

        A part that would get all of the training part, or nothing, is not made.
        """
        pairs = self
        for part, fraction in (("test", test_fraction), ("val", val_fraction)):
            if part in pairs.splits or not fraction:
                continue
            members = pairs.splits["train"].tolist()
            different = list(dict.fromkeys(pairs.sources[i] for i in members))
            count = min(max(round(len(different) * fraction), 1), len(different) - 1)
            order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed))
            chosen = {different[i] for i in order[:count].tolist()}
            cut = torch.tensor([i for i in members if pairs.sources[i] in chosen], dtype=torch.long)
            if not len(cut):
                continue
            rest = torch.tensor([i for i in members if pairs.sources[i] not in chosen], dtype=torch.long)
            note = f"no {part} part was given: {len(cut):,} pairs ({fraction:.0%} of the training part) serve as one"
            splits = pairs.splits | {"train": rest, part: cut}
            pairs = replace(pairs, splits=splits, notes=[*pairs.notes, note])
        return replace(pairs, splits={part: pairs.splits[part] for part in PARTS if part in pairs.splits})


def tidy(text: str) -> str:
    """A text as all texts are read: composed accents, single spaces, none at the ends, no halves of characters."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(unicodedata.normalize("NFC", whole).split())


# ---- from a file ----


def load_pairs(path: Path, source_column: str | None = None, target_column: str | None = None) -> TextPairs:
    """Read a CSV, TSV or JSONL file; columns with usual names are found, and a column of splits too.

    A TSV file knows no quotes, and if it has two columns it may do without a header. Lines that cannot be read, or have
    an empty source or target, are left out and listed.
    """
    readers = {".csv": _read_csv, ".tsv": _read_tsv, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl}
    if path.suffix.lower() not in readers:
        kind = path.suffix or "no suffix"
        raise DataError(f"{path} is a file of an unknown kind ({kind}); give a CSV, TSV or JSONL file.")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = list(readers[path.suffix.lower()](file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({error}); give a text file in UTF-8.") from error
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
            problems.append({"kind": found.kind, "image": place, "error": f"{place}: {found.error}"})
    if not read:
        raise DataError(f"{path} has no usable pair of texts; the first problem is {problems[0]['error']}.")
    kinds = [p["kind"] for p in problems]
    notes += [f"{kinds.count(kind):,} {words}" for kind, words in TEXT_PROBLEMS.items() if kind in kinds]
    parts = [SPLIT_NAMES.get(part.lower(), part.lower()) for _, _, part in read]
    if set(parts) - set(PARTS) or "train" not in parts:
        got = ", ".join(sorted(part or "nothing" for part in set(parts)))
        raise DataError(f"{path}: column {split} must hold train, val and test, got {got}; mend it or leave it out.")
    return TextPairs(
        name=path.stem,
        sources=[source for source, _, _ in read],
        targets=[target for _, target, _ in read],
        splits={
            part: torch.tensor([i for i, p in enumerate(parts) if p == part], dtype=torch.long)
            for part in PARTS
            if part in parts
        },
        notes=notes,
        problems=problems,
    )


@dataclass(frozen=True)
class _Line:
    """The cells of a line by the names of their columns, or by their places; or why they cannot be read."""

    number: int
    cells: dict[str, str]
    error: str = ""
    header: bool = True


@dataclass(frozen=True)
class _Bad:
    kind: str
    error: str


def _pair(line: _Line, source: str, target: str, split: str | None) -> tuple[str, str, str] | _Bad:
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


def _read_csv(file: Iterator[str]) -> Iterator[_Line]:
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    for row in reader:
        if row:
            yield _line(reader.line_num, header, row)


def _read_tsv(file: Iterator[str]) -> Iterator[_Line]:
    rows = [(n, line.rstrip("\r\n").split("\t")) for n, line in enumerate(file, start=1) if line.strip()]
    if not rows:
        return
    header = [name.strip() for name in rows[0][1]]
    named = len(header) != 2 or _usual(header) is not None
    for number, row in rows[1:] if named else rows:
        yield _line(number, header if named else ["1", "2"], row, named)


def _line(number: int, header: list[str], row: list[str], named: bool = True) -> _Line:
    error = "" if len(row) == len(header) else f"it has {len(row)} fields, and {len(header)} are expected"
    return _Line(number, dict(zip(header, row, strict=False)), error, named)


def _read_jsonl(file: Iterator[str]) -> Iterator[_Line]:
    for number, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            yield _Line(number, {}, f"it is no JSON ({error})")
            continue
        if isinstance(value, dict):
            cells = {name: v if isinstance(v, str) else json.dumps(v) for name, v in value.items() if v is not None}
            yield _Line(number, dict.fromkeys(value, "") | cells)
        else:
            yield _Line(number, {}, "it is no JSON object")


def _usual(columns: Sequence[str]) -> tuple[str, str] | None:
    """The columns with usual names, however they are capitalised."""
    plain = {name.lower(): name for name in columns}
    return next(((plain[a], plain[b]) for a, b in USUAL if a in plain and b in plain), None)


def _columns(path: Path, lines: list[_Line], source: str | None, target: str | None) -> tuple[str, str, str | None]:
    """The columns of source, target and split; one that is asked for is paired with its usual partner or the last."""
    first = next((line for line in lines if not line.error), lines[0])
    columns = list(first.cells)
    for asked, flag in ((source, "--source-column"), (target, "--target-column")):
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
            f"{', '.join(columns) or 'none'}; name them with --source-column and --target-column."
        )
    return source, target, split


# ---- batches ----

POOL = 64
"""Batches that are sorted by length together: more pad less, and mix less."""


def bucketed(lengths: Sequence[int] | Tensor, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """Batches of the numbers of samples, similar lengths together, every sample once, in an order the seed decides.

    The samples of an epoch are shuffled, sorted by length in pools, cut into batches, and the batches shuffled. Only
    one batch may be smaller than the others.
    """
    if batch_size < 1:
        raise DataError(f"a batch must hold at least one sample, got a batch size of {batch_size}; ask for 1 or more.")
    lengths = torch.as_tensor(lengths)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator)
    batches: list[Tensor] = []
    for pool in order.split(POOL * batch_size):
        batches += pool[lengths[pool].argsort(stable=True)].split(batch_size)
    batches = [batch for batch in batches if len(batch)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
