"""Several labels for an image, or none."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypedDict

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.config import MultilabelOptions, TrainConfig
from vitral.data.sources.base import Data
from vitral.data.targets import Targets, Values
from vitral.errors import DataError
from vitral.schema import Count
from vitral.tasks.base import ENOUGH, Answer, Found, Frame, Task, Trivial
from vitral.tasks.drawing import captioned
from vitral.tasks.metrics import Table, average_precision, best_threshold
from vitral.weights.rundir import Described

# Of the asymmetric loss (Ridnik et al., 2021): absent labels count by p^4, and not at all where p is below the margin.
GAMMA_ABSENT, GAMMA_PRESENT, MARGIN = 4, 1, 0.05


@dataclass(frozen=True, repr=False)
class Labels(Answer):
    """The labels of an image that are above their thresholds, and every label's probability."""

    labels: list[str] = field(default_factory=list)
    probabilities: dict[str, float] = field(default_factory=dict)

    columns: ClassVar[tuple[str, ...]] = ("label", "probability", "present")
    formats: ClassVar[tuple[str, ...]] = ("", ".6f", "d")

    def content(self) -> dict[str, Any]:
        """The labels, and the probabilities of all."""
        return {"labels": self.labels, "probabilities": {k: round(p, 6) for k, p in self.probabilities.items()}}

    def text(self) -> str:
        """The labels with percentages."""
        return "  ".join(f"{k} {100 * self.probabilities[k]:.0f} %" for k in self.labels) or "no label"

    def records(self) -> list[list[Any]]:
        """One row per label."""
        return [[k, p, k in self.labels] for k, p in self.probabilities.items()]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image with its labels below."""
        return captioned(image, self.text())


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    map: float
    f1_micro: float
    exact: float
    by_label: Table


class Multilabel(Task):
    """A sigmoid for each label, binary cross-entropy or the asymmetric loss, mean average precision and F1."""

    name = "multilabel"
    better = "map"
    headline = "map"
    headline_words = "mean average precision"
    what = "tells which of {n} labels an image has"
    answer = Labels
    measures = Measures
    missing_words = "labels that are never found"
    compared: ClassVar[Mapping[str, str]] = {"map": "mean average precision {:.4f}"}

    def __init__(self, labels: list[str], options: MultilabelOptions, thresholds: list[float] | None = None) -> None:
        self.labels, self.options = labels, options
        self.thresholds = torch.tensor(thresholds or [0.5] * len(labels), dtype=torch.float64)

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The labels of the data."""
        task = cls(data.classes, config.multilabel)
        task.targets(data)  # says so if there are none
        return task

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Labels and thresholds."""
        thresholds = None if about.thresholds is None else about.each("thresholds")
        return cls(about.names, about.train.multilabel, thresholds)

    def targets(self, data: Data) -> Targets:
        """1 for each label of an image, 0 for the others; labels are told by their names."""
        if data.kind not in ("labels", "label"):
            raise DataError(f"{data.name} has no labels for its images; leave --task out, or name another.")
        y = data.targets if data.kind == "labels" else F.one_hot(data.targets, len(data.classes))
        unknown = [name for name in data.classes if name not in self.labels]
        if unknown:
            raise DataError(f"{data.name} has labels that the model does not know: {', '.join(unknown[:5])}.")
        ours = torch.zeros(len(y), len(self.labels))
        ours[:, [self.labels.index(name) for name in data.classes]] = y.float()
        return Values(ours)

    def loss(self, outputs: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Mean over images and labels; a mixed image has the labels of both, by their shares."""
        y = own[:, None] * targets + (1 - own[:, None]) * partners
        if self.options.loss == "bce":
            return F.binary_cross_entropy_with_logits(outputs, y)
        p = outputs.sigmoid()
        absent = (p - MARGIN).clamp(min=0)
        present_loss = (1 - p) ** GAMMA_PRESENT * F.logsigmoid(outputs)
        absent_loss = absent**GAMMA_ABSENT * torch.log1p(-absent.clamp(max=1 - 1e-6))
        return -(y * present_loss + (1 - y) * absent_loss).mean()

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Labels told right, the mean over the labels of an image."""
        right = ((outputs > 0) == (targets > 0.5)).double().mean(1).sum()
        return {"count": float(len(targets)), "label_accuracy": float(right)}

    def found(self, outputs: Tensor, targets: Tensor) -> Found:
        """Logits."""
        return {"logits": outputs, "targets": targets}

    def calibrate(self, found: Found) -> None:
        """Choose for each label the threshold that has the best F1."""
        p, y = found["logits"].double().sigmoid(), found["targets"] > 0.5
        found_here = [best_threshold(p[:, i], y[:, i], int(y[:, i].sum())) for i in range(len(self.labels))]
        self.thresholds = torch.tensor(found_here, dtype=torch.float64)

    def metrics(self, found: Found) -> dict[str, Any]:
        """Mean average precision, F1 over all (micro) and the mean over labels (macro), and a table by label."""
        logits, y = found["logits"].double(), found["targets"] > 0.5
        p = logits.sigmoid()
        said = p >= self.thresholds.to(p)
        by_label = {}
        for i, name in enumerate(self.labels):
            hit, actual, told = int((said[:, i] & y[:, i]).sum()), int(y[:, i].sum()), int(said[:, i].sum())
            by_label[name] = {
                "images": actual,
                "ap": average_precision(p[:, i], y[:, i]),
                "recall": hit / actual if actual else 0.0,
                "precision": hit / told if told else 0.0,
                "f1": 2 * hit / (actual + told) if actual + told else 0.0,
                "threshold": float(self.thresholds[i]),
            }
        there = [row for row in by_label.values() if row["images"]]
        hits, told, actual = int((said & y).sum()), int(said.sum()), int(y.sum())
        return {
            "images": len(y),
            "map": sum(row["ap"] for row in there) / max(len(there), 1),
            "f1_micro": 2 * hits / (told + actual) if told + actual else 0.0,
            "f1_macro": sum(row["f1"] for row in there) / max(len(there), 1),
            "exact": float((said == y).all(1).double().mean()),
            "loss": float(F.binary_cross_entropy_with_logits(logits, y.double())),
            "by_label": by_label,
        }

    def settings(self) -> dict[str, Any]:
        """The thresholds."""
        return {"thresholds": self.thresholds.tolist()}

    def summary(self, metrics: dict[str, Any]) -> str:
        """Mean average precision, F1, and images of which every label is right."""
        scores = f"mean average precision {metrics['map']:.4f}, F1 {metrics['f1_micro']:.4f}"
        return f"{scores}, all labels right in {100 * metrics['exact']:.1f} % of images"

    def baseline(self, data: Data) -> dict[str, Trivial]:
        """Each label with its frequency in the training split, for every image."""
        targets = self.targets(data)
        assert isinstance(targets, Values)
        logits = targets.tensor[data.splits["train"]].double().mean(0).logit(eps=1e-6)
        return {"class frequencies": lambda found: found | {"logits": logits.expand(len(found["targets"]), -1)}}

    def never_predicted(self, metrics: dict[str, Any]) -> list[str]:
        """Labels that are never above their threshold when they are present."""
        return [name for name, row in metrics["by_label"].items() if row["images"] >= ENOUGH and not row["recall"]]

    def decode(self, outputs: Tensor, frames: Sequence[Frame], top_k: int) -> Iterator[Labels]:
        """Labels above their thresholds, the likeliest first."""
        for frame, p in zip(frames, outputs.double().sigmoid(), strict=True):
            order = p.argsort(descending=True).tolist()
            chosen = [self.labels[i] for i in order if p[i] >= self.thresholds[i]]
            yield Labels(frame.name, labels=chosen, probabilities={self.labels[i]: float(p[i]) for i in order})
