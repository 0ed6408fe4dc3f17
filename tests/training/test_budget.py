"""Steps, epochs and minutes: which of them hold if a recipe, a file, flags and Python give different ones."""

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import vitral
from vitral.api import resolve_config, resolve_pretraining
from vitral.cli.main import main
from vitral.config import TrainConfig
from vitral.data.sources.open import open_data
from vitral.recipes import layered, read_recipe
from vitral.reporting.html import draw_sections
from vitral.reporting.sections import Section
from vitral.training import session
from vitral.training.reserve import report_seconds, reserved_seconds

RECIPE = read_recipe("digits-rotated")


def budget(config):
    return config.epochs, config.max_steps, config.max_minutes


@pytest.fixture(scope="module")
def rotated():
    return open_data("digits-rotated")


def test_the_recipe_of_these_tests_has_epochs_and_minutes(rotated):
    assert budget(resolve_config(rotated, {})) == (100, None, 3)


GIVEN = [
    ({"max_steps": 7}, (100, 7, None)),
    ({"epochs": 5}, (5, None, None)),
    ({"epochs": 100}, (100, None, None)),  # the recipe's own
    ({"epochs": 30}, (30, None, None)),  # the default
    ({"max_minutes": 1.5}, (100, None, 1.5)),
    ({"max_steps": 7, "max_minutes": 1.5}, (100, 7, 1.5)),
    ({"epochs": 5, "max_minutes": 1.5}, (5, None, 1.5)),
    ({"epochs": 5, "max_steps": 7}, (5, 7, None)),
]


@pytest.mark.parametrize(("given", "expected"), GIVEN)
def test_a_given_budget_replaces_that_of_the_recipe(rotated, given, expected):
    config = resolve_config(rotated, given)
    assert budget(config) == expected
    assert config.warmup_epochs == RECIPE["warmup_epochs"]


@pytest.mark.parametrize(("given", "expected"), GIVEN)
def test_flags_do_the_same(monkeypatch, given, expected):
    seen = []
    monkeypatch.setattr("vitral.cli.train.run", seen.append)
    spaced = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert main(["train", "digits-rotated", *spaced]) == 0
    assert main(["train", "digits-rotated", *(f"--{key}={value}" for key, value in given.items())]) == 0
    assert [budget(options.train) for options in seen] == [expected] * 2


@pytest.mark.parametrize(
    ("file", "flags", "expected"),
    [
        ("max_steps = 7", [], (100, 7, None)),
        ("epochs = 5", ["--max-minutes", "2"], (5, None, 2)),
        ("max_minutes = 2", ["--epochs", "30"], (30, None, None)),
        ("max_steps = 7\nmax_minutes = 2", [], (100, 7, 2)),
        ("max_steps = 7\nmax_minutes = 2", ["--epochs", "5"], (5, None, None)),
        ("max_steps = 7", ["--max-minutes", "2"], (100, 7, 2)),
        ("lr = 0.1", [], (100, None, 3)),
    ],
)
def test_a_file_is_under_flags_and_over_the_recipe(tmp_path, monkeypatch, file, flags, expected):
    (tmp_path / "c.toml").write_text(file)
    seen = []
    monkeypatch.setattr("vitral.cli.train.run", seen.append)
    assert main(["train", "digits-rotated", "--config", str(tmp_path / "c.toml"), *flags]) == 0
    assert budget(seen[0].train) == expected


@pytest.mark.parametrize(
    ("verb", "group", "words"), [("pretrain", "pretrain", []), ("compare", "train", ["--models", "vit_nano_patch2_8"])]
)
def test_pretrain_and_compare_have_the_same_rule(tmp_path, monkeypatch, verb, group, words):
    (tmp_path / "c.toml").write_text("max_minutes = 2")
    seen = []
    monkeypatch.setattr(f"vitral.cli.{verb}.run", seen.append)
    command = [verb, "digits", *words, "--config", str(tmp_path / "c.toml")]
    assert main(command) == 0
    assert main([*command, "--max-steps", "7"]) == 0
    assert [(c.max_steps, c.max_minutes) for c in (getattr(each, group) for each in seen)] == [(None, 2), (7, None)]


def test_pretraining_from_python(monkeypatch):
    with_minutes = {"pretrain-dino": {"epochs": 9, "max_minutes": 2}}
    monkeypatch.setattr("vitral.api.list_recipes", lambda: list(with_minutes))
    monkeypatch.setattr("vitral.api.read_recipe", with_minutes.get)
    data = open_data("digits")
    assert budget(resolve_pretraining(data, {})) == (9, None, 2)
    assert budget(resolve_pretraining(data, {"max_steps": 7})) == (9, 7, None)


