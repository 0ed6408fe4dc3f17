"""Every named model: one table of sizes, one of families, one of names. Names are timm's where timm has one.

A family is the settings that its published weights were trained with; they cost accuracy when they are wrong.
Reading the tables does not import torch.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, get_args

from vitral.config import (
    BackboneConfig,
    PositionResize,
    Preprocess,
    ResNetConfig,
    ResNetKind,
    SwinConfig,
    ViTConfig,
)
from vitral.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from vitral.models.backbone import Backbone

# name: (D, L, h, MLP ratio)
SIZES: dict[str, tuple[int, int, int, float]] = {
    "nano": (64, 4, 4, 2),
    "pico": (128, 3, 4, 2),
    "micro": (128, 6, 4, 2),
    "lite": (256, 7, 4, 2),
    "tiny": (192, 12, 3, 4),
    "small": (384, 12, 6, 4),
    "medium": (512, 12, 8, 4),
    "base": (768, 12, 12, 4),
    "large": (1024, 24, 16, 4),
    "so400m": (1152, 27, 16, 3.7362),
    "huge": (1280, 32, 16, 4),
    "giant": (1408, 40, 16, 48 / 11),
    "gigantic": (1664, 48, 16, 64 / 13),
}
# name: (C, blocks and h of each stage, MLP ratio)
SWIN_SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], float]] = {
    "micro": (32, (2, 2, 4), (2, 4, 8), 2),
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24), 4),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24), 4),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32), 4),
    "large": (192, (2, 2, 18, 2), (6, 12, 24, 48), 4),
}


@dataclass(frozen=True)
class Family:
    """Settings that models of one origin share, as options of their config and of `Preprocess`."""

    about: str
    model: dict[str, Any] = field(default_factory=dict)
    preprocess: dict[str, Any] = field(default_factory=dict)


_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_CLIP = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
    "crop_pct": 1.0,
}
_BICUBIC = PositionResize(antialias=False)
_BICUBIC_SHIFTED = PositionResize(antialias=False, offset=0.1)
_DINOV2 = {"init_values": 1e-5, "num_classes": 0}

FAMILIES: dict[str, Family] = {
    "vit": Family("the plain ViT, with timm's settings", {}, _HALF),
    "augreg": Family("ViT of the AugReg paper, as timm runs its weights", {}, _HALF),
    "deit": Family("DeiT", {"pos_resize": _BICUBIC}, {"crop_pct": 0.875}),
    "deit3": Family(
        "DeiT III: LayerScale, no position for [CLS]",
        {"pos_prefix": False, "init_values": 1e-6, "pos_resize": _BICUBIC},
        {"crop_pct": 0.875},
    ),
    "dino": Family("DINO backbone", {"num_classes": 0, "pos_resize": _BICUBIC_SHIFTED}, {"crop_pct": 0.875}),
    "dinov2": Family("DINOv2 backbone", {**_DINOV2, "pos_resize": _BICUBIC_SHIFTED}, {"crop_pct": 0.875}),
    "dinov2_reg": Family(
        "DINOv2 backbone with four registers",
        {**_DINOV2, "reg_tokens": 4, "pos_prefix": False},
        {"crop_pct": 0.875},
    ),
    "mae": Family("MAE encoder", {"num_classes": 0, "pos_resize": _BICUBIC}, {"crop_pct": 0.875}),
    "clip": Family(
        "CLIP image tower, exact GELU (most open_clip weights)",
        {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5},
        _CLIP,
    ),
    "clip_quickgelu": Family(
        "CLIP image tower, QuickGELU (OpenAI's weights)",
        {"pre_norm": True, "patch_bias": False, "norm_eps": 1e-5, "act": "quick_gelu"},
        _CLIP,
    ),
    "siglip": Family(
        "SigLIP image tower: no [CLS], attention pooling",
        {
            "class_token": False,
            "global_pool": "map",
            "num_classes": 0,
            "act": "gelu_tanh",
            "pos_resize": PositionResize(mode="bilinear_corners", antialias=False),
        },
        {**_HALF, "crop_mode": "squash"},
    ),
    "swin": Family("Swin: attention in windows, a pyramid of maps"),
    "small": Family("for small images, trained from scratch", {"num_classes": 10}, {**_HALF, "crop_mode": "squash"}),
    "resnet": Family("ResNet, a CNN, as timm runs its weights", {}, {"crop_pct": 0.95}),
}


@dataclass(frozen=True)
class ModelSpec:
    """What a name stands for."""

    name: str
    family: str
    config: BackboneConfig
    preprocess: Preprocess


# (name with places for size, patch and image side; family; rows of size, patch, image side and further options)
_Row = tuple[str, int, int] | tuple[str, int, int, dict[str, Any]]
_NAMES: list[tuple[str, str, Sequence[_Row]]] = [
    (
        "vit_{}_patch{}_{}",
        "vit",
        [
            *[("tiny", 16, 224), ("tiny", 16, 384)],
            *[
                ("small", 8, 224),
                ("small", 16, 224),
                ("small", 16, 384),
                ("small", 32, 224),
                ("small", 32, 384),
            ],
            *[("base", 8, 224), ("base", 16, 224), ("base", 16, 384), ("base", 32, 224), ("base", 32, 384)],
            *[
                ("large", 14, 224),
                ("large", 16, 224),
                ("large", 16, 384),
                ("large", 32, 224),
                ("large", 32, 384),
            ],
            *[("huge", 14, 224), ("giant", 14, 224), ("gigantic", 14, 224)],
        ],
    ),
    (
        "vit_{}_patch{}_{}.augreg_in21k",
        "augreg",
        [
            (size, patch, 224, {"num_classes": 21843})
            for size, patch in [
                *[
                    ("tiny", 16),
                    ("small", 32),
                    ("small", 16),
                    ("base", 32),
                    ("base", 16),
                    ("base", 8),
                    ("large", 16),
                ]
            ]
        ],
    ),
    ("deit_{}_patch{}_{}", "deit", [(s, 16, 224) for s in ("tiny", "small", "base")] + [("base", 16, 384)]),
    (
        "deit3_{}_patch{}_{}",
        "deit3",
        [
            *[
                ("small", 16, 224),
                ("small", 16, 384),
                ("medium", 16, 224),
                ("base", 16, 224),
                ("base", 16, 384),
            ],
            *[("large", 16, 224), ("large", 16, 384), ("huge", 14, 224)],
        ],
    ),
    ("vit_{}_patch{}_{}.dino", "dino", [(s, p, 224) for s in ("small", "base") for p in (16, 8)]),
    ("vit_{}_patch{}_{}.mae", "mae", [("base", 16, 224), ("large", 16, 224), ("huge", 14, 224)]),
    *[
        (
            name,
            family,
            [
                *[("small", 14, 518), ("base", 14, 518), ("large", 14, 518)],
                (
                    "giant",
                    14,
                    518,
                    {"embed_dim": 1536, "num_heads": 24, "mlp_ratio": 16 / 3, "act": "swiglu"},
                ),
            ],
        )
        for name, family in (
            ("vit_{}_patch{}_dinov2", "dinov2"),
            ("vit_{}_patch{}_reg4_dinov2", "dinov2_reg"),
        )
    ],
    *[
        (
            name,
            family,
            [
                *[("base", 32, 224, {"num_classes": 512}), ("base", 16, 224, {"num_classes": 512})],
                *[("large", 14, 224, {"num_classes": 768}), ("large", 14, 336, {"num_classes": 768})],
                ("huge", 14, 224, {"num_classes": 1024}),
            ],
        )
        for name, family in (
            ("vit_{}_patch{}_clip_{}", "clip"),
            ("vit_{}_patch{}_clip_quickgelu_{}", "clip_quickgelu"),
        )
    ],
    (
        "vit_{}_patch{}_siglip_{}",
        "siglip",
        [
            *[("base", 16, 224), ("base", 16, 256), ("base", 16, 384), ("base", 16, 512)],
            *[("large", 16, 256), ("large", 16, 384), ("so400m", 14, 224), ("so400m", 14, 378)],
        ],
    ),
    *[
        (
            name,
            "small",
            [
                ("nano", 2, 8, {"in_chans": 1, "stem": stem}),
                ("micro", 4, 28, {"in_chans": 1, "stem": stem}),
                ("micro", 8, 32, {"stem": stem}),
                ("lite", 4, 32, {"stem": stem}),
            ],
        )
        for name, stem in (("vit_{}_patch{}_{}", "linear"), ("vit_{}_conv_patch{}_{}", "conv"))
    ],
    *[
        (
            f"vit_{{0}}_{network}_{{2}}",
            "augreg",
            [
                (size, patch, side, {"stem": "resnet", "stem_depths": depths})
                for size in sizes
                for side in (224, 384)
                if (network, size, side) != ("r26_s32", "base", 384)
            ],
        )
        for network, depths, patch, sizes in (
            ("r_s16_p8", (), 32, ["tiny"]),
            ("r26_s32", (2, 2, 2, 2), 32, ["small", "base"]),
            ("r50_s16", (3, 4, 9), 16, ["base"]),
            ("r50_s32", (3, 4, 6, 3), 32, ["large"]),
        )
    ],
    ("vit_{}_deepconv_patch{}_{}", "small", [("pico", 8, 32, {"stem": "conv_deep"})]),
    (
        "vit_{}_conv_patch{}_{}",
        "small",
        [("micro", 8, 64, {"stem": "conv"}), ("pico", 8, 32, {"stem": "conv"})],
    ),
]
# size, patch, window, image side, family
_SWINS: list[tuple[str, int, int, int, str]] = [
    *[(size, 4, 7, 224, "swin") for size in ("tiny", "small", "base", "large")],
    *[(size, 4, 12, 384, "swin") for size in ("base", "large")],
    ("micro", 2, 4, 32, "small"),
]
# kind, name, image side, channels, family
_RESNETS: list[tuple[str, str, int, int, str]] = [
    *[(kind, kind, 224, 3, "resnet") for kind in get_args(ResNetKind) if kind != "resnet8"],
    *[("resnet8", f"resnet8_{side}", side, in_chans, "small") for side, in_chans in ((8, 1), (28, 1), (32, 3))],
]


def _read_names() -> dict[str, ModelSpec]:
    """Write the table out, one entry per name."""
    specs = {}
    for pattern, family, rows in _NAMES:
        for size, patch, side, *options in rows:
            name = pattern.format(size, patch, side)
            assert name not in specs, name
            specs[name] = _spec(name, family, size, patch, side, *options)
    for size, patch, M, side, family in _SWINS:
        C, depths, heads, ratio = SWIN_SIZES[size]
        shape = {"embed_dim": C, "depths": depths, "num_heads": heads, "mlp_ratio": ratio, "window_size": M}
        name = f"swin_{size}_patch{patch}_window{M}_{side}"
        options = shape | {"patch_size": patch, "img_size": side} | FAMILIES[family].model
        specs[name] = _described(name, family, SwinConfig.from_dict(options))
    for kind, name, side, in_chans, family in _RESNETS:
        options = {"kind": kind, "img_size": side, "in_chans": in_chans} | FAMILIES[family].model
        specs[name] = _described(name, family, ResNetConfig.from_dict(options))
    return dict(sorted(specs.items()))


def _spec(name: str, family: str, size: str, patch: int, side: int, options: dict[str, Any] | None = None) -> ModelSpec:
    D, L, h, ratio = SIZES[size]
    shape = {
        "embed_dim": D,
        "depth": L,
        "num_heads": h,
        "mlp_ratio": ratio,
        "patch_size": patch,
        "img_size": side,
    }
    return _described(name, family, ViTConfig.from_dict(shape | FAMILIES[family].model | (options or {})))


def _described(name: str, family: str, config: BackboneConfig) -> ModelSpec:
    """A name with what is done to its images."""
    # Fine-tuned sizes are evaluated on the whole image, as their authors did.
    whole = {"crop_pct": 1.0} if min(config.image) >= 336 and family not in ("dinov2", "dinov2_reg") else {}
    preprocess = Preprocess.from_dict({"img_size": config.image} | FAMILIES[family].preprocess | whole)
    return ModelSpec(name, family, config, preprocess.for_channels(config.in_chans))


MODELS: dict[str, ModelSpec] = _read_names()


def list_models(pattern: str = "*") -> list[str]:
    """Return the names that match a shell pattern: `list_models("vit_*_patch16_*")`."""
    return [name for name in MODELS if fnmatchcase(name, pattern)]


def is_model(name: str) -> bool:
    """Whether a word is a name of the zoo, perhaps with options: `vit_nano_patch2_8+block=post+reg_tokens=4`."""
    return name.partition("+")[0] in MODELS


def _split_name(name: str) -> tuple[str, dict[str, Any]]:
    """The name itself, and the options that are written behind it."""
    base, *words = name.split("+")
    options = {}
    for word in words:
        option, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} in {name} is no option; write them as in {base}+block=post+reg_tokens=4.")
        try:
            options[option] = json.loads(value)
        except ValueError:
            options[option] = value
    return base, options


def model_spec(name: str, **options: Any) -> ModelSpec:
    """Return what a name stands for, with options of its config put over it. Builds nothing.

    Options may stand behind the name too: `vit_nano_patch2_8+block=post+positions=sincos2d`.
    """
    name, written = _split_name(name)
    if name not in MODELS:
        raise unknown_name("model", name, MODELS, list_with="vitral models, or vitral.list_models(),")
    spec, options = MODELS[name], written | options
    config = type(spec.config).from_dict({f: getattr(spec.config, f) for f in spec.config.to_dict()} | options)
    preprocess = replace(spec.preprocess, img_size=config.image).for_channels(config.in_chans)
    return replace(spec, config=config, preprocess=preprocess)


def create_model(name: str, *, seed: int | None = None, zero_head: bool = False, **options: Any) -> "Backbone":
    """Build a named model with fresh weights; `options` are fields of its config (docs/options.md).

    `create_model("vit_small_patch16_224", num_classes=10, img_size=96, in_chans=1, seed=0)`. Weights come from `seed`,
    or from torch's own generator without one; `zero_head` starts the classifier at 0.
    """
    import torch

    from vitral.models.build import build_backbone
    from vitral.models.init import blank

    if seed is not None and not (isinstance(seed, int) and 0 <= seed < 2**63):
        raise ConfigError(f"seed must be a whole number from 0 to below 2^63, or None, got {seed!r}.")
    spec = model_spec(name, **options)
    device = torch.get_default_device()
    model = blank(lambda: build_backbone(spec.config))
    model.to_empty(device=device)
    model.init_weights(seed, zero_head)
    model.preprocess = spec.preprocess
    return model
