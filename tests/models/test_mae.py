from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import difference, images, redraw
from vitral.config import MAEConfig, ViTConfig
from vitral.errors import ConfigError, InputError
from vitral.models.mae import (
    MaskedAutoencoder,
    Masking,
    mae_loss,
    mae_targets,
    over_pixels,
    random_masking,
    take,
)
from vitral.nn.patches import patchify

B, C, P_H, P_W, G_H, G_W = 2, 3, 4, 2, 5, 7
N, D = G_H * G_W, 20
BACKBONE = ViTConfig(
    img_size=(G_H * P_H, G_W * P_W), patch_size=(P_H, P_W), embed_dim=D, depth=2, num_heads=5, num_classes=0
)
BACKBONES = {
    "plain": BACKBONE,
    "registers": replace(BACKBONE, reg_tokens=3, positions="sincos1d"),
    "mean": replace(BACKBONE, class_token=False, global_pool="mean", positions="sincos2d", norm_after_pool=True),
    "conv": replace(BACKBONE, stem="conv", block="post"),
}
each_backbone = pytest.mark.parametrize("backbone", BACKBONES.values(), ids=BACKBONES)


def mae(backbone=BACKBONE, **options):
    small = {"decoder_dim": 12, "decoder_heads": 3, "decoder_depth": 1, "mask_ratio": 0.6}
    return redraw(MaskedAutoencoder(MAEConfig(backbone=backbone, **small | options)))


def batch(seed=0):
    return images(B, C, G_H * P_H, G_W * P_W, seed=seed), random_noise(seed)


def random_noise(seed=0, rows=B, columns=N):
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(100 + seed))


# ---- masking ----


