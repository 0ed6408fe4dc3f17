"""Honest timing: rivals interleaved in one process, medians, and the machine's own speed.

A single figure says little on a shared machine; a ratio of medians of interleaved runs says something, and its spread
over the rounds says how much.
"""

import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vitral.inference.hardware import processor
from vitral.inference.memory import give_freed_memory_back
from vitral.nn.packed import PackedLinear, can_pack

T = TypeVar("T")
K = TypeVar("K")
GEMM_SHAPE = (1576, 768, 3072)
"""Rows, inner side and columns: the first layer of the MLP of a ViT-B/16 for 8 images."""
GEMM_MACS = math.prod(GEMM_SHAPE)


def interleave(
    rivals: Mapping[K, Callable[[], Any]], seconds: float, warmup: int = 2, rounds: int = 7, pause: float = 0.0
) -> dict[K, list[float]]:
    """Call each rival once in every round, for about `seconds`, at least so many rounds; return their times in seconds.

    Threads of a call that is over may go on asking for work for some milliseconds; with a pause before each call they
    do so at nobody's cost.
    """
    for call in rivals.values():
        for _ in range(warmup):
            call()
    times: dict[K, list[float]] = {name: [] for name in rivals}
    names, start, done, chance = list(rivals), time.perf_counter(), 0, Random(0)  # noqa: S311
    while done < rounds or time.perf_counter() - start < seconds:
        chance.shuffle(names)  # nobody always runs behind the same other
        for name in names:
            time.sleep(pause)
            began = time.perf_counter()
            rivals[name]()
            times[name].append(time.perf_counter() - began)
        done += 1
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> tuple[float, float]:
    """How many times as fast `fast` is: ratio of medians, and the standard error of the round-by-round ratio."""
    rounds = [s / f for s, f in zip(times[slow], times[fast], strict=True)]
    error = statistics.stdev(rounds) / len(rounds) ** 0.5
    return statistics.median(times[slow]) / statistics.median(times[fast]), error


def gemm_call(shape: tuple[int, int, int] = GEMM_SHAPE) -> Callable[[], Tensor]:
    """A large fp32 matrix product as fast as torch has one, to be measured among rivals."""
    rows, inner, columns = shape
    x, layer = torch.randn(rows, inner), torch.nn.Linear(inner, columns, bias=False).requires_grad_(False)
    return partial(PackedLinear(layer) if can_pack() else layer, x)


def gemm_rate(shapes: Sequence[tuple[int, int, int]] = (GEMM_SHAPE,), seconds: float = 2.0) -> float:
    """Multiply-adds per second of fp32 matrix products, the best of several: what the machine can do."""
    times = interleave({shape: gemm_call(shape) for shape in shapes}, seconds)
    return max(math.prod(shape) / min(t) for shape, t in times.items())


def machine() -> dict[str, Any]:
    """What a figure was measured on."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": processor(),
    }


def multiply_adds(model: Callable[[Tensor], Any], shape: tuple[int, int, int]) -> int:
    """Count the multiply-adds that one image (C, H, W) really costs."""
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.randn(1, *shape))
    return counter.get_total_flops() // 2


def peak_memory(call: Callable[[], T]) -> tuple[T, int | None]:
    """What a call returns, and by how many bytes the process grew in it; None where the system does not tell."""
    try:
        give_freed_memory_back()  # so that it counts when it is taken again
        Path("/proc/self/clear_refs").write_text("5")  # from here on a new peak
        before = _status("VmRSS")
        return call(), max(_status("VmHWM") - before, 0)
    except (OSError, StopIteration):
        return call(), None


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))
