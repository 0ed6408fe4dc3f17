import pytest
import torch
import torch.nn.functional as F

from helpers import images
from vitral.config import MultilabelOptions
from vitral.data.sources.base import Data, ImageArray
from vitral.data.targets import View
from vitral.errors import DataError
from vitral.tasks.base import Frame
from vitral.tasks.metrics import average_precision, best_threshold
from vitral.tasks.multilabel import Multilabel
from vitral.weights.rundir import Described

LABELS = ["cat", "dog", "hat"]


def task(loss="bce", **options):
    return Multilabel(LABELS, MultilabelOptions(loss=loss), **options)


def present(n=30, seed=3):
    return (images(n, 3, seed=seed) > 0).float()


def test_bce_against_a_literal_sum():
    logits, y = images(6, 3), present(6)
    p = logits.sigmoid()
    literal = -(y * p.log() + (1 - y) * (1 - p).log()).mean()
    torch.testing.assert_close(task().loss(logits, y, y, torch.ones(6)), literal)


def test_the_asymmetric_loss_against_a_literal_sum():
    logits, y = 2 * images(6, 3), present(6)
    total = 0.0
    for z, t in zip(logits.flatten().tolist(), y.flatten().tolist(), strict=True):
        p = 1 / (1 + torch.tensor(-z).exp())
        m = (p - 0.05).clamp(min=0)
        total -= float((1 - p) * p.log()) if t else float(m**4 * (1 - m).log())
    assert float(task("asymmetric").loss(logits, y, y, torch.ones(6))) == pytest.approx(total / 18, rel=1e-4)


def test_easy_absent_labels_cost_nothing_in_the_asymmetric_loss():
    logits, y = torch.full((1, 3), -6.0), torch.zeros(1, 3)
    assert float(task("asymmetric").loss(logits, y, y, torch.ones(1))) == 0
    assert float(task().loss(logits, y, y, torch.ones(1))) > 0


def test_a_mixed_image_has_the_labels_of_both():
    logits, y, z, own = images(4, 3), present(4), present(4, seed=5), torch.tensor([1.0, 0.0, 0.3, 0.6])
    soft = own[:, None] * y + (1 - own[:, None]) * z
    torch.testing.assert_close(task().loss(logits, y, z, own), F.binary_cross_entropy_with_logits(logits, soft))


def literal_ap(scores, right):
    """Precision at each right one, with ties taken together."""
    total = 0.0
    for s, r in zip(scores, right, strict=True):
        if r:
            above = [b for a, b in zip(scores, right, strict=True) if a >= s]
            total += sum(above) / len(above)
    return total / sum(right)


@pytest.mark.parametrize("digits", [8, 1])
def test_average_precision_against_a_literal_loop(digits):
    scores, right = images(60).round(decimals=digits), images(60, seed=1) > 0.3
    assert average_precision(scores, right) == pytest.approx(literal_ap(scores.tolist(), right.tolist()))
    assert average_precision(scores, torch.zeros(60, dtype=torch.bool)) == 0


def test_average_precision_is_scikit_learns():
    metrics = pytest.importorskip("sklearn.metrics")
    scores, right = images(200).round(decimals=1), images(200, seed=1) > 0.5
    assert average_precision(scores, right) == pytest.approx(
        metrics.average_precision_score(right.numpy(), scores.numpy())
    )


def test_the_threshold_has_the_best_f1_of_all():
    p, y = images(40).sigmoid().double().round(decimals=2), images(40, seed=1) > 0

    def f1(threshold):
        said = p >= threshold
        return 2 * int((said & y).sum()) / int(said.sum() + y.sum())

    chosen = best_threshold(p, y, int(y.sum()))
    assert f1(chosen) == max(f1(t) for t in p.tolist())
    assert best_threshold(p, torch.zeros(40, dtype=torch.bool), 0) == 0.5


def test_thresholds_are_chosen_on_validation_saved_and_used():
    t = task()
    logits, y = images(50, 3), present(50)
    t.calibrate(t.found(logits, y))
    again = Multilabel.from_run(Described(source="x", preprocess=None, labels=LABELS, **t.settings()))
    assert torch.equal(again.thresholds, t.thresholds)
    frames = [Frame(str(i), (8, 8), View.whole()) for i in range(50)]
    said = torch.tensor([[float(name in a.labels) for name in LABELS] for a in again.decode(logits, frames, 1)])
    assert torch.equal(said.bool(), logits.double().sigmoid() >= t.thresholds)
    table = t.metrics(t.found(logits, y))
    hits = int((said.bool() & y.bool()).sum())
    assert table["f1_micro"] == pytest.approx(2 * hits / float(said.sum() + y.sum()))
    assert table["exact"] == pytest.approx(float((said == y).all(1).double().mean()))


def test_thresholds_tell_very_sure_logits_apart():
    t, y = Multilabel(["a"], MultilabelOptions()), torch.tensor([[1.0], [1.0], [0.0], [0.0]])
    found = t.found(torch.tensor([[30.0], [29.0], [18.0], [18.0]]), y)
    t.calibrate(found)
    assert t.metrics(found)["f1_micro"] == 1


def test_perfect_logits_have_map_1_and_reversed_ones_less():
    y = present(40)
    t = task()
    assert t.metrics(t.found(10 * y - 5, y))["map"] == 1
    assert t.metrics(t.found(5 - 10 * y, y))["map"] < 0.6


def test_labels_are_told_by_their_names():
    pixels, splits = ImageArray(torch.zeros(2, 1, 8, 8)), {"train": torch.arange(2)}
    data = Data("t", pixels, torch.tensor([[1.0, 0.0], [1.0, 1.0]]), ["hat", "cat"], splits, kind="labels")
    targets = task().targets(data)
    assert [targets.take(i, View.whole(), (8, 8)).tolist() for i in range(2)] == [[0, 0, 1], [1, 0, 1]]
    with pytest.raises(DataError, match="does not know: cow"):
        task().targets(Data("t", pixels, torch.ones(2, 1), ["cow"], splits, kind="labels"))
    with pytest.raises(DataError, match="no labels for its images"):
        task().targets(Data("t", pixels, torch.ones(2, 1), [], splits, kind="numbers"))


def test_an_image_without_a_label_says_so():
    (answer,) = task().decode(torch.full((1, 3), -5.0), [Frame("x", (8, 8), View.whole())], 1)
    assert answer.labels == []
    assert answer.text() == "no label"
    assert set(answer.to_dict()["probabilities"]) == set(LABELS)
