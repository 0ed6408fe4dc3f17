"""Token merging beside a literal loop, and its laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import images
from vitral.nn.attention import softmax_rows
from vitral.nn.merging import match, merge, merge_groups, merge_schedule, places, size_bias, start_groups, unmerge


def loop(x, keys, sizes, r, first):
    """One image after the paper: lists of tokens with the patches they stand for, (N, D) -> groups and their values."""
    tokens = list(range(len(x)))
    A = [i for i in tokens if i % 2 == first]
    B = [i for i in tokens if i % 2 != first]
    edges = []
    for a in A:
        cosines = [torch.nn.functional.cosine_similarity(keys[a], keys[b], dim=0).item() for b in B]
        edges.append((max(cosines), a, B[cosines.index(max(cosines))]))
    best = sorted(edges, key=lambda edge: -edge[0])[:r]
    joins = {a: b for _, a, b in best}
    groups = [[a] for a in A if a not in joins] + [[b, *(a for a, to in joins.items() if to == b)] for b in B]
    means = [sum(sizes[i] * x[i] for i in g) / sum(sizes[i] for i in g) for g in groups]
    return groups, torch.stack(means), torch.tensor([sum(sizes[i].item() for i in g) for g in groups])


@settings(max_examples=40, deadline=None)
@given(N=st.integers(2, 13), first=st.integers(0, 1), seed=st.integers(0, 99), data=st.data())
def test_merging_is_the_loop_of_the_paper(N, first, seed, data):
    r = data.draw(st.integers(0, N // 2))
    x, keys = images(3, N, 5, seed=seed), images(3, N, 7, seed=seed + 1000)
    sizes = torch.randint(1, 6, (3, N), generator=torch.Generator().manual_seed(seed)).float()
    m = match(keys, r, first)
    merged, new = merge(x, sizes, m)
    place = places(m)
    for i in range(3):
        groups, means, counts = loop(x[i], keys[i], sizes[i], r, first)
        assert [[p for p in range(N) if place[i, p] == g] for g in range(N - r)] == [sorted(g) for g in groups]
        torch.testing.assert_close(merged[i], means)
        torch.testing.assert_close(new[i], counts)


def test_sizes_sum_to_all_patches_and_the_map_names_every_token():
    x, N = images(2, 23, 5), 23
    groups = start_groups(x, None)
    for step, r in enumerate((7, 5, 0, 5, 3)):
        x, groups = merge_groups(x, groups, match(images(*x.shape[:2], 11, seed=step), r, step % 2))
        N -= r
        assert x.shape == (2, N, 5)
        assert groups.sizes.sum(1).tolist() == [23, 23]
        for place, sizes in zip(groups.place, groups.sizes, strict=True):
            assert place.bincount(minlength=N).tolist() == sizes.tolist()


def test_what_is_not_merged_is_not_touched():
    x = images(2, 13, 5)
    m = match(images(2, 13, 7, seed=1), 3)
    merged, sizes = merge(x, torch.ones(2, 13), m)
    spread, alone = unmerge(merged, places(m)), sizes.gather(1, places(m)) == 1
    assert alone.sum() > 8
    assert torch.equal(spread[alone], x[alone])
    assert not torch.isclose(spread[~alone], x[~alone]).all(-1).any()


def test_one_image_is_merged_as_in_a_batch():
    x, k, sizes = images(5, 14, 3), images(5, 14, 7, seed=1), torch.ones(5, 14)
    together = merge(x, sizes, match(k, 4))[0]
    for i in range(5):
        alone = merge(x[i : i + 1], sizes[:1], match(k[i : i + 1], 4))[0]
        torch.testing.assert_close(alone[0], together[i])


def test_the_order_within_each_half_does_not_matter():
    x, k = images(1, 14, 3), images(1, 14, 7, seed=1)
    order = torch.arange(14)
    order[::2], order[1::2] = order[::2][torch.randperm(7)], order[1::2][torch.randperm(7)]

    def tokens(x, k):
        return sorted(merge(x, torch.ones(1, 14), match(k, 5))[0][0].tolist())

    torch.testing.assert_close(torch.tensor(tokens(x[:, order], k[:, order])), torch.tensor(tokens(x, k)))


def test_attention_to_a_token_of_size_s_is_attention_to_s_equal_keys():
    q, k, v = images(2, 3, 4, 5), images(2, 3, 6, 5, seed=1), images(2, 3, 6, 5, seed=2)
    sizes = torch.tensor([1.0, 2, 3, 1, 4])
    times = torch.tensor([1, 1, 2, 3, 1, 4])  # the first is a prefix token
    scores = q @ k.mT / math.sqrt(5) + size_bias(sizes.expand(2, -1), prefix=1)
    many = softmax_rows(q, k.repeat_interleave(times, 2), None) @ v.repeat_interleave(times, 2)
    torch.testing.assert_close(scores.softmax(-1) @ v, many)


def test_hidden_tokens_add_nothing_and_stay_hidden():
    x = images(1, 6, 3)
    k = torch.tensor([1.0, 1, -1, -1, 2, 5])[None, :, None] * torch.ones(1, 6, 4)
    visible = torch.tensor([[True, False, False, False, True, True]])
    x[0, 1:4] = 1e6
    merged, groups = merge_groups(x, start_groups(x, visible), match(k, 3))
    assert groups.sizes.sum() == 3
    assert merged.isfinite().all()
    seen = size_bias(groups.sizes, 0)[0, 0, 0].isfinite()
    assert merged[0, seen].abs().max() < 100
    assert groups.sizes[0, ~seen].tolist() == [0] * int((~seen).sum())


@pytest.mark.parametrize(
    ("merge", "tokens", "depth", "schedule"),
    [
        (0, 16, 3, [0, 0, 0]),
        (5, 40, 3, [5, 5, 5]),
        (16, 40, 4, [16, 12, 6, 3]),  # never more than half
        (8, 1, 2, [0, 0]),
        (0.5, 16, 4, [2, 2, 2, 2]),
        (0.3, 20, 4, [2, 1, 1, 2]),
        (0.99, 8, 2, [4, 2]),
    ],
)
def test_schedule(merge, tokens, depth, schedule):
    assert merge_schedule(merge, tokens, depth) == schedule
