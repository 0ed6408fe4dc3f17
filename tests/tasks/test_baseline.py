"""Baselines of each task, worked out by hand, and what a task diagnoses in its predictions."""

import pytest
import torch

from vitral.config import DetectOptions, MultilabelOptions, RegressOptions, SegmentOptions, TrainConfig
from vitral.data.sources.base import Data, ImageArray
from vitral.data.sources.open import open_data
from vitral.data.targets import Masks
from vitral.tasks import neighbours
from vitral.tasks.classify import Classify
from vitral.tasks.detect import Detect
from vitral.tasks.multilabel import Multilabel
from vitral.tasks.regress import Regress
from vitral.tasks.segment import Segment
from vitral.tasks.write import Translate

CONFIG = TrainConfig(epochs=7)
TRAIN, TEST = torch.arange(6), torch.arange(6, 9)


def data_of(pixels=None, **options):
    options = {"targets": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0]), "classes": ["ant", "bee"]} | options
    pixels = torch.zeros(9, 3, 4, 5, dtype=torch.uint8) if pixels is None else pixels
    return Data("toy", ImageArray(pixels), splits={"train": TRAIN, "test": TEST}, **options)


def colours(data):
    """Images of class 0 are red and those of class 1 green, so that neighbours are always right."""
    pixels = torch.full((len(data.targets), 3, 4, 5), 10, dtype=torch.uint8)
    pixels[torch.arange(len(pixels)), data.targets] = 200
    return data_of(pixels)


def outputs_of(data, predicted):
    return {"logits": torch.eye(2)[predicted], "targets": data.targets[TEST], "indices": TEST}


def test_classification_is_compared_with_the_majority_class_and_with_neighbours():
    data = colours(data_of())
    rows = Classify(data.classes).baselines(data, {"test": outputs_of(data, [0, 0, 0])})
    assert rows == {"test": {"majority class": {"accuracy": pytest.approx(1 / 3)}, "k-NN on pixels": {"accuracy": 1.0}}}


def test_neighbours_are_those_of_the_probe_on_pixels():
    import vitral

    data = open_data("digits")
    data = data.with_splits(0.05, None, 0)
    task, test = Classify(data.classes), data.splits["test"]
    found = {"logits": torch.zeros(len(test), 10), "targets": data.targets[test], "indices": test}
    row = task.baselines(data, {"test": found})["test"]["k-NN on pixels"]
    assert row["accuracy"] == pytest.approx(vitral.probe("pixels", data, cache=False)["accuracy"])


@pytest.mark.parametrize(("name", "limit"), [("MOST_IMAGES", 5), ("MOST_BYTES", 6 * 60), ("MOST_PIXELS", 6 * 20 - 1)])
def test_neighbours_are_only_for_small_sets(monkeypatch, name, limit):
    data = data_of()
    found = outputs_of(data, [0, 0, 0])
    assert "k-NN on pixels" in Classify(data.classes).baselines(data, {"test": found})["test"]
    monkeypatch.setattr(neighbours, name, limit)
    assert list(Classify(data.classes).baselines(data, {"test": found})["test"]) == ["majority class"]


def test_large_images_are_compared_at_32_pixels():
    data = data_of(torch.zeros(9, 3, 50, 20, dtype=torch.uint8))
    found = neighbours.small_pixels(data, TEST)
    assert found is not None
    assert found[0].shape == (3, 3 * 32 * 20)
    assert found[1].tolist() == TEST.tolist()


def test_images_are_not_their_own_neighbours():
    """An evaluation of the training split has no baseline of neighbours: each image would find itself."""
    data = data_of()
    found = {"logits": torch.eye(2)[data.targets[TRAIN]], "targets": data.targets[TRAIN], "indices": TRAIN}
    assert list(Classify(data.classes).baselines(data, {"train": found})["train"]) == ["majority class"]


def test_labels_are_compared_with_their_frequencies():
    targets = torch.zeros(9, 2, dtype=torch.long)
    targets[:5, 0] = targets[6:8, 0] = targets[8, 1] = 1
    data, task = data_of(targets=targets, kind="labels"), Multilabel(["ant", "bee"], MultilabelOptions())
    found = {"logits": torch.randn(3, 2), "targets": targets[TEST].float(), "indices": TEST}
    assert task.baselines(data, {"test": found}) == {
        "test": {"class frequencies": {"map": pytest.approx((2 / 3 + 1 / 3) / 2)}}
    }


@pytest.mark.parametrize("loss", ["squared", "gaussian"])
def test_numbers_are_compared_with_the_training_mean(loss):
    task = Regress(["x"], [10.0], [2.0], RegressOptions(loss=loss))
    targets = torch.tensor([[9.0], [11.0], [16.0]])
    found = {"outputs": torch.ones(3, task.outputs), "targets": targets, "indices": TEST}
    row = task.baselines(data_of(), {"test": found})["test"]["training mean"]
    assert row == {"mae": pytest.approx(8 / 3), "r2": pytest.approx(1 - 38 / 26)}
    assert task.baseline_summary({"training mean": row}) == ("baseline: training mean MAE 2.667 and R2 -0.4615")


