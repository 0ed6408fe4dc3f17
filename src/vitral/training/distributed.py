"""More than one process: `torchrun --nproc-per-node 2 -m vitral train ...` runs the same loop under DDP.

gloo on CPUs, NCCL on GPUs. Sharding of weights (FSDP2) has its place in `wrap`.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from vitral.errors import TrainingError

JOIN_SECONDS = 1800
"""How long rank 0 waits for the others to start."""


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
    """Join the other processes that torchrun has started, if any, and leave them at the end.

    Raises:
        TrainingError: if another process ends or cannot be reached while this one needs it.
    """
    world = world_size()
    if world == 1:
        yield Processes(0, 1)
        return
    try:
        rank = int(os.environ["RANK"])
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=_fresh_store(rank, world), rank=rank, world_size=world)
        yield Processes(rank, world)
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        raise TrainingError(
            f"the connection to another of the {world} processes was lost ({_reason(error)}); start all of them again "
            f"with --resume to continue from the newest checkpoint."
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def world_size() -> int:
    """The number of processes that torchrun has started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _fresh_store(rank: int, world: int) -> Store:
    """The store through which processes find each other, without the keys of earlier attempts.

    torchrun keeps one store over its restarts (pytorch issue 135712): processes would connect to those that have
    ended. So rank 0 invents a prefix, and passes it to each of the others under a key that only that process knows.
    """
    store = next(rendezvous("env://"))[0]
    own = uuid4().hex
    if rank:
        store.set(f"join/{rank}", own)
        prefix = store.get(f"prefix/{own}").decode()
        store.set(f"{prefix}/joined/{rank}", "")
        return PrefixStore(prefix, store)
    missing, end = set(range(1, world)), time.monotonic() + JOIN_SECONDS
    while missing:
        if time.monotonic() > end:
            raise dist.DistStoreError(f"rank {min(missing)} did not join within {JOIN_SECONDS} s")
        for other in missing:
            if store.check([f"join/{other}"]):  # by an earlier attempt, or by this one
                store.set(f"prefix/{store.get(f'join/{other}').decode()}", own)
        time.sleep(0.01)
        missing = {other for other in missing if not store.check([f"{own}/joined/{other}"])}
    return PrefixStore(own, store)


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether an error comes from the communication between processes; gloo raises plain RuntimeErrors."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def _reason(error: RuntimeError) -> str:
    """The first sentence of an error, without places in torch's source."""
    return re.sub(r"\[\S*/\S*\]\s*", "", str(error).splitlines()[0]).split(". ")[0].rstrip(".")
