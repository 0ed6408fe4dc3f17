"""A model as one file that runs without vitral: ONNX, OpenVINO or torch's `.pt2`, tried out before it is left there.

What the file needs to be used, preprocessing, task and labels, goes into it, and beside it as JSON.
"""

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.config import ExportFormat, Preprocess, pair
from vitral.errors import CheckpointError, ConfigError, InputError, VitralError
from vitral.inference.engines import FORMATS, FREE_SIDES, Document, import_openvino, open_exported, require
from vitral.inference.graph import INPUT, Graph, graph_of
from vitral.inference.program import DOCUMENT
from vitral.models.merge import MergingViT
from vitral.models.seq2seq import Seq2Seq, TextDecoder, TextEncoder
from vitral.tasks.base import Task

SUFFIXES = {format: suffix for suffix, format in FORMATS.items()}
EMBED = "embed"
"""What stands for the task of a model without a head."""
BATCHES = (1, 5)
"""Sizes of the batches that a file is tried with."""
STEPS = ((0, 0), (1, 3))
"""How much larger than usual the images are that a file of any size is tried with, in patches."""
TOLERANCE = 1e-4
"""Of the largest number of an output: how far a file may be from the model."""
_ONE_FILE = 1_900_000_000
"""Bytes of weights beyond which an ONNX file keeps them in a second one: its format ends at 2 GiB."""


@dataclass(frozen=True)
class Loss:
    """What int8 costs: a metric before and after, in 0..1, on so many images of a part of the data."""

    metric: str
    part: str
    images: int
    before: float
    after: float
    how: str
    """Which of the ways it was, in words."""

    @property
    def points(self) -> float:
        """How much was lost, in hundredths."""
        return 100 * (self.before - self.after)


@dataclass(frozen=True)
class Exported:
    """An exported file."""

    path: Path
    format: str
    bytes: int
    """Of all its parts."""
    differences: dict[int, float]
    """Between file and model for batches of each size, as a share of the largest number; empty for int8."""
    loss: Loss | None = None
    """What int8 costs."""

    @property
    def sidecar(self) -> Path:
        """What the file knows, as JSON beside it."""
        return sidecar_of(self.path)


def sidecar_of(path: Path) -> Path:
    """Where the JSON beside an exported file lies."""
    return path.with_name(path.name + ".json")


def format_of(path: Path, format: str | None) -> ExportFormat:
    """The format that is asked for, by its word or by the end of the file's name."""
    if format is not None and format not in SUFFIXES:
        raise ConfigError(f"format must be one of {', '.join(SUFFIXES)}, got {format!r}.")
    told = FORMATS.get(path.suffix)
    if told is None or (format is not None and format != told):
        wanted = SUFFIXES[format] if format else f"one of {', '.join(FORMATS)}"
        raise ConfigError(f"the name of the exported file must end in {wanted}, got {path.name}.")
    return told


def describe(model: nn.Module, task: Task, preprocess: Preprocess, source: str) -> Document:
    """All that the answers of a file need to be made and understood."""
    options: Any = getattr(task, "options", None)
    config: Any = model.config
    headless = not getattr(config, "num_classes", 1)
    return {
        "vitral": __version__,
        "source": source,
        "task": EMBED if headless else task.name,
        "labels": [] if headless else list(task.labels),
        "preprocess": preprocess.to_dict(),
        **task.settings(),
        "train": {} if options is None else {task.name: options.to_dict()},
        "architecture": type(model).__name__,
        "model": config.to_dict(),
        "merge": model.amount if isinstance(model, MergingViT) else 0.0,
        "precision": "fp32",
    }


def refuse_text(model: nn.Module) -> None:
    """Raise for a model that is no graph from images to tensors."""
    if isinstance(model, Seq2Seq | TextDecoder | TextEncoder):
        raise InputError("models that read or write text cannot be exported yet; predict from the run itself.")


def write_export(
    model: nn.Module, preprocess: Preprocess, document: Document, path: Path, format: ExportFormat,
    free_size: bool = False,
) -> Exported:  # fmt: skip
    """Export, run the file beside the model, and put it in its place only if the two agree."""
    refuse_text(model)
    if free_size and format == "pt2":  # its sizes would be conditions in Python, which nobody should run from a file
        raise ConfigError("images of any size go into onnx and openvino files, got pt2; leave --dynamic-size out.")
    graph = graph_of(model.cpu(), preprocess, free_size)
    return write_graph(graph, graph_document(graph, preprocess, document), path, format, _WRITERS[format])


def graph_document(graph: Graph, preprocess: Preprocess, document: Document) -> Document:
    """The document with what it takes and gives."""
    p, size = preprocess, pair(preprocess.img_size)
    about = f"RGB or grey values / 255, minus {list(p.mean)}, divided by {list(p.std)}, for each channel"
    free = {} if graph.multiple is None else {"multiple": list(graph.multiple)}
    sides = FREE_SIDES if free else size
    shape = {"name": INPUT, "shape": ["batch", graph.shape[0], *sides], **free, "type": "float32", "values": about}
    return {**document, "input": shape, "outputs": list(graph.outputs)}


