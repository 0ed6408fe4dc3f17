"""A CNN through the same commands as a ViT: trained, resumed, frozen, probed, explained, as a backbone of others."""

import pytest
import torch

import vitral
from helpers import stop_after
from vitral.config import LoopConfig
from vitral.data.sources.scenes_digits import make_digit_scenes
from vitral.errors import ConfigError, InputError
from vitral.explanation import relevance
from vitral.models.zoo import create_model
from vitral.training import session
from vitral.training.finetune import freeze, freeze_layers
from vitral.training.loop import recompute_blocks
from vitral.training.optim import Muon, make_optimizers

QUICK = {"model": "resnet8_8", "epochs": 2, "batch_size": 256, "save_steps": 3, "quiet": True, "eval_every": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return vitral.train("digits", out=tmp_path_factory.mktemp("runs") / "cnn", **QUICK)


def test_it_learns_and_its_statistics_are_those_of_the_averaged_weights(run):
    """After ten steps the average lags far behind: with statistics of other weights it would guess."""
    assert run.metrics["test"]["accuracy"] > 0.6
    model = vitral.load_model(run.path)
    report = (run.path / "report.html").read_text()
    assert "Grad-CAM on the last map" in report
    images = torch.stack([run.data.images.read(i, "grey") for i in run.data.splits["train"][:512].tolist()])
    x = (images.float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        y = model.conv1(x)
    torch.testing.assert_close(model.bn1.running_mean, y.mean((0, 2, 3)), rtol=0, atol=0.015)


def test_it_predicts_evaluates_and_is_probed(run):
    predictor = vitral.Predictor(run.path)
    pixels = run.data.images.read(0, "grey")
    assert predictor.embed([pixels]).shape == (1, 256)
    assert len(predictor.predict([pixels])) == 1
    again = vitral.evaluate(run.path, "digits")
    assert again["accuracy"] == pytest.approx(run.metrics["test"]["accuracy"])


def test_stopped_and_resumed_it_is_the_same_run(run, tmp_path, monkeypatch):
    with stop_after(monkeypatch, session, 7), pytest.raises(KeyboardInterrupt):
        vitral.train("digits", out=tmp_path / "x", **QUICK)
    again = vitral.train("digits", out=tmp_path / "x", resume=True, **QUICK)
    a, b = vitral.load_model(run.path).state_dict(), vitral.load_model(again.path).state_dict()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_explained(run):
    pixels = run.data.images.read(3, "grey")
    made = vitral.explain(run.path, pixels, "gradcam")
    assert made.maps.shape == (2, 1, 1)  # an image of 8 pixels has one cell at the end
    assert vitral.explain(run.path, pixels, "occlusion").maps.shape == (1, 1, 1)
    for method in ("attention", "rollout", "relevance", "positions"):
        with pytest.raises(InputError, match=f"{method} needs a ViT, .* is a ResNet; use gradcam"):
            vitral.explain(run.path, pixels, method)
    with pytest.raises(InputError, match="is a ResNet; write a picture"):
        vitral.explain(run.path, pixels, "gradcam", interactive=True)


def test_grad_cam_is_the_last_map_weighted_by_its_mean_gradient():
    """The formula of the paper, literally."""
    model = create_model("resnet8_32", seed=0).eval()
    x = torch.randn(2, 3, 28, 43, generator=torch.Generator().manual_seed(1))
    found = relevance.grad_cam(model, x, 4)
    A = model.features(x).detach().requires_grad_()
    (grad,) = torch.autograd.grad(model.fc(A.mean((2, 3)))[:, 4].sum(), A)
    alpha = grad.mean((2, 3), keepdim=True)
    torch.testing.assert_close(found, (alpha * A).sum(1).clamp(min=0).detach())
    assert found.shape == (2, *model.grid_of(x)) == (2, 4, 6)
    assert relevance.input_gradients(model, x, 4).shape == found.shape


def test_the_backbone_of_a_segmenter(tmp_path):
    options = {"epochs": 1, "batch_size": 4, "quiet": True, "model": "resnet8_32", "img_size": 32}
    made = vitral.train(make_digit_scenes(train=8, test=2), out=tmp_path / "run", task="segment", **options)
    model = vitral.load_model(made.path)
    assert type(model.backbone).__name__ == "ResNet"
    assert model(torch.randn(1, model.backbone.config.in_chans, 30, 37)).shape[2:] == (30, 37)


def test_what_is_frozen_and_which_optimiser_has_what():
    model = create_model("resnet8_32")
    freeze_layers(model, 2)
    trained = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {"layer3", "fc"}
    with pytest.raises(ConfigError, match="at most the number of blocks or stages, 3, got 4"):
        freeze_layers(model, 4)
    freeze(model, "backbone")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"fc.weight", "fc.bias"}
    model = create_model("resnet8_32")
    adamw, muon = make_optimizers(model, LoopConfig(optimizer="muon", layer_decay=0.5))
    assert isinstance(muon, Muon)
    matrices = {id(p) for group in muon.param_groups for p in group["params"]}
    kernels = {id(p) for name, p in model.named_parameters() if p.ndim == 4 and name.startswith("layer")}
    assert matrices >= kernels
    assert all(p.ndim == 4 for group in muon.param_groups for p in group["params"])
    without = [p for group in adamw.param_groups if not group["weight_decay"] for p in group["params"]]
    assert all(p.ndim == 1 for p in without)
    with pytest.raises(ConfigError, match="would count every batch"):
        recompute_blocks(model)
    with pytest.raises(ConfigError, match="has no blocks to compute again"):
        recompute_blocks(create_model("resnet18", frozen_norm=True))
