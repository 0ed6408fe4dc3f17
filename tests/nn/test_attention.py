import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import difference, images, redraw
from vitral.nn.attention import Attention, key_mask

B, N, D, h = 2, 7, 15, 3


def attention(qkv_bias=True):
    return redraw(Attention(D, h, qkv_bias=qkv_bias, attn_drop=0.0, proj_drop=0.0))


def literal_attention(part, z, allowed=lambda b, i, j: True):
    """Head by head, query by query, key by key; returns the output and every softmax weight."""
    d = D // h
    W_Q, W_K, W_V = part.qkv.weight.split(D)
    b_Q, b_K, b_V = part.qkv.bias.split(D) if part.qkv.bias is not None else (torch.zeros(D),) * 3
    out, weights = torch.zeros(B, N, D), torch.zeros(B, h, N, N)
    for b in range(B):
        Q, K, V = z[b] @ W_Q.T + b_Q, z[b] @ W_K.T + b_K, z[b] @ W_V.T + b_V
        for head in range(h):
            at = slice(head * d, (head + 1) * d)
            for i in range(N):
                keys = [j for j in range(N) if allowed(b, i, j)]
                score = {j: math.exp(float(Q[i, at] @ K[j, at]) / math.sqrt(d)) for j in keys}
                for j in keys:
                    weights[b, head, i, j] = score[j] / sum(score.values())
                out[b, i, at] = sum(weights[b, head, i, j] * V[j, at] for j in keys)
    return out @ part.proj.weight.T + part.proj.bias, weights


@pytest.mark.parametrize("qkv_bias", [True, False])
@torch.no_grad()
def test_attention_is_its_formula(qkv_bias):
    part, z = attention(qkv_bias), images(B, N, D)
    out, weights = literal_attention(part, z)
    assert difference(part(z), out) < 1e-5
    assert difference(part.rows(z, torch.arange(N)), weights) < 1e-5


@torch.no_grad()
def test_a_hidden_key_is_seen_by_no_query():
    part, z = attention(), images(B, N, D)
    visible = torch.ones(B, N, dtype=torch.bool)
    visible[0, 4:] = False
    out, weights = literal_attention(part, z, allowed=lambda b, i, j: bool(visible[b, j]))
    mask = key_mask(visible)
    assert difference(part(z, mask), out) < 1e-5
    assert difference(part.rows(z, torch.arange(N), mask), weights) < 1e-5
    assert not part.rows(z, torch.arange(N), mask)[0, :, :, 4:].any()


@torch.no_grad()
def test_the_causal_mask_leaves_nothing_right_of_the_diagonal_and_rows_sum_to_1():
    part, z = attention(), images(B, N, D)
    causal = torch.ones(N, N, dtype=torch.bool).tril()
    rows = part.rows(z, torch.arange(N), causal)
    assert not rows.triu(1).any()
    assert (rows.tril() > 0).sum() == B * h * N * (N + 1) // 2
    torch.testing.assert_close(rows.sum(-1), torch.ones(B, h, N))
    later = z.clone()
    later[:, 5:] += 1
    torch.testing.assert_close(part(later, causal)[:, :5], part(z, causal)[:, :5])
    assert difference(part(later, causal), part(z, causal)) > 0.01


@torch.no_grad()
def test_kept_tokens_answer_as_they_do_among_all():
    part, z = attention(), images(B, N, D)
    for keep in (slice(0, 1), slice(2, 5)):
        assert difference(part(z, None, keep), part(z)[:, keep]) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_kept_tokens_look_through_masks_as_all_do_and_make_no_keys(bias):
    part, z = attention(bias), images(B, N, D)
    hides = torch.arange(N) < torch.tensor([[5], [N]])
    favours = images(B, 1, 1, N, seed=1)
    for mask in (hides[:, None, None], favours):
        assert difference(part(z, mask, slice(1, 3)), part(z, mask)[:, 1:3]) < 1e-6
    with FlopCounterMode(display=False) as few:
        part(z, None, slice(0, 1))
    queries, rows = 4 * B * D * D, 2 * B * N * D  # W_Q, W_K, W_V and W_O for one token; scores and sums of all
    assert few.get_total_flops() == 2 * (queries + h * rows)


@torch.no_grad()
def test_a_layer_that_somebody_changed_is_called_for_kept_tokens_too():
    part, z, calls = attention(), images(B, N, D), []
    part.qkv.register_forward_hook(lambda layer, x, y: calls.append(x[0].shape) or 2 * y)
    kept = part(z, None, slice(0, 1))
    assert calls == [z.shape]
    assert difference(kept, part(z)[:, :1]) < 1e-6


@torch.no_grad()
def test_rows_of_chosen_queries_are_rows_of_the_whole():
    part, z = attention(), images(B, N, D)
    chosen = torch.tensor([5, 0, 5])
    torch.testing.assert_close(part.rows(z, chosen), part.rows(z, torch.arange(N))[:, :, chosen])


@torch.no_grad()
def test_permuting_tokens_permutes_the_output():
    part, z = attention(), images(B, N, D)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    assert difference(part(z[:, order]), part(z)[:, order]) < 1e-5


def test_attention_dropout_acts_in_training_only():
    part = redraw(Attention(D, h, qkv_bias=True, attn_drop=0.5, proj_drop=0.0))
    z = images(B, N, D)
    torch.testing.assert_close(part(z), part(z))
    part.train()
    assert difference(part(z), part(z)) > 0.01
