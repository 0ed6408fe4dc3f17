"""An index on the disk: `index.json`, and parts with vectors and what each is of. Whole at every moment.

Parts are only ever added; `index.json`, replaced in one step, says which of them count. So a kill leaves the old state
or the new one, and at worst a part that nothing names, which the next writer removes.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitral.errors import CheckpointError
from vitral.weights.atomic import save_tensors, write_atomically
from vitral.weights.files import read_json

FORMAT_VERSION = 1
MANIFEST = "index.json"
PART_ITEMS = 8192
"""Items of a part, once an index is finished."""


@dataclass(frozen=True)
class Item:
    """What a vector is of: a file by its path below the folder, with size and time; or a text."""

    name: str
    size: int = 0
    mtime_ns: int = 0


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
    """What `index.json` holds."""

    what: str
    """`image` or `text`."""
    folder: str
    """What was indexed: a folder, or a file of texts."""
    source: str
    """Where the model came from."""
    embedding: Embedding
    parts: tuple[str, ...] = ()
    """Files of vectors, in order."""
    unreadable: dict[str, tuple[int, int, str]] = field(default_factory=dict)
    """Files that could not be read: size, time, and why."""
    nearest: str = "exact"


@dataclass
class Part:
    """Vectors (n, D) and what each is of."""

    vectors: Tensor
    items: list[Item]


def is_index(path: Path) -> bool:
    """Whether a folder is an index."""
    return (path / MANIFEST).is_file()


def read_manifest(path: Path) -> Manifest:
    """Read and check `index.json`."""
    if not is_index(path):
        raise CheckpointError(f"{path} is not an index: it has no {MANIFEST}; make one with vitral index.")
    document = read_json(path / MANIFEST)
    try:
        version = document.pop("format_version")
        if version != FORMAT_VERSION:
            raise CheckpointError(f"{path} is an index of format {version}, this vitral reads {FORMAT_VERSION}.")
        embedding = Embedding(**document.pop("embedding"))
        parts = tuple(document.pop("parts"))
        unreadable = {name: (int(s), int(t), str(why)) for name, (s, t, why) in document.pop("unreadable").items()}
        if any(not isinstance(part, str) or Path(part).name != part for part in parts):
            raise ValueError("a part is not a plain file name")
        return Manifest(embedding=embedding, parts=parts, unreadable=unreadable, **document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged ({error}); make the index anew.") from error


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Replace `index.json`: from here on the index is what it says."""
    document = {"format_version": FORMAT_VERSION, **asdict(manifest)}
    write_atomically(path / MANIFEST, (json.dumps(document, indent=1) + "\n").encode())


def read_parts(path: Path, manifest: Manifest) -> list[Part]:
    """Every part that counts."""
    parts = []
    for name in manifest.parts:
        try:
            tensors = load_file(path / name)
            items = [Item(*each) for each in json.loads(bytes(tensors["items"].numpy()))]
            vectors = tensors["vectors"]
            if vectors.shape != (len(items), manifest.embedding.width):
                raise ValueError(f"{tuple(vectors.shape)} vectors for {len(items)} items")
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path / name} is damaged ({error}); make the index anew.") from error
        parts.append(Part(vectors, items))
    return parts


def write_part(path: Path, part: Part) -> str:
    """Write a part under a name of its own; it does not count until the manifest names it."""
    numbers = [int(file.stem) for file in path.glob("*.safetensors") if file.stem.isdigit()]
    name = f"{max(numbers, default=0) + 1:06d}.safetensors"
    items = json.dumps([[item.name, item.size, item.mtime_ns] for item in part.items]).encode()
    tensors = {"vectors": part.vectors, "items": torch.frombuffer(bytearray(items), dtype=torch.uint8)}
    save_tensors(path / name, tensors)
    return name


def rewrite(path: Path, manifest: Manifest, parts: Sequence[Part], least: int = PART_ITEMS) -> Manifest:
    """The same items in parts of `least` each; files that no longer count go last."""
    items = [item for part in parts for item in part.items]
    names = []
    if items:
        vectors = torch.cat([part.vectors for part in parts])
        for start in range(0, len(items), least):
            stop = start + least
            names.append(write_part(path, Part(vectors[start:stop], items[start:stop])))
    manifest = replace(manifest, parts=tuple(names))
    write_manifest(path, manifest)
    remove_orphans(path, manifest)
    return manifest


def remove_orphans(path: Path, manifest: Manifest) -> None:
    """Remove what a kill left behind, and parts that no longer count."""
    for file in path.iterdir():
        left = file.name.endswith(".tmp") or (file.suffix == ".safetensors" and file.name not in manifest.parts)
        if left and file.is_file():
            file.unlink(missing_ok=True)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Nobody else writes to the index meanwhile; the lock of a process that was killed is gone with it."""
    with (path / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CheckpointError(f"another process writes to {path}; wait for it, or give another --out.") from error
        yield
