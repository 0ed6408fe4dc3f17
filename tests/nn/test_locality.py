"""Shifted patches and locality attention against their formulas, written out slowly, and in whole models."""

from dataclasses import replace

import pytest
import torch

import vitral
from helpers import difference, images, redraw
from vitral.config import ViTConfig
from vitral.errors import ConfigError
from vitral.inference.predictor import Predictor
from vitral.models.cost import model_cost, receptive_fields
from vitral.models.merge import merged
from vitral.models.vit import VisionTransformer
from vitral.nn.locality import LocalityAttention, ShiftedPatchEmbed

CONFIG = ViTConfig(
    img_size=(8, 12), patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=3, stem="shifted", attention="local"
)


@pytest.fixture(scope="module")
def model():
    return redraw(VisionTransformer(CONFIG)).eval()


def test_shifted_patches_are_those_of_the_formula():
    B, C, H, W, P_h, P_w, D = 2, 3, 8, 15, 4, 5, 7
    stem = redraw(ShiftedPatchEmbed(C, D, (P_h, P_w), bias=True, eps=1e-6))
    x = images(B, C, H, W)

    def pixel(b, c, y, z):
        return float(x[b, c, y, z]) if 0 <= y < H and 0 <= z < W else 0.0

    given = stem(x)
    assert given.shape == (B, (H // P_h) * (W // P_w), D)
    moves = [(0, 0), (-2, -2), (-2, 2), (2, -2), (2, 2)]  # half a patch down and across, rounded down
    for b in range(B):
        for n in range(given.shape[1]):
            row, column = divmod(n, W // P_w)
            vector = torch.tensor(
                [
                    pixel(b, c, row * P_h + i - dy, column * P_w + j - dx)
                    for i in range(P_h)
                    for j in range(P_w)
                    for dy, dx in moves
                    for c in range(C)
                ],
                dtype=torch.float64,
            )
            normal = (vector - vector.mean()) / (vector.var(correction=0) + 1e-6).sqrt()
            normal = normal * stem.norm.weight.double() + stem.norm.bias.double()
            expected = stem.proj.weight.double() @ normal + stem.proj.bias.double()
            torch.testing.assert_close(given[b, n].double(), expected, rtol=1e-4, atol=1e-5)


def literal(attention, z, mask=None):
    """Rows and result of locality attention, token by token."""
    B, N, D = z.shape
    h = attention.num_heads
    q, k, v = attention.qkv(z).double().unflatten(2, (3, h, D // h)).unbind(2)
    rows = torch.zeros(B, h, N, N, dtype=torch.float64)
    for b in range(B):
        for i in range(h):
            for n in range(N):
                seen = [m for m in range(N) if m != n and (mask is None or bool(mask[n, m]))] or [n]
                scores = torch.stack([q[b, n, i] @ k[b, m, i] for m in seen]) / attention.temperature[i].double()
                rows[b, i, n, seen] = scores.softmax(0)
    mixed = torch.einsum("bhnm,bmhd->bnhd", rows, v).flatten(2)
    return rows, attention.proj(mixed.float())


@pytest.mark.parametrize("masked", [False, True])
def test_locality_attention_is_that_of_the_formula(masked):
    attention = redraw(LocalityAttention(12, 3, True, 0.0, 0.0)).eval()
    torch.nn.init.uniform_(attention.temperature, 0.5, 3.0)
    z = torch.randn(2, 7, 12, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(1)) > 0.4 if masked else None
    if masked:
        mask[5] = torch.arange(7) == 5  # which has nobody but itself
    rows, mixed = literal(attention, z, mask)
    torch.testing.assert_close(attention(z, mask), mixed, rtol=1e-4, atol=1e-5)
    every = torch.arange(7)
    torch.testing.assert_close(attention.rows(z, every, mask).double(), rows, rtol=1e-4, atol=1e-5)
    if mask is None:
        assert float(attention.rows(z, every).detach().diagonal(dim1=2, dim2=3).abs().max()) == 0
        torch.testing.assert_close(attention(z, keep=slice(2, 4)), mixed[:, 2:4], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            attention.rows(z, torch.tensor([4, 1])).double(), rows[:, :, [4, 1]], rtol=1e-4, atol=1e-5
        )
    alone = attention(z[:, :1])
    torch.testing.assert_close(alone, attention.proj(attention.heads(z[:, :1])[2].transpose(1, 2).flatten(2)))


def test_it_begins_as_sharp_as_plain_attention_and_learns():
    attention = LocalityAttention(12, 3, True, 0.0, 0.0)
    assert attention.temperature.tolist() == [2.0] * 3
    attention(torch.randn(2, 5, 12)).square().sum().backward()
    assert (attention.temperature.grad != 0).all()
    made = vitral.create_model("vit_nano_patch2_8+attention=local", seed=0)
    assert made.blocks[0].attn.temperature.tolist() == [4.0] * 4


def test_a_model_of_both_counts_and_behaves_like_any(model):
    assert model_cost(CONFIG).params == sum(p.numel() for p in model.parameters())
    (field,) = receptive_fields(CONFIG)
    assert (field.size, field.stride) == (8, 4)
    x = images(3, 3, 8, 12)
    torch.testing.assert_close(model(x[1:2]), model(x)[1:2], rtol=1e-4, atol=1e-5)
    packed = model.forward_packed([x[0], x[1, :, :4]])
    torch.testing.assert_close(packed[1:], model(x[1:2, :, :4]), rtol=1e-4, atol=1e-5)
    rows = [r.detach() for r in model.attention(x, layers="all", queries="all")]
    assert all(float(r.diagonal(dim1=2, dim2=3).abs().max()) == 0 for r in rows)
    assert all(torch.allclose(r.sum(-1), torch.ones(())) for r in rows)
    assert merged(model, 1)(x).shape == (3, 5)


@pytest.mark.parametrize("engine", ["packed", "compile", "onnxruntime", "openvino"])
@pytest.mark.slow
def test_every_engine_computes_the_same(model, engine):
    model.preprocess = replace(model.preprocess, img_size=(8, 12))
    x = images(3, 3, 8, 12)
    assert difference(Predictor(model, engine=engine).logits(x), model(x)) < 1e-4


def test_it_is_trained_kept_and_explained(tmp_path):
    name = "vit_nano_patch2_8+stem=shifted+attention=local"
    run = vitral.train("digits", model=name, out=tmp_path / "run", max_steps=2, quiet=True)
    again = vitral.load_model(run)
    assert (again.config.stem, again.config.attention) == ("shifted", "local")
    made = vitral.explain(run, run.data.inputs.pixels[0].permute(1, 2, 0).numpy(), "relevance")
    assert made.maps.isfinite().all()
    with pytest.raises(ConfigError, match="for the channels and patch they were made for"):
        vitral.load_model(run, in_chans=3)
    with pytest.raises(ConfigError, match="timm has no ViT with stem shifted"):
        vitral.save_model(again, tmp_path / "timm", layout="timm")
    with pytest.raises(ConfigError, match="must be 2 or more, got 1x1"):
        ViTConfig(patch_size=1, stem="shifted")
