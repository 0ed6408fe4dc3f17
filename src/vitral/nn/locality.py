"""Two parts that help a ViT learn from few images (Lee et al., 2021, arXiv:2112.13492): tokens that see beyond their
patch, and attention that is sharp and never at itself.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import SHIFTED_VIEWS
from vitral.nn.attention import Attention, softmax_rows
from vitral.nn.patches import patchify


class ShiftedPatchEmbed(nn.Module):
    """Shifted patch tokenization: W LN([x_p; x_p^1; x_p^2; x_p^3; x_p^4]) + b.

    x_p^i are the same patches of the image moved by half a patch towards its four corners, with zeros where it was.
    """

    def __init__(self, in_chans: int, embed_dim: int, patch_size: tuple[int, int], bias: bool, eps: float) -> None:
        super().__init__()
        self.patch_size = patch_size
        pixels = patch_size[0] * patch_size[1] * SHIFTED_VIEWS * in_chans
        self.norm = nn.LayerNorm(pixels, eps=eps)
        self.proj = nn.Linear(pixels, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        down, across = self.patch_size[0] // 2, self.patch_size[1] // 2
        corners = [(dy, dx) for dy in (-down, down) for dx in (-across, across)]
        moved = [F.pad(x, (dx, -dx, dy, -dy)) for dy, dx in corners]
        x_p = patchify(torch.cat([x, *moved], dim=1), self.patch_size)  # (B, N, P_h P_w 5C)
        return self.proj(self.norm(x_p))


class LocalityAttention(Attention):
    """Locality self-attention: softmax(Q_i K_i^T / tau_i) V_i, where no token looks at itself.

    tau_i is learned for each head, from sqrt(d) on. A token that would have nothing else to look at looks at itself.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float, proj_drop: float) -> None:
        super().__init__(dim, num_heads, qkv_bias, attn_drop, proj_drop)
        self.temperature = nn.Parameter(torch.empty(num_heads))
        self.reset_temperature()

    def reset_temperature(self) -> None:
        """As in plain attention."""
        nn.init.constant_(self.temperature, self._root)

    @property
    def _root(self) -> float:
        return (self.proj.in_features // self.num_heads) ** 0.5

    def heads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of all tokens, where q sqrt(d) / tau is put for q: (B, N, D) -> (B, h, N, d) each."""
        q, k, v = super().heads(z)
        return q * (self._root / self.temperature)[:, None, None], k, v

    def mix(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """What the heads find, side by side: (B, N, D) -> (B, N, D), or only for the tokens in `keep`, a few."""
        q, k, v = self.heads(z)
        queries = torch.arange(z.shape[1], device=z.device)
        if keep is not None:
            q, queries = q[:, :, keep], queries[keep]
        return super().look(q, k, v, _not_itself(queries, z.shape[1], mask))

    def look(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What the heads of all tokens find: (B, h, N, d) each -> (B, N, D)."""
        N = k.shape[2]
        return super().look(q, k, v, _not_itself(torch.arange(N, device=q.device), N, mask))

    def rows(self, z: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows of the tokens `queries` (n): (B, N, D) -> (B, h, n, N)."""
        q, k, _ = self.heads(z)
        return softmax_rows(q[:, :, queries], k, _not_itself(queries, z.shape[1], mask))


def _not_itself(queries: Tensor, N: int, mask: Tensor | None) -> Tensor:
    """A mask that also hides from each query (n) its own key of N: boolean, or numbers that are added."""
    others = queries[:, None] != torch.arange(N, device=queries.device)  # (n, N)
    if mask is None:
        return others if N > 1 else torch.ones_like(others)
    if mask.dtype != torch.bool:
        return mask.masked_fill(~others, float("-inf")) if N > 1 else mask
    seen = mask & others
    return torch.where(seen.any(dim=-1, keepdim=True), seen, mask)
