"""The one way from images to answers, for library, command line and server alike."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitral.config import DetectOptions, Preprocess, SegmentOptions, pair
from vitral.data.images import ImageMode, read_image
from vitral.data.sources.base import to_mode
from vitral.data.sources.folder import list_images
from vitral.data.targets import View
from vitral.data.transforms import decode_size, eval_transform, eval_view, normalize
from vitral.errors import ImageError, InputError, VitralError
from vitral.models.detector import Detector
from vitral.models.segmenter import Segmenter
from vitral.models.vit import VisionTransformer
from vitral.tasks.base import Answer, Frame, Task, map_tensors
from vitral.tasks.classify import Classify
from vitral.tasks.detect import Detect
from vitral.tasks.open import load_task
from vitral.tasks.segment import Segment, slide
from vitral.weights.load import load_model
from vitral.weights.rundir import AnyModel, is_run, read_run_config

ImageLike = str | Path | bytes | Image.Image | np.ndarray | Tensor


class Predictor:
    """A trained model with its preprocessing and task: `Predictor("runs/digits").predict("image.png")`.

    `slide` lets a segmenter look at large images window by window, at their own resolution, instead of at a small copy
    of the whole.
    """

    def __init__(
        self, source: str | Path | AnyModel, *, batch_size: int = 32, device: str = "cpu", slide: bool = False
    ) -> None:
        self.model: AnyModel = source.eval() if isinstance(source, nn.Module) else load_model(source)
        if not isinstance(source, nn.Module) and is_run(Path(source)):
            self.task = load_task(read_run_config(Path(source)).document)
        else:
            self.task = _task_of(self.model)
        if slide and not isinstance(self.model, Segmenter):
            raise InputError("slide is for segmentation: other tasks see an image as a whole.")
        self.model.to(device)
        self.device, self.batch_size, self.slide = torch.device(device), batch_size, slide
        self.preprocess: Preprocess = self.model.preprocess
        self.mode: ImageMode = "grey" if len(self.preprocess.mean) == 1 else "rgb"
        self.labels = self.task.labels

    @property
    def vit(self) -> VisionTransformer:
        """The ViT that looks at the images, itself or inside a segmenter or detector."""
        vit = self.model if isinstance(self.model, VisionTransformer) else self.model.backbone
        if not isinstance(vit, VisionTransformer):
            raise InputError(f"this model looks through a {type(vit).__name__}, not a ViT.")
        return vit

    @torch.inference_mode()
    def outputs(self, x: Tensor) -> Any:
        """What the model gives for a preprocessed batch (B, C, H, W)."""
        return map_tensors(Tensor.cpu, self.model(x.to(self.device)))

    def predict(self, images: ImageLike | Sequence[ImageLike], top_k: int = 5) -> list[Any]:
        """Answers for one image, several, or a folder; an image that cannot be read raises."""
        answers = list(self.stream(expand(images), top_k))
        for answer in answers:
            if answer.error:
                raise ImageError(answer.error)
        return answers

    def stream(self, images: Iterable[ImageLike], top_k: int = 5) -> Iterator[Answer]:
        """Answers one by one, in order, for any number of images; one that cannot be read answers with an error."""
        for frames, pixels, errors in self._batches(images):
            answers: Iterator[Answer] = iter(())
            if pixels:
                read = [frame for frame, error in zip(frames, errors, strict=True) if not error]
                answers = self.task.decode(self._look(pixels), read, top_k)
            for frame, error in zip(frames, errors, strict=True):
                yield self.task.answer(frame.name, error) if error else next(answers)

    def _look(self, pixels: list[Tensor]) -> Any:
        if not self.slide:
            return self.outputs(normalize(torch.stack(pixels), self.preprocess))
        window, K = pair(self.preprocess.img_size), len(self.labels)
        normal = (normalize(x[None], self.preprocess)[0].to(self.device) for x in pixels)
        return [slide(self.model, x, window, K).cpu() for x in normal]

    @torch.inference_mode()
    def embed(self, images: ImageLike | Sequence[ImageLike]) -> Tensor:
        """(N, D): what the head receives, one row an image."""
        rows = []
        for _, pixels, errors in self._batches(expand(images)):
            if any(errors):
                raise ImageError(next(filter(None, errors)))
            rows.append(self.vit.embed(normalize(torch.stack(pixels), self.preprocess).to(self.device)).cpu())
        return torch.cat(rows)

    def prepare(self, image: ImageLike) -> Tensor:
        """One image as uint8 (C, h, w) at the size the model is fed."""
        return eval_transform(self._read(image), self.preprocess)

    def _read(self, image: ImageLike) -> Tensor:
        if isinstance(image, str | Path | bytes):
            return read_image(image, self.mode, None if self.task.spatial else decode_size(self.preprocess))
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

    def _batches(self, images: Iterable[ImageLike]) -> Iterator[tuple[list[Frame], list[Tensor], list[str]]]:
        """Frames, pixels of those that could be read, and errors, a batch at a time."""
        source = enumerate(images)
        while batch := list(islice(source, self.batch_size)):
            frames, pixels, errors = [], [], []
            for i, image in batch:
                name = str(image) if isinstance(image, str | Path) else f"image {i}"
                try:
                    x = self._read(image)
                    size = (x.shape[1], x.shape[2])
                    view = View.whole() if self.slide else eval_view(size, self.preprocess)
                    pixels.append(x if self.slide else eval_transform(x, self.preprocess))
                    frames.append(Frame(name, size, view))
                    errors.append("")
                except VitralError as error:
                    frames.append(Frame(name, (0, 0), View.whole()))
                    errors.append(str(error))
            yield frames, pixels, errors


def _task_of(model: AnyModel) -> Task:
    """The task of a model that no run tells about."""
    if isinstance(model, Detector):
        c = model.config
        labels = model.labels or [str(i) for i in range(c.num_classes)]
        return Detect(labels, DetectOptions(queries=c.queries))
    if isinstance(model, Segmenter):
        return Segment(model.labels or [str(i) for i in range(model.config.num_classes)], SegmentOptions())
    return Classify(model.labels or [str(i) for i in range(model.config.num_classes)])


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
