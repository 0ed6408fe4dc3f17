"""One encoder block, norm first or norm last.

Both take tokens z (B, N, D) and a mask, and return (B, N, D), or only the tokens in `keep` (which is all that a head on
[CLS] needs of the last block). Knows nothing of images.
"""

from torch import Tensor, nn

from vitral.nn.attention import Attention
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
