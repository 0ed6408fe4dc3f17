"""Which vectors lie nearest, by cosine: all of them compared, or by a graph or cells of faiss where there are many.

n vectors kept, m queries, D features; every vector has length 1, so that a cosine is a product.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitral.config import NearestKind
from vitral.errors import CheckpointError, ConfigError
from vitral.weights.atomic import replacing

CELLS = 2**24
"""Cosines that are looked at at once, whatever the number of vectors."""
ROUNDING = 1e-6
"""How far the product of two equal vectors of length 1 may be from 1."""
PAIRS = 2**20
"""Near pairs that are looked at at once, unless a vector alone has more."""
LINKS, BUILD_WIDTH, SEARCH_WIDTH = 32, 128, 256
"""HNSW: neighbours of a vector in the graph, and candidates that are kept while it is built and searched."""
TRAINING = 64
"""IVF: vectors to learn each cell from, at most."""

RowNumbers = NDArray[np.int64]


class Nearest(Protocol):
    """What finds the nearest of the vectors that it was made of."""

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(m, D) -> cosines (m, k), falling, and rows (m, k); -1 where fewer than k were found."""
        ...


class Exact:
    """Every query against every vector."""

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(m, D) -> cosines (m, k) and rows (m, k)."""
        some = queries.split(max(CELLS // max(len(self.vectors), 1), 1))
        found = [(few @ self.vectors.mT).topk(k, dim=1) for few in some]  # of (m, n) cosines
        return torch.cat([values for values, _ in found]), torch.cat([rows for _, rows in found])


class Approximate:
    """An index of faiss: a graph (HNSW: Malkov and Yashunin, 2016) or cells around means (IVF)."""

    def __init__(self, index: Any) -> None:
        self.index = index

    @classmethod
    def of(cls, vectors: Tensor, kind: NearestKind) -> "Approximate":
        """Build it."""
        faiss = import_faiss()
        n, D = vectors.shape
        x = vectors.contiguous().numpy()
        if kind == "hnsw":
            index = faiss.IndexHNSWFlat(D, LINKS, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = BUILD_WIDTH
        else:
            cells = ivf_cells(n)
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(D), D, cells, faiss.METRIC_INNER_PRODUCT)
            index.cp.max_points_per_centroid, index.cp.min_points_per_centroid = TRAINING, 1
            index.train(x)
            index.nprobe = ivf_probes(cells)
        index.add(x)
        return cls(index)

    @classmethod
    def read(cls, path: Path, vectors: Tensor) -> "Approximate":
        """One that was written before, for these vectors."""
        made = cls._read(path)
        if (made.index.ntotal, made.index.d) != tuple(vectors.shape):
            raise CheckpointError(f"{path} does not belong to this index; remove it, and run vitral index again.")
        return made

    @classmethod
    def grown(cls, path: Path, vectors: Tensor) -> "Approximate | None":
        """A graph that was written before, for the first of these vectors, with the others too; None if it is none."""
        try:
            made = cls._read(path)
        except CheckpointError:
            return None
        n, D = vectors.shape
        if made.index.d != D or made.index.ntotal > n:
            return None
        made.index.add(vectors[made.index.ntotal :].contiguous().numpy())
        return made

    @classmethod
    def _read(cls, path: Path) -> "Approximate":
        try:
            return cls(import_faiss().read_index(str(path)))
        except RuntimeError as error:
            raise CheckpointError(f"{path} is damaged; remove it, and run vitral index again.") from error

    def write(self, path: Path) -> None:
        """Keep it, whole or not at all."""
        with replacing(path) as temporary:
            try:
                import_faiss().write_index(self.index, str(temporary))
            except RuntimeError as error:  # of faiss, whatever the system said
                raise OSError(str(error).rpartition(": ")[2]) from error

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """(m, D) -> cosines (m, k) and rows (m, k), -1 where fewer were found."""
        if hasattr(self.index, "hnsw"):
            self.index.hnsw.efSearch = max(SEARCH_WIDTH, 2 * k)
        values, rows = self.index.search(queries.contiguous().numpy(), k)
        return torch.from_numpy(values), torch.from_numpy(rows)


def ivf_cells(n: int) -> int:
    """IVF: cells for n vectors."""
    return max(round(n**0.5), 1)


def ivf_probes(cells: int) -> int:
    """IVF: how many of them are looked at."""
    return max(cells // 8, 1)


def import_faiss() -> Any:
    """faiss, or how to install it."""
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "a search that is not exact needs faiss: pip install 'vitral[search]', or give --nearest exact."
        ) from error
    return faiss


# ---- vectors that nearly are the same ----


def near_pairs(vectors: Tensor, least: float) -> Iterator[tuple[RowNumbers, RowNumbers]]:
    """Every pair of rows i < j whose cosine is at least `least`, some pairs at a time."""
    n = len(vectors)
    step, few = max(CELLS // max(n, 1), 1), max(PAIRS // max(n, 1), 1)
    for start in range(0, n, step):
        near = (vectors[start : start + step] @ vectors[start:].mT >= least - ROUNDING).triu_(1).numpy()
        for first in range(0, len(near), few):
            i, j = np.divmod(np.flatnonzero(near[first : first + few]), n - start)
            yield start + first + i, start + j


def near_groups(vectors: Tensor, least: float) -> list[list[int]]:
    """Rows that hang together by such pairs: groups of two or more, the largest first, rows rising."""
    lowest = np.arange(len(vectors))  # of the group that a row is in
    for i, j in near_pairs(vectors, least):
        lowest = _joined(lowest, i, j)
    sizes = np.bincount(lowest)
    rows = np.flatnonzero(sizes[lowest] > 1)
    rows = rows[np.argsort(lowest[rows], kind="stable")]
    groups = np.split(rows, np.cumsum(sizes[sizes > 1])[:-1]) if len(rows) else []
    return sorted((group.tolist() for group in groups), key=len, reverse=True)


def _joined(lowest: RowNumbers, i: RowNumbers, j: RowNumbers) -> RowNumbers:
    """The lowest row of each row's group, now that the groups of rows i and j are one.

    In a round, each group that has one to join hangs itself below the lowest of these, unless it is lower itself: at
    most half of them are left.
    """
    while (apart := lowest[i] != lowest[j]).any():
        i, j = i[apart], j[apart]
        a, b = lowest[i], lowest[j]
        lowest = lowest.copy()
        np.minimum.at(lowest, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(below := lowest[lowest], lowest):
            lowest = below
    return lowest
