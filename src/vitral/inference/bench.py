"""What a model costs in time and memory here: engines and libraries in turn, in interleaved rounds of one process."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, get_args

import torch
from torch import Tensor

from vitral.config import EngineName, pair
from vitral.errors import ConfigError, InputError
from vitral.inference.choose import PACKAGES, make_engine
from vitral.inference.engines import FileEngine
from vitral.inference.peers import peer_of
from vitral.inference.predictor import Predictor
from vitral.inference.timing import GEMM_MACS, gemm_call, interleave, machine, multiply_adds, peak_memory

Run = Callable[[Tensor], Any]


def bench(
    predictor: Predictor, engines: Sequence[str], batch_sizes: Sequence[int], compare: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Times, speed, memory and the share of the machine's matrix-product rate; no engines: all that are installed.

    Each batch size is measured for so many seconds. The rate of matrix products is measured in the same rounds.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ConfigError(f"batch sizes must be at least 1, got {', '.join(map(str, batch_sizes)) or 'none'}.")
    p = predictor.preprocess
    shape = (len(p.mean), *pair(p.img_size))
    own = isinstance(predictor.network, FileEngine)
    macs = None if own else multiply_adds(predictor.model, shape)
    rows = []
    for batch in batch_sizes:
        x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
        names = engines or ([predictor.engine] if own else installed())
        calls = {name: partial(_engine(predictor, name), x) for name in names}
        calls |= {name: partial(_inference(peer_of(name, predictor.model)), x) for name in compare}
        memory = {name: peak_memory(call)[1] for name, call in calls.items()}
        times = interleave({**calls, "gemm": gemm_call()}, seconds)
        rate = GEMM_MACS / min(times.pop("gemm"))
        first = statistics.median(next(iter(times.values())))
        rows += [_row(name, batch, times[name], memory[name], first, macs, rate) for name in times]
    return {"machine": machine(), "image": list(shape), "macs": macs, "rows": rows}


def installed() -> list[str]:
    """The engines that can be made here."""
    return [name for name in get_args(EngineName) if all(find_spec(package) for package in PACKAGES.get(name, ()))]


def _engine(predictor: Predictor, name: str) -> Run:
    if isinstance(predictor.network, FileEngine):
        if name != predictor.engine:
            raise InputError(f"an exported file is measured in its own engine, {predictor.engine}; leave {name} out.")
        return predictor.network
    return make_engine(name, predictor.model, predictor.preprocess)


def _inference(run: Run) -> Run:
    return torch.inference_mode()(run)


def _row(
    name: str, batch: int, times: list[float], memory: int | None, first: float, macs: int | None, rate: float
) -> dict[str, Any]:
    median = statistics.median(times)
    return {
        "engine": name,
        "batch_size": batch,
        "median_ms": 1000 * median,
        "p95_ms": 1000 * sorted(times)[min(len(times) - 1, int(0.95 * len(times)))],
        "images_per_second": batch / median,
        "ratio": first / median,
        "peak_memory": memory,
        "share_of_gemm_rate": None if macs is None else batch * macs / median / rate,
        "gemm_gmacs_per_second": rate / 1e9,
        "rounds": len(times),
    }
