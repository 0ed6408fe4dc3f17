"""The Vision Transformer, Equations 1-4 of Dosovitskiy et al., 2021 (arXiv:2010.11929), in order.

B batch, C channels, H x W pixels, P patch, G_h x G_w grid, N = G_h G_w patches, R prefix tokens, D width, h heads.
The parts come from `vitral.nn`, chosen by the config; no option is tested in `forward`.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from vitral.config import ViTConfig
from vitral.errors import InputError
from vitral.models import parts
from vitral.models.backbone import Backbone, resolve_layers
from vitral.models.init import init_weights
from vitral.nn.attention import key_mask
from vitral.nn.packing import pack, unpack
from vitral.nn.patches import check_divisible, check_finite, check_images, pad_to_multiple
from vitral.nn.regularize import PatchDropout


class VisionTransformer(Backbone):
    """`model(x)` gives logits (B, classes) for images (B, C, H, W) of any size that the patch divides.

    Two keywords go with every method that takes a batch of images. `pad=True` pads the bottom and right with zeros to
    the next multiple of the patch. `mask` (B, H, W) is True on the pixels that count: the others are set to zero, and
    a patch with no pixel that counts is hidden from attention and pooling.

    `stem`, with a config whose stem is `custom`, is a module of your own in the place of E: images to tokens (B, N, D),
    its last layer called `proj` (`vitral.models.hybrid`). It comes with its weights and keeps them.
    """

    config: ViTConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: ViTConfig, stem: nn.Module | None = None) -> None:
        super().__init__()
        self.describe(config)
        c, D = config, config.embed_dim

        self.patch_embed: Any = parts.STEMS[c.stem](c) if stem is None else parts.check_stem(c, stem)  # E
        self.cls_token = nn.Parameter(torch.zeros(1, 1, D)) if c.class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, c.reg_tokens, D)) if c.reg_tokens else None
        learned = c.positions == "learned"
        self.pos_embed = nn.Parameter(torch.zeros(1, c.pos_rows + c.grid[0] * c.grid[1], D)) if learned else None
        self.positions = parts.POSITIONS[c.positions](c)
        self.pos_drop = nn.Dropout(c.pos_drop_rate)
        self.patch_drop = PatchDropout(c.patch_drop_rate, c.prefix_tokens)
        self.norm_pre = parts.make_norm(c, D, c.pre_norm)
        self.blocks = parts.make_blocks(c)
        self.norm = parts.make_norm(c, D, not c.norm_after_pool)
        # Published files keep the weights of attention pooling under this name; the other pools have none.
        self.attn_pool = parts.POOLS[c.global_pool](c)
        self.fc_norm = parts.make_norm(c, c.pooled_dim, c.norm_after_pool)
        self.head_drop = nn.Dropout(c.drop_rate)
        self.head = parts.HEADS[c.head](c) if c.num_classes else nn.Identity()
        init_weights(self, keep=stem)

    # ---- the equations ----

    def embed_tokens(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(B, C, H, W) -> z_0 (B, R + N, D), and which of its tokens are visible (B, R + N), None for all."""
        x, visible = self._prepare(x, pad, mask)
        x_pE = self.patch_embed(x)  # (B, N, D)
        E_pos = self.positions(self.grid_of(x), self.pos_embed, self.patch_embed.proj.weight)  # (1, R + N, D)
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        z = torch.cat([*prefix, x_pE], dim=1) + E_pos  # Eq. 1: z_0 = [x_class; x_p E] + E_pos
        return self.norm_pre(self.pos_drop(z)), visible

    def forward_features(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, R + N, D): every token after the final norm, or `side_by_side` of several blocks."""
        z, visible = self.embed_tokens(x, pad=pad, mask=mask)
        return self.run_blocks(z, key_mask(visible))

    def run_blocks(self, z: Tensor, attn_mask: Tensor | None = None, reads: slice | None = None) -> Tensor:
        """z_0 (B, R + N, D) -> LN(z_L) of the same shape, or the last `pool_layers` states side by side.

        With `reads`, the last block computes only these tokens, whose queries still see the keys and values of all.
        """
        *inner, last = self.blocks
        first, states = self.depth - self.config.pool_layers, []
        for layer, block in enumerate(inner):
            z = block(z, attn_mask)  # Eqs. 2-3
            if layer >= first:
                states.append(z)
        return self.side_by_side([*states, last(z, attn_mask, reads)])

    def side_by_side(self, states: Sequence[Tensor]) -> Tensor:
        """..., z_L -> LN(z_L) (B, R + N, D), or with `pool_layers` k the last k states (B, R + N, k D)."""
        normal = [self.norm(z) for z in states[-self.config.pool_layers :]]  # Eq. 4: LN(z_L)
        return normal[0] if len(normal) == 1 else torch.cat(normal, dim=-1)

    def forward_head(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """Tokens of `forward_features` (B, R + N, D) -> logits (B, classes).

        If they were computed with a mask, pass `visible_tokens` of the same images, so that pooling knows it too.
        """
        y = self.fc_norm(self.attn_pool(z, visible))  # Eq. 4: y = LN(z_L^0)
        return self.head(self.head_drop(y))  # logits = W_head y + b_head

    def embed(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> y (B, D), what the head receives.

        The same numbers as by way of `forward_features`, with less work where pooling reads only [CLS]: the last block
        then answers for that token alone, whose query still sees the keys and values of all. In training some patches
        may be left out.
        """
        z, visible = self.patch_drop(*self.embed_tokens(x, pad=pad, mask=mask))
        reads = self.attn_pool.reads if self.config.pool_layers == 1 else None
        z = self.run_blocks(z, key_mask(visible), reads)
        return self.fc_norm(self.attn_pool(z, visible))

    def forward(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> logits (B, classes)."""
        return self.head(self.head_drop(self.embed(x, pad=pad, mask=mask)))

    # ---- what is built upon it ----

    @property
    def depth(self) -> int:
        """L."""
        return self.config.depth

    def layer_of(self, name: str) -> int:
        """Of a parameter: 0 before the blocks, 1..L for the blocks, L + 1 after them."""
        if block := re.match(r"blocks\.(\d+)\.", name):
            return int(block[1]) + 1
        before = ("patch_embed", "cls_token", "reg_token", "pos_embed", "norm_pre")
        return 0 if name.startswith(before) else self.depth + 1

    def unused_without_pooling(self) -> list[nn.Module]:
        """Attention pooling, and the norm after a pool."""
        return [self.attn_pool, self.fc_norm]

    # ---- looking inside ----

    def states(self, z: Tensor, attn_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Yield z_0, z_1, ... z_L, each computed when it is asked for."""
        yield z
        for block in self.blocks:
            z = block(z, attn_mask)
            yield z

    @property
    def prefix_tokens(self) -> int:
        """R, the number of tokens before the patches: [CLS] and the registers."""
        return self.config.prefix_tokens

    def grid_of(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of patches of images (B, C, H, W), the padded ones included."""
        return -(-x.shape[-2] // self.config.patch[0]), -(-x.shape[-1] // self.config.patch[1])

    def intermediate(
        self,
        x: Tensor,
        layers: Sequence[int] | Literal["all"],
        as_grid: bool = True,
        norm: bool = True,
        *,
        pad: bool = False,
        mask: Tensor | None = None,
    ) -> list[Tensor]:
        """Outputs of chosen blocks: maps (B, D, G_h, G_w), or with `as_grid=False` all tokens (B, R + N, D).

        `layers` counts blocks from 0, or from the end below 0; `norm` applies the final norm to each.
        """
        wanted = resolve_layers(layers, self.config.depth, "block")
        z, visible = self.embed_tokens(x, pad=pad, mask=mask)
        found = {}
        for layer, z_l in enumerate(self.states(z, key_mask(visible)), start=-1):
            if layer in wanted:
                found[layer] = self.norm(z_l) if norm else z_l
            if layer == max(wanted):
                break
        if as_grid:
            grid = self.grid_of(x)
            found = {i: t[:, self.prefix_tokens :].mT.unflatten(2, grid) for i, t in found.items()}
        return [found[i] for i in wanted]

    def attention(
        self,
        x: Tensor,
        layers: Sequence[int] | Literal["all"] = (-1,),
        queries: Literal["cls", "all"] | Sequence[int] | Tensor = "cls",
        *,
        pad: bool = False,
        mask: Tensor | None = None,
    ) -> list[Tensor]:
        """Exact softmax rows of chosen blocks, one (B, h, queries, R + N) per layer.

        Only the rows asked for are ever made, whatever kernel `forward` uses. `queries` is "cls", "all", or indices of
        tokens in the order [CLS], registers, patches row by row.
        """
        wanted = resolve_layers(layers, self.config.depth, "block")
        z, visible = self.embed_tokens(x, pad=pad, mask=mask)
        attn_mask, rows = key_mask(visible), {}
        tokens = self._resolve_queries(queries, z)
        for layer, (block, z_l) in enumerate(zip(self.blocks, self.states(z, attn_mask), strict=False)):
            if layer in wanted:
                rows[layer] = cast(parts.EncoderBlock, block).attention_rows(z_l, tokens, attn_mask)
            if layer == max(wanted):
                break
        return [rows[i] for i in wanted]

    # ---- images of different sizes at once ----

    def packed_features(self, images: Sequence[Tensor], *, pad: bool = False) -> list[Tensor]:
        """Images (C, H_i, W_i) -> tokens (1, R + N_i, D) after the final norm, each as the image has alone.

        (In training, stochastic depth drops the images that share a packed row together.)
        """
        images = list(images)
        if not images:
            raise InputError("images must not be an empty list; give at least one (C, H, W) tensor.")
        tokens = []
        for i, image in enumerate(images):
            if not isinstance(image, Tensor) or image.ndim != 3:
                what = tuple(image.shape) if isinstance(image, Tensor) else type(image).__name__
                raise InputError(f"images must be a list of (C, H, W) tensors, got {what} as number {i}.")
            try:
                tokens.append(self.embed_tokens(image[None], pad=pad)[0])
            except InputError as error:
                raise InputError(f"image number {i}: {error}") from None
        z, attn_mask, places = pack(tokens)
        return unpack(self.run_blocks(z, attn_mask), places)

    def forward_packed(self, images: Sequence[Tensor], *, pad: bool = False) -> Tensor:
        """Images (C, H_i, W_i) of different sizes -> logits (B, classes), each as the image has alone."""
        return torch.cat([self.forward_head(z) for z in self.packed_features(images, pad=pad)])

    def visible_tokens(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> Tensor | None:
        """Which tokens (B, R + N) of the images a mask leaves visible; None for all."""
        return self._prepare(x, pad, mask)[1]

    # ---- checks ----

    def _prepare(self, x: Tensor, pad: bool, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Check, pad and mask images; say which tokens (B, R + N) are visible, None for all."""
        check_images(x, self.config.in_chans, self.patch_embed.proj.weight.dtype)
        patch = self.config.patch
        if mask is not None:
            if not isinstance(mask, Tensor):
                raise InputError(f"mask must be a boolean tensor (B, H, W), got {type(mask).__name__}.")
            if mask.dtype != torch.bool or mask.shape != (x.shape[0], *x.shape[2:]):
                raise InputError(
                    f"mask must be boolean (B, H, W) = {(x.shape[0], *x.shape[2:])}, "
                    f"got {mask.dtype} {tuple(mask.shape)}."
                )
            x = x.masked_fill(~mask[:, None], 0)
        if pad:  # less than a patch on each side, so padding alone never fills a patch
            x = pad_to_multiple(x, patch)
        check_finite(x)
        check_divisible((x.shape[2], x.shape[3]), patch, remedy="resize the image, or pass pad=True to pad it")
        if mask is None:
            return x, None
        cells = pad_to_multiple(mask, patch).unflatten(2, (-1, patch[1])).unflatten(1, (-1, patch[0]))
        patches = cells.any(dim=4).any(dim=2).flatten(1)  # (B, N)
        if not torch.compiler.is_compiling() and not patches.any(dim=1).all():
            raise InputError("mask hides a whole image; leave at least one pixel of each that counts.")
        return x, torch.cat([patches.new_ones(x.shape[0], self.prefix_tokens), patches], dim=1)

    def _resolve_queries(self, queries: str | Sequence[int] | Tensor, z: Tensor) -> Tensor:
        """Turn "cls", "all" or token indices into a tensor of indices."""
        n = z.shape[1]
        if isinstance(queries, str):
            if queries == "cls" and self.cls_token is None:
                raise InputError('queries="cls" needs a [CLS] token, which this model has not; use "all" or indices.')
            if queries not in ("cls", "all"):
                raise InputError(f'queries must be "cls", "all" or token indices, got {queries!r}.')
            return torch.arange(n if queries == "all" else 1, device=z.device)
        try:
            tokens = torch.as_tensor(queries, device=z.device)
        except (TypeError, ValueError, RuntimeError):
            tokens = torch.empty(0, 0)
        if tokens.ndim != 1 or tokens.is_floating_point() or not ((tokens >= -n) & (tokens < n)).all():
            raise InputError(f"queries must be token indices from {-n} to {n - 1}, got {queries!r}.")
        return tokens
