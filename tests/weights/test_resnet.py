"""Files of ResNets: read as timm runs them, brought to other classes and channels, inspected, written for timm."""

import json

import pytest
import torch

import vitral
from helpers import difference, images, redraw
from peers import import_timm
from vitral.errors import CheckpointError, ConfigError
from vitral.models.cnn import ResNet
from vitral.weights.inspect import inspect_weights

timm = import_timm()


def redrawn(kind, **options):
    """A ResNet of timm with every weight and statistic drawn anew."""
    model = redraw(timm.create_model(kind, num_classes=11, **options))
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5 * name.endswith("var"))
    return model


@pytest.fixture(scope="module")
def theirs():
    return redrawn("resnet18")


@pytest.fixture
def path(theirs, tmp_path):
    torch.save(theirs.state_dict(), tmp_path / "resnet.pth")  # torchvision's files have the same names
    return tmp_path / "resnet.pth"


@pytest.mark.parametrize("kind", ["resnet34", "resnet50"])
def test_logits_and_gradients_are_those_of_timm(kind, tmp_path):
    theirs = redrawn(kind)
    torch.save({"state_dict": theirs.state_dict()}, tmp_path / "x.pth")
    ours = vitral.load_model(tmp_path / "x.pth", quiet=True)
    x = images(2, 3, 64, 96)
    grads = []
    for model in (ours, theirs):
        out = model(x)
        out.square().mean().backward()
        grads.append((out.detach(), {name: p.grad for name, p in model.named_parameters()}))
    assert difference(grads[0][0], grads[1][0]) < 1e-4
    for name, grad in grads[1][1].items():
        assert difference(grads[0][1][name], grad) < 1e-4, name


@torch.no_grad()
def test_a_file_loads_with_a_report(path, theirs):
    ours = vitral.load_model(path, quiet=True)
    assert isinstance(ours, ResNet)
    assert difference(ours(images(2, 3, 65, 70)), theirs(images(2, 3, 65, 70))) < 1e-5
    report = ours.load_report
    assert len(report.matched) == 102
    assert {why for _, why in report.dropped} == {"count of the batches that the norms saw in training"}
    assert (ours.preprocess.interpolation, ours.preprocess.crop_pct) == ("bilinear", 0.875), "as torchvision evaluates"


@torch.no_grad()
def test_other_classes_channels_and_sizes(path, theirs):
    ours = vitral.load_model(path, num_classes=5, in_chans=1, img_size=96, quiet=True)
    assert ours(images(1, 1, 40, 40)).shape == (1, 5)
    assert ours.preprocess.img_size == (96, 96)
    grey = images(1, 1, 40, 40)
    assert difference(ours.embed(grey), theirs.forward_features(grey.expand(-1, 3, -1, -1)).mean((2, 3))) < 1e-5
    assert [name for name, *_ in ours.load_report.resized] == ["conv1.weight"]
    assert [name for name, _ in ours.load_report.created] == ["fc.weight", "fc.bias"]


@torch.no_grad()
def test_written_for_timm_and_as_a_run(path, theirs, tmp_path):
    ours = vitral.load_model(path, quiet=True)
    ours.labels = [f"c{i}" for i in range(11)]
    x = images(1, 3, 48, 64)
    vitral.save_model(ours, tmp_path / "timm")
    again = timm.create_model("local-dir:" + str(tmp_path / "timm"), pretrained=True).eval()
    assert difference(again(x), theirs(x)) < 1e-5
    back = vitral.load_model(tmp_path / "timm", quiet=True)
    assert (back.preprocess, back.labels) == (ours.preprocess, ours.labels)
    vitral.save_model(ours, tmp_path / "run", layout="vitral")
    run = vitral.load_model(tmp_path / "run")
    assert difference(run(x), theirs(x)) < 1e-5
    adapted = vitral.load_model(tmp_path / "run", num_classes=3, in_chans=2)
    assert adapted(images(1, 2, 32, 32)).shape == (1, 3)
    assert torch.equal(adapted.bn1.running_mean, run.bn1.running_mean)


def test_dilation_and_foreign_pools_are_told_by_the_config(tmp_path):
    """Their tensors are those of a plain ResNet."""
    dilated = redraw(vitral.create_model("resnet18", num_classes=5, dilation=True, img_size=96))
    vitral.save_model(dilated, tmp_path / "timm")
    x = images(1, 3, 96, 96)
    back = vitral.load_model(tmp_path / "timm", quiet=True)
    assert back.config.dilation
    assert difference(back(x), dilated(x)) < 1e-5
    document = json.loads((tmp_path / "timm" / "config.json").read_text())
    for wrong in ({"architecture": "resnetblur18"}, {"model_args": {"output_stride": 8}}):
        (tmp_path / "timm" / "config.json").write_text(json.dumps(document | wrong))
        with pytest.raises(CheckpointError, match="output_stride"):
            vitral.load_model(tmp_path / "timm", quiet=True)


def test_inspected(path):
    found = inspect_weights(str(path))
    assert not found.problem
    assert ("kind", "resnet18", "the shapes") in found.settings


def test_errors(path, theirs, tmp_path):
    with pytest.raises(ConfigError, match="is a ResNet: it takes no family"):
        vitral.load_model(path, patch_size=8)
    broken = tmp_path / "broken.pth"
    torch.save({k: v for k, v in theirs.state_dict().items() if k != "layer2.0.bn1.bias"}, broken)
    with pytest.raises(CheckpointError, match=r"lacks layer2\.0\.bn1\.bias"):
        vitral.load_model(broken)
    torch.save({k: v for k, v in theirs.state_dict().items() if not k.startswith("layer3.1")}, broken)
    with pytest.raises(CheckpointError, match="looks like a ResNet, but is none of resnet8, resnet18"):
        vitral.load_model(broken)
    torch.save({**theirs.state_dict(), "layer1.0.se.weight": torch.zeros(3)}, broken)
    with pytest.raises(CheckpointError, match=r"beyond what a ResNet needs, layer1\.0\.se\.weight"):
        vitral.load_model(broken)
    wide = timm.create_model("wide_resnet50_2")
    torch.save(wide.state_dict(), broken)
    with pytest.raises(CheckpointError, match=r"has shape \(128, 64, 1, 1\)"):
        vitral.load_model(broken)
    with pytest.raises(ConfigError, match="timm has no resnet8 for small images"):
        vitral.save_model(vitral.create_model("resnet8_32"), tmp_path / "small")
    with pytest.raises(ConfigError, match="a ResNet cannot be written in the layout google"):
        vitral.save_model(vitral.load_model(path, quiet=True), tmp_path / "x.npz", layout="google")
