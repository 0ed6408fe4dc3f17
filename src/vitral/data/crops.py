"""Several crops of each image, large and small, for methods that compare them. Each has random numbers of its own."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vitral.config import Augmentation, DINOOptions, Preprocess, check_divides, pair
from vitral.data.augment import Mixed, augment
from vitral.data.inputs import RATIO, Batch, Feed, ImageFeed, ImageInputs
from vitral.data.noise import Noise
from vitral.data.sources.base import Data
from vitral.data.targets import Targets, View
from vitral.data.transforms import random_views, show

LARGE = 2
"""Large crops of each image."""


@dataclass(frozen=True)
class Crops:
    """Crops of B images: large ones (B, G, C, H, W) and small ones (B, L, C, h, w)."""

    large: Tensor
    small: Tensor

    def __getitem__(self, images: slice) -> "Crops":
        return Crops(self.large[images], self.small[images])

    def to(self, device: torch.device) -> "Crops":
        """The crops on another device."""
        return Crops(self.large.to(device), self.small.to(device))


class CropInputs(ImageInputs):
    """Images as crops, each cut from the whole image, whatever its size."""

    def __init__(self, preprocess: Preprocess, options: DINOOptions, patch: tuple[int, int]) -> None:
        super().__init__(replace(preprocess, img_size=options.global_size or preprocess.img_size))
        self.options = options
        for name, size in (("global_size", options.global_size), ("local_size", options.local_size)):
            for side, P in zip(pair(size), patch, strict=True) if size is not None else ():
                check_divides(side, P, f"dino.{name}")
        self.small = replace(preprocess, img_size=local_size(pair(self.preprocess.img_size), options, patch))
        sizes = ["x".join(map(str, pair(p.img_size))) for p in (self.preprocess, self.small)]
        self.size = f"{LARGE} crops of {sizes[0]}" + f" and {options.local_crops} of {sizes[1]}" * bool(self.count)

    @property
    def count(self) -> int:
        """L, small crops of each image."""
        return self.options.local_crops

    def noise(self, noise: Noise) -> tuple[Noise, Noise]:
        """The numbers of the large and of the small crops of images, image by image."""
        V = LARGE + self.count
        return noise.parts(V, 0, LARGE), noise.parts(V, LARGE, V)

    def feed(self, data: Data, targets: Targets, crop_scale: float, seed: int, strict: bool) -> Feed:
        """Crops of images from memory or from files."""
        return _CropFeed(data, targets, self, seed, strict)

    def augment(self, inputs: Crops, noise: Noise, a: Augmentation, mirror: bool) -> Mixed:
        """Each crop moved, recoloured and normalised by itself."""
        B, done = len(inputs.large), []
        for crops, each, p in zip(
            (inputs.large, inputs.small), self.noise(noise), (self.preprocess, self.small), strict=True
        ):
            changed = augment(crops.flatten(0, 1), each, a, p, mirror).inputs if crops.shape[1] else crops.float()
            done.append(changed.view_as(crops))
        return Mixed(Crops(*done), torch.ones(B, device=inputs.large.device))


def local_size(size: tuple[int, int], o: DINOOptions, patch: tuple[int, int]) -> tuple[int, int]:
    """Height and width of small crops: as asked for, or half of the large ones', in whole patches."""
    if o.local_size is not None:
        return pair(o.local_size)
    height, width = (max(round(side / 2 / P), 1) * P for side, P in zip(size, patch, strict=True))
    return height, width


class _CropFeed(ImageFeed):
    """Crops as uint8."""

    def __init__(self, data: Data, targets: Targets, inputs: CropInputs, seed: int, strict: bool) -> None:
        super().__init__(data, targets, inputs.preprocess, inputs.options.global_scale, seed, strict)
        self.inputs = inputs

    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> Batch:
        indices, samples = batch
        images, at, unreadable = self.read(indices)
        o, noise = self.inputs.options, self.inputs.noise(Noise(self.seed, samples[at]))
        large = self._cut(images, noise[0], (o.global_scale, 1.0), self.preprocess)
        small = self._cut(images, noise[1], (o.local_scale, o.global_scale), self.inputs.small)
        targets = self.targets.stack([self.targets.take(i, View.whole(), (1, 1)) for i in indices[at].tolist()])
        return Batch(Crops(large, small), targets, samples[at], unreadable)

    @staticmethod
    def _cut(images: Sequence[Tensor], noise: Noise, scale: tuple[float, float], p: Preprocess) -> Tensor:
        """As many crops of each image as the noise has numbers for: (B, n, C, h, w)."""
        B, C = len(images), images[0].shape[0]
        n = len(noise) // B
        sizes = [(x.shape[1], x.shape[2]) for x in images for _ in range(n)]
        views = random_views(sizes, noise, scale, RATIO)
        cut = [show(images[k // n], view, p) for k, view in enumerate(views)]
        return torch.stack(cut).unflatten(0, (B, n)) if n else images[0].new_empty(B, 0, C, *pair(p.img_size))
