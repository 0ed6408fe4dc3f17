"""Regression: one or more numbers for an image."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypedDict

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.config import RegressOptions, TrainConfig
from vitral.data.sources.base import Data
from vitral.data.targets import Targets, Values
from vitral.errors import DataError
from vitral.schema import Count
from vitral.tasks.base import Answer, Found, Frame, Task, Trivial
from vitral.tasks.drawing import captioned
from vitral.tasks.metrics import Interval, Table
from vitral.weights.rundir import Described


@dataclass(frozen=True, repr=False)
class Numbers(Answer):
    """The numbers of an image, in the units of the data, with their deviations if the model predicts them."""

    names: list[str] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    deviations: list[float] | None = None

    columns: ClassVar[tuple[str, ...]] = ("target", "value", "deviation")
    formats: ClassVar[tuple[str, ...]] = ("", ".6g", ".6g")

    def content(self) -> dict[str, Any]:
        """Values by name."""
        plain: dict[str, Any] = {"values": dict(zip(self.names, self.values, strict=True))}
        if self.deviations is not None:
            plain["deviations"] = dict(zip(self.names, self.deviations, strict=True))
        return plain

    def text(self) -> str:
        """Names with values."""
        return "  ".join(f"{name} {value}" for name, value in zip(self.names, self._told(), strict=True))

    def _told(self) -> list[str]:
        if self.deviations is None:
            return [f"{value:.4g}" for value in self.values]
        return [f"{value:.4g} ± {d:.2g}" for value, d in zip(self.values, self.deviations, strict=True)]

    def records(self) -> list[list[Any]]:
        """One row per number."""
        deviations = [None] * len(self.values) if self.deviations is None else self.deviations
        return [list(row) for row in zip(self.names, self.values, deviations, strict=True)]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image with its numbers below."""
        return captioned(image, self.text())


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    mae: float
    mae_95: Interval
    rmse: float
    r2: float
    by_target: Table


