"""What is diagnosed from the log of a run: each problem in a log made to show it, and nothing in a healthy one."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch

import vitral
from vitral.cli.main import main
from vitral.config import TrainConfig
from vitral.tasks.classify import Classify
from vitral.training.diagnose import diagnose, next_command
from vitral.weights.rundir import Spent, read_run_config

CONFIG = TrainConfig(epochs=10, lr=0.003, optimizer="adamw")
HEALTHY = {"train": [0.3, 0.7, 0.9, 0.93, 0.95, 0.96], "val": [0.3, 0.7, 0.88, 0.91, 0.92, 0.92]}
LOSSES = [2.3, 1.5, 0.8, 0.5, 0.4, 0.3]


def log(train, val, losses=LOSSES):
    """Lines of metrics.jsonl: accuracies at every hundredth step."""
    lines = []
    for i, (own, other, loss) in enumerate(zip(train, val, losses, strict=True), start=1):
        at = {"step": 100 * i, "epoch": i, "seconds": i}
        lines += [{"split": "train", **at, "loss": loss, "accuracy": own}, {"split": "val", **at, "accuracy": other}]
    return lines


def problems(lines, spent=Spent(steps=600, seconds=9), images=400, config=CONFIG):  # noqa: B008
    metrics = {"val": Classify(["ant", "bee"]).metrics({"logits": torch.eye(2), "targets": torch.arange(2)})}
    metrics["val"]["images"] = images
    return diagnose(Path("runs/x"), Classify(["ant", "bee"]), config, "vitral train x", lines, spent, metrics, {})


def test_a_healthy_log_has_no_finding():
    assert problems(log(**HEALTHY)) == []


def test_skipped_steps_are_a_divergence():
    (finding,) = problems(log(**HEALTHY), Spent(steps=600, seconds=9, skipped=7))
    assert finding.problem == "training diverged"
    assert finding.evidence == "7 of 600 steps were skipped because their loss was not finite"
    assert finding.remedy == "vitral train x --lr 0.001 --out runs/x-2"
    assert problems(log(**HEALTHY), Spent(steps=600, seconds=9, skipped=6)) == []


@pytest.mark.parametrize(
    ("last", "expected"), [(2.7, ["training diverged"]), (float("nan"), ["training diverged"]), (2.4, [])]
)
def test_a_loss_that_rises_is_a_divergence(last, expected):
    assert [each.problem for each in problems(log(**HEALTHY, losses=[*LOSSES[:-1], last]))] == expected


def test_few_steps_are_reported_with_a_budget_that_makes_more():
    (finding,) = problems(log(**HEALTHY), Spent(steps=90, seconds=9))
    assert finding.problem == "too few steps"
    assert "90 steps" in finding.evidence
    assert finding.remedy == "vitral train x --epochs 120 --out runs/x-2"
    assert problems(log(**HEALTHY), Spent(steps=100, seconds=9)) == []


def test_a_probe_without_training_has_no_steps_to_judge():
    assert problems([], Spent(steps=0, seconds=0), config=TrainConfig(probe="only", model="x.safetensors")) == []


def test_overfitting_is_a_training_accuracy_far_above_that_of_validation():
    train = [0.3, 0.7, 0.9, 0.99, 1.0, 1.0]
    (finding,) = problems(log(train, [0.3, 0.7, 0.78, 0.8, 0.8, 0.8]))
    assert finding.problem == "overfitting"
    assert finding.evidence == "accuracy 1 on the training split, 0.8 on the validation split"
    assert finding.remedy == (
        "vitral train x --augment.crop-scale 0.5 --augment.flip 0.5 --select best --patience 5 --out runs/x-2"
    )
    assert problems(log(train, [0.3, 0.7, 0.78, 0.86, 0.86, 0.86])) == []
    assert problems(log(train, [0.3, 0.7, 0.78, 0.8, 0.8, 0.8]), images=30) == [], "the difference may be chance"


def test_overfitting_of_a_regression_is_an_error_several_times_as_large():
    def lines(error):
        at = {"step": 100, "epoch": 1, "seconds": 1}
        return [{"split": "train", **at, "loss": 1.0, "mae": 2.0}, {"split": "val", **at, "mae": error}]

    assert [each.problem for each in problems(lines(4.1))] == ["overfitting"]
    assert problems(lines(3.9)) == []


def test_a_run_that_improves_until_its_end_should_be_longer():
    rising = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8]
    (finding,) = problems(log(rising, rising))
    assert finding.problem == "still improving when training ended"
    assert finding.evidence == "validation accuracy rose from 0.6 to 0.8 in the last fifth of the steps"
    assert finding.remedy == "vitral train x --resume --epochs 20 --out runs/x"
    assert problems(log(rising, rising), images=4) == [], "the difference may be chance"
    assert problems(log([*rising[:-1], 0.7], [*rising[:-1], 0.65])) == [], "it had its best before the end"


@pytest.mark.parametrize(
    ("command", "options", "expected"),
    [
        ("", "--epochs 4", "vitral train DATA --epochs 4 --out runs/x-2"),
        ("vitral train a/ --epochs 2 --lr 1", "--epochs 4", "vitral train a/ --lr 1 --epochs 4 --out runs/x-2"),
        ("vitral train a/ --epochs=2 --json", "--epochs 4", "vitral train a/ --json --epochs 4 --out runs/x-2"),
        ("vitral train --out runs/x 'my data'", "--lr 1", "vitral train 'my data' --lr 1 --out runs/x-2"),
        ("vitral train a/ --resume --out runs/x", "--lr 1", "vitral train a/ --lr 1 --out runs/x-2"),
        ("vitral train a/", "--resume --epochs 4", "vitral train a/ --resume --epochs 4 --out runs/x"),
    ],
)
def test_the_next_command_changes_only_what_it_should(command, options, expected):
    assert next_command(command, Path("runs/x"), options) == expected


# ---- runs ----


def test_a_short_run_is_compared_and_diagnosed_everywhere(tmp_path, capsys):
    """On the terminal, in config.json, the model card and the report, and by eval."""
    run = tmp_path / "run"
    assert main(["train", "digits", "--epochs", "1", "--out", str(run)]) == 0
    history = read_run_config(run).history
    row = history.baselines["test"]
    assert row["majority class"]["accuracy"] == pytest.approx(0.1, abs=0.02)
    assert row["k-NN on pixels"]["accuracy"] > 0.9
    assert history.diagnosis[0].problem == "not better than a baseline"
    assert history.diagnosis[-1].problem == "too few steps"
    assert {each.remedy for each in history.diagnosis} == {f"vitral train DATA --epochs 100 --out {run}-2"}
    assert history.spent is not None
    assert history.spent.skipped == 0
    words = f"baseline: majority class {100 * row['majority class']['accuracy']:.1f} %, k-NN on pixels"
    printed = capsys.readouterr().err
    assert words in printed
    assert f"warning: {history.diagnosis[0]}" in printed
    assert words in (run / "README.md").read_text()
    page = (run / "report.html").read_text()
    assert page.index(words) < page.index("Diagnosis") < page.index("compared with baselines") < page.index("Loss</h2>")
    assert "Too few steps" in page
    assert main(["eval", str(run), "digits"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert vitral.evaluate(run, "digits")["baselines"] == row


def test_steps_that_a_run_skips_are_counted_and_diagnosed(tmp_path, monkeypatch):
    calls, loss = count(), Classify.loss
    monkeypatch.setattr(Classify, "loss", lambda *args: loss(*args) * (float("nan") if next(calls) < 2 else 1))
    run = vitral.train("digits", out=tmp_path / "run", max_steps=3, quiet=True)
    history = read_run_config(run.path).history
    assert history.spent is not None
    assert history.spent.skipped == 2
    assert "2 of 3 steps were skipped" in " ".join(each.evidence for each in history.diagnosis)


@pytest.mark.slow
def test_a_healthy_run_has_no_finding(tmp_path):
    run = vitral.train("digits", out=tmp_path / "run", epochs=60, quiet=True)
    assert json.loads((run.path / "config.json").read_text())["diagnosis"] == []
    assert "Diagnosis" not in (run.path / "report.html").read_text()
