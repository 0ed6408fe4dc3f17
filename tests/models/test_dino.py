import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import difference, images, redraw
from vitral.config import ViTConfig
from vitral.errors import InputError
from vitral.models import dino
from vitral.models.dino import (
    DINOHead,
    collapse,
    dino_loss,
    feature_rank,
    feature_std,
    ibot_loss,
    koleo_loss,
    make_teacher,
    teacher_entropy,
    teacher_information,
    teacher_momentum,
    teacher_probabilities,
    teacher_temperature,
    update_centre,
    update_teacher,
    weight_decay,
)
from vitral.models.vit import VisionTransformer

V, G, B, K, D = 5, 2, 3, 7, 20


def head():
    return redraw(DINOHead(D, hidden=13, bottleneck=11, prototypes=K))


def network():
    config = ViTConfig(img_size=12, patch_size=4, embed_dim=D, depth=2, num_heads=5, num_classes=0)
    return nn.Sequential(redraw(VisionTransformer(config)), head())


def probabilities(*shape, seed=0):
    return images(*shape, seed=seed).softmax(-1)


# ---- the head ----


@torch.no_grad()
def test_the_head_is_its_formula():
    part, x = head(), images(B, D)
    first, _, second, _, third = part.mlp
    h = x
    for layer in (first, second):
        y = h @ layer.weight.T + layer.bias
        h = y * 0.5 * (1 + torch.erf(y / 2**0.5))
    h = h @ third.weight.T + third.bias
    logits = torch.zeros(B, K)
    for b in range(B):
        for k in range(K):
            w = part.last_layer.weight[k]
            logits[b, k] = w @ h[b] / w.square().sum().sqrt() / h[b].square().sum().sqrt()
    assert part(x).shape == (B, K)
    assert difference(part(x), logits) < 1e-5


@torch.no_grad()
def test_the_last_layer_is_torchs_weight_norm_at_one():
    part, x = head(), images(B, D)
    oracle = nn.utils.parametrizations.weight_norm(nn.Linear(11, K, bias=False))
    oracle.parametrizations.weight.original0.fill_(1)
    oracle.parametrizations.weight.original1.copy_(part.last_layer.weight)
    assert difference(part(x), oracle(F.normalize(part.mlp(x), dim=-1))) < 1e-6


@torch.no_grad()
def test_logits_are_cosines_whatever_the_size_of_a_prototype():
    part, x = head(), images(B, 4, D)
    before = part(x)
    assert before.shape == (B, 4, K)
    assert before.abs().max() <= 1
    part.last_layer.weight.mul_(torch.arange(1, K + 1)[:, None])
    assert difference(part(x), before) < 1e-6


# ---- the teacher ----


@torch.no_grad()
def test_centring_and_sharpening_are_their_formula():
    logits, centre, tau = images(G, B, K), images(K, seed=1), 0.3
    got = teacher_probabilities(logits, centre, tau)
    for g in range(G):
        for b in range(B):
            e = [math.exp((logits[g, b, k] - centre[k]) / tau) for k in range(K)]
            want = torch.tensor([value / sum(e) for value in e])
            assert difference(got[g, b], want) < 1e-5
    entropies = [teacher_entropy(teacher_probabilities(logits, centre, tau)) for tau in (0.04, 0.3, 1, 10)]
    assert entropies == sorted(entropies)
    assert entropies[0] < 0.4 < 1.9 < entropies[-1] <= math.log(K) + 1e-6


def test_the_centre_is_its_formula():
    logits, centre, m = images(G, B, K), images(K, seed=1), 0.9
    new = update_centre(centre, logits, m)
    for k in range(K):
        mean = sum(logits[g, b, k] for g in range(G) for b in range(B)) / (G * B)
        assert new[k].item() == pytest.approx(m * centre[k].item() + (1 - m) * mean.item(), abs=1e-6)
    assert torch.equal(update_centre(centre, logits, 1.0), centre)
    for _ in range(200):
        centre = update_centre(centre, logits, m)
    assert difference(centre, logits.mean((0, 1))) < 1e-5


def test_the_teacher_is_an_average_of_students():
    student, m = network(), 0.7
    teacher = make_teacher(student)
    before = [p.clone() for p in teacher.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, student.parameters(), strict=True))
    redraw(student, seed=5)
    update_teacher(teacher, student, m)
    for theta_t, old, theta_s in zip(teacher.parameters(), before, student.parameters(), strict=True):
        assert difference(theta_t, m * old + (1 - m) * theta_s) < 1e-6
    after = [p.clone() for p in teacher.parameters()]
    update_teacher(teacher, student, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(after, teacher.parameters(), strict=True))
    update_teacher(teacher, student, 0.0)
    assert all(difference(a, b) < 1e-6 for a, b in zip(teacher.parameters(), student.parameters(), strict=True))


def test_the_teacher_drops_nothing():
    student = network().train()
    teacher = make_teacher(student)
    assert student.training
    assert not any(module.training for module in teacher.modules())


