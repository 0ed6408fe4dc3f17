"""Tar files of samples in WebDataset's layout: files that share a name up to its first dot are one sample.

Each tar is scanned once for the offsets of its files; nothing is unpacked, and images are read in place.
"""

import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from vitral.data.images import SUFFIXES, AtLeast, ImageMode, read_image
from vitral.data.sources.base import Data, problem, problem_notes
from vitral.data.sources.table import LABEL_COLUMNS, SPLIT_NAMES, is_missing, sorted_classes
from vitral.data.tokenizer import tidy
from vitral.errors import DataError, ImageError

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
LABEL, DOCUMENT, TEXT = ".cls", ".json", ".txt"
"""Files that may accompany an image: its class, a JSON document, or its caption."""
MOST_BYTES = 2**20
"""Largest accepted size of a file that is not an image."""


@dataclass(frozen=True)
class Place:
    """The position of a file in a tar."""

    tar: Path
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """The bytes of the file."""
        with self.tar.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class TarImages:
    """Images in tar files."""

    places: Sequence[Place]

    def __len__(self) -> int:
        return len(self.places)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Decode one file."""
        try:
            return read_image(self.places[index].read(), mode, at_least)
        except (OSError, ImageError) as error:
            raise ImageError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        """The tar, and the name in it."""
        return f"{self.places[index].tar}: {self.places[index].name}"

    def content(self, index: int) -> bytes:
        """The encoded image."""
        return self.places[index].read()


@dataclass
class _Sample:
    """The files that share a name."""

    part: str
    image: Place | None = None
    beside: dict[str, Place] = field(default_factory=dict)

    def label(self) -> str | None:
        """The class: the content of .cls, or a field of .json."""
        if LABEL in self.beside:
            return _text(self.beside[LABEL]).strip() or None
        if DOCUMENT not in self.beside:
            return None
        try:
            facts = json.loads(_text(self.beside[DOCUMENT]))
        except ValueError:
            return None
        known = facts if isinstance(facts, dict) else {}
        return next((str(known[name]) for name in LABEL_COLUMNS if known.get(name) is not None), None)


def expand_shards(source: str) -> list[Path]:
    """The tar files of a source: `a-{000..009}.tar`, one tar, or a folder of tars; an empty list for other sources."""
    path = Path(source)
    if path.is_dir():
        others = (each.is_dir() or each.suffix.lower() in SUFFIXES for each in path.iterdir())
        return [] if any(others) else sorted(path.glob("*.tar"))
    if path.suffix.lower() != ".tar":
        return []
    if not (numbers := RANGE.search(source)):
        return [path]
    first, last = numbers.groups()
    names = [RANGE.sub(f"{i:0{len(first)}d}", source) for i in range(int(first), int(last) + 1)]
    if not names:
        raise DataError(f"{source} names no file: {first} comes after {last}.")
    return [Path(name) for name in names]


def load_shards(source: str, task: str | None = None) -> Data:
    """Images with their classes or captions; tars named train-..., val-... and test-... are those splits."""
    tars = expand_shards(source)
    samples: dict[tuple[Path, str], _Sample] = {}
    for tar in tars:
        for key, ending, place in _files(tar):
            sample = samples.setdefault((tar, key), _Sample(_part(tar)))
            if ending in SUFFIXES:
                sample.image = place
            elif ending in (LABEL, DOCUMENT, TEXT):
                sample.beside[ending] = place
    found = [(f"{tar}: {key}", sample) for (tar, key), sample in samples.items() if sample.image is not None]
    if not found:
        raise DataError(f"{source} has no images in it; a sample is NAME.jpg and NAME.cls, NAME.json or NAME.txt.")
    labels = [None if label is None or is_missing(label) else label for label in (s.label() for _, s in found)]
    captions = task == "caption" or (task is None and not any(labels) and any(TEXT in s.beside for _, s in found))
    texts = [tidy(_text(s.beside[TEXT])) if TEXT in s.beside else "" for _, s in found] if captions else []
    told = texts if captions else labels
    good = [i for i, each in enumerate(told) if each] or ([] if captions else list(range(len(found))))
    if captions and not good:
        raise DataError(f"{source} has no caption in it; one stands beside its image, as NAME.txt.")
    bad = sorted(set(range(len(found))) - set(good))
    problems = [problem("bad_target", found[i][0], "it has no label or text") for i in bad]
    words = [str(labels[i]) for i in good] if not captions and any(labels) else []
    classes = sorted_classes(words)
    numbers = {name: i for i, name in enumerate(classes)}
    parts = [found[i][1].part for i in good]
    splits = {
        part: torch.tensor([i for i, each in enumerate(parts) if each == part], dtype=torch.long)
        for part in ("train", "val", "test")
        if part in parts
    }
    if "train" not in splits:
        raise DataError(f"{source} has no training part, only {', '.join(splits)}.")
    return Data(
        name=RANGE.sub("", Path(source).stem).strip("-_") or "shards",
        inputs=TarImages([place for i in good if (place := found[i][1].image)]),
        targets=torch.tensor([numbers[word] for word in words]) if words else torch.zeros(len(good), 0),
        classes=classes,
        splits=splits,
        kind="label" if words else "none",
        texts=[texts[i] for i in good] if captions else None,
        notes=problem_notes(problems),
        problems=problems,
    )


def _files(tar: Path) -> Iterator[tuple[str, str, Place]]:
    """The files of a tar: the name of the sample, the extension, and the position."""
    try:
        with tarfile.open(tar, "r:") as opened:
            for member in opened:
                name = PurePosixPath(member.name)
                key, dot, ending = name.name.partition(".")
                if member.isfile() and key:  # no links, and nothing hidden
                    place = Place(tar, member.name, member.offset_data, member.size)
                    yield str(name.parent / key), dot + ending.lower(), place
    except FileNotFoundError:
        raise DataError(f"{tar} does not exist.") from None
    except (tarfile.TarError, OSError) as error:
        raise DataError(
            f"{tar} cannot be read as a plain tar file ({error}); one that is compressed must be unpacked first."
        ) from error


def _part(tar: Path) -> str:
    """The split of a tar, from the first word of its name."""
    first = re.split(r"[-_.{]", tar.name.lower())[0]
    part = SPLIT_NAMES.get(first, first)
    return part if part in ("val", "test") else "train"


def _text(place: Place) -> str:
    if place.size > MOST_BYTES:
        raise DataError(f"{place.tar}: {place.name} has {place.size:,} bytes, too many for a label or a text.")
    return place.read().decode("utf-8", "replace")
