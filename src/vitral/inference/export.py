"""A model as one file that runs without vitral: ONNX, OpenVINO or torch's `.pt2`, verified before it is kept.

What the file needs to be used, preprocessing, task and labels, is stored in it, and next to it as JSON. `.pt2` is an
output only: opening one can run code (`vitral.weights.files.refuse_program`).
"""

import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.config import ExportFormat, Preprocess, pair
from vitral.data.inputs import ImageInputs, Inputs, TextInputs
from vitral.errors import CheckpointError, ConfigError, InputError, VitralError
from vitral.inference.engines import Document, open_exported
from vitral.inference.graph import DECODER, FREE_SIDES, INPUT, Graph, graph_of, output_names
from vitral.inference.packages import import_openvino, require
from vitral.inference.text import TextGraph, keys_shape, text_graph_of
from vitral.models.merge import MergingViT
from vitral.models.seq2seq import DecoderModel, Seq2Seq, TextEncoder
from vitral.tasks.base import Task
from vitral.tasks.write import Write, Writes
from vitral.weights.atomic import workspace

SUFFIXES: dict[ExportFormat, str] = {"onnx": ".onnx", "openvino": ".xml", "pt2": ".pt2"}
"""How the name of an exported file ends, by its format."""
FORMATS: dict[str, ExportFormat] = {suffix: format for format, suffix in SUFFIXES.items()}
DOCUMENT = "vitral.json"
"""Name of the document inside a `.pt2` archive."""
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


def describe(model: nn.Module, task: Task, inputs: Inputs, source: str) -> Document:
    """All that the answers of a file need to be made and understood."""
    options: Any = getattr(task, "options", None)
    config: Any = model.config
    headless = output_names(model) == ("embedding",)
    tokenizers = {"source": inputs.tokenizer.to_dict()} if isinstance(inputs, TextInputs) else {}
    tokenizers |= {"target": task.tokenizer.to_dict()} if isinstance(task, Write) else {}
    return {
        "vitral": __version__,
        "source": source,
        "task": EMBED if headless else task.name,
        "labels": [] if headless else list(task.labels),
        "preprocess": inputs.preprocess.to_dict() if isinstance(inputs, ImageInputs) else None,
        **inputs.settings(),
        **task.settings(),
        "train": {} if options is None else {"text" if isinstance(task, Writes) else task.name: options.to_dict()},
        **({"tokenizers": tokenizers} if tokenizers else {}),
        "architecture": type(model).__name__,
        "model": config.to_dict(),
        "merge": model.amount if isinstance(model, MergingViT) else 0.0,
        "precision": "fp32",
    }


def refuse_text(model: nn.Module) -> None:
    """Raise for a model that is no graph from images to tensors."""
    if is_of_text(model):
        raise InputError(
            "models that read or write text run in torch; for another engine, export the run (vitral export) and give "
            "the file."
        )


def is_of_text(model: nn.Module) -> bool:
    """Whether a model reads or writes text."""
    return isinstance(model, DecoderModel | TextEncoder)


def write_export(
    model: nn.Module, preprocess: Preprocess | None, document: Document, path: Path, format: ExportFormat,
    free_size: bool = False,
) -> Exported:  # fmt: skip
    """Export, run the file beside the model, and put it in its place only if the two agree.

    `preprocess` is what is done to images, None where texts are read.
    """
    if free_size and format == "pt2":  # its sizes would be conditions in Python, which nobody should run from a file
        raise ConfigError("images of any size go into onnx and openvino files, got pt2; leave --dynamic-size out.")
    if is_of_text(model):
        if free_size:
            raise ConfigError(
                "models that read or write text have one size of images or none; leave --dynamic-size out."
            )
        graph = text_graph_of(model.cpu(), preprocess)
        document = text_document(graph, document)
    else:
        assert preprocess is not None
        graph = graph_of(model.cpu(), preprocess, free_size)
        document = graph_document(graph, preprocess, document)
    return write_graph(graph, document, path, format, _WRITERS[format])


