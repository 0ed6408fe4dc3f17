import math

import pytest
import torch

from helpers import images
from vitral.config import RegressOptions, TrainConfig
from vitral.data.sources.base import Data, ImageArray
from vitral.data.targets import View
from vitral.errors import DataError
from vitral.tasks.base import Frame
from vitral.tasks.regress import Regress
from vitral.weights.rundir import Described

FRAMES = [Frame(str(i), (8, 8), View.whole()) for i in range(5)]


def task(loss="squared", mean=(10.0, -2.0), std=(2.0, 0.5), **options):
    return Regress(["a", "b"], mean, std, RegressOptions(loss=loss, **options))


def numbers(targets, names=("a", "b")):
    n = len(targets)
    pixels = ImageArray(torch.zeros(n, 1, 8, 8, dtype=torch.uint8))
    splits = {"train": torch.arange(n)}
    return Data("t", pixels, torch.as_tensor(targets), [], splits, kind="numbers", target_names=list(names))


LITERAL = {
    "squared": lambda e: 0.5 * e * e,
    "l1": abs,
    "huber": lambda e: 0.5 * e * e if abs(e) <= 0.7 else 0.7 * (abs(e) - 0.35),
}


@pytest.mark.parametrize("loss", LITERAL)
def test_the_loss_is_the_mean_of_its_equation_in_deviations(loss):
    outputs, targets = images(5, 2), 3 * images(5, 2, seed=1)
    t = task(loss, delta=0.7)
    each = [
        LITERAL[loss](float(outputs[i, k]) - (float(targets[i, k]) - m) / s)
        for i in range(5)
        for k, (m, s) in enumerate([(10.0, 2.0), (-2.0, 0.5)])
    ]
    assert float(t.loss(outputs, targets, targets, torch.ones(5))) == pytest.approx(sum(each) / 10, rel=1e-5)


def test_the_gaussian_loss_is_the_negative_log_likelihood():
    outputs, targets = images(4, 4), images(4, 2, seed=1)
    t = task("gaussian")
    guess, deviation = t.split(outputs.double())
    likely = torch.distributions.Normal(guess, deviation).log_prob(targets.double())
    constant = 0.5 * math.log(2 * math.pi) + torch.tensor([2.0, 0.5]).double().log()
    ours = t.loss(outputs.double(), targets.double(), targets.double(), torch.ones(4).double())
    assert float(ours) == pytest.approx(float((-likely - constant).mean()), rel=1e-6)
    assert t.outputs == 4


def test_a_mixed_image_has_a_mixed_target():
    outputs, y, z = images(3, 2), images(3, 2, seed=1), images(3, 2, seed=2)
    own = torch.tensor([1.0, 0.25, 0.5])
    blended = own[:, None] * y + (1 - own[:, None]) * z
    assert task().loss(outputs, y, z, own) == pytest.approx(float(task().loss(outputs, blended, z, torch.ones(3))))


def test_targets_are_normalised_by_the_training_part_and_answers_are_in_their_units():
    y = torch.tensor([[1.0, 100.0], [3.0, 300.0], [5.0, 200.0]])
    t = Regress.from_data(numbers(y), TrainConfig())
    assert t.mean.tolist() == [3, 200]
    normal = (y.double() - t.mean) / t.std
    answers = list(t.decode(normal, FRAMES[:3], 1))
    assert [a.values for a in answers] == [pytest.approx(row) for row in y.tolist()]
    assert answers[0].to_dict() == {"image": "0", "values": {"a": pytest.approx(1), "b": pytest.approx(100)}}
    again = Regress.from_run(Described(source="x", preprocess=None, labels=t.labels, **t.settings()))
    assert torch.equal(again.mean, t.mean)
    assert torch.equal(again.std, t.std)


def test_metrics_against_literal_ones():
    t, outputs = task(), images(50, 2)
    targets = outputs * torch.tensor([2.0, 0.5]) + torch.tensor([10.0, -2.0]) + 0.3 * images(50, 2, seed=1)
    found = t.metrics(t.found(outputs, targets))
    for k, name in enumerate("ab"):
        told, true = t.split(outputs.double())[0][:, k].tolist(), targets[:, k].tolist()
        errors = [a - b for a, b in zip(told, true, strict=True)]
        middle = sum(true) / 50
        row = found["by_target"][name]
        assert row["mae"] == pytest.approx(sum(map(abs, errors)) / 50)
        assert row["rmse"] == pytest.approx(math.sqrt(sum(e * e for e in errors) / 50))
        assert row["r2"] == pytest.approx(1 - sum(e * e for e in errors) / sum((y - middle) ** 2 for y in true))
    assert found["mae_95"][0] < found["mae"] < found["mae_95"][1]


def test_the_mean_as_answer_has_r2_0():
    targets = images(40, 2)
    t = task(mean=targets.mean(0).tolist(), std=(1.0, 1.0))
    assert t.metrics(t.found(torch.zeros(40, 2), targets))["r2"] == pytest.approx(0, abs=1e-6)


def test_data_that_cannot_be_regressed_is_refused():
    with pytest.raises(DataError, match="same in every training image"):
        Regress.from_data(numbers([[1.0, 2.0], [1.0, 3.0]]), TrainConfig())
    labels = Data(
        "t", ImageArray(torch.zeros(2, 1, 8, 8)), torch.tensor([0, 1]), ["cat", "dog"], {"train": torch.arange(2)}
    )
    with pytest.raises(DataError, match="no numbers to learn"):
        Regress.from_data(labels, TrainConfig())
    with pytest.raises(DataError, match="has the numbers a, the model tells a, b"):
        task().targets(numbers([[1.0], [2.0]], names=("a",)))


def test_numbers_are_told_by_their_names():
    swapped = task().targets(numbers([[1.0, 2.0]], names=("b", "a")))
    assert swapped.take(0, View.whole(), (8, 8)).tolist() == [2, 1]


def test_class_names_that_are_numbers_can_be_regressed():
    data = Data(
        "t", ImageArray(torch.zeros(3, 1, 8, 8)), torch.tensor([1, 0, 1]), ["2", "10"], {"train": torch.arange(3)}
    )
    t = Regress.from_data(data, TrainConfig())
    assert t.targets(data).take(0, View.whole(), (8, 8)).tolist() == [10]
