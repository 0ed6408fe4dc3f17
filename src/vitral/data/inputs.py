"""What a model is fed, and how: images or texts, from a data set or one by one. The loop and the predictor ask no more.

Images go as uint8 to where the model is, and become floats there; texts go as tokens, PAD after their ends.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.config import Augmentation, Preprocess, pair
from vitral.data.augment import Mixed, augment
from vitral.data.images import LIMITS, ImageLimits, ImageMode, read_sized
from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray, to_mode
from vitral.data.targets import Targets, View
from vitral.data.text import cut_running_text, too_long
from vitral.data.tokenizer import EOS, SOS, Tokenizer, pad, tidy
from vitral.data.transforms import decode_size, eval_transform, eval_view, normalize, random_view, show
from vitral.errors import DataError, ImageError, InputError

ImageLike = str | Path | bytes | Image.Image | np.ndarray | Tensor
RATIO = (3 / 4, 4 / 3)
"""Aspect of random crops."""


@dataclass(frozen=True)
class Batch:
    """Images as uint8 (B, C, H, W), crops of them or tokens (B, T), their targets, and what the run calls each."""

    inputs: Any
    targets: Tensor
    samples: Tensor
    unreadable: list[str]


class UnreadableBatchError(DataError):
    """No image of a batch can be read."""


class Feed(ABC):
    """Reads batches of a data set by their numbers; several threads may read at the same time."""

    @abstractmethod
    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> Batch:
        """The inputs of these numbers (B,); the samples (B,) are what the run calls them."""


class Inputs(ABC):
    """One kind of input."""

    what: ClassVar[str]
    """The word for one of them."""
    size: str
    """How large they are, in words."""

    @abstractmethod
    def feed(self, data: Data, targets: Targets, crop_scale: float, seed: int, strict: bool) -> Feed:
        """A data set, ready to be read in batches."""

    @abstractmethod
    def augment(self, inputs: Any, noise: Noise, a: Augmentation, mirror: bool) -> Mixed:
        """A training batch as the model takes it."""

    @abstractmethod
    def normal(self, inputs: Tensor) -> Tensor:
        """A batch as the model takes it, with nothing left to chance."""

    @abstractmethod
    def read(self, item: Any, whole: bool) -> Tensor:
        """One input, from whatever is given; an image at its own resolution if it is needed `whole`."""

    def note(self, item: Any) -> str:
        """What one should know about how an input was read."""
        return ""

    def usable(self, data: Data) -> Data:
        """The data without what cannot be read."""
        return data

    def settings(self) -> dict[str, Any]:
        """What a run must remember of it."""
        return {}

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """All that decides what the model sees of an input, as plain values."""

    @abstractmethod
    def fit(self, x: Tensor) -> Tensor:
        """One input that was read, at the size that the model is fed."""

    @abstractmethod
    def stack(self, several: list[Tensor]) -> Tensor:
        """Inputs at that size as a batch."""


# ---- images ----


class ImageInputs(Inputs):
    """Images, brought to one size."""

    what = "image"
    limits: ImageLimits = LIMITS
    """What an image may cost."""

    def __init__(self, preprocess: Preprocess) -> None:
        self.preprocess = preprocess
        self.size = f"images of {'x'.join(map(str, pair(preprocess.img_size)))}"
        self.mode: ImageMode = "grey" if len(preprocess.mean) == 1 else "rgb"

    def feed(self, data: Data, targets: Targets, crop_scale: float, seed: int, strict: bool) -> Feed:
        """Images from memory or from files."""
        return ImageFeed(data, targets, self.preprocess, crop_scale, seed, strict)

    def augment(self, inputs: Any, noise: Noise, a: Augmentation, mirror: bool) -> Mixed:
        """Moved, recoloured, mixed and normalised."""
        return augment(inputs, noise, a, self.preprocess, mirror)

    def normal(self, inputs: Tensor) -> Tensor:
        """uint8 to normalised floats."""
        return normalize(inputs, self.preprocess)

    def read(self, item: ImageLike, whole: bool) -> Tensor:
        """One image as uint8 (C, H, W): a path, bytes, a PIL image, or an array."""
        return self.read_sized(item, whole)[0]

    def read_sized(self, item: ImageLike, whole: bool) -> tuple[Tensor, tuple[int, int]]:
        """The same, and the height and width of the original: a file may have been read smaller."""
        if isinstance(item, str | Path | bytes):
            return read_sized(item, self.mode, None if whole else decode_size(self.preprocess), self.limits)
        if isinstance(item, Image.Image):
            item = np.asarray(item.convert("L" if self.mode == "grey" else "RGB"))
        if not isinstance(item, np.ndarray | Tensor):
            raise InputError(f"an image is a path, bytes, a PIL image or an array, got {type(item).__name__}.")
        x = torch.from_numpy(np.array(item)) if isinstance(item, np.ndarray) else item
        if isinstance(item, np.ndarray):
            x = x[:, :, None] if x.ndim == 2 else x
            x = x.permute(2, 0, 1) if x.ndim == 3 else x
        if x.dtype != torch.uint8 or x.ndim != 3 or x.shape[0] not in (1, 3):
            raise InputError(
                f"an image array must be uint8, (H, W) or (H, W, C) in numpy, (C, H, W) in torch, of 1 or 3 channels, "
                f"got {x.dtype} {tuple(x.shape)}."
            )
        return to_mode(x, self.mode), (x.shape[1], x.shape[2])

    def identity(self) -> dict[str, Any]:
        """The preprocessing."""
        return self.preprocess.to_dict()

    def fit(self, x: Tensor) -> Tensor:
        """Resized and cut."""
        return eval_transform(x, self.preprocess)

    def stack(self, several: list[Tensor]) -> Tensor:
        """(B, C, h, w)."""
        return torch.stack(several)


class ImageFeed(Feed):
    """Images as uint8 (B, C, H, W), at the model's size."""

    def __init__(
        self, data: Data, targets: Targets, preprocess: Preprocess, crop_scale: float, seed: int, strict: bool
    ) -> None:
        self.data, self.preprocess, self.crop_scale = data, preprocess, crop_scale
        self.targets, self.seed, self.strict = targets, seed, strict
        self.at_least = decode_size(preprocess, crop_scale)

    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> Batch:
        indices, samples = batch
        images = self.data.images
        no_crop = self.crop_scale == 1 and self.preprocess.crop_mode in ("squash", "pad")
        if no_crop and isinstance(images, ImageArray) and images.pixels.shape[-2:] == self.preprocess.img_size:
            pixels = to_mode(images.pixels[indices], self.data.mode)
            return Batch(pixels, self._targets(indices, [View.whole()] * len(indices)), samples, [])
        read, at, unreadable = self.read(indices)
        shown = [self._to_size(x, sample) for x, sample in zip(read, samples[at], strict=True)]
        targets = self._targets(indices[at], [view for _, view in shown])
        return Batch(torch.stack([x for x, _ in shown]), targets, samples[at], unreadable)

    def read(self, indices: Tensor) -> tuple[list[Tensor], Tensor, list[str]]:
        """The images that can be read, their places among those asked for, and what is wrong with the others."""
        read: dict[int, Tensor] = {}
        unreadable = []
        for place, index in enumerate(indices.tolist()):
            try:
                read[place] = self.data.images.read(index, self.data.mode, self.at_least)
            except ImageError as error:
                if self.strict:
                    raise
                unreadable.append(str(error))
        if not read:
            raise UnreadableBatchError(
                f"none of the {len(indices)} images of a batch can be read; the first: {unreadable[0]}"
            )
        return list(read.values()), torch.tensor(list(read)), unreadable

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


