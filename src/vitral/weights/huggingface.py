"""Hugging Face's names, on disk and in the memory of newer versions, and its `config.json` and
`preprocessor_config.json`, read and written.
"""

from collections.abc import Mapping
from typing import Any

from vitral.config import PositionResize, Preprocess, ViTConfig
from vitral.errors import CheckpointError, ConfigError
from vitral.weights import layout as ops
from vitral.weights.layout import Known, Layout, Names, Rule, has, rule, rules, settings

_RESIZE = PositionResize(mode="bicubic", antialias=False)
_RESIZE_SMOOTH = PositionResize(mode="bicubic", antialias=True)
_PARTS = ("query", "key", "value")
_OLD, _NEW = "encoder.layer.{i}", "layers.{i}"
_TEXT = {
    r"text_model\..*|text_projection\..*|logit_(scale|bias)": "text tower",
    r".*position_ids": "numbers that are counted, not learned",
}
_MASK = {r"embeddings\.mask_token": "stands for hidden patches in the pretraining alone"}
_POOLER = {r"pooler\..*": "a tanh layer that the published backbones never trained"}


def _qkv(suffixed: tuple[str, ...]) -> list[Rule]:
    """Three projections with their biases, fused."""
    return [
        rule(f"blocks.{{i}}.attn.qkv.{what}", tuple(f"{name}.{what}" for name in suffixed), ops.FUSE_QKV)
        for what in ("weight", "bias")
    ]


