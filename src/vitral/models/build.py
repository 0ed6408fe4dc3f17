"""From a config to the backbone it describes: the one table of what there is."""

from vitral.config import BackboneConfig, ResNetConfig, SwinConfig, ViTConfig
from vitral.models.backbone import Backbone
from vitral.models.cnn import ResNet
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer

BACKBONES: dict[str, tuple[type[BackboneConfig], type[Backbone]]] = {
    "vit": (ViTConfig, VisionTransformer),
    "swin": (SwinConfig, SwinTransformer),
    "resnet": (ResNetConfig, ResNet),
}
"""A word for each kind: its options and its class."""


def build_backbone(config: BackboneConfig) -> Backbone:
    """The model that a config describes."""
    kind = next(kind for options, kind in BACKBONES.values() if options is type(config))
    return kind(config)  # type: ignore[call-arg]
