"""Packed models answer as the models they were made from."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn

from helpers import difference, images, redraw, tensors
from tiny import MODELS, VIT, pictures, tiny_predictor
from vitral.config import Activation
from vitral.errors import ConfigError, VitralError
from vitral.inference import choose
from vitral.inference import packed as module
from vitral.inference.packed import PackedBlock, packed
from vitral.inference.predictor import Predictor
from vitral.models.merge import merged
from vitral.models.vit import VisionTransformer
from vitral.nn.packed import PackedLinear
from vitral.weights.save import save_model


@torch.inference_mode()
@pytest.mark.parametrize("what", MODELS)
def test_every_model_answers_as_it_did(what):
    model = tiny_predictor(what).model
    twin = packed(model)
    assert not [part for part in twin.modules() if type(part) is nn.Linear]
    assert [part for part in twin.modules() if type(part) is PackedLinear]
    for batch in (1, 5):
        x = images(batch, 3, 20, 24, seed=batch)
        for a, b in zip(tensors(twin(x)), tensors(model(x)), strict=True):
            assert difference(a, b) < 1e-5


@torch.inference_mode()
@pytest.mark.parametrize(
    "options", [{"act": act} for act in get_args(Activation)] + [{"block": "post"}, {"init_values": 0.1}]
)
def test_variants_of_a_block_answer_as_they_did(options):
    model = redraw(VisionTransformer(replace(VIT, **options)))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    twin, x = packed(model), images(3, 3, 16, 16)
    assert difference(twin(x), model(x)) < 1e-5
    assert difference(twin.forward_features(x), model.forward_features(x)) < 1e-5
    assert all(isinstance(block, PackedBlock) for block in twin.blocks) == (options != {"block": "post"})
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())


@torch.inference_mode()
def test_images_of_any_layout_and_size_pass():
    model = redraw(VisionTransformer(VIT))
    twin = packed(model)
    for x in (images(2, 16, 16, 3).permute(0, 3, 1, 2), images(2, 3, 24, 12)):
        answers = model(x)
        torch.testing.assert_close(twin(x), answers, rtol=1e-5, atol=1e-5)
    model = merged(model, 0.5)
    assert difference(packed(model)(images(3, 3, 16, 16)), model(images(3, 3, 16, 16))) < 1e-5


def test_the_engine_packs_and_the_command_line_knows_it():
    eager = tiny_predictor("classify")
    other = Predictor(eager.model, engine="packed", batch_size=2)
    assert other.engine == "packed"
    a, b = eager.predict(pictures()), other.predict(pictures())
    assert [one.labels for one in a] == [one.labels for one in b]
    assert other.model is eager.model  # what is looked into stays as it was
    assert not [part for part in eager.model.modules() if isinstance(part, PackedLinear)]


def test_a_model_that_is_loaded_is_packed_and_one_that_is_handed_over_is_not(tmp_path, monkeypatch):
    eager = tiny_predictor("classify")
    save_model(eager.model, tmp_path / "run", layout="vitral")
    loaded = Predictor(tmp_path / "run")
    assert (loaded.engine, eager.engine) == ("packed", "eager")
    assert Predictor(tmp_path / "run", engine="eager").engine == "eager"
    x = images(3, 3, 20, 24)
    assert difference(loaded.logits(x), eager.logits(x)) < 1e-5
    assert difference(loaded.embed(pictures()), eager.embed(pictures())) < 1e-5
    monkeypatch.setattr(choose, "can_pack", lambda: False)
    assert Predictor(tmp_path / "run").engine == "eager"


def test_what_cannot_be_packed_is_said(monkeypatch):
    model = VisionTransformer(VIT)
    with pytest.raises(ConfigError, match=r"takes models in float32, got torch\.float64"):
        packed(model.double())
    monkeypatch.setattr(module, "can_pack", lambda: False)
    with pytest.raises(VitralError, match="needs a torch that was built with oneDNN"):
        packed(model)
