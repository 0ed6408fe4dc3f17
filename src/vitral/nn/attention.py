"""Multi-head attention, MSA: of tokens to each other, and to others.

B batch, N tokens, D width, h heads, d = D / h. A mask is boolean, True where a query may look at a key, and broadcasts
to (B, h, N_q, N_k): `key_mask` makes one that hides padding.
"""

import torch.nn.functional as F
from torch import Tensor, nn


def key_mask(visible: Tensor | None) -> Tensor | None:
    """Visible tokens (B, N) -> a mask (B, 1, 1, N) under which no query looks at a hidden key; None hides nothing."""
    return None if visible is None else visible[:, None, None, :]


def softmax_rows(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)), written out: (B, h, N_q, d), (B, h, N_k, d) -> (B, h, N_q, N_k)."""
    scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1)


class Attention(nn.Module):
    """head_i = softmax(Q_i K_i^T / sqrt(d)) V_i; the heads side by side, times W_O.

    Q, K and V come from one matrix, `qkv`, whose rows are [W_Q; W_K; W_V] with the heads in order within each.
    """

    def __init__(self, dim: int, num_heads: int, qkv_bias: bool, attn_drop: float, proj_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.attn_drop = attn_drop
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the tokens in `keep`, which still look at all the others."""
        if keep is None:
            q, k, v = self._split(self.qkv(z))
        else:
            (q,), (k, v) = self._project(z[:, keep], 0, 1), self._project(z, 1, 3)
        dropout = self.attn_drop if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # (B, h, N, d)
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def rows(self, z: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows of the tokens `queries` (n): (B, N, D) -> (B, h, n, N). Nothing larger is made."""
        (q,), (k,) = self._project(z[:, queries], 0, 1), self._project(z, 1, 2)
        return softmax_rows(q, k, mask)

    def _project(self, z: Tensor, first: int, last: int) -> Tensor:
        """Apply only the parts `first` to `last` of [W_Q; W_K; W_V]: (B, N, D) -> (parts, B, h, N, d).

        Whatever has been put in the place of a plain linear layer, or hooked to it, is called as a whole.
        """
        if type(self.qkv) is not nn.Linear or self.qkv._forward_hooks or self.qkv._forward_pre_hooks:
            return self._split(self.qkv(z))[first:last]
        D = self.qkv.in_features
        bias = None if self.qkv.bias is None else self.qkv.bias[first * D : last * D]
        return self._split(F.linear(z, self.qkv.weight[first * D : last * D], bias))

    def _split(self, qkv: Tensor) -> Tensor:
        """(B, N, parts * D) -> (parts, B, h, N, d)."""
        B, N, _ = qkv.shape
        d = self.proj.in_features // self.num_heads
        return qkv.view(B, N, -1, self.num_heads, d).permute(2, 0, 3, 1, 4)


class CrossAttention(nn.Module):
    """head_i = softmax(Q_i K_i^T / sqrt(d)) V_i, where queries, keys and values come from different tokens.

    A decoder looks at an image with it. It is self-attention too where the values are the tokens themselves and the
    queries and keys the same tokens with positions added.
    """

    def __init__(self, dim: int, num_heads: int, bias: bool, attn_drop: float, proj_drop: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim, bias=bias)  # W_Q
        self.k = nn.Linear(dim, dim, bias=bias)  # W_K
        self.v = nn.Linear(dim, dim, bias=bias)  # W_V
        self.proj = nn.Linear(dim, dim)  # W_O
        self.attn_drop = attn_drop
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, N_q, D), (B, N_k, D), (B, N_k, D) -> (B, N_q, D)."""
        q, k, v = self._heads(self.q(queries)), self._heads(self.k(keys)), self._heads(self.v(values))
        dropout = self.attn_drop if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # (B, h, N_q, d)
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def rows(self, queries: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows: (B, N_q, D), (B, N_k, D) -> (B, h, N_q, N_k)."""
        return softmax_rows(self._heads(self.q(queries)), self._heads(self.k(keys)), mask)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, h, N, d)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
