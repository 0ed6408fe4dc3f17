"""Sequences of different lengths in one batch: side by side in rows, with a mask that keeps them apart.

After NaViT (Dehghani et al., 2023, arXiv:2307.06304). Knows nothing of images.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """Where a packed sequence lies."""

    row: int
    start: int
    stop: int


def plan_rows(lengths: list[int]) -> list[Place]:
    """Place sequences in rows as long as the longest: longest first, each in the first row with room."""
    capacity = max(lengths)
    filled: list[int] = []
    places: dict[int, Place] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, used in enumerate(filled) if used + lengths[i] <= capacity), len(filled))
        if row == len(filled):
            filled.append(0)
        places[i] = Place(row, filled[row], filled[row] + lengths[i])
        filled[row] += lengths[i]
    return [places[i] for i in range(len(lengths))]


def pack(sequences: list[Tensor]) -> tuple[Tensor, Tensor, list[Place]]:
    """Sequences (1, n_i, D) -> rows (r, n, D), a mask (r, 1, n, n) that lets each see only itself, and their places."""
    places = plan_rows([s.shape[1] for s in sequences])
    rows, length = 1 + max(p.row for p in places), max(p.stop for p in places)
    first = sequences[0]
    owner = torch.full((rows, length), -1, device=first.device)  # which sequence a token belongs to; -1: none
    packed = first.new_zeros(rows, length, first.shape[2])
    for i, (sequence, place) in enumerate(zip(sequences, places, strict=True)):
        packed[place.row, place.start : place.stop] = sequence[0]
        owner[place.row, place.start : place.stop] = i
    return packed, (owner[:, None, :, None] == owner[:, None, None, :]), places


def unpack(packed: Tensor, places: list[Place]) -> list[Tensor]:
    """Rows (r, n, D) -> the sequences (1, n_i, D) in their first order."""
    return [packed[p.row : p.row + 1, p.start : p.stop] for p in places]


def take(z: Tensor, places: Tensor) -> Tensor:
    """Rows of each sample: (B, M, D), (B, n) -> (B, n, D)."""
    return z.gather(1, places[..., None].expand(-1, -1, z.shape[2]))
