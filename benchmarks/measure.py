"""Honest timing, shared by the benchmarks: rivals interleaved in one process, medians, and the machine's own speed.

A single figure says little on a shared machine; a ratio of medians of interleaved runs says something, and its spread
over the rounds says how much.
"""

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def interleave(rivals: Mapping[str, Callable[[], Any]], seconds: float, warmup: int = 2) -> dict[str, list[float]]:
    """Call the rivals in turn for about `seconds`, at least 7 rounds; return each one's times in seconds."""
    for call in rivals.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in rivals}
    names, start, rounds = list(rivals), time.perf_counter(), 0
    while rounds < 7 or time.perf_counter() - start < seconds:
        for name in names:
            began = time.perf_counter()
            rivals[name]()
            times[name].append(time.perf_counter() - began)
        names = names[1:] + names[:1]  # nobody always runs behind the same other
        rounds += 1
    return times


def ratio(times: Mapping[str, list[float]], slow: str, fast: str) -> tuple[float, float]:
    """How many times as fast `fast` is: ratio of medians, and the standard error of the round-by-round ratio."""
    rounds = [s / f for s, f in zip(times[slow], times[fast], strict=True)]
    error = statistics.stdev(rounds) / len(rounds) ** 0.5
    return statistics.median(times[slow]) / statistics.median(times[fast]), error


def gemm_rate(seconds: float = 2.0) -> float:
    """Multiply-adds per second of a large fp32 matrix product, the best of several: what the machine can do."""
    a, b = torch.randn(1576, 768), torch.randn(768, 3072)
    return 1576 * 768 * 3072 / min(interleave({"gemm": lambda: a @ b}, seconds)["gemm"])


def write_json(name: str, document: dict[str, Any]) -> Path:
    """Write a result with the machine it was measured on."""
    machine = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, **document}, indent=2) + "\n")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
