"""Whose file is this, and what model is in it: told by names, shapes and container, without reading the weights.

The first layout that matches is it. What the shapes leave open (heads, activation, epsilon, how positions are resized)
comes from `config.json` where there is one, and else from what is known of the family; the report says which.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from vitral.config import Preprocess, ViTConfig
from vitral.errors import CheckpointError, VitralError, unknown_name
from vitral.models.zoo import FAMILIES, MODELS, SIZES, Family
from vitral.weights import clip, google, huggingface, timm, torchvision
from vitral.weights.files import WeightFile
from vitral.weights.layout import Layout, Names, Plan, has, make_plan, settings

Shapes = Mapping[str, tuple[int, ...]]

# In the order in which they are tried: the more particular first. Swin and DETR will have their place here.
LAYOUTS: list[Layout] = [
    google.GOOGLE,
    google.GOOGLE_PRE_LOGITS,
    google.BIG_VISION,
    huggingface.HF_DINOV2_REG,
    huggingface.HF_DINOV2,
    huggingface.HF_DEIT_DISTILLED,
    huggingface.HF_DEIT,
    huggingface.HF_MAE,
    huggingface.HF_VIT,
    huggingface.HF_CLIP,
    huggingface.HF_SIGLIP,
    clip.OPENAI,
    clip.OPEN_CLIP,
    timm.OPEN_CLIP_TRUNK,
    torchvision.TORCHVISION,
    timm.MAE_FULL,
    timm.DEIT_DISTILLED,
    timm.DEIT_III,
    timm.DINOV2_REG,
    timm.DINOV2_PLAIN,
]

# What is not a plain ViT, by a name that only it has.
FOREIGN = [
    (r"(^|\.)layers\.0\.blocks\.0\.attn\.relative_position_bias_table$", "a Swin Transformer"),
    (r"^swin\.encoder\.", "a Swin Transformer"),
    (r"(^|\.)swinViT\.", "a Swin Transformer for segmentation (SwinUNETR)"),
    (r"(^|\.)query_embed\.weight$|query_position_embeddings", "a DETR detector"),
    (r"(^|\.)storage_tokens$|rope_embed\.periods$", "a DINOv3 model, with rotary positions"),
    (r"(^|\.)to_patch_embedding\.", "a model of vit-pytorch, whose patches pass two norms and whose qkv has no bias"),
    (r"patch_embed\.backbone\.|(^|/)conv_root/kernel$", "a hybrid: a ViT on top of a ResNet stem"),
    (r"(^|\.)layers\.0\.blocks\.0\.conv1\.c\.weight$", "TinyViT (MobileSAM's image encoder)"),
    (r"blocks\.0\.attn\.rel_pos_h$", "the image encoder of SAM or ViTDet, with relative positions"),
    (r"(^|\.)conv_head\.weight$|_conv_stem\.|(^|\.)layer1\.0\.conv1\.weight$", "a convolutional network"),
]


@dataclass(frozen=True)
class Detected:
    """What a file is: its layout, how its tensors become ours, the model and preprocessing, and why."""

    layout: Layout
    plan: Plan
    config: ViTConfig
    preprocess: Preprocess
    labels: list[str] | None
    reasons: dict[str, str]
    """Option -> where its value comes from."""
    why: str
    """What the layout was told by."""
    notes: list[str]
    """What could not be taken over as it is."""


def detect(
    file: WeightFile, family: str | None = None, img_size: Any = None, native_size: Any = None, **given: Any
) -> Detected:
    """Tell what a file is. `family` and `given` options of `ViTConfig` settle what it leaves open.

    `native_size` is the size of its images; where it is not given and nothing else tells it, `img_size` is tried.
    """
    layout, why = find_layout(file, family)
    plan = make_plan(layout, file.tensors)
    try:
        known = _from_documents(file, layout)
    except (TypeError, KeyError, AttributeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"a document beside {file.path} does not say what it should ({error}).") from error
    config, reasons = _infer(file, layout, plan.shapes(), known.model, given, (native_size, known.size, img_size))
    options = {"img_size": config.image} | layout.family.preprocess | known.preprocess
    try:
        preprocess = Preprocess.from_dict(options).for_channels(config.in_chans)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the preprocessing beside {file.path} cannot be used: {error}") from error
    for name in ("mean", "std", "interpolation", "crop_mode", "crop_pct"):
        reasons[name] = "a file beside the weights" if name in known.preprocess else layout.about
    labels, notes = known.labels, list(known.notes)
    if labels is not None and len(labels) != config.num_classes:
        notes.append(f"{len(labels)} labels for {config.num_classes} classes: they are left out")
        labels = None
    return Detected(layout, plan, config, preprocess, labels, reasons, why, notes)


def find_layout(file: WeightFile, family: str | None = None) -> tuple[Layout, str]:
    """The layout of a file, and what told it."""
    names = file.tensors
    lines = "\n".join(names)
    for pattern, what in FOREIGN:
        if found := re.search(pattern, lines, re.MULTILINE):
            name = lines[: found.end()].rpartition("\n")[2] + lines[found.end() :].partition("\n")[0]
            raise CheckpointError(f"{file.path} is not a plain ViT: it looks like {what} (tensor {name}).")
    layout, why = next(((each, "its tensor names") for each in LAYOUTS if each.matches(names)), (None, ""))
    architecture = file.config.get("architecture")
    if layout is None and timm.TIMM.matches(names):
        layout, why = _among_timm_names(file)
    elif layout is timm.OPEN_CLIP_TRUNK:
        layout = _as_timm_runs(timm.OPEN_CLIP_TRUNK, "siglip", act=_siglip_act(names))
    elif layout is not None and isinstance(architecture, str) and layout.name in ("deit", "dinov2", "mae"):
        layout = replace(layout, family=replace_resize(layout.family), about=f"timm ({layout.about})")
    if layout is None:
        some = ", ".join(list(names)[:4])
        raise CheckpointError(
            f"{file.path} is not a plain ViT of a layout that vitral knows: {len(names)} tensors, the first: {some}."
        )
    if family is not None:
        if family not in FAMILIES:
            raise unknown_name("family", family, FAMILIES)
        layout = replace(layout, family=settings(family), about=f"family {family}, as asked")
    return layout, why


def replace_resize(family: Family) -> Family:
    """The same family with positions resized as timm does it."""
    return replace(family, model={**family.model, "pos_resize": timm.TIMM_RESIZE})


def _among_timm_names(file: WeightFile) -> tuple[Layout, str]:
    """DINO, DeiT, MAE and timm itself use the same names; the container and the head tell them apart."""
    names, wrapped = file.tensors, " ".join(file.notes)
    architecture = file.config.get("architecture")
    if isinstance(architecture, str) and architecture:
        return _timm_architecture(architecture, names), f"config.json, which names timm's {architecture}"
    if any(re.search(r"(^|\.)head\.last_layer\.", name) for name in names) or "'teacher'" in wrapped:
        return timm.DINO, "a teacher of DINO's training"
    if (kind := _kind_by_names(names)) is not None:
        return _timm_family(kind, names), "timm's names for registers, pooling, pre-norm or LayerScale"
    head = has(names, "head.weight")
    if "'model'" in wrapped:
        if has(names, "fc_norm.weight"):
            return timm.MAE_TUNED, "a 'model' with a norm after the pool, as MAE's fine-tuning saves"
        if head:
            return timm.DEIT, "a 'model' with a head, as DeiT publishes"
        return timm.MAE, "a 'model' without a head, as MAE publishes"
    if file.kind == "torch" and not head:
        return timm.DINO, "a .pth without a head, as DINO publishes"
    return timm.TIMM, "timm's names"


def _kind_by_names(names: Names) -> str | None:
    """The family that registers, LayerScale, attention pooling or CLIP's pre-norm speak for."""
    if has(names, "attn_pool.latent"):
        return "siglip"
    if has(names, "norm_pre.weight"):
        return "clip"
    if has(names, "reg_token"):
        return "dinov2_reg"
    if has(names, "blocks.0.ls1.gamma"):
        return "dinov2" if _patch(names)[1] == 14 else "deit3"
    return None


