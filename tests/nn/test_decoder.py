"""Blocks with positions and with a memory: against their equations, and against torch's own layers."""

import pytest
import torch
from torch import nn

from helpers import difference, images, redraw
from vitral.nn.attention import CrossAttention
from vitral.nn.blocks import RESIDUALS, DecoderBlock, PositionedBlock
from vitral.nn.mlp import MLP

B, N, M, D, h = 2, 7, 11, 15, 3
EPS = 1e-5


def attention():
    return CrossAttention(D, h, bias=True, attn_drop=0.0, proj_drop=0.0)


def make(kind, order):
    attentions = [attention()] if kind is PositionedBlock else [attention(), attention()]
    block = kind(D, *attentions, MLP(D, 23, 23, D, "relu", drop=0.0), EPS, RESIDUALS[order])
    return redraw(block)


def literal_attention(attn, q, k, v, mask=None):
    """Head by head, query by query."""
    Q, K, V = attn.q(q), attn.k(k), attn.v(v)
    d, out = D // h, torch.zeros(B, q.shape[1], D)
    for b in range(B):
        for head in range(h):
            part = slice(head * d, (head + 1) * d)
            for i in range(q.shape[1]):
                scores = torch.stack([Q[b, i, part] @ K[b, j, part] / d**0.5 for j in range(k.shape[1])])
                if mask is not None:
                    scores = scores.masked_fill(~mask[b, 0, i if mask.shape[2] > 1 else 0], float("-inf"))
                out[b, i, part] = scores.softmax(0) @ V[b, :, part]
    return attn.proj(out)


def layer_norm(norm, x):
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    return (x - mean) / (var + EPS).sqrt() * norm.weight + norm.bias


def masks():
    mask = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(1)) > 0.4
    mask |= torch.eye(N, dtype=torch.bool)
    memory_mask = torch.ones(B, 1, 1, M, dtype=torch.bool)
    memory_mask[0, ..., 6:] = False
    return mask, memory_mask


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("order", ["pre", "post"])
@torch.no_grad()
def test_a_decoder_block_is_its_equations(order, masked):
    block = make(DecoderBlock, order)
    z, m, p, p_m = images(B, N, D), images(B, M, D, seed=1), images(B, N, D, seed=2), images(B, M, D, seed=3)
    mask, memory_mask = masks() if masked else (None, None)
    got = block(z, m, mask, memory_mask, p, p_m)

    def look(x):
        return literal_attention(block.attn, x + p, x + p, x, mask)

    def look_at_memory(x):
        return literal_attention(block.cross_attn, x + p, m + p_m, m, memory_mask)

    for norm, f in ((block.norm1, look), (block.norm2, look_at_memory), (block.norm3, block.mlp)):
        z = f(layer_norm(norm, z)) + z if order == "pre" else layer_norm(norm, z + f(z))
    assert difference(got, z) < 1e-5


@pytest.mark.parametrize("order", ["pre", "post"])
@torch.no_grad()
def test_an_encoder_block_with_positions_is_its_equations(order):
    block, z, p, (mask, _) = make(PositionedBlock, order), images(B, N, D), images(B, N, D, seed=2), masks()
    got = block(z, mask, p)
    for norm, f in (
        (block.norm1, lambda x: literal_attention(block.attn, x + p, x + p, x, mask)),
        (block.norm2, block.mlp),
    ):
        z = f(layer_norm(norm, z)) + z if order == "pre" else layer_norm(norm, z + f(z))
    assert difference(got, z) < 1e-5


def copy_attention(ours, theirs):
    theirs.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.k.bias, ours.v.bias]))
    theirs.out_proj.load_state_dict(ours.proj.state_dict())


@pytest.mark.parametrize("order", ["pre", "post"])
@torch.no_grad()
def test_torchs_own_layers_give_the_same(order):
    decoder, encoder = make(DecoderBlock, order), make(PositionedBlock, order)
    options = {"dim_feedforward": 23, "dropout": 0.0, "batch_first": True, "norm_first": order == "pre"}
    theirs = nn.TransformerDecoderLayer(D, h, **options).eval()
    copy_attention(decoder.attn, theirs.self_attn)
    copy_attention(decoder.cross_attn, theirs.multihead_attn)
    their_encoder = nn.TransformerEncoderLayer(D, h, **options).train()  # train: not the fused kernel
    copy_attention(encoder.attn, their_encoder.self_attn)
    for ours, layer, norms in ((decoder, theirs, "123"), (encoder, their_encoder, "12")):
        layer.linear1.load_state_dict(ours.mlp.fc1.state_dict())
        layer.linear2.load_state_dict(ours.mlp.fc2.state_dict())
        for i in norms:
            getattr(layer, f"norm{i}").load_state_dict(getattr(ours, f"norm{i}").state_dict())
    z, m = images(B, N, D), images(B, M, D, seed=1)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    memory_mask = masks()[1]
    want = theirs(z, m, tgt_mask=~causal, memory_key_padding_mask=~memory_mask[:, 0, 0])
    assert difference(decoder(z, m, causal, memory_mask), want) < 1e-5
    assert difference(encoder(z, causal), their_encoder(z, src_mask=~causal)) < 1e-5


@torch.no_grad()
def test_positions_reach_queries_and_keys_and_never_values():
    block = make(DecoderBlock, "pre")
    z, m = images(B, N, D), images(B, M, D, seed=1)
    p, p_m = images(1, 1, D, seed=2), images(1, 1, D, seed=3)
    # The same vector added to every key shifts all scores of a query alike: with W_Q p out of the way nothing changes,
    # while values with it would.
    same = block(z, m, None, None, None, p_m.expand(B, M, D))
    assert difference(same, block(z, m)) < 1e-5
    for attn in (block.attn, block.cross_attn):
        attn.q.weight.zero_()
        attn.q.bias.zero_()
    assert difference(block(z, m, None, None, p.expand(B, N, D), p_m), block(z, m)) < 1e-5


@torch.no_grad()
def test_a_token_does_not_see_what_is_hidden():
    block, z, m = make(DecoderBlock, "post"), images(B, N, D), images(B, M, D, seed=1)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    visible = torch.arange(M)[None, None, None] < 4
    got = block(z, m, causal, visible)
    z2, m2 = z.clone(), m.clone()
    z2[:, 5:], m2[:, 4:] = 9.0, -9.0
    assert difference(block(z2, m2, causal, visible)[:, :5], got[:, :5]) < 1e-5
    assert difference(block(z2, m, causal, visible)[:, 5:], got[:, 5:]) > 1e-2


@torch.no_grad()
def test_rows_of_cross_attention_are_what_forward_uses():
    attn, z, m = redraw(attention()), images(B, N, D), images(B, M, D, seed=1)
    memory_mask = masks()[1]
    rows = attn.rows(z, m, memory_mask)
    assert rows.shape == (B, h, N, M)
    values = attn.v(m).unflatten(2, (h, -1)).transpose(1, 2)
    assert difference(attn.proj((rows @ values).transpose(1, 2).flatten(2)), attn(z, m, m, memory_mask)) < 1e-5


def test_dropout_acts_in_training_alone():
    attn = redraw(CrossAttention(D, h, bias=True, attn_drop=0.5, proj_drop=0.0))
    z = images(B, N, D)
    assert torch.equal(attn(z, z, z), attn(z, z, z))
    attn.train()
    assert not torch.equal(attn(z, z, z), attn(z, z, z))
