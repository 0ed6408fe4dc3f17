"""Classification: one label for an image."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.config import Balancing, TrainConfig
from vitral.data.sources.base import Data
from vitral.data.targets import Targets, Values
from vitral.errors import DataError
from vitral.tasks.base import ENOUGH, Answer, Found, Frame, Task, Trivial
from vitral.tasks.drawing import captioned
from vitral.tasks.metrics import Classified, classification_metrics, unpredicted
from vitral.tasks.neighbours import small_pixels, vote
from vitral.weights.rundir import Described

UNEVEN = 10
"""Times the images of the smallest class from which the largest one makes a data set uneven."""


@dataclass(frozen=True, repr=False)
class Prediction(Answer):
    """The likeliest labels of an image with their probabilities."""

    labels: list[str] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    columns: ClassVar[tuple[str, ...]] = ("label", "probability")
    formats: ClassVar[tuple[str, ...]] = ("", ".6f")

    def content(self) -> dict[str, Any]:
        """Labels with probabilities, the likeliest first."""
        pairs = zip(self.labels, self.probabilities, strict=True)
        return {"predictions": [{"label": k, "probability": round(p, 6)} for k, p in pairs]}

    def cut(self, top_k: int) -> Self:
        """The same with only its `top_k` likeliest labels."""
        return replace(self, labels=self.labels[:top_k], probabilities=self.probabilities[:top_k])

    def text(self) -> str:
        """Labels with percentages."""
        return "  ".join(f"{k} {100 * p:.1f} %" for k, p in zip(self.labels, self.probabilities, strict=True))

    def records(self) -> list[list[Any]]:
        """One row per label."""
        return [[k, p] for k, p in zip(self.labels, self.probabilities, strict=True)]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image with its labels below."""
        return captioned(image, self.text())