@given(n=st.integers(2, 30), ratio=st.floats(0, 0.999), seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_unshuffle_inverts_shuffle(n, ratio, seed):
    noise = random_noise(seed, columns=n)
    masking = random_masking(noise, ratio)
    order = noise.argsort(dim=1)
    z = images(B, n, 3, seed=seed)
    assert torch.equal(take(take(z, order), masking.restore), z)
    assert torch.equal(take(take(z, masking.restore), order), z)
    V = masking.keep.shape[1]
    assert 1 <= V < n
    assert torch.equal(masking.masked.sum(1), torch.full((B,), n - V))
    assert abs((n - V) - n * ratio) <= 1
    for b in range(B):
        visible = (~masking.masked[b]).nonzero().flatten()
        assert torch.equal(masking.keep[b].sort().values, visible)
        hidden = masking.masked[b].nonzero().flatten()
        assert noise[b, visible].max() <= noise[b, hidden].min()


def test_the_paper_keeps_49_of_196_patches():
    assert random_masking(random_noise(columns=196), 0.75).keep.shape == (B, 49)


def test_every_patch_is_hidden_equally_often():
    masked = random_masking(random_noise(rows=4000, columns=10), 0.7).masked.double()
    assert (masked.mean(0) - 0.7).abs().max() < 0.04  # more than 5 deviations


def test_values_over_pixels():
    values = torch.arange(N).expand(B, N)
    spread = over_pixels(values, (G_H, G_W), (P_H, P_W))
    assert spread.shape == (B, G_H * P_H, G_W * P_W)
    for row in range(G_H * P_H):
        for column in range(G_W * P_W):
            assert spread[1, row, column] == (row // P_H) * G_W + column // P_W


# ---- target and loss ----


def test_the_targets_are_their_formula():
    x, _ = batch()
    assert torch.equal(mae_targets(x, (P_H, P_W), norm_pixels=False), patchify(x, (P_H, P_W)))
    targets = mae_targets(x, (P_H, P_W), norm_pixels=True)
    for b in range(B):
        for n in range(N):
            row, column = n // G_W * P_H, n % G_W * P_W
            pixels = x[b, :, row : row + P_H, column : column + P_W].permute(1, 2, 0).flatten()
            count = len(pixels)
            mean = sum(pixels) / count
            variance = sum((p - mean) ** 2 for p in pixels) / (count - 1)
            assert difference(targets[b, n], (pixels - mean) / (variance + 1e-6) ** 0.5) < 1e-5


def test_a_flat_patch_has_a_finite_target():
    targets = mae_targets(torch.full((1, C, P_H, P_W), 3.0), (P_H, P_W), norm_pixels=True)
    assert torch.equal(targets, torch.zeros(1, 1, P_H * P_W * C))


def test_the_loss_is_its_formula():
    predicted, targets = images(B, N, 11), images(B, N, 11, seed=1)
    masked = random_masking(random_noise(), 0.6).masked
    total, count = 0.0, 0
    for b in range(B):
        for n in range(N):
            if masked[b, n]:
                total += sum((predicted[b, n, i] - targets[b, n, i]) ** 2 for i in range(11)) / 11
                count += 1
    assert count == B * 21
    assert difference(mae_loss(predicted, targets, masked), total / count) < 1e-6


def test_only_hidden_patches_count():
    predicted, targets = images(B, N, 11).requires_grad_(), images(B, N, 11, seed=1)
    masked = random_masking(random_noise(), 0.6).masked
    loss = mae_loss(predicted, targets, masked)
    (gradient,) = torch.autograd.grad(loss, predicted)
    assert torch.equal(gradient.abs().sum(2) > 0, masked)
    for b, n in ((0, 0), (0, 1), (1, 5), (1, N - 1)):
        changed = targets.clone()
        changed[b, n] += 1
        assert (mae_loss(predicted, changed, masked) != loss) == masked[b, n]
    assert {bool(masked[b, n]) for b, n in ((0, 0), (0, 1), (1, 5), (1, N - 1))} == {True, False}


# ---- the model ----


@each_backbone
@torch.no_grad()
def test_shapes(backbone):
    model = mae(backbone)
    x, noise = batch()
    masking = model.masking(x, noise)
    V = N - round(0.6 * N)
    assert model.encode(x, masking).shape == (B, backbone.prefix_tokens + V, D)
    out = model(x, noise)
    assert out.predicted.shape == (B, N, P_H * P_W * C)
    assert torch.equal(out.masked, masking.masked)
    assert model.loss(out, x) == mae_loss(out.predicted, mae_targets(x, (P_H, P_W), norm_pixels=True), out.masked)


@each_backbone
@torch.no_grad()
def test_the_encoder_is_the_vit_with_hidden_patches_hidden(backbone):
    """By another way: the whole sequence, under a mask of attention."""
    model = mae(backbone)
    x, noise = batch()
    masking, R = model.masking(x, noise), backbone.prefix_tokens
    full = model.backbone.forward_features(x, mask=over_pixels(~masking.masked, (G_H, G_W), (P_H, P_W)))
    want = torch.cat([full[:, :R], take(full[:, R:], masking.keep)], dim=1)
    assert difference(model.encode(x, masking), want) < 1e-5


@torch.no_grad()
def test_with_every_patch_in_order_the_encoder_is_the_vit():
    model, (x, _) = mae(), batch()
    everything = torch.arange(N).expand(B, N)
    masking = Masking(everything, everything, torch.zeros(B, N, dtype=torch.bool))
    assert difference(model.encode(x, masking), model.backbone.forward_features(x)) < 1e-6


@each_backbone
@torch.no_grad()
def test_the_prediction_knows_visible_pixels_alone(backbone):
    model, (x, noise) = mae(backbone), batch()
    out = model(x, noise)
    hidden = over_pixels(out.masked, (G_H, G_W), (P_H, P_W))[:, None]
    other, _ = batch(seed=9)
    assert torch.equal(model(torch.where(hidden, other, x), noise).predicted, out.predicted)
    assert difference(model(torch.where(hidden, x, other), noise).predicted, out.predicted) > 0.01


@torch.no_grad()
def test_the_order_of_the_shuffle_does_not_matter():
    model, (x, noise) = mae(), batch()
    masking = model.masking(x, noise)
    V = masking.keep.shape[1]
    turned = torch.cat([noise.argsort(1)[:, :V].flip(1), noise.argsort(1)[:, V:].flip(1)], dim=1)
    again = Masking(turned[:, :V], turned.argsort(1), masking.masked)
    assert not torch.equal(again.restore, masking.restore)
    first = model.decoder(model.encode(x, masking), masking.restore, (G_H, G_W))
    second = model.decoder(model.encode(x, again), again.restore, (G_H, G_W))
    assert difference(second, first) < 1e-5


@torch.no_grad()
def test_the_decoder_puts_each_token_in_its_place():
    model, (x, noise) = mae(BACKBONES["registers"]), batch()
    masking, R = model.masking(x, noise), 4
    z = model.encode(x, masking)
    given_to = []
    model.decoder.blocks[0].register_forward_pre_hook(lambda module, args: given_to.append(args[0]))
    model.decoder(z, masking.restore, (G_H, G_W))
    (tokens,) = given_to
    embedded = model.decoder.embed(z)
    assert difference(tokens[:, :R], embedded[:, :R]) < 1e-6
    places = model.decoder.positions((G_H, G_W), None, z)[0, R:]
    for b in range(B):
        kept = masking.keep[b].tolist()
        for n in range(N):
            token = embedded[b, R + kept.index(n)] if n in kept else model.decoder.mask_token[0, 0]
            assert difference(tokens[b, R + n], token + places[n]) < 1e-6


@torch.no_grad()
def test_an_image_gives_the_same_alone_and_with_others():
    model, (x, noise) = mae(), batch()
    out = model(x, noise)
    for b in range(B):
        assert difference(model(x[b : b + 1], noise[b : b + 1]).predicted, out.predicted[b : b + 1]) < 1e-5


@torch.no_grad()
def test_another_size_of_image():
    model, x = mae(), images(B, C, 3 * P_H, 11 * P_W)
    assert model(x, random_noise(columns=33)).predicted.shape == (B, 33, P_H * P_W * C)


def test_gradients_reach_every_weight():
    model, (x, noise) = mae(), batch()
    model.loss(model(x, noise), x).backward()
    without = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert without == []


def test_it_learns_to_fill_in():
    """Images of one colour, each channel -1 or 1: who knows nothing has an error of 1."""
    torch.manual_seed(0)
    backbone = replace(BACKBONE, depth=1, positions="none")
    small = {"decoder_dim": 24, "decoder_heads": 3, "decoder_depth": 1}
    model = MaskedAutoencoder(MAEConfig(backbone=backbone, **small, norm_pixels=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(100):
        x = images(16, C, 1, 1, seed=step).sign().expand(-1, -1, G_H * P_H, G_W * P_W)
        loss = model.loss(model(x, random_noise(step, rows=16)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(1, abs=0.1)
    assert sum(losses[-10:]) / 10 < 0.5


# ---- pictures ----


@pytest.mark.parametrize("norm_pixels", [True, False])
def test_a_perfect_prediction_gives_the_image_back(norm_pixels):
    model, (x, noise) = mae(norm_pixels=norm_pixels), batch()
    x = x + 5
    targets = mae_targets(x, (P_H, P_W), norm_pixels)
    model.decoder.register_forward_hook(lambda module, args, output: targets)
    seen, filled = model.reconstruct(x, noise)
    assert difference(filled, x) < 1e-5
    hidden = over_pixels(model.masking(x, noise).masked, (G_H, G_W), (P_H, P_W))[:, None].expand_as(x)
    assert torch.equal(seen == 0, hidden)
    assert torch.equal(seen[~hidden], x[~hidden])


def test_visible_pixels_stay_as_they_are_and_hidden_ones_are_predicted():
    model, (x, noise) = mae(norm_pixels=False), batch()
    filled = model.reconstruct(x, noise).filled
    out = model(x, noise)
    assert torch.equal(patchify(filled, (P_H, P_W))[~out.masked], patchify(x, (P_H, P_W))[~out.masked])
    assert torch.equal(patchify(filled, (P_H, P_W))[out.masked], out.predicted[out.masked])
    assert not filled.requires_grad


# ---- what cannot be ----


def test_noise_of_another_shape_is_an_error():
    model, (x, noise) = mae(), batch()
    with pytest.raises(InputError, match=r"one number for each patch, \(B, N\) = \(2, 35\), got \(2, 34\)"):
        model(x, noise[:, 1:])
    with pytest.raises(InputError, match=r"image width must be a multiple of patch_size \(2\), got 13"):
        model(x[..., 1:], noise)
    with pytest.raises(InputError, match="at least 2 patches in an image, got 1"):
        random_masking(noise[:, :1], 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": replace(BACKBONE, num_classes=3)}, "must have num_classes=0, got 3"),
        ({"mask_ratio": 1.0}, "mask_ratio must be a number from 0 to below 1, got 1.0"),
        ({"decoder_dim": 10, "decoder_heads": 5}, r"multiple of 4 and of decoder_heads \(5\), got 10"),
        ({"decoder_dim": 12, "decoder_heads": 5}, r"multiple of 4 and of decoder_heads \(5\), got 12"),
        ({"decoder_depth": 0}, "decoder_depth must be a whole number of at least 1, got 0"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        MAEConfig(**{"backbone": BACKBONE} | options)


def test_the_config_survives_a_dictionary():
    config = MAEConfig(backbone=BACKBONE, mask_ratio=0.5)
    assert MAEConfig.from_dict(config.to_dict()) == config