# Words in the names of timm's architectures that are not in our own table, the more particular first.
_TIMM_WORDS = {
    "clip_quickgelu": "clip_quickgelu",
    "_clip_": "clip",
    "siglip": "siglip",
    "reg4_dinov2": "dinov2_reg",
    "dinov2": "dinov2",
    "deit3": "deit3",
    "deit": "deit",
}


def _timm_architecture(architecture: str, names: Names) -> Layout:
    name = architecture.partition(".")[0]
    spec = MODELS.get(architecture) or MODELS.get(name)
    word = next((family for word, family in _TIMM_WORDS.items() if word in name), None)
    return _timm_family(spec.family if spec else word or _kind_by_names(names) or "vit", names)


def _timm_family(family: str, names: Names) -> Layout:
    act = {"act": _siglip_act(names)} if family == "siglip" else {}
    return _as_timm_runs(timm.TIMM, family, **act)


def _siglip_act(names: Names) -> str:
    """timm runs the first SigLIP towers with the exact GELU, later ones with tanh; width, patch and size tell which."""
    D, patch = _patch(names)
    rows = next((t.shape[1] for n, t in names.items() if n.endswith("pos_embed") and len(t.shape) == 3), 0)
    later = (D, patch) in ((768, 32), (1152, 16), (1536, 16)) or (D, patch, rows) == (1024, 16, 1024)
    return "gelu_tanh" if later else "gelu"


