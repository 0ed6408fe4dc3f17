"""What part of an image a cell of a feature map really looks at: the effective receptive field (Luo et al., 2016)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vitral.config import ResNetConfig, ViTConfig
from vitral.models.cost import receptive_fields


def effective_field(maps: Callable[[Tensor], Tensor], x: Tensor, seed: int = 0) -> Tensor:
    """Mean over images and signs of |d (s . f(x)_middle) / d x|, summed over colours: (B, C, H, W) -> (H, W).

    f(x) is a map (B, D, G_h, G_w). The channels of its middle cell are summed with random signs s, one draw an image:
    a plain sum would be blind behind a LayerNorm, whose outputs add up to a constant.
    """
    x = x.detach().clone().requires_grad_(True)
    with torch.enable_grad():
        map_ = maps(x)
        cell = map_[:, :, map_.shape[2] // 2, map_.shape[3] // 2]
        generator = torch.Generator().manual_seed(seed)
        signs = torch.randint(0, 2, cell.shape, generator=generator).to(cell) * 2 - 1
        (gradient,) = torch.autograd.grad((signs * cell).sum(), x)
    return gradient.abs().sum(1).mean(0)


def theoretical_fields(config: Any, cell: tuple[int, int]) -> dict[str, Any]:
    """What a cell of the last map, or a token before the first block, can see in theory, from the config alone.

    `kind` says which of the two, `side` how many pixels along a side, `start` the first row and column that the cell in
    row and column `cell` sees (below 0 in the padding). After the first block attention has no limit but the image, or
    its windows.
    """
    if isinstance(config, ResNetConfig) or (isinstance(config, ViTConfig) and config.stem != "custom"):
        last = receptive_fields(config)[-1]
        kind = "cell" if isinstance(config, ResNetConfig) else "token"
        return {"kind": kind, "side": last.size, "start": [last.start + i * last.stride for i in cell]}
    return {"kind": "token", "side": config.patch[0], "start": None}


def field_side(field: Tensor, share: float = 0.9) -> float:
    """Side of a square of as many pixels as hold a share of the field, the brightest first."""
    held = field.double().flatten().sort(descending=True).values.cumsum(0)
    return math.sqrt(int((held < share * held[-1]).sum()) + 1) if float(held[-1]) else 0.0


def field_reach(field: Tensor) -> int:
    """Rows or columns, whichever are more, from the first to the last with a pixel that counts."""
    seen = (field > 0).nonzero()
    return int((seen.max(0).values - seen.min(0).values).max()) + 1 if len(seen) else 0
