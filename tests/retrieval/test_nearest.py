"""Neighbours by all cosines and by faiss; groups of near copies."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitral.errors import CheckpointError
from vitral.retrieval import nearest
from vitral.retrieval.nearest import Approximate, Exact, near_groups, near_pairs


def unit(n, D, seed):
    return F.normalize(torch.randn(n, D, generator=torch.Generator().manual_seed(seed)), dim=1)


def clustered(n, D, seed, clusters=40):
    centres = unit(clusters, D, seed)
    return F.normalize(centres[torch.arange(n) % clusters] + 0.5 * unit(n, D, seed + 1), dim=1)


def test_exact_is_numpy(monkeypatch):
    vectors, queries = unit(997, 31, 0), unit(53, 31, 1)
    cosines = queries.double().numpy() @ vectors.double().numpy().T
    wanted = np.argsort(-cosines, axis=1)[:, :10]
    for cells in (2**24, 5000):  # all queries at once, and a few at a time
        monkeypatch.setattr(nearest, "CELLS", cells)
        values, rows = Exact(vectors).search(queries, 10)
        assert np.array_equal(rows.numpy(), wanted)
        np.testing.assert_allclose(values.numpy(), np.take_along_axis(cosines, wanted, 1), atol=1e-5)


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_faiss_finds_nearly_all(kind, tmp_path):
    vectors, queries = clustered(4001, 37, 0), clustered(101, 37, 0)
    queries = F.normalize(queries + 0.1 * unit(101, 37, 5), dim=1)
    true = Exact(vectors).search(queries, 10)[1]
    made = Approximate.of(vectors, kind)
    values, rows = made.search(queries, 10)
    recall = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(true.tolist(), rows.tolist(), strict=True)])
    assert recall >= 0.95
    expected = (queries[:, None] * vectors[rows]).sum(dim=2)
    torch.testing.assert_close(values, expected, atol=1e-5, rtol=0)
    made.write(tmp_path / "x.faiss")
    again = Approximate.read(tmp_path / "x.faiss", vectors)
    assert torch.equal(again.search(queries, 10)[1], rows)
    with pytest.raises(CheckpointError, match="does not belong"):
        Approximate.read(tmp_path / "x.faiss", vectors[:-1])
    (tmp_path / "x.faiss").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="damaged"):
        Approximate.read(tmp_path / "x.faiss", vectors)


def test_near_pairs_are_those_of_a_loop(monkeypatch):
    vectors = clustered(151, 11, 3, clusters=7)
    cosines = vectors @ vectors.T
    literal = [(i, j) for i in range(151) for j in range(i + 1, 151) if cosines[i, j] >= 0.8]
    assert literal
    for cells, pairs in ((2**24, 2**20), (2**24, 500), (700, 500), (700, 1)):
        monkeypatch.setattr(nearest, "CELLS", cells)
        monkeypatch.setattr(nearest, "PAIRS", pairs)
        found = list(near_pairs(vectors, 0.8))
        assert [pair for i, j in found for pair in zip(i.tolist(), j.tolist(), strict=True)] == literal
        assert all(len(i) <= max(pairs, 150) for i, _ in found)


@pytest.mark.parametrize("least", [0.5, 0.8, 0.95, 0.99])
def test_groups_are_those_of_a_walk(least, monkeypatch):
    monkeypatch.setattr(nearest, "CELLS", 3000)
    monkeypatch.setattr(nearest, "PAIRS", 400)
    for seed in range(5):
        vectors = unit(211, 3 + seed, seed)
        near = vectors @ vectors.T >= least
        left, walked = set(range(211)), []
        while left:
            group, new = set(), {min(left)}
            while new:
                group |= new
                new = {j for i in new for j in near[i].nonzero()[:, 0].tolist()} - group
            left -= group
            walked.append(sorted(group))
        walked = [group for group in walked if len(group) > 1]
        assert near_groups(vectors, least) == sorted(walked, key=lambda group: (-len(group), group))


def test_many_copies_are_one_group(monkeypatch):
    monkeypatch.setattr(nearest, "PAIRS", 5003)
    vectors = torch.cat([unit(1, 7, 0).repeat(997, 1), -unit(1, 7, 0).repeat(1499, 1)])
    assert near_groups(vectors, 0.99) == [list(range(997, 2496)), list(range(997))]
    assert max(len(i) for i, _ in near_pairs(vectors, 0.99)) <= 5003
    assert near_groups(vectors[:0], 0.99) == []


def test_groups_hang_together_by_chains():
    angles = torch.tensor([0.0, 0.1, 0.2, 1.5, 3.0, 3.1])  # neighbours in a chain are near, its ends are not
    vectors = torch.stack([angles.cos(), angles.sin()], dim=1)
    least = float(torch.tensor(0.15).cos())
    assert near_groups(vectors, least) == [[0, 1, 2], [4, 5]]
    assert near_groups(vectors, 1.0 - 1e-9) == []


def test_copies_are_found_at_a_cosine_of_one():
    vectors = torch.nn.functional.normalize(torch.randn(300, 97, generator=torch.Generator().manual_seed(0)), dim=1)
    groups = near_groups(torch.cat([vectors, vectors]), 1.0)
    assert sorted(groups) == [[i, 300 + i] for i in range(300)]
