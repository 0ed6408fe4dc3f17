"""What the tests of the server share: tiny runs of several tasks, pictures, and a client that needs no network."""

import base64
import io

import numpy as np
from PIL import Image
from starlette.testclient import TestClient

import vitral
from helpers import redraw
from vitral.config import Serving
from vitral.data.sources.numbers_en_it import make_numbers
from vitral.data.sources.scenes_digits import make_digit_scenes, make_rotated_digits
from vitral.inference.predictor import Predictor
from vitral.serving.app import create_app
from vitral.serving.security import Keys

URL = "http://127.0.0.1:8000"
KEY = "a-key-of-24-characters-x"
SMALL = {"model": "vit_micro_conv_patch8_64", "epochs": 1, "batch_size": 8, "quiet": True, "val_fraction": 0.25}
NANO = {"model": "vit_nano_conv_patch2_8", "epochs": 1, "batch_size": 256, "quiet": True}


TASKS = ("classify", "regress", "multilabel", "segment", "detect", "translate")


def train_runs(folder, tasks=TASKS):
    """A run of each task, hardly trained: what is asked is whether all ways give the same, not whether it is right."""
    scenes = make_digit_scenes(train=16, test=4)
    for task in tasks:
        if task == "classify":
            model = redraw(vitral.create_model("vit_nano_conv_patch2_8", num_classes=10))
            model.labels = list("0123456789")
            vitral.save_model(model, folder / task, layout="vitral")
        elif task == "translate":
            vitral.train(make_numbers(40, 8, 8), out=folder / task, epochs=1, quiet=True)
        elif task == "regress":
            vitral.train(make_rotated_digits(1, 1), out=folder / task, task=task, img_size=8, **NANO)
        else:
            vitral.train(scenes, out=folder / task, task=task, **SMALL)
    return {task: folder / task for task in tasks}


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
