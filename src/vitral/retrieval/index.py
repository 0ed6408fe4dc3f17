"""`Index`: a folder of images or a file of texts as vectors, to be asked which are like another."""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.config import Indexing, NearestKind
from vitral.data.inputs import ImageLike
from vitral.data.sources.folder import list_images
from vitral.errors import CheckpointError, DataError, InputError
from vitral.inference.cache import digest_weights
from vitral.inference.predictor import Predictor
from vitral.retrieval import store
from vitral.retrieval.nearest import Approximate, Exact, Nearest, near_groups
from vitral.retrieval.store import Embedding, Item, Manifest, Part

LARGE = 500_000
"""Vectors from which on neighbours are not looked for one by one, unless it is asked for."""


@dataclass(frozen=True)
class Match:
    """One neighbour of a query."""

    name: str
    """The path of the file, or the text."""
    score: float
    """The cosine: 1 for the same direction."""
    item: str
    """The path below the folder that was indexed, or the text: what can be told to others."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": self.name, "score": round(self.score, 6)}


@dataclass(frozen=True)
class Change:
    """What building or bringing up to date did."""

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

    def __init__(self, path: str | Path, *, source: str | Path | None = None) -> None:
        self.path = Path(path)
        self.manifest = store.read_manifest(self.path)
        self.source = source if source is not None else self.manifest.source
        parts = store.read_parts(self.path, self.manifest)
        self.items = [item for part in parts for item in part.items]
        empty = torch.zeros(0, self.manifest.embedding.width)
        self.vectors = torch.cat([empty, *(part.vectors for part in parts)])

    def __len__(self) -> int:
        return len(self.items)

    @classmethod
    def build(
        cls, source: str | Path | Predictor, folder: str | Path, out: str | Path, *,
        watch: Callable[[Iterable[Any], int], Iterable[Any]] = lambda steps, total: steps, **options: Any,
    ) -> tuple["Index", Change]:  # fmt: skip
        """Make an index, or bring one up to date: only files that are new or changed are looked at.

        `folder` is a folder of images at any depth; for a model that reads texts, a file with one on each line.
        `options` are fields of `vitral.config.Indexing`; `watch` wraps what is computed, for a progress bar.
        """
        predictor = source if isinstance(source, Predictor) else Predictor(source)
        change = _build(predictor, Path(folder), Path(out), Indexing.from_dict(options), watch)
        index = cls(out)
        index.__dict__["predictor"] = predictor
        return index, change

    @cached_property
    def predictor(self) -> Predictor:
        """The model that the index was made with."""
        if not self.source:
            raise InputError(f"{self.path} was made with a model that has no file; say where it is now: source=...")
        predictor = Predictor(self.source)
        if fingerprint(predictor) != self.manifest.embedding.model:
            raise InputError(
                f"{self.path} was made with other weights or preprocessing than {self.source} has now; vectors of two "
                "models cannot be compared. Make the index anew, or name the model it was made with."
            )
        return predictor

    @cached_property
    def nearest(self) -> Nearest:
        """What finds neighbours."""
        file = _nearest_file(self.path, self.manifest)
        if file is None or not file.exists():  # not yet, while the index is brought up to date
            return Exact(self.vectors)
        return Approximate.read(file, self.vectors)

    def name(self, row: int) -> str:
        """The path or text of an item."""
        name = self.items[row].name
        return str(Path(self.manifest.folder) / name) if self.manifest.what == "image" else name

    def search(self, query: ImageLike | Sequence[ImageLike], top_k: int = 10) -> list[list[Match]]:
        """The `top_k` nearest of an image or text, of several, or of every image in a folder: a list for each."""
        return self.search_vectors(self.predictor.embed(query), top_k)

    def search_vectors(self, vectors: Tensor, top_k: int = 10) -> list[list[Match]]:
        """The nearest of vectors (m, D) that the same model gave, of any length."""
        if top_k < 1:
            raise InputError(f"top_k must be at least 1, got {top_k}.")
        if vectors.ndim != 2 or vectors.shape[1] != self.vectors.shape[1]:
            raise InputError(f"queries must be (m, {self.vectors.shape[1]}), got {tuple(vectors.shape)}.")
        k = min(top_k, len(self))
        if not k or not len(vectors):
            return [[] for _ in vectors]
        scores, rows = self.nearest.search(F.normalize(vectors.float(), dim=1), k)
        return [
            [Match(self.name(i), s, self.items[i].name) for s, i in zip(some, places, strict=True) if i >= 0]
            for some, places in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    def duplicates(self, least: float) -> list[list[str]]:
        """Groups of items that hang together by cosines of at least `least`, the largest group first."""
        if not 0 < least <= 1:
            raise InputError(f"the least cosine of duplicates must be above 0 and at most 1, got {least:g}.")
        return [[self.name(i) for i in group] for group in near_groups(self.vectors, least)]


def fingerprint(predictor: Predictor) -> str:
    """What tells the vectors of a model from others': its architecture, its weights, and how it reads."""
    reads = predictor.inputs.identity()
    return hashlib.sha256(f"{digest_weights(predictor.embedder)} {json.dumps(reads)}".encode()).hexdigest()


