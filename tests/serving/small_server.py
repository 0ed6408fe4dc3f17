"""What the tests of the server share: tiny runs of several tasks, pictures, and a client that needs no network."""

import base64
import csv
import io
import random

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

import vitral
from helpers import redraw
from vitral.config import Serving
from vitral.data.sources.digits_lines import make_digit_lines
from vitral.data.sources.numbers_en_it import make_numbers
from vitral.data.sources.scenes_digits import make_digit_scenes, make_rotated_digits
from vitral.inference.predictor import Predictor
from vitral.serving.app import create_app
from vitral.serving.security import Keys

URL = "http://127.0.0.1:8000"
KEY = "a-key-of-24-characters-x"
SMALL = {"model": "vit_micro_conv_patch8_64", "epochs": 1, "batch_size": 8, "quiet": True, "val_fraction": 0.25}
NANO = {"model": "vit_nano_conv_patch2_8", "epochs": 1, "batch_size": 256, "quiet": True}


TEXT = {"width": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 1, "drop_rate": 0.0, "tokenizer": "characters"}
TASKS = ("classify", "regress", "multilabel", "segment", "detect", "translate")
WORDS = ("old", "new", "red", "cat", "dog", "sun", "42", "7")


def train_runs(folder, tasks=TASKS):
    """A run of each task, hardly trained: what is asked is whether all ways give the same, not whether it is right."""
    scenes = make_digit_scenes(train=16, test=4)
    for task in tasks:
        if task == "classify":
            model = redraw(vitral.create_model("vit_nano_conv_patch2_8", num_classes=10))
            model.labels = list("0123456789")
            vitral.save_model(model, folder / task, layout="vitral")
        elif task == "translate":
            vitral.train(make_numbers(400, 8, 8), out=folder / task, epochs=1, quiet=True, text=TEXT, batch_size=128)
        elif task == "caption":
            wide = SMALL | {"model": "vit_micro_conv_patch8_32", "img_size": (32, 128), "patch_size": (32, 8)}
            vitral.train(make_digit_lines(16, 4, 4)[0], out=folder / task, text=TEXT, **wide)
        elif task in ("complete", "classify texts", "tag"):
            data = write_texts(folder / "texts", task)
            vitral.train(data, out=folder / task, text=TEXT, epochs=1, batch_size=8, quiet=True)
        elif task == "regress":
            vitral.train(make_rotated_digits(1, 1), out=folder / task, task=task, img_size=8, **NANO)
        else:
            vitral.train(scenes, out=folder / task, task=task, **SMALL)
    return {task: folder / task for task in tasks}


def texts(n=40):
    """Short texts, each another one."""
    chance = random.Random(5)
    return [" ".join([*chance.choices(WORDS, k=chance.randint(1, 6)), str(i)]) for i in range(n)]


def write_texts(folder, task):
    """A file of texts for a task."""
    folder.mkdir(exist_ok=True)
    if task == "complete":
        (path := folder / "book.txt").write_text("\n\n".join(texts()))
        return path
    if task == "tag":
        rows = [("words", "tags"), *((t, " ".join("NUM" if w.isdigit() else "O" for w in t.split())) for t in texts())]
    else:
        rows = [("text", "label"), *((t, "even" if len(t) % 2 else "odd") for t in texts())]
    with (path := folder / f"{task}.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def picture(seed=0, size=(40, 52), kind="PNG", **options):
    """The bytes of a random picture, smooth enough to be a JPEG too."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC).save(buffer, kind, **options)
    return buffer.getvalue()


def as_json(data, **fields):
    """Keyword arguments of a request with base64."""
    return {"json": {"image": base64.b64encode(data).decode(), **fields}}


def as_form(data, **fields):
    """Keyword arguments of a request with a file."""
    return {"files": {"image": ("../../etc/passwd", data, "image/png")}, "data": fields}


def client(sources, *, keys=(), hosts=(), index=None, **options):
    """A client of a server in this process; use it with `with`, so that the server starts and ends."""
    predictors = {n: s if isinstance(s, Predictor) else Predictor(s) for n, s in sources.items()}
    app = create_app(predictors, index=index, options=Serving(**options), keys=Keys(keys), hosts=hosts)
    return TestClient(app, base_url=URL, raise_server_exceptions=False)


def differences(a, b, rel=1e-5, place=""):
    """Where two answers differ in more than the last digits: a batch of another size may round differently."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return [d for key in a for d in differences(a[key], b[key], rel, f"{place}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [d for i, pair in enumerate(zip(a, b, strict=True)) for d in differences(*pair, rel, f"{place}[{i}]")]
    numbers = isinstance(a, float) and isinstance(b, float)
    near = a == pytest.approx(b, rel=rel, abs=1e-5) if numbers else a == b and type(a) is type(b)
    return [] if near else [f"{place}: {a} against {b}"]
