"""How good predictions are, with how far the number can be trusted."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import torch
from torch import Tensor

from vitral.schema import Count, Length

Table = dict[str, dict[str, int | float]]
"""A row of numbers for each class, label or target."""
Interval = tuple[float, float]


class Bin(TypedDict):
    """The predictions of one tenth of confidence."""

    count: Length
    confidence: float
    accuracy: float


class Classified(TypedDict):
    """What is read of the metrics of a classifier."""

    images: Count
    accuracy: float
    accuracy_95: Interval
    ece: float
    calibration: list[Bin]
    by_class: Table
    confusion: list[list[Count]]


GROUPED = {"by_class": "class", "by_label": "label", "by_target": "target", "by_length": "length"}
"""Tables among the metrics of a task, and what their rows are."""


def grouped(metrics: Mapping[str, Any]) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return what the table among the metrics has a row for, and its rows by name; nothing if there is no table."""
    return next(((word, metrics[key]) for key, word in GROUPED.items() if key in metrics), ("", {}))


def wilson_interval(right: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % confidence interval of a proportion (Wilson, 1927)."""
    if total == 0:
        return 0.0, 1.0
    p = right / total
    centre = (p + z * z / (2 * total)) / (1 + z * z / total)
    half = z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total)) / (1 + z * z / total)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def calibration_bins(confidence: Tensor, right: Tensor, bins: int = 10) -> list[dict[str, float]]:
    """Mean confidence and accuracy of the predictions in each tenth of confidence that has any."""
    which = (confidence * bins).long().clamp(max=bins - 1)
    rows = []
    for b in range(bins):
        at = which == b
        if at.any():
            rows.append(
                {
                    "count": int(at.sum()),
                    "confidence": float(confidence[at].mean()),
                    "accuracy": float(right[at].double().mean()),
                }
            )
    return rows


def classification_metrics(logits: Tensor, targets: Tensor, classes: list[str], temperature: float) -> dict[str, Any]:
    """Accuracy with its interval, loss, calibration, and a table by class."""
    logits = logits.double()
    predicted = logits.argmax(1)
    right = predicted == targets
    probabilities = (logits / temperature).softmax(1)
    confidence = probabilities.gather(1, predicted[:, None])[:, 0]
    bins = calibration_bins(confidence, right)
    K = len(classes)
    confusion = torch.zeros(K, K, dtype=torch.long)
    confusion.index_put_((targets, predicted), torch.ones_like(targets), accumulate=True)
    by_class = {}
    for i, name in enumerate(classes):
        hit, actual, said = int(confusion[i, i]), int(confusion[i].sum()), int(confusion[:, i].sum())
        by_class[name] = {
            "images": actual,
            "recall": hit / actual if actual else 0.0,
            "precision": hit / said if said else 0.0,
            "f1": 2 * hit / (actual + said) if actual + said else 0.0,
        }
    low, high = wilson_interval(int(right.sum()), len(targets))
    return {
        "images": len(targets),
        "accuracy": float(right.double().mean()),
        "accuracy_95": [low, high],
        "loss": float(torch.nn.functional.cross_entropy(logits, targets)),
        "calibrated_loss": float(torch.nn.functional.cross_entropy(logits / temperature, targets)),
        "ece": sum(b["count"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / len(targets),
        "calibration": bins,
        "by_class": by_class,
        "confusion": confusion.tolist(),
    }


def unpredicted(confusion: list[list[int]], labels: list[str], enough: int) -> list[str]:
    """Labels with at least `enough` actual samples (rows) and no predicted one (columns)."""
    predicted = [sum(column) for column in zip(*confusion, strict=True)]
    return [name for name, row, n in zip(labels, confusion, predicted, strict=True) if sum(row) >= enough and not n]


def average_precision(scores: Tensor, right: Tensor) -> float:
    """Mean over the right ones of the precision at their place in the ranking; equal scores share a place."""
    if not right.any():
        return 0.0
    values, order = scores.sort(descending=True, stable=True)
    hits = right[order].cumsum(0).double()
    last = torch.cat([values[1:] < values[:-1], torch.ones(1, dtype=torch.bool)])
    hits, told = hits[last], (torch.arange(len(scores), dtype=torch.float64) + 1)[last]
    gained = torch.diff(hits, prepend=torch.zeros(1, dtype=torch.float64))
    return float((gained * hits / told).sum() / hits[-1])


def best_threshold(scores: Tensor, right: Tensor, there: int) -> float:
    """The score from which on to say yes, for the best F1 on answers of which some are right, `there` to be found.

    It lies halfway between the scores on either side of the cut; 0.5 where there is nothing to choose by.
    """
    if not there or not right.any():
        return 0.5
    values, order = scores.double().sort(descending=True)
    f1 = 2 * right[order].cumsum(0) / (torch.arange(1, len(values) + 1) + there)
    last = torch.cat([values[1:] < values[:-1], torch.ones(1, dtype=torch.bool)])  # equal scores go together
    best = int(torch.where(last, f1, -torch.ones_like(f1)).argmax())
    below = float(values[best + 1]) if best + 1 < len(values) else 0.0
    return (float(values[best]) + below) / 2
