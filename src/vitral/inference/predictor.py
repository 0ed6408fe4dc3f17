"""The one way from images to answers, for library, command line and server alike."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.config import Preprocess
from vitral.data.images import ImageMode, read_image
from vitral.data.sources.base import to_mode
from vitral.data.sources.folder import list_images
from vitral.data.transforms import decode_size, eval_transform, normalize
from vitral.errors import ImageError, InputError, VitralError
from vitral.models.vit import VisionTransformer
from vitral.weights.load import load_model
from vitral.weights.rundir import is_run, read_run_config

ImageLike = str | Path | bytes | Image.Image | np.ndarray | Tensor


@dataclass(frozen=True)
class Prediction:
    """The answer for one image: its name, the likeliest labels with their probabilities, or why there is none."""

    name: str
    labels: list[str]
    probabilities: list[float]
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        if self.error:
            return {"image": self.name, "error": self.error}
        pairs = zip(self.labels, self.probabilities, strict=True)
        return {"image": self.name, "predictions": [{"label": k, "probability": round(p, 6)} for k, p in pairs]}


class Predictor:
    """A trained model with its preprocessing: `Predictor("runs/digits").predict("image.png")`."""

    def __init__(self, source: str | Path | VisionTransformer, *, batch_size: int = 32, device: str = "cpu") -> None:
        if isinstance(source, VisionTransformer):
            self.model, self.temperature = source.eval(), 1.0
        else:
            self.model = load_model(source)
            self.temperature = read_run_config(Path(source)).temperature if is_run(Path(source)) else 1.0
        self.model.to(device)
        self.device, self.batch_size = torch.device(device), batch_size
        self.preprocess: Preprocess = self.model.preprocess
        self.mode: ImageMode = "grey" if self.model.config.in_chans == 1 else "rgb"
        self.labels = self.model.labels or [str(i) for i in range(self.model.config.num_classes)]

    @torch.inference_mode()
    def logits(self, x: Tensor) -> Tensor:
        """Raw outputs for a preprocessed batch (B, C, H, W)."""
        return self.model(x.to(self.device)).cpu()

    def predict(self, images: ImageLike | Sequence[ImageLike], top_k: int = 5) -> list[Prediction]:
        """Answers for one image, several, or a folder; an image that cannot be read raises."""
        answers = list(self.stream(expand(images), top_k))
        for answer in answers:
            if answer.error:
                raise ImageError(answer.error)
        return answers

    def stream(self, images: Iterable[ImageLike], top_k: int = 5) -> Iterator[Prediction]:
        """Answers one by one, in order, for any number of images; one that cannot be read answers with an error."""
        for names, pixels, errors in self._batches(images):
            probabilities: Iterator[Tensor] = iter(())
            if pixels:
                x = normalize(torch.stack(pixels), self.preprocess)
                probabilities = iter((self.logits(x).double() / self.temperature).softmax(1))
            for name, error in zip(names, errors, strict=True):
                if error:
                    yield Prediction(name, [], [], error)
                    continue
                values, order = next(probabilities).topk(min(top_k, len(self.labels)))
                yield Prediction(name, [self.labels[i] for i in order.tolist()], values.tolist())

    @torch.inference_mode()
    def embed(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """(N, D): what the head receives, one row an image."""
        rows = []
        for _, pixels, errors in self._batches(expand(images)):
            if any(errors):
                raise ImageError(next(filter(None, errors)))
            rows.append(self.model.embed(normalize(torch.stack(pixels), self.preprocess).to(self.device)).cpu())
        return torch.cat(rows)

    def prepare(self, image: ImageLike) -> Tensor:
        """One image as uint8 (C, h, w) at the size the model is fed."""
        return eval_transform(self._read(image), self.preprocess)

    def _read(self, image: ImageLike) -> Tensor:
        if isinstance(image, str | Path | bytes):
            return read_image(image, self.mode, decode_size(self.preprocess))
        if isinstance(image, Image.Image):
            image = np.asarray(image.convert("L" if self.mode == "grey" else "RGB"))
        x = torch.from_numpy(np.array(image)) if isinstance(image, np.ndarray) else image
        if isinstance(image, np.ndarray):
            x = x[:, :, None] if x.ndim == 2 else x
            x = x.permute(2, 0, 1) if x.ndim == 3 else x
        if x.dtype != torch.uint8 or x.ndim != 3 or x.shape[0] not in (1, 3):
            raise InputError(
                f"an image array must be uint8, (H, W) or (H, W, C) in numpy, (C, H, W) in torch, of 1 or 3 channels, "
                f"got {x.dtype} {tuple(x.shape)}."
            )
        return to_mode(x, self.mode)

    def _batches(self, images: Iterable[ImageLike]) -> Iterator[tuple[list[str], list[Tensor], list[str]]]:
        """Names, pixels of those that could be read, and errors, a batch at a time."""
        source = enumerate(images)
        while batch := list(islice(source, self.batch_size)):
            names, pixels, errors = [], [], []
            for i, image in batch:
                names.append(str(image) if isinstance(image, str | Path) else f"image {i}")
                try:
                    pixels.append(self.prepare(image))
                    errors.append("")
                except VitralError as error:
                    errors.append(str(error))
            yield names, pixels, errors


def expand(images: ImageLike | Sequence[ImageLike]) -> Iterator[ImageLike]:
    """One image, a list of them, or folders, as images one by one."""
    several: Sequence[Any] = (
        images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
    )
    for image in several:
        if isinstance(image, str | Path) and Path(image).is_dir():
            found = list_images(Path(image))
            if not found:
                raise ImageError(f"{image} has no images in it.")
            yield from found
        else:
            yield image
