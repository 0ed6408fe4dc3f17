"""Batch norm statistics belong to the weights they are used with."""

import pytest
import torch
from torch import nn

from helpers import images
from vitral.training import norms


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 3, 3), nn.BatchNorm2d(3))


def passes(net, batches):
    for x in batches:
        net(x)
        yield


def test_the_statistics_are_those_of_all_the_pixels_that_were_measured():
    net = make_net()
    data = 3 + 2 * images(24, 2, 9, 11)
    norms.measure(net, passes(net, data.split(8)), mean=lambda t: t)
    first = net[0](data)
    torch.testing.assert_close(net[1].running_mean, first.mean((0, 2, 3)))
    torch.testing.assert_close(net[1].running_var, first.var((0, 2, 3), correction=0), rtol=5e-3, atol=0)
    assert not any(module.training for module in net.modules())
    assert net[1].momentum == 0.1


def test_the_mean_over_processes_is_taken_of_means_and_squares():
    data = images(16, 2, 9, 9) * torch.linspace(1, 4, 16).view(-1, 1, 1, 1)
    whole, half = make_net(), make_net()
    norms.measure(whole[:2], passes(whole[:2], data.split(4)), lambda t: t)
    parts = []
    for share in (data[:8], data[8:]):
        norms.measure(half[:2], passes(half[:2], share.split(4)), lambda t: parts.append(t) or t)
    other = make_net()
    norms.measure(other[:2], passes(other[:2], data[:4].split(4)), lambda t: sum(parts) / 2)
    torch.testing.assert_close(other[1].running_var, whole[1].running_var)
    torch.testing.assert_close(other[1].running_mean, whole[1].running_mean)


def test_what_was_there_before_comes_back():
    net = make_net().train()
    net(images(4, 2, 9, 9))
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    kept = norms.measure(net, passes(net, [images(8, 2, 9, 9, seed=5)]), lambda t: t)
    assert not torch.equal(net[1].running_mean, before["1.running_mean"])
    norms.restore(net, kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_statistics_that_became_nan_are_measured_away():
    net = make_net().train()
    net(torch.full((2, 2, 9, 9), float("nan")))
    assert net[1].running_mean.isnan().all()
    norms.measure(net, passes(net, [images(8, 2, 9, 9)]), lambda t: t)
    assert all(tensor.isfinite().all() for tensor in net.state_dict().values())


def test_a_frozen_norm_keeps_its_statistics_in_training():
    net = make_net()
    net[1].requires_grad_(False)
    norms.train(net)
    assert [net[1].training, net[4].training, net.training] == [False, True, True]
    before = net[1].running_mean.clone()
    norms.measure(net, passes(net, [images(8, 2, 9, 9)]), lambda t: t)
    assert torch.equal(net[1].running_mean, before)


def test_a_model_without_batch_norm_sees_no_batch():
    net = nn.Linear(2, 3)
    norms.measure(net, iter(pytest.fail, None), lambda t: t)
    assert not net.training
