"""Encoder and decoder blocks, norm first or norm last.

The first two take tokens z (B, N, D) and a mask, and return (B, N, D), or only the tokens in `keep` (which is all that
a head on [CLS] needs of the last block). Knows nothing of images.
"""

from collections.abc import Callable

from torch import Tensor, nn

from vitral.nn.attention import Attention, CrossAttention, FixedKeys, GrowingKeys
from vitral.nn.mlp import MLP
from vitral.nn.regularize import LayerScale, StochasticDepth


class Block(nn.Module):
    """The parts that both kinds share, under the names of published files."""

    def __init__(
        self, dim: int, attn: Attention, mlp: MLP, eps: float, init_values: float | None, drop_path: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = StochasticDepth(drop_path)
        self.drop_path2 = StochasticDepth(drop_path)


class PreNormBlock(Block):
    """z' = MSA(LN(z)) + z; z = MLP(LN(z')) + z'."""

    def forward(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """Equations 2 and 3."""
        skip = z if keep is None else z[:, keep]
        z = self.drop_path1(self.ls1(self.attn(self.norm1(z), mask, keep))) + skip  # Eq. 2
        return self.drop_path2(self.ls2(self.mlp(self.norm2(z)))) + z  # Eq. 3

    def attention_rows(self, z: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows for input z: (B, h, queries, N)."""
        return self.attn.rows(self.norm1(z), queries, mask)


class PostNormBlock(Block):
    """x = LN(z + MSA(z)); z = LN(x + MLP(x)): the block of the first Transformer (Vaswani et al., 2017)."""

    def forward(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), every token normalised."""
        skip = z if keep is None else z[:, keep]
        z = self.norm1(skip + self.drop_path1(self.ls1(self.attn(z, mask, keep))))
        return self.norm2(z + self.drop_path2(self.ls2(self.mlp(z))))

    def attention_rows(self, z: Tensor, queries: Tensor, mask: Tensor | None = None) -> Tensor:
        """Exact softmax rows for input z: (B, h, queries, N)."""
        return self.attn.rows(z, queries, mask)


# ---- blocks that add positions in every layer, and blocks that look at a second sequence ----

Residual = Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor]


def pre_norm(norm: nn.Module, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """f(LN(z)) + z."""
    return f(norm(z)) + z


def post_norm(norm: nn.Module, f: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """LN(z + f(z))."""
    return norm(z + f(z))


RESIDUALS: dict[str, Residual] = {"pre": pre_norm, "post": post_norm}


def add_positions(z: Tensor, p: Tensor | None) -> Tensor:
    """z + p, or z alone."""
    return z if p is None else z + p


class BlockCache:
    """What a block that writes token by token remembers: keys and values of its tokens, and those of the memory."""

    def __init__(self) -> None:
        self.own = GrowingKeys()
        self.memory = FixedKeys()


class PositionedBlock(nn.Module):
    """An encoder block that is told the positions anew: they are added to queries and keys, never to values.

    z' = z <- MSA(z + p, z + p, z); z = z' <- MLP(z'), where <- is the residual sum, norm first or norm last. Under a
    causal mask, and with a cache, it is the block of a language model.
    """

    def __init__(self, dim: int, attn: CrossAttention, mlp: MLP, eps: float, residual: Residual) -> None:
        super().__init__()
        self.residual = residual
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp

    def forward(
        self,
        z: Tensor,
        mask: Tensor | None = None,
        positions: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """(B, N, D) -> (B, N, D); with a cache, z are the new tokens, and the mask is for all."""

        def look(x: Tensor) -> Tensor:
            placed = add_positions(x, positions)
            return self.attn(placed, placed, x, mask, cache and cache.own)

        z = self.residual(self.norm1, look, z)
        return self.residual(self.norm2, self.mlp, z)


class DecoderBlock(nn.Module):
    """Tokens z look at each other, then at a memory m (an encoded image, say), and pass an MLP.

    z' = z <- MSA(z + p, z + p, z); z'' = z' <- MSA(z' + p, m + p_m, m); z = z'' <- MLP(z''), where <- is the residual
    sum, norm first or norm last. The positions p and p_m may be left out. Neighbouring rows of z may share a row
    of the memory, as the beams of one input do.
    """

    def __init__(
        self, dim: int, attn: CrossAttention, cross_attn: CrossAttention, mlp: MLP, eps: float, residual: Residual
    ) -> None:
        super().__init__()
        self.residual = residual
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.cross_attn = cross_attn
        self.norm3 = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp

    def forward(
        self,
        z: Tensor,
        memory: Tensor,
        mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        positions: Tensor | None = None,
        memory_positions: Tensor | None = None,
        cache: BlockCache | None = None,
    ) -> Tensor:
        """z (B, N, D), memory (B, M, D) -> (B, N, D). Masks broadcast to (B, h, N, N) and (B, h, N, M).

        With a cache, z are the new tokens, and the mask is one among all, (B, h, N, past + N).
        """
        placed_memory = add_positions(memory, memory_positions)

        def look(x: Tensor) -> Tensor:
            placed = add_positions(x, positions)
            return self.attn(placed, placed, x, mask, cache and cache.own)

        def look_at_memory(x: Tensor) -> Tensor:
            queries = add_positions(x, positions)
            queries = queries.reshape(
                memory.shape[0], -1, queries.shape[2]
            )  # the beams of an input: so many queries more
            seen = self.cross_attn(queries, placed_memory, memory, memory_mask, cache and cache.memory)
            return seen.reshape(x.shape)

        z = self.residual(self.norm1, look, z)
        z = self.residual(self.norm2, look_at_memory, z)
        return self.residual(self.norm3, self.mlp, z)

    def attention_rows(
        self, z: Tensor, memory: Tensor, mask: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Exact softmax rows for input z without positions: of its tokens (B, h, N, N) and of memory (B, h, N, M)."""
        rows = []

        def look(x: Tensor) -> Tensor:
            rows.append(self.attn.rows(x, x, mask))
            return self.attn(x, x, x, mask)

        def look_at_memory(x: Tensor) -> Tensor:
            rows.append(self.cross_attn.rows(x, memory, memory_mask))
            return x

        self.residual(self.norm2, look_at_memory, self.residual(self.norm1, look, z))
        return rows[0], rows[1]
