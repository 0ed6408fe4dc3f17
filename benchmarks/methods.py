"""The explanations that are compared, each from a model, images and classes to maps."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitral.explanation import relevance
from vitral.explanation.attention import Recorder, pool_row, to_maps
from vitral.explanation.rollout import rollout
from vitral.models.vit import VisionTransformer


def plain_rollout(model: VisionTransformer, x: Tensor, target: Tensor) -> Tensor:
    """Attention rollout, which knows no class."""
    with torch.no_grad(), Recorder() as record:
        relevance.from_tokens(model, model.embed_tokens(x)[0])
    blocks, start = pool_row(model, record.rows)
    return to_maps(model, rollout(blocks, start), model.grid_of(x))


def last_attention(model: VisionTransformer, x: Tensor, target: Tensor) -> Tensor:
    """Attention of [CLS] in the last block, mean of heads."""
    with torch.no_grad():
        return to_maps(model, model.attention(x)[0].mean(1)[:, 0], model.grid_of(x))


def chance(model: VisionTransformer, x: Tensor, target: Tensor) -> Tensor:
    """A map at random."""
    return torch.rand(len(x), *model.grid_of(x), generator=torch.Generator().manual_seed(0))


METHODS: dict[str, Callable[[VisionTransformer, Tensor, Tensor], Tensor]] = {
    "gradient x attention": relevance.attribution,
    "gradient rollout": relevance.gradient_rollout,
    "Grad-CAM": relevance.grad_cam,
    "integrated gradients": relevance.integrated_gradients,
    "occlusion": relevance.occlusion,
    "rollout": plain_rollout,
    "attention of the last block": last_attention,
    "input gradients": relevance.input_gradients,
    "chance": chance,
}
