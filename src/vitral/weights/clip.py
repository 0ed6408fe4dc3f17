"""CLIP's image tower as OpenAI and open_clip name it (Radford et al., 2021)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vitral.weights import layout as ops
from vitral.weights.layout import Known, Layout, has, rule, rules, settings
from vitral.weights.timm import read_preprocess

_BLOCK = "transformer.resblocks.{i}"

OPEN_CLIP = Layout(
    "open_clip",
    "open_clip, image tower",
    settings("clip"),
    lambda n: has(n, "visual.class_embedding"),
    [
        rule("cls_token", "visual.class_embedding", ops.TWO_AXES),
        rule("pos_embed", "visual.positional_embedding", ops.ONE_AXIS),
        rule("head.weight", "visual.proj", ops.TRANSPOSE),
        *rules(
            ("patch_embed.proj.*", "visual.conv1.*"),
            ("norm_pre.*", "visual.ln_pre.*"),
            ("blocks.{i}.norm1.*", f"visual.{_BLOCK}.ln_1.*"),
            ("blocks.{i}.attn.qkv.weight", f"visual.{_BLOCK}.attn.in_proj_weight"),
            ("blocks.{i}.attn.qkv.bias", f"visual.{_BLOCK}.attn.in_proj_bias"),
            ("blocks.{i}.attn.proj.*", f"visual.{_BLOCK}.attn.out_proj.*"),
            ("blocks.{i}.norm2.*", f"visual.{_BLOCK}.ln_2.*"),
            ("blocks.{i}.mlp.fc1.*", f"visual.{_BLOCK}.mlp.c_fc.*"),
            ("blocks.{i}.mlp.fc2.*", f"visual.{_BLOCK}.mlp.c_proj.*"),
            ("norm.*", "visual.ln_post.*"),
        ),
    ],
    drop={
        r"transformer\..*|token_embedding\..*|positional_embedding|ln_final\..*|text_projection|text\..*": "text tower",
        r"logit_(scale|bias)|attn_mask": "text tower",
        r"input_resolution|context_length|vocab_size": "a number, not a weight",
    },
)
# OpenAI's own state dicts carry three numbers that no other program writes, and were trained with QuickGELU.
OPENAI = replace(
    OPEN_CLIP,
    about="OpenAI's CLIP, image tower",
    family=settings("clip_quickgelu"),
    matches=lambda n: OPEN_CLIP.matches(n) and has(n, "input_resolution"),
)


def read_config(document: Mapping[str, Any]) -> Known:
    """`open_clip_config.json`."""
    cfg, images = document.get("model_cfg") or {}, document.get("preprocess_cfg") or {}
    vision = cfg.get("vision_cfg") or {}
    model: dict[str, Any] = {"act": "quick_gelu"} if cfg.get("quick_gelu") else {}
    if vision.get("width") and vision.get("head_width"):
        model["num_heads"] = int(vision["width"]) // int(vision["head_width"])
    preprocess = read_preprocess(images)
    if images.get("resize_mode") == "squash":
        preprocess["crop_mode"] = "squash"
    return Known(model, vision.get("image_size"), preprocess)