_EMBEDDINGS = rules(
    ("cls_token", "embeddings.cls_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("patch_embed.proj.*", "embeddings.patch_embeddings.projection.*"),
)
_VIT = [
    *_EMBEDDINGS,
    *_qkv(tuple(f"{_OLD}.attention.attention.{part}" for part in _PARTS)),
    *rules(
        ("blocks.{i}.norm1.*", f"{_OLD}.layernorm_before.*"),
        ("blocks.{i}.attn.proj.*", f"{_OLD}.attention.output.dense.*"),
        ("blocks.{i}.norm2.*", f"{_OLD}.layernorm_after.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_OLD}.intermediate.dense.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_OLD}.output.dense.*"),
        ("norm.*", "layernorm.*"),
    ),
    # in the memory of version 5.9 and later
    *_qkv(tuple(f"{_NEW}.attention.{part}_proj" for part in "qkv")),
    *rules(
        ("blocks.{i}.norm1.*", f"{_NEW}.layernorm_before.*"),
        ("blocks.{i}.attn.proj.*", f"{_NEW}.attention.o_proj.*"),
        ("blocks.{i}.norm2.*", f"{_NEW}.layernorm_after.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_NEW}.mlp.fc1.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_NEW}.mlp.fc2.*"),
    ),
]
_GATED = tuple(f"{_OLD}.mlp.{part}_proj" for part in ("gate", "up"))
_DINOV2 = [
    *_EMBEDDINGS,
    *_qkv(tuple(f"{_OLD}.attention.attention.{part}" for part in _PARTS)),
    *_qkv(tuple(f"{_OLD}.attention.{part}_proj" for part in "qkv")),
    *rules(
        ("reg_token", "embeddings.register_tokens"),
        ("blocks.{i}.norm1.*", f"{_OLD}.norm1.*"),
        ("blocks.{i}.attn.proj.*", f"{_OLD}.attention.output.dense.*"),
        ("blocks.{i}.attn.proj.*", f"{_OLD}.attention.o_proj.*"),
        ("blocks.{i}.ls1.gamma", f"{_OLD}.layer_scale1.lambda1"),
        ("blocks.{i}.norm2.*", f"{_OLD}.norm2.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_OLD}.mlp.fc1.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_OLD}.mlp.fc2.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_OLD}.mlp.weights_in.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_OLD}.mlp.weights_out.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_OLD}.mlp.down_proj.*"),
        ("blocks.{i}.ls2.gamma", f"{_OLD}.layer_scale2.lambda1"),
        ("norm.*", "layernorm.*"),
    ),
    *[
        rule(f"blocks.{{i}}.mlp.fc1.{what}", tuple(f"{name}.{what}" for name in _GATED), ops.FUSE_GATE)
        for what in ("weight", "bias")
    ],
    # an ONNX export keeps the rows of the table apart, without names
    rule("pos_embed", ("embeddings.Concat", "embeddings.Reshape"), ops.JOIN_ROWS),
]
_TOWER = "encoder.layers.{i}"
_CLIP = [
    rule("cls_token", "embeddings.class_embedding", ops.TWO_AXES),
    rule("pos_embed", "embeddings.position_embedding.weight", ops.ONE_AXIS),
    *_qkv(tuple(f"{_TOWER}.self_attn.{part}_proj" for part in "qkv")),
    *rules(
        ("patch_embed.proj.*", "embeddings.patch_embedding.*"),
        ("norm_pre.*", "pre_layrnorm.*"),
        ("blocks.{i}.norm1.*", f"{_TOWER}.layer_norm1.*"),
        ("blocks.{i}.attn.proj.*", f"{_TOWER}.self_attn.out_proj.*"),
        ("blocks.{i}.norm2.*", f"{_TOWER}.layer_norm2.*"),
        ("blocks.{i}.mlp.fc1.*", f"{_TOWER}.mlp.fc1.*"),
        ("blocks.{i}.mlp.fc2.*", f"{_TOWER}.mlp.fc2.*"),
        ("norm.*", "post_layernorm.*"),
        ("head.weight", "visual_projection.weight"),
    ),
]
_SIGLIP = [
    *_CLIP[1:-1],
    rule(("attn_pool.q.weight", "attn_pool.kv.weight"), "head.attention.in_proj_weight", ops.SPLIT_POOL),
    rule(("attn_pool.q.bias", "attn_pool.kv.bias"), "head.attention.in_proj_bias", ops.SPLIT_POOL),
    *rules(
        ("attn_pool.latent", "head.probe"),
        ("attn_pool.proj.*", "head.attention.out_proj.*"),
        ("attn_pool.norm.*", "head.layernorm.*"),
        ("attn_pool.mlp.fc1.*", "head.mlp.fc1.*"),
        ("attn_pool.mlp.fc2.*", "head.mlp.fc2.*"),
    ),
]
_CLASSIFIER = rules(("head.*", "classifier.*"))


def _is_vit(names: Names) -> bool:
    return has(names, "embeddings.position_embeddings") and (
        has(names, "encoder.layer.0.attention.attention.query.weight") or has(names, "layers.0.attention.q_proj.weight")
    )


def _is_dinov2(names: Names) -> bool:
    return has(names, "encoder.layer.0.layer_scale1.lambda1")


HF_DINOV2_REG = Layout(
    "huggingface",
    "Hugging Face's DINOv2 with registers",
    settings("dinov2_reg", pos_resize=_RESIZE_SMOOTH),
    lambda n: _is_dinov2(n) and has(n, "embeddings.register_tokens"),
    [*_DINOV2, *_CLASSIFIER],
    drop=_MASK,
    prefixes=("dinov2_with_registers.", "backbone."),
)
HF_DINOV2 = Layout(
    "huggingface",
    "Hugging Face's DINOv2",
    settings("dinov2", pos_resize=_RESIZE),
    _is_dinov2,
    [*_DINOV2, *_CLASSIFIER],
    drop={**_MASK, r"decoder\..*": "the head of another task"},
    prefixes=("dinov2.", "backbone."),
)
HF_DEIT_DISTILLED = Layout(
    "huggingface",
    "Hugging Face's DeiT with its two heads",
    settings("deit", pos_resize=_RESIZE, norm_eps=1e-12),
    lambda n: _is_vit(n) and has(n, "embeddings.distillation_token", "distillation_classifier.weight"),
    [
        *_VIT,
        *rules(
            ("reg_token", "embeddings.distillation_token"),
            ("head.cls.*", "cls_classifier.*"),
            ("head.dist.*", "distillation_classifier.*"),
        ),
    ],
    prefixes=("deit.",),
    fixed={"pos_registers": True, "global_pool": "cls_dist", "head": "distilled"},
)
HF_DEIT = Layout(
    "huggingface",
    "Hugging Face's DeiT",
    settings("deit", pos_resize=_RESIZE, norm_eps=1e-12),
    lambda n: _is_vit(n) and has(n, "embeddings.distillation_token"),
    [*_VIT, *rules(("reg_token", "embeddings.distillation_token")), *_CLASSIFIER],
    drop=_POOLER,
    prefixes=("deit.",),
    fixed={"pos_registers": True},
)
HF_MAE = Layout(
    "huggingface",
    "Hugging Face's MAE",
    settings("mae", pos_resize=_RESIZE, norm_eps=1e-12),
    lambda n: _is_vit(n) and has(n, "decoder.decoder_embed.weight"),
    _VIT,
    drop={r"decoder\..*": "decoder of the pretraining"},
    prefixes=("vit.",),
)
HF_VIT = Layout(
    "huggingface",
    "Hugging Face's ViT",
    settings(
        "vit",
        {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0},
        pos_resize=_RESIZE,
        norm_eps=1e-12,
    ),
    _is_vit,
    [*_VIT, *_CLASSIFIER],
    drop=_POOLER,
    prefixes=("vit.",),
)
HF_CLIP = Layout(
    "huggingface",
    "Hugging Face's CLIP, image tower",
    settings("clip_quickgelu", pos_resize=_RESIZE),
    lambda n: has(n, "embeddings.class_embedding", "pre_layrnorm.weight"),
    _CLIP,
    drop=_TEXT,
    prefixes=("vision_model.",),
)
HF_SIGLIP = Layout(
    "huggingface",
    "Hugging Face's SigLIP, image tower",
    settings("siglip", pos_resize=_RESIZE),
    lambda n: has(n, "head.probe", "embeddings.position_embedding.weight"),
    _SIGLIP,
    drop=_TEXT,
    prefixes=("vision_model.",),
)


# ---- config.json and preprocessor_config.json ----

ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_RESAMPLE = {2: "bilinear", 3: "bicubic"}


def read_documents(config: Mapping[str, Any], preprocessor: Mapping[str, Any]) -> Known:
    """What `config.json` and `preprocessor_config.json` say."""
    model = _read_model(config)
    preprocess, notes = _read_preprocess(preprocessor)
    return Known(model, model.pop("img_size", None), preprocess, _read_labels(config), notes)


def _read_model(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the model that shapes do not tell."""
    inner = config.get("vision_config")
    config = inner if isinstance(inner, Mapping) else config
    found: dict[str, Any] = {}
    for ours, theirs in (
        ("num_heads", "num_attention_heads"),
        ("norm_eps", "layer_norm_eps"),
        ("img_size", "image_size"),
    ):
        if isinstance(config.get(theirs), int | float | list):
            found[ours] = config[theirs]
    act = config.get("hidden_act")
    if act is not None and not config.get("use_swiglu_ffn"):
        if act not in ACTIVATIONS:
            raise CheckpointError(f"config.json asks for the activation {act!r}; known: {', '.join(ACTIVATIONS)}.")
        found["act"] = ACTIVATIONS[act]
    return found


def _read_labels(config: Mapping[str, Any]) -> list[str] | None:
    """Names of the classes from `id2label`, unless they are only numbered."""
    labels = config.get("id2label")
    if not isinstance(labels, dict) or not labels:
        return None
    try:
        ordered = [str(labels[key]) for key in sorted(labels, key=int)]
    except ValueError:
        raise CheckpointError("config.json has an id2label whose keys are not numbers.") from None
    return None if all(name == f"LABEL_{i}" for i, name in enumerate(ordered)) else ordered


def _read_preprocess(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Options of `Preprocess` from `preprocessor_config.json`, and what could not be taken over."""
    found: dict[str, Any] = {}
    notes = []
    for ours, theirs in (("mean", "image_mean"), ("std", "image_std")):
        if isinstance(document.get(theirs), list):
            found[ours] = tuple(document[theirs])
    if document.get("do_normalize") is False:
        found |= {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    if document.get("do_rescale") is False:
        notes.append("preprocessor_config.json leaves pixels in 0..255; vitral scales them to 0..1")
    resample = document.get("resample")
    if resample in _RESAMPLE:
        found["interpolation"] = _RESAMPLE[resample]
    elif resample is not None:
        found["interpolation"] = "bicubic"
        notes.append(f"preprocessor_config.json asks for Pillow's filter {resample}; bicubic is used")
    crops = bool(document.get("do_center_crop"))
    size, crop = _sides(document.get("size"), shortest=crops), _sides(document.get("crop_size"))
    if "height" in size and not crops:
        found |= {"img_size": (size["height"], size["width"]), "crop_mode": "squash", "crop_pct": 1.0}
    elif crops and crop:
        edge = size.get("shortest_edge") or min(size.get("height", crop["height"]), size.get("width", crop["width"]))
        found |= {"img_size": (crop["height"], crop["width"])}
        found["crop_mode"] = "center" if "shortest_edge" in size else "squash_center"
        found["crop_pct"] = min(1.0, min(crop["height"], crop["width"]) / edge)
    return found, notes


def _sides(size: Any, shortest: bool = False) -> dict[str, int]:
    """A size as Hugging Face writes it: a number, or a dictionary of sides."""
    if isinstance(size, int):
        return {"shortest_edge": size} if shortest else {"height": size, "width": size}
    return {key: int(size[key]) for key in ("shortest_edge", "height", "width") if size.get(key)} if size else {}


def family_of(c: ViTConfig) -> tuple[Layout, str, str]:
    """Which model of Hugging Face's a config is: its layout, `model_type` and architecture, or why it is none."""
    plain = c.block == "pre" and c.positions == "learned" and c.stem == "linear" and not c.norm_after_pool
    square = c.image[0] == c.image[1] and c.patch[0] == c.patch[1]
    cls = c.class_token and c.pos_prefix and c.global_pool in ("cls", "cls_mean", "cls_dist")
    head = bool(c.num_classes)
    plain = plain and square and (c.act != "swiglu" or c.init_values is not None)
    tower = plain and c.qkv_bias and not c.reg_tokens and c.init_values is None
    if tower and c.pre_norm and cls and c.global_pool == "cls" and not c.patch_bias:
        return HF_CLIP, "clip_vision_model", "CLIPVisionModelWithProjection" if head else "CLIPVisionModel"
    if tower and not c.class_token and c.global_pool == "map" and not head and not c.pre_norm and c.patch_bias:
        return HF_SIGLIP, "siglip_vision_model", "SiglipVisionModel"
    if plain and cls and not c.pre_norm and c.patch_bias:
        if c.init_values is not None and c.global_pool == ("cls_mean" if head else "cls") and not c.pos_registers:
            layout, kind, name = (
                (HF_DINOV2_REG, "dinov2_with_registers", "Dinov2WithRegisters")
                if c.reg_tokens
                else (HF_DINOV2, "dinov2", "Dinov2")
            )
            return layout, kind, f"{name}ForImageClassification" if head else f"{name}Model"
        if c.init_values is None and c.reg_tokens == 1 and c.pos_registers:
            if (c.global_pool, c.head) == ("cls_dist", "distilled") and head:
                return HF_DEIT_DISTILLED, "deit", "DeiTForImageClassificationWithTeacher"
            if (c.global_pool, c.head) == ("cls", "linear"):
                return HF_DEIT, "deit", "DeiTForImageClassification" if head else "DeiTModel"
        if c.init_values is None and not c.reg_tokens and c.global_pool == "cls" and c.head == "linear":
            return HF_VIT, "vit", "ViTForImageClassification" if head else "ViTModel"
    raise ConfigError(
        f"Hugging Face has no model like this one (pooling {c.global_pool}, {c.reg_tokens} registers, stem {c.stem}, "
        f"LayerScale {'on' if c.init_values is not None else 'off'}, positions {c.positions}); "
        f"write it as timm or vitral."
    )


def write_config(c: ViTConfig, labels: list[str] | None) -> dict[str, Any]:
    """`config.json` for a model."""
    _, kind, architecture = family_of(c)
    acts = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    document: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": c.embed_dim,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.num_heads,
        "intermediate_size": c.mlp_width,
        "hidden_act": acts.get(c.act, "gelu"),
        "layer_norm_eps": c.norm_eps,
        "image_size": c.image[0],
        "patch_size": c.patch[0],
        "num_channels": c.in_chans,
        "qkv_bias": c.qkv_bias,
    }
    if kind.startswith("dinov2"):
        del document["intermediate_size"]
        document |= {"mlp_ratio": _whole_ratio(c), "use_swiglu_ffn": c.act == "swiglu"}
        document |= {"num_register_tokens": c.reg_tokens} if c.reg_tokens else {}
        document["layerscale_value"] = c.init_values
    if kind == "clip_vision_model":
        document["projection_dim"] = c.num_classes or 512
    else:
        document |= write_labels(c.num_classes, labels)
    return document


def write_labels(num_classes: int, labels: list[str] | None) -> dict[str, Any]:
    """The names of the classes, numbers where they have none, as `config.json` holds them; nothing of no classes."""
    if not num_classes:
        return {}
    names = labels or [f"LABEL_{i}" for i in range(num_classes)]
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
    }


def _whole_ratio(c: ViTConfig) -> int:
    """DINOv2's `mlp_ratio`, a whole number; with SwiGLU two thirds of it, rounded up to 8, are the hidden width."""
    for ratio in range(1, 17):
        wide = c.embed_dim * ratio
        if c.mlp_hidden == ((int(wide * 2 / 3) + 7) // 8 * 8 if c.act == "swiglu" else wide):
            return ratio
    raise ConfigError(
        f"Hugging Face's DINOv2 needs a whole MLP ratio, this model's hidden width is {c.mlp_hidden} for {c.embed_dim}."
    )


def write_preprocessor(model_type: str, p: Preprocess) -> dict[str, Any]:
    """`preprocessor_config.json` for a model."""
    kinds = {"vit": "ViTImageProcessor", "deit": "DeiTImageProcessor", "siglip_vision_model": "SiglipImageProcessor"}
    kinds |= {"clip_vision_model": "CLIPImageProcessor", "swin": "ViTImageProcessor"}
    height, width = p.img_size if isinstance(p.img_size, tuple) else (p.img_size, p.img_size)
    document: dict[str, Any] = {
        "image_processor_type": kinds.get(model_type, "BitImageProcessor"),
        "do_convert_rgb": True,
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
        "resample": {name: number for number, name in _RESAMPLE.items()}[p.interpolation],
    }
    if p.crop_mode == "squash":
        return document | {"size": {"height": height, "width": width}, "do_center_crop": False}
    document |= {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    if p.crop_mode == "squash_center":
        sides = {name: int(side / p.crop_pct + 1e-6) for name, side in (("height", height), ("width", width))}
        return document | {"image_processor_type": "DeiTImageProcessor", "size": sides}
    return document | {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": int(min(height, width) / p.crop_pct + 1e-6)},
    }
