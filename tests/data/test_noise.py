import numpy as np
import pytest
import torch
from scipy import stats

from vitral.data.noise import Noise


def noise(n=20000, seed=0):
    return Noise(seed, torch.arange(n))


def test_numbers_belong_to_the_sample_not_to_the_batch():
    whole = Noise(3, torch.arange(10)).uniform("crop", 5)
    assert torch.equal(Noise(3, torch.tensor([7, 2])).uniform("crop", 5), whole[[7, 2]])
    assert torch.equal(Noise(3, torch.arange(10)).uniform("crop", 3), whole[:, :3])


def test_seeds_streams_samples_and_indices_all_differ():
    a = noise().uniform("a", 2)
    others = {
        "seed": noise(seed=1).uniform("a", 2),
        "stream": noise().uniform("b", 2),
        "sample": a.roll(1, 0),
        "index": a.flip(1),
    }
    for name, b in others.items():
        assert abs(np.corrcoef(a[:, 0], b[:, 0])[0, 1]) < 0.03, name


def test_uniform_is_uniform():
    values = noise().uniform("x")[:, 0].numpy()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_chance_never_acts_at_0_and_always_at_1():
    assert not noise().chance("x", 0.0).any()
    assert noise().chance("x", 1.0).all()
    assert noise().chance("x", 0.3).double().mean().item() == pytest.approx(0.3, abs=0.01)


def test_choice_reaches_every_number_alike():
    counts = torch.bincount(noise().choice("x", 7)[:, 0], minlength=7)
    assert len(counts) == 7
    assert stats.chisquare(counts.numpy()).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0, 3.0])
def test_beta_is_beta(alpha):
    assert stats.kstest(noise().beta("x", alpha).numpy(), stats.beta(alpha, alpha).cdf).pvalue > 1e-3


def test_between():
    values = noise().between("x", -2, 5)
    assert values.min() >= -2
    assert values.max() < 5
    assert values.mean().item() == pytest.approx(1.5, abs=0.05)


def test_parts_of_samples_have_numbers_of_their_own():
    whole = Noise(0, torch.tensor([3, 8])).parts(5, 0, 5).uniform("a", 2)
    some = Noise(0, torch.tensor([3, 8])).parts(5, 1, 3)
    assert torch.equal(some.uniform("a", 2), whole.view(2, 5, 2)[:, 1:3].flatten(0, 1))
    assert len(whole.unique()) == 20
