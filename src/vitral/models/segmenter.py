"""A class for every pixel, from the maps of a backbone: those of a ViT's blocks, or a pyramid.

B batch, K classes, G_h x G_w grid, D width. Every head gives logits on some grid; they are enlarged to the image last.
"""

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import Preprocess, SegmenterConfig, ViTConfig
from vitral.models import parts
from vitral.models.backbone import Backbone, sum_at_finest
from vitral.models.build import build_backbone
from vitral.models.init import init_weights


class LinearHead(nn.Module):
    """One linear layer on each cell of the last map."""

    def __init__(self, c: SegmenterConfig) -> None:
        super().__init__()
        self.layers = [len(c.backbone.map_dims) - 1]
        self.classify = nn.Conv2d(c.backbone.map_dims[-1], c.num_classes, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """(B, D, G_h, G_w) -> (B, K, G_h, G_w)."""
        return self.classify(maps[-1])


class ConvHead(nn.Module):
    """Several layers brought together at the finest, then doubled in size step by step until a cell is a pixel."""

    def __init__(self, c: SegmenterConfig) -> None:
        super().__init__()
        dims, W = c.backbone.map_dims, c.width
        L = len(dims)
        count = min(c.layers, L)
        self.layers = [round((i + 1) * L / count) - 1 for i in range(count)]
        self.gather = nn.ModuleList(nn.Conv2d(dims[i], W, 1) for i in self.layers)
        self.join = _conv(W, W)
        doublings = round(math.log2(min(c.backbone.map_strides[self.layers[0]])))
        widths = [max(W >> i, 16) for i in range(doublings + 1)]
        self.grow = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(a, b, 2, 2), _conv(b, b)) for a, b in pairwise(widths)
        )
        self.classify = nn.Conv2d(widths[-1], c.num_classes, 1)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps (B, D, G_h, G_w) -> (B, K, h, w), h and w up to the image's."""
        y = self.join(sum_at_finest([gather(m) for gather, m in zip(self.gather, maps, strict=True)]))
        for grow in self.grow:
            y = grow(y)
        return self.classify(y)


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.GroupNorm(math.gcd(8, outputs), outputs), nn.GELU()
    )


class MaskHead(nn.Module):
    """Segmenter (Strudel et al., 2021): a token for each class meets the patches in two blocks; masks are products."""

    def __init__(self, c: SegmenterConfig) -> None:
        super().__init__()
        assert isinstance(c.backbone, ViTConfig)
        D = c.backbone.embed_dim
        self.layers = [c.backbone.depth - 1]
        self.cls_token = nn.Parameter(torch.zeros(1, c.num_classes, D))
        self.blocks = parts.make_blocks(replace(c.backbone, depth=2))
        self.norm = nn.LayerNorm(D, eps=c.backbone.norm_eps)
        self.patch_proj, self.class_proj = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.mask_norm = nn.LayerNorm(c.num_classes)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """(B, D, G_h, G_w) -> (B, K, G_h, G_w)."""
        B, _, G_h, G_w = maps[-1].shape
        K = self.cls_token.shape[1]
        z = torch.cat([self.cls_token.expand(B, -1, -1), maps[-1].flatten(2).mT], dim=1)
        for block in self.blocks:
            z = block(z)
        z = self.norm(z)
        classes, patches = self.class_proj(z[:, :K]), self.patch_proj(z[:, K:])
        masks = F.normalize(patches, dim=-1) @ F.normalize(classes, dim=-1).mT  # (B, N, K)
        return self.mask_norm(masks).mT.unflatten(2, (G_h, G_w))


HEADS = {"linear": LinearHead, "conv": ConvHead, "mask": MaskHead}


class Segmenter(nn.Module):
    """`model(x)` gives logits (B, K, H, W) for images (B, C, H, W) of any size that the backbone takes."""

    def __init__(self, config: SegmenterConfig, backbone: Backbone | None = None) -> None:
        super().__init__()
        self.config = config
        p = Preprocess(img_size=config.backbone.img_size, crop_mode="pad")  # all of an image has classes
        self.preprocess = p.for_channels(config.backbone.in_chans)
        self.labels: list[str] | None = None
        self.load_report: Any = None
        self.head = HEADS[config.head](config)
        init_weights(self.head)
        self.backbone = backbone or build_backbone(config.backbone)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, K, H, W)."""
        maps = self.backbone.intermediate(x, self.head.layers)
        # What the cells cover: the image, and what pads it to whole cells.
        strides = self.config.backbone.map_strides[self.head.layers[0]]
        size = tuple(cells * stride for cells, stride in zip(maps[0].shape[2:], strides, strict=True))
        logits = F.interpolate(self.head(maps), size=size, mode="bilinear", align_corners=False)
        return logits[:, :, : x.shape[2], : x.shape[3]]
