"""Batches in an order that the seed decides, and that can be taken up anywhere.

Nothing here has a state: the batch of a step is a function of (seed, epoch, step in the epoch), and the randomness of a
sample a function of its place in the run. A run resumed at a step, or split over more processes, sees the same images.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitral.config import Augmentation, Preprocess, pair
from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray, to_mode
from vitral.data.targets import Targets, Values, View
from vitral.data.transforms import decode_size, eval_transform, eval_view, random_view, show
from vitral.errors import DataError, ImageError

RATIO = (3 / 4, 4 / 3)


@dataclass(frozen=True)
class Batch:
    """Images as the model's size in uint8 (B, C, H, W), their targets, and what the run calls each sample."""

    images: Tensor
    targets: Tensor
    samples: Tensor
    unreadable: list[str]


class _Reader(Dataset):
    """Reads a batch of images by their numbers; runs in a worker process where there are any."""

    def __init__(
        self, data: Data, targets: Targets | None, preprocess: Preprocess, crop_scale: float, seed: int, strict: bool
    ) -> None:
        self.data, self.preprocess, self.crop_scale = data, preprocess, crop_scale
        self.targets = targets or Values(data.targets)
        self.seed, self.strict = seed, strict
        self.at_least = decode_size(preprocess, crop_scale)

    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> Batch:
        indices, samples = batch
        images = self.data.images
        as_it_is = isinstance(images, ImageArray) and images.pixels.shape[-2:] == self.preprocess.img_size
        if as_it_is and self.crop_scale == 1 and self.preprocess.crop_mode == "squash":
            pixels = to_mode(images.pixels[indices], self.data.mode)  # type: ignore[union-attr]
            return Batch(pixels, self._targets(indices, [View.whole()] * len(indices)), samples, [])
        read: dict[int, Tensor] = {}
        views: list[View] = []
        unreadable = []
        for place, (index, sample) in enumerate(zip(indices.tolist(), samples, strict=True)):
            try:
                x = images.read(index, self.data.mode, self.at_least)
            except ImageError as error:
                if self.strict:
                    raise
                unreadable.append(str(error))
                continue
            read[place], view = self._to_size(x, sample)
            views.append(view)
        if not read:
            raise DataError(f"none of the {len(indices)} images of a batch can be read; the first: {unreadable[0]}")
        at = torch.tensor(list(read))
        targets = self._targets(indices[at], views)
        return Batch(torch.stack(list(read.values())), targets, samples[at], unreadable)

    def _to_size(self, x: Tensor, sample: Tensor) -> tuple[Tensor, View]:
        size = (x.shape[1], x.shape[2])
        if self.crop_scale == 1:
            return eval_transform(x, self.preprocess), eval_view(size, self.preprocess)
        view = random_view(size, Noise(self.seed, sample[None]), (self.crop_scale, 1.0), RATIO)
        return show(x, view, self.preprocess), view

    def _targets(self, indices: Tensor, views: list[View]) -> Tensor:
        size = pair(self.preprocess.img_size)
        return self.targets.stack(
            [self.targets.take(index, view, size) for index, view in zip(indices.tolist(), views, strict=True)]
        )


def _load(reader: _Reader, batches: Sequence[tuple[Tensor, Tensor]], workers: int) -> Iterator[Batch]:
    """Read batches in their order, ahead of time where there are workers."""
    prefetch = 4 if workers else None
    yield from DataLoader(
        reader, batch_size=None, sampler=batches, num_workers=workers, prefetch_factor=prefetch, collate_fn=None
    )


class TrainLoader:
    """Endless training batches: `batches(step)` goes on from any step, this process's share of each."""

    def __init__(
        self, data: Data, preprocess: Preprocess, augment: Augmentation, batch_size: int, seed: int, strict: bool,
        workers: int, rank: int, world: int, targets: Targets | None = None,
    ) -> None:  # fmt: skip
        self.indices = data.splits["train"]
        self.repeats = augment.repeats
        self.seed, self.workers, self.rank, self.world = seed, workers, rank, world
        self.batch_size = min(batch_size, len(self.indices))
        self.batch_size -= self.batch_size % world
        if self.batch_size < world:
            raise DataError(f"{len(self.indices)} training images are too few for {world} processes.")
        self.targets = targets or Values(data.targets)
        self.reader = _Reader(data, self.targets, preprocess, augment.crop_scale, seed, strict)

    @property
    def steps_per_epoch(self) -> int:
        """Whole batches in the training part."""
        return len(self.indices) // self.batch_size

    def order(self, epoch: int) -> Tensor:
        """The images of an epoch, in its order."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order = self.indices[torch.randperm(len(self.indices), generator=generator)]
        return order.repeat_interleave(self.repeats)[: len(order)]

    def batches(self, step: int) -> Iterator[Batch]:
        """Yield the batches of steps `step`, `step + 1`, ... without end."""
        epoch, first = divmod(step, self.steps_per_epoch)
        share = self.batch_size // self.world
        while True:
            order = self.order(epoch)
            starts = [k * self.batch_size + self.rank * share for k in range(first, self.steps_per_epoch)]
            samples = [torch.arange(start, start + share) for start in starts]
            plan = [(order[places], epoch * len(order) + places) for places in samples]
            yield from _load(self.reader, plan, self.workers)
            epoch, first = epoch + 1, 0


def eval_batches(
    data: Data, indices: Tensor, preprocess: Preprocess, batch_size: int, strict: bool, workers: int,
    targets: Targets | None = None,
) -> Iterator[Batch]:  # fmt: skip
    """Every image once, in order; those that cannot be read are left out and named."""
    reader = _Reader(data, targets, preprocess, 1.0, 0, strict)
    return _load(reader, [(part, part) for part in indices.split(batch_size)], workers)
