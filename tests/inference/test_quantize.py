"""int8: what it may cost is kept to, what it is calibrated with is not what it is judged by."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import vitral
from tiny import tiny_predictor
from vitral.cli.main import main
from vitral.config import QuantizeOptions
from vitral.data.sources.open import open_data
from vitral.errors import ConfigError, VitralError
from vitral.inference import quantize as q
from vitral.inference.export import convert_openvino, quiet
from vitral.inference.graph import graph_of
from vitral.inference.predictor import Predictor
from vitral.models.merge import merged


@pytest.fixture
def digits():
    data = open_data("digits")
    return replace(data, splits={"train": data.splits["train"][:300]})


@pytest.fixture
def steps(monkeypatch):
    """Three ways that write nothing of worth, and what the metric is before and after each."""
    scores = []

    def ways(graph, document, images):
        for i in range(3):
            yield f"way {i}", lambda path: path.write_text(path.name)

    monkeypatch.setitem(q._STEPS, "onnx", ways)
    monkeypatch.setattr(q, "open_exported", lambda path: None)
    monkeypatch.setattr(q, "_score", lambda predictor, network, data: scores.pop(0))
    monkeypatch.setattr(q, "calibration_images", lambda predictor, data, count: np.zeros((count, 3, 20, 24)))
    return scores


def test_the_first_way_that_costs_little_enough_is_taken(steps, digits, tmp_path):
    steps += [0.9, 0.8, 0.896, 0.9]
    made = vitral.export(tiny_predictor("classify"), tmp_path / "m.onnx", int8=True, data=digits, max_drop=0.5)
    assert made.loss.how == "way 1"
    assert made.loss.points == pytest.approx(0.4)
    assert made.loss.images == 31  # a tenth of each class, rounded
    assert steps == [0.9]  # the third was not tried
    told = json.loads(made.sidecar.read_text())
    assert told["precision"] == "int8"
    assert told["int8"]["after"] == 0.896
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "m.onnx.json"]


def test_nothing_is_written_where_every_way_costs_too_much(steps, digits, tmp_path):
    steps += [0.9, 0.8, 0.893, float("nan")]
    with pytest.raises(
        VitralError, match=r"accuracy falls from 90\.00 to 89\.30 %, more than --max-drop 0\.5 \(way 1\)"
    ):
        vitral.export(tiny_predictor("classify"), tmp_path / "m.onnx", int8=True, data=digits)
    assert list(tmp_path.iterdir()) == []


def test_a_gain_is_no_loss(steps, digits, tmp_path):
    steps += [0.9, 0.91]
    made = vitral.export(tiny_predictor("classify"), tmp_path / "m.onnx", int8=True, data=digits, max_drop=0)
    assert made.loss.points == pytest.approx(-1)


def test_calibration_takes_training_images_alone(digits):
    predictor = Predictor(vitral.create_model("vit_nano_patch2_8", seed=0))
    data = digits.with_splits(0.2, 0.0, seed=0)
    found = q.calibration_images(predictor, data, 17)
    assert found.shape == (17, 1, 8, 8)
    pixels = predictor.inputs.normal(data.images.pixels[data.splits["train"]])
    rows = {row.tobytes() for row in pixels.numpy()}
    assert all(image.tobytes() in rows for image in found)
    assert np.array_equal(found, q.calibration_images(predictor, data, 17))
    assert len(q.calibration_images(predictor, data, 9999)) == len(data.splits["train"])


def test_mistakes_are_one_sentence(digits, tmp_path, capsys):
    predictor = tiny_predictor("classify")
    with pytest.raises(ConfigError, match="give both or neither"):
        vitral.export(predictor, tmp_path / "m.onnx", int8=True)
    with pytest.raises(ConfigError, match="int8 goes into openvino and onnx files, got pt2"):
        vitral.export(predictor, tmp_path / "m.pt2", int8=True, data=digits)
    with pytest.raises(ConfigError, match="max_drop must be a number of at least 0"):
        QuantizeOptions(max_drop=-1)
    assert main(["export", "runs/x", "--max-drop", "1"]) == 2
    assert "are for --int8" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return vitral.train(
        "digits", out=tmp_path_factory.mktemp("run") / "r", model="vit_nano_conv_patch2_8", epochs=6, quiet=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.xml", "m.onnx"])
def test_a_trained_model_in_int8_still_tells_digits(run, name, tmp_path):
    made = vitral.export(run.path, tmp_path / name, int8=True, data="digits", max_drop=3, calibration_images=60)
    assert made.loss.points <= 3
    predictor = Predictor(made.path)
    assert predictor.network.document["precision"] == "int8"
    metrics = vitral.evaluate(predictor, "digits")
    assert metrics["accuracy"] > run.metrics["test"]["accuracy"] - 0.06
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(predictor.logits(x), Predictor(run.path).logits(x))  # it is in int8 indeed


@pytest.mark.slow
def test_more_and_more_layers_are_kept(run):
    from vitral.inference.export import convert_openvino
    from vitral.inference.graph import graph_of

    predictor = Predictor(run.path)
    model = convert_openvino(graph_of(predictor.model, predictor.preprocess))
    kinds = {op.get_friendly_name(): op.get_type_name() for op in model.get_ops()}
    none, ends, more = ([kinds[name] for name in names] for _, names in q.keep_steps(model))
    assert none == []
    assert Counter(ends) == {"Convolution": 1, "MatMul": 1}
    assert len(more) >= len(ends) + predictor.model.config.depth


def test_products_that_are_no_layers_stay_exact():
    model = tiny_predictor("classify").model
    for amount, merges in ((0, 0), (3, 1)):  # of two blocks the last, which answers for [CLS] alone, merges none
        with quiet():
            graph = convert_openvino(graph_of(merged(model, amount) if amount else model, model.preprocess))
        products = {op.get_friendly_name() for op in graph.get_ordered_ops() if op.get_type_name() == "MatMul"}
        layers = {name for _, names in q.keep_steps(graph) for name in names}
        found = q.other_products(graph)
        assert len(found) == 4 + 3 * merges  # W_K, scores, sums and W_V of [CLS]; likeness, sizes and means
        assert set(found) <= products - layers
        assert len(products) == len(found) + 4 + 4 + 1  # qkv or q, proj, fc1, fc2 of each block, and the head
