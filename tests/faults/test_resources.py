"""A disk that fills up, and memory that must not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral

QUICK = {"epochs": 2, "save_steps": 4, "log_steps": 1, "quiet": True}

# The limit is set in the child alone: a write that would make a file larger gets an error, as on a full disk.
TRAIN_UNDER_A_LIMIT = """
import resource, sys
from vitral.cli.main import main
from vitral.training import session

save, limit = session.save_checkpoint, int(sys.argv[2])

def save_then_fill(folder, checkpoint):
    save(folder, checkpoint)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

session.save_checkpoint = save_then_fill
sys.exit(main(["train", "digits", "--out", sys.argv[1], "--epochs", "2", "--save-steps", "4", "--log-steps", "1"]))
"""


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_checkpoint_and_the_run_goes_on_from_it(tmp_path):
    whole = vitral.train("digits", out=tmp_path / "whole", **QUICK)
    out = tmp_path / "full"
    command = [sys.executable, "-c", TRAIN_UNDER_A_LIMIT, str(out), "200000"]
    env = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # as in this process, for the same bits
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("vitral: checkpoint ")
    assert last.endswith("the earlier ones are untouched. Is the disk full?")
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000000004"]
    vitral.train("digits", out=out, resume=True, **QUICK)
    a, b = (load_file(path / "model.safetensors") for path in (whole.path, out))
    assert all(torch.equal(a[k], b[k]) for k in a)


INDEX_UNDER_A_LIMIT = """
import resource, sys
from vitral.cli.main import main

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
sys.exit(main(["index", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_a_full_disk_leaves_an_index_as_it_was(tmp_path):
    model = vitral.create_model("vit_nano_patch2_8", num_classes=0, seed=0)
    vitral.save_model(model, tmp_path / "model", layout="vitral")
    (photos := tmp_path / "photos").mkdir()
    for i in range(40):
        Image.new("L", (8, 8), 6 * i).save(photos / f"{i}.png")
    out = tmp_path / "i"
    words = [tmp_path / "model", photos, "--out", out, "--nearest", "hnsw"]
    size = 1.2 * 40 * 4 * model.config.embed_dim + 4000  # of the vectors; their graph is larger
    command = [sys.executable, "-c", INDEX_UNDER_A_LIMIT, *map(str, [int(size), *words])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert ".faiss cannot be written (" in done.stderr.strip().splitlines()[-1]
    assert "what was there before is untouched." in done.stderr
    assert not list(out.glob("*.tmp")) + list(out.glob(".*.tmp"))
    assert len(vitral.Index(out)) == 40
    vitral.Index.build(tmp_path / "model", photos, out, nearest="hnsw")
    assert len(list(out.glob("*.faiss"))) == 1


FIFTY_EPOCHS = """
import sys
from statistics import median
import vitral
from vitral.training import loop

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

seen, evaluate = [], loop.evaluate_average
def note(*args):
    evaluate(*args)
    seen.append(resident())
loop.evaluate_average = note
vitral.train("digits", out=sys.argv[1], epochs=50, eval_every=1, quiet=True)
print(round(median(seen[9:20])), round(median(seen[-11:])), len(seen))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads resident memory from /proc")
def test_memory_is_flat_over_fifty_epochs(tmp_path):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", FIFTY_EPOCHS, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    early, late, epochs = map(int, done.stdout.split())
    assert epochs == 50
    assert late < 1.015 * early  # over thirty epochs; one look alone swings by that much
