"""Classification: one label for an image."""

import torch
import torch.nn.functional as F
from torch import Tensor


class Classify:
    """Softmax over the classes, cross-entropy, accuracy."""

    name = "classify"
    better = "accuracy"
    """The metric that tells which of two models is better; more is better."""

    def __init__(self, classes: list[str], label_smoothing: float = 0.0) -> None:
        self.classes, self.label_smoothing = classes, label_smoothing

    def model_options(self) -> dict[str, int]:
        """What the model must have for this task."""
        return {"num_classes": len(self.classes)}

    def loss(self, logits: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Mean of -log p(y), the target being `own` parts y and the rest the label of the image it was mixed with."""
        each = own * self._entropy(logits, targets)
        if not bool((own == 1).all()):
            each = each + (1 - own) * self._entropy(logits, partners)
        return each.mean()

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="none", label_smoothing=self.label_smoothing)

    def sums(self, logits: Tensor, targets: Tensor) -> dict[str, float]:
        """What a batch adds to the metrics; sums over batches and processes, divided by `count`, are the metrics."""
        losses = F.cross_entropy(logits, targets, reduction="sum")
        right = (logits.argmax(1) == targets).sum()
        return {"count": float(len(targets)), "loss": float(losses), "accuracy": float(right)}


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The T that makes softmax(logits / T) most probable on held-out data, found by ternary search on log T."""
    low, high = -3.0, 3.0

    def cost(log_t: float) -> float:
        return float(F.cross_entropy(logits.double() / torch.tensor(log_t).double().exp(), targets))

    for _ in range(60):
        third = (high - low) / 3
        a, b = low + third, high - third
        low, high = (low, b) if cost(a) < cost(b) else (a, high)
    return float(torch.tensor((low + high) / 2).exp())
