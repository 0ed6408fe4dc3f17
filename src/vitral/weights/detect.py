"""Whose file is this, and what model is in it: told by names, shapes and container, without reading the weights.

The first layout that matches is it. What the shapes leave open (heads, activation, epsilon, how positions are resized)
comes from `config.json` where there is one, and else from what is known of the family; the report says which.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from vitral.config import Preprocess, ViTConfig
from vitral.errors import CheckpointError, unknown_name
from vitral.models.zoo import FAMILIES, MODELS
from vitral.weights import clip, google, huggingface, timm, torchvision
from vitral.weights.files import WeightFile
from vitral.weights.infer import infer
from vitral.weights.layout import Known, Layout, Names, Plan, fitting_labels, has, make_plan, settings

# In the order in which they are tried: the more particular first. DETR and Swin have readers of their own,
# `weights/detr.py` and `weights/swin.py`.
LAYOUTS: list[Layout] = [
    *google.HYBRIDS,
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
    timm.HYBRID,
    timm.MAE_FULL,
    timm.DEIT_DISTILLED,
    timm.DEIT_III,
    timm.DINOV2_REG,
    timm.DINOV2_PLAIN,
]

# What is not a plain ViT, by a name that only it has.
FOREIGN = [
    (
        r"(^|\.)layers\.0\.blocks\.0\.attn\.(relative_position_bias_table|logit_scale)$",
        "a model around Swin, or Swin V2",
    ),
    (r"^(swin|swinv2)\.encoder\.", "a model around Swin, or Swin V2"),
    (r"(^|\.)swinViT\.", "a Swin Transformer for segmentation (SwinUNETR)"),
    (r"(^|\.)query_embed\.weight$|query_position_embeddings", "a DETR detector"),  # or a relative of it
    (r"(^|\.)storage_tokens$|rope_embed\.periods$", "a DINOv3 model, with rotary positions"),
    (r"(^|\.)to_patch_embedding\.", "a model of vit-pytorch, whose patches pass two norms and whose qkv has no bias"),
    (r"^encoder\.patch_embed\.backbone\.", "a hybrid: a ViT on top of a ResNet stem"),  # inside another model
    (r"patch_embed\.backbone\.(conv1|0)\.", "a hybrid of another kind: a ViT behind a ResNet-D or MobileCLIP's stem"),
    (r"(^|\.)layers\.0\.blocks\.0\.conv1\.c\.weight$", "TinyViT (MobileSAM's image encoder)"),
    (r"blocks\.0\.attn\.rel_pos_h$", "the image encoder of SAM or ViTDet, with relative positions"),
    (r"(^|\.)conv_head\.weight$|_conv_stem\.|(^|\.)layer1\.0\.conv1\.weight$", "a convolutional network"),
]
_FOREIGN = [(re.compile(pattern, re.MULTILINE), what) for pattern, what in FOREIGN]  # once: it takes as long as a look

_DETR_QUERIES = ("query_embed.weight", "query_position_embeddings.weight")
_DETR_DECODER = ("decoder.layers.0.multihead_attn.in_proj_weight", "decoder.layers.0.encoder_attn.q_proj.weight")


def is_detector(names: Names) -> bool:
    """Whether these are the names of a DETR. (Its relatives, with other attentions, are not.)"""
    return any(name.endswith(_DETR_QUERIES) for name in names) and any(name.endswith(_DETR_DECODER) for name in names)


def is_resnet(names: Names) -> bool:
    """Whether these are the names of a ResNet (of the plain kind: its relatives begin or go on otherwise)."""
    return {"conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight"} <= set(names)


SWIN_TABLES = [  # the first table of biases, by the program that named it
    r"^(encoder\.)?layers\.0\.blocks\.0\.attn\.relative_position_bias_table$",
    r"^(swin\.)?encoder\.layers\.0\.blocks\.0\.attention\.(self|relative_position_bias)\.relative_position_bias_table$",
]


def is_swin(names: Names) -> bool:
    """Whether these are the names of a Swin. (Swin V2, and models that have a Swin within them, are not.)"""
    return any(re.search(pattern, name) for pattern in SWIN_TABLES for name in names)


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

    @property
    def told(self) -> str:
        """Whose file it is, and what told it."""
        return f"{self.layout.about}, told by {self.why}"


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
    config, reasons = infer(file, layout, plan.shapes(), known.model, given, (native_size, known.size, img_size))
    options = {"img_size": config.image} | layout.family.preprocess | known.preprocess
    try:
        preprocess = Preprocess.from_dict(options).for_channels(config.in_chans)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the preprocessing beside {file.path} cannot be used: {error}") from error
    for name in ("mean", "std", "interpolation", "crop_mode", "crop_pct"):
        reasons[name] = "a file beside the weights" if name in known.preprocess else layout.about
    notes = list(known.notes)
    labels = fitting_labels(known.labels, config.num_classes, notes)
    return Detected(layout, plan, config, preprocess, labels, reasons, why, notes)


def find_layout(file: WeightFile, family: str | None = None) -> tuple[Layout, str]:
    """The layout of a file, and what told it."""
    names = file.tensors
    lines = "\n".join(names)
    for pattern, what in _FOREIGN:
        if found := pattern.search(lines):
            name = lines[: found.end()].rpartition("\n")[2] + lines[found.end() :].partition("\n")[0]
            raise CheckpointError(f"{file.path} is not a plain ViT: it looks like {what} (tensor {name}).")
    layout, why = next(((each, "its tensor names") for each in LAYOUTS if each.matches(names)), (None, ""))
    architecture = file.config.get("architecture")
    if layout is None and timm.TIMM.matches(names):
        layout, why = _among_timm_names(file)
    elif layout is timm.OPEN_CLIP_TRUNK:
        layout = _as_timm_runs(timm.OPEN_CLIP_TRUNK, "siglip", act=_siglip_act(names))
    elif layout is not None and isinstance(architecture, str) and layout.name in ("deit", "dinov2", "mae"):
        layout = _resized_as_timm_does(layout)
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
    kept = settings(family, **model)
    return _resized_as_timm_does(replace(layout, family=kept, about=kept.about))


def _resized_as_timm_does(layout: Layout) -> Layout:
    """The same layout, with positions resized as timm resizes them, whoever trained the weights."""
    model = {**layout.family.model, "pos_resize": timm.TIMM_RESIZE}
    return replace(layout, family=replace(layout.family, model=model), about=f"timm ({layout.about})")


def _from_documents(file: WeightFile, layout: Layout) -> Known:
    """What the files beside the weights say, each read by the layout that writes it."""
    if layout.name == "huggingface":
        return huggingface.read_documents(file.config, file.preprocessor)
    if layout.name == "open_clip" and "open_clip" in file.config:
        return clip.read_config(file.config["open_clip"])
    return timm.read_config(file.config) if "architecture" in file.config else Known()
