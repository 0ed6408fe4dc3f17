"""Semantic segmentation: a class for every pixel."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, TypedDict

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitral.config import Preprocess, SegmenterConfig, SegmentOptions, TrainConfig
from vitral.data.sources.base import Data
from vitral.data.sources.coco import mask_to_rle
from vitral.data.targets import IGNORE, Targets, View
from vitral.errors import DataError
from vitral.models.backbone import Backbone
from vitral.models.segmenter import Segmenter
from vitral.schema import Count
from vitral.tasks.base import ENOUGH, Answer, Found, Frame, Task, Trivial, rest_pooling
from vitral.tasks.drawing import overlaid
from vitral.tasks.metrics import Table, unpredicted
from vitral.weights.rundir import Described

BACKGROUND = "background"
"""Name of the first class of masks that also have pixels without an object."""


@dataclass(frozen=True, repr=False)
class Mask(Answer):
    """The class number of every pixel of an image, (H, W)."""

    mask: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    labels: list[str] = field(default_factory=list)

    columns: ClassVar[tuple[str, ...]] = ("label", "pixels", "share")
    formats: ClassVar[tuple[str, ...]] = ("", "d", ".6f")

    def _counts(self) -> list[tuple[int, str, int]]:
        counts = np.bincount(self.mask.ravel(), minlength=len(self.labels)).tolist()
        return [(i, name, counts[i]) for i, name in enumerate(self.labels) if counts[i]]

    def content(self) -> dict[str, Any]:
        """Each class that occurs: its pixels, their share, and the mask as COCO's run lengths."""
        classes = [
            {
                "label": name,
                "pixels": n,
                "share": n / self.mask.size,
                "rle": mask_to_rle(torch.from_numpy(self.mask == i)),
            }
            for i, name, n in self._counts()
        ]
        return {"size": list(self.mask.shape), "classes": classes}

    def text(self) -> str:
        """The classes that occur, with their shares."""
        return "  ".join(f"{name} {100 * n / self.mask.size:.1f} %" for _, name, n in self._counts())

    def records(self) -> list[list[Any]]:
        """One row per class."""
        return [[name, n, n / self.mask.size] for _, name, n in self._counts()]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image under its mask."""
        return overlaid(image, self.mask, self.labels)

    def pictures(self, image: Image.Image) -> dict[str, Image.Image]:
        """The image under its mask, and the mask on its own."""
        return {".png": self.draw(image), "-mask.png": Image.fromarray(self.mask)}


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    miou: float
    pixel_accuracy: float
    by_class: Table


class Segment(Task):
    """Cross-entropy and dice over the pixels, mean intersection over union."""

    name = "segment"
    better = "miou"
    headline = "miou"
    headline_words = "mean IoU"
    what = "gives every pixel one of {n} classes"
    answer = Mask
    measures = Measures
    compared: ClassVar[Mapping[str, str]] = {"miou": "mean IoU {:.4f}", "pixel_accuracy": "pixel accuracy %"}
    balance = "--segment.class-weights balanced"
    spatial = True

    def __init__(self, labels: list[str], options: SegmentOptions, weights: Tensor | None = None) -> None:
        self.labels, self.options, self.weights = labels, options, weights

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The classes of the masks, and their weights where they are asked for."""
        if data.masks is None:
            raise DataError(f"{data.name} has no masks; segmentation needs images/ and masks/, or COCO polygons.")
        labels = list(data.mask_classes or [])
        balanced = config.segment.class_weights == "balanced"
        return cls(labels, config.segment, balanced_weights(data, len(labels)) if balanced else None)

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """The classes."""
        return cls(about.names, about.train.segment)

    def fits(self, about: Described) -> bool:
        """Whether the model is a segmenter of as many classes."""
        return isinstance(about.model, SegmenterConfig) and about.model.num_classes == len(self.labels)

    @property
    def outputs(self) -> int:
        """The head is the segmenter's."""
        return 0

    def targets(self, data: Data) -> Targets:
        """The masks."""
        if data.masks is None:
            raise DataError(f"{data.name} has no masks to compare with.")
        if list(data.mask_classes or []) != self.labels:
            raise DataError(
                f"{data.name} has the mask classes {', '.join((data.mask_classes or [])[:5])}, "
                f"the model {', '.join(self.labels[:5])}; they must be the same, in the same order."
            )
        return data.masks

    def build(self, backbone: Backbone) -> nn.Module:
        """The backbone with a head for pixels."""
        o = self.options
        config = SegmenterConfig(
            backbone=backbone.config, num_classes=len(self.labels), head=o.head, layers=o.layers, width=o.width
        )
        rest_pooling(backbone)
        return Segmenter(config, backbone)

    def preprocess(self, p: Preprocess) -> Preprocess:
        """The whole image, its aspect kept."""
        return replace(p, crop_mode="pad")

    def loss(self, outputs: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Cross-entropy, and as many parts dice as asked for; ignored pixels count in neither."""
        y = targets.long()
        if not bool((y != IGNORE).any()):
            return outputs.sum() * 0
        weights = None if self.weights is None else self.weights.to(outputs)
        entropy = F.cross_entropy(outputs, y, weight=weights, ignore_index=IGNORE)
        return entropy + self.options.dice * dice_loss(outputs, y)

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Share of pixels told right in each image."""
        counts = targets != IGNORE
        right = ((outputs.argmax(1) == targets) & counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
        return {"count": float(len(targets)), "pixel_accuracy": float(right.sum())}

    def found(self, outputs: Tensor, targets: Tensor) -> Found:
        """A table (K, K) for each image: true class down, told class across."""
        return {"confusion": confusion(outputs.argmax(1), targets, len(self.labels))}

    def metrics(self, found: Found) -> dict[str, Any]:
        """Intersection over union of each class that is there or was told, and the mean of those; pixel accuracy."""
        total = found["confusion"].double().sum(0)
        hit, actual, told = total.diagonal(), total.sum(1), total.sum(0)
        union = actual + told - hit
        by_class = {
            name: {
                "pixels": int(actual[i]),
                "iou": float(hit[i] / union[i]),
                "recall": float(hit[i] / actual[i]) if actual[i] else 0.0,
                "precision": float(hit[i] / told[i]) if told[i] else 0.0,
            }
            for i, name in enumerate(self.labels)
            if union[i]
        }
        return {
            "images": len(found["confusion"]),
            "miou": sum(row["iou"] for row in by_class.values()) / max(len(by_class), 1),
            "pixel_accuracy": float(hit.sum() / total.sum().clamp(min=1)),
            "by_class": by_class,
            "confusion": total.long().tolist(),
        }

    def summary(self, metrics: dict[str, Any]) -> str:
        """Mean intersection over union."""
        return f"mean IoU {metrics['miou']:.4f}, pixel accuracy {100 * metrics['pixel_accuracy']:.2f} %"

    def baseline(self, data: Data) -> dict[str, Trivial]:
        """One class for every pixel: the first, if it is the background, and the most frequent one."""
        frequent = int(pixel_counts(data, len(self.labels), most=100).argmax())
        chosen = {"most frequent class": frequent}
        if self.labels[0] == BACKGROUND:
            chosen = {"empty mask": 0} | (chosen if frequent else {})
        return {name: partial(_constant, number) for name, number in chosen.items()}

    def never_predicted(self, metrics: dict[str, Any]) -> list[str]:
        """From the confusion matrix of pixels."""
        return unpredicted(metrics["confusion"], self.labels, ENOUGH)

    def decode(self, outputs: Tensor, frames: Sequence[Frame], top_k: int) -> Iterator[Mask]:
        """Class numbers at the size of each image."""
        for logits, frame in zip(outputs, frames, strict=True):
            best = to_image(logits[:1], frame.view, frame.size)[0]
            mask = torch.zeros(frame.size, dtype=torch.uint8)
            for k in range(1, len(logits)):  # one class at a time: all at once are K images of floats
                one = to_image(logits[k : k + 1], frame.view, frame.size)[0]
                mask[one > best] = k
                best = torch.maximum(best, one)
            yield Mask(frame.name, mask=mask.numpy(), labels=self.labels)


def dice_loss(logits: Tensor, y: Tensor) -> Tensor:
    """1 - 2 |p y| / (|p| + |y|), the mean over the classes that are in the batch; ignored pixels count in neither."""
    K = logits.shape[1]
    counts = (y != IGNORE)[:, None]
    p = logits.softmax(1) * counts
    truth = F.one_hot(y.masked_fill(y == IGNORE, 0), K).permute(0, 3, 1, 2) * counts
    both, sizes = (p * truth).sum((0, 2, 3)), (p + truth).sum((0, 2, 3))
    there = truth.flatten(2).any(2).any(0)
    return (1 - (2 * both[there] + 1) / (sizes[there] + 1)).mean()


def confusion(told: Tensor, truth: Tensor, K: int) -> Tensor:
    """Pixels (B, H, W) told and true -> counts (B, K, K), true class down, told class across."""
    B = len(truth)
    pairs = truth.long() * K + told
    image = torch.arange(B, device=truth.device)[:, None, None] * K * K
    counted = (image + pairs)[truth != IGNORE]
    return torch.bincount(counted, minlength=B * K * K).view(B, K, K)


def to_image(logits: Tensor, view: View, size: tuple[int, int]) -> Tensor:
    """Logits (K, h, w) of a view that begins at the image's corner -> (K, H, W) on the image."""
    h, w = (max(1, round(side / part)) for side, part in zip(logits.shape[1:], (view.height, view.width), strict=True))
    return F.interpolate(logits[None, :, :h, :w], size=size, mode="bilinear", align_corners=False)[0]


def _constant(number: int, found: Found) -> Found:
    """What the model would have found if it had given all pixels one class."""
    actual = found["confusion"].sum(2)  # (B, K)
    return {"confusion": F.one_hot(torch.tensor(number), actual.shape[1]) * actual[:, :, None]}


def balanced_weights(data: Data, K: int) -> Tensor:
    """The inverse square root of each class's share of the training pixels, with a mean of 1."""
    weights = pixel_counts(data, K).clamp(min=1).rsqrt()
    return weights / weights.mean()


def pixel_counts(data: Data, K: int, most: int = 500) -> Tensor:
    """(K,): pixels of each class in about `most` training masks at most."""
    assert data.masks is not None
    chosen = data.splits["train"][:: max(1, len(data.splits["train"]) // most)]
    counts = torch.zeros(K)
    for index in chosen.tolist():
        mask = data.masks.take(index, View.whole(), (64, 64)).long()
        counts += torch.bincount(mask[mask != IGNORE], minlength=K)[:K]
    return counts


@torch.inference_mode()
def slide(model: nn.Module, x: Tensor, window: tuple[int, int], classes: int, batch: int = 8) -> Tensor:
    """Logits (K, H, W) of an image (C, H, W) of any size, already normalised, by windows that overlap by half.

    Each window's logits count most in its middle; an image smaller than a window is padded with the mean colour, 0.
    """
    H, W = x.shape[1:]
    h, w = window
    x = F.pad(x, (0, max(w - W, 0), 0, max(h - H, 0)))
    places = [(top, left) for top in _starts(x.shape[1], h) for left in _starts(x.shape[2], w)]
    weight = (_hill(h)[:, None] * _hill(w)[None]).to(x)
    total, weights = x.new_zeros(classes, *x.shape[1:]), x.new_zeros(x.shape[1:])
    for i in range(0, len(places), batch):
        part = places[i : i + batch]
        logits = model(torch.stack([x[:, t : t + h, s : s + w] for t, s in part]))
        for (t, s), one in zip(part, logits, strict=True):
            total[:, t : t + h, s : s + w] += one * weight
            weights[t : t + h, s : s + w] += weight
    return (total / weights)[:, :H, :W]


def _starts(side: int, window: int) -> list[int]:
    """Where windows begin, half a window apart, the last one ending at the border."""
    return sorted({*range(0, side - window, max(window // 2, 1)), side - window})


def _hill(n: int) -> Tensor:
    """Weights from the border of a window to its middle, never 0."""
    return 1 - (2 * (torch.arange(n) + 0.5) / n - 1).abs() + 1 / n
