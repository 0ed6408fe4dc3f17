"""A run that was stopped, killed, finished, extended or edited, and resumed: its log, its files, its options."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitral
from helpers import stop_after
from vitral.cli.main import main
from vitral.errors import CheckpointError, ConfigError
from vitral.training import pretrain, session
from vitral.training.distributed import Processes
from vitral.training.log import RunLog
from vitral.training.loop import Meter
from vitral.training.schedule import cosine_with_warmup

TIMES = {"seconds", "images_per_second"}
COMMON = {
    "model": "vit_nano_patch2_8", "batch_size": 256, "max_steps": 8, "log_steps": 3, "save_steps": 100, "quiet": True,
    "optimizer": "adamw", "eval_every": 1, "warmup_epochs": 0.5,
}  # fmt: skip
WATCH = {"health_images": 40, "neighbours": 200}
SMALL = {"prototypes": 32, "hidden": 32, "bottleneck": 16, "local_crops": 2}
KINDS = {
    "classify": (vitral.train, session, {}),
    "dino": (vitral.pretrain, pretrain, WATCH | {"method": "dino", "dino": SMALL}),
    "mae": (vitral.pretrain, pretrain, WATCH | {"method": "mae", "mae": {"decoder_dim": 16, "decoder_depth": 1}}),
}
"""5 steps an epoch: the 8 end in the middle of the second."""


def start(kind, out, **options):
    function, _, own = KINDS[kind]
    return function("digits", out=out, **(COMMON | own | options))


def lines(run):
    """The log without what the clock decides."""
    every = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in every]


def files(run):
    return {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of each kind that nothing interrupted."""
    return {kind: start(kind, tmp_path_factory.mktemp(kind) / "run").path for kind in KINDS}


