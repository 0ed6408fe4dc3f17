"""A Swin trained, judged, probed, tuned and built upon by the same functions as a ViT."""

import json

import pytest
import torch

import vitral
from helpers import difference, images, redraw
from vitral.config import DetectOptions, DetectorConfig, SegmenterConfig, SegmentOptions, TrainConfig
from vitral.errors import ConfigError
from vitral.models.backbone import sum_at_finest
from vitral.models.detector import Detector
from vitral.models.segmenter import Segmenter
from vitral.models.swin import SwinTransformer
from vitral.models.zoo import create_model
from vitral.tasks.detect import Detect
from vitral.tasks.segment import Segment
from vitral.training.finetune import choose_trained, freeze_layers
from vitral.training.optim import Muon, make_optimizers
from vitral.weights.load import load_backbone

NAME = "swin_micro_patch2_window4_32"
QUICK = {"epochs": 1, "batch_size": 256, "img_size": 8, "quiet": True}


def micro(**options):
    return create_model(NAME, **({"seed": 0, "num_classes": 5, "in_chans": 1, "img_size": 16} | options))


def pyramid(**options):
    return redraw(micro(num_classes=0, **options)).eval()


# ---- training ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return vitral.train("digits", out=tmp_path_factory.mktemp("runs") / "swin", model=NAME, **QUICK)


def test_a_run(run):
    config = json.loads((run.path / "config.json").read_text())
    assert config["architecture"] == "swin"
    assert config["model"]["depths"] == [2, 2, 4]
    assert "Grad-CAM on the last map" in (run.path / "report.html").read_text()
    model = vitral.load_model(run.path)
    assert isinstance(model, SwinTransformer)
    assert vitral.evaluate(run.path, "digits")["accuracy"] == run.metrics["test"]["accuracy"]
    predictor = vitral.Predictor(run.path)
    pixels = (images(1, 8, 8).abs() * 60).to(torch.uint8)
    assert sum(predictor.predict(pixels, top_k=10)[0].probabilities) == pytest.approx(1, abs=1e-5)
    assert predictor.embed(pixels).shape == (1, 128)
    assert vitral.probe(run.path, "digits", cache=False)["width"] == 128
    with pytest.raises(vitral.errors.InputError, match="not a ViT"):
        _ = predictor.vit


def test_training_starts_from_its_weights(run, tmp_path):
    start = vitral.load_model(run.path)
    again = load_backbone(str(run.path), num_classes=0, img_size=10)
    assert again.config.image == (10, 10)
    x = images(2, 1, 10, 10)
    with torch.no_grad():
        assert torch.equal(again(x), start.embed(x))
    still = {"lr": 0.0, "weight_decay": 0.0, "drop_path_rate": 0.1, "freeze": "backbone"}
    tuned = vitral.train("digits", out=tmp_path / "x", model=str(run.path), **(QUICK | still))
    assert vitral.load_model(tuned.path).config.drop_path_rate == 0.1
    with pytest.raises(ConfigError, match="--method mae is for ViTs"):
        vitral.pretrain("digits", method="mae", model=NAME, out=tmp_path / "y", quiet=True)


# ---- which weights ----


def rates(model, **options):
    names = {id(p): name for name, p in model.named_parameters()}
    optimizers = make_optimizers(model, TrainConfig(lr=1.0, **options))
    return {
        names[id(p)]: (type(o), g["lr"], g["weight_decay"])
        for o in optimizers
        for g in o.param_groups
        for p in g["params"]
    }


@pytest.mark.parametrize("inside", [False, True])
def test_layer_decay_counts_blocks_through_the_stages(inside):
    model, prefix = micro(), ""
    if inside:
        config = SegmenterConfig(backbone=micro(num_classes=0).config, num_classes=3)
        model, prefix = Segmenter(config), "backbone."
    found = {name.removeprefix(prefix): lr for name, (_, lr, _) in rates(model, layer_decay=0.5).items()}
    assert found["patch_embed.norm.weight"] == 0.5**9  # eight blocks, and what comes after
    assert found["layers.0.blocks.1.attn.qkv.weight"] == 0.5**7
    assert found["layers.1.downsample.reduction.weight"] == found["layers.1.blocks.0.mlp.fc1.weight"] == 0.5**6
    assert found["layers.2.blocks.3.norm1.bias"] == 0.5
    assert found["norm.weight"] == 1
    assert found["head.classify.weight" if inside else "head.fc.weight"] == 1