# ---- texts ----


class TextInputs(Inputs):
    """Texts as tokens after SOS, and before EOS unless they are to be gone on with."""

    what = "text"

    def __init__(self, tokenizer: Tokenizer, max_length: int, ends: bool = True) -> None:
        self.tokenizer, self.max_length, self.ends = tokenizer, max_length, ends
        self.size = f"texts of up to {max_length} tokens, {len(tokenizer):,} different ones"

    def feed(self, data: Data, targets: Targets, crop_scale: float, seed: int, strict: bool) -> Feed:
        """Texts from memory."""
        return _TextFeed(data, targets, self)

    def augment(self, inputs: Tensor, noise: Noise, a: Augmentation, mirror: bool) -> Mixed:
        """As they are."""
        return Mixed(inputs, torch.ones(len(inputs), device=inputs.device))

    def normal(self, inputs: Tensor) -> Tensor:
        """As they are."""
        return inputs

    def read(self, item: Any, whole: bool) -> Tensor:
        """The tokens of a text (T,); one that is empty or too long is refused."""
        if not isinstance(item, str):
            raise InputError(f"this model reads texts, got {type(item).__name__}.")
        text = tidy(item) if self.ends else item
        if self.ends and not text:
            raise InputError("the text is empty; give at least one character.")
        tokens = self.encode(text)
        if len(tokens) > self.max_length:
            raise InputError(
                f"the text has {len(tokens)} tokens, and the model reads at most {self.max_length}; shorten it, "
                f"or give it in parts."
            )
        return tokens

    def encode(self, text: str) -> Tensor:
        """Tokens (T,), however many."""
        return torch.tensor([SOS, *self.tokenizer.encode(text), *([EOS] if self.ends else [])])

    def identity(self) -> dict[str, Any]:
        """The tokens, and how many are read."""
        return {**self.tokenizer.to_dict(), **self.settings(), "ends": self.ends}

    def fit(self, x: Tensor) -> Tensor:
        """As it is."""
        return x

    def note(self, item: Any) -> str:
        """The characters that the model has never seen."""
        unknown = sorted(set(self.tokenizer.unknown(tidy(item) if self.ends else item)))
        return f"characters never seen in training: {' '.join(unknown)}" if unknown else ""

    def usable(self, data: Data) -> Data:
        """Leave out what is too long to be read; what is to be gone on with is cut instead."""
        most = self.max_length - 1 - self.ends
        if not self.ends:
            return cut_running_text(data, self.tokenizer, most)
        bad = too_long(self.tokenizer, data.lines, most)
        return data.without(bad, f"texts have more than {most} tokens and were left out")

    def settings(self) -> dict[str, Any]:
        """What a run must remember besides the tokenizers."""
        return {"source_length": self.max_length}

    def stack(self, several: list[Tensor]) -> Tensor:
        """(B, T), PAD after the ends."""
        return pad([tokens.tolist() for tokens in several])[0]


class _TextFeed(Feed):
    """Texts as tokens (B, T)."""

    def __init__(self, data: Data, targets: Targets, inputs: TextInputs) -> None:
        self.lines, self.targets, self.inputs = data.lines, targets, inputs

    def __getitem__(self, batch: tuple[Tensor, Tensor]) -> Batch:
        indices, samples = batch
        numbers = indices.tolist()
        tokens = self.inputs.stack([self.inputs.encode(self.lines[i]) for i in numbers])
        targets = self.targets.stack([self.targets.take(i, View.whole(), (1, 1)) for i in numbers])
        return Batch(tokens, targets, samples, [])