@pytest.mark.parametrize(
    ("first", "filled", "expected"),
    [
        ("background", 0, {"empty mask": 0.25 / 2}),
        ("background", 1, {"empty mask": 0.25 / 2, "most frequent class": 0.75 / 2}),
        ("road", 1, {"most frequent class": 0.75 / 2}),
    ],
)
def test_masks_are_compared_with_one_class_everywhere(first, filled, expected):
    images = ImageArray(torch.full((9, 1, 4, 5), filled, dtype=torch.uint8))
    data = data_of(masks=Masks(images, [first, "car"]), mask_classes=[first, "car"])
    found = {"confusion": torch.tensor([[[3, 2], [1, 14]]]), "indices": TEST[:1]}
    rows = Segment([first, "car"], SegmentOptions()).baselines(data, {"test": found})["test"]
    assert {name: row["miou"] for name, row in rows.items()} == pytest.approx(expected)
    one = {"empty mask": {"miou": 0.25, "pixel_accuracy": 0.5}}
    assert Segment([first], SegmentOptions()).baseline_summary(one) == (
        "baseline: empty mask mean IoU 0.2500 and pixel accuracy 50.0 %"
    )


def test_boxes_are_compared_with_none():
    found = {
        "scores": torch.tensor([[0.9, 0.1]]), "labels": torch.tensor([[0, 1]]), "boxes": torch.full((1, 2, 4), 0.5),
        "targets": torch.tensor([[[0, 0.5, 0.5, 0.5, 0.5]]]), "indices": TEST[:1],
    }  # fmt: skip
    task = Detect(["ant", "bee"], DetectOptions())
    assert task.metrics(found)["ap"] == pytest.approx(1)
    assert task.baselines(data_of(), {"test": found}) == {"test": {"no box": {"ap": 0.0}}}


def test_texts_have_no_baseline():
    assert Translate.baseline(Translate.__new__(Translate), data_of()) == {}


# ---- diagnosis ----


def classified(predicted, targets):
    return Classify(["ant", "bee"]).metrics({"logits": torch.eye(2)[predicted], "targets": torch.tensor(targets)})


BASELINES = {"majority class": {"accuracy": 0.5}, "k-NN on pixels": {"accuracy": 0.75}}


def test_a_model_that_is_no_better_than_its_best_baseline_is_reported():
    task = Classify(["ant", "bee"])
    (finding,) = task.diagnose(classified([0, 0, 0, 1], [0, 0, 1, 1]), BASELINES, CONFIG)
    assert finding.problem == "not better than a baseline"
    assert finding.evidence == "the model reaches 75.0 %, k-NN on pixels 75.0 %"
    assert finding.remedy == "--model auto --epochs 28"
    assert task.diagnose(classified([0, 0, 1, 1], [0, 0, 1, 1]), BASELINES, CONFIG) == []


def test_a_regression_is_judged_by_its_r2():
    task = Regress(["x"], [10.0], [2.0], RegressOptions())
    baselines = {"training mean": {"mae": 3.0, "r2": -0.01}}
    targets = torch.tensor([[9.0], [11.0], [16.0]])
    good = task.metrics({"outputs": (targets - 10) / 2, "targets": targets})
    bad = task.metrics({"outputs": torch.full((3, 1), 0.99), "targets": targets})
    assert bad["r2"] > -0.01, "the mean of these targets, and no better for that"
    assert task.diagnose(good, baselines, CONFIG) == []
    assert [each.problem for each in task.diagnose(bad, baselines, CONFIG)] == ["not better than a baseline"]


def test_a_detector_of_a_few_lucky_boxes_is_not_better_than_none():
    task, baselines = Detect(["ant", "bee"], DetectOptions()), {"no box": {"ap": 0.0}}
    assert len(task.diagnose({"ap": 0.004, "by_class": {}}, baselines, CONFIG)) == 1
    assert task.diagnose({"ap": 0.2, "by_class": {}}, baselines, CONFIG) == []


def test_classes_that_are_never_predicted_are_named():
    task = Classify(["ant", "bee"])
    (finding,) = task.diagnose(classified([0] * 13, [0] * 10 + [1] * 3), {}, CONFIG)
    assert finding.problem == "classes that are never predicted"
    assert finding.evidence == "1 of 2 (bee)"
    assert finding.remedy == "--epochs 14"
    assert task.diagnose(classified([0] * 12, [0] * 10 + [1] * 2), {}, CONFIG) == [], "two samples are too few"


@pytest.mark.parametrize(
    ("task", "metrics"),
    [
        (Segment(["ant", "bee"], SegmentOptions()), {"miou": 0.4, "confusion": [[50, 0], [9, 0]]}),
        (Detect(["ant", "bee"], DetectOptions()), {"ap": 0.4, "by_class": {"bee": {"objects": 4, "ap50": 0.0}}}),
        (
            Multilabel(["ant", "bee"], MultilabelOptions()),
            {"map": 0.4, "by_label": {"bee": {"images": 4, "recall": 0.0}}},
        ),
    ],
)
def test_other_tasks_name_them_too(task, metrics):
    (finding,) = task.diagnose(metrics, {}, CONFIG)
    assert finding.evidence == "1 of 2 (bee)"
    assert finding.remedy == (task.balance or "--epochs 14")
