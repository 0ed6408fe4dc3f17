"""SIGKILL at any moment, again and again, and the weights end as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

OPTIONS = ["--epochs", "20", "--save-steps", "2", "--log-steps", "1", "--eval-every", "3"]


def start(out, *extra):
    command = [sys.executable, "-m", "vitral", "train", "digits", "--out", str(out), *OPTIONS, *extra]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (out.parent / "stderr.txt").open("w") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=env)


def lines(out):
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process, out, more):
    """Wait until the run has logged `more` further lines, then kill it; return whether it had ended before."""
    first = None
    while process.poll() is None:
        now = lines(out)
        if first is None or now < first:  # going on cuts the log back to the checkpoint
            first = now
        if now - first >= more:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return False
        time.sleep(0.002)
    return True


@pytest.mark.slow
def test_twenty_kills_leave_no_trace(tmp_path):
    whole = start(tmp_path / "whole")
    assert whole.wait(timeout=300) == 0, (tmp_path / "stderr.txt").read_text()
    out, chance, kills = tmp_path / "killed", random.Random(0), 0
    process = start(out)
    while not kill_after(process, out, chance.randint(3, 8)):
        kills += 1
        resumable = (out / "config.json").exists()
        process = start(out, *(["--resume"] if resumable else []))
        if kills == 20:
            break
    assert process.wait(timeout=300) == 0, (tmp_path / "stderr.txt").read_text()
    assert kills == 20
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_polite_signal_saves_first(tmp_path, number):
    out = tmp_path / "run"
    process = start(out, "--save-steps", "1000")
    while lines(out) < 4 and process.poll() is None:
        time.sleep(0.002)
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    (saved,) = (out / "checkpoints").iterdir()
    assert int(saved.name.removeprefix("step-")) >= 4
