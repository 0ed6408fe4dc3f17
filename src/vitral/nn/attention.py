"""Multi-head attention, MSA: of tokens to each other, and to others.

B batch, N tokens, D width, h heads, d = D / h. A mask is boolean, True where a query may look at a key, and broadcasts
to (B, h, N_q, N_k): `key_mask` makes one that hides padding, `causal_mask` one that hides padding and what comes later.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.nn.packed import PackedLinear

KeysValues = tuple[Tensor, Tensor]
Project = Callable[[Tensor, Tensor], KeysValues]


def key_mask(visible: Tensor | None) -> Tensor | None:
    """Visible tokens (B, N) -> a mask (B, 1, 1, N) under which no query looks at a hidden key; None hides nothing."""
    return None if visible is None else visible[:, None, None, :]


def causal_mask(tokens: int, past: int, visible: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    """The mask (B or 1, 1, N, past + N) of N new tokens after `past` others: each looks at itself and to its left.

    `visible` (B, past + N) hides padding as well, though never a token from itself, so that no row is empty. None where
    nothing is hidden: for one token, the newest, among visible ones.
    """
    if visible is None and tokens == 1:
        return None
    device = device if visible is None else visible.device
    steps = torch.arange(past + tokens, device=device)
    left = steps <= steps[past:, None]  # (N, past + N)
    if visible is None:
        return left[None, None]
    itself = steps == steps[past:, None]
    return ((left & visible[:, None]) | itself)[:, None]


def softmax_rows(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(d)), written out: (B, h, N_q, d), (B, h, N_k, d) -> (B, h, N_q, N_k)."""
    return masked_softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, mask)


