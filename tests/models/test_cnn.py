"""ResNets against timm's, with every weight and statistic redrawn."""

import pytest
import torch

from helpers import difference, images, redraw
from peers import import_timm
from vitral.config import ResNetConfig
from vitral.errors import ConfigError, InputError
from vitral.models.cnn import FrozenBatchNorm2d, ResNet

timm = import_timm()


def redraw_statistics(model, seed=3):
    """Means, deviations and scales of batch norms that are not 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith(("running_var", ".weight")):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        elif buffer.is_floating_point():
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dilation", [False, True])
@pytest.mark.parametrize("kind", ["resnet18", "resnet50"])
@torch.no_grad()
def test_the_numbers_of_timm(kind, dilation, frozen):
    options = {"output_stride": 16} if dilation else {}
    theirs = redraw_statistics(redraw(timm.create_model(kind, num_classes=11, **options)))
    ours = ResNet(ResNetConfig(kind=kind, num_classes=11, dilation=dilation, frozen_norm=frozen)).eval()
    weights = theirs.state_dict()
    if frozen:
        weights = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    ours.load_state_dict(weights)
    x = images(2, 3, 67, 101)
    features = ours.features(x)
    assert features.shape == (2, 512 if kind == "resnet18" else 2048, *((5, 7) if dilation else (3, 4)))
    assert difference(features, theirs.forward_features(x)) < 1e-5
    assert difference(ours(x), theirs(x)) < 1e-5


def test_resnet101_has_the_names_of_timm():
    with torch.device("meta"):
        ours = ResNet(ResNetConfig(kind="resnet101")).state_dict()
        theirs = timm.create_model("resnet101").state_dict()
    assert {name: t.shape for name, t in ours.items()} == {name: t.shape for name, t in theirs.items()}


def test_a_frozen_norm_is_batch_norm_in_eval_mode_and_is_not_trained():
    norm = redraw_statistics(torch.nn.BatchNorm2d(7)).eval()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 7))
        norm.bias.copy_(torch.linspace(-1, 1, 7))
    frozen = FrozenBatchNorm2d(7).train()
    frozen.load_state_dict({k: v for k, v in norm.state_dict().items() if k != "num_batches_tracked"})
    x = images(3, 7, 5, 2)
    assert difference(frozen(x), norm(x)) < 1e-6
    assert list(frozen.parameters()) == []
    assert sorted(frozen.state_dict()) == ["bias", "running_mean", "running_var", "weight"]


def test_without_a_head_the_answer_is_the_mean_of_the_map():
    model = ResNet(ResNetConfig(kind="resnet18", num_classes=0, in_chans=1)).eval()
    x = images(2, 1, 64, 64)
    assert "fc.weight" not in model.state_dict()
    torch.testing.assert_close(model(x), model.features(x).mean((2, 3)))


def test_errors():
    with pytest.raises(ConfigError, match=r"kind must be one of resnet8, resnet18, .*, resnet101, got 'resnet19'"):
        ResNetConfig(kind="resnet19")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="images must have 3 channels, got 4"):
        ResNet(ResNetConfig(kind="resnet18"))(images(1, 4, 32, 32))
