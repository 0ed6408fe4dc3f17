"""OpenVINO, and how a large model is best called in it: for one image at a time, and each core for one of its own.

Where all sizes are known beforehand, the graph is compiled better than for any number of images; and cores that have
an image each need not wait for each other.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from vitral.inference.packages import import_openvino

LARGE = 200e6
"""Multiply-adds of an image from which it is worth a call of its own: about the work of 2 ms."""
IN_ORDER = 16
"""Images for each core that are handed over at once."""
Compile = Callable[[Any, int, int], Any]
"""From an OpenVINO model, how many inputs it is to compute at a time and in how many threads, to one to be called."""


def compile_openvino(model: Any, streams: int = 1, threads: int | None = None) -> Any:
    """An OpenVINO model, ready to be called; so many inputs are computed at a time, and share the threads."""
    options = {
        "INFERENCE_PRECISION_HINT": "f32",  # on some processors it would be bf16
        "INFERENCE_NUM_THREADS": threads or torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY" if streams == 1 else "THROUGHPUT",
        "NUM_STREAMS": streams,
    }
    return import_openvino().Core().compile_model(model, "CPU", options)


class Requests:
    """A compiled model that any number of threads may call."""

    def __init__(self, compiled: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._compiled, self._inputs, self._outputs = compiled, inputs, outputs
        self._free: list[Any] = []

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The outputs in their order, for inputs in theirs."""
        return self.each([inputs])

    def each(self, calls: Sequence[Sequence[Tensor]]) -> list[Tensor]:
        """The same for several calls, as many at a time as the model was compiled for; outputs one behind the other."""
        requests = [self._take() for _ in calls]
        try:
            for request, inputs in zip(requests, calls, strict=True):
                feeds = {name: x.numpy() for name, x in zip(self._inputs, inputs, strict=True)}
                request.start_async(feeds, share_inputs=True)
            for request in requests:
                request.wait()
            found = [request.results for request in requests]
            return [torch.cat([torch.from_numpy(each[name]) for each in found]) for name in self._outputs]
        finally:
            for request in requests:
                with suppress(Exception):  # one that failed is left to itself
                    request.wait()
                    self._free.append(request)

    def _take(self) -> Any:
        try:
            return self._free.pop()
        except IndexError:
            return self._compiled.create_infer_request()


class OneByOne:
    """A model that takes images of one size, (B, C, H, W), called with any number of them.

    `one` is the model for one image. Graphs are compiled when they are needed first, for the number of torch's threads
    at the beginning: one for images that have a core each, one for an image that has all cores, and one for several
    that are fewer than the cores, or that a single core computes together.
    """

    def __init__(
        self, model: Any, one: Any, inputs: Sequence[str], outputs: Sequence[str], compile: Compile = compile_openvino
    ) -> None:
        self._any, self._one, self._cores = model, one, torch.get_num_threads()
        self._inputs, self._outputs, self._compile = inputs, outputs, compile
        self._made: dict[tuple[bool, int], Requests] = {}
        self._lock = threading.Lock()

    def __call__(self, x: Tensor) -> list[Tensor]:
        """The outputs in their order."""
        even = len(x) // self._cores * self._cores if self._cores > 1 else 0
        parts = []
        for first in range(0, even, IN_ORDER * self._cores):
            some = x[first : min(first + IN_ORDER * self._cores, even)]
            parts.append(self._requests(True, self._cores).each([[image] for image in some.split(1)]))
        if even < len(x) or not even:
            rest = x[even:]
            parts.append(self._requests(len(rest) == 1, 1)(rest))
        return parts[0] if len(parts) == 1 else [torch.cat(outputs) for outputs in zip(*parts, strict=True)]

    def _requests(self, one: bool, streams: int) -> Requests:
        with self._lock:
            if (one, streams) not in self._made:
                compiled = self._compile(self._one if one else self._any, streams, self._cores)
                self._made[one, streams] = Requests(compiled, self._inputs, self._outputs)
            return self._made[one, streams]


def best_call(
    model: Any, inputs: Sequence[str], outputs: Sequence[str], one_size: bool, compile: Compile = compile_openvino
) -> Requests | OneByOne:
    """What calls an OpenVINO model; `one_size` tells that it takes images, and all of one size."""
    if one_size and work_of(one := for_one_image(model)) > LARGE:
        return OneByOne(model, one, inputs, outputs, compile)
    return Requests(compile(model, 1, torch.get_num_threads()), inputs, outputs)


def for_one_image(model: Any) -> Any:
    """A copy of an OpenVINO model that takes one image, and so has no size that is not known."""
    copy = model.clone()
    (port,) = copy.inputs
    copy.reshape({port: [1, *list(port.get_partial_shape())[1:]]})
    return copy


def work_of(model: Any) -> int:
    """Multiply-adds of the layers and the attention of an OpenVINO model, as far as their sizes are known."""
    static = (op for op in model.get_ops() if op.get_output_size() and op.output(0).get_partial_shape().is_static)
    return sum(_WORK[op.get_type_name()](op) for op in static if op.get_type_name() in _WORK)


# Each number that comes out is a sum of so many products; in a convolution backwards each that goes in is in so many.
_WORK: dict[str, Callable[[Any], int]] = {
    "MatMul": lambda op: prod(op.output(0).shape) * op.input_value(0).shape[-2 if _is_turned(op) else -1],
    "Convolution": lambda op: prod(op.output(0).shape) * prod(op.input_value(1).shape[1:]),
    "ConvolutionBackpropData": lambda op: prod(op.input_value(0).shape) * prod(op.input_value(1).shape[1:]),
    "ScaledDotProductAttention": lambda op: prod(op.output(0).shape) * 2 * op.input_value(1).shape[-2],
}


def _is_turned(product: Any) -> bool:
    """Whether the first matrix of a product is transposed."""
    return product.get_attributes()["transpose_a"]
