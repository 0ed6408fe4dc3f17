"""Batches in an order that depends only on the seed, starting at any step.

The loader has no state: the batch of a step is a function of (seed, epoch, step in the epoch), and the randomness of a
sample is a function of its position in the run. A run that is resumed, or split over several processes, sees the same
samples. Batches are read ahead by threads, never by forked processes: a fork of a process that has run torch's threads
can deadlock or die without a message, and decoders release the interpreter lock anyway.
"""

from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from vitral.config import Augmentation
from vitral.data.ahead import ahead
from vitral.data.inputs import Batch, Feed, Inputs, UnreadableBatchError
from vitral.data.sources.base import Data
from vitral.data.targets import Targets, Values
from vitral.data.text import bucketed
from vitral.errors import DataError


class TrainLoader:
    """Endless training batches: `batches(step)` starts at any step and yields this process's share of each batch.

    `workers` is the number of threads that read ahead; 0 reads each batch when it is needed.
    """

    def __init__(
        self, data: Data, inputs: Inputs, augment: Augmentation, batch_size: int, seed: int, strict: bool,
        workers: int, rank: int, world: int, targets: Targets | None = None,
    ) -> None:  # fmt: skip
        self.indices, self.inputs = data.splits["train"], inputs
        self.repeats = augment.repeats
        self.seed, self.workers, self.rank, self.world = seed, workers, rank, world
        self.batch_size = min(batch_size, len(self.indices))
        self.batch_size -= self.batch_size % world
        if self.batch_size < world:
            raise DataError(f"{len(self.indices)} training {data.what} are too few for {world} processes.")
        self.targets = targets or Values(data.targets)
        self.lengths = data.lengths()
        self.feed = inputs.feed(data, self.targets, augment.crop_scale, seed, strict)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the training part."""
        return len(self.indices) // self.batch_size

    def order(self, epoch: int) -> Tensor:
        """The samples of an epoch, in its order; where there is text, batches are of similar lengths."""
        if self.lengths is not None:
            return self.indices[
                torch.cat(bucketed(self.lengths[self.indices], self.batch_size, self.seed, epoch, whole=True))
            ]
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = self.indices[torch.randperm(len(self.indices), generator=generator)]
        return order.repeat_interleave(self.repeats)[: len(order)]

    def batches(self, step: int) -> Iterator[Batch]:
        """Yield the batches of steps `step`, `step + 1`, ... without end."""
        yield from ahead(self.feed.__getitem__, self._plans(step), self.workers, 2 * self.workers)

    def first(self, count: int) -> Iterator[Batch]:
        """Yield up to `count` batches of the first epoch."""
        yield from map(self.feed.__getitem__, self._plan(0, 0)[:count])

    def _plans(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """What to read for steps `step`, `step + 1`, ... without end."""
        epoch, first = divmod(step, self.steps_per_epoch)
        while True:
            yield from self._plan(epoch, first)
            epoch, first = epoch + 1, 0

    def _plan(self, epoch: int, first: int) -> list[tuple[Tensor, Tensor]]:
        """Samples of an epoch and their positions in the run, for each batch from number `first`."""
        share = self.batch_size // self.world
        order = self.order(epoch)
        starts = [k * self.batch_size + self.rank * share for k in range(first, self.steps_per_epoch)]
        samples = [torch.arange(start, start + share) for start in starts]
        return [(order[places], epoch * len(self.indices) + places) for places in samples]


def eval_batches(
    data: Data, indices: Tensor, inputs: Inputs, batch_size: int, strict: bool, workers: int,
    targets: Targets | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Every sample once, in order, by length where there is text; those that cannot be read are left out and named.

    `workers` are threads that read ahead.
    """
    lengths = data.lengths()
    if lengths is not None:
        indices = indices[lengths[indices].argsort(stable=True)]
    feed = _Lenient(inputs.feed(data, targets or Values(data.targets), 1.0, 0, strict))
    parts = ((part, part) for part in indices.split(batch_size))
    some = False
    with closing(ahead(feed.__getitem__, parts, workers, 2 * workers)) as batches:
        for batch in batches:
            if len(batch.samples):
                some = True
                yield batch
    if len(indices) and not some:
        raise DataError(f"none of the {len(indices):,} {data.what} can be read; vitral check says why.")


class _Lenient(Feed):
    """A feed that may have nothing to give: a few images at the end, none of which can be read, stop no evaluation."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> Batch:
        try:
            return self.feed[batch]
        except UnreadableBatchError as error:
            nothing = torch.empty(0, dtype=torch.long)
            return Batch(nothing, nothing, nothing, [str(error)])
