"""How much frozen features know: the k-NN probe and the linear probe, and few labels to try them with.

n samples, D features, K classes, S settings tried at once. Everything is a function of features and labels; where they
come from is not known here.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.config import Probing
from vitral.data.sources.base import stratified_split
from vitral.errors import InputError
from vitral.tasks.metrics import wilson_interval
from vitral.tasks.neighbours import chunks, vote

Labelled = tuple[Tensor, Tensor]
"""Features (n, D) and labels (n)."""
FEW = (0.01, 0.05, 0.1)
"""Shares of the labels that few-shot results are usually given for."""
MOMENTUM = 0.9


def few_shot(labels: Tensor, fraction: float, seed: int) -> Tensor:
    """Indices of a share of the samples, class by class, at least one of each class of two or more.

    With one seed, a smaller share is a part of every larger one.
    """
    if not 0 < fraction < 1:
        raise InputError(f"the share of the labels must be above 0 and below 1, got {fraction!r}.")
    return stratified_split(labels, torch.arange(len(labels)), fraction, seed)[1]


# ---- nearest neighbours ----


def knn_probe(
    train: Labelled, test: Labelled, k: int = Probing.k, temperature: float = Probing.knn_temperature
) -> dict[str, Any]:
    """Each test sample gets the class for which its k nearest by cosine vote, each with weight exp(cosine / tau)."""
    K = _check(train, test)
    if k < 1:
        raise InputError(f"k must be at least 1, got {k}.")
    k = min(k, len(train[0]))
    predicted = vote(*train, test[0], K, k, temperature).argmax(dim=1)
    return _metrics(predicted, test[1], {"k": k, "temperature": temperature})


# ---- logistic regression ----


def linear_probe(
    train: Labelled,
    val: Labelled,
    test: Labelled,
    lrs: Sequence[float] = Probing.lrs,
    weight_decays: Sequence[float] = Probing.weight_decays,
    steps: int = 1000,
    batch_size: int = 1024,
    seed: int = 0,
) -> dict[str, Any]:
    """Logistic regression on standardised features with every rate and decay; the best on `val` is judged on `test`.

    Rates are relative to the largest that is surely stable, whatever the features: see `fit_logistic`.
    """
    K = _check(train, val, test)
    mean, std = train[0].mean(dim=0), train[0].std(dim=0, correction=0)
    std = std.where(std > 1e-6, 1.0)  # a feature that never changes has no scale of its own
    x_train, x_val, x_test = (_with_one((x - mean) / std) for x, _ in (train, val, test))
    settings = list(product(lrs, weight_decays))
    W = fit_logistic(x_train, train[1], K, settings, steps, batch_size, seed)

    accuracy, loss = _judge(x_val, val[1], W)
    best = max(range(len(settings)), key=lambda s: (accuracy[s], -loss[s]))
    lr, weight_decay = settings[best]
    chosen = {"lr": lr, "weight_decay": weight_decay, "val_accuracy": accuracy[best]}
    return _metrics((x_test @ W[:, :, best]).argmax(dim=1), test[1], chosen)


def fit_logistic(
    x: Tensor, labels: Tensor, K: int, settings: Sequence[tuple[float, float]], steps: int, batch_size: int, seed: int
) -> Tensor:
    """Minimise mean CE(x W, y) + decay / 2 |W|^2 for S settings (rate, decay) at once: (n, D + 1) -> W (D + 1, K, S).

    The gradient is x^T (softmax(x W) - Y) / n + decay W, followed with momentum, in batches that all settings share.
    The last column of x is 1; its row of W, the bias, does not decay. A step is rate / L, falling to 0 along a cosine,
    with L = |x^T x / n|_F / 2: a bound on the curvature of the cross-entropy (Boehning, 1992).
    """
    n, S = len(x), len(settings)
    L = (x.mT @ x / n).norm() / 2
    rate, decay = x.new_tensor(settings).unbind(dim=1)  # (S) each
    decay = decay.repeat(x.shape[1], 1, 1)  # (D + 1, 1, S)
    decay[-1] = 0
    Y = F.one_hot(labels, K).to(x)
    W = x.new_zeros(x.shape[1], K, S)
    V = torch.zeros_like(W)
    for step, rows in enumerate(_batches(n, batch_size, steps, seed)):
        x_b = x[rows]
        error = _scores(x_b, W).softmax(dim=1) - Y[rows, :, None]  # (b, K, S)
        gradient = (x_b.mT @ error.flatten(1)).view_as(W) / len(rows) + decay * W
        V = MOMENTUM * V + gradient
        W -= rate / L * 0.5 * (1 + math.cos(math.pi * step / steps)) * V
    return W


def _scores(x: Tensor, W: Tensor) -> Tensor:
    """x W of every setting: (n, D + 1), (D + 1, K, S) -> (n, K, S)."""
    return (x @ W.flatten(1)).unflatten(1, W.shape[1:])


def _judge(x: Tensor, labels: Tensor, W: Tensor) -> tuple[list[float], list[float]]:
    """Accuracy and loss of each setting; a loss that is no number is infinite."""
    right, loss = x.new_zeros(W.shape[2]), x.new_zeros(W.shape[2])
    for x_b, y in zip(chunks(x, W[0].numel()), chunks(labels, W[0].numel()), strict=True):
        scores = _scores(x_b, W)
        y = y[:, None].expand(-1, W.shape[2])  # (n, S)
        right += (scores.argmax(dim=1) == y).sum(dim=0)
        loss += F.cross_entropy(scores, y, reduction="none").sum(dim=0)
    return (right.double() / len(x)).tolist(), (loss / len(x)).nan_to_num(float("inf")).tolist()


def _batches(n: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Rows of so many batches, each an equal share of a random order of all, again and again."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, n)
    while steps > 0:
        order = torch.randperm(n, generator=generator)
        yield from order[: n - n % size].split(size)[:steps]
        steps -= n // size


# ---- what both share ----


def _with_one(x: Tensor) -> Tensor:
    """(n, D) -> (n, D + 1), the last column 1."""
    return F.pad(x, (0, 1), value=1.0)


def _check(*parts: Labelled) -> int:
    """Raise unless all are features (n, D) with as many whole labels; return K."""
    for x, labels in parts:
        if x.ndim != 2 or not len(x) or x.shape[1] != parts[0][0].shape[1] or labels.shape != (len(x),):
            raise InputError(
                f"a probe needs features (n, D) of one width and labels (n), "
                f"got {tuple(x.shape)} and {tuple(labels.shape)}."
            )
        if labels.is_floating_point() or labels.min() < 0:
            raise InputError(f"labels must be whole numbers from 0, got {labels.dtype} from {labels.min().item()}.")
    return int(max(labels.max() for _, labels in parts)) + 1


def _metrics(predicted: Tensor, labels: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    right = int((predicted == labels).sum())
    return {
        "images": len(labels),
        "accuracy": right / len(labels),
        "accuracy_95": list(wilson_interval(right, len(labels))),
        "settings": settings,
    }
