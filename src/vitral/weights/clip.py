"""CLIP's image tower as OpenAI and open_clip name it (Radford et al., 2021)."""

from dataclasses import replace

from vitral.weights import layout as ops
from vitral.weights.layout import Layout, has, rule, rules, settings

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
