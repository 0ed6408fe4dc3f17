"""Any CNN before a ViT: its feature map cut into tokens (Dosovitskiy et al., 2021, section 3.1, hybrid architecture).

The published hybrids need no more than their name (`create_model("vit_base_r50_s16_224")`); this is for a network of
your own, trained or not, frozen or learning along.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitral.config import ViTConfig, pair
from vitral.errors import ConfigError
from vitral.models.vit import VisionTransformer
from vitral.nn.patches import HybridEmbed


def hybrid_vit(
    cnn: nn.Module,
    *,
    img_size: int | tuple[int, int] = ViTConfig.img_size,
    in_chans: int = ViTConfig.in_chans,
    cells: int = 1,
    frozen: bool = False,
    **options: Any,
) -> VisionTransformer:
    """A ViT on the map of `cnn`, a module from images (B, C, H, W) to one map (B, F, h, w), which keeps its weights.

    `cells` is the side of a token in cells of the map, `frozen` keeps the CNN from learning, and `options` are those of
    `ViTConfig`: `hybrid_vit(cnn, embed_dim=192, depth=6, num_heads=3, num_classes=10)`.
    """
    image = pair(img_size, "img_size")
    F, *cell = map_of(cnn, in_chans, image)
    patch = (cell[0] * cells, cell[1] * cells)
    config = ViTConfig.from_dict(
        options | {"img_size": image, "in_chans": in_chans, "patch_size": patch, "stem": "custom"}
    )
    stem = HybridEmbed(cnn, F, config.embed_dim, (cells, cells), config.patch_bias, frozen)
    return VisionTransformer(config, stem)


@torch.no_grad()
def map_of(cnn: nn.Module, in_chans: int, image: tuple[int, int]) -> tuple[int, int, int]:
    """Channels of a CNN's map, and height and width in pixels of one of its cells: told by an image of zeros."""
    modes = [(module, module.training) for module in cnn.modules()]
    like = next(cnn.parameters(), torch.zeros(()))
    try:
        found = cnn.eval()(torch.zeros(1, in_chans, *image, dtype=like.dtype, device=like.device))
    finally:
        for module, training in modes:
            module.training = training
    if not isinstance(found, Tensor) or found.ndim != 4:
        what = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ConfigError(
            f"the CNN of a hybrid must give one map (B, F, h, w), got {what}; leave its pool and head out."
        )
    _, F, rows, columns = found.shape
    if image[0] % rows or image[1] % columns:
        raise ConfigError(
            f"the CNN makes a map of {rows}x{columns} from an image of {image[0]}x{image[1]}; its sides must divide "
            f"those of the image: pad in the CNN, or choose another img_size."
        )
    return F, image[0] // rows, image[1] // columns
