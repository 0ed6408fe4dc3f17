import pytest
import torch

from helpers import images
from vitral.nn.regularize import LayerScale, PatchDropout, StochasticDepth, stochastic_depth_rates


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


def test_patch_dropout_never_acts_at_rate_0_nor_in_evaluation():
    z, visible = images(3, 9, 2), torch.rand(3, 9) > 0.5
    for part in (PatchDropout(0.0, 2).train(), PatchDropout(0.9, 2).eval()):
        assert part(z, visible) == (z, visible)
        assert part(z) == (z, None)


@pytest.mark.parametrize(("rate", "patches", "kept"), [(0.25, 8, 6), (0.5, 7, 3), (0.1, 4, 4), (0.99, 6, 1)])
def test_patch_dropout_keeps_its_share_in_order_and_every_prefix_token(rate, patches, kept):
    torch.manual_seed(0)
    z = torch.arange(2.0 + patches)[:, None].expand(500, -1, 3)
    stay, visible = PatchDropout(rate, 2).train()(z)
    assert stay.shape == (500, 2 + kept, 3)
    assert visible is None
    assert stay[:, :2, 0].tolist() == [[0, 1]] * 500
    assert (stay[:, 1:] > stay[:, :-1]).all()
    seen = torch.bincount(stay[:, 2:, 0].long().flatten(), minlength=2 + patches)[2:] / 500
    assert seen.tolist() == pytest.approx([kept / patches] * patches, abs=0.1)


def test_the_patches_with_the_largest_numbers_go_and_hidden_ones_before():
    part = PatchDropout(0.5, 1).train()
    part.draw = lambda n: torch.tensor([[0.4, 0.1, 0.9, 0.2], [0.4, 0.1, 0.9, 0.2]])[:, :n]
    z = torch.arange(5.0)[None, :, None].expand(2, -1, 1)
    visible = torch.tensor([[True] * 5, [True, True, False, True, False]])
    stay, seen = part(z, visible)
    assert stay[..., 0].tolist() == [[0, 2, 4], [0, 1, 3]]
    assert seen.tolist() == [[True] * 3] * 2
