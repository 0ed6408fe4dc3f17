"""Model files that are truncated in place while a model is in use: if they are mapped, the process ends with SIGBUS."""

import os
import subprocess
import sys

import httpx
import pytest
from process import serving
from small_server import as_form, picture

import vitral
from helpers import redraw
from vitral.errors import CheckpointError
from vitral.inference import export
from vitral.weights.files import open_weights

PREDICT_AROUND_A_TRUNCATION = """
import os, sys
import torch
import vitral

x = torch.zeros(1, 1, 8, 8)
files = dict(pair.split("=") for pair in sys.argv[1:])
engines = ("eager", "packed")
predictors = [vitral.Predictor(source, mapped=False, engine=engine) for source in files for engine in engines]

def ask():
    return [answer for each in predictors for answer in (each.logits(x), each.model.forward_features(x))]

before = ask()
for file in files.values():
    os.truncate(file, 0)
assert all(torch.equal(a, b) for a, b in zip(before, ask(), strict=True))
print(len(before), "the same")
"""


@pytest.fixture(scope="module")
def model():
    made = redraw(vitral.create_model("vit_nano_patch2_8", num_classes=10))
    made.labels = list("0123456789")
    return made


def write_weights(model, folder):
    """Each source of the model's weights, and the file that they are in."""
    vitral.save_model(model, folder / "run", layout="vitral")
    vitral.save_model(model, folder / "timm", layout="timm")
    file = folder / "timm" / "model.safetensors"
    return {folder / "run": folder / "run" / "model.safetensors", file: file}


def test_a_predictor_that_copied_its_weights_gives_the_same_answers(model, tmp_path):
    files = [f"{source}={file}" for source, file in write_weights(model, tmp_path).items()]
    command = [sys.executable, "-c", PREDICT_AROUND_A_TRUNCATION, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr  # -7 is SIGBUS
    assert done.stdout == "8 the same\n"


def test_a_file_that_gets_shorter_while_it_is_copied_is_refused(model, tmp_path):
    file = list(write_weights(model, tmp_path).values())[1]
    tensors = open_weights(file, mapped=False).tensors
    os.truncate(file, 0)
    with pytest.raises(CheckpointError, match=r"tensor head\.bias cannot be read"):
        tensors["head.bias"].read()


@pytest.mark.slow
def test_served_models_survive_whatever_their_format(model, tmp_path, monkeypatch):
    files = {source: [file] for source, file in write_weights(model, tmp_path).items()}
    for name in ("one.onnx", "two.onnx", "graph.xml"):
        if name == "two.onnx":
            monkeypatch.setattr(export, "_ONE_FILE", 0)
        vitral.export(model, tmp_path / name)
        files[tmp_path / name] = [tmp_path / name]
    files[tmp_path / "two.onnx"].append(tmp_path / "two.onnx.data")
    files[tmp_path / "graph.xml"].append(tmp_path / "graph.bin")
    sources = [f"m{i}={source}" for i, source in enumerate(files)]

    with serving(*sources) as (url, process, _), httpx.Client(base_url=url, timeout=60) as c:

        def ask():
            answers = [c.post("/v1/predict", **as_form(picture(), model=f"m{i}")).json() for i in range(len(files))]
            return [answer["predictions"] for answer in answers]

        before = ask()
        for file in (file for several in files.values() for file in several):
            os.truncate(file, 0)
        assert ask() == before
        assert process.poll() is None
