"""A batch cut into a part for each core, and each part computed by one core alone.

Cores that share every product wait for each other at the end of each; those that have images of their own meet once.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vitral.data.ahead import use_cores
from vitral.tasks.base import map_tensors


def in_lanes(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """`function(x)` for inference, where it treats each row of x by itself.

    Rows that are too few to give each core one more are computed by all cores together, as ever.
    """
    cores = torch.get_num_threads()
    even = len(x) // cores * cores
    if cores == 1 or not even:
        return function(x)

    @torch.inference_mode()
    def alone(part: Tensor) -> Any:
        return function(part)

    done = list(_lanes(os.getpid(), cores).map(alone, x[:even].chunk(cores)))
    if even < len(x):
        done.append(alone(x[even:]))
    return map_tensors(lambda *parts: torch.cat(parts), *done)


@cache
def _lanes(process: int, cores: int) -> ThreadPoolExecutor:
    """Threads that compute in one core each; a process that was forked off has none of those of its parent."""
    pool = ThreadPoolExecutor(cores, "vitral-lane")
    use_cores(pool, cores, 1)
    return pool
