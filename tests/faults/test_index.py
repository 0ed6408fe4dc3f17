"""SIGKILL while an index is written, again and again, and what is there is whole at every moment."""

import itertools
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.models.zoo import create_model
from vitral.retrieval.index import Index

# Starts once; then for each line on its input a child builds an index, and wherever files are read and written tells
# which line of code it comes to, and what for. After so many lines it is killed, whatever it does by then.
BUILDER = """
import os, signal, sys
from array import array
import faiss, torch
from vitral.inference.predictor import Predictor
from vitral.retrieval import folder, nearest
from vitral.retrieval.index import Index
from vitral.weights import atomic
torch.set_num_threads(1)
weights, photos, kind = sys.argv[1:]
predictor = Predictor(weights, batch_size=3)
watched = {module.__file__ for module in (folder, nearest, atomic)}
steps, step = ["open", "remove", "add", "finish"], 0

def trace(frame, event, arg):
    global step
    if frame.f_code.co_filename not in watched:
        return None
    if event == "call" and frame.f_code.co_name in steps:
        step = steps.index(frame.f_code.co_name)
    if event == "line":
        os.write(tells, array("H", [1000 * step + frame.f_lineno]))
    return trace

for line in sys.stdin:
    most, out = line.rstrip().split(" ", 1)
    told, tells = os.pipe()
    child = os.fork()
    if not child:
        os.close(told)
        sys.settrace(trace)
        Index.build(predictor, photos, out, save_seconds=0, nearest=kind)
        os._exit(0)
    os.close(tells)
    lines = b""
    while len(lines) < 2 * int(most) and (some := os.read(told, 2 * int(most) - len(lines))):
        lines += some
    if len(lines) == 2 * int(most):
        os.kill(child, signal.SIGKILL)
    print(os.waitpid(child, 0)[1], *array("H", lines), flush=True)
    os.close(told)
"""
NEVER = 10**6


def change(folder, chance, numbers):
    """There is something to do again: new files, and sometimes others that are changed or gone."""
    if chance.random() < 0.6:
        for file in chance.sample(sorted(folder.glob("[0-9]*.png")), 4):
            file.unlink()
            if chance.random() < 0.6:
                draw(file, next(numbers))
    for number in itertools.islice(numbers, 4):
        draw(folder / f"{number}.png", number)


def draw(file, seed):
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (9, 9, 3), np.uint8)).save(file)


def rows(index):
    """The vector of each item, each of which is there once; a search tells true cosines of them."""
    assert len({item.name for item in index.items}) == len(index)
    at = {item.name: row for row, item in enumerate(index.items)}
    found = index.search_vectors(index.vectors, 3)
    told = torch.tensor([[match.score for match in some] for some in found])
    cosines = index.vectors @ index.vectors.T
    true = torch.stack([cosines[row, [at[match.item] for match in some]] for row, some in enumerate(found)])
    torch.testing.assert_close(told, true, atol=1e-5, rtol=0)
    return dict(zip(index.items, index.vectors, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "hnsw"])
def test_twenty_kills_never_corrupt_an_index(tmp_path, kind):
    weights, folder, out = tmp_path / "w.safetensors", tmp_path / "photos", tmp_path / "index"
    vitral.save_model(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=5), weights)
    folder.mkdir()
    (folder / "bad.png").write_bytes(b"no picture")
    chance, numbers, kills = random.Random(0), itertools.count(100), 0
    for number in itertools.islice(numbers, 11):
        draw(folder / f"{number}.png", number)
    command = [sys.executable, "-c", BUILDER, str(weights), str(folder), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdin
        assert builder.stdout

        def build(place, most=NEVER):
            builder.stdin.write(f"{most} {place}\n")
            builder.stdin.flush()
            status, *lines = map(int, builder.stdout.readline().split())
            return status, lines

        def build_copy(name):
            """What a run that nobody breaks makes of the index as it is now, and the lines it comes to."""
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            shutil.copytree(out, tmp_path / name)
            status, lines = build(tmp_path / name)
            assert status == 0
            assert not list((tmp_path / name).glob(".*.tmp"))
            assert len(list((tmp_path / name).glob("*.safetensors"))) == 1
            assert len(list((tmp_path / name).glob("*.faiss"))) == (kind != "exact")
            return Index(tmp_path / name), lines

        assert build(out)[0] == 0
        while kills < 20:
            if chance.random() < 0.5:  # else the run that was killed last is all that there is
                assert build(out)[0] == 0
            if chance.random() < 0.8:
                change(folder, chance, numbers)
            before = rows(Index(out))
            unbroken, lines = build_copy("unbroken")
            whole = rows(unbroken)
            step = chance.choice(sorted({line // 1000 for line in lines}))
            line = chance.choice(sorted({line for line in lines if line // 1000 == step}))
            status, _ = build(out, chance.choice([at for at, each in enumerate(lines, 1) if each == line]))
            assert status in (0, 9)
            kills += status == 9
            after = rows(Index(out))
            assert before.keys() & whole.keys() <= after.keys() <= before.keys() | whole.keys()
            completed, _ = build_copy("completed")
            assert completed.manifest == unbroken.manifest
            done = rows(completed)
            assert done.keys() == whole.keys()
            for item in after:
                assert torch.equal(after[item], before[item] if item in before else done[item])
                assert item not in done or torch.equal(after[item], done[item])
            for item in done:
                torch.testing.assert_close(done[item], whole[item], atol=1e-6, rtol=0)
        builder.stdin.close()
