"""Training from end to end, on the embedded digits and on folders of pictures."""

import json
import math
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral
from helpers import stop_after
from vitral.cli.main import main
from vitral.config import TOP_K
from vitral.errors import CheckpointError, ConfigError, DataError, TrainingError, UnknownNameError
from vitral.training import session
from vitral.weights.atomic import SUFFIX
from vitral.weights.lock import BusyError, locked

QUICK = {"epochs": 2, "save_steps": 3, "log_steps": 1, "quiet": True, "eval_every": 1}


def weights(run):
    return load_file(run / "model.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return vitral.train("digits", out=tmp_path_factory.mktemp("runs") / "digits", **QUICK)


def test_a_run_directory_has_what_it_should(finished):
    names = {path.name for path in finished.path.iterdir()}
    assert names == {
        *("README.md", "checkpoints", "config.json", "evaluation.safetensors", "metrics.jsonl", "model.safetensors"),
        *("report.html", "tensorboard", ".lock", "train_images.safetensors"),
    }
    config = json.loads((finished.path / "config.json").read_text())
    assert config["format_version"] == 1
    assert config["labels"] == [str(i) for i in range(10)]
    assert config["train"]["epochs"] == 2
    assert config["data"]["splits"] == {"train": 1367, "val": 70, "test": 360}
    assert config["metrics"]["test"]["images"] == 360
    assert config["temperature"] > 0
    card = (finished.path / "README.md").read_text()
    assert "CC BY 4.0" in card
    assert f"{100 * finished.metrics['test']['accuracy']:.2f} %" in card


def test_metrics_are_logged_step_by_step(finished):
    lines = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    assert [line["step"] for line in train] == list(range(1, 21))
    assert [line["step"] for line in lines if line["split"] == "val"] == [10, 20]
    assert train[-1]["loss"] < train[0]["loss"]
    assert all(math.isfinite(v) for line in lines for v in line.values() if isinstance(v, float))


def test_tensorboard_has_the_same_numbers(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished.path / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (finished.path / "metrics.jsonl").read_text().splitlines()]
    for split, name in (("train", "loss"), ("val", "accuracy")):
        written = [(line["step"], line[name]) for line in lines if line["split"] == split]
        shown = [(event.step, event.value) for event in events.Scalars(f"{split}/{name}")]
        assert [step for step, _ in shown] == [step for step, _ in written]
        assert [value for _, value in shown] == pytest.approx([value for _, value in written])


def test_the_model_is_the_average_not_the_last_step(finished):
    (newest,) = list((finished.path / "checkpoints").glob("step-000000020"))
    assert same(weights(finished.path), load_file(newest / "ema.safetensors"))
    assert not same(weights(finished.path), load_file(newest / "model.safetensors"))


def test_the_same_seed_gives_the_same_weights_and_another_does_not(finished, tmp_path):
    again = vitral.train("digits", out=tmp_path / "again", **QUICK)
    other = vitral.train("digits", out=tmp_path / "other", seed=1, **QUICK)
    assert same(weights(again.path), weights(finished.path))
    assert not same(weights(other.path), weights(finished.path))


@pytest.mark.parametrize("steps", [1, 7, 10, 14])
def test_a_stopped_run_goes_on_to_the_same_bits(finished, tmp_path, monkeypatch, steps):
    """At the first step, in mid-epoch, between epochs."""
    out = tmp_path / "run"
    with stop_after(monkeypatch, session, steps), pytest.raises(KeyboardInterrupt):
        vitral.train("digits", out=out, **QUICK)
    assert not (out / "model.safetensors").exists()
    run = vitral.train("digits", out=out, resume=True, **QUICK)
    assert same(weights(run.path), weights(finished.path))
    steps_of = lambda r: [json.loads(line)["step"] for line in (r.path / "metrics.jsonl").read_text().splitlines()]  # noqa: E731
    assert steps_of(run) == steps_of(finished)


@pytest.mark.parametrize(
    "options",
    [{"optimizer": "adamw"}, {"accumulate": 2, "patch_drop": 0.4}, {"drop_path_rate": 0.3, "checkpoint_blocks": True}],
)
def test_variants_also_resume_to_the_same_bits(tmp_path, monkeypatch, options):
    whole = vitral.train("digits", out=tmp_path / "whole", **QUICK, **options)
    with stop_after(monkeypatch, session, 8), pytest.raises(KeyboardInterrupt):
        vitral.train("digits", out=tmp_path / "run", **QUICK, **options)
    run = vitral.train("digits", out=tmp_path / "run", resume=True, **QUICK, **options)
    assert same(weights(run.path), weights(whole.path))


def test_accumulation_gives_nearly_the_same_model(finished, tmp_path):
    """Not to the bit, because sums are taken in another order."""
    run = vitral.train("digits", out=tmp_path / "run", accumulate=4, **QUICK)
    a, b = weights(run.path), weights(finished.path)
    assert max((a[k] - b[k]).abs().max().item() for k in a) < 0.02


def test_a_damaged_checkpoint_falls_back_to_the_one_before(finished, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    with stop_after(monkeypatch, session, 8), pytest.raises(KeyboardInterrupt):
        vitral.train("digits", out=out, **QUICK)
    newest = max((out / "checkpoints").iterdir())
    (newest / "model.safetensors").write_bytes(b"broken")
    run = vitral.train("digits", out=out, resume=True, **(QUICK | {"quiet": False}))
    assert f"{newest.name} is damaged" in capsys.readouterr().err.replace("\n", " ")
    assert same(weights(run.path), weights(finished.path))


def test_patch_dropout_is_of_training_alone(tmp_path, finished):
    run = vitral.train("digits", out=tmp_path / "run", **QUICK, patch_drop=0.5)
    assert not same(weights(run.path), weights(finished.path))
    assert vitral.load_model(run.path).patch_drop.rate == 0
    again = vitral.evaluate(run.path, "digits")
    assert {key: again[key] for key in ("accuracy", "images")} == {
        key: run.metrics["test"][key] for key in ("accuracy", "images")
    }


def test_patch_dropout_is_refused_where_every_patch_counts():
    with pytest.raises(ConfigError, match=r"--patch-drop leaves patches .* to segment with a Linear takes every token"):
        session.drop_patches(torch.nn.Linear(2, 3), 0.5, "segment")
    session.drop_patches(torch.nn.Linear(2, 3), 0.0, "segment")


class TestLock:
    def test_a_second_training_into_the_same_place_is_refused(self, tmp_path, capsys):
        out = tmp_path / "run"
        with locked(out):
            assert main(["train", "digits", "--out", str(out), "--max-steps", "1"]) == 2
            assert main(["train", "digits", "--out", str(out), "--max-steps", "1", "--resume"]) == 2
            assert main(["pretrain", "digits", "--out", str(out), "--max-steps", "1"]) == 2
            assert [path.name for path in out.iterdir()] == [".lock"]
        refusal = f"vitral: another process is writing to {out}; wait until it ends, or give another --out."
        assert capsys.readouterr().err.splitlines() == [refusal] * 3

    def test_it_is_held_until_the_report_is_written(self, tmp_path, monkeypatch):
        reports = []

        def report(path, data, quiet):
            with pytest.raises(BusyError):
                locked(path).__enter__()
            reports.append(path)

        monkeypatch.setattr("vitral.api.write_report", report)
        run = vitral.train("digits", out=tmp_path / "run", max_steps=1, quiet=True)
        assert reports == [run.path]
        with locked(run.path):
            pass

    def test_what_a_kill_left_is_removed_by_the_next_start(self, tmp_path, monkeypatch):
        out = tmp_path / "run"
        with pytest.raises(KeyboardInterrupt), stop_after(monkeypatch, session, 4):
            vitral.train("digits", out=out, **QUICK)
        kept = set(out.rglob("*"))
        (out / f".best.safetensors.x{SUFFIX}" / "files").mkdir(parents=True)
        (out / "checkpoints" / ".making-step-000000007" / "model.safetensors").mkdir(parents=True)
        (out / ".config.json.4242.tmp").write_text("{")  # as vitral 0.1.0 named it
        (out / ".notes.tmp").write_text("of the user")
        with pytest.raises(KeyboardInterrupt), stop_after(monkeypatch, session, 1):
            vitral.train("digits", out=out, resume=True, **QUICK)
        more = {path.relative_to(out).parts[0] for path in set(out.rglob("*")) - kept}
        assert {".notes.tmp"} <= more <= {".notes.tmp", "tensorboard", "checkpoints"}
        assert all(path.name.startswith("step-") for path in (out / "checkpoints").iterdir())


class TestResume:
    def test_it_starts_a_run_where_there_is_none(self, finished, tmp_path, capsys):
        run = vitral.train("digits", out=tmp_path / "new", resume=True, **(QUICK | {"quiet": False}))
        assert f"no run in {run.path} yet: starting one" in capsys.readouterr().err.replace("\n", "")
        assert same(weights(run.path), weights(finished.path))
        assert json.loads((run.path / "config.json").read_text())["train"]["epochs"] == 2


class TestRefusals:
    def test_a_run_is_never_written_over(self, finished):
        with pytest.raises(
            CheckpointError, match="already holds a run; pass --resume to continue it, or give another --out"
        ):
            vitral.train("digits", out=finished.path, **QUICK)

    def test_other_options_are_named(self, finished):
        with pytest.raises(CheckpointError, match=r"started with other options \(lr: 0\.003 in the run, 0\.5 now\)"):
            vitral.train("digits", out=finished.path, resume=True, lr=0.5, **QUICK)

    def test_checkpoints_without_their_config_are_not_resumed(self, tmp_path):
        (tmp_path / "checkpoints").mkdir()
        for resume in (False, True):
            with pytest.raises(CheckpointError, match=r"has checkpoints but no config\.json"):
                vitral.train("digits", out=tmp_path, resume=resume, **QUICK)

    def test_bad_options_leave_nothing_behind(self, tmp_path):
        out = tmp_path / "run"
        for options, error in (
            ({"epochs": 0}, ConfigError),
            ({"model": "vit_nono"}, UnknownNameError),
            ({"epoch": 3}, UnknownNameError),
            ({"img_size": 9}, ConfigError),
            ({"accumulate": 3}, ConfigError),
            ({"task": "dance"}, UnknownNameError),
        ):
            with pytest.raises(error):
                vitral.train("digits", out=out, **(QUICK | options))
        assert not (out / "config.json").exists()


def test_a_loss_that_is_not_finite_is_skipped_and_then_stops_the_run(tmp_path, monkeypatch, capsys):
    from vitral.tasks.classify import Classify

    real, calls = Classify.loss, [0]

    def sometimes_nan(self, *args):
        calls[0] += 1
        return real(self, *args) * (math.nan if calls[0] in (3, 4, 8) else 1.0)

    monkeypatch.setattr(Classify, "loss", sometimes_nan)
    run = vitral.train("digits", out=tmp_path / "run", **(QUICK | {"quiet": False}))
    said = capsys.readouterr().err
    assert said.count("the step is skipped") == 3
    assert all(w.isfinite().all() for w in weights(run.path).values())
    monkeypatch.setattr(Classify, "loss", lambda self, *args: real(self, *args) * math.nan)
    with pytest.raises(TrainingError, match=r"not finite in 4 steps in a row, last nan at step 4; lower --lr"):
        vitral.train("digits", out=tmp_path / "bad", max_bad_steps=4, **QUICK)


def test_max_minutes_ends_the_schedule_on_time(tmp_path, monkeypatch):
    ticks = count(step=0.01)
    clock = SimpleNamespace(monotonic=lambda: next(ticks))  # every look at it takes a hundredth of a second
    monkeypatch.setattr("vitral.training.loop.time", clock)
    run = vitral.train("digits", out=tmp_path / "run", **(QUICK | {"epochs": 100000}), max_minutes=0.03)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    train = [line for line in lines if line["split"] == "train"]
    assert train[-1]["progress"] > 0.9
    assert train[-1]["lr"] < 0.1


def test_select_best_keeps_the_best_on_validation(tmp_path):
    run = vitral.train("digits", out=tmp_path / "run", select="best", **(QUICK | {"epochs": 4}))
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    best = max(line["accuracy"] for line in lines if line["split"] == "val")
    assert run.metrics["val"]["accuracy"] == pytest.approx(best)
    assert not (run.path / "best.safetensors").exists()


@pytest.fixture
def photos(tmp_path):
    """Two classes that differ in colour, in pictures of different sizes."""
    for i in range(16):
        for name, colour in (("blue", (20, 30, 160 + 4 * i)), ("red", (160 + 4 * i, 30, 20))):
            (tmp_path / "photos" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40 + i, 30 + 2 * i), colour).save(tmp_path / "photos" / name / f"{i}.jpg")
    return tmp_path / "photos"


FOLDER = {
    "model": "vit_lite_conv_patch4_32",
    "img_size": 16,
    "epochs": 6,
    "batch_size": 8,
    "val_fraction": 0.25,
    "quiet": True,
}


def test_a_folder_of_pictures_in_a_model_out(photos, tmp_path):
    run = vitral.train(photos, out=tmp_path / "run", augment={"crop_scale": 0.5, "flip": 0.5}, workers=2, **FOLDER)
    assert run.metrics["val"]["accuracy"] == 1.0
    predictor = vitral.Predictor(run.path)
    answers = predictor.predict([photos / "red" / "3.jpg", photos / "blue" / "3.jpg"])
    assert [answer.labels[0] for answer in answers] == ["red", "blue"]
    assert vitral.evaluate(run.path, photos)["accuracy"] == 1.0


def test_an_unreadable_file_is_a_warning_or_with_strict_the_end(photos, tmp_path, capsys):
    (photos / "red" / "3.jpg").write_bytes(b"broken")
    run = vitral.train(photos, out=tmp_path / "run", **(FOLDER | {"quiet": False, "val_fraction": 0.0}))
    said = capsys.readouterr().err.replace("\n", " ")
    assert "3.jpg is not an image" in said
    assert "6 reads of images failed; vitral check names the files" in said
    assert run.metrics == {}
    with pytest.raises(Exception, match=r"3\.jpg is not an image"):
        vitral.train(photos, out=tmp_path / "strict", strict=True, **(FOLDER | {"val_fraction": 0.0}))


def test_one_image_of_a_class_trains_all_the_same(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "few" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), (name == "a" and "red") or "blue").save(tmp_path / "few" / name / "1.png")
    run = vitral.train(tmp_path / "few", out=tmp_path / "run", **(FOLDER | {"epochs": 2}))
    assert (run.path / "model.safetensors").exists()