class Regress(Task):
    """Targets are brought to mean 0 and deviation 1 for training, and back for answers."""

    name = "regress"
    better = "r2"
    headline = "mae"
    headline_words = "mean absolute error"
    what = "tells {n} numbers from an image"
    answer = Numbers
    measures = Measures
    compared: ClassVar[Mapping[str, str]] = {"mae": "MAE {:.4g}", "r2": "R2 {:.4f}"}
    least_gain = 0.02  # of the variance explained

    def __init__(self, labels: list[str], mean: Sequence[float], std: Sequence[float], options: RegressOptions) -> None:
        self.labels, self.options = labels, options
        self.mean, self.std = torch.tensor(mean, dtype=torch.float64), torch.tensor(std, dtype=torch.float64)

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """Mean and deviation of the training targets."""
        y = numbers_of(data)[data.splits["train"]]
        std = y.std(0, correction=0)
        if bool((std == 0).any()):
            raise DataError(f"{data.name}: a target is the same in every training image; there is nothing to learn.")
        return cls(names_of(data), y.mean(0).tolist(), std.tolist(), config.regress)

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Names, mean and deviation of the targets."""
        return cls(about.names, about.each("target_mean"), about.each("target_std"), about.train.regress)

    @property
    def outputs(self) -> int:
        """One for each number, and one more for its variance if the model predicts that."""
        return len(self.labels) * self.options.outputs

    def targets(self, data: Data) -> Targets:
        """The numbers, in their own units; they are told by their names."""
        names = names_of(data)
        if sorted(names) != sorted(self.labels):
            raise DataError(
                f"{data.name} has the numbers {', '.join(names)}, the model tells {', '.join(self.labels)}; "
                f"name their columns with --label-column."
            )
        return Values(numbers_of(data).float()[:, [names.index(name) for name in self.labels]])

    def _normal(self, targets: Tensor) -> Tensor:
        return (targets - self.mean.to(targets)) / self.std.to(targets)

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Outputs -> numbers in their units (B, K), and their deviations, where the model tells them."""
        K, mean, std = len(self.labels), self.mean.to(outputs), self.std.to(outputs)
        values = outputs[:, :K] * std + mean
        return values, (outputs[:, K:] / 2).exp() * std if outputs.shape[1] > K else None

    def loss(self, outputs: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Mean over images and numbers of the loss of (y^ - y), both in deviations; a mixed image has a mixed y."""
        y = self._normal(own[:, None] * targets + (1 - own[:, None]) * partners)
        return self._each(outputs, y).mean()

    def _each(self, outputs: Tensor, y: Tensor) -> Tensor:
        guess = outputs[:, : len(self.labels)]
        if self.options.loss == "squared":
            return 0.5 * (guess - y).square()  # L = 1/2 (y^ - y)^2
        if self.options.loss == "l1":
            return (guess - y).abs()
        if self.options.loss == "huber":
            return F.huber_loss(guess, y, reduction="none", delta=self.options.delta)
        log_variance = outputs[:, len(self.labels) :]
        return 0.5 * (log_variance + (guess - y).square() * (-log_variance).exp())  # -log N(y; y^, s^2) + const

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Absolute errors, the mean over the numbers of an image."""
        error = (self.split(outputs)[0] - targets).abs().mean(1).sum()
        return {"count": float(len(targets)), "mae": float(error)}

    def found(self, outputs: Tensor, targets: Tensor) -> Found:
        """Outputs as they are."""
        return {"outputs": outputs, "targets": targets}

    def metrics(self, found: Found) -> dict[str, Any]:
        """MAE, RMSE and R2 of each number, their means over the numbers, and the 95 % interval of the MAE."""
        outputs, targets = found["outputs"].double(), found["targets"].double()
        values, deviations = self.split(outputs)
        error = values - targets
        by_target = {}
        for i, name in enumerate(self.labels):
            spread = (targets[:, i] - targets[:, i].mean()).square().sum()
            by_target[name] = {
                "mae": float(error[:, i].abs().mean()),
                "rmse": float(error[:, i].square().mean().sqrt()),
                "r2": float(1 - error[:, i].square().sum() / spread) if spread > 0 else 0.0,
                "bias": float(error[:, i].mean()),
            }
        each = error.abs().mean(1)
        half = 1.96 * float(each.std()) / len(each) ** 0.5 if len(each) > 1 else 0.0
        means = {k: sum(row[k] for row in by_target.values()) / len(by_target) for k in ("mae", "rmse", "r2")}
        result = {"images": len(targets), **means, "mae_95": [means["mae"] - half, means["mae"] + half]}
        result |= {"loss": float(self._each(outputs, self._normal(targets)).mean()), "by_target": by_target}
        if deviations is not None:  # 68 % lie within one deviation, if the model knows what it does not know
            result["within_deviation"] = float((error.abs() <= deviations).double().mean())
        return result

    def settings(self) -> dict[str, Any]:
        """What targets were normalised by."""
        return {"target_mean": self.mean.tolist(), "target_std": self.std.tolist()}

    def summary(self, metrics: dict[str, Any]) -> str:
        """Mean absolute error and R2."""
        low, high = metrics["mae_95"]
        error = f"mean absolute error {metrics['mae']:.4g} (95 %: {low:.4g} to {high:.4g})"
        return f"{error}, RMSE {metrics['rmse']:.4g}, R2 {metrics['r2']:.4f}"

    def baseline(self, data: Data) -> dict[str, Trivial]:
        """The mean of the training split, which normalised outputs of 0 stand for."""
        return {"training mean": lambda found: found | {"outputs": torch.zeros_like(found["outputs"])}}

    def decode(self, outputs: Tensor, frames: Sequence[Frame], top_k: int) -> Iterator[Numbers]:
        """Numbers in their own units."""
        values, deviations = self.split(outputs.double())
        for i, frame in enumerate(frames):
            told = None if deviations is None else deviations[i].tolist()
            yield Numbers(frame.name, names=self.labels, values=values[i].tolist(), deviations=told)


def numbers_of(data: Data) -> Tensor:
    """The targets (N, K) of a data set as numbers; class names that are numbers count too."""
    if data.kind == "numbers":
        return data.targets.double()
    try:
        values = torch.tensor([float(name) for name in data.classes], dtype=torch.float64)
    except ValueError:
        raise DataError(f"{data.name} has no numbers to learn; name their columns with --label-column a,b.") from None
    if data.kind != "label":
        raise DataError(f"{data.name} has no numbers to learn; its targets are several labels an image.")
    return values[data.targets][:, None]


def names_of(data: Data) -> list[str]:
    """What the numbers are called."""
    return data.target_names or ["value"]
