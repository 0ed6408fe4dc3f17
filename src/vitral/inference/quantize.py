"""int8 after training: ranges from a few images of the data, accuracy before and after on others.

A file that loses more than it may is not written. Layers are given back step by step: first none, then the first and
the last, then those that follow an activation, whose long tails fit eight bits least.
"""

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitral.config import QuantizeOptions
from vitral.data.loader import eval_batches
from vitral.data.sources.base import Data
from vitral.errors import ConfigError, VitralError
from vitral.inference.engines import Document, open_exported
from vitral.inference.export import (
    Exported,
    Loss,
    convert_openvino,
    describe,
    graph_document,
    put_in_place,
    quiet,
    save_openvino,
    staging,
    write_onnx,
)
from vitral.inference.graph import INPUT, Graph, graph_of
from vitral.inference.packages import require
from vitral.inference.predictor import Predictor
from vitral.training.session import find

VAL_FRACTION = 0.1
"""Cut from the training part to judge by, where data have no validation part."""
_ACTIVATIONS = ("Gelu", "Relu", "Swish", "Erf", "Sigmoid", "Multiply")


def quantize(
    predictor: Predictor, data: Data, source: str, path: Path, format: str, options: QuantizeOptions
) -> Exported:
    """Write a model in int8, unless that costs more than `max_drop` points of its task's metric."""
    if format not in _STEPS:
        raise ConfigError(f"int8 goes into {' and '.join(_STEPS)} files, got {format}; leave --int8 or --format out.")
    data = predictor.task.usable(data.with_splits(VAL_FRACTION, 0.0, seed=0))
    document = describe(predictor.model, predictor.task, predictor.images, source)
    graph = graph_of(predictor.model, predictor.preprocess)
    document = graph_document(graph, predictor.preprocess, document) | {"format": format, "precision": "int8"}
    images = calibration_images(predictor, data, options.calibration_images)
    before = _score(predictor, predictor.network, data)
    tried: list[Loss] = []
    for how, write in _STEPS[format](graph, document, images):
        with staging(path) as made:
            with quiet(), contextlib.redirect_stdout(sys.stderr):
                write(made)
            after = _score(predictor, open_exported(made), data)
            count = len(data.splits["val"])
            tried.append(Loss(predictor.task.better, "val", count, before, after, how))
            if tried[-1].points <= options.max_drop:
                done = put_in_place(made, path, document | {"int8": asdict(tried[-1])}, {})
                return replace(done, loss=tried[-1])
    least = min(tried, key=lambda loss: loss.points)
    raise VitralError(
        f"{path} was not written: in int8 {least.metric} falls from {100 * least.before:.2f} to "
        f"{100 * least.after:.2f} %, more than --max-drop {options.max_drop:g} ({least.how})."
    )


def calibration_images(predictor: Predictor, data: Data, count: int) -> np.ndarray:
    """Images of the training part, chosen by a fixed seed, as the model is fed: (n, C, H, W)."""
    train = data.splits["train"]
    chosen = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:count]]
    batches = eval_batches(data, chosen.sort().values, predictor.inputs, 32, strict=False, workers=0)
    return torch.cat([predictor.inputs.normal(batch.inputs) for batch in batches]).numpy()


def _score(predictor: Predictor, network: Any, data: Data) -> float:
    data = replace(data, splits={"val": data.splits["val"]})
    found = find(network, predictor.task, data, data.splits["val"], predictor.inputs, predictor.batch_size)
    return float(predictor.task.metrics(found)[predictor.task.better])


Step = tuple[str, Callable[[Path], None]]
"""A way, in words, and what writes the file."""


# ---- OpenVINO ----


def _openvino_steps(graph: Graph, document: Document, images: np.ndarray) -> Iterator[Step]:
    openvino, _ = require("int8", "openvino", "nncf")
    model = convert_openvino(graph)
    for words, names in keep_steps(model):

        def write(path: Path, names: list[str] = names) -> None:
            save_openvino(int8_openvino(model, images, names), document, path, openvino)

        yield words, write


