"""OpenVINO, and how a large model is best called in it: for one image at a time, and each core for one of its own.

Where all sizes are known beforehand, the graph is compiled better than for any number of images; and cores that have
an image each need not wait for each other.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from vitral.inference.lanes import in_lanes
from vitral.inference.packages import import_openvino

LARGE = 200e6
"""Multiply-adds of an image from which it is worth a call of its own: about the work of 2 ms."""
Compile = Callable[[Any, int], Any]
"""From an OpenVINO model, and how many will call it at a time, to one that can be called."""


def compile_openvino(model: Any, callers: int = 1) -> Any:
    """An OpenVINO model, ready to be called; the callers share torch's threads among them."""
    options = {
        "INFERENCE_PRECISION_HINT": "f32",  # on some processors it would be bf16
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY" if callers == 1 else "THROUGHPUT",
        "NUM_STREAMS": callers,
    }
    return import_openvino().Core().compile_model(model, "CPU", options)


class Requests:
    """A compiled model that several may call at a time; who comes when all are busy waits."""

    def __init__(self, compiled: Any, inputs: Sequence[str], outputs: Sequence[str], callers: int = 1) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._free: SimpleQueue[Any] = SimpleQueue()
        for _ in range(callers):
            self._free.put(compiled.create_infer_request())  # which has memory of its own

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs in their order, for inputs in theirs."""
        feeds = {name: x.numpy() for name, x in zip(self._inputs, inputs, strict=True)}
        request = self._free.get()
        try:
            found = request.infer(feeds, share_inputs=True)
            return [torch.from_numpy(found[name]) for name in self._outputs]
        finally:
            self._free.put(request)


class OneByOne:
    """A model that takes images of one size, (B, C, H, W), called with any number of them.

    Graphs are compiled when they are needed first: one for images that have a core each, one for an image that has all
    cores, one for any number of images that are fewer than the cores.
    """

    def __init__(
        self, model: Any, inputs: Sequence[str], outputs: Sequence[str], compile: Compile = compile_openvino
    ) -> None:
        self._any, self._one = model, for_one_image(model)
        self._inputs, self._outputs, self._compile = inputs, outputs, compile
        self._made: dict[tuple[bool, int], Requests] = {}
        self._lock = threading.Lock()

    def __call__(self, x: Tensor) -> list[Tensor]:
        """The outputs in their order."""
        cores = torch.get_num_threads()
        if cores == 1 or len(x) < cores:
            return self._together(x)
        return in_lanes(partial(_one_after_the_other, self._requests(True, cores)), x, self._together)

    def _together(self, x: Tensor) -> list[Tensor]:
        return self._requests(len(x) == 1, 1)(x)

    def _requests(self, one: bool, callers: int) -> Requests:
        with self._lock:
            if (one, callers) not in self._made:
                compiled = self._compile(self._one if one else self._any, callers)
                self._made[one, callers] = Requests(compiled, self._inputs, self._outputs, callers)
            return self._made[one, callers]


def _one_after_the_other(requests: Requests, x: Tensor) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*map(requests, x.split(1)), strict=True)]


def for_one_image(model: Any) -> Any:
    """A copy of an OpenVINO model that takes one image, and so has no size that is not known."""
    copy = model.clone()
    (port,) = copy.inputs
    copy.reshape({port: [1, *list(port.get_partial_shape())[1:]]})
    return copy


def work_of(model: Any) -> int:
    """Multiply-adds of the layers and the attention of an OpenVINO model, as far as their sizes are known."""
    total = 0
    for op in model.get_ops():
        terms = _TERMS.get(op.get_type_name())
        if terms is not None and op.output(0).get_partial_shape().is_static:
            total += prod(op.output(0).shape) * terms(op)
    return total


# How many products each number of an output is the sum of.
_TERMS: dict[str, Callable[[Any], int]] = {
    "MatMul": lambda op: op.input_value(0).shape[-2 if op.get_attributes()["transpose_a"] else -1],
    "Convolution": lambda op: prod(op.input_value(1).shape[1:]),
    "ScaledDotProductAttention": lambda op: 2 * op.input_value(1).shape[-2],
}
