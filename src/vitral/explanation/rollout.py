"""Attention rollout (Abnar and Zuidema, 2020, arXiv:2005.00928): how much of each patch reaches the pooled token.

Attention of a block with its residual, A' = (A + I) / 2, mixes tokens; the product over the blocks says where the
pooled token comes from. Row vectors are multiplied from the last block to the first: no product of matrices is made.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitral.errors import InputError


def rollout(mixing: Sequence[Tensor], start: Tensor, discard: float = 0.0) -> Tensor:
    """How blocks mix tokens (B, N, N), the first to the last, and where pooling reads (B, 1, N) -> shares (B, N).

    `discard` sets that share of the smallest weights of each row to zero.
    """
    if not 0 <= discard < 1:
        raise InputError(f"discard must be from 0 to below 1, got {discard}.")
    share = start
    for A in reversed(mixing):
        A = _without_smallest(A, discard)
        share = share / (1 + A.sum(-1))[:, None]
        share = share + share @ A  # A + I, its rows divided by their sum: (A + I) / 2 where they sum to 1
    return share[:, 0]


def _without_smallest(A: Tensor, discard: float) -> Tensor:
    """Set the smallest weights of each row to zero."""
    count = int(discard * A.shape[-1])
    if not count:
        return A
    smallest = A.topk(count, dim=-1, largest=False).indices
    return torch.scatter(A, -1, smallest, 0.0)
