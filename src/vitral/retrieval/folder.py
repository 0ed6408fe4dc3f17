"""An index in a folder: `index.json`, and parts with vectors and what each is of. Whole at every moment.

Parts are only ever added; `index.json`, replaced in one step, says which of them count. So a kill leaves the old state
or the new one, and at worst a part that nothing names, which the next writer removes.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitral.config import NearestKind
from vitral.errors import CheckpointError
from vitral.retrieval.nearest import Approximate, Exact, Nearest, import_faiss
from vitral.retrieval.store import Item, Manifest, Rows
from vitral.weights.atomic import remove_orphans, save_tensors, write_atomically
from vitral.weights.files import COPIED, read_json
from vitral.weights.lock import LOCK, locked

MANIFEST = "index.json"
PART_ITEMS = 8192
"""Items of a part, once an index is finished."""


class Folder:
    """A `Store` on the disk; opened, all of it is in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place, self.title = str(path), path.name
        self._parts: tuple[str, ...] = ()  # files that count, in order
        self._sizes: list[int] = []  # how many rows each of them has, when it was read
        self._rows = Rows(torch.zeros(0, 0), [])
        self._kind: NearestKind = "exact"

    # ---- reading ----

    def open(self) -> Manifest:
        """Read the index into memory."""
        if not self._exists():
            why = f"is not an index: it has no {MANIFEST}" if self.path.exists() else "does not exist"
            raise CheckpointError(f"{self.path} {why}; make an index with vitral index.")
        document = read_json(self.path / MANIFEST)
        while True:
            self._parts, manifest = self._understand(document)
            try:
                self._rows = self._read_parts(manifest.embedding.width)
                break
            except CheckpointError:  # a writer that finishes takes away parts that counted until then
                before, document = document, read_json(self.path / MANIFEST)
                if document == before:
                    raise
        self._kind = manifest.nearest
        return manifest

    def __len__(self) -> int:
        return len(self._rows.items)

    def items(self) -> list[Item]:
        """What the rows are of."""
        return self._rows.items

    def rows(self) -> Rows:
        """All of them, as they were when the index was opened."""
        return self._rows

    def search(self, queries: Tensor, k: int) -> list[list[tuple[float, Item]]]:
        """The k nearest of each, with their cosines."""
        k = min(k, len(self))
        if not k:
            return [[] for _ in queries]
        scores, rows = self._nearest.search(queries, k)
        short = (rows < 0).any(dim=1)
        if short.any():  # cells that were looked at have fewer
            scores[short], rows[short] = Exact(self._rows.vectors).search(queries[short], k)
        return [
            [(score, self._rows.items[i]) for score, i in zip(some, places, strict=True)]
            for some, places in zip(scores.tolist(), rows.tolist(), strict=True)
        ]

    @cached_property
    def _nearest(self) -> Nearest:
        file = self._nearest_file(self._kind)
        if file is None or not file.exists():  # not yet, while the index is brought up to date
            return Exact(self._rows.vectors)
        try:
            return Approximate.read(file, self._rows.vectors)
        except CheckpointError:
            if file.exists():
                raise
            return Exact(self._rows.vectors)  # a writer took it away meanwhile

    def _exists(self) -> bool:
        return (self.path / MANIFEST).is_file()

    def _understand(self, document: dict[str, Any]) -> tuple[tuple[str, ...], Manifest]:
        """The parts that count, and the rest of `index.json`."""
        known = dict(document)
        parts = known.pop("parts", None)
        manifest = Manifest.from_dict(known, str(self.path / MANIFEST))
        if not isinstance(parts, list) or any(not isinstance(part, str) or Path(part).name != part for part in parts):
            raise CheckpointError(
                f"{self.path / MANIFEST} is damaged (its parts are not plain file names); remove {self.path}, and "
                "make the index anew."
            )
        return tuple(parts), manifest

    def _read_parts(self, width: int) -> Rows:
        vectors, items, self._sizes = [torch.zeros(0, width)], [], []
        for name in self._parts:
            try:
                tensors = load_file(self.path / name, backend=COPIED)
                some = [Item(*each) for each in json.loads(bytes(tensors["items"].numpy()))]
                if tensors["vectors"].shape != (len(some), width):
                    raise ValueError(f"{tuple(tensors['vectors'].shape)} vectors for {len(some)} items")
            except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
                raise CheckpointError(
                    f"{self.path / name} is damaged or gone ({error}); remove {self.path}, and make the index anew."
                ) from error
            vectors.append(tensors["vectors"])
            items += some
            self._sizes.append(len(some))
        return Rows(torch.cat(vectors), items)

    # ---- writing ----

    @contextmanager
    def writing(self) -> Iterator[Manifest | None]:
        """Hold the lock of the folder and read what is there; None if it is empty."""
        self._make_folder()
        with locked(self.path):
            manifest = self.open() if self._exists() else None
            if manifest:
                self._remove_orphans()
            yield manifest

    def require(self, nearest: NearestKind, width: int) -> None:
        """All but exact is by faiss."""
        if nearest != "exact":
            import_faiss()

    def refuses(self, item: Item) -> str:
        """Nothing: any name can be kept."""
        return ""

    def _make_folder(self) -> None:
        """Make it where there is none; raise for what cannot become an index."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise CheckpointError(f"{self.path} is a file, and an index is a folder; give another --out.") from None
        ours = (file.name == LOCK or file.name.endswith(".tmp") for file in self.path.iterdir())
        if not self._exists() and not all(ours):
            raise CheckpointError(f"{self.path} is not empty and not an index; give another --out.")

    def create(self, manifest: Manifest) -> None:
        """Begin in an empty folder."""
        self._write_manifest(manifest)
        self._remove_orphans()

    def add(self, manifest: Manifest, items: Sequence[Item], vectors: Sequence[Tensor]) -> None:
        """One more part."""
        if items:
            self._parts = (*self._parts, self._write_part(Rows(torch.stack(list(vectors)), list(items))))
        self._write_manifest(manifest)

    def remove(self, manifest: Manifest, items: Sequence[Item]) -> None:
        """The others, in parts of their own."""
        for old in self.path.glob("*.faiss"):  # of vectors that are no more
            old.unlink()
        gone = set(items)
        rows = [i for i, item in enumerate(self._rows.items) if item not in gone]
        self._rows = Rows(self._rows.vectors[rows], [self._rows.items[i] for i in rows])
        self._rewrite(manifest)

    def finish(self, manifest: Manifest) -> None:
        """Few parts instead of many, and what finds neighbours among many vectors."""
        self._rows = self._read_parts(manifest.embedding.width)
        kind = manifest.nearest
        graph = self._graph() if kind == "hnsw" else None  # cells are means of the vectors there are
        if len(self._parts) > -(-len(self) // PART_ITEMS):
            self._rewrite(manifest, kept=sum(1 for _ in takewhile(PART_ITEMS.__eq__, self._sizes)))
        file = self._nearest_file(kind)
        if file is not None and not file.exists():
            grown = Approximate.grown(graph, self._rows.vectors) if graph else None
            (grown or Approximate.of(self._rows.vectors, kind)).write(file)
        self._write_manifest(manifest)
        for old in self.path.glob("*.faiss"):
            if old != file:
                old.unlink()

    def _nearest_file(self, kind: NearestKind) -> Path | None:
        """Where a structure for these very parts lies; None for an exact search."""
        return None if kind == "exact" or not self._parts else self._structure(kind, self._parts[-1])

    def _graph(self) -> Path | None:
        """A graph of the first of these parts, which the others can be added to."""
        files = (self._structure("hnsw", part) for part in self._parts)
        return next((file for file in files if file.exists()), None)

    def _structure(self, kind: NearestKind, last: str) -> Path:
        """Where one for the parts up to `last` lies."""
        ends = (self._parts[0], last)
        stamp = "-".join(part.removesuffix(".safetensors").lstrip("0") for part in ends)
        return self.path / f"{kind}-{stamp}.faiss"

    def _write_manifest(self, manifest: Manifest) -> None:
        """Replace `index.json`: from here on the index is what it says."""
        document = manifest.to_dict() | {"parts": self._parts}
        write_atomically(self.path / MANIFEST, (json.dumps(document, indent=1) + "\n").encode())

    def _write_part(self, part: Rows) -> str:
        """Write a part under a name of its own; it does not count until the manifest names it."""
        numbers = [int(file.stem) for file in self.path.glob("*.safetensors") if file.stem.isdigit()]
        name = f"{max(numbers, default=0) + 1:06d}.safetensors"
        items = json.dumps([[item.name, item.size, item.mtime_ns] for item in part.items]).encode()
        tensors = {"vectors": part.vectors, "items": torch.frombuffer(bytearray(items), dtype=torch.uint8)}
        save_tensors(self.path / name, tensors)
        return name

    def _rewrite(self, manifest: Manifest, kept: int = 0) -> None:
        """The rows in full parts, of which the first are there already; files that no longer count go last."""
        vectors, items = self._rows.vectors, self._rows.items
        pieces = [slice(start, start + PART_ITEMS) for start in range(kept * PART_ITEMS, len(items), PART_ITEMS)]
        new = (self._write_part(Rows(vectors[piece], items[piece])) for piece in pieces)
        self._parts = (*self._parts[:kept], *new)
        self._write_manifest(manifest)
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        """Remove what killed processes left behind, and parts that no longer count."""
        remove_orphans(self.path)
        for file in self.path.iterdir():
            left = file.name.endswith(".tmp") or (file.suffix == ".safetensors" and file.name not in self._parts)
            if left and file.is_file():
                file.unlink(missing_ok=True)
