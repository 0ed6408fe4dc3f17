import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

from helpers import difference, images
from vitral.errors import InputError
from vitral.inference import probe
from vitral.inference.probe import few_shot, fit_logistic, knn_probe, linear_probe
from vitral.tasks.metrics import wilson_interval

K, D = 5, 11


def labelled(n, seed, noise=1.5, scale=1.0):
    """Clusters around K directions that overlap, in features of different scales."""
    centres = images(K, D, seed=77)
    labels = torch.arange(n) % K
    x = centres[labels] + noise * images(n, D, seed=seed)
    return x * torch.linspace(1, scale, D), labels


TRAIN, VAL, TEST = labelled(300, 1), labelled(130, 2), labelled(170, 3)


# ---- nearest neighbours ----


def neighbours(k, weights):
    x, labels = (t.numpy() for t in TRAIN)
    found = KNeighborsClassifier(k, metric="cosine", algorithm="brute", weights=weights).fit(x, labels)
    return torch.from_numpy(found.predict(TEST[0].numpy()))


@pytest.mark.parametrize("k", [1, 7, 20])
def test_neighbours_vote_as_in_scikit_learn(k):
    by_weight = neighbours(k, lambda distance: np.exp((1 - distance) / 0.07))
    assert knn_probe(TRAIN, (TEST[0], by_weight), k)["accuracy"] == 1
    by_count = neighbours(k, "uniform")
    assert (knn_probe(TRAIN, (TEST[0], by_count), k)["accuracy"] == 1) == (k == 1)


def test_the_metrics_of_neighbours():
    found = knn_probe(TRAIN, TEST)
    predicted = neighbours(20, lambda distance: np.exp((1 - distance) / 0.07))
    right = int((predicted == TEST[1]).sum())
    assert 0.4 < right / 170 < 0.95
    assert found == {
        "images": 170,
        "accuracy": right / 170,
        "accuracy_95": list(wilson_interval(right, 170)),
        "settings": {"k": 20, "temperature": 0.07},
    }


def test_only_directions_count():
    longer = (TRAIN[0] * torch.linspace(1, 9, 300)[:, None], TRAIN[1])
    assert knn_probe(longer, TEST) == knn_probe(TRAIN, TEST)


def test_fewer_samples_than_neighbours():
    few = (TRAIN[0][:7], TRAIN[1][:7])
    assert knn_probe(few, TEST)["settings"]["k"] == 7


@pytest.mark.parametrize("cells", [1, 1000])
def test_memory_is_bounded_and_changes_nothing(monkeypatch, cells):
    neighbour, linear = knn_probe(TRAIN, TEST), linear_probe(TRAIN, VAL, TEST, steps=20)
    monkeypatch.setattr("vitral.tasks.neighbours.CELLS", cells)
    chunks = probe.chunks(TEST[0], len(TRAIN[0]))
    assert all(len(chunk) * len(TRAIN[0]) <= max(cells, len(TRAIN[0])) for chunk in chunks)
    assert torch.equal(torch.cat(tuple(chunks)), TEST[0])
    assert knn_probe(TRAIN, TEST) == neighbour
    assert linear_probe(TRAIN, VAL, TEST, steps=20) == linear


# ---- logistic regression ----


def with_one(x):
    return torch.cat([x, torch.ones(len(x), 1)], dim=1)


def test_two_steps_are_their_formula():
    x, labels = with_one(TRAIN[0][:13].double()), TRAIN[1][:13]
    n, columns, rate, decay = 13, D + 1, 0.7, 0.3
    gram = [[sum(x[i, a] * x[i, b] for i in range(n)) / n for b in range(columns)] for a in range(columns)]
    L = math.sqrt(sum(v**2 for row in gram for v in row)) / 2
    W, momentum = torch.zeros(columns, K).double(), torch.zeros(columns, K).double()
    for step in range(2):
        gradient = torch.zeros_like(W)
        for i in range(n):
            p = (x[i] @ W).exp() / (x[i] @ W).exp().sum()
            for d in range(columns):
                for k in range(K):
                    gradient[d, k] += x[i, d] * (p[k] - (labels[i] == k).double()) / n
        gradient[:-1] += decay * W[:-1]
        momentum = 0.9 * momentum + gradient
        W = W - rate / L * 0.5 * (1 + math.cos(math.pi * step / 2)) * momentum
    got = fit_logistic(x, labels, K, [(rate, decay)], steps=2, batch_size=n, seed=0)
    assert got.shape == (columns, K, 1)
    assert difference(got[..., 0], W) < 1e-9


