"""The engine that a model runs in: the one asked for, or the fastest here, measured once and remembered."""

import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar, get_args

import torch
from torch import nn

from vitral import __version__
from vitral.config import EngineName, ExportFormat, Preprocess, pair
from vitral.errors import CheckpointError
from vitral.inference.cache import CACHE_BYTES, cache_folder, digest_config, digest_weights, keep_newest, key_of
from vitral.inference.compiled import load_or_compile
from vitral.inference.engines import (
    FILE_ENGINES,
    Compiled,
    Eager,
    Engine,
    FileEngine,
    Packed,
    check_engine,
    open_exported,
    torch_threads,
)
from vitral.inference.export import SUFFIXES, is_of_text, refuse_text, trace, write_export
from vitral.inference.graph import graph_of
from vitral.inference.packages import require
from vitral.inference.packed import packed
from vitral.inference.timing import interleave, machine
from vitral.nn.packed import can_pack
from vitral.weights.atomic import write_atomically

E = TypeVar("E", bound=Engine)
CANDIDATES: tuple[EngineName, ...] = ("eager", "packed", "openvino", "onnxruntime")
"""What `auto` chooses among: compiling takes longer than most work that is left to chance."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "openvino": ("openvino",),
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"),
}
"""What engines need besides torch."""
EXPORTS: dict[str, ExportFormat] = {"openvino": "openvino", "onnxruntime": "onnx"}
BATCH_SIZES = (1, 8, 32)
"""What `auto` chooses among where no size is asked for."""
SECONDS = 1.0
"""How long `auto` measures, at least, for each of its questions."""
SMALL = 0.05
"""Seconds that a batch takes below which a single thread may be the fastest: waking the others takes time too."""


def is_there(name: str) -> bool:
    """Whether an engine has all that it needs here."""
    return all(map(find_spec, PACKAGES.get(name, ()))) and (name != "packed" or can_pack())


def usual_engine(model: nn.Module) -> EngineName:
    """What runs a model on the CPU if nobody asks for anything: torch, with packed matrices where it has them."""
    floats = all(p.dtype == torch.float32 for p in model.parameters())
    return "packed" if floats and not is_of_text(model) and is_there("packed") else "eager"


def choose_engine(
    name: str, model: nn.Module, preprocess: Preprocess, batch_size: int | None
) -> tuple[Engine, int | None]:
    """An engine for a model and the size of its batches; `auto` measures what was not asked for."""
    if name != "auto":
        return make_engine(name, model, preprocess), batch_size
    refuse_text(model)
    shape = (len(preprocess.mean), *pair(preprocess.img_size))
    about = [digest_config(model), preprocess.img_size]
    others = [name for name in CANDIDATES if name != "eager"]
    return _fastest(Eager(model), others, lambda name: make_engine(name, model, preprocess), shape, about, batch_size)


def open_engine(
    path: Path, name: str | None, batch_size: int | None, mapped: bool = True
) -> tuple[FileEngine, int | None]:
    """The same for an exported file; `mapped` as in `FileEngine`."""
    first = open_exported(path, None if name == "auto" else name, mapped)
    if name != "auto" or first.document["preprocess"] is None or "parts" in first.document:  # texts have all lengths
        return first, batch_size
    others = [kind.name for kind in FILE_ENGINES[path.suffix] if kind.name in CANDIDATES and kind.name != first.name]
    about = [first.document, path.stat().st_size]
    return _fastest(first, others, lambda name: open_exported(path, name, mapped), first.shape, about, batch_size)


def make_engine(name: str, model: nn.Module, preprocess: Preprocess) -> Engine:
    """An engine for a model, by its name."""
    check_engine(name)
    if name == "eager":
        return Eager(model)
    if name == "packed":
        return Packed(packed(model))
    refuse_text(model)
    if name == "compile":
        graph = graph_of(model, preprocess)
        return Compiled(graph, load_or_compile(_identity(model, preprocess), lambda: trace(graph)))
    require(f"the {name} engine", *PACKAGES[name])
    return _by_file(name, model, preprocess)


def _by_file(name: str, model: nn.Module, preprocess: Preprocess) -> Engine:
    """An engine that reads an exported file; the file is kept for the next time."""
    format = EXPORTS[name]
    versions = [_version(package) for package in ("torch", *PACKAGES[name])]
    folder = cache_folder("exports")
    path = folder / f"{key_of([_identity(model, preprocess), versions])}{SUFFIXES[format]}"
    try:
        engine = open_exported(path, name, mapped=False)
        for file in (path, path.with_suffix(".bin")):
            if file.exists():
                os.utime(file)
    except (CheckpointError, OSError):  # not there, or damaged
        print(f"vitral: exporting the model for {name}, once ...", file=sys.stderr)
        write_export(model, preprocess, {"labels": [], "preprocess": preprocess.to_dict()}, path, format)
        keep_newest([file for file in folder.iterdir() if file.is_file()], CACHE_BYTES, path)
        engine = open_exported(path, name, mapped=False)
    return engine


def _identity(model: nn.Module, preprocess: Preprocess) -> list[Any]:
    """What tells a graph from others: the model with its weights, what it is fed, and what made the graph."""
    return [digest_weights(model), preprocess.to_dict(), __version__]


# ---- auto ----


@dataclass(frozen=True)
class Way:
    """One way to run a model."""

    engine: str
    threads: int
    batch_size: int

    def __str__(self) -> str:
        return f"{self.engine}, {self.threads} thread{'s' * (self.threads > 1)}, batches of {self.batch_size}"


def choices_file() -> Path:
    """Where it is remembered which way was the fastest."""
    return cache_folder("engines") / "choices.json"


def _fastest(
    first: E, others: Sequence[str], make: Callable[[str], E], shape: tuple[int, ...], about: object,
    batch_size: int | None,
) -> tuple[E, int]:  # fmt: skip
    """The fastest engine, in as many threads as it is fastest with, and the size of batches, unless one is asked for.

    `first` is always there; `others` are made by their names, as far as they are installed and can be.
    """
    threads = torch.get_num_threads()
    names = [first.name, *filter(is_there, others)]
    versions = [_version(package) for name in names for package in PACKAGES.get(name, ())]
    key = key_of([about, batch_size, names, versions, machine(), __version__])
    engines = {(str(first.name), threads): first}

    def engine(way: Way) -> E:
        if (way.engine, way.threads) not in engines:
            with torch_threads(way.threads):
                engines[way.engine, way.threads] = made = make(way.engine)
            made.threads = way.threads if way.threads != threads else None
        return engines[way.engine, way.threads]

    found: dict[Way, float] = {}

    def best(*ways: Way) -> Way:
        """The one that takes the least time for an image, all of them measured in turn."""
        calls = {}
        for way in ways:
            try:
                call = partial(engine(way), torch.zeros(way.batch_size, *shape))
                call()  # some compile only now
                calls[way] = call
            except Exception as error:  # an exporter or a full disk may raise anything
                print(f"vitral: {way.engine} is left out: {error}", file=sys.stderr)
        times = interleave(calls, SECONDS, warmup=0, rounds=3)
        seconds = {way: statistics.median(t) / way.batch_size for way, t in times.items()}
        found.update(seconds)
        return min(seconds, key=seconds.__getitem__)

    way = _recall(key)
    if way is None or way.engine not in names:
        way = best(*(Way(name, threads, batch_size or BATCH_SIZES[1]) for name in names))
        if batch_size is None:
            way = best(*(replace(way, batch_size=size) for size in BATCH_SIZES))
        if threads > 1 and found[way] * way.batch_size < SMALL:
            way = best(way, replace(way, threads=1))
        _remember(key, way)
        told = "; ".join(f"{each}: {1000 * t:.3g} ms" for each, t in sorted(found.items(), key=lambda item: item[1]))
        print(f"vitral: the fastest here is {way} ({told} an image; remembered)", file=sys.stderr)
    return engine(way), way.batch_size


def _version(package: str) -> str:
    return version(package)


def read_choices() -> dict[str, Any]:
    """What is remembered; nothing where the file is not there or broken."""
    try:
        choices = json.loads(choices_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return choices if isinstance(choices, dict) else {}


def _recall(key: str) -> Way | None:
    try:
        way = Way(**read_choices()[key])
        right = way.engine in get_args(EngineName) and type(way.threads) is type(way.batch_size) is int
        right = right and 1 <= way.threads <= torch.get_num_threads() and way.batch_size >= 1
    except (KeyError, TypeError):
        return None
    return way if right else None


def _remember(key: str, way: Way) -> None:
    """Write a choice down beside the others; a disk that is full or read-only remembers nothing."""
    try:
        choices_file().parent.mkdir(parents=True, exist_ok=True)
        choices = {**read_choices(), key: asdict(way)}
        write_atomically(choices_file(), (json.dumps(choices, indent=1) + "\n").encode())
    except (OSError, CheckpointError):
        return