class Classify(Task):
    """Softmax over the classes, cross-entropy, accuracy."""

    name = "classify"
    better = "accuracy"
    headline = "accuracy"
    headline_words = "accuracy"
    what = "tells {n} classes apart"
    answer = Prediction
    measures = Classified
    compared: ClassVar[Mapping[str, str]] = {"accuracy": "%"}

    def __init__(
        self,
        labels: list[str],
        label_smoothing: float = 0.0,
        temperature: float = 1.0,
        weights: Tensor | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.labels, self.label_smoothing, self.temperature = labels, label_smoothing, temperature
        self.weights, self.notes = weights, notes

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The classes of the data."""
        if data.kind != "label":
            raise DataError(f"{data.name} does not have one class for each image; leave --task out, or name another.")
        if len(data.classes) < 2:
            raise DataError(f"{data.name} has only one class ({data.classes[0]}); classification needs at least two.")
        counts = torch.bincount(data.targets[data.splits["train"]], minlength=len(data.classes))
        weights, notes = class_weights(counts, config.class_weights)
        return cls(data.classes, config.label_smoothing, weights=weights, notes=notes)

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Labels and temperature."""
        return cls(about.names, temperature=about.temperature)

    def targets(self, data: Data) -> Targets:
        """Class numbers; classes are told by their names."""
        if data.kind != "label":
            raise DataError(f"{data.name} does not have one class for each image to compare with.")
        if data.classes == self.labels:
            return Values(data.targets)
        unknown = [name for name in data.classes if name not in self.labels]
        if unknown:
            raise DataError(
                f"{data.name} has classes that the model does not know: {', '.join(unknown[:5])}; "
                f"it knows {', '.join(self.labels[:10])}."
            )
        return Values(torch.tensor([self.labels.index(name) for name in data.classes])[data.targets])

    def loss(self, outputs: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Mean of -w_y log p(y); the target is `own` parts y, and the rest the label of the image it was mixed with."""
        each = own * self._entropy(outputs, targets)
        if not bool((own == 1).all()):
            each = each + (1 - own) * self._entropy(outputs, partners)
        return each.mean()

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)
        return each if self.weights is None else each * self.weights.to(each)[targets]

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Images told right."""
        right = (outputs.argmax(1) == targets).sum()
        return {"count": float(len(targets)), "accuracy": float(right)}

    def found(self, outputs: Tensor, targets: Tensor) -> Found:
        """Logits."""
        return {"logits": outputs, "targets": targets}

    def calibrate(self, found: Found) -> None:
        """Fit the temperature."""
        self.temperature = fit_temperature(found["logits"], found["targets"])

    def metrics(self, found: Found) -> dict[str, Any]:
        """Accuracy with its interval, loss, calibration, and a table by class."""
        return classification_metrics(found["logits"], found["targets"], self.labels, self.temperature)

    def settings(self) -> dict[str, Any]:
        """The temperature."""
        return {"temperature": self.temperature}

    def summary(self, metrics: dict[str, Any]) -> str:
        """Accuracy and its interval."""
        low, high = (100 * value for value in metrics["accuracy_95"])
        return f"accuracy {100 * metrics['accuracy']:.2f} % (95 %: {low:.2f} to {high:.2f})"

    def baseline(self, data: Data) -> dict[str, Trivial]:
        """The most frequent class of the training split; and the nearest neighbours by pixels, of small sets."""
        targets = self.targets(data)
        assert isinstance(targets, Values)
        labels, train, K = targets.tensor, data.splits["train"], len(self.labels)
        counts = torch.bincount(labels[train], minlength=K)
        fitted: dict[str, Trivial] = {
            "majority class": lambda found: found | {"logits": counts.double().expand(len(found["targets"]), -1)}
        }
        if (known := small_pixels(data, train)) is None:
            return fitted
        keys, numbers = known

        def nearest(found: Found) -> Found | None:
            queries = None if torch.isin(found["indices"], train).any() else small_pixels(data, found["indices"])
            if queries is None:
                return None
            pixels, read = queries
            return {"logits": vote(keys, labels[numbers], pixels, K), "targets": labels[read]}

        return fitted | {"k-NN on pixels": nearest}

    def never_predicted(self, metrics: dict[str, Any]) -> list[str]:
        """From the confusion matrix."""
        return unpredicted(metrics["confusion"], self.labels, ENOUGH)

    def decode(self, outputs: Tensor, frames: Sequence[Frame], top_k: int) -> Iterator[Prediction]:
        """The `top_k` likeliest labels of each image."""
        for frame, p in zip(frames, (outputs.double() / self.temperature).softmax(1), strict=True):
            values, order = p.topk(min(top_k, len(self.labels)))
            yield Prediction(frame.name, labels=[self.labels[i] for i in order.tolist()], probabilities=values.tolist())


def class_weights(counts: Tensor, kind: Balancing) -> tuple[Tensor | None, list[str]]:
    """Weights (K,) of classes with so many training images, whose mean over the images is 1, and what to report.

    Balanced weights are in proportion to 1 / n_k, `root` ones to 1 / sqrt(n_k).
    """
    there = counts[counts > 0]
    uneven = bool(there.max() > UNEVEN * there.min())
    if kind == "none" or (kind == "auto" and not uneven):
        return None, []
    each = counts.clamp(min=1).double() ** (-1.0 if kind == "balanced" else -0.5)
    each = (each * counts.sum() / (each * counts).sum()).float()
    note = f"classes have {there.min():,} to {there.max():,} training images: rare ones weigh more in the loss"
    how = f"up to {each.max() / each.min():.1f} times; --class-weights none turns this off"
    return each, [f"{note} ({how})"] if kind == "auto" else []


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The T that makes softmax(logits / T) most probable on held-out data, found by ternary search on log T.

    Of n images that are all right, the next is so with (n + 1) / (n + 2) (Laplace's rule of succession; Platt, 1999):
    the rest of each target's 1 goes to the other classes. Else few images without a mistake would make T nothing.
    """
    (n, K), low, high = logits.shape, -3.0, 3.0
    smoothing = K / (K - 1) / (n + 2) if K > 1 else 0.0  # of which torch gives a share to the class itself

    def cost(log_t: float) -> float:
        x = logits.double() / torch.tensor(log_t).double().exp()
        return float(F.cross_entropy(x, targets, label_smoothing=smoothing))

    for _ in range(60):
        third = (high - low) / 3
        a, b = low + third, high - third
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return float(torch.tensor((low + high) / 2).exp())