def masked_softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax over keys, hidden by a boolean mask, or favoured by numbers that are added."""
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-1)


def by_head(x: Tensor, W: Tensor) -> Tensor:
    """A matrix for each head, not copied for each image: (B, h, n, i), (h, i, o) -> (B, h, n, o)."""
    return (x.transpose(0, 1).flatten(1, 2) @ W).unflatten(1, (-1, x.shape[2])).transpose(0, 1)


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
        return self.proj_drop(self.proj(self.mix(z, mask, keep)))

    def mix(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """What the heads find, side by side: (B, N, D) -> (B, N, D), or only for the tokens in `keep`, a few."""
        if keep is None:
            return self.look(*self.heads(z), mask)
        if self._is_plain() and not (self.training and self.attn_drop):
            return self._mix_few(z, keep, mask)
        q, k, v = self.heads(z)
        return self.look(q[:, :, keep], k, v, mask)

    def heads(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V of all tokens: (B, N, D) -> (B, h, N, d) each."""
        q, k, v = self._split(self.qkv(z))
        return q, k, v

    def look(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """What the heads find, side by side: (B, h, N, d) each -> (B, N, D)."""
        dropout = self.attn_drop if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # (B, h, N, d)
        return heads.transpose(1, 2).flatten(2)

    def _mix_few(self, z: Tensor, keep: slice, mask: Tensor | None) -> Tensor:
        """The same for a few queries, without a key or a value of any token.

        q . (W_K x + b_K) = (W_K^T q) . x + a number that the softmax drops, being the same for every x; and as the rows
        of the softmax sum to 1, sum_x a_x (W_V x + b_V) = W_V (sum_x a_x x) + b_V.
        """
        h, D = self.num_heads, z.shape[2]
        W_K, W_V = self.qkv.weight[D:].view(2, h, -1, D)  # (h, d, D) each
        (q,) = self._project(z[:, keep], 0, 1)  # (B, h, n, d)
        u = by_head(q, W_K)  # (B, h, n, D)
        scores = (u.flatten(1, 2) @ z.mT).unflatten(1, (h, -1)) * q.shape[-1] ** -0.5
        a = masked_softmax(scores, mask)  # (B, h, n, N)
        mean = (a.flatten(1, 2) @ z).unflatten(1, (h, -1))  # sum_x a_x x
        heads = by_head(mean, W_V.mT).transpose(1, 2).flatten(2)  # (B, n, D)
        return heads if self.qkv.bias is None else heads + self.qkv.bias[2 * D :]

    def rows(self, z: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows of the tokens `queries` (n): (B, N, D) -> (B, h, n, N). Nothing larger is made."""
        (q,), (k,) = self._project(z[:, queries], 0, 1), self._project(z, 1, 2)
        return softmax_rows(q, k, mask)

    def _project(self, z: Tensor, first: int, last: int) -> Tensor:
        """Apply only the parts `first` to `last` of [W_Q; W_K; W_V]: (B, N, D) -> (parts, B, h, N, d).

        Whatever has been put in the place of a plain linear layer, or hooked to it, is called as a whole.
        """
        if not self._is_plain():
            return self._split(self.qkv(z))[first:last]
        D = self.qkv.in_features
        bias = None if self.qkv.bias is None else self.qkv.bias[first * D : last * D]
        return self._split(F.linear(z, self.qkv.weight[first * D : last * D], bias))

    def _is_plain(self) -> bool:
        """Whether `qkv` is a linear layer and nothing but that, so that parts of its matrix may be used alone."""
        return type(self.qkv) in (nn.Linear, PackedLinear) and not (
            self.qkv._forward_hooks or self.qkv._forward_pre_hooks
        )

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

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None = None,
        cache: "GrowingKeys | FixedKeys | None" = None,
    ) -> Tensor:
        """(B, N_q, D), (B, N_k, D), (B, N_k, D) -> (B, N_q, D); with a cache the keys and values it holds count too."""
        q = self._heads(self.q(queries))
        k, v = self.project(keys, values) if cache is None else cache.get(self.project, keys, values)
        dropout = self.attn_drop if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)  # (B, h, N_q, d)
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))

    def project(self, keys: Tensor, values: Tensor) -> KeysValues:
        """K and V: (B, N_k, D), (B, N_k, D) -> (B, h, N_k, d) each."""
        return self._heads(self.k(keys)), self._heads(self.v(values))

    def rows(self, queries: Tensor, keys: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows: (B, N_q, D), (B, N_k, D) -> (B, h, N_q, N_k)."""
        return softmax_rows(self._heads(self.q(queries)), self._heads(self.k(keys)), mask)

    def _heads(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, h, N, d)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)


# ---- what a decoder that writes token by token need not compute twice ----


class GrowingKeys:
    """The keys and values of every token so far; each call adds those of the new ones. For inference alone.

    They lie in a buffer with room for more, so that a step writes one column instead of copying all; and in turn in two
    of them where beams change places at every step, for new memory costs more than the copy.
    """

    ROOM = 64

    def __init__(self) -> None:
        self.length = 0
        self._buffers: KeysValues | None = None
        self._spare: KeysValues | None = None

    def get(self, project: Project, keys: Tensor, values: Tensor) -> KeysValues:
        """Project the new tokens (B, n, D), and return all: (B, h, length, d) each."""
        new = project(keys, values)
        end = self.length + new[0].shape[2]
        buffers = self._buffers or (new[0][:, :, :0], new[1][:, :, :0])
        if end > buffers[0].shape[2]:
            buffers = (self._larger(buffers[0], end), self._larger(buffers[1], end))
        for buffer, part in zip(buffers, new, strict=True):
            buffer[:, :, self.length : end] = part
        self._buffers, self.length = buffers, end
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order; a row may come twice."""
        if self._buffers is None:
            return
        shape = (len(rows), *self._buffers[0].shape[1:])
        if self._spare is None or self._spare[0].shape != shape:
            self._spare = (self._buffers[0].new_empty(shape), self._buffers[1].new_empty(shape))
        for old, new in zip(self._buffers, self._spare, strict=True):
            torch.index_select(old, 0, rows, out=new)
        self._buffers, self._spare = self._spare, self._buffers

    def _larger(self, buffer: Tensor, end: int) -> Tensor:
        B, h, _, d = buffer.shape
        larger = buffer.new_empty(B, h, -(-end // self.ROOM) * self.ROOM, d)
        larger[:, :, : self.length] = buffer[:, :, : self.length]
        return larger


class FixedKeys:
    """The keys and values of a memory that stays the same: projected by the first call alone, or made before."""

    def __init__(self, made: KeysValues | None = None) -> None:
        self._made = made

    def get(self, project: Project, keys: Tensor, values: Tensor) -> KeysValues:
        """Return (B, h, M, d) each."""
        if self._made is None:
            self._made = project(keys, values)
        return self._made

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch."""
        if self._made is not None:
            self._made = (self._made[0].index_select(0, rows), self._made[1].index_select(0, rows))
