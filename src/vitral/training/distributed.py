"""More than one process: `torchrun --nproc-per-node 2 -m vitral train ...` runs the same loop under DDP.

gloo on CPUs, NCCL on GPUs. Sharding of weights (FSDP2) has its place in `wrap`.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Processes:
    """Which process this is, and of how many."""

    rank: int
    world: int

    @property
    def first(self) -> bool:
        """The process that alone writes and talks."""
        return self.rank == 0

    def sum(self, values: dict[str, float]) -> dict[str, float]:
        """Add up each value over all processes."""
        if self.world == 1:
            return values
        total = torch.tensor(list(values.values()), dtype=torch.float64)
        dist.all_reduce(total)
        return dict(zip(values, total.tolist(), strict=True))

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over all processes."""
        if self.world > 1:
            dist.all_reduce(tensor := tensor.clone())
        return tensor / self.world

    def gather(self, tensor: Tensor) -> Tensor:
        """Rows of all processes, those of the first before those of the second."""
        if self.world == 1:
            return tensor
        lengths = [
            int(n)
            for n in self.sum({str(r): float(len(tensor)) * (r == self.rank) for r in range(self.world)}).values()
        ]
        padded = torch.zeros(max(lengths), *tensor.shape[1:], dtype=tensor.dtype)
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, lengths, strict=True)])

    def any(self, flag: bool) -> bool:
        """Whether the flag is up in any process."""
        return self.sum({"flag": float(flag)})["flag"] > 0

    def share(self, value: float) -> float:
        """The first process's value, in all of them."""
        return self.sum({"value": value if self.first else 0.0})["value"]

    def wrap(self, model: nn.Module) -> nn.Module:
        """Make gradients the mean over all processes."""
        return model if self.world == 1 else DistributedDataParallel(model)


@contextmanager
def processes(device: torch.device) -> Iterator[Processes]:
    """Join the other processes that torchrun has started, if any, and leave them at the end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(0, 1)
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
