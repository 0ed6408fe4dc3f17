"""The Swin Transformer of Liu et al., 2021 (arXiv:2103.14030): attention within windows, a pyramid of maps.

B batch, H x W rows and columns of a map, C its width, M side of a window (M_h x M_w where the map is smaller), s shift,
w windows, n = M_h M_w tokens in each, h heads, d = C / h. Maps are (B, H, W, C). The cost is linear in H W: a token
looks at n others, whatever the size of the image.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import SwinConfig
from vitral.models.backbone import Backbone, resolve_layers
from vitral.models.init import init_weights
from vitral.nn.mlp import MLP
from vitral.nn.patches import PatchEmbed, check_finite, check_images, pad_to_multiple
from vitral.nn.regularize import StochasticDepth, stochastic_depth_rates

# ---- windows ----


@dataclass(frozen=True)
class Windows:
    """How a map is cut into windows, all of one size.

    The cuts lie at multiples of M, or, shifted, at s and from there on at multiples of M (Figure 2 of the paper). The
    map is padded at the bottom and right to whole windows, then rolled by s, so that the pieces of windows at its edges
    share one (Figure 4). `mask` keeps those pieces apart, and everything from the padding.
    """

    size: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]

    @classmethod
    def of(cls, size: tuple[int, int], M: int, shifted: bool) -> "Windows":
        """Windows of M x M, shifted by half of that or not; an axis no longer than M is one window, not shifted."""
        window = min(M, size[0]), min(M, size[1])
        s = M // 2 if shifted else 0
        return cls(size, window, (s if size[0] > M else 0, s if size[1] > M else 0))

    def split(self, z: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, w, n, C), windows and the tokens in them row by row; padding is 0."""
        M_h, M_w = self.window
        z = _pad(z, self.window)
        if any(self.shift):
            z = z.roll((-self.shift[0], -self.shift[1]), dims=(1, 2))
        z = z.unflatten(2, (-1, M_w)).unflatten(1, (-1, M_h))  # B H/M M_h W/M M_w C
        return z.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def join(self, windows: Tensor) -> Tensor:
        """(B, w, n, C) -> (B, H, W, C), the inverse of `split`."""
        H, W = self.size
        rows = -(-H // self.window[0])
        z = windows.unflatten(2, self.window).unflatten(1, (rows, -1))  # B H/M W/M M_h M_w C
        z = z.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        if any(self.shift):
            z = z.roll(self.shift, dims=(1, 2))
        return z[:, :H, :W]

    def tokens(self, device: torch.device) -> Tensor:
        """Which token of the map, counted row by row, stands where in the windows: (w, n), -1 for padding."""
        H, W = self.size
        numbers = torch.arange(1, H * W + 1, device=device).view(1, H, W, 1)
        return self.split(numbers)[0, :, :, 0] - 1

    def mask(self, device: torch.device) -> Tensor | None:
        """Which tokens of a window may look at each other, (w, n, n); None for all.

        Those between the same cuts of the map as it was before it was rolled. Padding looks at padding alone, so that
        no row is empty.
        """
        if not any(self.shift) and all(side % M == 0 for side, M in zip(self.size, self.window, strict=True)):
            return None
        row, column = (
            (torch.arange(side, device=device) + M - s) // M
            for side, M, s in zip(self.size, self.window, self.shift, strict=True)
        )
        piece = 1 + row[:, None] * (self.size[1] + 1) + column  # (H, W): a number for each piece, none 0
        piece = self.split(piece[None, :, :, None])[0, :, :, 0]  # (w, n), 0 where there is padding
        return piece[:, :, None] == piece[:, None, :]


def _pad(z: Tensor, multiple: tuple[int, int]) -> Tensor:
    """Pad a map (B, H, W, C) with zeros at the bottom and right to whole multiples, if it is not so already."""
    below, right = -z.shape[1] % multiple[0], -z.shape[2] % multiple[1]
    return F.pad(z, (0, 0, 0, right, 0, below)) if below or right else z


# ---- parts ----


class WindowAttention(nn.Module):
    """W-MSA, or shifted SW-MSA. In each window, head_i = softmax(Q_i K_i^T / sqrt(d) + B_i) V_i.

    The bias B is learned: one number per head for each offset of a query from its key. On a map smaller than M only the
    offsets that occur there are used.
    """

    def __init__(
        self, dim: int, num_heads: int, M: int, shifted: bool, qkv_bias: bool, attn_drop: float, proj_drop: float
    ) -> None:
        super().__init__()
        self.num_heads, self.M, self.shifted = num_heads, M, shifted
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)  # [W_Q; W_K; W_V], the heads in order within each
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * M - 1) ** 2, num_heads))
        self.proj = nn.Linear(dim, dim)  # W_O
        self.attn_drop = attn_drop
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        windows = self.windows_of(z)
        q, k, v = self._heads(windows.split(z))  # (B, w, h, n, d) each
        B_ij = self.bias(windows).to(q.dtype)  # (1 or w, h, n, n)
        # Where each window has a bias of its own, windows take the place of heads: a batch then shares the biases.
        g = B_ij.shape[0] * self.num_heads
        dropout = self.attn_drop if self.training else 0.0
        heads = F.scaled_dot_product_attention(  # Eq. 4: softmax(Q K^T / sqrt(d) + B) V
            *(t.reshape(-1, g, *t.shape[3:]) for t in (q, k, v)), attn_mask=B_ij.flatten(0, 1)[None], dropout_p=dropout
        )
        heads = heads.reshape(q.shape).transpose(2, 3).flatten(3)  # (B, w, n, C)
        return self.proj_drop(self.proj(windows.join(heads)))

    def rows(self, z: Tensor) -> Tensor:
        """Exact softmax rows: (B, H, W, C) -> (B, w, h, n, n)."""
        windows = self.windows_of(z)
        q, k, _ = self._heads(windows.split(z))
        return (q @ k.mT * q.shape[-1] ** -0.5 + self.bias(windows).to(q.dtype)).softmax(dim=-1)

    def windows_of(self, z: Tensor) -> Windows:
        """How a map (B, H, W, C) is cut here."""
        return Windows.of((z.shape[1], z.shape[2]), self.M, self.shifted)

    def bias(self, windows: Windows) -> Tensor:
        """B of Eq. 4 (1, h, n, n), or (w, h, n, n) with minus infinity where the mask forbids to look."""
        M, table = self.M, self.relative_position_bias_table
        y, x = (torch.arange(side, device=table.device) for side in windows.window)
        dy, dx = y[:, None] - y + M - 1, x[:, None] - x + M - 1  # query less key, from 0
        B_ij = table.view(2 * M - 1, 2 * M - 1, -1)[dy[:, None, :, None], dx[:, None, :]]  # (M_h, M_w, M_h, M_w, h)
        B_ij = B_ij.flatten(2, 3).flatten(0, 1).permute(2, 0, 1)[None]  # (1, h, n, n)
        mask = windows.mask(table.device)
        return B_ij if mask is None else B_ij.masked_fill(~mask[:, None], float("-inf"))

    def _heads(self, windows: Tensor) -> Tensor:
        """(B, w, n, C) -> q, k and v (3, B, w, h, n, d)."""
        return self.qkv(windows).unflatten(3, (3, self.num_heads, -1)).permute(3, 0, 1, 4, 2, 5)


