"""How far attention looks: the mean distance between a query and its keys, weighted by attention, in pixels."""

from typing import Any

import torch
from torch import Tensor

from vitral.explanation.windows import stride_of
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer


def attention_distance(rows: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """d = sum_k A_qk |place_q - place_k| / sum_k A_qk, mean over the queries: rows (..., q, k) -> (...).

    `queries` (q, 2) and `keys` (k, 2) are places in pixels. Keys that have no place are to be left out before; what is
    left is weighed anew to a sum of 1.
    """
    far = torch.cdist(queries.double(), keys.double())  # (q, k)
    weights = rows.double()
    return ((weights * far).sum(-1) / weights.sum(-1)).mean(-1)


def places_of(grid: tuple[int, int], cell: tuple[float, float]) -> Tensor:
    """(N, 2): the middle of every cell of a grid, row by row, in pixels."""
    y, x = ((torch.arange(n) + 0.5) * side for n, side in zip(grid, cell, strict=True))
    return torch.cartesian_prod(y, x)


@torch.no_grad()
def attention_distances(model: Any, x: Tensor) -> list[list[float]]:
    """Mean distance of every layer and head for a batch of images; no layers where a model has no attention."""
    if isinstance(model, VisionTransformer):
        return _vit(model, x)
    return _swin(model, x) if isinstance(model, SwinTransformer) else []


def uniform_distance(grid: tuple[int, int], cell: tuple[float, float]) -> float:
    """The distance of attention that looks at all cells alike."""
    places = places_of(grid, cell)
    return float(attention_distance(torch.ones(1, len(places), len(places)), places, places))


def _vit(model: VisionTransformer, x: Tensor) -> list[list[float]]:
    grid, R = model.grid_of(x), model.prefix_tokens
    places = places_of(grid, model.config.patch)
    layers = model.attention(x, "all", list(range(R, R + len(places))))
    return [attention_distance(rows[..., R:], places, places).mean(0).tolist() for rows in layers]


def _swin(model: SwinTransformer, x: Tensor) -> list[list[float]]:
    """Window by window: the rows of padding are left out, and no row looks at padding."""
    found = []
    for block, z in model.block_inputs(x):
        grid = (z.shape[1], z.shape[2])
        places = places_of(grid, stride_of(model, len(found)))
        rows, (tokens,) = block.attention_rows(z), model.window_tokens(x, [len(found)])
        sums, count = torch.zeros(rows.shape[2], dtype=torch.float64), 0
        for window, inside in enumerate(tokens):
            real = (inside >= 0).nonzero()[:, 0]
            at = places[inside[real]]
            part = rows[:, window][:, :, real][..., real]  # (B, h, q, k)
            sums += attention_distance(part, at, at).mean(0) * len(real)
            count += len(real)
        found.append((sums / count).tolist())
    return found