@pytest.mark.parametrize("batch_size", [300, 60])
def test_logistic_regression_is_that_of_scikit_learn(batch_size):
    x, labels = TRAIN
    settings = [(rate, decay) for rate in (1.0, 2.0) for decay in (0.01, 0.1)]
    W = fit_logistic(with_one(x), labels, K, settings, steps=1500, batch_size=batch_size, seed=0)
    for s, (_, decay) in enumerate(settings):
        oracle = LogisticRegression(C=1 / (decay * len(x)), tol=1e-8, max_iter=1000).fit(x.numpy(), labels.numpy())
        want = torch.from_numpy(oracle.predict_proba(TEST[0].numpy())).float()
        got = (with_one(TEST[0]) @ W[..., s]).softmax(1)
        assert difference(got, want) < (1e-3 if batch_size == 300 else 0.02)


def test_settings_at_once_are_settings_one_by_one():
    settings = [(0.1, 0.0), (1.0, 0.01), (3.0, 0.1)]
    arguments = {"steps": 30, "batch_size": 70, "seed": 3}
    x = with_one(TRAIN[0])
    together = fit_logistic(x, TRAIN[1], K, settings, **arguments)
    for s, setting in enumerate(settings):
        assert difference(together[..., s], fit_logistic(x, TRAIN[1], K, [setting], **arguments)[..., 0]) < 1e-5
    assert difference(together[..., 0], together[..., 1]) > 0.1


def test_the_best_on_validation_is_chosen():
    lrs, decays = (0.01, 0.3, 3.0), (0.0, 0.1)
    found = linear_probe(TRAIN, VAL, TEST, lrs, decays, steps=200)
    alone = [linear_probe(TRAIN, VAL, TEST, (lr,), (decay,), steps=200) for lr in lrs for decay in decays]
    best = max(each["settings"]["val_accuracy"] for each in alone)
    assert min(each["settings"]["val_accuracy"] for each in alone) < best
    assert found in [each for each in alone if each["settings"]["val_accuracy"] == best]


def test_the_test_part_chooses_nothing():
    settings = [linear_probe(TRAIN, VAL, (TEST[0], (TEST[1] + i) % K), steps=100)["settings"] for i in range(K)]
    assert settings == settings[:1] * K
    others = [linear_probe(TRAIN, (VAL[0], (VAL[1] + i) % K), TEST, steps=100)["settings"] for i in range(K)]
    assert len({tuple(each.values()) for each in others}) > 1


def test_of_equally_accurate_settings_the_one_with_the_least_loss():
    easy = labelled(60, 1, noise=0.01)
    found = linear_probe(easy, easy, easy, lrs=(0.1, 3.0), weight_decays=(0.1, 0.001))
    assert found["accuracy"] == 1
    assert (found["settings"]["lr"], found["settings"]["weight_decay"]) == (3.0, 0.001)


def test_the_scale_of_features_does_not_matter():
    def scaled(part):
        return part[0] * torch.logspace(-3, 3, D) + torch.linspace(-50, 50, D) * torch.logspace(-3, 3, D), part[1]

    parts = TRAIN, VAL, TEST
    assert linear_probe(*map(scaled, parts), steps=100) == linear_probe(*parts, steps=100)


