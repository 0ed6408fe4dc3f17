"""The attack campaign at one tenth of its size, the soak at full size; `make attack` runs all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCALES = {"kills": 0.1, "images": 0.1, "checkpoints": 0.1, "documents": 0.1, "http": 0.1, "soak": 1}
"""The memory of a server settles within seconds, longer than a tenth of the soak lasts."""


@pytest.mark.slow
@pytest.mark.parametrize(("campaign", "scale"), SCALES.items())
def test_a_part_of_the_campaign_has_no_failures(campaign, scale, tmp_path):
    row = attack(tmp_path, campaign, "--scale", str(scale))
    assert row["tries"] >= 50 if campaign != "kills" else row["tries"] >= 10
    assert row["failures"] == 0, row["failed"]


def test_a_failure_is_counted_saved_and_reproducible(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from attack.__main__ import table
    from attack.stage import Stage

    stage = Stage("images", seed=3, count=10, work=tmp_path / "work", failures=tmp_path / "failures")
    stage.step(9)
    stage.fail(7, "a crash", "the details", files={"image.bin": b"bytes"})
    saved = tmp_path / "failures" / "images-00007"
    assert json.loads((saved / "failure.json").read_text())["reproduce"] == (
        "python scripts/attack --only images --seed 3 --number 7"
    )
    assert (saved / "image.bin").read_bytes() == b"bytes"
    assert stage.chance(7).random() == Stage("images", 3, 1, tmp_path, tmp_path).chance(7).random()
    row = {"campaign": "images", "tries": 9, "failures": len(stage.failed), "failure": "a crash"}
    assert "| images | 9 | 1 | a crash |" in table([row])


def attack(folder, campaign, *options):
    """The row of one campaign in the table."""
    command = [sys.executable, ROOT / "scripts/attack", "--only", campaign, *options]
    command += ["--json", folder / "table.json", "--out", folder / "failures"]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    ended = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert ended.returncode in (0, 1), ended.stdout
    (row,) = json.loads((folder / "table.json").read_text())["campaigns"]
    return row
