"""`save_model`: a model in the layout of another program, with the files that program reads beside the weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.config import Preprocess, ViTConfig
from vitral.errors import CheckpointError, ConfigError, unknown_name
from vitral.models.backbone import Backbone
from vitral.models.cnn import ResNet
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer
from vitral.weights import google, huggingface, hybrid, resnet, swin, timm
from vitral.weights.atomic import replacing, save_tensors, write_atomically
from vitral.weights.layout import Rule
from vitral.weights.rundir import CONFIG, WEIGHTS, architecture_of, config_document


def save_model(model: Backbone, path: str | Path, layout: str = "timm") -> list[str]:
    """Write a model as vitral, timm, huggingface (folders) or google (one .npz); what will differ there is returned.

    A path that ends in .safetensors gets the weights of timm's layout alone, without its config.json.
    """
    if layout not in WRITERS[VisionTransformer]:
        raise unknown_name("layout to write", layout, WRITERS[VisionTransformer])
    if not isinstance(model, Backbone):
        raise ConfigError(
            f"a {type(model).__name__} is kept as the run that it is; only plain models are written in other layouts."
        )
    writers = WRITERS.get(type(model), {"vitral": _write_vitral})
    if layout not in writers:
        can = ", ".join(writers)
        raise ConfigError(f"a {type(model).__name__} cannot be written in the layout {layout}; it can as {can}.")
    layers = getattr(model.config, "pool_layers", 1)
    if layers > 1 and layout != "vitral":
        raise ConfigError(
            f"other libraries have no head that reads {layers} blocks (pool_layers); write it as vitral, or export it."
        )
    target = Path(path)
    if layout != "google" and target.is_file() and target.suffix != ".safetensors":
        raise CheckpointError(f"{target} is a file; give a folder to write to.")
    try:
        return writers[layout](model, target)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written ({error.strerror or error}).") from error


def to_layout(tensors: dict[str, Tensor], rules: list[Rule], config: ViTConfig) -> dict[str, Tensor]:
    """Our tensors under the names of a layout: its rules, read backwards. Every tensor must find its place."""
    written: dict[str, Tensor] = {}
    left = dict(tensors)
    for step in (expanded for rule in rules for expanded in rule.expand(config.depth)):
        if all(name in left for name in step.ours):
            made = step.op.write([left.pop(name) for name in step.ours], config.num_heads)
            written |= dict(zip(step.theirs, (t.contiguous() for t in made), strict=True))
    if left:
        raise ConfigError(f"this layout has no place for {', '.join(list(left)[:3])}; write it as vitral or timm.")
    return written


def _weights(model: Backbone) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def _write_json(path: Path, document: dict[str, Any]) -> None:
    write_atomically(path, (json.dumps(document, indent=2) + "\n").encode())


# ---- vitral ----


def _write_vitral(model: Backbone, folder: Path) -> list[str]:
    if getattr(model.config, "stem", "") == "custom":
        raise ConfigError(
            "this model's stem is a module of your own, which a run could not rebuild: save model.state_dict()."
        )
    folder.mkdir(parents=True, exist_ok=True)
    parts = {
        "task": "classify",
        "architecture": architecture_of(model),
        "labels": model.labels,
        "model": model.config.to_dict(),
        "preprocess": model.preprocess.to_dict(),
    }
    save_tensors(folder / WEIGHTS, _weights(model))
    write_atomically(folder / CONFIG, config_document(parts))
    return []


# ---- timm ----


def _write_timm(model: VisionTransformer, target: Path) -> list[str]:
    c, notes = model.config, []
    stem = c.stem in ("linear", "resnet")
    plain = stem and c.positions == "learned" and c.block == "pre" and c.patch_bias != c.pre_norm
    plain = plain and c.attention == "plain"
    if not plain or c.head not in ("linear", "distilled"):
        raise ConfigError(
            f"timm has no ViT with stem {c.stem}, positions {c.positions}, block {c.block}, attention {c.attention}, "
            f"head {c.head}, patch_bias {c.patch_bias} and pre_norm {c.pre_norm}; write it as vitral."
        )
    document = timm.write_config(c, model.preprocess, model.labels)
    tensors = _weights(model)
    if timm.folds(c):  # timm gives [CLS] no position where there are registers
        tensors["cls_token"] = tensors["cls_token"] + tensors["pos_embed"][:, :1]
        tensors["pos_embed"] = tensors["pos_embed"][:, 1:]
        notes.append(
            "timm keeps no position for [CLS] beside registers: it is added into cls_token, and cannot be parted"
        )
    rules = timm.DISTILLED if c.head == "distilled" else timm.HEAD
    rules = [*rules, *(hybrid.timm_rules() if c.stem == "resnet" else [])]
    skip = {rule.ours[0] for rule in rules}
    tensors = to_layout(tensors, [*rules, *(rule for rule in timm.OURS if rule.ours[0] not in skip)], c)
    notes += _timm_notes(model, 1e-5 if c.pre_norm else 1e-6)
    if c.pos_resize != timm.TIMM_RESIZE:
        notes.append("timm resizes positions by antialiased bicubic interpolation, whatever the family")
    if target.suffix == ".safetensors":
        notes.append("a file alone holds neither the number of heads nor activation, preprocessing and labels")
    _write_timm_files(target, tensors, document)
    return notes


def _timm_notes(model: VisionTransformer | SwinTransformer, eps: float) -> list[str]:
    """What timm will do otherwise, where it uses that epsilon."""
    notes = []
    if model.config.norm_eps != eps:
        notes.append(f"timm runs this architecture with a norm epsilon of {eps:g}, not {model.config.norm_eps:g}")
    return notes


def _write_timm_files(target: Path, tensors: dict[str, Tensor], document: dict[str, Any]) -> None:
    """A folder of weights and config.json, or the weights alone."""
    if target.suffix == ".safetensors":
        target.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(target, tensors)
        return
    target.mkdir(parents=True, exist_ok=True)
    save_tensors(target / WEIGHTS, tensors)
    _write_json(target / CONFIG, document)


def _write_timm_swin(model: SwinTransformer, target: Path) -> list[str]:
    document = swin.write_timm_config(model.config, model.preprocess, model.labels)
    tensors, notes = swin.timm_tables(_weights(model), model.config)
    notes += _timm_notes(model, 1e-5)
    if target.suffix == ".safetensors":
        notes.append("a file alone holds neither preprocessing nor labels")
    _write_timm_files(target, tensors, document)
    return notes


def _write_timm_resnet(model: ResNet, target: Path) -> list[str]:
    document = resnet.write_timm_config(model.config, model.preprocess, model.labels)
    _write_timm_files(target, _weights(model), document)
    return ["a file alone holds neither preprocessing nor labels"] * (target.suffix == ".safetensors")


# ---- Hugging Face ----


def _write_huggingface(model: VisionTransformer, folder: Path) -> list[str]:
    c, notes = model.config, []
    layout, kind, _ = huggingface.family_of(c)
    tensors = _weights(model)
    if kind == "clip_vision_model":
        if c.num_classes and tensors.pop("head.bias").abs().max() > 0:
            raise ConfigError(
                "Hugging Face's CLIP has no bias in its projection, but this model has; write it as timm."
            )
        notes.append(f"Hugging Face runs CLIP with {c.act}, as config.json says")
    gated = c.act == "swiglu"
    written = to_layout(tensors, [rule for rule in layout.rules if not (gated and ".mlp.fc" in rule.theirs[0])], c)
    prefix = layout.prefixes[0]
    heads = ("classifier.", "cls_classifier.", "distillation_classifier.", "visual_projection.")
    bare = not c.num_classes
    written = {name if bare or name.startswith(heads) else prefix + name: t for name, t in written.items()}
    if kind.startswith("dinov2"):
        written[("" if bare else prefix) + "embeddings.mask_token"] = torch.zeros(1, c.embed_dim)
        notes.append("embeddings.mask_token, which only its pretraining uses, is written as zeros")
    if c.pos_resize != layout.family.model.get("pos_resize"):
        notes.append("Hugging Face resizes positions for other image sizes in its own way")
    _write_huggingface_files(folder, written, huggingface.write_config(c, model.labels), model.preprocess)
    return notes


def _write_huggingface_files(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], p: Preprocess) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(folder / WEIGHTS, tensors)
    _write_json(folder / CONFIG, config)
    _write_json(folder / "preprocessor_config.json", huggingface.write_preprocessor(config["model_type"], p))


def _write_huggingface_swin(model: SwinTransformer, folder: Path) -> list[str]:
    c, notes = model.config, []
    document = swin.write_huggingface_config(c, model.labels)
    if c.norm_eps != 1e-5:
        notes.append("Hugging Face keeps an epsilon of 1e-5 in the norms of patches and of merging")
    _write_huggingface_files(folder, swin.write_names(_weights(model), "huggingface"), document, model.preprocess)
    return notes


# ---- Google ----


def _write_google(model: VisionTransformer, target: Path) -> list[str]:
    c = model.config
    if target.suffix != ".npz":
        raise ConfigError(f"Google's layout is one file that ends in .npz, got {target}.")
    stem = c.stem in ("linear", "resnet")
    plain = stem and c.positions == "learned" and c.block == "pre" and c.global_pool == "cls"
    extras = c.reg_tokens or c.init_values is not None or c.pre_norm or not c.pos_prefix or c.norm_after_pool
    if not plain or extras or c.head not in ("linear", "mlp_tanh") or not c.patch_bias or not c.qkv_bias:
        raise ConfigError(
            "Google's layout holds plain ViTs alone ([CLS] with its position, no registers, no LayerScale)."
        )
    layout = google.GOOGLE if c.head == "linear" else google.GOOGLE_PRE_LOGITS
    rules = [*layout.rules, *(hybrid.google_rules(bool(c.stem_depths)) if c.stem == "resnet" else [])]
    arrays: dict[str, Any] = {name: t.float().numpy() for name, t in to_layout(_weights(model), rules, c).items()}
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as temporary:
        np.savez(temporary, **arrays)
    notes = []
    if c.act != "gelu_tanh":
        notes.append(f"Google's own code would run these weights with GELU by tanh, this model uses {c.act}")
    if model.labels:
        notes.append("Google's layout has no place for labels")
    if model.preprocess.mean != google.GOOGLE.family.preprocess["mean"]:
        notes.append(f"Google's layout has no place for preprocessing; this model wants mean {model.preprocess.mean}")
    if c.norm_eps != 1e-6:
        notes.append(f"Google's own code uses a norm epsilon of 1e-6, this model {c.norm_eps:g}")
    return notes


WRITERS: dict[type[Backbone], dict[str, Callable[[Any, Path], list[str]]]] = {
    VisionTransformer: {
        "vitral": _write_vitral,
        "timm": _write_timm,
        "huggingface": _write_huggingface,
        "google": _write_google,
    },
    SwinTransformer: {"vitral": _write_vitral, "timm": _write_timm_swin, "huggingface": _write_huggingface_swin},
    ResNet: {"vitral": _write_vitral, "timm": _write_timm_resnet},
}
"""The layouts in which each kind can be written."""
