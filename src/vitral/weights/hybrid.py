"""Names of the ResNet before a hybrid's Transformer: timm's, which are ours, and Google's beside them."""

from collections.abc import Mapping
from typing import Any

from vitral.weights import layout as ops
from vitral.weights.layout import Names, Rule, rule

_OURS = "patch_embed.backbone."
_STAGES, _UNITS = range(4), range(36)  # as many as the deepest ResNet has

# (our convolution, our norm, Google's convolution, Google's norm)
_Names = tuple[str, str, str, str]
_ROOT: _Names = ("stem.conv", "stem.norm", "conv_root", "gn_root")
_ROOT_ALONE: _Names = ("conv", "norm", "conv_root", "gn_root")


def _block(s: int, u: int) -> list[_Names]:
    ours, theirs = f"stages.{s}.blocks.{u}", f"block{s + 1}/unit{u + 1}"
    parts = [(f"{ours}.conv{n}", f"{ours}.norm{n}", f"{theirs}/conv{n}", f"{theirs}/gn{n}") for n in (1, 2, 3)]
    shortcut = (f"{ours}.downsample.conv", f"{ours}.downsample.norm", f"{theirs}/conv_proj", f"{theirs}/gn_proj")
    return [*parts, shortcut]


_BLOCKS = [names for s in _STAGES for u in _UNITS for names in _block(s, u)]


def google_rules(stages: bool) -> list[Rule]:
    """From Google's names to ours, of a ResNet with stages or of its root alone."""
    return [
        each
        for conv, norm, kernel, group in ([_ROOT, *_BLOCKS] if stages else [_ROOT_ALONE])
        for each in (
            rule(f"{_OURS}{conv}.weight", f"{kernel}/kernel", ops.CONV),
            rule(f"{_OURS}{norm}.weight", f"{group}/scale", ops.FLAT),
            rule(f"{_OURS}{norm}.bias", f"{group}/bias", ops.FLAT),
        )
    ]


def timm_rules() -> list[Rule]:
    """timm's names, which are ours."""
    names = [
        name
        for conv, norm, _, _ in (_ROOT, _ROOT_ALONE, *_BLOCKS)
        for name in (f"{_OURS}{conv}.weight", f"{_OURS}{norm}.weight", f"{_OURS}{norm}.bias")
    ]
    return [rule(name, name) for name in names]


def is_google_hybrid(names: Names, stages: bool) -> bool:
    """Whether an archive of Google's holds a hybrid, and one with stages or without."""
    return any(name.endswith("conv_root/kernel") for name in names) and stages == any(
        name.endswith("block1/unit1/conv1/kernel") for name in names
    )


def is_timm_hybrid(names: Names) -> bool:
    """Whether these are timm's names of a ViT on a ResNet with weight standardisation."""
    roots = (f"{_OURS}stem.conv.weight", f"{_OURS}conv.weight")
    return any(name.endswith(roots) for name in names) and any(
        name.endswith("blocks.0.attn.qkv.weight") for name in names
    )


def stem_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """The options of the stem: channels of the image, and blocks in each stage."""
    root = _ROOT[0] if f"{_OURS}{_ROOT[0]}.weight" in shapes else _ROOT_ALONE[0]
    depths = tuple(
        sum(f"{_OURS}stages.{s}.blocks.{u}.conv1.weight" in shapes for u in _UNITS)
        for s in _STAGES
        if f"{_OURS}stages.{s}.blocks.0.conv1.weight" in shapes
    )
    return {"stem": "resnet", "stem_depths": depths, "in_chans": shapes[f"{_OURS}{root}.weight"][1]}


def is_hybrid(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether tensors of ours are a hybrid's."""
    return any(name.startswith(_OURS) for name in shapes)
