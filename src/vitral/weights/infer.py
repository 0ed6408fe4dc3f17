"""From the shapes of a file's tensors to the model they make.

What shapes do not tell comes from the documents beside the weights, then from the family; what was asked for goes over
all.
"""

import math
from collections.abc import Mapping
from typing import Any

from vitral.config import ViTConfig
from vitral.errors import CheckpointError, VitralError
from vitral.models.zoo import SIZES
from vitral.weights.files import WeightFile
from vitral.weights.hybrid import is_hybrid, stem_of
from vitral.weights.layout import Layout, Names

Shapes = Mapping[str, tuple[int, ...]]


def infer(
    file: WeightFile,
    layout: Layout,
    shapes: Shapes,
    known: dict[str, Any],
    given: dict[str, Any],
    sizes: tuple[Any, Any, Any],
) -> tuple[ViTConfig, dict[str, str]]:
    """The model's options: by the shapes, by config.json, by the family; what was given goes over all."""
    if "patch_embed.proj.weight" not in shapes or "blocks.0.attn.qkv.weight" not in shapes:
        lost = "patch projection" if "patch_embed.proj.weight" not in shapes else "blocks"
        raise CheckpointError(f"{file.path} looks like {layout.about}, but its {lost} cannot be found.")
    try:
        found = _from_shapes(file, layout, shapes, sizes)
        family = {key: value for key, value in layout.family.model.items() if key not in found}
        reasons = dict.fromkeys(found, "the shapes") | dict.fromkeys(family, layout.about)
        heads, why = _heads(layout, file.tensors, shapes, found["embed_dim"], found["depth"])
        options = {"num_heads": heads, **family, **found}
        reasons["num_heads"] = why
        settled = {k: v for k, v in known.items() if k not in found or (k == "global_pool" and k not in layout.fixed)}
        for extra, source in ((settled, "config.json"), (given, "as asked")):
            options |= extra
            reasons |= dict.fromkeys(extra, source)
        reasons = dict.fromkeys(("act", "norm_eps", "head"), layout.about) | reasons
        return ViTConfig.from_dict(options), reasons
    except CheckpointError:
        raise
    except (VitralError, LookupError, TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(
            f"{file.path} looks like {layout.about}, but its shapes do not fit together: {error}"
        ) from error


def _from_shapes(file: WeightFile, layout: Layout, shapes: Shapes, sizes: tuple[Any, Any, Any]) -> dict[str, Any]:
    D, in_chans, P_h, P_w = shapes["patch_embed.proj.weight"]
    depth = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
    width, hidden = shapes["blocks.0.mlp.fc1.weight"][0], shapes["blocks.0.mlp.fc2.weight"][1]
    found: dict[str, Any] = {
        "embed_dim": D,
        "depth": depth,
        "in_chans": in_chans,
        "patch_size": (P_h, P_w),
        "mlp_ratio": _ratio(width, D),
        "class_token": "cls_token" in shapes,
        "reg_tokens": shapes["reg_token"][1] if "reg_token" in shapes else 0,
        "patch_bias": "patch_embed.proj.bias" in shapes,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "pre_norm": "norm_pre.weight" in shapes,
        "norm_after_pool": "fc_norm.weight" in shapes and "norm.weight" not in shapes,
        **layout.fixed,
    }
    if is_hybrid(shapes):
        found |= stem_of(shapes)
        stride = ViTConfig(stem="resnet", stem_depths=found["stem_depths"], patch_size=32).stem_stride
        found["patch_size"] = (P_h * stride, P_w * stride)
    if width == 2 * hidden:
        found["act"] = "swiglu"
    found["init_values"] = layout.family.model.get("init_values") or 1e-5 if "blocks.0.ls1.gamma" in shapes else None
    found |= _pool_and_head(shapes, D, found)
    found |= _positions(file, shapes, found, sizes)
    return found


def _ratio(width: int, D: int) -> float:
    """The MLP ratio that gives exactly this width again."""
    ratio = width / D
    return ratio if int(D * ratio) == width else math.nextafter(ratio, math.inf)


def _pool_and_head(shapes: Shapes, D: int, found: Mapping[str, Any]) -> dict[str, Any]:
    head = next(
        (shapes[name] for name in ("head.fc2.weight", "head.cls.weight", "head.weight") if name in shapes), None
    )
    made: dict[str, Any] = {"num_classes": head[0] if head else 0}
    if "global_pool" in found:
        return made
    if "attn_pool.latent" in shapes:
        return made | {"global_pool": "map"}
    if found["norm_after_pool"] or not found["class_token"]:
        return made | {"global_pool": "mean"}
    return made | {"global_pool": "cls_mean" if head and head[1] == 2 * D else "cls"}


def _positions(
    file: WeightFile, shapes: Shapes, found: Mapping[str, Any], sizes: tuple[Any, Any, Any]
) -> dict[str, Any]:
    """The grid that the position table is made for, and which prefix tokens have a row in it."""
    if "pos_embed" not in shapes:
        raise CheckpointError(f"{file.path} has no table of positions (its model computes them); it cannot be loaded.")
    rows, (P_h, P_w) = shapes["pos_embed"][1], found["patch_size"]
    prefix = int(found["class_token"]) + (found["reg_tokens"] if found.get("pos_registers") else 0)
    native, stated, asked = sizes
    square = [math.isqrt(max(rows - taken, 0)) for taken in (prefix, 0)]
    for size in (native, stated, *((side * P_h, side * P_w) for side in square), asked):
        height, width = (size, size) if isinstance(size, int) else size or (0, 0)
        cells = (height // P_h) * (width // P_w)
        if cells and rows - cells in {0, prefix}:
            # A size that the patch does not divide loses its rest at the border, as in the program it comes from.
            return {"img_size": (height // P_h * P_h, width // P_w * P_w), "pos_prefix": rows > cells}
    raise CheckpointError(
        f"{file.path} has {rows} positions, which fill no square grid; "
        f"say the size of its images with native_size=(height, width)."
    )


def _heads(layout: Layout, names: Names, shapes: Shapes, D: int, depth: int) -> tuple[int, str]:
    if layout.heads is not None and (heads := layout.heads(names)) is not None:
        return heads, "the shapes"
    if D == 1536 and "attn_pool.latent" in shapes:
        return 16, "the usual number for SigLIP's giant tower"
    same = {h for width, _, h, _ in SIZES.values() if width == D}
    by_depth = {h for width, length, h, _ in SIZES.values() if (width, length) == (D, depth)}
    if len(by_depth) == 1 or len(same) == 1:
        return next(iter(by_depth or same)), f"the usual number for a width of {D}"
    return (D // 64 if D % 64 == 0 else 1), "64 numbers a head, as usual; say num_heads if it is wrong"
