"""What a model costs in time and memory here: engines and libraries in turn, in interleaved rounds of one process."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor

from vitral.config import EngineName, Running, pair
from vitral.errors import ConfigError, InputError
from vitral.inference.choose import is_there, make_engine
from vitral.inference.engines import FileEngine
from vitral.inference.peers import peer_of
from vitral.inference.predictor import Predictor
from vitral.inference.timing import GEMM_MACS, gemm_call, interleave, machine, multiply_adds, peak_memory
from vitral.models.merge import merged

Run = Callable[[Tensor], Any]
GEMM = ("gemm", 0.0)


def bench(
    predictor: Predictor, engines: Sequence[str], batch_sizes: Sequence[int], compare: Sequence[str], seconds: float,
    merges: Sequence[float] = (Running.merge,),
) -> dict[str, Any]:  # fmt: skip
    """Times, speed, memory and the share of the machine's matrix-product rate; no engines: all that are installed.

    Each batch size is measured for so many seconds. The rate of matrix products is measured in the same rounds. Every
    engine is measured with each amount of token merging; other libraries merge nothing.
    """
    if not batch_sizes or min(batch_sizes) < 1:
        raise ConfigError(f"batch sizes must be at least 1, got {', '.join(map(str, batch_sizes)) or 'none'}.")
    p = predictor.preprocess
    shape = (len(p.mean), *pair(p.img_size))
    own = isinstance(predictor.network, FileEngine)
    by_merge = {m: predictor.with_model(merged(predictor.model, m)) if m else predictor for m in merges or (0.0,)}
    macs = {m: None if own else multiply_adds(each.model, shape) for m, each in ({0.0: predictor} | by_merge).items()}
    rows = []
    for batch in batch_sizes:
        x = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(batch))
        names = engines or ([predictor.engine] if own else installed())
        calls = {(name, m): partial(_engine(each, name), x) for m, each in by_merge.items() for name in names}
        calls |= {(name, 0.0): partial(_inference(peer_of(name, predictor.model)), x) for name in compare}
        for call in calls.values():
            call()  # what is compiled at the first is no part of the others
        memory = {which: peak_memory(call)[1] for which, call in calls.items()}
        times = interleave({**calls, GEMM: gemm_call()}, seconds)
        rate = GEMM_MACS / min(times.pop(GEMM))
        first = statistics.median(next(iter(times.values())))
        rows += [
            {"engine": name, "merge": m, **_figures(batch, times[name, m], memory[name, m], first, macs[m], rate)}
            for name, m in times
        ]
    return {"machine": machine(), "image": list(shape), "macs": macs[0.0], "rows": rows}


def installed() -> list[str]:
    """The engines that can be made here."""
    return list(filter(is_there, get_args(EngineName)))


def _engine(predictor: Predictor, name: str) -> Run:
    if isinstance(predictor.network, FileEngine):
        if name != predictor.engine:
            raise InputError(f"an exported file is measured in its own engine, {predictor.engine}; leave {name} out.")
        return predictor.network
    return make_engine(name, predictor.model, predictor.preprocess)


def _inference(run: Run) -> Run:
    return torch.inference_mode()(run)


def _figures(
    batch: int, times: list[float], memory: int | None, first: float, macs: int | None, rate: float
) -> dict[str, Any]:
    median = statistics.median(times)
    return {
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
