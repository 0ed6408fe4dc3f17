"""What every model of images has that can be trained, probed, explained and built upon: ViT, Swin, and their kind.

B batch, C channels, H x W pixels, D width of what the head receives. `config` tells, besides its own options, `image`,
`in_chans`, `num_classes`, `pooled_dim`, and for each layer of `intermediate` `map_dims` and `map_strides`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from operator import index
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import BackboneConfig, Preprocess
from vitral.errors import InputError
from vitral.models.init import init_weights


class Backbone(nn.Module, ABC):
    """`model(x)` gives logits (B, classes) for images (B, C, H, W)."""

    config: BackboneConfig
    preprocess: Preprocess
    """What is done to an image before the model sees it."""
    labels: list[str] | None
    """Names of the classes, where they have any."""
    load_report: Any
    """How the weights came from a file; None where they did not."""
    head: nn.Module
    """From what `embed` gives to logits; nothing where there are no classes."""

    def describe(self, config: BackboneConfig) -> None:
        """Set what all have besides their layers."""
        self.config = config
        self.preprocess = Preprocess(img_size=config.img_size).for_channels(config.in_chans)
        self.labels = None
        self.load_report = None

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, tokens, D): the cells of the last map, row by row, after what comes before them."""

    @abstractmethod
    def forward_head(self, z: Tensor) -> Tensor:
        """Tokens of `forward_features` -> logits (B, classes)."""

    @abstractmethod
    def embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D), what the head receives."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, classes)."""

    @abstractmethod
    def grid_of(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the last map for images (B, C, H, W)."""

    @abstractmethod
    def intermediate(
        self, x: Tensor, layers: Sequence[int] | Literal["all"], as_grid: bool = True, norm: bool = True
    ) -> list[Tensor]:
        """Maps (B, map_dims[i], rows, columns) of chosen layers, or with `as_grid=False` their tokens."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Blocks that training may freeze one by one, and that the decay of rates counts."""

    @abstractmethod
    def layer_of(self, name: str) -> int:
        """Of a parameter: 0 before the blocks, 1..depth for the blocks, depth + 1 after them."""

    def init_weights(self, seed: int | None = None, zero_head: bool = False) -> None:
        """Fill every parameter anew, from `seed` or else from torch's own generator."""
        init_weights(self, seed, zero_head)

    def unused_without_pooling(self) -> list[nn.Module]:
        """Parts with weights that only the pooled vector goes through."""
        return []


def resolve_layers(layers: Sequence[int] | str, count: int, what: str) -> list[int]:
    """Turn numbers of stages or blocks, possibly negative, into 0..count-1."""
    if layers == "all":
        return list(range(count))
    try:
        numbers = [index(i) for i in layers]  # type: ignore[arg-type]
    except TypeError:
        numbers = []
    if not numbers or not all(-count <= i < count for i in numbers):
        raise InputError(
            f"layers must be 'all' or a list of {what} numbers from {-count} to {count - 1}, got {layers!r}."
        )
    return [i % count for i in numbers]


def backbone_of(model: nn.Module) -> nn.Module:
    """What reads the inputs: the model inside one that brings its own head, or else the model itself."""
    return getattr(model, "backbone", model)


def sum_at_finest(maps: Sequence[Tensor]) -> Tensor:
    """Maps (B, D, h_i, w_i), the finest first, -> their sum (B, D, h_0, w_0), the others enlarged.

    The last row or column of a coarse map may reach beyond the fine one, where a side was odd; what does is cut off.
    """
    h, w = maps[0].shape[2:]
    total = maps[0]
    for coarse in maps[1:]:
        if coarse.shape[2:] != (h, w):
            times = 1 << max(-(-h // coarse.shape[2]) - 1, -(-w // coarse.shape[3]) - 1).bit_length()
            coarse = F.interpolate(coarse, scale_factor=times, mode="bilinear", align_corners=False)[:, :, :h, :w]
        total = total + coarse
    return total
