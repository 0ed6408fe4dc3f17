"""Hybrids against timm's, every tensor redrawn: the same numbers and gradients, by its files and by Google's."""

import numpy as np
import pytest
import torch

from helpers import difference, images, redraw
from peers import import_timm
from vitral.errors import CheckpointError, ConfigError
from vitral.models.zoo import create_model
from vitral.weights.load import load_model
from vitral.weights.save import save_model

timm = import_timm()

SMALL = {"depth": 2, "num_classes": 7, "embed_dim": 96, "num_heads": 3}
ROOT, R26, R50 = "vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224", "vit_base_r50_s16_224"


def pair_of(name, **options):
    theirs = redraw(timm.create_model(name, **SMALL | options), seed=1)
    ours = create_model(name, **SMALL | options).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize(("name", "size"), [(ROOT, (224, 224)), (ROOT, (96, 160)), (R26, (64, 96)), (R50, (48, 80))])
@torch.no_grad()
def test_the_numbers_of_timm(name, size):
    ours, theirs = pair_of(name, img_size=size)
    x = images(2, 3, *size)
    assert difference(ours(x), theirs(x)) < 1e-5
    assert difference(ours.forward_features(x), theirs.forward_features(x)) < 1e-5


@pytest.mark.parametrize("name", [ROOT, R26])
def test_the_gradients_of_timm(name):
    ours, theirs = pair_of(name, img_size=64)
    x = images(2, 3, 64, 64)
    for model in (ours, theirs):
        model.train()
        torch.nn.functional.cross_entropy(model(x), torch.tensor([2, 5])).backward()
    reference = dict(theirs.named_parameters())
    for parameter_name, parameter in ours.named_parameters():
        assert difference(parameter.grad, reference[parameter_name].grad) < 1e-4, parameter_name


@pytest.mark.parametrize("name", [ROOT, R26, pytest.param(R50, marks=pytest.mark.slow)])
@torch.no_grad()
def test_a_file_of_timm_loads_and_is_written_again(name, tmp_path):
    _, theirs = pair_of(name, img_size=64)
    path = tmp_path / "model.pth"
    torch.save(theirs.state_dict(), path)
    ours = load_model(path, num_heads=3, quiet=True)
    x = images(1, 3, 64, 64)
    assert not ours.load_report.renamed
    assert "ResNet" in ours.load_report.layout
    assert difference(ours(x), theirs(x)) < 1e-5
    save_model(ours, tmp_path / "timm")
    again = timm.create_model("local-dir:" + str(tmp_path / "timm"), pretrained=True).eval()
    assert difference(again(x), theirs(x)) < 1e-5
    kept = load_model(tmp_path / "timm", quiet=True).state_dict()
    assert all(torch.equal(tensor, kept[key]) for key, tensor in ours.state_dict().items())


@pytest.mark.parametrize("name", [ROOT, R26])
@torch.no_grad()
def test_an_archive_of_ours_is_read_by_timm_and_by_us(name, tmp_path):
    ours, theirs = pair_of(name, img_size=64)
    path = tmp_path / "hybrid.npz"
    save_model(ours, path, "google")
    redraw(theirs, seed=9)
    theirs.load_pretrained(str(path))
    x = images(1, 3, 64, 64)
    assert difference(theirs(x), ours(x)) < 1e-5
    arrays = dict(np.load(path))
    arrays["gn_root/scale"] = arrays["gn_root/scale"][None, None, None]  # as older archives keep it
    np.savez(path, **{f"opt/target/{name}": array for name, array in arrays.items()})
    again = load_model(path, quiet=True)
    assert again.config.stem_depths == ours.config.stem_depths
    assert again.config.act == "gelu_tanh"
    for key, tensor in again.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key


@torch.no_grad()
def test_other_channels_classes_and_sizes(tmp_path):
    _, theirs = pair_of(R26, img_size=64)
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    model = load_model(tmp_path / "model.pth", in_chans=1, num_classes=5, img_size=96, quiet=True)
    assert model(images(1, 1, 96, 96)).shape == (1, 5)
    changed = {name for name, *_ in model.load_report.resized}
    assert changed == {"patch_embed.backbone.stem.conv.weight", "pos_embed"}
    with pytest.raises(ConfigError, match="cells of its CNN's map"):
        load_model(tmp_path / "model.pth", patch_size=64, img_size=64, quiet=True)


def test_a_hybrid_of_another_kind_is_named(tmp_path):
    theirs = timm.create_model("vit_small_resnet26d_224", depth=1)
    torch.save(theirs.state_dict(), tmp_path / "model.pth")
    with pytest.raises(CheckpointError, match="hybrid of another kind"):
        load_model(tmp_path / "model.pth")
