"""Each task from data to run directory, report, evaluation and answers, by the same code for all."""

import csv
import io
import json
from functools import cache

import pytest
import torch
from PIL import Image

import vitral
from vitral.cli.main import main
from vitral.data.sources.scenes_digits import make_digit_scenes, make_rotated_digits
from vitral.errors import CheckpointError, DataError
from vitral.inference.predictor import Predictor
from vitral.weights.rundir import read_run_config

SMALL = {"model": "vit_micro_conv_patch8_64", "epochs": 1, "batch_size": 8, "quiet": True, "val_fraction": 0.25}
TASKS = ["multilabel", "segment", "detect", "regress"]


@cache
def rotated_digits():
    return make_rotated_digits(1, 1)


def data_for(task):
    return rotated_digits() if task == "regress" else make_digit_scenes(train=24, test=6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made = {}
    for task in TASKS:
        options = SMALL | (
            {"model": "vit_nano_conv_patch2_8", "img_size": 8, "batch_size": 256} if task == "regress" else {}
        )
        data = data_for(task)
        made[task] = (vitral.train(data, out=folder / task, task=task, **options), data)
    return made


@pytest.fixture
def pictures(tmp_path):
    for i, size in enumerate([(64, 64), (90, 40), (30, 70)]):
        Image.effect_noise(size, 80).save(tmp_path / f"{i}.png")
    return tmp_path


@pytest.mark.parametrize("task", TASKS)
def test_a_run_tells_its_task_its_metrics_and_shows_them(runs, task):
    run, _ = runs[task]
    document = read_run_config(run.path).document
    assert document["task"] == task
    assert set(document["metrics"]) == {"val", "test"}
    page = (run.path / "report.html").read_text()
    assert page.count("<img") >= 6
    assert "http://" not in page.replace("http://www.w3.org", "")
    card = (run.path / "README.md").read_text()
    assert "| test |" in card


@pytest.mark.parametrize("task", TASKS)
def test_evaluation_gives_the_metrics_of_the_end_of_training(runs, task):
    run, data = runs[task]
    again = vitral.evaluate(run.path, data)
    for name, value in run.metrics["test"].items():
        if isinstance(value, float):
            assert again[name] == pytest.approx(value, abs=1e-6), name


@pytest.mark.parametrize("task", ["multilabel", "segment", "detect"])
def test_the_same_seed_gives_the_same_weights(runs, task, tmp_path):
    from safetensors.torch import load_file

    run, data = runs[task]
    again = vitral.train(data, out=tmp_path / "again", task=task, **SMALL)
    a, b = (load_file(r.path / "model.safetensors") for r in (run, again))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("task", TASKS)
def test_predict_prints_writes_and_draws(runs, task, pictures, tmp_path, capsys):
    run, _ = runs[task]
    (pictures / "broken.png").write_bytes(b"not a picture")
    source = str(run.path)
    assert main(["predict", source, str(pictures), "--json"]) in (0, None)
    told = json.loads(capsys.readouterr().out)
    assert [("error" in t) for t in told] == [False, False, False, True]
    keys = {"multilabel": "labels", "segment": "classes", "detect": "objects", "regress": "values"}
    assert all(keys[task] in t for t in told[:3])
    main(["predict", source, str(pictures), "--csv"])
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[-1]["error"]
    assert set(Predictor(run.path).task.answer.columns) < set(rows[0])
    out = tmp_path / "drawn"
    main(["predict", source, str(pictures / "1.png"), str(pictures / "2.png"), "--out", str(out)])
    assert "1.png" in capsys.readouterr().out
    assert {"1.png", "2.png"} <= {p.name for p in out.iterdir()}
    if task == "segment":
        with Image.open(out / "1-mask.png") as mask:
            assert mask.size == (90, 40)
    if task == "detect":
        assert len(json.loads((out / "predictions.json").read_text())["images"]) == 2
        assert {p.name for p in (out / "labels").iterdir()} == {"1.txt", "2.txt"}


def test_attention_can_be_looked_at_in_a_detector_and_a_segmenter(runs, pictures):
    for task in ("segment", "detect"):
        made = vitral.explain(runs[task][0].path, pictures / "1.png")
        assert made.maps.shape[-2:] == (8, 8)
        with pytest.raises(vitral.VitralError, match="use attention"):
            vitral.explain(runs[task][0].path, pictures / "1.png", "relevance")


def test_a_run_of_another_task_is_refused_the_wrong_data(runs):
    with pytest.raises(DataError, match="no boxes"):
        vitral.evaluate(runs["detect"][0].path, rotated_digits())
    with pytest.raises(DataError, match="no masks"):
        vitral.evaluate(runs["segment"][0].path, rotated_digits())


def test_a_wrong_task_for_the_data_is_said(tmp_path):
    with pytest.raises(DataError, match="no masks; segmentation needs"):
        vitral.train("digits", out=tmp_path / "x", task="segment")
    with pytest.raises(DataError, match="no boxes; detection needs"):
        vitral.train("digits", out=tmp_path / "x", task="detect")
    for task in ("classify", "multilabel"):
        with pytest.raises(DataError, match="leave --task out"):
            vitral.train(rotated_digits(), out=tmp_path / "x", task=task)
    assert not (tmp_path / "x").exists()


def test_a_run_goes_on_with_its_own_task_and_no_other(tmp_path):
    data = make_digit_scenes(train=16, test=4)
    first = vitral.train(data, out=tmp_path / "run", task="detect", **SMALL)
    before = (first.path / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match="is a run to detect, not to segment"):
        vitral.train(data, out=first.path, task="segment", resume=True, **SMALL)
    assert (first.path / "config.json").read_bytes() == before
    again = vitral.train(data, out=first.path, resume=True, **SMALL)  # two tasks would fit the data
    assert again.metrics["test"] == first.metrics["test"]


def test_pictures_are_never_written_over_images_or_each_other(runs, pictures, tmp_path, capsys):
    source = str(runs["segment"][0].path)
    before = (pictures / "1.png").read_bytes()
    assert main(["predict", source, str(pictures / "1.png"), "--out", str(pictures)]) == 2
    assert "written over" in capsys.readouterr().err
    assert (pictures / "1.png").read_bytes() == before
    Image.effect_noise((30, 30), 9).save(pictures / "1-mask.png")
    main(["predict", source, str(pictures / "1.png"), str(pictures / "1-mask.png"), "--out", str(tmp_path / "o")])
    assert len(list((tmp_path / "o").iterdir())) == 4


def test_classes_can_be_learned_as_labels_and_as_numbers(tmp_path):
    tiny = {"model": "vit_nano_conv_patch2_8", "epochs": 1, "quiet": True, "batch_size": 256}
    labels = vitral.train("digits", out=tmp_path / "labels", task="multilabel", **tiny)
    assert len(labels.metrics["test"]["by_label"]) == 10
    numbers = vitral.train("digits", out=tmp_path / "numbers", task="regress", **tiny)
    assert "predicted" in (numbers.path / "report.html").read_text()


def test_nothing_is_found_in_no_images_but_in_the_right_shapes(runs):
    from vitral.training.session import find

    run, data = runs["detect"]
    predictor = Predictor(run.path)
    none = find(predictor.model, predictor.task, data, torch.zeros(0, dtype=torch.long), predictor.inputs, 8)
    assert none["boxes"].shape[0] == 0
    assert none["boxes"].shape[2] == 4


def test_a_detector_can_look_through_a_resnet(tmp_path):
    data = make_digit_scenes(train=8, test=2)
    options = SMALL | {
        "model": "resnet18",
        "img_size": 64,
        "batch_size": 4,
        "detect": {"encoder_layers": 1, "width": 32},
    }
    run = vitral.train(data, out=tmp_path / "run", task="detect", **options)
    again = vitral.evaluate(run.path, data)
    assert again["ap"] == pytest.approx(run.metrics["test"]["ap"])
    with pytest.raises(vitral.VitralError, match="is a ResNet; use gradcam, "):
        vitral.explain(run.path, torch.zeros(1, 64, 64, dtype=torch.uint8))


def test_training_starts_from_the_vit_inside_a_segmenter(runs, tmp_path):
    for i in range(8):
        path = tmp_path / "shades" / ("dark", "bright")[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (64, 64), 20 * i).save(path)
    still = {"epochs": 1, "lr": 0.0, "quiet": True}
    made = vitral.train(tmp_path / "shades", out=tmp_path / "x", model=str(runs["segment"][0].path), **still)
    before = vitral.load_model(runs["segment"][0].path).backbone.state_dict()
    after = vitral.load_model(made.path).state_dict()
    assert torch.equal(after["blocks.0.attn.qkv.weight"], before["blocks.0.attn.qkv.weight"])
    assert after["head.weight"].shape[0] == 2


def test_flags_may_come_first_or_with_an_equals_sign(tmp_path, capsys):
    out = tmp_path / "run"
    args = ["train", "--task=multilabel", "--max-minutes=0.01", "digits", "--out", str(out), "--json"]
    assert main(args) == 0
    assert json.loads(capsys.readouterr().out)["test"]["seeds"] == 1
    document = read_run_config(out).document
    assert document["task"] == "multilabel"
    assert document["train"]["optimizer"] == "muon"  # the recipe of the digits


def test_a_table_is_evaluated_by_its_columns(tmp_path, capsys):
    rows = ["image,age,weight"]
    for i in range(12):
        Image.new("L", (8, 8), 20 * i).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{i},{100 - i}")
    table = tmp_path / "t.csv"
    table.write_text("\n".join(rows))
    args = ["--label-column", "age,weight"]
    tiny = ["--model", "vit_nano_conv_patch2_8", "--epochs", "1", "--task", "regress", "--out", str(tmp_path / "run")]
    assert main(["train", str(table), *args, *tiny]) == 0
    assert (
        main(["eval", str(tmp_path / "run"), str(table), "--label-column", "weight,age", "--split", "train", "--json"])
        == 0
    )
    assert set(json.loads(capsys.readouterr().out.rpartition("config.json")[2])["by_target"]) == {"age", "weight"}


def test_each_task_of_the_scenes_has_its_recipe_and_the_task_must_be_said():
    from vitral.api import resolve_config

    data = make_digit_scenes(train=4, test=2)
    assert resolve_config(data, {}, "segment").segment.class_weights == "balanced"
    assert resolve_config(data, {}, "detect").segment.class_weights == "none"
    with pytest.raises(vitral.VitralError, match="say which to learn"):
        resolve_config(data, {})
