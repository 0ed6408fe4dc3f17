"""Files of every published layout, with every tensor redrawn: what `load_model` makes of them gives the same numbers.

The references are transformers, timm and torchvision themselves; where a layout's own program is not to be had, its
file is written here from a reference of the same mathematics, under the names that the program uses.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from helpers import difference, images, redraw
from peers import import_timm, import_transformers
from vitral import load_model

transformers = import_transformers()
timm = import_timm()

SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 96}
TIMM = {"embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "dynamic_img_size": True}
DINO = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 112, "patch_size": 14}


@dataclass
class Case:
    path: Any
    reference: Any
    """Images -> what the original gives."""
    ours: Any
    """Our model, images -> the same."""
    options: dict


def logits(model, x):
    return model(x)


def tokens(model, x):
    return model.forward_features(x)


def pooled(model, x):
    return model.embed(x)


# ---- Hugging Face ----


def hugging_face(tmp, name, config, answer, ours, in_memory=False, **call):
    theirs = redraw(getattr(transformers, name)(config), seed=1)
    if in_memory:
        save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, tmp / "model.safetensors")
        theirs.config.architectures = [name]
        (tmp / "config.json").write_text(json.dumps(theirs.config.to_dict(), default=str))
    else:
        theirs.save_pretrained(tmp)
    return Case(tmp, lambda x: answer(theirs(x, **call)), ours, {"num_heads": 3})


def vit_config(**options):
    return transformers.ViTConfig(**SMALL, image_size=64, **options)


def hf_vit(tmp):
    return hugging_face(
        tmp,
        "ViTForImageClassification",
        vit_config(num_labels=7),
        lambda o: o.logits,
        logits,
        interpolate_pos_encoding=True,
    )


def hf_vit_in_memory(tmp):
    case = hugging_face(
        tmp, "ViTForImageClassification", vit_config(num_labels=7), lambda o: o.logits, logits, in_memory=True,
        interpolate_pos_encoding=True,
    )  # fmt: skip
    assert any("q_proj" in name for name in transformers.ViTForImageClassification(vit_config()).state_dict())
    return case


def hf_vit_backbone(tmp):
    return hugging_face(
        tmp, "ViTModel", vit_config(), lambda o: o.last_hidden_state, tokens, interpolate_pos_encoding=True
    )


def hf_deit(tmp):
    config = transformers.DeiTConfig(**SMALL, image_size=64, num_labels=7)
    return hugging_face(
        tmp, "DeiTForImageClassification", config, lambda o: o.logits, logits, interpolate_pos_encoding=True
    )


def hf_deit_distilled(tmp):
    config = transformers.DeiTConfig(**SMALL, image_size=64, num_labels=7)
    name = "DeiTForImageClassificationWithTeacher"
    return hugging_face(tmp, name, config, lambda o: o.logits, logits, interpolate_pos_encoding=True)


def hf_dinov2(tmp):
    config = transformers.Dinov2Config(**DINO, num_labels=7, mlp_ratio=3)
    return hugging_face(tmp, "Dinov2ForImageClassification", config, lambda o: o.logits, logits)


def hf_dinov2_swiglu(tmp):
    config = transformers.Dinov2Config(**DINO, use_swiglu_ffn=True)
    return hugging_face(tmp, "Dinov2Model", config, lambda o: o.last_hidden_state, tokens)


def hf_dinov2_swiglu_in_memory(tmp):
    config = transformers.Dinov2Config(**DINO, use_swiglu_ffn=True)
    return hugging_face(tmp, "Dinov2Model", config, lambda o: o.last_hidden_state, tokens, in_memory=True)


def hf_dinov2_registers(tmp):
    config = transformers.Dinov2WithRegistersConfig(**DINO, num_labels=7)
    return hugging_face(tmp, "Dinov2WithRegistersForImageClassification", config, lambda o: o.logits, logits)


def hf_mae(tmp):
    decoder = {f"decoder_{key}": value for key, value in SMALL.items()}
    config = transformers.ViTMAEConfig(**SMALL, **decoder, image_size=64, mask_ratio=0.0)
    theirs = redraw(transformers.ViTMAEForPreTraining(config), seed=1)
    theirs.save_pretrained(tmp)

    def reference(x):
        patches = (x.shape[2] // 16) * (x.shape[3] // 16)
        noise = torch.arange(patches)[None].expand(len(x), -1).float()  # nothing hidden, nothing shuffled
        return theirs.vit(x, noise=noise, interpolate_pos_encoding=True).last_hidden_state

    return Case(tmp, reference, tokens, {"num_heads": 3})


def hf_clip(tmp):
    config = transformers.CLIPVisionConfig(**SMALL, image_size=64, patch_size=16, projection_dim=9)
    name = "CLIPVisionModelWithProjection"
    return hugging_face(tmp, name, config, lambda o: o.image_embeds, logits, interpolate_pos_encoding=True)


def hf_siglip(tmp):
    config = transformers.SiglipVisionConfig(**SMALL, image_size=64, patch_size=16)
    name = "SiglipVisionModel"
    return hugging_face(tmp, name, config, lambda o: o.pooler_output, pooled, interpolate_pos_encoding=True)


# ---- timm ----


def timm_model(name, **options):
    return redraw(timm.create_model(name, **{**TIMM, "img_size": 64, **options}), seed=1)


def timm_file(tmp, name, ours=logits, **options):
    theirs = timm_model(name, **options)
    save_file({k: v.contiguous() for k, v in theirs.state_dict().items()}, tmp / "model.safetensors")
    reference = theirs.forward_features if ours is tokens else theirs
    return Case(tmp / "model.safetensors", reference, ours, {"num_heads": 3})


def timm_folder(tmp, name, ours=logits, **options):
    """As timm pushes a model to the hub."""
    theirs = timm_model(name, **options)
    timm.models.save_for_hf(theirs, tmp, model_config={"label_names": [f"thing {i}" for i in range(7)]})
    return Case(tmp, theirs.forward_features if ours is tokens else theirs, ours, {"num_heads": 3})


def timm_vit(tmp):
    return timm_file(tmp, "vit_tiny_patch16_224", num_classes=7)


def timm_vit_folder(tmp):
    return timm_folder(tmp, "vit_tiny_patch16_224", num_classes=7)


def timm_deit3(tmp):
    return timm_folder(tmp, "deit3_small_patch16_224", num_classes=7)


def timm_dinov2(tmp):
    return timm_file(tmp, "vit_small_patch14_dinov2", tokens, img_size=112)


def timm_dinov2_registers(tmp):
    return timm_file(tmp, "vit_small_patch14_reg4_dinov2", tokens, img_size=112)


def timm_swiglu(tmp):
    return timm_folder(tmp, "vit_giant_patch14_reg4_dinov2", tokens, img_size=112, mlp_ratio=4.0)


def timm_clip(tmp):
    return timm_folder(tmp, "vit_base_patch16_clip_224", num_classes=9)


def timm_siglip(tmp):
    return timm_folder(tmp, "vit_base_patch16_siglip_224", pooled, num_classes=0)


# ---- files of research programs ----


def pth(tmp, theirs, content, ours, **options):
    torch.save(content, tmp / "checkpoint.pth")
    return Case(tmp / "checkpoint.pth", theirs, ours, {"num_heads": 3, **options})


def plain(**options):
    return timm_model("vit_tiny_patch16_224", **options)


def bicubic(theirs, offset=0.0, prefix=1):
    """A timm model, run on another size with positions resized as the original program does it."""
    table, grid = theirs.pos_embed.detach().clone(), theirs.patch_embed.grid_size

    def run(x, forward=theirs):
        new = [side // patch for side, patch in zip(x.shape[2:], theirs.patch_embed.patch_size, strict=True)]
        rows = table[:, prefix:].reshape(1, *grid, -1).permute(0, 3, 1, 2)
        if tuple(new) == tuple(grid):
            pass
        elif offset:
            scale = [(n + offset) / g for n, g in zip(new, grid, strict=True)]
            rows = F.interpolate(rows, scale_factor=scale, mode="bicubic")
        else:
            rows = F.interpolate(rows, size=new, mode="bicubic", align_corners=False)
        theirs.pos_embed.data = torch.cat([table[:, :prefix], rows.flatten(2).mT], 1)
        theirs.patch_embed.grid_size, kept = tuple(new), theirs.patch_embed.grid_size
        original, theirs.patch_embed.img_size = theirs.patch_embed.img_size, tuple(x.shape[2:])
        try:
            with torch.no_grad():
                return forward(x)
        finally:
            theirs.pos_embed.data, theirs.patch_embed.grid_size = table, kept
            theirs.patch_embed.img_size = original

    return run


def deit(tmp):
    theirs = plain(num_classes=7)
    return pth(tmp, bicubic(theirs), {"model": theirs.state_dict()}, logits)


def deit_distilled(tmp):
    theirs = redraw(timm.create_model("deit_tiny_distilled_patch16_224", **TIMM, img_size=64, num_classes=7), seed=1)
    return pth(tmp, bicubic(theirs, prefix=2), {"model": theirs.state_dict()}, logits)


def deit3(tmp):
    theirs = timm_model("deit3_small_patch16_224", num_classes=7)
    content = {
        k.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): v for k, v in theirs.state_dict().items()
    }
    return pth(tmp, bicubic(theirs, prefix=0), {"model": content}, logits)


def dino(tmp):
    theirs = plain(num_classes=0)
    return pth(tmp, lambda x: bicubic(theirs, 0.1)(x, theirs.forward_features), theirs.state_dict(), tokens)


def dino_full(tmp):
    import argparse

    theirs = plain(num_classes=0)
    head = {"head.mlp.0.weight": torch.randn(8, 48), "head.last_layer.weight_g": torch.randn(9, 1)}
    teacher = {f"backbone.{k}": v for k, v in theirs.state_dict().items()} | head
    student = {f"module.{k}": torch.randn_like(v) for k, v in teacher.items()}
    content = {"student": student, "teacher": teacher, "epoch": 3, "args": argparse.Namespace(arch="vit_small")}
    return pth(tmp, lambda x: bicubic(theirs, 0.1)(x, theirs.forward_features), content, tokens)


def dinov2_official(tmp):
    theirs = timm_model("vit_small_patch14_dinov2", img_size=112)
    chunked = {}
    for name, value in theirs.state_dict().items():
        number = int(name.split(".")[1]) if name.startswith("blocks.") else 0
        chunked[name.replace("blocks.", f"blocks.{number // 2}.", 1)] = value
    content = {f"backbone.{k}": v for k, v in chunked.items()} | {"dino_head.mlp.0.weight": torch.zeros(2, 2)}
    content["backbone.mask_token"] = torch.randn(1, 48)
    return pth(tmp, lambda x: bicubic(theirs, 0.1)(x, theirs.forward_features), {"teacher": content}, tokens)


def dinov2_registers_official(tmp):
    theirs = timm_model("vit_small_patch14_reg4_dinov2", img_size=112)
    given = dict(theirs.state_dict())
    row = torch.randn(1, 1, 48)
    given["pos_embed"] = torch.cat([row, given["pos_embed"]], 1)
    given["cls_token"] = given["cls_token"] - row
    given["register_tokens"] = given.pop("reg_token")
    given["mask_token"] = torch.randn(1, 48)
    return pth(tmp, theirs.forward_features, given, tokens)


def mae(tmp):
    theirs = plain(num_classes=0)
    return pth(tmp, lambda x: bicubic(theirs)(x, theirs.forward_features), {"model": theirs.state_dict()}, tokens)


def mae_full(tmp):
    theirs = plain(num_classes=0)
    decoder = {"mask_token": torch.randn(1, 1, 32), "decoder_embed.weight": torch.randn(32, 48)}
    content = {"model": theirs.state_dict() | decoder | {"decoder_blocks.0.norm1.weight": torch.ones(32)}}
    return pth(tmp, lambda x: bicubic(theirs)(x, theirs.forward_features), content, tokens)


def mae_tuned(tmp):
    theirs = plain(num_classes=7, global_pool="avg", fc_norm=True)
    return pth(tmp, bicubic(theirs), {"model": theirs.state_dict()}, logits)


def open_clip(tmp):
    config = transformers.CLIPVisionConfig(**SMALL, image_size=64, patch_size=16, projection_dim=9, hidden_act="gelu")
    theirs = redraw(transformers.CLIPVisionModelWithProjection(config), seed=1)
    given = theirs.state_dict()
    body = "vision_model.encoder.layers"
    content = {
        "visual.class_embedding": given["vision_model.embeddings.class_embedding"],
        "visual.positional_embedding": given["vision_model.embeddings.position_embedding.weight"],
        "visual.conv1.weight": given["vision_model.embeddings.patch_embedding.weight"],
        "visual.proj": given["visual_projection.weight"].T.contiguous(),
        "logit_scale": torch.tensor(1.0),
        "token_embedding.weight": torch.randn(5, 5),
        "transformer.resblocks.0.ln_1.weight": torch.randn(5),
    }
    for i in range(3):
        block = f"visual.transformer.resblocks.{i}"
        for kind in ("weight", "bias"):
            qkv = [given[f"{body}.{i}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
            content[f"{block}.attn.in_proj_{kind}"] = torch.cat(qkv)
            pairs = {"attn.out_proj": "self_attn.out_proj", "ln_1": "layer_norm1", "ln_2": "layer_norm2"}
            pairs |= {"mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
            content |= {f"{block}.{a}.{kind}": given[f"{body}.{i}.{b}.{kind}"] for a, b in pairs.items()}
    for kind in ("weight", "bias"):
        content[f"visual.ln_pre.{kind}"] = given[f"vision_model.pre_layrnorm.{kind}"]
        content[f"visual.ln_post.{kind}"] = given[f"vision_model.post_layernorm.{kind}"]
    torch.save({"state_dict": {f"module.{k}": v for k, v in content.items()}, "epoch": 1}, tmp / "clip.pt")
    return Case(tmp / "clip.pt", lambda x: theirs(x).image_embeds, logits, {"num_heads": 3})


def torchvision_vit(tmp):
    from torchvision.models import vision_transformer as tv

    made = {"patch_size": 16, "num_layers": 3, "num_heads": 3, "hidden_dim": 48, "mlp_dim": 96, "num_classes": 7}
    theirs = redraw(tv.VisionTransformer(image_size=64, **made), seed=1)
    torch.save(theirs.state_dict(), tmp / "vit.pth")

    def reference(x):
        state = tv.interpolate_embeddings(x.shape[2], 16, dict(theirs.state_dict()), interpolation_mode="bicubic")
        other = tv.VisionTransformer(image_size=x.shape[2], **made).eval()
        other.load_state_dict(state)
        return other(x)

    return Case(tmp / "vit.pth", reference, logits, {"num_heads": 3})


# ---- Google ----


def google_arrays(theirs, prefix="", attention="MultiHeadDotProductAttention_1", norm2="LayerNorm_2", mlp="MlpBlock_3"):
    """A timm ViT as the arrays of a flax one, written out by the definition of flax's layers."""
    w = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    D, h = 48, 3
    arrays = {
        "embedding/kernel": w["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": w["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": w["norm.weight"],
        "Transformer/encoder_norm/bias": w["norm.bias"],
    }
    if "head.weight" in w:
        arrays |= {"head/kernel": w["head.weight"].T, "head/bias": w["head.bias"]}
    if "cls_token" in w:
        arrays["cls"] = w["cls_token"]
    for i in range(3):
        ours, block = f"blocks.{i}", f"Transformer/encoderblock_{i}"
        for part, rows in zip(("query", "key", "value"), range(3), strict=True):
            at = slice(rows * D, (rows + 1) * D)
            arrays[f"{block}/{attention}/{part}/kernel"] = w[f"{ours}.attn.qkv.weight"][at].T.reshape(D, h, D // h)
            arrays[f"{block}/{attention}/{part}/bias"] = w[f"{ours}.attn.qkv.bias"][at].reshape(h, D // h)
        arrays[f"{block}/{attention}/out/kernel"] = w[f"{ours}.attn.proj.weight"].T.reshape(h, D // h, D)
        arrays[f"{block}/{attention}/out/bias"] = w[f"{ours}.attn.proj.bias"]
        for theirs_norm, ours_norm in (("LayerNorm_0", "norm1"), (norm2, "norm2")):
            arrays[f"{block}/{theirs_norm}/scale"] = w[f"{ours}.{ours_norm}.weight"]
            arrays[f"{block}/{theirs_norm}/bias"] = w[f"{ours}.{ours_norm}.bias"]
        for n in (1, 2):
            arrays[f"{block}/{mlp}/Dense_{n - 1}/kernel"] = w[f"{ours}.mlp.fc{n}.weight"].T
            arrays[f"{block}/{mlp}/Dense_{n - 1}/bias"] = w[f"{ours}.mlp.fc{n}.bias"]
    return {prefix + name: np.ascontiguousarray(array) for name, array in arrays.items()}


def zoomed(theirs, prefix=1):
    """Positions as scipy.ndimage.zoom of order 1 gives them."""
    from scipy.ndimage import zoom

    table, grid = theirs.pos_embed.detach().clone(), theirs.patch_embed.grid_size

    def run(x):
        new = x.shape[2] // 16
        rows = table[0, prefix:].reshape(*grid, -1).numpy()
        rows = torch.from_numpy(zoom(rows, (new / grid[0], new / grid[1], 1), order=1)).reshape(1, new * new, -1)
        other = timm.create_model(**theirs.made | {"img_size": x.shape[2]}).eval()
        state = theirs.state_dict() | {"pos_embed": torch.cat([table[:, :prefix], rows], 1)}
        other.load_state_dict(state)
        return other(x)

    return run


def google_reference(name="vit_tiny_patch16_224", **options):
    made = {"model_name": name, **TIMM, "img_size": 64, "act_layer": "gelu_tanh", **options}
    theirs = redraw(timm.create_model(**made), seed=1)
    theirs.made = made
    return theirs


def google(tmp, prefix=""):
    theirs = google_reference(num_classes=7)
    arrays = google_arrays(theirs, prefix)
    arrays[f"{prefix}Transformer/posembed_input/pos_embedding"] = theirs.pos_embed.detach().numpy()
    np.savez(tmp / "vit.npz", **arrays)
    return Case(tmp / "vit.npz", zoomed(theirs), logits, {})


def google_opt_target(tmp):
    return google(tmp, "opt/target/")


def google_pre_logits(tmp):
    theirs = google_reference(num_classes=7)
    arrays = google_arrays(theirs)
    arrays["Transformer/posembed_input/pos_embedding"] = theirs.pos_embed.detach().numpy()
    kernel, bias = np.random.default_rng(0).normal(size=(2, 48, 48)).astype(np.float32) * 0.1
    arrays |= {"pre_logits/kernel": kernel, "pre_logits/bias": bias[0]}
    np.savez(tmp / "vit.npz", **arrays)

    def reference(x):
        y = torch.tanh(
            theirs.forward_head(theirs.forward_features(x), pre_logits=True) @ torch.from_numpy(kernel)
            + torch.from_numpy(bias[0])
        )
        return theirs.head(y)

    return Case(tmp / "vit.npz", reference, logits, {})


def big_vision(tmp, scanned=False):
    theirs = google_reference("vit_base_patch16_siglip_224", num_classes=0)
    names = {"attention": "MultiHeadDotProductAttention_0", "norm2": "LayerNorm_1", "mlp": "MlpBlock_0"}
    arrays = google_arrays(theirs, **names)
    w = {k: v.detach().numpy() for k, v in theirs.state_dict().items()}
    arrays["pos_embedding"] = w["pos_embed"]
    pool, attention = "MAPHead_0", "MAPHead_0/MultiHeadDotProductAttention_0"
    parts = np.split(w["attn_pool.kv.weight"], 2), np.split(w["attn_pool.kv.bias"], 2)
    for part, kernel, bias in (
        ("query", w["attn_pool.q.weight"], w["attn_pool.q.bias"]),
        ("key", parts[0][0], parts[1][0]),
        ("value", parts[0][1], parts[1][1]),
    ):
        arrays[f"{attention}/{part}/kernel"] = kernel.T.reshape(48, 3, 16)
        arrays[f"{attention}/{part}/bias"] = bias.reshape(3, 16)
    arrays |= {
        f"{attention}/out/kernel": w["attn_pool.proj.weight"].T.reshape(3, 16, 48),
        f"{attention}/out/bias": w["attn_pool.proj.bias"],
    }
    arrays |= {f"{pool}/probe": w["attn_pool.latent"], f"{pool}/LayerNorm_0/scale": w["attn_pool.norm.weight"]}
    arrays |= {f"{pool}/LayerNorm_0/bias": w["attn_pool.norm.bias"]}
    for n in (1, 2):
        arrays[f"{pool}/MlpBlock_0/Dense_{n - 1}/kernel"] = w[f"attn_pool.mlp.fc{n}.weight"].T
        arrays[f"{pool}/MlpBlock_0/Dense_{n - 1}/bias"] = w[f"attn_pool.mlp.fc{n}.bias"]
    if scanned:
        stacked = {n.replace("block_0/", "block/"): [] for n in arrays if "encoderblock_0/" in n}
        for name, rows in stacked.items():
            rows += [arrays.pop(name.replace("block/", f"block_{i}/")) for i in range(3)]
        arrays |= {name: np.stack(rows) for name, rows in stacked.items()}
    arrays = {f"params/img/{name}": np.ascontiguousarray(array) for name, array in arrays.items()}
    arrays |= {"params/txt/Encoder_0/x": np.zeros(3, np.float32), "params/t": np.zeros(1, np.float32)}
    np.savez(tmp / "siglip.npz", **arrays)
    return Case(tmp / "siglip.npz", zoomed(theirs, prefix=0), pooled, {})


def big_vision_scanned(tmp):
    return big_vision(tmp, scanned=True)


SQUARE = [(64, 64), (96, 96)]
ANY = [(64, 64), (96, 96), (48, 80)]
ANY14 = [(112, 112), (140, 140), (84, 126)]
CASES = [
    (hf_vit, ANY),
    (hf_vit_in_memory, ANY),
    (hf_vit_backbone, ANY),
    (hf_deit, ANY),
    (hf_deit_distilled, ANY),
    (hf_dinov2, ANY14),
    (hf_dinov2_swiglu, ANY14),
    (hf_dinov2_swiglu_in_memory, ANY14),
    (hf_dinov2_registers, ANY14),
    (hf_mae, SQUARE),
    (hf_clip, ANY),
    (hf_siglip, ANY),
    (timm_vit, ANY),
    (timm_vit_folder, ANY),
    (timm_deit3, ANY),
    (timm_dinov2, ANY14),
    (timm_dinov2_registers, ANY14),
    (timm_swiglu, ANY14),
    (timm_clip, ANY),
    (timm_siglip, ANY),
    (deit, ANY),
    (deit_distilled, ANY),
    (deit3, ANY),
    (dino, ANY),
    (dino_full, ANY),
    (dinov2_official, ANY14),
    (dinov2_registers_official, ANY14),
    (mae, ANY),
    (mae_full, ANY),
    (mae_tuned, ANY),
    (open_clip, [(64, 64)]),
    (torchvision_vit, SQUARE),
    (google, SQUARE),
    (google_opt_target, SQUARE),
    (google_pre_logits, [(64, 64)]),
    (big_vision, SQUARE),
    (big_vision_scanned, SQUARE),
]


@pytest.mark.parametrize(("make", "sizes"), CASES, ids=[make.__name__ for make, _ in CASES])
@torch.no_grad()
def test_it_gives_the_numbers_of_the_original(tmp_path, make, sizes):
    case = make(tmp_path)
    model = load_model(case.path, quiet=True, **case.options)
    for size in sizes:
        x = images(2, 3, *size)
        assert difference(case.ours(model, x), case.reference(x)) <= 1e-4, size
    # the same table, resized when it is loaded
    resized = load_model(case.path, quiet=True, img_size=sizes[1] if len(sizes) > 1 else sizes[0], **case.options)
    x = images(2, 3, *resized.config.image)
    assert difference(case.ours(resized, x), case.reference(x)) <= 1e-4


@pytest.mark.slow
@torch.no_grad()
def test_a_full_base_16_of_hugging_face(tmp_path):
    theirs = redraw(transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=1000)), seed=1)
    theirs.save_pretrained(tmp_path, max_shard_size="100MB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    x = images(1, 3, 224, 224)
    assert difference(load_model(tmp_path, quiet=True)(x), theirs(x).logits) <= 1e-4
