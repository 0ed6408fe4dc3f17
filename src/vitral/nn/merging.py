"""Token merging (Bolya et al., 2023, arXiv:2210.09461): tokens that say nearly the same become one.

B batch, N tokens of which r go, D width, d = D / h. Pure functions on tokens that may all be merged: whoever has prefix
tokens keeps them out. Shapes depend on N and r alone, so that the result can be traced and exported.
"""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.nn.packing import take


class Matching(NamedTuple):
    """Which tokens of the one half stay alone, and which join whom of the other half; numbers count all N tokens."""

    alone: Tensor
    """Tokens of A that stay as they are, in their order (B, |A| - r)."""
    joining: Tensor
    """Tokens of A that are merged away, the most similar pair first (B, r)."""
    to: Tensor
    """The token of B that each of them joins (B, r)."""
    others: Tensor
    """All tokens of B, in their order (|B|)."""


class Groups(NamedTuple):
    """How tokens stand for patches."""

    sizes: Tensor | None
    """s, the number of patches that each token stands for (B, N'), a hidden patch counting as none; None: one each."""
    place: Tensor
    """The token that each patch is in (B, N)."""


def start_groups(z: Tensor, visible: Tensor | None) -> Groups:
    """Each of the tokens (B, N, D) stands for its own patch, unless that is hidden by `visible` (B, N)."""
    own = torch.arange(z.shape[1], device=z.device).expand(z.shape[0], -1)  # len() would fix it while tracing
    return Groups(None if visible is None else visible.to(z.dtype), own)


def match(k: Tensor, r: int, first: int = 0) -> Matching:
    """Bipartite soft matching by keys (B, N, d): the r best pairs, each token of A with its most similar one of B.

    Every second token from `first` (0 or 1) is in A, the others are in B; likeness is the cosine of the keys.
    """
    N = k.shape[1]
    k = F.normalize(k, dim=-1)
    A = torch.arange(first, N, 2, device=k.device)
    B = torch.arange(1 - first, N, 2, device=k.device)
    best, partner = (k[:, first::2] @ k[:, 1 - first :: 2].mT).max(dim=-1)  # (B, |A|)
    order = best.sort(dim=1, descending=True).indices
    joining = order[:, :r]
    return Matching(A[order[:, r:].sort(dim=1).values], A[joining], B[partner.gather(1, joining)], B)


def merge(x: Tensor, sizes: Tensor, m: Matching) -> tuple[Tensor, Tensor]:
    """Means weighted by size, x'_b = sum s_i x_i / sum s_i: (B, N, D), (B, N) -> (B, N - r, D), (B, N - r).

    Those that stay alone come first, then B.
    """
    joins = (m.to[:, None] == m.others[:, None]).to(x.dtype)  # (B, |B|, r)
    s_b, s_join = sizes[:, m.others], sizes.gather(1, m.joining)
    s = s_b + (joins @ s_join[..., None])[..., 0]  # (B, |B|)
    share = 1 / s.clamp(min=1)  # a group of hidden tokens has no size, and no weight
    joined = (s_b * share)[..., None] * x[:, m.others] + (joins * share[..., None]) @ (
        s_join[..., None] * take(x, m.joining)
    )
    return torch.cat([take(x, m.alone), joined], dim=1), torch.cat([sizes.gather(1, m.alone), s], dim=1)


def merge_groups(z: Tensor, groups: Groups, m: Matching) -> tuple[Tensor, Groups]:
    """`merge`, and how the tokens stand for patches afterwards: (B, N', D) -> (B, N' - r, D)."""
    sizes = z.new_ones(z.shape[:2]) if groups.sizes is None else groups.sizes
    z, sizes = merge(z, sizes, m)
    return z, Groups(sizes, places(m).gather(1, groups.place))


def places(m: Matching) -> Tensor:
    """Where `merge` puts each token: (B, N), numbers up to N - r."""
    B, alone = m.alone.shape
    others = m.others.expand(B, -1)
    new = torch.arange(alone + others.shape[1], device=others.device).expand(B, -1)
    to = alone + m.to // 2  # every second token is in B
    return torch.zeros(B, m.joining.shape[1] + new.shape[1], dtype=torch.long, device=others.device).scatter(
        1, torch.cat([m.alone, others, m.joining], dim=1), torch.cat([new, to], dim=1)
    )


def unmerge(x: Tensor, place: Tensor) -> Tensor:
    """Every patch gets what its token has: (B, N', D), (B, N) -> (B, N, D)."""
    return take(x, place)


def size_bias(sizes: Tensor | None, prefix: int) -> Tensor | None:
    """log s, added to the scores of attention, lets a token count as often as it has patches: (B, 1, 1, R + N').

    softmax(q k^T / sqrt(d) + log s) is what attention to s equal keys would be. A token without patches is not seen.
    """
    if sizes is None:
        return None
    return F.pad(sizes.log(), (prefix, 0))[:, None, None]


def merge_schedule(merge: float, tokens: int, depth: int) -> list[int]:
    """How many of the patches each block merges away, never more than half of those that are left.

    `merge` from 1 is that number; below 1 it is the share of all patches that is gone at the end, spread evenly.
    """
    total = [round(merge * tokens * layer / depth) for layer in range(depth + 1)]
    wanted = [b - a for a, b in pairwise(total)] if merge < 1 else [int(merge)] * depth
    schedule, left = [], tokens
    for r in wanted:
        schedule.append(min(r, left // 2))
        left -= schedule[-1]
    return schedule