Writer = Callable[[Graph, Document, Path], None]


def write_graph(graph: Graph, document: Document, path: Path, format: str, write: Writer) -> Exported:
    """Write a graph in a folder beside its place, try it there, and move it."""
    with staging(path) as made:
        with quiet():
            write(graph, {"format": format, **document}, made)
        differences = compare(graph, made)
        worst = max(differences.values())
        if not worst <= TOLERANCE:
            raise VitralError(
                f"{path} was not written: the exported file differs from the model by {worst:.1e} of the largest "
                f"number, and {TOLERANCE:.0e} is the most that passes; try another --format."
            )
        return put_in_place(made, path, {"format": format, **document}, differences)


@contextmanager
def staging(path: Path) -> Iterator[Path]:
    """A place beside the path for a file and its parts, until they are put there or given up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        yield Path(folder) / path.name


def put_in_place(made: Path, path: Path, document: Document, differences: dict[int, float]) -> Exported:
    """Move a file and its parts to where they belong, what it says about itself beside it."""
    size = sum(part.stat().st_size for part in made.parent.iterdir())
    sidecar_of(made).write_text(json.dumps({**document, "differences": differences}, indent=1) + "\n")
    try:
        for part in sorted(made.parent.iterdir(), key=lambda part: part == made):  # the file itself last
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path.with_name(part.name))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written ({error.strerror}).") from error
    return Exported(path, document["format"], size, differences)


def compare(graph: Graph, path: Path, batches: tuple[int, ...] = BATCHES) -> dict[int, float]:
    """How far a file is from the model: for batches of each size, as a share of each output's largest number.

    Where images may have any size, the larger of the differences at two.
    """
    engine = open_exported(path)
    found = dict.fromkeys(batches, 0.0)
    for batch, steps in product(batches, STEPS if graph.multiple else STEPS[:1]):
        x = graph.example(batch, batch, steps)
        with torch.inference_mode():
            wanted = graph(x)
        given = engine._tensors(x)
        found[batch] = max(found[batch], *(_difference(a, b) for a, b in zip(given, wanted, strict=True)))
    return found


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


# ---- the formats ----


def trace(graph: Graph) -> Any:
    """The graph as torch records it, for any number of images; nothing in it tells where it was made."""
    free: dict[int, Any] = {0: torch.export.Dim("batch")}
    for axis, m in enumerate(graph.multiple or (), start=2):
        free[axis] = torch.export.Dim.DYNAMIC if m == 1 else m * torch.export.Dim(f"cells_{axis}")
    with torch.no_grad():
        program = torch.export.export(graph, (graph.example(),), dynamic_shapes=(free,), strict=False)
    for node in program.graph.nodes:
        for about in ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node", "custom"):
            node.meta.pop(about, None)
    return program


def write_onnx(graph: Graph, document: Document, path: Path) -> None:
    """One `.onnx` file, or two where the weights are too many for one."""
    require("export to ONNX", "onnx", "onnxscript", "onnxruntime")
    made = torch.onnx.export(
        trace(graph),
        dynamo=True,
        input_names=[INPUT],
        output_names=list(graph.outputs),
        dynamic_shapes=({0: "batch"} if graph.multiple is None else {0: "batch", 2: "height", 3: "width"},),
        verbose=False,
    )
    assert made is not None
    made.model.metadata_props["vitral"] = json.dumps(document)
    for node in made.model.graph:
        node.metadata_props.clear()
    weights = sum(p.numel() * p.element_size() for p in graph.parameters())
    made.save(path, external_data=weights > _ONE_FILE)


def _write_openvino(graph: Graph, document: Document, path: Path) -> None:
    openvino = import_openvino("export to OpenVINO")
    save_openvino(convert_openvino(graph), document, path, openvino)


def convert_openvino(graph: Graph) -> Any:
    """The graph as OpenVINO has it, for any number of images."""
    openvino = import_openvino("export to OpenVINO")
    with quiet():
        model = openvino.convert_model(trace(graph))
    model.reshape([-1, *graph.shape] if graph.multiple is None else [-1, graph.shape[0], -1, -1])
    model.inputs[0].get_tensor().set_names({INPUT})
    for output, name in zip(model.outputs, graph.outputs, strict=True):
        output.get_tensor().set_names({name})
    return model


def save_openvino(model: Any, document: Document, path: Path, openvino: Any) -> None:
    """`.xml` and `.bin`, every number kept as it is."""
    model.set_rt_info(json.dumps(document), ["vitral"])
    openvino.save_model(model, path, compress_to_fp16=False)


def _write_pt2(graph: Graph, document: Document, path: Path) -> None:
    torch.export.save(trace(graph), path, extra_files={DOCUMENT: json.dumps(document)})


_WRITERS: dict[str, Writer] = {"onnx": write_onnx, "openvino": _write_openvino, "pt2": _write_pt2}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what packages say to those who work on them off the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
