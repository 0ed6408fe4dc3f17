"""Attention within windows as maps over the image: a Swin's exact rows, each window in its place.

H x W a stage's map, w windows of n tokens, h heads. What a token cannot see, because it lies in another window or in
another piece of a shifted one, is 0.
"""

import torch
from torch import Tensor

from vitral.models.swin import SwinTransformer


@torch.no_grad()
def window_maps(model: SwinTransformer, x: Tensor, block: int, pixel: tuple[int, int] | None) -> Tensor:
    """Where the patch at a pixel (x, y) looks in a block; without one, the mean over all patches: (h, H, W).

    Either adds up to 1 in each head. Images are (1, C, height, width).
    """
    (rows,) = model.attention(x, [block])  # (1, w, h, n, n)
    (tokens,) = model.window_tokens(x, [block])  # (w, n), -1 for padding
    s_h, s_w = stride_of(model, block)
    H, W = -(-x.shape[2] // s_h), -(-x.shape[3] // s_w)
    real = tokens >= 0
    if pixel is None:
        given = (rows[0] * real[:, None, :, None]).sum(2) / (H * W)  # (w, h, n)
    else:
        window, place = (tokens == pixel[1] // s_h * W + pixel[0] // s_w).nonzero()[0].tolist()
        given = torch.zeros_like(rows[0, :, :, 0])
        given[window] = rows[0, window, :, place]
    maps = rows.new_zeros(rows.shape[2], H * W)
    maps[:, tokens[real]] = given.movedim(1, 0)[:, real]
    return maps.unflatten(1, (H, W))


def stage_of(model: SwinTransformer, block: int) -> int:
    """The stage of a block, counted from 0 through all."""
    depths = model.config.depths
    return next(i for i in range(len(depths)) if block < sum(depths[: i + 1]))


def stride_of(model: SwinTransformer, block: int) -> tuple[int, int]:
    """Pixels down and across in a patch of a block."""
    return model.config.map_strides[stage_of(model, block)]