def test_gradients_flow_into_the_student_alone():
    student = network()
    teacher = make_teacher(student)
    x = images(V * B, 3, 12, 12)
    answers = student(x).unflatten(0, (V, B))
    told = teacher_probabilities(teacher(x[: G * B]).unflatten(0, (G, B)), torch.zeros(K), 0.04)
    (dino_loss(answers, told, 0.1) + teacher(x).sum()).backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in student.parameters())


def test_no_gradient_passes_the_teachers_answer_or_the_centre():
    logits = images(G, B, K).requires_grad_()
    assert not teacher_probabilities(logits, torch.zeros(K), 0.04).requires_grad
    assert not update_centre(torch.zeros(K), logits, 0.9).requires_grad


# ---- the losses ----


def test_the_loss_is_its_formula():
    student, teacher, tau = images(V, B, K), probabilities(G, B, K, seed=1), 0.1
    total, pairs = 0.0, 0
    for i in range(G):
        for j in range(V):
            if i != j:
                pairs += 1
                for b in range(B):
                    p_s = (student[j, b] / tau).softmax(0)
                    total -= sum(teacher[i, b, k] * p_s[k].log() for k in range(K)) / B
    assert pairs == 8
    assert difference(dino_loss(student, teacher, tau), total / pairs) < 1e-5


def test_no_crop_is_compared_with_itself():
    teacher = probabilities(1, B, K, seed=1)
    student = images(2, B, K).requires_grad_()
    (gradient,) = torch.autograd.grad(dino_loss(student, teacher, 0.1), student)
    assert torch.equal(gradient[0], torch.zeros(B, K))
    assert gradient[1].abs().sum() > 0


def test_the_loss_is_least_where_the_student_says_what_the_teacher_says():
    logits = images(1, B, K).expand(V, -1, -1)
    teacher = (logits[:G] / 0.1).softmax(-1)
    least = dino_loss(logits, teacher, 0.1)
    assert least.item() == pytest.approx(teacher_entropy(teacher), rel=1e-5)
    for seed in range(5):
        assert dino_loss(logits + 0.1 * images(V, B, K, seed=seed + 1), teacher, 0.1) > least


@pytest.mark.parametrize(("crops", "seen"), [(1, 1), (2, 3)])
def test_crops_that_cannot_be_compared(crops, seen):
    with pytest.raises(InputError, match=f"needs 2 or more, the teacher's first, got {crops} and {seen}"):
        dino_loss(images(crops, B, K), probabilities(seen, B, K), 0.1)


def test_the_loss_of_hidden_patches_is_its_formula():
    masked = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])
    student, teacher, tau = images(3, 4, K), probabilities(3, 4, K, seed=1), 0.1
    total = 0.0
    for b in range(3):
        hidden = [n for n in range(4) if masked[b, n]]
        for n in hidden:
            p_s = (student[b, n] / tau).softmax(0)
            total -= sum(teacher[b, n, k] * p_s[k].log() for k in range(K)) / len(hidden)
    loss = ibot_loss(student[masked], teacher[masked], masked, tau)
    assert difference(loss, total / 3) < 1e-5


def test_without_hidden_patches_there_is_nothing_to_lose():
    masked = torch.zeros(3, 4, dtype=torch.bool)
    student = images(3, 4, K).requires_grad_()
    loss = ibot_loss(student[masked], probabilities(0, K), masked, 0.1)
    assert loss == 0
    loss.backward()


def test_koleo_is_its_formula():
    x = images(11, 5)
    unit = [v / v.square().sum().sqrt() for v in x]
    total = 0.0
    for i in range(11):
        total -= math.log(min((unit[i] - unit[j]).square().sum().sqrt() for j in range(11) if j != i))
    assert koleo_loss(x).item() == pytest.approx(total / 11, rel=1e-5)


