"""`Index`: a folder of images or a file of texts as vectors, to be asked which are like another."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.config import Indexing, NearestKind
from vitral.data.inputs import ImageLike
from vitral.data.sources.folder import list_images
from vitral.display import MOST_LINES, MOST_ROWS, Table, Tabular, gallery_html, html_facts, short, short_list
from vitral.errors import CheckpointError, DataError, InputError, VitralError
from vitral.inference.cache import digest_weights
from vitral.inference.predictor import Predictor
from vitral.options import IndexingDict
from vitral.retrieval.folder import Folder
from vitral.retrieval.nearest import near_groups
from vitral.retrieval.postgres import Postgres, is_address
from vitral.retrieval.store import Embedding, Item, Manifest, Rows, Store
from vitral.signatures import list_options
from vitral.weights.pretrained import is_pretrained

PAIRS = 2000
"""Random pairs by which it is judged whether a model tells items apart."""
LARGE = 500_000
"""Vectors from which on neighbours are not looked for one by one, unless it is asked for."""

WHERE = "say where it is now: --model of vitral search, --index-model of vitral serve, or source=... from Python."


@dataclass(frozen=True, repr=False)
class Match:
    """One neighbour of a query."""

    name: str
    """The path of the file, or the text."""
    score: float
    """The cosine: 1 for the same direction."""
    item: str
    """The path below the folder that was indexed, or the text; unlike `name` it does not reveal the folder."""

    def __repr__(self) -> str:
        return f"Match({short(self.item)!r}, {self.score:.4f})"

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": self.name, "score": round(self.score, 6)}


class Matches(list[Match], Tabular):
    """The neighbours of one query, the nearest first: a list, and a table."""

    def __repr__(self) -> str:
        return short_list(self)

    def table(self) -> Table:
        """Name and score of each."""
        return ("name", "score"), [[match.name, match.score] for match in self]

    def _repr_html_(self) -> str:
        if not all(os.path.isfile(match.name) for match in self):
            return super()._repr_html_()
        return gallery_html((match.name, f"{match.score:.3f} {Path(match.name).name}") for match in self[:MOST_ROWS])


class SearchResults(list[Matches], Tabular):
    """The neighbours of several queries, in the order of the queries: a list of lists, and one table."""

    def __repr__(self) -> str:
        return short_list(self)

    def table(self) -> Table:
        """Number of the query, name and score of each neighbour."""
        columns, _ = Matches().table()
        return ("query", *columns), [[i, *row] for i, matches in enumerate(self) for row in matches.table()[1]]

    def _repr_html_(self) -> str:
        return "".join(f"<p>query {i}</p>{matches._repr_html_()}" for i, matches in enumerate(self[:MOST_LINES]))


@dataclass(frozen=True)
class Change:
    """Result of building or updating an index."""

    added: int
    kept: int
    removed: int
    unreadable: dict[str, str]
    """Files that could not be read, and why."""
    seconds: float
    """Time that went into new vectors."""


class Index:
    """Vectors of images or texts, to search in: `Index("photos.index").search("photo.jpg")`.

    `source` is where the model is now, if it has moved; it must be the one that the index was made with.
    """

    def __init__(self, place: str | Path, *, source: str | Path | None = None) -> None:
        self.store = store_at(place)
        self.place = self.store.place
        self.manifest = self.store.open()
        self.source = source if source is not None else self.manifest.source

    def __len__(self) -> int:
        return len(self.store)

    def __repr__(self) -> str:
        return f"Index({self.place!r}: {', '.join(map(str, self._facts().values()))})"

    def _repr_html_(self) -> str:
        return html_facts(
            f"Index {self.place}", {**self._facts(), "model": self.source, "folder": self.manifest.folder}
        )

    def _facts(self) -> dict[str, object]:
        """What it holds, in words."""
        return {
            "items": f"{len(self):,} {self.manifest.what}s",
            "vectors": f"{self.manifest.embedding.width} numbers each",
            "search": f"{self.manifest.nearest} search",
        }

    @classmethod
    @list_options
    def build(
        cls, source: str | os.PathLike[str] | Predictor, folder: str | Path, out: str | Path, *,
        watch: Callable[[Iterable[Any], int], Iterable[Any]] = lambda steps, total: steps,
        **options: Unpack[IndexingDict],
    ) -> tuple["Index", Change]:  # fmt: skip
        """Make an index, or bring one up to date: only files that are new or changed are looked at.

        `folder` is a folder of images at any depth; for a model that reads texts, a file with one on each line.
        `out` is a folder, or a table of a database: `postgresql://user@host/database?table=photos`.
        `options` are fields of `vitral.config.Indexing`; `watch` wraps what is computed, for a progress bar.
        """
        store = store_at(out)
        predictor = source if isinstance(source, Predictor) else Predictor(source)
        change = _build(predictor, Path(folder), store, Indexing.from_dict(options), watch)
        index = cls(out)
        index.predictor = predictor
        return index, change

    @cached_property
    def predictor(self) -> Predictor:
        """The model that the index was made with."""
        return self.load()

    def load(self, **running: Any) -> Predictor:
        """Load that model, with these arguments of `Predictor`, and let it look at the queries."""
        if not self.source:
            raise InputError(f"{self.place} was made with a model that has no file; {WHERE}")
        try:
            predictor = Predictor(self.source, **running)
        except VitralError as error:
            if self.source != self.manifest.source:
                raise
            told = str(error).rstrip(".")
            raise InputError(
                f"the model of {self.place} cannot be loaded ({told}); if it has moved, {WHERE}"
            ) from error
        self.use(predictor)
        return predictor

    def use(self, predictor: Predictor) -> None:
        """Let this one look at the queries; it must have the model that the index was made with."""
        if fingerprint(predictor) != self.manifest.embedding.model:
            raise InputError(
                f"{self.place} was made with other weights or preprocessing than {predictor.source or 'this model'} "
                "has now; vectors of two models cannot be compared. Make the index anew, or name the model it was made "
                "with."
            )
        self.predictor = predictor

    @cached_property
    def rows(self) -> Rows:
        """Every vector, and what it is of."""
        return self.store.rows()

    @property
    def items(self) -> list[Item]:
        """What the vectors are of."""
        return self.rows.items

    @property
    def vectors(self) -> Tensor:
        """(n, D), each of length 1."""
        return self.rows.vectors

    def search(self, query: ImageLike | Sequence[ImageLike], top_k: int = 10) -> SearchResults:
        """Find the items most similar to a query.

        Args:
            query: An image or text, several, or a folder of images.
            top_k: Neighbours of each query.

        Returns:
            A list of matches for each query, the nearest first; `to_pandas` gives all of them as one table.

        Raises:
            VitralError: A query cannot be read, or the model of the index cannot be loaded.

        Example:
            >>> Index("photos.index").search("photo.jpg", top_k=3)[0]
        """
        return self.search_vectors(self.predictor.embed(query), top_k)

    def search_each(self, queries: Iterable[ImageLike], top_k: int = 10) -> list[tuple[Matches, str]]:
        """Search for any number of images or texts; one that cannot be read has no neighbours, and an error."""
        rows = list(self.predictor.embed_each(queries))
        read = [row for row, _ in rows if row is not None]
        found = iter(self.search_vectors(torch.stack(read), top_k) if read else [])
        return [(Matches(), error) if row is None else (next(found), "") for row, error in rows]

    def search_vectors(self, vectors: Tensor, top_k: int = 10) -> SearchResults:
        """Find the items nearest to vectors (m, D) of the same model, of any length."""
        D, vectors = self.manifest.embedding.width, torch.as_tensor(vectors)
        if top_k < 1:
            raise InputError(f"top_k must be at least 1, got {top_k}.")
        if vectors.ndim != 2 or vectors.shape[1] != D:
            raise InputError(f"queries must be (m, {D}), got {tuple(vectors.shape)}.")
        if not len(vectors):
            return SearchResults()
        found = self.store.search(F.normalize(vectors.float(), dim=1), top_k)
        return SearchResults(
            Matches(Match(self._name(item), min(score, 1.0), item.name) for score, item in some) for some in found
        )

    def duplicates(self, least: float) -> list[list[str]]:
        """Groups of items that hang together by cosines of at least `least`, the largest group first."""
        check_least(least)
        return [[self._name(self.items[i]) for i in group] for group in near_groups(self.vectors, least)]

    def doubt(self, least: float) -> str:
        """Why near copies found by a cosine of `least` mean little: the model cannot tell the items apart; else empty.

        Judged by the median cosine of random pairs, which for a useful model is far below that of copies.
        """
        n = len(self.vectors)
        if n < 3:
            return ""
        one = torch.randint(n, (PAIRS,), generator=torch.Generator().manual_seed(0))
        other = (one + torch.randint(1, n, (PAIRS,), generator=torch.Generator().manual_seed(1))) % n  # never the same
        typical = float(F.cosine_similarity(self.vectors[one].float(), self.vectors[other].float()).median())
        if typical < least:
            return ""
        return (
            f"this model does not tell these {self.manifest.what}s apart: half of all pairs have a cosine of at least "
            f"{typical:.4f}, so the groups mean little. Use pretrained weights (vitral models --pretrained), or a "
            f"--least above that."
        )

    def _name(self, item: Item) -> str:
        return str(Path(self.manifest.folder) / item.name) if self.manifest.what == "image" else item.name


def check_least(least: float) -> None:
    """Raise for what cannot be the least cosine of duplicates."""
    if not 0 < least <= 1:
        raise InputError(f"the least cosine of duplicates must be above 0 and at most 1, got {least:g}.")


def store_at(place: str | Path) -> Store:
    """What keeps the index at a place."""
    return Postgres(str(place)) if is_address(place) else Folder(Path(place))


def fingerprint(predictor: Predictor) -> str:
    """What tells the vectors of a model from others': its architecture, its weights, and how it reads."""
    plain = predictor.with_model(predictor.model)  # an engine may have folded weights into others
    reads = predictor.inputs.identity()
    return hashlib.sha256(f"{digest_weights(plain.embedder)} {json.dumps(reads)}".encode()).hexdigest()


