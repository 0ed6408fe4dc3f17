import pytest
import torch

from helpers import difference, images, redraw
from vitral.nn.attention import Attention
from vitral.nn.blocks import PostNormBlock, PreNormBlock
from vitral.nn.mlp import MLP

B, N, D = 2, 7, 15


def block(kind, init_values=0.5, drop_path=0.0):
    attn = Attention(D, 3, qkv_bias=True, attn_drop=0.0, proj_drop=0.0)
    mlp = MLP(D, 23, 23, D, "gelu", drop=0.0)
    return redraw(kind(D, attn, mlp, 1e-6, init_values, drop_path))


def layer_norm(norm, x):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (var + 1e-6).sqrt() * norm.weight + norm.bias


def literal_block(kind, b, z):
    gamma1 = b.ls1.gamma if hasattr(b.ls1, "gamma") else 1
    gamma2 = b.ls2.gamma if hasattr(b.ls2, "gamma") else 1
    if kind is PreNormBlock:
        z = gamma1 * b.attn(layer_norm(b.norm1, z)) + z
        return gamma2 * b.mlp(layer_norm(b.norm2, z)) + z
    x = layer_norm(b.norm1, z + gamma1 * b.attn(z))
    return layer_norm(b.norm2, x + gamma2 * b.mlp(x))


@pytest.mark.parametrize("init_values", [None, 0.5])
@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
@torch.no_grad()
def test_a_block_is_its_equations(kind, init_values):
    b, z = block(kind, init_values), images(B, N, D)
    assert difference(b(z), literal_block(kind, b, z)) < 1e-5


@pytest.mark.parametrize("kind", [PreNormBlock, PostNormBlock])
@torch.no_grad()
def test_kept_tokens_come_out_as_among_all(kind):
    b, z = block(kind), images(B, N, D)
    mask = torch.ones(B, 1, 1, N, dtype=torch.bool)
    mask[0, ..., 4:] = False
    assert difference(b(z, mask, slice(0, 2)), b(z, mask)[:, :2]) < 1e-5


@torch.no_grad()
def test_attention_rows_see_what_the_attention_sees():
    z, every = images(B, N, D), torch.arange(N)
    pre, post = block(PreNormBlock), block(PostNormBlock)
    torch.testing.assert_close(pre.attention_rows(z, every), pre.attn.rows(layer_norm(pre.norm1, z), every))
    torch.testing.assert_close(post.attention_rows(z, every), post.attn.rows(z, every))


@torch.no_grad()
def test_a_dropped_sample_passes_a_pre_norm_block_unchanged():
    b, z = block(PreNormBlock, drop_path=0.999999).train(), images(B, N, D)
    assert torch.equal(b(z), z)
    assert difference(b.eval()(z), z) > 0.1


@torch.no_grad()
def test_a_dropped_sample_is_only_normalised_by_a_post_norm_block():
    b, z = block(PostNormBlock, drop_path=0.999999).train(), images(B, N, D)
    assert difference(b(z), layer_norm(b.norm2, layer_norm(b.norm1, z))) < 1e-6
    assert difference(b.eval()(z), layer_norm(b.norm2, layer_norm(b.norm1, z))) > 0.1