def int8_openvino(model: Any, images: np.ndarray, keep: list[str]) -> Any:
    """An OpenVINO model in int8, but for the layers to keep; images (n, C, H, W) calibrate it."""
    (nncf,) = require("int8", "nncf")
    return nncf.quantize(
        model,
        nncf.Dataset(list(images[:, None])),
        subset_size=len(images),
        model_type=nncf.ModelType.TRANSFORMER,
        preset=nncf.QuantizationPreset.MIXED,
        ignored_scope=nncf.IgnoredScope(names=[*keep, *other_products(model)], validate=False),
    )


def keep_steps(model: Any) -> Iterator[tuple[str, list[str]]]:
    """Which layers of an OpenVINO model to keep in fp32, more and more of them."""
    layers = [op for op in model.get_ordered_ops() if op.get_type_name() in ("MatMul", "Convolution") and _weighs(op)]
    ends = [op.get_friendly_name() for op in (layers[0], layers[-1])]
    after = [op.get_friendly_name() for op in layers if _source(op) in _ACTIVATIONS]
    yield "every layer", []
    yield "every layer but the first and the last", ends
    yield "every layer but the first, the last and those after activations", [*ends, *after]


def other_products(model: Any) -> list[str]:
    """The products that are no layers, nor in attention: few and small, but by them tokens are merged or chosen.

    In eight bits every token that passes them would be coarser.
    """
    products = [op for op in model.get_ordered_ops() if op.get_type_name() == "MatMul"]
    return [
        op.get_friendly_name() for op in products if not _weighs(op) or len(op.input_value(1).get_partial_shape()) != 2
    ]


def _weighs(op: Any) -> bool:
    """Whether an operation multiplies by a constant: a layer, and not attention."""
    node = op.input_value(1).get_node()
    while node.get_type_name() in ("Convert", "Reshape", "Transpose", "Multiply"):
        node = node.input_value(0).get_node()
    return node.get_type_name() == "Constant"


def _source(op: Any) -> str:
    return op.input_value(0).get_node().get_type_name()


# ---- ONNX ----


def _onnx_steps(graph: Graph, document: Document, images: np.ndarray) -> Iterator[Step]:
    (quantization,) = require("int8", "onnxruntime.quantization")
    (onnx,) = require("int8", "onnx")

    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "plain.onnx"
        with quiet():
            write_onnx(graph, document, plain)
        model = onnx.load(plain)
        del model.graph.value_info[:]  # shapes that the exporter noted, and that no longer hold
        onnx.save(model, plain)
        weights = {tensor.name for tensor in model.graph.initializer}
        kinds = ("Conv", "Gemm", "MatMul")
        layers = [n.name for n in model.graph.node if n.op_type in kinds and weights & set(n.input)]

        def static(path: Path, kept: list[str]) -> None:
            quantization.quantize_static(
                plain,
                path,
                _reader(quantization, images),
                per_channel=True,
                reduce_range=True,  # without it sums overflow on processors that lack VNNI
                nodes_to_quantize=[name for name in layers if name not in kept],
            )

        def dynamic(path: Path) -> None:
            quantization.quantize_dynamic(plain, path, per_channel=True, op_types_to_quantize=["Gemm", "MatMul"])

        yield "every layer", lambda path: static(path, [])
        yield "every layer but the first and the last", lambda path: static(path, [layers[0], layers[-1]])
        yield "linear layers, ranges found while they run", dynamic


def _reader(quantization: Any, images: np.ndarray) -> Any:
    class Reader(quantization.CalibrationDataReader):
        """The calibration images, one at a time."""

        def __init__(self) -> None:
            self.left = iter(images[:, None])

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.left, None)
            return None if image is None else {INPUT: image}

    return Reader()


_STEPS: dict[str, Callable[[Graph, Document, np.ndarray], Iterator[Step]]] = {
    "openvino": _openvino_steps,
    "onnx": _onnx_steps,
}
