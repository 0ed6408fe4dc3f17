"""timm's names, which are ours, and the files of DeiT, DINO, DINOv2 and MAE, which use nearly the same.

DINO: Caron et al., 2021; DINOv2: Oquab et al., 2023, registers: Darcet et al., 2023; MAE: He et al., 2021; DeiT:
Touvron et al., 2020, DeiT III: 2022.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitral.config import BackboneConfig, PositionResize, Preprocess, ResNetConfig, ViTConfig
from vitral.errors import ConfigError
from vitral.weights.hybrid import is_timm_hybrid, timm_rules
from vitral.weights.layout import Known, Layout, Names, Rule, has, rule, rules, settings

BODY = [
    "cls_token",
    "reg_token",
    "pos_embed",
    "patch_embed.proj.*",
    "norm_pre.*",
    "blocks.{i}.norm1.*",
    "blocks.{i}.attn.qkv.*",
    "blocks.{i}.attn.proj.*",
    "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2.*",
    "blocks.{i}.mlp.fc1.*",
    "blocks.{i}.mlp.fc2.*",
    "blocks.{i}.ls2.gamma",
    "norm.*",
    "fc_norm.*",
    "attn_pool.latent",
    "attn_pool.q.*",
    "attn_pool.kv.*",
    "attn_pool.proj.*",
    "attn_pool.norm.*",
    "attn_pool.mlp.fc1.*",
    "attn_pool.mlp.fc2.*",
]
OURS = [rule(name, name) for name in BODY]
HEAD = [rule("head.*", "head.*")]
DISTILLED = rules(("reg_token", "dist_token"), ("head.cls.*", "head.*"), ("head.dist.*", "head_dist.*"))
DEIT3 = rules(("blocks.{i}.ls1.gamma", "blocks.{i}.gamma_1"), ("blocks.{i}.ls2.gamma", "blocks.{i}.gamma_2"))
DINOV2 = rules(
    ("reg_token", "register_tokens"),
    ("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.w12.*"),
    ("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*"),
    ("head.*", "linear_head.*"),
)
WRAPPED = ("backbone.",)
DINO_HEADS = {
    r"(head|dino_head|ibot_head)\.(mlp|last_layer)\..*": "projection head of the pretraining",
    r"center": "centre of the pretraining",
}
MASK = {"mask_token": "stands for hidden patches in the pretraining alone"}
# What timm does with every table, whoever trained it.
TIMM_RESIZE = PositionResize(mode="bicubic", antialias=True)


def _blocks(names: Names) -> bool:
    return any(re.search(r"(^|\.)blocks\.0\.(\d+\.)?attn\.qkv\.weight$", name) for name in names)


def _join_chunks(names: Names) -> Names:
    """Blocks that were trained in chunks, `blocks.2.17.`, are numbered through within: `blocks.17.`."""
    return {re.sub(r"(^|\.)blocks\.\d+\.(\d+)\.", r"\1blocks.\2.", name): tensor for name, tensor in names.items()}


def _layout(
    name: str, about: str, family: str, matches: Callable[[Names], bool], extra: Sequence[Rule] = (), **options: Any
) -> Layout:
    taken = {theirs for rule in extra for theirs in rule.theirs}
    table = [*extra, *OURS, *(rule for rule in HEAD if rule.theirs[0] not in taken)]
    return Layout(name, about, settings(family), matches, table, prefixes=WRAPPED, **options)


MAE_FULL = _layout(
    "mae",
    "MAE with its decoder",
    "mae",
    lambda n: _blocks(n) and has(n, "decoder_embed.weight"),
    drop={r"decoder_.*": "decoder of the pretraining", **MASK},
)
DEIT_DISTILLED = _layout(
    "deit",
    "DeiT, distilled",
    "deit",
    lambda n: _blocks(n) and has(n, "dist_token"),
    DISTILLED,
    fixed={"pos_registers": True, "global_pool": "cls_dist", "head": "distilled"},
)
DEIT_III = _layout("deit", "DeiT III", "deit3", lambda n: _blocks(n) and has(n, "blocks.0.gamma_1"), DEIT3)
DINOV2_REG = _layout(
    "dinov2",
    "DINOv2 with registers",
    "dinov2_reg",
    lambda n: _blocks(n) and has(n, "register_tokens"),
    DINOV2,
    prepare=_join_chunks,
    drop={**MASK, **DINO_HEADS},
)
DINOV2_PLAIN = _layout(
    "dinov2",
    "DINOv2",
    "dinov2",
    lambda n: _blocks(n) and (has(n, "mask_token") or any(re.search(r"blocks\.\d+\.\d+\.attn", name) for name in n)),
    DINOV2,
    prepare=_join_chunks,
    drop={**MASK, **DINO_HEADS},
)
OPEN_CLIP_TRUNK = Layout(
    "open_clip",
    "open_clip with a tower of timm's (SigLIP and others)",
    settings("siglip", pos_resize=TIMM_RESIZE),
    lambda n: has(n, "visual.trunk.patch_embed.proj.weight"),
    [*OURS, *HEAD],
    drop={
        r"text\..*|logit_(scale|bias)|(token|positional)_embedding.*|transformer\..*|ln_final.*|text_projection": (
            "text tower"
        )
    },
    prefixes=("visual.trunk.",),
)
HYBRID = _layout("timm", "timm, a ViT behind a ResNet", "augreg", is_timm_hybrid, timm_rules())
DINO = _layout("dino", "DINO", "dino", _blocks, drop=DINO_HEADS)
MAE = _layout("mae", "MAE encoder", "mae", _blocks)
MAE_TUNED = _layout("mae", "MAE, fine-tuned", "mae", lambda n: _blocks(n) and has(n, "fc_norm.weight"))
DEIT = _layout("deit", "DeiT", "deit", _blocks)
TIMM = _layout("timm", "timm", "vit", _blocks)


# ---- config.json, read and written ----


def read_config(config: Mapping[str, Any]) -> Known:
    """What timm's `config.json` says."""
    model = _read_model(config)
    preprocess = read_preprocess(config.get("pretrained_cfg") or {})
    return Known(model, model.pop("img_size", None), preprocess, _read_labels(config))


