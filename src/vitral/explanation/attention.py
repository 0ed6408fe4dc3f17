"""Attention as pictures: rows of tokens as maps over patches, and what can be read off them.

Rows come from `model.attention`, which makes only the ones asked for while fused attention stays on; or, where the
gradient of every weight is needed, from a `Recorder` around one forward pass. Prefix tokens never become pixels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vitral.errors import InputError, unknown_name
from vitral.models.vit import VisionTransformer
from vitral.nn.attention import softmax_rows

FUSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(1),
    "max": lambda rows: rows.amax(1),
    "min": lambda rows: rows.amin(1),
}


class Recorder(TorchFunctionMode):
    """Within `with Recorder() as record`, attention is written out and its rows are kept, part of the graph.

    The model is not touched: the fused kernel is replaced for the calls made in this thread and this block alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[Tensor] = []
        """Softmax rows (B, h, queries, keys), one entry for each layer that ran."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        q, k, v = args[:3]
        rows = softmax_rows(q, k, kwargs.get("attn_mask"))
        self.rows.append(rows)
        return rows @ v


def pool_row(model: VisionTransformer, rows: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Split recorded rows in those of the blocks and where pooling reads, as weights (B, 1, N) over the last tokens.

    [CLS] pooling reads one token, the mean all patches alike, attention pooling by its own rows.
    """
    depth, R = model.config.depth, model.prefix_tokens
    blocks = rows[:depth]
    B, N = blocks[0].shape[0], blocks[0].shape[-1]
    weights = blocks[0].new_zeros(B, 1, N)
    if len(rows) > depth:
        weights[..., R:] = rows[depth].detach().mean(1)
    elif model.config.global_pool in ("cls", "cls_dist"):
        weights[..., 0] = 1
    else:
        weights[..., R:] = 1 / (N - R)
    return blocks, weights


def fuse(rows: Tensor, how: str) -> Tensor:
    """(B, h, q, N) -> (B, q, N): mean, max or min over heads."""
    if how not in FUSIONS:
        raise unknown_name("fusion of heads", how, FUSIONS)
    return FUSIONS[how](rows)


def to_maps(model: VisionTransformer, rows: Tensor, grid: tuple[int, int]) -> Tensor:
    """(..., R + N) -> (..., G_h, G_w): the patches' part, as a map."""
    return rows[..., model.prefix_tokens :].unflatten(-1, grid)


def patch_token(model: VisionTransformer, size: tuple[int, int], x: int, y: int) -> int:
    """The token of the patch at pixel (x, y) of an image of `size` (height, width)."""
    height, width = size
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(f"the patch at {x},{y} lies outside the image of {width} x {height} pixels (width x height).")
    P_h, P_w = model.config.patch
    return model.prefix_tokens + (y // P_h) * (width // P_w) + x // P_w


def entropy(rows: Tensor) -> Tensor:
    """How widely each query looks, in nats: 0 for one token, log N for all alike. (..., N) -> (...)."""
    return torch.special.entr(rows).sum(-1)


def mean_distance(model: VisionTransformer, rows: Tensor, grid: tuple[int, int]) -> Tensor:
    """How far each head looks from patch to patch, in pixels: rows of all tokens (B, h, N, N) -> (B, h)."""
    R, (P_h, P_w) = model.prefix_tokens, model.config.patch
    y = torch.arange(grid[0]).repeat_interleave(grid[1]) * P_h
    x = torch.arange(grid[1]).repeat(grid[0]) * P_w
    apart = torch.hypot((y[:, None] - y[None]).double(), (x[:, None] - x[None]).double()).to(rows)
    between = rows[..., R:, R:]
    return (between * apart).sum(-1).div(between.sum(-1)).mean(-1)


def top_mass(maps: Tensor, share: float = 0.6) -> Tensor:
    """Boolean maps of the fewest patches that hold a `share` of the mass, as DINO shows its heads. (..., G_h, G_w)."""
    if not 0 < share <= 1:
        raise InputError(f"share must be above 0 and at most 1, got {share}.")
    flat = maps.flatten(-2)
    values, order = flat.sort(-1, descending=True)
    before = values.cumsum(-1) - values
    kept = before < share * flat.sum(-1, keepdim=True) - 1e-12
    return torch.zeros_like(kept).scatter(-1, order, kept).view(maps.shape)