def test_muon_takes_matrices_and_leaves_tables_of_biases():
    found = rates(micro(), optimizer="muon", weight_decay=0.1)
    taken = {name for name, (kind, _, _) in found.items() if kind is Muon}
    assert len(taken) == 8 * 4 + 2  # the matrices of the blocks, and of merging
    table = "layers.0.blocks.0.attn.relative_position_bias_table"
    assert table not in taken
    assert found[table][2] == 0
    assert found["layers.1.downsample.reduction.weight"][2] > 0


def test_freezing_and_lora(run):
    model = micro()
    freeze_layers(model, 3)
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(
        name.startswith(("patch_embed", "layers.0.", "layers.1.downsample", "layers.1.blocks.0.")) for name in learns
    )
    assert "layers.1.blocks.1.attn.qkv.weight" in learns
    with pytest.raises(ConfigError, match="at most the number of blocks or stages, 8, got 9"):
        freeze_layers(model, 9)
    tuned = micro()
    choose_trained(tuned, TrainConfig.from_dict({"model": str(run.path), "lora": {"rank": 2}}))
    learns = {name for name, p in tuned.named_parameters() if p.requires_grad}
    assert "head.fc.weight" in learns
    assert "layers.2.blocks.3.attn.qkv.lora_A" in learns
    assert "layers.2.blocks.3.mlp.fc1.weight" not in learns


# ---- built upon ----


def test_maps_are_summed_where_their_cells_lie():
    fine, coarse = torch.zeros(1, 1, 7, 5), torch.arange(12.0).view(1, 1, 4, 3)
    summed = sum_at_finest([fine, coarse])
    assert summed.shape == fine.shape
    assert float(summed[0, 0, 0, 0]) == 0
    assert summed[0, 0, :, 0].diff().min() >= 0
    flat = sum_at_finest([fine, torch.full((1, 1, 2, 2), 3.0)])  # of a quarter of the side
    assert torch.equal(flat, torch.full_like(fine, 3.0))
    same = images(1, 2, 4, 4)
    assert torch.equal(sum_at_finest([same, same]), same + same)


@pytest.mark.parametrize("head", ["linear", "conv"])
@torch.no_grad()
def test_a_segmenter_on_a_pyramid(head):
    task = Segment(["a", "b", "c"], SegmentOptions(head=head, width=16))
    model = redraw(task.build(pyramid())).eval()
    x = images(2, 1, 13, 18)
    assert model(x).shape == (2, 3, 13, 18)
    whole = model(torch.nn.functional.pad(x, (0, 0, 0, 1)))  # what pads the last patch is there already
    if head == "linear":
        assert difference(model(x), whole[:, :, :13]) < 1e-5
    assert Segmenter(SegmenterConfig.from_dict(json.loads(json.dumps(model.config.to_dict())))).config == model.config
    with pytest.raises(ConfigError, match="the mask head needs a ViT, got a SwinConfig"):
        Segment(["a", "b"], SegmentOptions(head="mask")).build(pyramid())


@torch.no_grad()
def test_a_detector_on_a_pyramid():
    model = redraw(Detect(["a", "b"], DetectOptions(width=16, heads=2), num_queries=5).build(pyramid())).eval()
    assert model.config.maps == 2
    x = images(2, 1, 20, 27)
    out = model(x)
    assert out.boxes.shape == (2, 5, 4)
    maps, cells = model.features(x)
    assert [tuple(m.shape[1:]) for m in maps] == [(64, 5, 7), (128, 3, 4)]
    assert cells.shape == (2, 5, 7)
    mask = torch.ones(2, 20, 27, dtype=torch.bool)
    mask[1, 12:] = False
    noisy = x.masked_fill(~mask[:, None], 7.0)
    assert difference(model(noisy, mask).boxes, model(x, mask).boxes) < 1e-5
    assert difference(model(x, mask).boxes, out.boxes) > 1e-4
    again = Detector(DetectorConfig.from_dict(json.loads(json.dumps(model.config.to_dict()))))
    assert again.config == model.config
