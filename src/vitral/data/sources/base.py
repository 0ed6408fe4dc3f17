"""What every source gives: images that can be read one by one, a target for each, and named splits."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vitral.data.images import AtLeast, ImageMode, read_image
from vitral.errors import DataError


class Images(Protocol):
    """A sequence of images, read when they are asked for."""

    def __len__(self) -> int: ...

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """One image as uint8 (C, H, W)."""
        ...

    def name(self, index: int) -> str:
        """What to call the image in a message."""
        ...


@dataclass(frozen=True)
class ImageArray:
    """Images of one size, held in memory as uint8 (N, C, H, W)."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """One image; grey becomes RGB by repetition, RGB becomes grey by its mean."""
        return to_mode(self.pixels[index], mode)

    def name(self, index: int) -> str:
        """Number of the image."""
        return f"image {index}"


@dataclass(frozen=True)
class ImageFiles:
    """Images in files."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Decode one file."""
        return read_image(self.paths[index], mode, at_least)

    def name(self, index: int) -> str:
        """Path of the image."""
        return str(self.paths[index])


def to_mode(x: Tensor, mode: ImageMode) -> Tensor:
    """(..., C, H, W) in the number of channels of the mode."""
    if mode == "rgb" and x.shape[-3] == 1:
        return x.expand(*x.shape[:-3], 3, *x.shape[-2:])
    if mode == "grey" and x.shape[-3] == 3:
        return x.float().mean(-3, keepdim=True).round().to(x.dtype)
    return x


@dataclass(frozen=True)
class Data:
    """A labelled data set: images, the class number of each, the names of the classes, and the splits."""

    name: str
    images: Images
    targets: Tensor
    classes: list[str]
    splits: dict[str, Tensor]
    mode: ImageMode = "rgb"
    recipe: str | None = None
    """Recipe to train with when none is asked for."""
    licence: str = "unknown"
    notes: list[str] = field(default_factory=list)
    """What was decided on the way, to be said to the user."""

    def __post_init__(self) -> None:
        if not len(self.images):
            raise DataError(f"{self.name} has no images.")
        if len(self.images) != len(self.targets):
            raise DataError(f"{self.name} has {len(self.images)} images but {len(self.targets)} labels.")

    def describe(self) -> str:
        """One line that says what this is."""
        sizes = "/".join(f"{len(v):,}" for v in self.splits.values())
        what = f"{len(self.images):,} images, {len(self.classes)} classes"
        return f"{self.name}: {what}, split {'/'.join(self.splits)} {sizes}"

    def with_splits(self, val_fraction: float, test_fraction: float, seed: int) -> "Data":
        """Cut the parts that are missing from the training part, class by class, always the same way."""
        data = self
        for part, fraction in (("test", test_fraction), ("val", val_fraction)):
            if part not in data.splits and fraction:
                rest, cut = stratified_split(data.targets, data.splits["train"], fraction, seed)
                if not len(cut):
                    continue
                splits = data.splits | {"train": rest, part: cut}
                note = (
                    f"no {part} part was given: {len(cut):,} images ({fraction:.0%} of the training part) serve as one"
                )
                data = replace(data, splits=splits, notes=[*data.notes, note])
        order = [part for part in ("train", "val", "test") if part in data.splits]
        return replace(data, splits={part: data.splits[part] for part in order})


def stratified_split(targets: Tensor, indices: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split indices in two, the second with `fraction` of each class (at least one of a class of two or more)."""
    generator = torch.Generator().manual_seed(seed)
    rest, cut = [], []
    for label in targets[indices].unique().tolist():
        members = indices[targets[indices] == label]
        members = members[torch.randperm(len(members), generator=generator)]
        count = min(max(round(len(members) * fraction), 1), len(members) - 1) if len(members) > 1 else 0
        cut.append(members[:count])
        rest.append(members[count:])
    return torch.cat(rest).sort().values, torch.cat(cut).sort().values