# ---- building ----


def _build(
    predictor: Predictor, folder: Path, store: Store, o: Indexing,
    watch: Callable[[Iterable[Any], int], Iterable[Any]],
) -> Change:  # fmt: skip
    found = list(_list_items(predictor, folder))
    if not found:
        raise DataError(f"{folder} has no {predictor.inputs.what}s in it.")
    model = fingerprint(predictor)  # or what is wrong with it, before there is anything
    wanted = set(found)
    with store.writing() as before:
        manifest = _begin(predictor, model, folder, store, before, wanted)
        manifest = replace(manifest, asked=o.nearest or manifest.asked)
        store.require(_nearest(manifest, len(found)), manifest.embedding.width)
        if before is None:
            store.create(manifest)
        there = set(store.items())
        gone = [item for item in there if item not in wanted]
        there -= set(gone)
        known = {
            Item(name, size, time_): why for name, (size, time_, why) in manifest.unreadable.items()
        }  # not tried again until they change
        unreadable = {item: why for item, why in known.items() if item in wanted}
        unreadable |= {item: why for item in found if (why := store.refuses(item))}
        missing = [item for item in found if item not in there and item not in unreadable]
        if gone:
            store.remove(_with(manifest, unreadable), gone)
        added, started = 0, time.monotonic()
        saved = started
        items: list[Item] = []
        vectors: list[Tensor] = []
        embedded = predictor.embed_each(_inputs(predictor, folder, missing))
        for item, (vector, error) in zip(missing, watch(embedded, len(missing)), strict=True):
            if vector is None:
                unreadable[item] = error
            else:
                items.append(item)
                vectors.append(F.normalize(vector.float(), dim=0))
            if time.monotonic() - saved >= o.save_seconds:
                store.add(_with(manifest, unreadable), items, vectors)
                added, items, vectors, saved = added + len(items), [], [], time.monotonic()
        store.add(_with(manifest, unreadable), items, vectors)
        added += len(items)
        seconds = time.monotonic() - started
        nearest = _nearest(manifest, len(there) + added)
        store.finish(replace(_with(manifest, unreadable), nearest=nearest))
        errors = {item.name: why for item, why in unreadable.items()}
        return Change(added, len(there), len(gone), errors, seconds)