def test_the_same_options_again_change_nothing():
    """A resumed run puts the options of its command over its own."""
    for _, *layers in (({}, {"max_minutes": 5}, {"epochs": 3}), ({}, {"epochs": 9}, {"max_minutes": 5}), ({}, {})):
        once = layered(RECIPE, *layers)
        assert layered(once, *layers) == once


@pytest.mark.parametrize("given", [{"max_steps": 6}, {"epochs": 1}])
def test_weights_do_not_depend_on_the_speed(rotated, tmp_path, monkeypatch, given):
    """The slow clock shows the three minutes of the recipe as over after three steps."""
    few = replace(rotated, splits={part: rotated.splits[part][:100] for part in ("train", "val")})
    monkeypatch.setattr("vitral.api.write_report", lambda *_: None)
    weights = []
    for name, seconds in (("fast", 1e-4), ("slow", 20.0)):
        ticks = count(step=seconds)
        clock = SimpleNamespace(monotonic=lambda ticks=ticks: next(ticks))
        monkeypatch.setattr("vitral.training.loop.time", clock)
        options = {"model": "vit_nano_conv_patch2_8", "batch_size": 16, "save_steps": 100, "quiet": True}
        run = vitral.train(few, out=tmp_path / name, **options, **given)
        weights.append(load_file(run.path / "model.safetensors"))
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


# ---- what the minutes cover ----


def minutes(value):
    return TrainConfig(max_minutes=value)


@pytest.mark.parametrize(
    ("config", "trained", "seconds"),
    [
        (TrainConfig(), 10, 30),  # at least half a minute
        (TrainConfig(), 600, 120),  # or a fifth of the training
        (minutes(10), 600, 30),  # what was reserved
        (minutes(1), 40, 12),
    ],
)
def test_the_time_of_a_report(config, trained, seconds):
    assert report_seconds(config, trained) == seconds


def test_the_reserve_follows_from_the_measured_speed(monkeypatch):
    """Two seconds for a batch of 128, and 640 images: 10 seconds, and 30 for the report."""
    clock = count(step=2.0)
    monkeypatch.setattr("vitral.training.reserve.time", SimpleNamespace(monotonic=lambda: next(clock)))
    seen = []
    assert reserved_seconds(minutes(10), torch.arange(640), lambda rows: seen.append(len(rows))) == 10 + 30
    assert seen == [1, TrainConfig().batch_size] == [1, 128]


def test_at_most_half_of_the_minutes_are_reserved(monkeypatch):
    clock = count(step=100.0)
    monkeypatch.setattr("vitral.training.reserve.time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert reserved_seconds(minutes(1), torch.arange(640), lambda rows: None) == 30


def test_the_minutes_cover_what_comes_before_and_after(rotated, tmp_path, monkeypatch, capsys):
    """The clock of the session shows that 30 seconds have passed before training."""
    few = replace(rotated, splits={part: rotated.splits[part][:40] for part in ("train", "val", "test")})
    monkeypatch.setattr("vitral.api.write_report", lambda *_: None)
    monkeypatch.setattr("vitral.training.session.reserved_seconds", lambda config, rows, evaluate: float(len(rows)))
    clock = iter([100.0, 130.0])
    monkeypatch.setattr("vitral.training.session.time", SimpleNamespace(monotonic=lambda: next(clock)))
    given = []
    real = session.fit
    monkeypatch.setattr(session, "fit", lambda *args: (given.append(args[-1]), real(*args))[1])
    vitral.train(few, out=tmp_path / "run", model="vit_nano_conv_patch2_8", max_steps=2, max_minutes=3)
    assert given == [180 - 30 - 80]
    assert "of 3 minutes, 1.3 are reserved for the evaluation and the report" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_a_report_leaves_sections_out_when_its_time_is_over(monkeypatch, seconds):
    clock = count(step=30.0)
    monkeypatch.setattr("vitral.reporting.html.time", SimpleNamespace(monotonic=lambda: next(clock)))
    made = [Section(title, lambda title=title: f"body of {title}") for title in "ABCDE"]
    page = "".join(draw_sections(made, seconds, quiet=True))
    assert [f"body of {title}" in page for title in "ABCDE"] == [seconds > 0] * 3 + [False] * 2
    assert ("D, E." if seconds else "A, B, C, D, E.") in page
