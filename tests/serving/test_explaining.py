"""What the server says that a model can be explained by is what it can be explained by, whatever looks at the image."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import current_thread
from typing import get_args

import pytest
import torch
from PIL import ImageFile
from small_server import as_json, client, differences, picture, train_runs
from test_app import error

import vitral
from helpers import redraw
from tiny import SWIN, VIT, tiny_predictor
from vitral.config import ResNetConfig, SegmenterConfig
from vitral.inference.predictor import Predictor
from vitral.models.segmenter import Segmenter
from vitral.models.vit import VisionTransformer
from vitral.serving.schema import ExplainRequest

METHODS = get_args(ExplainRequest.model_fields["method"].annotation)
ALL = ["attention", "rollout", "relevance", "gradcam", "positions", "tokens"]
WITHOUT_CLASSES = ["attention", "rollout", "positions", "tokens"]
KINDS = {
    "classify": (ALL, 2),
    "sinusoids": (ALL, 2),
    "multilabel": (ALL, 2),
    "regress": (ALL, 2),
    "embed": (WITHOUT_CLASSES, 2),
    "segment": (WITHOUT_CLASSES, 2),
    "segment mask": (WITHOUT_CLASSES, 2),
    "detect": (WITHOUT_CLASSES, 2),
    "swin": (["attention", "gradcam", "tokens"], 4),
    "cnn": (["gradcam", "tokens"], 0),
    "detect learned": (["tokens"], 0),
    "segment swin": (["attention", "tokens"], 4),
    "segment cnn": (["tokens"], 0),
    "no positions": ([m for m in ALL if m != "positions"], 2),
    "caption": (["attention", "rollout", "positions", "tokens", "writing"], 6),
    "translate": ([], 0),
    "exported": ([], 0),
}
BACKBONES = {
    "segment swin": replace(SWIN, num_classes=0),
    "segment cnn": ResNetConfig(kind="resnet8", img_size=16, num_classes=0),
}


def predictor_of(kind, folder):
    if kind in ("caption", "translate"):
        return Predictor(train_runs(folder, [kind])[kind])
    if kind == "exported":
        model = redraw(VisionTransformer(VIT))
        return Predictor(vitral.export(model, folder / "model.onnx").path)
    if kind == "no positions":
        return Predictor(redraw(VisionTransformer(replace(VIT, positions="none"))))
    if kind in BACKBONES:
        return Predictor(redraw(Segmenter(SegmenterConfig(backbone=BACKBONES[kind], num_classes=3, head="linear"))))
    return tiny_predictor(kind, (70, 99) if kind == "detect learned" else (20, 24))


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_that_is_listed_works_and_every_other_is_refused(kind, tmp_path):
    predictor = predictor_of(kind, tmp_path)
    data, (expected, blocks) = picture(2), KINDS[kind]
    with client({"m": predictor}) as c:
        (told,) = c.get("/v1/models").json()["models"]
        assert (told["explains"], told["blocks"]) == (expected, blocks)
        assert told["cls"] == (blocks > 0 and "swin" not in kind)
        by_class = {"class": predictor.labels[1]} if kind == "regress" else {}  # of several numbers, one must be named
        for method in METHODS:
            needs = by_class if method in ("relevance", "gradcam") else {}
            response = c.post("/v1/explain", **as_json(data, method=method, rows=True, **needs))
            if method not in expected:
                error(response, 422, "bad_input")
                continue
            assert response.status_code == 200, response.text
            answer = response.json()
            rows, columns = answer["grid"]
            assert [len(map_) for map_ in answer["maps"]] == [rows] * len(answer["maps"])
            assert {len(row) for map_ in answer["maps"] for row in map_} == {columns}
            assert any(value for map_ in answer["maps"] for row in map_ for value in row)
            assert answer["image"]
        if blocks:
            ask = {"method": "attention", "patch": [7, 5]}
            last = c.post("/v1/explain", **as_json(data, layer=blocks - 1, **ask))
            assert last.json()["layer"] == blocks - 1
            error(c.post("/v1/explain", **as_json(data, layer=blocks, **ask)), 422, "bad_input")


def test_the_answer_gives_the_place_of_the_maps_on_the_original():
    model = redraw(VisionTransformer(VIT))
    data = picture(4, size=(70, 150))
    made = vitral.explain(model, data, "rollout")
    with client({"m": Predictor(model)}) as c:
        answer = c.post("/v1/explain", **as_json(data, method="rollout")).json()
    assert answer["size"] == list(made.size) == [70, 150]
    assert answer["crop"] == pytest.approx(made.crop, abs=1e-3)
    assert answer["cell"] == pytest.approx(made.cell, abs=1e-4)
    assert made.crop[0] > 20  # of a wide image the model is fed the middle


def test_an_image_is_read_once_and_not_in_the_thread_of_the_model(monkeypatch):
    read = []
    prepare = ImageFile.ImageFile.load_prepare
    monkeypatch.setattr(
        ImageFile.ImageFile, "load_prepare", lambda image: read.append(current_thread().name) or prepare(image)
    )
    with client({"m": Predictor(redraw(VisionTransformer(VIT)))}) as c:
        for method in ALL:
            assert c.post("/v1/explain", **as_json(picture(), method=method)).status_code == 200
    assert len(read) == len(ALL)
    assert all(name.startswith("reader") for name in read), read


def test_many_questions_of_all_kinds_at_once_get_what_each_gets_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        predictor = Predictor(redraw(VisionTransformer(VIT)), engine="packed")
        asked = [
            (path, as_json(picture(seed), **fields))
            for seed in range(4)
            for path, fields in (
                ("predict", {}), ("embed", {}), ("explain", {"method": "relevance"}),
                ("explain", {"method": "gradcam"}), ("explain", {"method": "attention", "layer": 0}),
            )
        ]  # fmt: skip

        def ask(c, path, body):
            response = c.post(f"/v1/{path}", **body)
            assert response.status_code == 200, response.text
            return {name: value for name, value in response.json().items() if name != "timing"}

        with client({"m": predictor}) as c, ThreadPoolExecutor(8) as clients:
            alone = [ask(c, *each) for each in asked]
            for _ in range(3):
                together = list(clients.map(lambda each: ask(c, *each), asked))
                for a, b in zip(together, alone, strict=True):
                    assert not differences(a, b, rel=1e-4)
    finally:
        torch.set_num_threads(before)