def graph_document(graph: Graph, preprocess: Preprocess, document: Document) -> Document:
    """The document with what it takes and gives."""
    p, size = preprocess, pair(preprocess.img_size)
    free = {} if graph.multiple is None else {"multiple": list(graph.multiple)}
    sides = FREE_SIDES if free else size
    shape = {"name": INPUT, "shape": ["batch", graph.shape[0], *sides], **free, "type": "float32", "values": _values(p)}
    return {**document, "input": shape, "outputs": list(graph.outputs)}


def _values(p: Preprocess) -> str:
    return f"RGB or grey values / 255, minus {list(p.mean)}, divided by {list(p.std)}, for each channel"


def text_document(graph: TextGraph, document: Document) -> Document:
    """The same for a model of text: what each part takes and gives, and the sizes of vocabularies."""
    shapes = [
        {
            "name": name,
            "shape": [axes.get(i, n) for i, n in enumerate(x.shape)],
            "type": str(x.dtype).removeprefix("torch."),
        }
        for name, x, axes in zip(graph.inputs, graph.examples(), graph.sizes, strict=True)
    ]
    model, first = cast(Any, graph.model), shapes[0]
    if document["preprocess"] is None:
        config: Any = model.encoder.config if isinstance(model, Seq2Seq) else model.config
        first |= {"vocabulary": config.vocab_size, "max_length": config.max_length}
    else:
        first |= {"values": _values(Preprocess.from_dict(document["preprocess"]))}
    document = {**document, "input": first, "outputs": list(graph.outputs)}
    if not isinstance(model, DecoderModel):
        return document
    parts = {
        part: {"inputs": [shape for shape in shapes if shape["name"] in inputs], "outputs": list(outputs)}
        for part, (inputs, outputs) in graph.parts.items()
    }
    sizes = {"vocabulary": model.vocab_size, "max_length": model.max_length, "keys": list(keys_shape(model))}
    parts[DECODER] |= sizes
    return {**document, "parts": parts}


AnyGraph = Graph | TextGraph
Writer = Callable[[AnyGraph, Document, Path], None]


def write_graph(graph: AnyGraph, document: Document, path: Path, format: str, write: Writer) -> Exported:
    """Write a graph to a private temporary folder next to its path, verify it there, and move it."""
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
    """A name for a file and its parts until they are moved to `path`, or discarded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with workspace(path) as folder:
        yield folder / path.name


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


def compare(graph: AnyGraph, path: Path, batches: tuple[int, ...] = BATCHES) -> dict[int, float]:
    """Differences between a file that was just written and the model, by batch size.

    Each is the maximum over outputs, relative to the largest absolute value of the output. For images of any size, the
    maximum over two sizes.
    """
    run = (_run_program if FORMATS[path.suffix] == "pt2" else _run_parts)(graph, path)
    found = dict.fromkeys(batches, 0.0)
    for batch, *steps in product(batches, STEPS) if graph.multiple else ((batch,) for batch in batches):
        inputs = dict(zip(graph.inputs, graph.examples(batch, batch, *steps), strict=True))
        with torch.inference_mode():
            wanted, given = dict(zip(graph.outputs, graph(*inputs.values()), strict=True)), run(inputs)
        apart = [_difference(given[name], wanted[name]) for name in graph.outputs]
        found[batch] = float(np.max([found[batch], *apart]))  # NaN stays
    return found


Run = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""The outputs of a file for its inputs, both by name."""


def _run_parts(graph: AnyGraph, path: Path) -> Run:
    """Run each part of an ONNX or OpenVINO file on its own."""
    engine = open_exported(path)

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        outputs: dict[str, Tensor] = {}
        for part, (names, given) in graph.parts.items():
            outputs |= zip(given, engine.run_part(part, [inputs[name] for name in names]), strict=True)
        return outputs

    return run


