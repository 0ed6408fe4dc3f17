import pytest
import torch

from helpers import difference, images, redraw
from vitral.nn.mlp import MLP
from vitral.nn.pooling import AttentionPool, ClsDistPool, ClsMeanPool, ClsPool, DistilledHead, MaxPool, MeanPool

B, R, N, D = 2, 3, 7, 10


def attention_pool():
    return redraw(AttentionPool(D, 5, MLP(D, 13, 13, D, "gelu", drop=0.0), prefix=R, eps=1e-6))


def literal_map(pool, z):
    """One query over the patches, head by head, then the MLP with its residual."""
    out = torch.empty(B, D)
    for b in range(B):
        q = pool.latent[0, 0] @ pool.q.weight.T + pool.q.bias
        k, v = (z[b, R:] @ pool.kv.weight.T + pool.kv.bias).split(D, dim=-1)
        heads = []
        for i in range(5):
            at = slice(2 * i, 2 * i + 2)
            heads.append(torch.softmax(k[:, at] @ q[at] / 2**0.5, 0) @ v[:, at])
        x = torch.cat(heads) @ pool.proj.weight.T + pool.proj.bias
        n = (x - x.mean()) / (x.var(unbiased=False) + 1e-6).sqrt() * pool.norm.weight + pool.norm.bias
        out[b] = x + pool.mlp(n)
    return out


LITERAL = {
    "cls": (ClsPool(), lambda z: z[:, 0]),
    "mean": (MeanPool(R), lambda z: sum(z[:, i] for i in range(R, z.shape[1])) / (z.shape[1] - R)),
    "max": (MaxPool(R), lambda z: torch.stack([z[:, i] for i in range(R, z.shape[1])]).max(0).values),
    "cls_dist": (ClsDistPool(), lambda z: torch.cat([z[:, 0], z[:, 1]], 1)),
    "cls_mean": (ClsMeanPool(R), lambda z: torch.cat([z[:, 0], z[:, R:].mean(1)], 1)),
}


@pytest.mark.parametrize("kind", LITERAL)
def test_pools_are_their_formulas(kind):
    pool, formula = LITERAL[kind]
    z = images(B, R + N, D)
    assert difference(pool(z), formula(z)) < 1e-6


@torch.no_grad()
def test_attention_pooling_is_its_formula():
    pool, z = attention_pool(), images(B, R + N, D)
    assert difference(pool(z), literal_map(pool, z)) < 1e-5


@pytest.mark.parametrize("kind", [*LITERAL, "map"])
@torch.no_grad()
def test_hidden_patches_do_not_count(kind):
    pool = attention_pool() if kind == "map" else LITERAL[kind][0]
    z = images(B, R + N, D)
    visible = torch.ones(B, R + N, dtype=torch.bool)
    visible[:, R + 4 :] = False
    assert difference(pool(z, visible), pool(z[:, : R + 4])) < 1e-6


@pytest.mark.parametrize("kind", [*LITERAL, "map"])
@torch.no_grad()
def test_a_pool_reads_no_more_than_it_says(kind):
    pool = attention_pool() if kind == "map" else LITERAL[kind][0]
    z = images(B, R + N, D)
    assert torch.equal(pool(z if pool.reads is None else z[:, pool.reads]), pool(z))


def test_the_distilled_head_is_the_mean_of_two_layers():
    head = redraw(DistilledHead(D, 4))
    y = images(B, 2 * D)
    first = y[:, :D] @ head.cls.weight.T + head.cls.bias
    second = y[:, D:] @ head.dist.weight.T + head.dist.bias
    assert difference(head(y), (first + second) / 2) < 1e-6
