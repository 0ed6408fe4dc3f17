"""Time that a budget of minutes reserves for what follows training: evaluation and report."""

import time
from collections.abc import Callable

from torch import Tensor

from vitral.config import LoopConfig

REPORT_SECONDS = 30.0
"""What a report may take in any case."""
REPORT_SHARE = 0.2
"""Share of the training time that a report may take, if that is more; share of the minutes, if they are few."""
MOST = 0.5
"""Share of the minutes that is reserved at most."""


def report_seconds(config: LoopConfig, trained: float) -> float:
    """Seconds that the report of a run may take, which trained for so many."""
    if config.max_minutes is not None:
        return min(REPORT_SECONDS, REPORT_SHARE * 60 * config.max_minutes)
    return max(REPORT_SECONDS, REPORT_SHARE * trained)


def reserved_seconds(config: LoopConfig, held_out: Tensor, evaluate: Callable[[Tensor], object]) -> float:
    """Seconds to reserve: for the report, and for the evaluation of the held-out images, whose speed is measured."""
    assert config.max_minutes is not None
    few = held_out[: config.batch_size]
    evaluate(few[:1])  # the first pass is slower than those that follow
    began = time.monotonic()
    evaluate(few)
    evaluation = (time.monotonic() - began) * len(held_out) / max(len(few), 1)
    return min(evaluation + report_seconds(config, 0.0), MOST * 60 * config.max_minutes)
