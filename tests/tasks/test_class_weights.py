"""Weights of uneven classes in the loss."""

import pytest
import torch
import torch.nn.functional as F

from vitral.tasks.classify import Classify, class_weights

COUNTS = torch.tensor([200, 50, 10])


@pytest.mark.parametrize(("kind", "power"), [("balanced", 1.0), ("root", 0.5), ("auto", 0.5)])
def test_weights_fall_with_the_frequency_and_have_mean_1(kind, power):
    weights, _ = class_weights(COUNTS, kind)
    torch.testing.assert_close(weights[2] / weights[0], torch.tensor(20.0**power))
    torch.testing.assert_close((weights * COUNTS).sum() / COUNTS.sum(), torch.tensor(1.0))


def test_every_class_has_the_same_total_if_they_are_balanced():
    weights, _ = class_weights(COUNTS, "balanced")
    torch.testing.assert_close(weights * COUNTS, torch.full((3,), 260 / 3))


def test_auto_weighs_uneven_classes_only_and_reports_it():
    assert class_weights(torch.tensor([100, 10, 30]), "auto") == (None, [])
    weights, (note,) = class_weights(torch.tensor([101, 10, 0]), "auto")
    assert weights is not None
    assert "10 to 101 training images" in note
    assert "--class-weights none" in note
    assert class_weights(COUNTS, "none") == (None, [])


def test_the_loss_is_the_weighted_mean():
    logits, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    weights = torch.tensor([0.5, 1.0, 4.0])
    task = Classify(["a", "b", "c"], weights=weights)
    expected = (weights[y] * F.cross_entropy(logits, y, reduction="none")).mean()
    torch.testing.assert_close(task.loss(logits, y, y, torch.ones(6)), expected)
    mixed = task.loss(logits, y, y.roll(1), torch.full((6,), 0.25))
    other = (weights[y.roll(1)] * F.cross_entropy(logits, y.roll(1), reduction="none")).mean()
    torch.testing.assert_close(mixed, 0.25 * expected + 0.75 * other)
