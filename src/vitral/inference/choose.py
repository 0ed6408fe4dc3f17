"""The engine that a model runs in: the one asked for, or the fastest here, measured once and remembered."""

import json
import os
import statistics
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from vitral import __version__
from vitral.config import EngineName, ExportFormat, Preprocess
from vitral.errors import CheckpointError
from vitral.inference.cache import CACHE_BYTES, cache_folder, digest_config, digest_weights, keep_newest, key_of
from vitral.inference.compiled import load_or_compile
from vitral.inference.engines import Compiled, Eager, Engine, check_engine, open_exported, require
from vitral.inference.export import SUFFIXES, refuse_text, trace, write_export
from vitral.inference.graph import graph_of
from vitral.inference.timing import interleave, machine
from vitral.weights.atomic import write_atomically

CANDIDATES: tuple[EngineName, ...] = ("eager", "openvino", "onnxruntime")
"""What `auto` chooses among: compiling costs each process more time than a few images take."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "openvino": ("openvino",),
    "onnxruntime": ("onnx", "onnxscript", "onnxruntime"),
}
"""What engines need besides torch."""
EXPORTS: dict[str, ExportFormat] = {"openvino": "openvino", "onnxruntime": "onnx"}
SECONDS = 1.0
"""How long `auto` measures, at least."""


def make_engine(name: str, model: nn.Module, preprocess: Preprocess, batch_size: int) -> Engine:
    """An engine for a model; `auto` is the fastest of those that are installed, for batches of that size."""
    if name == "auto":
        return _fastest(model, preprocess, batch_size)
    check_engine(name)
    if name == "eager":
        return Eager(model)
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
        engine = open_exported(path, name)
        for file in (path, path.with_suffix(".bin")):
            if file.exists():
                os.utime(file)
    except (CheckpointError, OSError):  # not there, or damaged
        print(f"vitral: exporting the model for {name}, once ...", file=sys.stderr)
        write_export(model, preprocess, {"labels": [], "preprocess": preprocess.to_dict()}, path, format)
        keep_newest([file for file in folder.iterdir() if file.is_file()], CACHE_BYTES, path)
        engine = open_exported(path, name)
    return engine


def _identity(model: nn.Module, preprocess: Preprocess) -> list[Any]:
    """What tells a graph from others: the model with its weights, what it is fed, and what made the graph."""
    return [digest_weights(model), preprocess.to_dict(), __version__]


# ---- auto ----


def choices_file() -> Path:
    """Where it is remembered which engine was the fastest."""
    return cache_folder("engines") / "choices.json"


def _fastest(model: nn.Module, preprocess: Preprocess, batch_size: int) -> Engine:
    installed = [name for name in CANDIDATES if all(find_spec(package) for package in PACKAGES.get(name, ()))]
    key = _key(model, preprocess, batch_size, installed)
    known = str(read_choices().get(key))
    if known in installed:
        return make_engine(known, model, preprocess, batch_size)
    engines, x = {}, graph_of(model, preprocess).example(batch_size)
    for name in installed:
        try:
            engines[name] = make_engine(name, model, preprocess, batch_size)
        except Exception as error:  # an exporter or a full disk may raise anything; eager is always there
            print(f"vitral: {name} is left out: {error}", file=sys.stderr)
    calls = {name: (lambda engine=engine: engine.run(x)) for name, engine in engines.items()}
    times = {name: statistics.median(t) for name, t in interleave(calls, SECONDS, warmup=1, rounds=3).items()}
    best = min(times, key=times.__getitem__)
    _remember(key, best)
    told = ", ".join(f"{name} {1000 * t:.3g} ms" for name, t in sorted(times.items(), key=lambda item: item[1]))
    print(f"vitral: engine {best} for batches of {batch_size} ({told}; remembered)", file=sys.stderr)
    return engines[best]


def _key(model: nn.Module, preprocess: Preprocess, batch_size: int, installed: list[str]) -> str:
    """What the choice depends on: the model's shape, the batch, the machine, and the versions of what runs it."""
    versions = {package: _version(package) for name in installed for package in PACKAGES.get(name, ())}
    about = [digest_config(model), preprocess.img_size, batch_size, machine(), versions, __version__]
    return key_of(about)


def _version(package: str) -> str:
    return version(package)


def read_choices() -> dict[str, Any]:
    """What is remembered; nothing where the file is not there or broken."""
    try:
        choices = json.loads(choices_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return choices if isinstance(choices, dict) else {}


def _remember(key: str, engine: str) -> None:
    """Write a choice down beside the others; a disk that is full or read-only remembers nothing."""
    try:
        choices_file().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(choices_file(), (json.dumps({**read_choices(), key: engine}, indent=1) + "\n").encode())
    except (OSError, CheckpointError):
        return
