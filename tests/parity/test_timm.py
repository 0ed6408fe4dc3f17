"""The same numbers as timm, from the same state dict: our parameter names are timm's."""

import pytest
import torch

from helpers import difference, images, redraw
from peers import import_timm
from vitral.config import PositionResize, ViTConfig
from vitral.models.cost import model_cost
from vitral.models.zoo import MODELS, create_model

timm = import_timm()

# timm's own resize, where our family follows its authors instead.
TIMM_RESIZE = PositionResize(mode="bicubic", antialias=True)


def pair_of(name, timm_options=None, **options):
    """A redrawn timm model and ours with its weights."""
    theirs = redraw(timm.create_model(name, **(timm_options or {})), seed=1)
    ours = create_model(name, pos_resize=TIMM_RESIZE, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("size", [(224, 224), (160, 288)])
@torch.no_grad()
def test_vit_tiny(size):
    ours, theirs = pair_of("vit_tiny_patch16_224", {"dynamic_img_size": True})
    x = images(2, 3, *size)
    assert difference(ours(x), theirs(x)) <= 1e-5
    assert difference(ours.forward_features(x), theirs.forward_features(x)) <= 1e-5


@pytest.mark.parametrize("size", [(224, 224), (196, 266), (518, 518)])
@torch.no_grad()
def test_dinov2_with_registers(size):
    ours, theirs = pair_of("vit_small_patch14_reg4_dinov2", {"dynamic_img_size": True})
    x = images(1, 3, *size)
    assert difference(ours(x), theirs(x)) <= 1e-5
    assert difference(ours.forward_features(x), theirs.forward_features(x)) <= 1e-5


SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


@pytest.mark.parametrize(
    ("name", "ours_only"),
    [
        ("vit_base_patch32_224", {}),
        ("vit_small_patch8_224.dino", {}),
        ("vit_base_patch16_224.mae", {}),
        ("deit_small_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch14_dinov2", {"img_size": 224}),
        ("vit_giant_patch14_reg4_dinov2", {"img_size": 224}),
        ("vit_base_patch32_clip_224", {"num_classes": 13}),
        ("vit_base_patch32_clip_quickgelu_224", {"num_classes": 13}),
        ("vit_base_patch16_siglip_224", {"act": "gelu"}),  # timm runs these weights with the exact GELU
        ("vit_so400m_patch14_siglip_224", {"act": "gelu"}),
    ],
)
@torch.no_grad()
def test_every_family(name, ours_only):
    timm_options = {"num_classes": ours_only["num_classes"]} if "num_classes" in ours_only else {}
    if "img_size" in ours_only:
        timm_options["img_size"] = ours_only["img_size"]
    ours, theirs = pair_of(name, SMALL | timm_options, **SMALL, **ours_only)
    x = images(2, 3, 224, 224)
    assert difference(ours(x), theirs(x)) <= 1e-5
    assert difference(ours.embed(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True)) <= 1e-5


@torch.no_grad()
def test_intermediate_maps():
    ours, theirs = pair_of("vit_tiny_patch16_224", {"dynamic_img_size": True})
    x = images(2, 3, 96, 160)
    reference = theirs.forward_intermediates(x, indices=[2, 11], norm=True, intermediates_only=True)
    for a, b in zip(ours.intermediate(x, [2, 11]), reference, strict=True):
        assert difference(a, b) <= 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_every_name_that_timm_has_means_the_same_there(name):
    if not timm.is_model(name):
        assert MODELS[name].family == "small" or name.startswith("vit_so400m"), f"timm has no {name}"
        return
    spec = MODELS[name]
    with torch.device("meta"):
        theirs = timm.create_model(name, num_classes=spec.config.num_classes)
        ours = create_model(name)
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in ours.state_dict().items()} == shapes
    assert sum(p.numel() for p in theirs.parameters()) == model_cost(spec.config).params
    if isinstance(spec.config, ViTConfig):
        assert theirs.blocks[0].norm1.eps == spec.config.norm_eps
    if spec.family == "vit" and theirs.pretrained_cfg["tag"] in ("dino", "untrained"):
        return  # timm has no weights of this family under the name
    if spec.family == "clip":
        return  # timm's default weights of these are fine-tuned, some with another mean; test_zoo.py holds the settings
    for setting in ("mean", "std", "interpolation"):
        assert getattr(spec.preprocess, setting) == theirs.pretrained_cfg[setting], setting
