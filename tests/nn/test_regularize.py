import pytest
import torch

from helpers import images
from vitral.nn.regularize import LayerScale, StochasticDepth, stochastic_depth_rates


def test_layer_scale_multiplies_each_channel():
    scale = LayerScale(3, 0.5)
    scale.gamma.data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    x = images(2, 5, 3)
    assert torch.equal(scale(x), torch.stack([x[..., 0], 2 * x[..., 1], 3 * x[..., 2]], -1))
    assert LayerScale(3, 1e-5).gamma.tolist() == pytest.approx([1e-5] * 3)


def test_stochastic_depth_never_acts_at_rate_0_nor_in_evaluation():
    x = images(64, 3, 2)
    assert torch.equal(StochasticDepth(0.0).train()(x), x)
    assert torch.equal(StochasticDepth(0.9).eval()(x), x)


def test_stochastic_depth_drops_whole_samples_at_its_rate_and_keeps_the_mean():
    torch.manual_seed(0)
    y = StochasticDepth(0.25).train()(torch.ones(20000, 2, 3))
    assert ((y == 0).all((1, 2)) | (y == 1 / 0.75).all((1, 2))).all()
    assert float((y[:, 0, 0] == 0).float().mean()) == pytest.approx(0.25, abs=0.015)
    assert float(y.mean()) == pytest.approx(1, abs=0.02)


def test_given_noise_decides_which_samples_are_dropped():
    depth = StochasticDepth(0.25).train()
    depth.noise = torch.tensor([0.0, 0.2499, 0.25, 0.9])
    assert torch.equal(depth(torch.ones(4, 2, 3))[:, 0, 0], torch.tensor([0, 0, 1 / 0.75, 1 / 0.75]))


def test_rates_rise_linearly_from_0():
    assert stochastic_depth_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert stochastic_depth_rates(0.3, 1) == [0]