def _read_model(config: Mapping[str, Any]) -> dict[str, Any]:
    arguments = config.get("model_args") or {}
    words = {"avg": "mean", "token": "cls", "map": "map", "max": "max"}
    found = {key: arguments[key] for key in ("num_heads", "img_size") if key in arguments}
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool and pool not in words:
        raise ValueError(f"timm's pooling {pool!r} has no like here")
    found |= {"global_pool": words[pool]} if pool else {}
    act = arguments.get("act_layer")
    return found | ({"act": act} if act in ("gelu", "gelu_tanh", "quick_gelu", "relu") else {})


def read_preprocess(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `Preprocess` from timm's `pretrained_cfg`, whose words open_clip uses too."""
    found: dict[str, Any] = {key: tuple(cfg[key]) for key in ("mean", "std") if isinstance(cfg.get(key), list)}
    found |= {"interpolation": cfg["interpolation"]} if cfg.get("interpolation") in ("bilinear", "bicubic") else {}
    found |= {"crop_pct": float(cfg["crop_pct"])} if isinstance(cfg.get("crop_pct"), int | float) else {}
    if cfg.get("crop_mode") == "squash":  # timm resizes both sides to 1/crop_pct of the target, then crops
        return found | {"crop_mode": "squash" if found.get("crop_pct", 1.0) == 1.0 else "squash_center"}
    return found | ({"crop_mode": "center"} if cfg.get("crop_mode") == "center" else {})


def _read_labels(config: Mapping[str, Any]) -> list[str] | None:
    names = config.get("label_names")
    return [str(name) for name in names] if isinstance(names, list) else None


def first_conv(c: ViTConfig) -> str:
    """The convolution that sees the image."""
    if c.stem == "resnet":
        return "patch_embed.backbone.stem.conv" if c.stem_depths else "patch_embed.backbone.conv"
    return "patch_embed.proj" if c.stem == "linear" else "patch_embed.convs.0"


def folds(c: ViTConfig) -> bool:
    """Whether [CLS] has a position that timm keeps no place for."""
    return c.reg_tokens > 0 and c.pos_prefix and not c.pos_registers


# The architectures of timm with such stages, to start from.
_HYBRIDS = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _hybrid_architecture(c: ViTConfig) -> str:
    if c.stem_depths not in _HYBRIDS or c.act == "swiglu" or c.pre_norm:
        raise ConfigError(f"timm has no hybrid like this one (stages {c.stem_depths}); write it as vitral.")
    return _HYBRIDS[c.stem_depths]


def write_config(c: ViTConfig, p: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """timm's `config.json`: an architecture to start from, what differs from it, and the preprocessing."""
    pools = {"cls": "token", "mean": "avg", "max": "max", "map": "map", "cls_dist": "token"}
    if c.global_pool not in pools:
        raise ConfigError(f"timm's ViT has no pooling like {c.global_pool}; write it as vitral or huggingface.")
    base = "vit_base_patch16_clip_224" if c.pre_norm else "vit_base_patch16_224"
    base = "deit_base_distilled_patch16_224" if c.head == "distilled" else base
    base = _hybrid_architecture(c) if c.stem == "resnet" else base
    base = "vit_giant_patch14_reg4_dinov2" if c.act == "swiglu" else base  # the one that has SwiGLU
    patch = c.stem_cells if c.stem == "resnet" else c.patch
    arguments: dict[str, Any] = {
        "img_size": list(c.image),
        "patch_size": patch[0] if patch[0] == patch[1] else list(patch),
        "in_chans": c.in_chans,
        "embed_dim": c.embed_dim,
        "depth": c.depth,
        "num_heads": c.num_heads,
        "mlp_ratio": c.mlp_ratio,
        "qkv_bias": c.qkv_bias,
    }
    if c.head != "distilled":
        arguments |= {
            "class_token": c.class_token,
            "reg_tokens": c.reg_tokens,
            "no_embed_class": folds(c) or not c.pos_prefix,
            "pre_norm": c.pre_norm,
            "init_values": c.init_values,
            "global_pool": pools[c.global_pool],
            "fc_norm": c.norm_after_pool,
        }
    if c.act != "swiglu":
        arguments["act_layer"] = c.act
    arguments = {key: value for key, value in arguments.items() if value is not None}
    heads = ["head", "head_dist"] if c.head == "distilled" else "head"
    document: dict[str, Any] = {
        "architecture": base,
        "num_classes": c.num_classes,
        "num_features": c.embed_dim,
        "global_pool": pools[c.global_pool],
        "model_args": arguments,
        "pretrained_cfg": write_pretrained(c, p, heads, first_conv(c)),
    }
    return document | ({"label_names": labels} if labels else {})


def write_pretrained(
    c: BackboneConfig, p: Preprocess, classifier: str | list[str], first: str = "patch_embed.proj"
) -> dict[str, Any]:
    """timm's `pretrained_cfg`: what is done to images, where the head is, and the layer that sees the image."""
    return {
        "tag": "vitral",
        "custom_load": False,
        "input_size": [c.in_chans, *c.image],
        "fixed_input_size": not isinstance(c, ResNetConfig),
        "interpolation": p.interpolation,
        "crop_pct": 1.0 if p.crop_mode == "squash" else p.crop_pct,
        "crop_mode": p.crop_mode.removesuffix("_center"),
        "mean": list(p.mean),
        "std": list(p.std),
        "num_classes": c.num_classes,
        "pool_size": None,
        "first_conv": first,
        "classifier": classifier,
    }