def test_a_feature_that_never_changes_does_no_harm():
    def with_constant(part):
        return torch.cat([part[0], torch.full((len(part[0]), 1), 7.0)], dim=1), part[1]

    parts = TRAIN, VAL, TEST
    plain, more = linear_probe(*parts, steps=100), linear_probe(*map(with_constant, parts), steps=100)
    assert more == plain


def test_a_rate_at_which_it_diverges_is_not_chosen():
    """Not even where scores that are no numbers happen to be right: they all say class 0."""
    easy = labelled(60, 1, noise=0.01)
    first = (easy[0][::K], easy[1][::K])
    found = [linear_probe(easy, first, easy, lrs=(lr,), weight_decays=(0.01,)) for lr in (1e30, 1.0)]
    assert [each["accuracy"] for each in found] == [1 / K, 1]
    assert [each["settings"]["val_accuracy"] for each in found] == [1, 1]
    assert linear_probe(easy, first, easy, lrs=(1e30, 1.0), weight_decays=(0.01,)) == found[1]


def test_the_seed_decides():
    def fit(seed):
        return fit_logistic(with_one(TRAIN[0]), TRAIN[1], K, [(1.0, 0.01)], steps=7, batch_size=70, seed=seed)

    assert torch.equal(fit(3), fit(3))
    assert not torch.equal(fit(3), fit(4))


@pytest.mark.parametrize(("n", "size", "steps"), [(10, 3, 7), (10, 30, 4), (7, 7, 2), (11, 2, 5)])
def test_batches_take_each_sample_once_before_any_twice(n, size, steps):
    batches = list(probe._batches(n, size, steps, seed=0))
    assert [len(rows) for rows in batches] == [min(size, n)] * steps
    per_pass = n // min(size, n)
    for start in range(0, steps, per_pass):
        rows = torch.cat(batches[start : start + per_pass]).tolist()
        assert len(set(rows)) == len(rows)


# ---- few labels ----


def test_a_share_of_every_class():
    labels = torch.arange(1000) % K
    for fraction in probe.FEW:
        chosen = few_shot(labels, fraction, seed=0)
        assert torch.equal(labels[chosen].bincount(), torch.full((K,), round(200 * fraction)))
        assert torch.equal(chosen, few_shot(labels, fraction, seed=0))
        assert not torch.equal(chosen, few_shot(labels, fraction, seed=1))


def test_a_smaller_share_is_part_of_a_larger_one():
    labels = (torch.arange(1003) ** 2) % K
    shares = [set(few_shot(labels, fraction, seed=0).tolist()) for fraction in probe.FEW]
    assert shares[0] < shares[1] < shares[2]


def test_a_rare_class_keeps_one():
    labels = torch.cat([torch.zeros(500), torch.ones(2)]).long()
    assert labels[few_shot(labels, 0.01, seed=0)].bincount().tolist() == [5, 1]


# ---- what cannot be ----


@pytest.mark.parametrize("fraction", [0, 1, 1.5])
def test_shares_that_cannot_be(fraction):
    with pytest.raises(InputError, match=f"above 0 and below 1, got {fraction}"):
        few_shot(torch.arange(10), fraction, seed=0)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ((TEST[0], TEST[1][1:]), r"labels \(n\), got \(170, 11\) and \(169,\)"),
        ((TEST[0][:, 1:], TEST[1]), r"features \(n, D\) of one width and labels \(n\), got \(170, 10\)"),
        ((TEST[0][:0], TEST[1][:0]), r"got \(0, 11\) and \(0,\)"),
        ((TEST[0], TEST[1].float()), "labels must be whole numbers from 0, got torch.float32"),
        ((TEST[0], TEST[1] - 1), "labels must be whole numbers from 0, got torch.int64 from -1"),
    ],
)
def test_inputs_that_cannot_be(test, message):
    with pytest.raises(InputError, match=message):
        knn_probe(TRAIN, test)
    with pytest.raises(InputError, match=message):
        linear_probe(TRAIN, VAL, test)


def test_k_of_zero():
    with pytest.raises(InputError, match="k must be at least 1, got 0"):
        knn_probe(TRAIN, TEST, k=0)
