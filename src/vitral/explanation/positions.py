"""What the position table has learned: which places it holds alike."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import InputError
from vitral.explanation.tokens import principal_colours
from vitral.models.vit import VisionTransformer


def check_positions(model: VisionTransformer) -> None:
    """Raise where there is nothing to show."""
    if model.config.positions == "none":
        raise InputError("this model has no positions: it sees a set of patches.")


def position_table(model: VisionTransformer) -> Tensor:
    """E_pos of the patches (N, D), for the model's own grid."""
    check_positions(model)
    with torch.no_grad():
        table = model.positions(model.config.grid, model.pos_embed, model.patch_embed.proj.weight)
    return table[0, model.prefix_tokens :].detach()


def position_similarity(model: VisionTransformer) -> Tensor:
    """Cosine of every position with every other: (N, G_h, G_w), the classic grid of grids."""
    table = F.normalize(position_table(model), dim=1)
    return (table @ table.T).unflatten(1, model.config.grid)


def position_colours(model: VisionTransformer) -> Tensor:
    """The three principal components of the table as red, green and blue: (3, G_h, G_w) in 0..1."""
    return principal_colours(position_table(model).T.unflatten(1, model.config.grid)[None])[0]
