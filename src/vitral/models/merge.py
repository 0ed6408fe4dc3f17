"""A ViT whose blocks merge similar patches, on the weights of a plain one: fewer tokens, nearly the same answers.

The equations are those of `vit.py`; between Equations 2 and 3 of each block r tokens join others. Prefix tokens are
never merged. At the end every patch gets back what its token has, so that any pooling, and whoever looks inside, finds
a token for each patch: a mean over them is weighted by size.
"""

from collections import deque
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from vitral.config import Running, ViTConfig
from vitral.errors import InputError
from vitral.models.init import blank
from vitral.models.parts import EncoderBlock
from vitral.models.vit import VisionTransformer
from vitral.nn.blocks import RESIDUALS, Residual
from vitral.nn.merging import Groups, match, merge_groups, merge_schedule, size_bias, start_groups, unmerge


def merged(model: nn.Module, amount: float) -> "MergingViT":
    """The same weights in a model that merges tokens.

    `amount` from 1 is how many patches each block merges away, below 1 the share of all that is gone at the end.
    """
    if not isinstance(model, VisionTransformer):
        raise InputError(
            f"token merging is for a plain ViT that answers for the image as a whole; this model is a "
            f"{type(model).__name__}, which needs every token in its place. Leave merge out."
        )
    again = blank(lambda: MergingViT(model.config, amount))
    again._parameters.update(model._parameters)
    again._modules.update(model._modules)
    again.preprocess, again.labels, again.load_report = model.preprocess, model.labels, model.load_report
    again.training = model.training
    return again


class MergingViT(VisionTransformer):
    """A Vision Transformer in which tokens become fewer from block to block."""

    def __init__(self, config: ViTConfig, amount: float) -> None:
        super().__init__(config)
        self.amount = Running(merge=amount).merge

    def extra_repr(self) -> str:
        """What its config does not tell."""
        return f"merge={self.amount:g}"

    def schedule(self, patches: int) -> list[int]:
        """How many tokens each block merges away of images with so many patches."""
        return merge_schedule(self.amount, patches, self.config.depth)

    def forward_features(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> (B, R + N, D): every token after the final norm, patches of one token alike."""
        return self._spread_states(*self.embed_tokens(x, pad=pad, mask=mask))

    def embed(self, x: Tensor, *, pad: bool = False, mask: Tensor | None = None) -> Tensor:
        """(B, C, H, W) -> y (B, D), what the head receives; where it reads [CLS] alone, the last block merges none."""
        z, visible = self.patch_drop(*self.embed_tokens(x, pad=pad, mask=mask))
        reads, R = self.attn_pool.reads, self.prefix_tokens
        if reads is None or self.config.pool_layers > 1:
            return self.fc_norm(self.attn_pool(self._spread_states(z, visible), visible))
        *inner, last = self.blocks
        z, groups = _last(self._merging(z, visible, len(inner)))
        z = last(z, size_bias(groups.sizes, R), reads)
        return self.fc_norm(self.attn_pool(self.norm(z), visible))

    def _spread_states(self, z: Tensor, visible: Tensor | None) -> Tensor:
        """z_0 -> the last states after the final norm, side by side, with a token for each patch."""
        merging = deque(self._merging(z, visible), maxlen=self.config.pool_layers)
        return self.side_by_side([self._spread(z_l, groups) for z_l, groups in merging])

    def states(self, z: Tensor, attn_mask: Tensor | None = None) -> Iterator[Tensor]:
        """Yield z_0, z_1, ... z_L, with a token for each patch."""
        visible = None if attn_mask is None else attn_mask[:, 0, 0]
        for z_l, groups in self._merging(z, visible):
            yield self._spread(z_l, groups)

    @torch.no_grad()
    def merge_maps(self, x: Tensor) -> list[Tensor]:
        """After each block, the token that each patch is in: (B, N) whole numbers, for images (B, C, H, W)."""
        return [groups.place for _, groups in self._merging(*self.embed_tokens(x))][1:]

    def packed_features(self, images: object, *, pad: bool = False) -> list[Tensor]:
        """Refused: tokens of different images must not be merged."""
        raise InputError("images of several sizes cannot be packed while tokens are merged; leave merge out.")

    def _merging(self, z: Tensor, visible: Tensor | None, blocks: int | None = None) -> Iterator[tuple[Tensor, Groups]]:
        """Yield z_0 and how its tokens stand for patches, then the same after each of the first blocks."""
        R, residual = self.prefix_tokens, RESIDUALS[self.config.block]
        groups = start_groups(z[:, R:], None if visible is None else visible[:, R:])
        schedule = self.schedule(z.shape[1] - R)
        yield z, groups
        for block, r in zip(self.blocks[:blocks], schedule, strict=False):
            z, groups = merging_block(cast(EncoderBlock, block), residual, z, groups, r, R)
            yield z, groups

    def _spread(self, z: Tensor, groups: Groups) -> Tensor:
        """(B, R + N', D) -> (B, R + N, D)."""
        R = self.prefix_tokens
        return torch.cat([z[:, :R], unmerge(z[:, R:], groups.place)], dim=1)


def merging_block(
    block: EncoderBlock, residual: Residual, z: Tensor, groups: Groups, r: int, prefix: int
) -> tuple[Tensor, Groups]:
    """Equations 2 and 3 with r tokens merged away between them: (B, R + N', D) -> (B, R + N' - r, D).

    Likeness is that of the keys, averaged over the heads; A and B are every second token of all, [CLS] included.
    """
    keys: list[Tensor] = []

    def look(x: Tensor) -> Tensor:
        q, k, v = block.attn.heads(x)
        keys.append(k.mean(dim=1)[:, prefix:])  # (B, N', d)
        seen = block.attn.look(q, k, v, size_bias(groups.sizes, prefix))
        return block.drop_path1(block.ls1(block.attn.proj_drop(block.attn.proj(seen))))

    z = residual(block.norm1, look, z)  # Eq. 2
    if r:
        patches, groups = merge_groups(z[:, prefix:], groups, match(keys[0], r, first=prefix % 2))
        z = torch.cat([z[:, :prefix], patches], dim=1)  # (B, R + N' - r, D)
    return residual(block.norm2, lambda x: block.drop_path2(block.ls2(block.mlp(x))), z), groups  # Eq. 3


def _last(states: Iterator[tuple[Tensor, Groups]]) -> tuple[Tensor, Groups]:
    return deque(states, maxlen=1).pop()