class TestCommandLine:
    def test_train_eval_predict(self, tmp_path, capsys):
        out = str(tmp_path / "run")
        assert main(["train", "digits", "--out", out, "--epochs", "2", "--json"]) == 0
        said, err = capsys.readouterr()
        assert err == ""
        assert json.loads(said)["test"]["seeds"] == 1
        accuracy = json.loads(said)["test"]["accuracy_mean"]
        assert main(["eval", out, "digits", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] == pytest.approx(accuracy)
        assert main(["eval", out, "digits"]) == 0
        assert "accuracy" in capsys.readouterr().out
        pixels = vitral.data.sources.open.open_data("digits").inputs.pixels[3, 0]
        Image.fromarray(pixels.numpy()).save(tmp_path / "three.png")
        (tmp_path / "bad.png").write_bytes(b"no")
        paths = [str(tmp_path / "three.png"), str(tmp_path / "bad.png")]
        assert main(["predict", out, *paths, "--json", "--top-k", "2"]) == 0
        answers = json.loads(capsys.readouterr().out)
        assert len(answers[0]["predictions"]) == 2
        assert "is not an image" in answers[1]["error"]
        assert main(["predict", out, str(tmp_path / "*.png"), "--csv"]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert rows[0] == "image,label,probability,error"
        assert len(rows) == 1 + 1 + TOP_K
        expected = vitral.Predictor(out).predict(tmp_path / "three.png")[0]
        assert answers[0]["predictions"][0]["label"] == expected.labels[0]

    def test_resume_has_the_runs_own_options(self, tmp_path, capsys):
        out = str(tmp_path / "run")
        assert main(["train", "digits", "--out", out, "--epochs", "1", "--lr", "0.001"]) == 0
        assert main(["train", "digits", "--out", out, "--resume"]) == 0
        assert main(["train", "digits", "--out", out, "--resume", "--lr", "0.1"]) == 2
        assert "lr: 0.001 in the run, 0.1 now" in capsys.readouterr().err

    def test_seeds(self, tmp_path, capsys):
        assert main(["train", "digits", "--out", str(tmp_path / "run"), "--epochs", "1", "--seeds", "2"]) == 0
        assert "over 2 seeds" in capsys.readouterr().out
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["seed-0", "seed-1"]

    def test_a_recipe_by_its_name(self, tmp_path, capsys):
        args = ["train", "digits", "--config", "folder-finetune", "--epochs", "1", "--out", str(tmp_path / "run")]
        assert main([*args, "--model", "vit_nano_conv_patch2_8"]) == 0
        train = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
        assert (train["layer_decay"], train["epochs"], train["augment"]["crop_scale"]) == (0.75, 1, 0.4)

    def test_a_config_file_goes_over_the_recipe_and_under_flags(self, tmp_path, capsys):
        (tmp_path / "c.toml").write_text("epochs = 1\nlr = 0.002\n[augment]\nmixup = 0.0\n")
        args = [
            "train",
            "digits",
            "--out",
            str(tmp_path / "run"),
            "--config",
            str(tmp_path / "c.toml"),
            "--lr",
            "0.004",
        ]
        assert main(args) == 0
        train = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
        assert (train["epochs"], train["lr"], train["optimizer"]) == (1, 0.004, "muon")
        assert (train["augment"]["mixup"], train["augment"]["rotate"]) == (0.0, 10)
        (tmp_path / "bad.toml").write_text("epoch = 1")
        assert main([*args[:4], "--config", str(tmp_path / "bad.toml")]) == 2
        assert "unknown option 'epoch'; did you mean epochs" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["train", "nowhere"], "nowhere does not exist"),
            (["train", "digits", "--epochs", "0"], "epochs must be a whole number of at least 1, got 0"),
            (["eval", "nowhere", "digits"], "nowhere does not exist; give a file of weights"),
            (["predict", "nowhere", "a.png"], "nowhere does not exist; give a file of weights"),
            (["check", "nowhere"], "nowhere does not exist"),
        ],
    )
    def test_mistakes_are_one_line(self, capsys, args, message):
        assert main(args) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1

    def test_check(self, capsys):
        assert main(["check", "digits"]) == 0
        assert "no problems found" in capsys.readouterr().out


def test_more_classes_than_the_model_has_is_an_error(finished, photos):
    with pytest.raises(DataError, match="classes that the model does not know: blue, red; it knows 0, 1, 2"):
        vitral.evaluate(finished.path, photos)