def _begin(
    predictor: Predictor, model: str, folder: Path, store: Store, manifest: Manifest | None, found: set[Item]
) -> Manifest:
    """The manifest that is there, if it is for the same model and folder; a new one where there is none."""
    place = str(folder.resolve())
    if manifest is None:
        width = predictor.embedder.config.pooled_dim
        embedding = Embedding(model, "pooled", width)
        return Manifest(predictor.inputs.what, place, _lasting(predictor.source), embedding)
    if manifest.embedding.model != model:
        raise CheckpointError(
            f"{store.place} was made with another model, or one that reads images in another way; give another --out."
        )
    if manifest.folder != place and not _has_moved(manifest.folder, store, found):
        raise CheckpointError(f"{store.place} is an index of {manifest.folder}, not of {place}; give another --out.")
    return replace(manifest, folder=place, source=_lasting(predictor.source))


def _has_moved(folder: str, store: Store, found: set[Item]) -> bool:
    """Whether a folder is gone, and most of its files are among those that were found elsewhere."""
    known = store.items()
    return not Path(folder).exists() and 2 * len(found.intersection(known)) > len(known)


def _nearest(manifest: Manifest, count: int) -> NearestKind:
    """How neighbours are found among so many: as was asked for, or as before, unless they have become too many."""
    if manifest.asked:
        return manifest.asked
    return "hnsw" if manifest.nearest == "exact" and count >= LARGE else manifest.nearest


def _with(manifest: Manifest, unreadable: dict[Item, str]) -> Manifest:
    listed = {item.name: (item.size, item.mtime_ns, why) for item, why in unreadable.items()}
    return replace(manifest, unreadable=listed)


def _lasting(source: str) -> str:
    """A source that is found again from another folder."""
    path = bool(source) and not is_pretrained(source) and Path(source).exists()
    return str(Path(source).resolve()) if path else source


def _list_items(predictor: Predictor, folder: Path) -> Iterator[Item]:
    """What there is now."""
    if predictor.inputs.what == "image":
        if not folder.is_dir():
            raise DataError(f"{folder} is not a folder; give one with images in it, at any depth.")
        for file in list_images(folder):
            name = file.relative_to(folder).as_posix()
            try:
                stat = file.stat()
                yield Item(name, stat.st_size, stat.st_mtime_ns)
            except OSError:  # a link that leads nowhere: said when it is read
                yield Item(name)
        return
    if not folder.is_file():
        raise DataError(f"{folder} is not a file; this model reads texts: give a file with one on each line.")
    try:
        lines = folder.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{folder} cannot be read as UTF-8 text ({error}).") from error
    yield from (Item(line) for line in dict.fromkeys(map(str.strip, lines)) if line)


def _inputs(predictor: Predictor, folder: Path, items: Sequence[Item]) -> Iterator[ImageLike]:
    images = predictor.inputs.what == "image"
    return (folder / item.name if images else item.name for item in items)
