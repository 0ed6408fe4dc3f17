"""Accuracy on spoiled images: noise, hidden pieces, shuffled pieces. The same spoiling for every model."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

NOISE = (0.0, 0.05, 0.1, 0.2, 0.4)
"""Standard deviations of the noise, for pixels in 0..1."""
HIDDEN = (0.0, 0.1, 0.25, 0.5, 0.75)
"""Shares of the pieces that are hidden."""
PIECES = 8
"""Pieces along a side, of which some are hidden."""
SHUFFLED = (1, 2, 4, 8)
"""Pieces along a side that are shuffled; 1 leaves the image as it is."""


def add_noise(x: Tensor, deviation: float, generator: torch.Generator) -> Tensor:
    """Pixels (B, C, H, W) in 0..1 with Gaussian noise, cut to 0..1."""
    noise = torch.randn(x.shape, generator=generator).to(x)
    return (x + deviation * noise).clamp(0, 1)


def hide_pieces(x: Tensor, share: float, pieces: int, colour: Sequence[float], generator: torch.Generator) -> Tensor:
    """A share of the pieces of each image under one colour: which ones, chance decides for each image."""
    B, _, H, W = x.shape
    order = torch.rand(B, pieces * pieces, generator=generator).argsort(1)
    hidden = (order < round(share * pieces * pieces)).view(B, 1, pieces, pieces)
    rows, columns = (torch.arange(side) * pieces // side for side in (H, W))
    mask = hidden[:, :, rows][:, :, :, columns].to(x.device)
    return torch.where(mask, x.new_tensor(colour)[:, None, None], x)


def shuffle_pieces(x: Tensor, pieces: int, generator: torch.Generator) -> Tensor:
    """The pieces of each image in another order; the sides must be multiples of `pieces`."""
    B, C, H, W = x.shape
    h, w = H // pieces, W // pieces
    cut = x.view(B, C, pieces, h, pieces, w).permute(0, 2, 4, 1, 3, 5).reshape(B, pieces * pieces, C, h, w)
    order = torch.rand(B, pieces * pieces, generator=generator).argsort(1).to(x.device)
    cut = cut.gather(1, order[:, :, None, None, None].expand_as(cut))
    return cut.view(B, pieces, pieces, C, h, w).permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W)


def robustness(
    answer: Callable[[Tensor], Tensor], x: Tensor, targets: Tensor, colour: Sequence[float], seed: int = 0
) -> dict[str, list[dict[str, Any]]]:
    """Accuracy against each way of spoiling; `answer` gives logits for pixels (B, C, H, W) in 0..1."""

    def chance() -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def accuracy(spoiled: Tensor) -> float:
        return float((answer(spoiled).argmax(1) == targets).double().mean())

    cuts = [n for n in SHUFFLED if x.shape[-2] % n == 0 and x.shape[-1] % n == 0]
    pieces = min(PIECES, *x.shape[-2:])
    ways: dict[str, Iterable[tuple[float, Tensor]]] = {  # each made when it is looked at
        "noise": ((value, add_noise(x, value, chance())) for value in NOISE),
        "hidden": ((share, hide_pieces(x, share, pieces, colour, chance())) for share in HIDDEN),
        "shuffled": ((n, shuffle_pieces(x, n, chance()) if n > 1 else x) for n in cuts),
    }
    return {
        way: [{"strength": strength, "accuracy": accuracy(spoiled)} for strength, spoiled in rows]
        for way, rows in ways.items()
    }