class SwinBlock(nn.Module):
    """z' = W-MSA(LN(z)) + z; z = MLP(LN(z')) + z', where every second block of a stage has SW-MSA."""

    def __init__(self, dim: int, attn: WindowAttention, mlp: MLP, eps: float, drop_path: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=eps)
        self.mlp = mlp
        self.drop_path1 = StochasticDepth(drop_path)
        self.drop_path2 = StochasticDepth(drop_path)

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C)."""
        z = self.drop_path1(self.attn(self.norm1(z))) + z  # Eq. 3, its first and third line
        return self.drop_path2(self.mlp(self.norm2(z))) + z  # Eq. 3, its second and fourth line

    def attention_rows(self, z: Tensor) -> Tensor:
        """Exact softmax rows for input z: (B, w, h, n, n)."""
        return self.attn.rows(self.norm1(z))


class PatchMerging(nn.Module):
    """LN([z_00; z_10; z_01; z_11]) W: of each 2 x 2 tokens one, twice as wide. A side that is odd gets zeros."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, eps=eps)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H / 2, W / 2, 2C), halves rounded up."""
        z = _pad(z, (2, 2))
        z = torch.cat([z[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], dim=-1)  # column by column, as published
        return self.reduction(self.norm(z))


class SwinStage(nn.Module):
    """Patch merging, in every stage but the first, then blocks at one resolution."""

    def __init__(self, downsample: nn.Module, blocks: list[SwinBlock]) -> None:
        super().__init__()
        self.downsample = downsample
        self.blocks = nn.ModuleList(blocks)

    def forward(self, z: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H, W, C), or to a map of half the side and twice the width."""
        z = self.downsample(z)
        for block in self.blocks:
            z = block(z)
        return z


class NormedPatchEmbed(PatchEmbed):
    """LN(x_p E + b)."""

    def __init__(self, in_chans: int, embed_dim: int, patch_size: tuple[int, int], eps: float) -> None:
        super().__init__(in_chans, embed_dim, patch_size, bias=True)
        self.norm = nn.LayerNorm(embed_dim, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        return self.norm(super().forward(x))


# ---- the model ----


class SwinTransformer(Backbone):
    """`model(x)` gives logits (B, classes) for images (B, channels, height, width) of any size.

    Images are padded with zeros at the bottom and right to whole patches, maps to whole windows. What pads a map is
    never looked at (implementations that do not mask it give other numbers there, and the same where windows divide).
    """

    config: SwinConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.describe(config)
        c = config

        self.patch_embed = NormedPatchEmbed(c.in_chans, c.embed_dim, c.patch, c.norm_eps)
        self.layers = make_stages(c)
        self.norm = nn.LayerNorm(c.pooled_dim, eps=c.norm_eps)
        self.head_drop = nn.Dropout(c.drop_rate)
        fc = nn.Linear(c.pooled_dim, c.num_classes) if c.num_classes else nn.Identity()
        self.head = nn.Sequential(OrderedDict(fc=fc))  # `head.fc`, as published files name it
        self.init_weights()

    def embed_patches(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) -> z_0 (B, H, W, C), the map that the first stage receives."""
        check_images(x, self.config.in_chans, self.patch_embed.proj.weight.dtype)
        check_finite(x)
        x = pad_to_multiple(x, self.config.patch)
        grid = x.shape[2] // self.config.patch[0], x.shape[3] // self.config.patch[1]
        return self.patch_embed(x).unflatten(1, grid)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, N, C): the tokens of the last map, row by row, after the final norm."""
        z = self.embed_patches(x)
        for stage in self.layers:
            z = stage(z)  # patch merging, then Eq. 3 over and over
        return self.norm(z).flatten(1, 2)

    def forward_head(self, z: Tensor) -> Tensor:
        """Tokens of `forward_features` (B, N, C) -> logits (B, classes)."""
        return self.head(self.head_drop(z.mean(dim=1)))

    def embed(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) -> (B, C), what the head receives: the mean of the last map."""
        return self.forward_features(x).mean(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, height, width) -> logits (B, classes)."""
        return self.forward_head(self.forward_features(x))

    # ---- what is built upon it ----

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return self.config.depth

    def layer_of(self, name: str) -> int:
        """Of a parameter: 0 before the blocks, 1..depth through all stages, depth + 1 after.

        Merging counts with the first block after it.
        """
        if found := re.match(r"layers\.(\d+)\.(?:blocks\.(\d+)|downsample)\.", name):
            return sum(self.config.depths[: int(found[1])]) + int(found[2] or 0) + 1
        return 0 if name.startswith("patch_embed") else self.depth + 1

    def init_weights(self, seed: int | None = None, zero_head: bool = False) -> None:
        """Fill every parameter anew, from `seed` or else from torch's own generator."""
        init_swin(self, seed, zero_head)

    # ---- looking inside ----

    def grid_of(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the last map, that of `forward_features`, for images (B, channels, height, width)."""
        cell = [side << (self.config.stages - 1) for side in self.config.patch]
        return -(-x.shape[-2] // cell[0]), -(-x.shape[-1] // cell[1])

    def intermediate(
        self, x: Tensor, layers: Sequence[int] | Literal["all"] = "all", as_grid: bool = True, norm: bool = True
    ) -> list[Tensor]:
        """The pyramid: maps (B, C_i, H_i, W_i) of chosen stages, or with `as_grid=False` their tokens (B, N_i, C_i).

        `layers` counts stages from 0, or from the end below 0. `norm` applies the final norm to the last stage, the
        only one that it fits.
        """
        wanted = resolve_layers(layers, self.config.stages, "stage")
        z, found = self.embed_patches(x), {}
        for number, stage in enumerate(self.layers):
            z = stage(z)
            if number in wanted:
                found[number] = self.norm(z) if norm and number == self.config.stages - 1 else z
            if number == max(wanted):
                break
        return [found[i].movedim(-1, 1) if as_grid else found[i].flatten(1, 2) for i in wanted]

    def attention(self, x: Tensor, layers: Sequence[int] | Literal["all"] = (-1,)) -> list[Tensor]:
        """Exact softmax rows of chosen blocks, one (B, w, h, n, n) per layer, whatever kernel `forward` uses.

        `layers` counts blocks from 0 through all stages, or from the end below 0. `window_tokens` says which token is
        which; the rows of padding, which looks at itself, mean nothing.
        """
        wanted = resolve_layers(layers, self.config.depth, "block")
        rows = {}
        for number, (block, z) in enumerate(self.block_inputs(x)):
            if number in wanted:
                rows[number] = block.attention_rows(z)
            if number == max(wanted):
                break
        return [rows[i] for i in wanted]

    def window_tokens(self, x: Tensor, layers: Sequence[int] | Literal["all"] = (-1,)) -> list[Tensor]:
        """Where the rows and keys of `attention` lie: numbers of tokens (w, n), counted row by row, -1 for padding."""
        wanted = resolve_layers(layers, self.config.depth, "block")
        size = -(-x.shape[-2] // self.config.patch[0]), -(-x.shape[-1] // self.config.patch[1])
        cuts = []
        for stage in self.layers:
            size = (-(-size[0] // 2), -(-size[1] // 2)) if cuts else size
            attns = [cast(SwinBlock, block).attn for block in cast(SwinStage, stage).blocks]
            cuts += [Windows.of(size, attn.M, attn.shifted) for attn in attns]
        return [cuts[i].tokens(x.device) for i in wanted]

    def block_inputs(self, x: Tensor) -> Iterator[tuple[SwinBlock, Tensor]]:
        """Yield each block with the map that it receives, computed when it is asked for."""
        z = self.embed_patches(x)
        for module in self.layers:
            stage = cast(SwinStage, module)
            z = stage.downsample(z)
            for block in stage.blocks:
                yield cast(SwinBlock, block), z
                z = block(z)


def make_stages(c: SwinConfig) -> nn.ModuleList:
    """The stages; every second block shifts its windows, and stochastic depth rises from the first to the last."""
    rates = iter(stochastic_depth_rates(c.drop_path_rate, c.depth))
    stages = []
    for i, (C, h, M, depth) in enumerate(zip(c.dims, c.num_heads, c.windows, c.depths, strict=True)):
        width = int(C * c.mlp_ratio)
        blocks = [
            SwinBlock(
                C,
                WindowAttention(C, h, M, bool(j % 2), c.qkv_bias, c.attn_drop_rate, c.proj_drop_rate),
                MLP(C, width, width, C, c.act, c.proj_drop_rate),
                c.norm_eps,
                next(rates),
            )
            for j in range(depth)
        ]
        stages.append(SwinStage(PatchMerging(C // 2, c.norm_eps) if i else nn.Identity(), blocks))
    return nn.ModuleList(stages)


def init_swin(model: SwinTransformer, seed: int | None = None, zero_head: bool = False) -> None:
    """Fill every parameter anew, as `init_weights` does a ViT's; the tables of the biases: truncated normal of 0.02."""
    init_weights(model, seed, zero_head)
    device = model.norm.weight.device
    if device.type == "meta":  # shapes without numbers
        return
    generator = (
        None if seed is None else torch.Generator(device).manual_seed(seed + 1)
    )  # not the linear layers' numbers
    for module in model.modules():
        if isinstance(module, WindowAttention):
            nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02, generator=generator)