def _patch(names: Names) -> tuple[int, int]:
    """Width and patch side of a file with timm's names."""
    shapes = (t.shape for n, t in names.items() if n.endswith("patch_embed.proj.weight") and len(t.shape) == 4)
    return next(((shape[0], shape[-1]) for shape in shapes), (0, 0))


def _as_timm_runs(layout: Layout, family: str, **model: Any) -> Layout:
    kept = settings(family, pos_resize=timm.TIMM_RESIZE, **model)
    return replace(layout, family=kept, about=f"timm ({kept.about})")


# ---- what config.json and its like say ----


@dataclass(frozen=True)
class Known:
    """What the documents beside the weights say."""

    model: dict[str, Any] = field(default_factory=dict)
    size: Any = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    labels: list[str] | None = None
    notes: list[str] = field(default_factory=list)


def _from_documents(file: WeightFile, layout: Layout) -> Known:
    config = file.config
    if layout.name == "huggingface":
        model = huggingface.read_config(config)
        preprocess, notes = huggingface.read_preprocessor(file.preprocessor)
        return Known(model, model.pop("img_size", None), preprocess, huggingface.read_labels(config), notes)
    if layout.name == "open_clip" and "open_clip" in config:
        return _from_open_clip(config["open_clip"])
    if "architecture" in config:
        model = _timm_model(config)
        preprocess = _timm_preprocess(config.get("pretrained_cfg") or {})
        return Known(model, model.pop("img_size", None), preprocess, _timm_labels(config))
    return Known()


def _from_open_clip(document: Mapping[str, Any]) -> Known:
    """`open_clip_config.json`."""
    cfg, images = document.get("model_cfg") or {}, document.get("preprocess_cfg") or {}
    vision = cfg.get("vision_cfg") or {}
    model: dict[str, Any] = {"act": "quick_gelu"} if cfg.get("quick_gelu") else {}
    if vision.get("width") and vision.get("head_width"):
        model["num_heads"] = int(vision["width"]) // int(vision["head_width"])
    preprocess = _timm_preprocess(images)
    if images.get("resize_mode") == "squash":
        preprocess["crop_mode"] = "squash"
    return Known(model, vision.get("image_size"), preprocess)


def _timm_model(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = config.get("model_args") or {}
    words = {"avg": "mean", "token": "cls", "map": "map", "max": "max"}
    found = {key: arguments[key] for key in ("num_heads", "img_size") if key in arguments}
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool and pool not in words:
        raise ValueError(f"timm's pooling {pool!r} has no like here")
    found |= {"global_pool": words[pool]} if pool else {}
    act = arguments.get("act_layer")
    return found | ({"act": act} if act in ("gelu", "gelu_tanh", "quick_gelu", "relu") else {})


def _timm_preprocess(cfg: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {key: tuple(cfg[key]) for key in ("mean", "std") if isinstance(cfg.get(key), list)}
    found |= {"interpolation": cfg["interpolation"]} if cfg.get("interpolation") in ("bilinear", "bicubic") else {}
    found |= {"crop_pct": float(cfg["crop_pct"])} if isinstance(cfg.get("crop_pct"), int | float) else {}
    return found | ({"crop_mode": cfg["crop_mode"]} if cfg.get("crop_mode") in ("center", "squash") else {})


def _timm_labels(config: Mapping[str, Any]) -> list[str] | None:
    names = config.get("label_names")
    return [str(name) for name in names] if isinstance(names, list) else None


# ---- from shapes to a config ----


def _infer(
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