def test_koleo_spreads_features():
    torch.manual_seed(0)
    x = (torch.tensor([1.0, 0, 0]) + 0.1 * images(13, 3)).requires_grad_()
    before = feature_std(x.detach())
    optimizer = torch.optim.SGD([x], lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        koleo_loss(x).backward()
        optimizer.step()
    assert feature_std(x.detach()) > 3 * before


def test_koleo_of_equal_features_has_a_finite_gradient():
    x = torch.ones(3, 5, requires_grad=True)
    koleo_loss(x).backward()
    assert x.grad.isfinite().all()
    with pytest.raises(InputError, match="needs at least 2 features, got 1"):
        koleo_loss(x[:1])


# ---- the schedules ----


def test_the_schedules_are_their_formulas():
    steps = 13
    for i in range(steps + 1):
        p = i / steps
        momentum = 1 - (1 - 0.996) * (math.cos(math.pi * i / steps) + 1) / 2
        assert teacher_momentum(p, 0.996) == pytest.approx(momentum)
        decay = 0.4 + 0.5 * (0.04 - 0.4) * (1 + math.cos(math.pi * i / steps))
        assert weight_decay(p, 0.04, 0.4) == pytest.approx(decay)
    assert teacher_momentum(0, 0.996) == pytest.approx(0.996)
    assert teacher_momentum(1, 0.996) == 1
    assert (weight_decay(0, 0.04, 0.4), weight_decay(1, 0.04, 0.4)) == pytest.approx((0.04, 0.4))


def test_the_teachers_temperature_rises_and_stays():
    at = [teacher_temperature(i / 10, warmup=0.3, start=0.04, end=0.07) for i in range(11)]
    assert at[:4] == pytest.approx([0.04, 0.05, 0.06, 0.07])
    assert at[4:] == [0.07] * 7
    assert teacher_temperature(0, warmup=0, start=0.04, end=0.07) == 0.07


# ---- is it going well ----


def test_entropy_and_information_are_their_formulas():
    p = probabilities(11, K)

    def H(row):
        return -sum(v * math.log(v) for v in row)

    mean = [sum(p[i, k].item() for i in range(11)) / 11 for k in range(K)]
    entropies = [H(row.tolist()) for row in p]
    assert teacher_entropy(p) == pytest.approx(sum(entropies) / 11, rel=1e-5)
    assert teacher_information(p) == pytest.approx(H(mean) - sum(entropies) / 11, rel=1e-4)


def test_the_ends_of_entropy_and_information():
    points, even = torch.eye(K), torch.full((K, K), 1 / K)
    assert teacher_entropy(points) == 0
    assert teacher_information(points) == pytest.approx(math.log(K))
    assert teacher_entropy(even) == pytest.approx(math.log(K))
    assert teacher_information(even) == pytest.approx(0, abs=1e-6)
    assert teacher_information(points[:1].expand(5, -1)) == pytest.approx(0, abs=1e-6)


def test_rank_is_its_formula():
    x = images(11, 5)
    sigma = torch.linalg.eigvalsh(x.T @ x).sqrt()
    p = (sigma / sigma.sum()).tolist()
    assert feature_rank(x) == pytest.approx(math.exp(-sum(v * math.log(v) for v in p)), rel=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_the_rank_of_features_with_even_directions(rank):
    basis = torch.linalg.qr(images(13, 13)).Q
    x = basis[:, :rank] @ torch.linalg.qr(images(7, 7, seed=1)).Q[:rank]
    assert feature_rank(3 * x) == pytest.approx(rank, rel=1e-4)


def test_features_that_are_all_alike():
    same = images(1, D).expand(11, -1)
    assert feature_rank(same) == pytest.approx(1, rel=1e-3)
    assert feature_rank(torch.zeros(11, D)) == 1
    assert feature_std(same) == pytest.approx(0, abs=1e-6)
    assert feature_std(same * torch.arange(1, 12)[:, None]) == pytest.approx(0, abs=1e-6)  # length does not count


def test_deviation_of_features():
    x = images(11, 5)
    unit = [v / v.square().sum().sqrt() for v in x]
    total = 0.0
    for d in range(5):
        mean = sum(u[d] for u in unit) / 11
        total += (sum((u[d] - mean) ** 2 for u in unit) / 11) ** 0.5
    assert feature_std(x) == pytest.approx(math.sqrt(5) * total.item() / 5, rel=1e-5)
    assert feature_std(images(4000, 50)) == pytest.approx(1, abs=0.02)


def answers(logits, centre):
    return teacher_probabilities(logits, centre, 0.04)


def test_both_collapses_are_told_apart():
    """One answer for every image: without a centre it is one prototype, less its own centre it is even."""
    n, prototypes = 64, 101
    same = images(1, prototypes).expand(n, -1) + 1e-4 * images(n, prototypes, seed=1)
    kind, advice = collapse(answers(same, torch.zeros(prototypes)))
    assert kind == "one-point"
    assert "centre follow faster" in advice
    kind, advice = collapse(answers(same, same.mean(0)))
    assert kind == "uniform"
    assert "a lower --dino.teacher-temperature-end" in advice


@pytest.mark.parametrize("spread", [0.02, 0.1, 1.0])
def test_answers_that_differ_have_not_collapsed(spread):
    """Soft or sharp: what counts is that other images get other answers."""
    logits = images(1, 101) + spread * images(64, 101, seed=1)
    assert collapse(answers(logits, logits.mean(0))) is None


def test_a_sharp_teacher_with_two_prototypes_tells_images_apart():
    points = torch.eye(101)[torch.arange(64) % 2]
    assert teacher_entropy(points) == 0
    assert collapse(points) is None


def test_an_answer_that_is_neither_even_nor_one_prototype_is_still_one_for_all():
    row = torch.zeros(101)
    row[:3] = 1 / 3
    assert collapse(row.expand(64, -1)) == dino.ONE_POINT
    row[:60] = 1 / 60
    assert collapse(row.expand(64, -1)) == dino.UNIFORM


def test_one_answer_shows_nothing():
    with pytest.raises(InputError, match="2 or more answers over 2 or more prototypes, got 1 over 7"):
        collapse(probabilities(1, K))
