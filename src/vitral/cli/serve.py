"""`vitral serve`: models behind HTTP, and a page to try them on."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import tyro

from vitral.config import Device, EngineChoice, Serving
from vitral.errors import InputError, VitralError

if TYPE_CHECKING:
    from vitral import Index, Predictor

NEEDS = {"fastapi": "fastapi", "uvicorn": "uvicorn", "python_multipart": "python-multipart",
         "prometheus_client": "prometheus-client"}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Serve trained models: predict, embed, explain and search over HTTP, and a page to try them on in a browser.

    Examples:
      vitral serve runs/digits
      vitral serve cats=runs/cats dogs=model.safetensors --port 9000
      vitral serve runs/photos --index photos.index
      vitral serve runs/digits --host 0.0.0.0 --api-key-file keys.txt
    """

    sources: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="SOURCE...", help_behavior_hint="")]
    """Run directories, files of weights, their folders, exported files (.onnx, .xml), pretrained names, or
    hf-hub:owner/name;
    NAME=SOURCE gives a name."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on; any but this machine's own needs keys."""
    port: Annotated[int, tyro.conf.arg(metavar="N")] = 8000
    """Port; 0 takes a free one."""
    index: Annotated[str, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = ""
    """An index of images or texts to search in, made by vitral index: a folder, or postgresql://..."""
    index_model: Annotated[str, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")] = ""
    """Where the model of the index is now, if it has moved; one that is served anyway need not be named."""
    api_key_file: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = ""
    """Keys that clients must send one of, one on each line; also from VITRAL_API_KEYS, with commas between."""
    insecure: bool = False
    """Let other machines ask without a key."""
    allowed_host: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = ()
    """More names that the server is called by, such as that of a proxy in front of it."""
    device: Device = "cpu"
    """Where the models run."""
    engine: Annotated[EngineChoice | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """What computes: eager, packed, compile, onnxruntime, openvino, or auto for the fastest here."""
    map_weights: bool = False
    """Map weights from their files instead of copying them into memory: that saves up to the size of the file for each
    model, but a file that is overwritten or truncated in place then ends the server."""
    limits: Annotated[Serving, tyro.conf.arg(name="")] = field(default_factory=Serving)
    """What is taken, and how long is waited."""


def require_packages() -> None:
    """Raise if what the server is made of is not installed."""
    missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
    if missing:
        raise VitralError(f"to serve, {missing[0]} is needed: pip install 'vitral[serve]'.")


def run(options: Options) -> None:
    """Load, listen, and serve until told to stop."""
    require_packages()
    if not options.sources:
        raise VitralError("no model is named; give a run directory or a file of weights: vitral serve runs/digits.")
    from vitral.serving.security import LOOPBACK, is_loopback, read_keys, require_protection

    keys = read_keys(options.api_key_file, os.environ)
    require_protection(options.host, keys, options.insecure)

    from vitral.serving.models import INDEX, name_sources
    from vitral.serving.server import bind, serve
    from vitral.training.precision import resolve_device

    sources = name_sources(options.sources, taken=[INDEX] if options.index else [])
    device = str(resolve_device(options.device))
    listening = bind(options.host, options.port)  # before models are loaded: a port that is taken is said at once

    from vitral.inference.predictor import Predictor
    from vitral.serving.app import create_app

    running = {
        "device": device, "engine": options.engine, "batch_size": options.limits.max_batch,
        "mapped": options.map_weights,
    }  # fmt: skip
    predictors = {name: Predictor(source, **running) for name, source in sources.items()}
    names = (options.host, *options.allowed_host)
    guarded = is_loopback(options.host) or options.allowed_host
    hosts = (*LOOPBACK, *map(str.lower, names)) if guarded else ()
    index = open_index(options, device, predictors.values()) if options.index else None
    app = create_app(predictors, index=index, options=options.limits, keys=keys, hosts=hosts)
    serve(app, listening, options.limits, lambda url: print(f"{', '.join(sources)}: {url}", flush=True))


def open_index(options: Options, device: str, served: "Iterable[Predictor]") -> "Index":
    """The index to search in, with a model that is served already, if it is the same."""
    import torch

    from vitral import Index

    index = Index(options.index, source=options.index_model or None)
    index.search_vectors(torch.ones(1, index.manifest.embedding.width), 1)  # what is wrong with it is said now
    for predictor in filter(lambda each: each.embeds, served):
        with suppress(InputError):  # another model, or one that gives no vectors
            index.use(predictor)
            return index
    if index.source:
        engine = "eager" if options.engine == "eager" else None  # other engines give answers, and no vectors
        index.load(device=device, engine=engine, batch_size=options.limits.max_batch, mapped=options.map_weights)
    return index
