"""The same numbers as Hugging Face transformers, with every tensor redrawn and copied over by name here in the test."""

import pytest
import torch

from helpers import difference, images, redraw
from peers import import_transformers
from vitral.config import PositionResize
from vitral.models.zoo import create_model

transformers = import_transformers()

BLOCK_NAMES = {  # ours: transformers' in a ViT, in a DINOv2
    "norm1": ("layernorm_before", "norm1"),
    "norm2": ("layernorm_after", "norm2"),
    "attn.proj": ("attention.o_proj", "attention.o_proj"),
    "mlp.fc1": ("mlp.fc1", "mlp.fc1"),
    "mlp.fc2": ("mlp.fc2", "mlp.fc2"),
}


def in_our_names(theirs, base, layers, dino):
    """Their state dict under our names."""
    given = theirs.state_dict()
    ours = {
        "cls_token": given[f"{base}.embeddings.cls_token"],
        "pos_embed": given[f"{base}.embeddings.position_embeddings"],
    }
    if (registers := given.get(f"{base}.embeddings.register_tokens")) is not None:
        ours["reg_token"] = registers
    for kind in ("weight", "bias"):
        ours[f"patch_embed.proj.{kind}"] = given[f"{base}.embeddings.patch_embeddings.projection.{kind}"]
        ours[f"norm.{kind}"] = given[f"{base}.layernorm.{kind}"]
        ours[f"head.{kind}"] = given[f"classifier.{kind}"]
        for i in range(theirs.config.num_hidden_layers):
            for name, names in BLOCK_NAMES.items():
                ours[f"blocks.{i}.{name}.{kind}"] = given[f"{base}.{layers}.{i}.{names[dino]}.{kind}"]
            qkv = [given[f"{base}.{layers}.{i}.attention.{part}_proj.{kind}"] for part in "qkv"]
            ours[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(qkv)
    if dino:
        for i in range(theirs.config.num_hidden_layers):
            for k in (1, 2):
                ours[f"blocks.{i}.ls{k}.gamma"] = given[f"{base}.{layers}.{i}.layer_scale{k}.lambda1"]
    return ours


@pytest.mark.parametrize("size", [(224, 224), (160, 288)])
@torch.no_grad()
def test_vit_for_image_classification(size):
    config = transformers.ViTConfig(
        hidden_size=192, num_attention_heads=3, intermediate_size=768, num_hidden_layers=12, num_labels=37
    )
    theirs = redraw(transformers.ViTForImageClassification(config), seed=1)
    ours = create_model(
        "vit_tiny_patch16_224", num_classes=37, norm_eps=1e-12, pos_resize=PositionResize(antialias=False)
    ).eval()
    ours.load_state_dict(in_our_names(theirs, "vit", "layers", dino=False))
    x = images(2, 3, *size)
    assert difference(ours(x), theirs(x, interpolate_pos_encoding=True).logits) <= 1e-5
    if size == (224, 224):
        attentions = transformers.ViTForImageClassification._from_config(config, attn_implementation="eager")
        attentions.load_state_dict(theirs.state_dict())
        reference = attentions.eval()(x, output_attentions=True).attentions
        for a, b in zip(ours.attention(x, "all", "all"), reference, strict=True):
            assert difference(a, b) <= 1e-5


@pytest.mark.parametrize("size", [(224, 224), (196, 266), (518, 518)])
@pytest.mark.parametrize("registers", [False, True])
@torch.no_grad()
def test_dinov2_for_image_classification(size, registers):
    kind = "Dinov2WithRegisters" if registers else "Dinov2"
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=96, num_attention_heads=6, num_hidden_layers=5, image_size=518, patch_size=14, num_labels=37
    )
    theirs = redraw(getattr(transformers, f"{kind}ForImageClassification")(config), seed=1)
    ours = create_model(
        "vit_small_patch14_reg4_dinov2" if registers else "vit_small_patch14_dinov2",
        embed_dim=96,
        depth=5,
        num_classes=37,
        global_pool="cls_mean",
        pos_prefix=True,
        pos_resize=PositionResize(antialias=registers),
    ).eval()
    base = "dinov2_with_registers" if registers else "dinov2"
    ours.load_state_dict(in_our_names(theirs, base, "encoder.layer", dino=True))
    x = images(1, 3, *size)
    assert difference(ours(x), theirs(x).logits) <= 1e-5
    assert difference(ours.forward_features(x), getattr(theirs, base)(x).last_hidden_state) <= 1e-5
