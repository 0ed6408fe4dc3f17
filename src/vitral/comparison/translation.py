"""What a shift of the image does to maps, features and answers: equivariance, and invariance."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def shift(x: Tensor, down: int, right: int) -> Tensor:
    """(B, C, H, W) moved by whole pixels; what comes in at the edge repeats the edge."""
    H, W = x.shape[-2:]
    padded = F.pad(x, (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)), mode="replicate")
    top, left = max(-down, 0), max(-right, 0)
    return padded[..., top : top + H, left : left + W]


def equivariance_error(map_: Tensor, moved: Tensor, cells: tuple[int, int], margin: int = 0) -> float:
    """E = sqrt(mean |f(T x) - T f(x)|^2 / (2 Var f(x))), over the cells that both maps have.

    `map_` is f(x) and `moved` f(T x), both (B, D, G_h, G_w); T moves the image by so many whole cells down and right.
    0: the map moves with the image. 1: it is as different as two cells of the map taken at random. `margin` leaves out
    cells at the edges, where the map sees what came in from outside.
    """
    before, after = (_common(each, sign, cells, margin) for each, sign in ((map_, 1), (moved, -1)))
    variance = map_.detach().double().var(dim=(0, 2, 3), correction=0).mean()
    if not before.numel() or float(variance) == 0:
        return float("nan")
    return float(((after - before).detach().double().square().mean() / (2 * variance)).sqrt())


def _common(map_: Tensor, sign: int, cells: tuple[int, int], margin: int) -> Tensor:
    """The part of a map that is also in the other, that one moved by `cells`."""
    parts = []
    for count, by in zip(map_.shape[-2:], cells, strict=True):
        by *= sign
        parts.append(slice(max(-by, 0) + margin, count - max(by, 0) - margin))
    return map_[..., parts[0], parts[1]]


@dataclass(frozen=True)
class LayerError:
    """Equivariance of one layer."""

    layer: int
    stride: int
    """Pixels of a cell."""
    shift: int
    """Pixels that the images were moved by."""
    error: float


@torch.no_grad()
def layer_errors(maps: Callable[[Tensor], Sequence[Tensor]], x: Tensor) -> list[LayerError]:
    """The error of every layer whose map can be moved: by the largest stride if all strides divide it, or by its own.

    The mean of a move to the right and one down. A map of one cell, or with another number of cells than the image has
    whole strides, is left out.
    """
    H, W = x.shape[-2:]
    still = maps(x)
    strides = [_stride(map_, (H, W)) for map_ in still]
    usable = {s for s in strides if s}
    largest = max(usable, default=0)
    common = largest if largest and largest <= min(H, W) // 2 and all(largest % s == 0 for s in usable) else 0
    moved = {by: _moved(maps, x, by) for by in ({common} if common else usable)}
    found = []
    for layer, stride in enumerate(strides):
        if not stride or (by := common or stride) > min(H, W) // 2:
            continue
        k = by // stride
        errors = [
            equivariance_error(still[layer], moved[by][way][layer], cells) for way, cells in enumerate([(k, 0), (0, k)])
        ]
        found.append(LayerError(layer, stride, by, sum(errors) / 2))
    return found


def _stride(map_: Tensor, size: tuple[int, int]) -> int:
    """Pixels of a cell, 0 where they are not whole or there is only one cell."""
    (G_h, G_w), (H, W) = map_.shape[-2:], size
    whole = G_h > 1 and G_w > 1 and H % G_h == 0 and W % G_w == 0 and H // G_h == W // G_w
    return H // G_h if whole else 0


def _moved(maps: Callable[[Tensor], Sequence[Tensor]], x: Tensor, by: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    return maps(shift(x, by, 0)), maps(shift(x, 0, by))


@dataclass(frozen=True)
class ShiftEffect:
    """What a shift by some pixels does, mean of the four directions."""

    pixels: int
    accuracy: float
    same: float
    """Share of the images with the answer that they have unmoved."""
    probability: float
    """Half the sum of |p(T x) - p(x)| over the classes: 0 the same, 1 all probability elsewhere."""
    features: float
    """Length of the move of the pooled features, as a share of the mean distance between two images."""


Look = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Images -> logits (B, classes) and pooled features (B, D)."""


@torch.no_grad()
def shift_effects(look: Look, x: Tensor, targets: Tensor, pixels: Sequence[int]) -> list[ShiftEffect]:
    """How far answers and features move as images do."""
    logits, features = look(x)
    apart = float(torch.pdist(features.double()).mean())
    p, said = logits.double().softmax(1), logits.argmax(1)
    rows = []
    for by in pixels:
        effects = []
        for down, right in [(by, 0), (-by, 0), (0, by), (0, -by)] if by else [(0, 0)]:
            then, embedded = look(shift(x, down, right))
            effects.append(
                (
                    float((then.argmax(1) == targets).double().mean()),
                    float((then.argmax(1) == said).double().mean()),
                    float((then.double().softmax(1) - p).abs().sum(1).mean() / 2),
                    float((embedded - features).double().norm(dim=1).mean()) / apart if apart else 0.0,
                )
            )
        rows.append(ShiftEffect(by, *(sum(column) / len(effects) for column in zip(*effects, strict=True))))
    return rows