@pytest.fixture
def finished(whole, tmp_path):
    """A copy of the finished classifier."""
    return shutil.copytree(whole["classify"], tmp_path / "run")


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """A classifier that was stopped after step 4."""
    with stop_after(monkeypatch, session, 4), pytest.raises(KeyboardInterrupt):
        start("classify", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps", [4, 8])
def test_the_log_is_that_of_an_uninterrupted_run(whole, tmp_path, monkeypatch, kind, steps):
    """Stopped between two lines of the log, and after the last step."""
    with stop_after(monkeypatch, KINDS[kind][1], steps), pytest.raises(KeyboardInterrupt):
        start(kind, tmp_path / "run")
    start(kind, tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(whole[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_stays_as_it_is(whole, kind):
    before = files(whole[kind])
    again = start(kind, whole[kind], resume=True)
    assert files(whole[kind]) == before
    assert again.metrics == json.loads((whole[kind] / "config.json").read_text())["metrics"]


def test_a_report_that_was_not_written_is(finished):
    (finished / "report.html").unlink()
    start("classify", finished, resume=True)
    assert (finished / "report.html").exists()


def test_weights_that_were_removed_are_made_again(whole, finished):
    (finished / "model.safetensors").unlink()
    start("classify", finished, resume=True)
    assert files(finished)[Path("model.safetensors")] == files(whole["classify"])[Path("model.safetensors")]
    assert lines(finished) == lines(whole["classify"])


def test_a_run_killed_after_its_last_line_does_not_write_it_again(whole, tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "save_tensors", fail)
        with pytest.raises(OSError, match="killed"):
            start("dino", tmp_path / "run")
    assert lines(tmp_path / "run") == lines(whole["dino"])
    start("dino", tmp_path / "run", resume=True)
    assert lines(tmp_path / "run") == lines(whole["dino"])


def test_lines_of_another_number_of_processes_are_added_up():
    two = {"norm": [6.0, 6.0], "steps": [2, 2], "elapsed": [1.0, 1.0], "sums.count": [10, 30], "sums.objective": [3, 5]}
    meter = Meter(Processes(0, 1))
    meter.load_state_dict({name: torch.tensor(values, dtype=torch.float64) for name, values in two.items()})
    read = meter.read()
    assert (read["loss"], read["grad_norm"]) == (4, 3)
    third = Meter(Processes(2, 3))  # a further process has nothing of before
    third.load_state_dict({name: torch.tensor(values, dtype=torch.float64) for name, values in two.items()})
    assert set(third.sums.values()) == {0}


class TestLog:
    """What is cut from metrics.jsonl when a run is resumed at step 2."""

    def write(self, path, *rows):
        path.write_text(
            "\n".join(json.dumps({"split": s, "step": n, "epoch": 0, "seconds": x}) for s, n, x in rows)
            + '\n{"split": '
        )

    def test_later_steps_broken_lines_and_duplicates(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        self.write(path, ("train", 1, 0), ("train", 2, 0), ("val", 2, 1), ("val", 2, 2), ("train", 3, 0))
        with RunLog(path, quiet=True, from_step=2) as log:
            assert [(line["split"], line["step"]) for line in lines(tmp_path)] == [
                ("train", 1),
                ("train", 2),
                ("val", 2),
            ]
            log.line({"split": "val", "step": 2, "epoch": 1, "seconds": 3.0})
            log.line({"split": "val", "step": 3, "epoch": 1, "seconds": 3.0})
        assert [(line["split"], line["step"]) for line in lines(tmp_path)[2:]] == [("val", 2), ("val", 3)]

    def test_a_full_disk_leaves_the_log_as_it_was(self, tmp_path, monkeypatch):
        def full(*args):
            raise OSError(28, "No space left on device")

        path = tmp_path / "metrics.jsonl"
        self.write(path, ("train", 1, 0), ("train", 3, 0))
        before = path.read_bytes()
        monkeypatch.setattr("vitral.weights.atomic.os.fsync", full)
        with pytest.raises(CheckpointError, match="No space left"), RunLog(path, quiet=True, from_step=2):
            pass
        assert path.read_bytes() == before


def edit(run, change):
    document = json.loads((run / "config.json").read_text())
    change(document)
    (run / "config.json").write_text(json.dumps(document))


class TestEdited:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda document: document["train"].update(seed=5), "seed: 0 in training, 5 in the file"),
            (lambda document: document.update(seed=6), "seed: 0 in training, 6 in the file"),
            (lambda document: document["train"].update(lr=0.5, ema=0.5), r"lr: 0.003 .*0.5 in the file; ema: 0.9"),
            (
                lambda document: document["train"]["augment"].update(mixup=0.7),
                "augment.mixup: 0.2 in training, 0.7 in the file",
            ),
        ],
    )
    def test_it_is_named(self, stopped, capsys, change, message):
        edit(stopped, change)
        before = files(stopped)
        with pytest.raises(CheckpointError, match=rf"config.json was edited \(.*{message}.*undo the edit"):
            start("classify", stopped, resume=True)
        assert main(["train", "digits", "--out", str(stopped), "--resume"]) == 2
        assert "config.json was edited (" in capsys.readouterr().err
        assert files(stopped) == before

    def test_pretraining_too(self, whole, tmp_path, capsys):
        run = shutil.copytree(whole["dino"], tmp_path / "run")
        edit(run, lambda document: document["train"]["dino"].update(momentum=0.5))
        assert main(["pretrain", "digits", "--out", str(run), "--resume"]) == 2
        assert "dino.momentum: 0.99 in training, 0.5 in the file" in capsys.readouterr().err

    def test_what_changes_no_result_may_be_edited(self, stopped, whole):
        edit(stopped, lambda document: document["train"].update(save_steps=7))
        assert main(["train", "digits", "--out", str(stopped), "--resume", "--json"]) == 0
        assert lines(stopped) == lines(whole["classify"])

    def test_a_flag_or_file_that_differs_is_named(self, stopped, tmp_path, capsys):
        (tmp_path / "c.toml").write_text("[augment]\nmixup = 0.7\n")
        command = ["train", "digits", "--out", str(stopped), "--resume"]
        assert main([*command, "--seed", "5"]) == 2
        assert "was started with other options (seed: 0 in the run, 5 now)" in capsys.readouterr().err
        assert main([*command, "--config", str(tmp_path / "c.toml")]) == 2
        assert "(augment.mixup: 0.2 in the run, 0.7 now)" in capsys.readouterr().err

    def test_a_checkpoint_of_an_earlier_version(self, stopped, whole):
        """It has neither the options nor the sums of the log."""
        (place,) = (stopped / "checkpoints").iterdir()
        state = json.loads((place / "state.json").read_text())
        del state["values"]["options"], state["values"]["progress"], state["files"]["meter.safetensors"]
        (place / "state.json").write_text(json.dumps(state))
        start("classify", stopped, resume=True)
        a, b = (load_file(run / "model.safetensors") for run in (stopped, whole["classify"]))
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert [line["step"] for line in lines(stopped)] == [line["step"] for line in lines(whole["classify"])]


class TestExtended:
    def test_a_finished_run_continues_on_the_schedule_of_the_new_budget(self, finished, whole):
        before = (finished / "report.html").read_bytes()
        assert main(["train", "digits", "--out", str(finished), "--resume", "--epochs", "3", "--json"]) == 0
        train = json.loads((finished / "config.json").read_text())["train"]
        assert (train["epochs"], train["max_steps"]) == (3, None)
        assert lines(finished)[: len(lines(whole["classify"]))] == lines(whole["classify"])
        added = lines(finished)[len(lines(whole["classify"])) :]
        assert [(line["split"], line["step"]) for line in added] == [
            *(("train", 9), ("train", 10), ("val", 10), ("train", 12), ("train", 15), ("val", 15))
        ]
        assert added[0]["progress"] == 8 / 15
        assert added[0]["lr"] == cosine_with_warmup(8 / 15, 0.5 / 3, train["min_lr"])
        assert (finished / "report.html").read_bytes() != before
        after = files(finished)
        assert main(["train", "digits", "--out", str(finished), "--resume", "--json"]) == 0
        assert files(finished) == after

    def test_an_interrupted_extension_continues_without_the_flag(self, finished, tmp_path, monkeypatch):
        unbroken = shutil.copytree(finished, tmp_path / "unbroken")
        start("classify", unbroken, resume=True, max_steps=12)
        with stop_after(monkeypatch, session, 2), pytest.raises(KeyboardInterrupt):
            start("classify", finished, resume=True, max_steps=12)
        document = json.loads((finished / "config.json").read_text())
        assert document["train"]["max_steps"] == 12
        assert "metrics" not in document
        assert main(["train", "digits", "--out", str(finished), "--resume", "--json"]) == 0
        assert lines(finished) == lines(unbroken)

    def test_pretraining_too(self, whole, tmp_path):
        run = shutil.copytree(whole["mae"], tmp_path / "run")
        assert main(["pretrain", "digits", "--out", str(run), "--resume", "--max-steps", "9", "--json"]) == 0
        assert lines(run)[-1]["step"] == 9
        assert json.loads((run / "config.json").read_text())["train"]["max_steps"] == 9

    def test_a_budget_extended_in_the_file(self, finished):
        edit(finished, lambda document: document["train"].update(max_steps=9))
        assert main(["train", "digits", "--out", str(finished), "--resume", "--json"]) == 0
        assert json.loads((finished / "config.json").read_text())["spent"]["steps"] == 9

    def test_less_than_what_has_been_trained_is_refused(self, finished):
        before = files(finished)
        with pytest.raises(ConfigError, match="has trained for 8 steps, and the budget is 5; give more --epochs"):
            start("classify", finished, resume=True, max_steps=None, epochs=1)
        with pytest.raises(
            ConfigError, match=r"has trained for .* minutes, and the budget is 1e-09; give more --max-min"
        ):
            start("classify", finished, resume=True, max_minutes=1e-9)
        assert files(finished) == before
