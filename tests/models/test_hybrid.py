"""A CNN of one's own before a ViT."""

import pytest
import torch
from torch import nn

from helpers import images
from vitral.config import ViTConfig
from vitral.errors import ConfigError
from vitral.models.hybrid import hybrid_vit
from vitral.models.vit import VisionTransformer
from vitral.weights.save import save_model

TINY = {"embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 5, "in_chans": 2}


def make_cnn(stride=2):
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(2, 7, 3, stride=stride, padding=1),
        nn.BatchNorm2d(7),
        nn.ReLU(),
        nn.Conv2d(7, 11, 3, stride=2, padding=1),
    )


def test_tokens_are_the_projected_cells_of_the_map():
    cnn = make_cnn()
    before = {name: tensor.clone() for name, tensor in cnn.state_dict().items()}
    model = hybrid_vit(cnn, img_size=(16, 24), cells=2, **TINY).eval()
    assert model.config.patch == (8, 8)
    assert all(torch.equal(tensor, before[name]) for name, tensor in cnn.state_dict().items()), "weights were redrawn"
    x = images(3, 2, 16, 24)
    tokens, features = model.patch_embed(x), cnn(x)
    assert tokens.shape == (3, 6, 24)
    W, b = model.patch_embed.proj.weight, model.patch_embed.proj.bias
    for row in range(2):
        for column in range(3):
            cell = features[1, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
            torch.testing.assert_close(tokens[1, 3 * row + column], (W * cell).sum((1, 2, 3)) + b)
    assert model(x).shape == (3, 5)
    assert model(images(1, 2, 32, 8)).shape == (1, 5), "another image size"


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_cnn_stays_as_it_is_and_another_learns(frozen):
    cnn = make_cnn()
    model = hybrid_vit(cnn, img_size=16, frozen=frozen, **TINY).train()
    before = {name: tensor.clone() for name, tensor in cnn.state_dict().items()}
    learn = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    model(images(4, 2, 16, 16)).square().sum().backward()
    learn.step()
    same = {name: torch.equal(tensor, before[name]) for name, tensor in cnn.state_dict().items()}
    assert all(same.values()) if frozen else not any(same[name] for name in ("0.weight", "1.running_mean", "3.bias"))
    assert model.patch_embed.proj.weight.grad is not None
    assert cnn.training is not frozen


def test_errors(tmp_path):
    with pytest.raises(ConfigError, match="must give one map"):
        hybrid_vit(nn.Sequential(make_cnn(), nn.Flatten()), img_size=16, **TINY)
    with pytest.raises(ConfigError, match=r"a map of 5x5 from an image of 19x19"):
        hybrid_vit(make_cnn(), img_size=19, **TINY)
    with pytest.raises(ConfigError, match="needs stem='custom' in the config, got 'linear'"):
        VisionTransformer(ViTConfig(), stem=nn.Identity())
    with pytest.raises(ConfigError, match="a custom stem is a module of your own"):
        VisionTransformer(ViTConfig(stem="custom"))
    with pytest.raises(ConfigError, match="which a run could not rebuild"):
        save_model(hybrid_vit(make_cnn(), img_size=16, **TINY), tmp_path / "run", "vitral")
    with pytest.raises(ConfigError, match=r"a multiple of its stride \(16\), got 8x8"):
        ViTConfig(stem="resnet", stem_depths=(1, 1, 1), patch_size=8)
    with pytest.raises(ConfigError, match="stem_depths are for the resnet stem"):
        ViTConfig(stem_depths=(1, 2))
    with pytest.raises(ConfigError, match="up to four whole numbers above 0"):
        ViTConfig(stem="resnet", stem_depths=(1, 0))
