"""SIGKILL while an index is written, again and again, and what is there is whole at every moment."""

import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.models.zoo import create_model
from vitral.retrieval.index import Index

# Starts once; then for each number on its input a child builds the index, and is killed after so many images.
BUILDER = """
import os, signal, sys
import torch
from vitral.inference.predictor import Predictor
from vitral.retrieval.index import Index
torch.set_num_threads(1)
weights, folder, out = sys.argv[1:]
predictor = Predictor(weights, batch_size=3)

def dies(steps, total, at):
    for number, step in enumerate(steps):
        if number == at:
            os.kill(os.getpid(), signal.SIGKILL)
        yield step

for line in sys.stdin:
    child = os.fork()
    if not child:
        Index.build(predictor, folder, out, save_seconds=0, watch=lambda steps, total: dies(steps, total, int(line)))
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
def test_twenty_kills_never_corrupt_an_index(tmp_path):
    weights, folder, out = tmp_path / "w.safetensors", tmp_path / "photos", tmp_path / "index"
    vitral.save_model(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=5), weights)
    folder.mkdir()
    for i in range(60):
        Image.fromarray(np.random.default_rng(i).integers(0, 256, (9, 9, 3), np.uint8)).save(folder / f"{i:02d}.png")
    chance, kills, done = random.Random(0), 0, False
    command = [sys.executable, "-c", BUILDER, str(weights), str(folder), str(out)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdin
        assert builder.stdout
        while kills < 20:
            builder.stdin.write(f"{chance.randint(0, 5)}\n")
            builder.stdin.flush()
            done = builder.stdout.readline().strip() == "0"
            kills += not done
            index = Index(out)
            assert len(index) == len({item.name for item in index.items})
            torch.testing.assert_close(index.vectors.norm(dim=1), torch.ones(len(index)))
            if done:  # take some away, so that there is something to do again
                for file in chance.sample(sorted(folder.glob("*.png")), 20):
                    file.write_bytes(file.read_bytes() + b" ")
        builder.stdin.close()
    killed, _ = Index.build(weights, folder, out)
    whole, _ = Index.build(weights, folder, tmp_path / "whole")
    at = dict(zip(whole.items, whole.vectors, strict=True))
    assert set(killed.items) == set(at)
    for item, vector in zip(killed.items, killed.vectors, strict=True):
        torch.testing.assert_close(vector, at[item], atol=1e-6, rtol=0)
