"""The explanations that are compared, each from a model, images and classes to maps."""

from collections.abc import Callable

import torch
from torch import Tensor

from vitral.explanation import relevance
from vitral.explanation.attention import to_maps
from vitral.models.vit import VisionTransformer


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
    "rollout": relevance.attention_rollout,
    "attention of the last block": last_attention,
    "input gradients": relevance.input_gradients,
    "chance": chance,
}