def _run_program(graph: AnyGraph, path: Path) -> Run:
    """Run a `.pt2` file. Loading executes it, so only a file that this process has just written is passed here."""
    with quiet():
        module = torch.export.load(path).module()
    return lambda inputs: dict(zip(graph.outputs, module(*inputs.values()), strict=True))


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    a, b = a.float(), b.float()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-12))


# ---- the formats ----


def trace(graph: AnyGraph) -> Any:
    """The graph as torch records it, for inputs of any size where that is free; nothing tells where it was made."""
    sizes: dict[str, Any] = {word: torch.export.Dim(word) for axes in graph.sizes for word in axes.values()}
    for word, m in zip(FREE_SIDES, graph.multiple or (), strict=False):
        sizes[word] = torch.export.Dim.DYNAMIC if m == 1 else m * torch.export.Dim(f"cells_{word}")
    shapes = tuple({axis: sizes[word] for axis, word in axes.items()} for axes in graph.sizes)
    with torch.no_grad():
        program = torch.export.export(graph, graph.examples(), dynamic_shapes=shapes, strict=False)
    program._guards_code = []  # which sizes must be equal, as code; whoever runs a file knows, and a file has no code
    for node in program.graph.nodes:
        for about in ("stack_trace", "nn_module_stack", "torch_fn", "source_fn_stack", "from_node", "custom"):
            node.meta.pop(about, None)
    return program


def lay_out_attention(program: Any) -> None:
    """Let what attention gives lie in order, as ONNX's does: torch's kernel has its own way, which views rely on."""
    for node in program.graph.find_nodes(
        op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
    ):
        with program.graph.inserting_after(node):
            ordered = program.graph.call_function(
                torch.ops.aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        ordered.meta["val"] = node.meta["val"].contiguous()
        node.replace_all_uses_with(ordered, delete_user_cb=lambda user, new=ordered: user is not new)


def write_onnx(graph: AnyGraph, document: Document, path: Path) -> None:
    """One `.onnx` file, or two where the weights are too many for one."""
    require("export to ONNX", "onnx", "onnxscript", "onnxruntime")
    program = trace(graph)
    lay_out_attention(program)
    made = torch.onnx.export(
        program,
        dynamo=True,
        input_names=list(graph.inputs),
        output_names=list(graph.outputs),
        dynamic_shapes=graph.sizes,
        verbose=False,
    )
    assert made is not None
    made.model.metadata_props["vitral"] = json.dumps(document)
    for node in made.model.graph:
        node.metadata_props.clear()
    weights = sum(p.numel() * p.element_size() for p in graph.parameters())
    made.save(path, external_data=weights > _ONE_FILE)


def _write_openvino(graph: AnyGraph, document: Document, path: Path) -> None:
    openvino = import_openvino("export to OpenVINO")
    save_openvino(convert_openvino(graph), document, path, openvino)


def convert_openvino(graph: AnyGraph) -> Any:
    """The graph as OpenVINO has it, for any number of inputs."""
    openvino = import_openvino("export to OpenVINO")
    with quiet():
        model = openvino.convert_model(trace(graph))
    shapes = {}
    for port, name, x, axes in zip(model.inputs, graph.inputs, graph.examples(), graph.sizes, strict=True):
        port.get_tensor().set_names({name})
        shapes[name] = openvino.PartialShape([-1 if axis in axes else size for axis, size in enumerate(x.shape)])
    model.reshape(shapes)
    for output, name in zip(model.outputs, graph.outputs, strict=True):
        output.get_tensor().set_names({name})
    return model


def save_openvino(model: Any, document: Document, path: Path, openvino: Any) -> None:
    """`.xml` and `.bin`, every number kept as it is."""
    model.set_rt_info(json.dumps(document), ["vitral"])
    openvino.save_model(model, path, compress_to_fp16=False)


def _write_pt2(graph: AnyGraph, document: Document, path: Path) -> None:
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