def _nearest_file(path: Path, manifest: Manifest) -> Path | None:
    """Where a structure for these very parts lies; None for an exact search."""
    if manifest.nearest == "exact":
        return None
    stamp = "-".join(part.removesuffix(".safetensors").lstrip("0") for part in (manifest.parts[0], manifest.parts[-1]))
    return path / f"{manifest.nearest}-{stamp}.faiss"


# ---- building ----


def _build(
    predictor: Predictor, folder: Path, out: Path, o: Indexing,
    watch: Callable[[Iterable[Any], int], Iterable[Any]],
) -> Change:  # fmt: skip
    found = list(_list_items(predictor, folder))
    if not found:
        raise DataError(f"{folder} has no {predictor.inputs.what}s in it.")
    out.mkdir(parents=True, exist_ok=True)
    with store.locked(out):
        manifest = _begin(predictor, folder, out)
        store.remove_orphans(out, manifest)
        parts = store.read_parts(out, manifest)
        wanted = set(found)
        kept = [_only(part, wanted) for part in parts]
        there = {item for part in kept for item in part.items}
        removed = sum(len(part.items) for part in parts) - len(there)
        known = {
            Item(name, size, time_): why for name, (size, time_, why) in manifest.unreadable.items()
        }  # not tried again until they change
        unreadable = {item: why for item, why in known.items() if item in wanted}
        missing = [item for item in found if item not in there and item not in unreadable]
        added, started = 0, time.monotonic()
        saved = started
        fresh: list[tuple[Item, Tensor]] = []
        manifest = replace(manifest, unreadable=_listed(unreadable))
        if removed:
            for old in out.glob("*.faiss"):  # of vectors that are no more
                old.unlink()
            manifest = store.rewrite(out, manifest, kept)
        embedded = predictor.embed_each(_inputs(predictor, folder, missing))
        for item, (vector, error) in zip(missing, watch(embedded, len(missing)), strict=True):
            if vector is None:
                unreadable[item] = error
            else:
                fresh.append((item, F.normalize(vector.float(), dim=0)))
            if time.monotonic() - saved >= o.save_seconds:
                manifest, saved = _save(out, manifest, fresh, unreadable), time.monotonic()
                added += len(fresh)
                fresh = []
        manifest = _save(out, manifest, fresh, unreadable)
        added += len(fresh)
        seconds = time.monotonic() - started
        _finish(out, manifest, o.nearest)
        errors = {item.name: why for item, why in unreadable.items()}
        return Change(added, len(there), removed, errors, seconds)


def _begin(predictor: Predictor, folder: Path, out: Path) -> Manifest:
    """The manifest that is there, if it is for the same model and folder; a new one where there is none."""
    what = predictor.inputs.what
    model = fingerprint(predictor)
    place = str(folder.resolve())
    if not store.is_index(out):
        if any(file.name != ".lock" and not file.name.endswith(".tmp") for file in out.iterdir()):
            raise CheckpointError(f"{out} is not empty and not an index; give another --out.")
        width = predictor.embedder.config.pooled_dim
        manifest = Manifest(what, place, _lasting(predictor.source), Embedding(model, "pooled", width))
        store.write_manifest(out, manifest)
        return manifest
    manifest = store.read_manifest(out)
    if manifest.embedding.model != model:
        raise CheckpointError(
            f"{out} was made with another model, or one that reads images in another way; give another --out."
        )
    if manifest.folder != place:
        raise CheckpointError(f"{out} is an index of {manifest.folder}, not of {place}; give another --out.")
    return replace(manifest, source=_lasting(predictor.source))


def _lasting(source: str) -> str:
    """A source that is found again from another folder."""
    return str(Path(source).resolve()) if source and Path(source).exists() else source


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


def _only(part: Part, wanted: set[Item]) -> Part:
    """The items of a part that are still there, unchanged."""
    rows = [i for i, item in enumerate(part.items) if item in wanted]
    return Part(part.vectors[rows], [part.items[i] for i in rows]) if len(rows) < len(part.items) else part


def _save(out: Path, manifest: Manifest, fresh: Sequence[tuple[Item, Tensor]], unreadable: dict[Item, str]) -> Manifest:
    """Write down what was computed since the last time."""
    manifest = replace(manifest, unreadable=_listed(unreadable))
    if fresh:
        part = Part(torch.stack([vector for _, vector in fresh]), [item for item, _ in fresh])
        manifest = replace(manifest, parts=(*manifest.parts, store.write_part(out, part)))
    store.write_manifest(out, manifest)
    return manifest


def _listed(unreadable: dict[Item, str]) -> dict[str, tuple[int, int, str]]:
    return {item.name: (item.size, item.mtime_ns, why) for item, why in unreadable.items()}


def _finish(out: Path, manifest: Manifest, asked: NearestKind | None) -> None:
    """Few parts instead of many, and what finds neighbours among many vectors."""
    parts = store.read_parts(out, manifest)
    count = sum(len(part.items) for part in parts)
    nearest = asked or ("exact" if count < LARGE else "hnsw")
    manifest = replace(manifest, nearest=nearest if count else "exact")
    if sum(len(part.items) < store.PART_ITEMS for part in parts) > 1:
        manifest = store.rewrite(out, manifest, parts)
    file = _nearest_file(out, manifest)
    if file is not None and not file.exists():
        Approximate.of(torch.cat([part.vectors for part in parts]), nearest).write(file)
    store.write_manifest(out, manifest)
    for old in out.glob("*.faiss"):
        if old != file:
            old.unlink()
