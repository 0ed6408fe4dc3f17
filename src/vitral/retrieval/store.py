"""What an index keeps, and what may keep it: `Store`, which is a folder (folder.py) or tables of a database
(postgres.py). Nothing here knows how vectors come about."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from torch import Tensor

from vitral.config import NearestKind
from vitral.errors import CheckpointError

FORMAT_VERSION = 1


@dataclass(frozen=True)
class Item:
    """What a vector is of: a file by its path below the folder, with size and time; or a text."""

    name: str
    size: int = 0
    mtime_ns: int = 0


@dataclass(frozen=True)
class Rows:
    """Vectors (n, D) of length 1, and what each is of."""

    vectors: Tensor
    items: list[Item]


@dataclass(frozen=True)
class Embedding:
    """How vectors were made: two are comparable only where all of this is the same."""

    model: str
    """Fingerprint of architecture, weights and preprocessing."""
    features: str
    """Which vector of the model: `pooled` is what its head reads."""
    width: int
    """D."""
    normalized: bool = True
    """Whether each was brought to length 1."""


@dataclass(frozen=True)
class Manifest:
    """What is known of an index beside its rows."""

    what: str
    """`image` or `text`."""
    folder: str
    """What was indexed: a folder, or a file of texts."""
    source: str
    """Where the model came from."""
    embedding: Embedding
    unreadable: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Files that could not be read: size, time, and why."""
    nearest: NearestKind = "exact"
    """How neighbours are found."""
    asked: NearestKind | None = None
    """How they are to be, if that was ever said; else their number decides."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"format_version": FORMAT_VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, document: dict[str, Any], place: str) -> "Manifest":
        """Check what was read at a place."""
        try:
            document = dict(document)
            version = document.pop("format_version")
            if version != FORMAT_VERSION:
                raise CheckpointError(f"{place} is an index of format {version}, this vitral reads {FORMAT_VERSION}.")
            embedding = Embedding(**document.pop("embedding"))
            unreadable = {name: (int(s), int(t), str(why)) for name, (s, t, why) in document.pop("unreadable").items()}
            return cls(embedding=embedding, unreadable=unreadable, **document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{place} is damaged ({error}); make the index anew.") from error


class Store(Protocol):
    """Where an index is kept. A change is there whole or not at all, whenever its writer is killed."""

    place: str
    """Where that is, as people are told it."""
    title: str
    """Its last part."""

    def open(self) -> Manifest:
        """Take hold of the index that is there, to read and to search in it."""
        ...

    def __len__(self) -> int:
        """How many rows there were when it was opened."""
        ...

    def items(self) -> list[Item]:
        """What the rows are of, the oldest first."""
        ...

    def rows(self) -> Rows:
        """All of them."""
        ...

    def search(self, queries: Tensor, k: int) -> list[list[tuple[float, Item]]]:
        """(m, D), of length 1 -> for each the k nearest or all there are, with their cosines, which fall."""
        ...

    def writing(self) -> AbstractContextManager[Manifest | None]:
        """Nobody else writes meanwhile; gives the index that is there, opened, if there is one."""
        ...

    def require(self, nearest: NearestKind, width: int) -> None:
        """Raise if neighbours of such vectors cannot be found so here."""
        ...

    def refuses(self, item: Item) -> str:
        """Why an item cannot be kept; nothing if it can."""
        ...

    def create(self, manifest: Manifest) -> None:
        """Make an empty index where there is none."""
        ...

    def add(self, manifest: Manifest, items: Sequence[Item], vectors: Sequence[Tensor]) -> None:
        """Write down more rows, and the manifest as it is with them."""
        ...

    def remove(self, manifest: Manifest, items: Sequence[Item]) -> None:
        """Take rows away, and write down the manifest as it is without them."""
        ...

    def finish(self, manifest: Manifest) -> None:
        """After the last change: make ready what `manifest.nearest` searches with, and write down the manifest."""
        ...
