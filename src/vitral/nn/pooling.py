"""All tokens to one vector: what the head reads.

Each pool takes tokens z (B, R + N, D) and, where some patches are padding, `visible` (B, R + N); `reads` names the
tokens it looks at, so that the last block may leave the others out (None: all).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.nn.attention import key_mask
from vitral.nn.mlp import MLP


class ClsPool(nn.Module):
    """z^0, the [CLS] token."""

    reads = slice(0, 1)

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, R + N, D) -> (B, D)."""
        return z[:, 0]


class MeanPool(nn.Module):
    """Mean of the patch tokens; prefix tokens do not count."""

    reads = None

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, R + N, D) -> (B, D)."""
        patches = z[:, self.prefix :]
        if visible is None:
            return patches.mean(dim=1)
        weight = visible[:, self.prefix :, None].to(z.dtype)
        return (patches * weight).sum(dim=1) / weight.sum(dim=1)


class MaxPool(nn.Module):
    """Channel-wise maximum of the patch tokens."""

    reads = None

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.prefix = prefix

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, R + N, D) -> (B, D)."""
        patches = z[:, self.prefix :]
        if visible is not None:
            patches = patches.masked_fill(~visible[:, self.prefix :, None], float("-inf"))
        return patches.amax(dim=1)


class ClsMeanPool(nn.Module):
    """[CLS] and the mean patch side by side, (B, 2D): what DINOv2's linear classifiers read."""

    reads = None

    def __init__(self, prefix: int) -> None:
        super().__init__()
        self.mean = MeanPool(prefix)

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, R + N, D) -> (B, 2D)."""
        return torch.cat([z[:, 0], self.mean(z, visible)], dim=1)


class ClsDistPool(nn.Module):
    """[CLS] and the token behind it side by side, (B, 2D): what the two heads of a distilled DeiT read."""

    reads = slice(0, 2)

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, R + N, D) -> (B, 2D)."""
        return z[:, :2].flatten(1)


class DistilledHead(nn.Module):
    """One layer for the half of [CLS], one for the half of the distillation token, and the mean of the two answers."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.cls, self.dist = nn.Linear(dim, classes), nn.Linear(dim, classes)

    def forward(self, y: Tensor) -> Tensor:
        """(B, 2D) -> (B, classes)."""
        cls, dist = y.chunk(2, dim=-1)
        return (self.cls(cls) + self.dist(dist)) / 2


class AttentionPool(nn.Module):
    """A learned query attends to the patches, then one MLP with its residual (the MAP head of SigLIP)."""

    reads = None

    def __init__(self, dim: int, num_heads: int, mlp: MLP, prefix: int, eps: float) -> None:
        super().__init__()
        self.num_heads, self.prefix = num_heads, prefix
        self.latent = nn.Parameter(torch.zeros(1, 1, dim))
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, R + N, D) -> (B, D)."""
        patches = z[:, self.prefix :]
        B, N, D = patches.shape
        d = D // self.num_heads
        q = self.q(self.latent).view(1, 1, self.num_heads, d).transpose(1, 2).expand(B, -1, -1, -1)
        k, v = self.kv(patches).view(B, N, 2, self.num_heads, d).permute(2, 0, 3, 1, 4)  # (B, h, N, d)
        mask = key_mask(None if visible is None else visible[:, self.prefix :])
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, h, 1, d)
        x = self.proj(x.transpose(1, 2).flatten(2))
        return (x + self.mlp(self.norm(x)))[:, 0]
