"""What part of an image a cell of a feature map really looks at: the effective receptive field (Luo et al., 2016)."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


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


def centre_of(cells: tuple[int, int], size: tuple[int, int]) -> tuple[float, float]:
    """Where the middle cell of a map lies on an image, in pixels."""
    row, column = ((cell // 2 + 0.5) * side / cell for cell, side in zip(cells, size, strict=True))
    return row, column


def field_side(field: Tensor, centre: tuple[float, float], share: float = 0.9) -> float:
    """Side of the smallest square around a place that holds a share of the field."""
    far = _distance(field, centre).flatten()
    order = far.argsort()
    held = field.double().flatten()[order].cumsum(0)
    if float(held[-1]) == 0:
        return 0.0
    first = int((held < share * held[-1]).sum())
    return 2 * float(far[order][first])


def field_reach(field: Tensor, centre: tuple[float, float]) -> float:
    """Side of the smallest square around a place outside of which the field is zero."""
    far = _distance(field, centre)[field > 0]
    return 2 * float(far.max()) if len(far) else 0.0


def _distance(field: Tensor, centre: tuple[float, float]) -> Tensor:
    """How far each pixel's outer edge is from the place, along the axis where that is further."""
    along = [(torch.arange(n) + 0.5 - at).abs() + 0.5 for n, at in zip(field.shape, centre, strict=True)]
    assert all(math.isfinite(at) for at in centre)
    return torch.maximum(along[0][:, None], along[1][None, :])
