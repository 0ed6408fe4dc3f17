"""torchvision's ViT."""

from vitral.config import PositionResize
from vitral.weights.layout import Layout, rules, settings

_BLOCK = "encoder.layers.encoder_layer_{i}"

TORCHVISION = Layout(
    "torchvision",
    "torchvision",
    settings(
        "deit",
        {"interpolation": "bilinear"},
        pos_resize=PositionResize(mode="bicubic_corners", antialias=False),
    ),
    lambda n: "conv_proj.weight" in n and "encoder.layers.encoder_layer_0.ln_1.weight" in n,
    rules(
        ("cls_token", "class_token"),
        ("pos_embed", "encoder.pos_embedding"),
        ("patch_embed.proj.*", "conv_proj.*"),
        ("blocks.{i}.norm1.*", f"{_BLOCK}.ln_1.*"),
        ("blocks.{i}.attn.qkv.weight", f"{_BLOCK}.self_attention.in_proj_weight"),
        ("blocks.{i}.attn.qkv.bias", f"{_BLOCK}.self_attention.in_proj_bias"),
        ("blocks.{i}.attn.proj.*", f"{_BLOCK}.self_attention.out_proj.*"),
        ("blocks.{i}.norm2.*", f"{_BLOCK}.ln_2.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_BLOCK}.mlp.0.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_BLOCK}.mlp.3.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_BLOCK}.mlp.linear_1.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_BLOCK}.mlp.linear_2.*"),
        ("norm.*", "encoder.ln.*"),
        ("head.*", "heads.head.*"),
    ),
)
