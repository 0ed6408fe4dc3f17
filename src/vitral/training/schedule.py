"""The learning rate over the run: a linear rise, then half a cosine."""

import math


def cosine_with_warmup(progress: float, warmup: float, floor: float) -> float:
    """Factor on the peak rate at `progress` 0..1 of the run, of which `warmup` is the rise, ending at `floor`."""
    if progress < warmup:
        return progress / warmup
    along = (progress - warmup) / max(1 - warmup, 1e-12)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(along, 1.0)))
