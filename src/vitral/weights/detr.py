"""DETR's files (Carion et al., 2020): the authors' own, and Hugging Face's on disk and in memory.

Names become ours by a table of patterns, applied in order. What shapes do not tell (heads, activation, dilation) comes
from `config.json`, and else is as DETR was trained.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.config import DetectorConfig, Preprocess, ResNetConfig
from vitral.errors import CheckpointError, VitralError
from vitral.models.detector import Detector
from vitral.models.init import blank
from vitral.weights.adapt import adapt_channels
from vitral.weights.files import WeightFile
from vitral.weights.huggingface import read_documents
from vitral.weights.layout import Known, Op, Pattern, Plan, Rule, fitting_labels, rule, translate
from vitral.weights.load import read_plan, refuse_broken, refuse_gaps, refuse_shapes
from vitral.weights.report import LoadReport
from vitral.weights.resnet import kind_of

Size = int | tuple[int, int]
SPLIT_QKV = Op("in_proj split", lambda ts: ts[0].chunk(3), lambda ts, heads: [torch.cat(list(ts))])
HEADS = 8
"""Of every published DETR."""
CLASS_HEAD = ("class_head.weight", "class_head.bias")


def _next(text: str) -> Callable[[re.Match[str]], str]:
    """Counted from 1 what they count from 0."""
    return lambda found: text.format(int(found[1]) + 1)


def _box_head(found: re.Match[str]) -> str:
    """Every second place: between two layers we count the activation."""
    return f"box_head.{2 * int(found[1])}."


WRAPPER: Pattern = (r"^detr\.", "")  # around the detector in models that also segment

OFFICIAL: list[Pattern] = [
    WRAPPER,
    (r"^backbone\.0\.body\.", "backbone."),
    (r"^query_embed\.weight$", "queries.position"),
    (r"^transformer\.(encoder|decoder)\.layers\.", r"\1."),
    (r"^transformer\.encoder\.norm\.", "encoder_norm."),
    (r"^transformer\.decoder\.norm\.", "norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.multihead_attn\.", ".cross_attn."),
    (r"\.out_proj\.", ".proj."),
    (r"\.linear([12])\.", r".mlp.fc\1."),
    (r"^class_embed\.", "class_head."),
    (r"^bbox_embed\.layers\.(\d)\.", _box_head),
]
HUGGINGFACE: list[Pattern] = [
    WRAPPER,
    (r"^model\.", ""),
    (
        r"^backbone\.(conv_encoder\.)?model\.",
        "backbone.",
    ),  # then timm's names, which are ours, or those of their ResNet
    (r"^backbone\.embedder\.embedder\.convolution\.", "backbone.conv1."),
    (r"^backbone\.embedder\.embedder\.normalization\.", "backbone.bn1."),
    (r"^backbone\.encoder\.stages\.(\d)\.layers\.", _next("backbone.layer{}.")),
    (r"\.layer\.(\d)\.convolution\.", _next(".conv{}.")),
    (r"\.layer\.(\d)\.normalization\.", _next(".bn{}.")),
    (r"\.shortcut\.convolution\.", ".downsample.0."),
    (r"\.shortcut\.normalization\.", ".downsample.1."),
    (r"^input_projection\.", "input_proj."),
    (r"^query_position_embeddings\.weight$", "queries.position"),
    (r"^(encoder|decoder)\.layers\.", r"\1."),
    (r"\.self_attn\.", ".attn."),
    (r"\.encoder_attn\.", ".cross_attn."),
    (r"attn\.([qkv])_proj\.", r"attn.\1."),
    (r"attn\.(out|o)_proj\.", "attn.proj."),
    (r"^((?:en|de)coder\.\d+)\.fc([12])\.", r"\1.mlp.fc\2."),
    (r"\.self_attn_layer_norm\.", ".norm1."),
    (r"\.encoder_attn_layer_norm\.", ".norm2."),
    (r"^(encoder\.\d+)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(decoder\.\d+)\.final_layer_norm\.", r"\1.norm3."),
    (r"^decoder\.layernorm\.", "norm."),
    (r"^class_labels_classifier\.", "class_head."),
    (r"^bbox_predictor\.layers\.(\d)\.", _box_head),
]
SIZE = (800, 1056)
"""A 4:3 image whose short side is the one that DETR was trained with."""
DROP = {
    r"(bbox_attention|mask_head)\..*": "head for segmentation",
    r"backbone\..*\.num_batches_tracked": "count of the batches that the norms saw in training",
    r"backbone\.fc\..*": "classifier of the backbone",
    r"criterion\..*": "weights of the loss",
}


def load_detector(
    file: WeightFile,
    source: str,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
    num_heads: int | None = None,
    allow: Sequence[str] = (),
) -> Detector:
    """The detector in a file, ready to predict. The options are those of `load_model`."""
    plan, told = read_names(file)
    found, reasons, known = read_config(file, plan, num_heads)
    config = _target(found, num_classes, in_chans)
    report = LoadReport(source, told, notes=[*file.notes, *known.notes])
    report.dropped += list(plan.dropped.items())
    report.unexpected += plan.unexpected
    report.settings += [(name, str(getattr(config, name)), why) for name, why in reasons.items() if name != "dilation"]
    report.settings.append(("dilation", str(getattr(found.backbone, "dilation", None)), reasons["dilation"]))
    tensors = read_plan(plan, report)
    refuse_broken(tensors, report.source)
    _adapt(tensors, found, config, report)
    model = _build(config, tensors, report, allow, file.path)
    preprocess, note = read_preprocess(file, known)
    model.preprocess = preprocess.for_channels(config.in_chans)
    if img_size is None:
        report.notes.append(note)
    else:
        model.preprocess = replace(model.preprocess, img_size=img_size)
    labels = known.labels if config.num_classes == found.num_classes else None
    model.labels = fitting_labels(labels, config.num_classes, report.notes)
    model.load_report = report
    return model.eval()


def adapt_detector(
    model: Detector,
    path: Path,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
) -> Detector:
    """A detector of a run of our own, brought to other classes or channels, or fed images of another size."""
    old = model.config
    new = _target(old, num_classes, in_chans)
    report = LoadReport(str(path), "a run of vitral")
    tensors = dict(model.state_dict())
    report.matched += tensors
    _adapt(tensors, old, new, report)
    adapted = _build(new, tensors, report, (), path)
    adapted.preprocess = model.preprocess.for_channels(new.in_chans)
    if img_size is not None:
        adapted.preprocess = replace(adapted.preprocess, img_size=img_size)
    adapted.labels = model.labels if new.num_classes == old.num_classes else None
    adapted.load_report = report
    return adapted.eval()


def _target(config: DetectorConfig, num_classes: int | None, in_chans: int | None) -> DetectorConfig:
    """The config of the detector that is asked for."""
    options: dict[str, Any] = {} if num_classes is None else {"num_classes": num_classes}
    if in_chans is not None:
        options["backbone"] = replace(config.backbone, in_chans=in_chans)
    return replace(config, **options)


# ---- names ----


def read_names(file: WeightFile) -> tuple[Plan, str]:
    """How the tensors of a file become ours, and whose file it is."""
    official = any(name.endswith("query_embed.weight") for name in file.tensors)
    table, about = (OFFICIAL, "DETR of its authors") if official else (HUGGINGFACE, "Hugging Face's DETR")
    steps: list[Rule] = []
    dropped, unexpected = {}, []
    for name in file.tensors:
        ours = translate(name, table)
        why = next((why for pattern, why in DROP.items() if re.fullmatch(pattern, ours)), None)
        if why is not None:
            dropped[name] = why
        elif found := re.fullmatch(r"(.*)\.in_proj_(weight|bias)", ours):
            steps.append(rule(tuple(f"{found[1]}.{part}.{found[2]}" for part in "qkv"), name, SPLIT_QKV))
        elif re.match(r"(backbone|input_proj|queries|encoder|encoder_norm|decoder|norm|class_head|box_head)\.", ours):
            steps.append(rule(ours, name))
        else:
            unexpected.append(name)
    taken = [ours for step in steps for ours in step.ours]
    if len(set(taken)) < len(taken):
        twice = next(name for name in taken if taken.count(name) > 1)
        raise CheckpointError(f"{file.path} holds {twice} under two names; it is not clear which to take.")
    return Plan(file.tensors, steps, dropped, unexpected), f"{about}, told by its tensor names"


# ---- the model ----


def read_config(file: WeightFile, plan: Plan, num_heads: int | None) -> tuple[DetectorConfig, dict[str, str], Known]:
    """The model that the shapes and `config.json` tell of, why, and what else lies beside the weights."""
    document = file.config
    try:
        known = read_documents({"id2label": document.get("id2label")}, file.preprocessor)
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"a document beside {file.path} does not say what it should ({error}).") from error
    try:
        shapes = plan.shapes()
        _refuse_others(file, document)
        told, reasons = _from_config(file, document)
        if num_heads is not None:
            told["num_heads"], reasons["num_heads"] = num_heads, "as asked"
        dilation = told.pop("dilation")
        config = DetectorConfig(**_from_shapes(shapes), backbone=_backbone(shapes, dilation), **told)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{file.path} looks like DETR, but has no {error.args[0]}.") from error
    except (VitralError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{file.path} looks like DETR, but does not fit together: {error}") from error
    return config, reasons, known


def _from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    def layers(part: str) -> int:
        return 1 + max((int(name.split(".")[1]) for name in shapes if re.match(rf"{part}\.\d+\.", name)), default=-1)

    return {
        "embed_dim": shapes["input_proj.weight"][0],
        "num_queries": shapes["queries.position"][0],
        "num_classes": shapes["class_head.weight"][0] - 1,
        "encoder_layers": layers("encoder"),
        "decoder_layers": layers("decoder"),
        "mlp_width": shapes["decoder.0.mlp.fc1.weight"][0],
        "block": "pre" if "encoder_norm.weight" in shapes else "post",
    }


def _backbone(shapes: Mapping[str, tuple[int, ...]], dilation: bool) -> ResNetConfig:
    own = {name.removeprefix("backbone."): shape for name, shape in shapes.items() if name.startswith("backbone.")}
    kind = kind_of(own)
    if kind is None or kind == "resnet8":
        third = len({name.split(".")[1] for name in own if name.startswith("layer3.")})
        what = f"one with {third} blocks in its third stage" if third else "none with the names of one"
        raise CheckpointError(f"the backbone of a DETR must be a ResNet-18, 34, 50 or 101, got {what}.")
    return ResNetConfig(
        kind=kind, img_size=SIZE, in_chans=own["conv1.weight"][1], num_classes=0, frozen_norm=True, dilation=dilation
    )


def _from_config(file: WeightFile, document: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Heads, activation and dilation, and where each comes from."""
    backbone = document.get("backbone_config") or {}
    named = "dc5" in file.path.name.lower()
    options: dict[str, tuple[Any, str]] = {
        "num_heads": (HEADS, "the number of every published DETR"),
        "act": ("relu", "DETR"),
        "dilation": (named, "the name of the file" if named else "DETR"),
    }
    for ours, theirs in (("num_heads", "encoder_attention_heads"), ("act", "activation_function")):
        if theirs in document:
            options[ours] = (document[theirs], "config.json")
    if document:
        dilation = bool(document.get("dilation")) or backbone.get("output_stride") == 16
        options["dilation"] = (dilation, "config.json")
    return {k: value for k, (value, _) in options.items()}, {k: why for k, (_, why) in options.items()}


def _refuse_others(file: WeightFile, document: Mapping[str, Any]) -> None:
    """Raise where `config.json` asks for what is not built here."""
    backbone = document.get("backbone_config") or {}
    heads = [document.get(f"{part}_attention_heads") for part in ("encoder", "decoder")]
    kind = document.get("model_type", "detr")
    for wrong, what in (
        (kind != "detr", f"is a {kind}, not a DETR"),
        (document.get("position_embedding_type", "sine") != "sine", "has learned positions of the image's cells"),
        (heads[0] != heads[1], f"has {heads[0]} heads in the encoder and {heads[1]} in the decoder"),
        (backbone.get("downsample_in_bottleneck"), "has its strides in the 1x1 convolutions"),
        (backbone.get("downsample_in_first_stage"), "has a stride in the first stage"),
        (backbone.get("hidden_act", "relu") != "relu", f"has {backbone.get('hidden_act')} in its backbone"),
    ):
        if wrong:
            raise CheckpointError(f"{file.path} {what} (config.json); vitral cannot build that.")


# ---- preprocessing ----


def read_preprocess(file: WeightFile, known: Known) -> tuple[Preprocess, str]:
    """What is done to an image, and how that differs from the original.

    DETR keeps the aspect ratio: short side 800, long side at most 1333. Here every image gets one size, that of a 4:3
    photograph in whole cells of 32 pixels.
    """
    size = file.preprocessor.get("size")
    sides = size if isinstance(size, Mapping) else {"shortest_edge": size}
    options = {"interpolation": "bilinear", "crop_mode": "squash", "crop_pct": 1.0}
    options |= {key: value for key, value in known.preprocess.items() if key in ("mean", "std", "interpolation")}
    try:
        short = int(sides.get("shortest_edge") or 800)
        long = int(sides.get("longest_edge") or file.preprocessor.get("max_size") or 1333)
        fixed = (max(short // 32, 1) * 32, max(min(short * 4 // 3, long) // 32, 1) * 32)
        preprocess = Preprocess(**{**options, "img_size": fixed})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the preprocessing beside {file.path} cannot be used: {error}") from error
    note = (
        f"the original keeps the aspect ratio, short side {short} and long side at most {long}; "
        f"here images are brought to {fixed[0]}x{fixed[1]} (another size: img_size)"
    )
    return preprocess, note


# ---- tensors ----


def _adapt(tensors: dict[str, Tensor], old: DetectorConfig, new: DetectorConfig, report: LoadReport) -> None:
    """Bring tensors to the channels and classes that are asked for."""

    def change(name: str, how: str, made: Tensor) -> None:
        report.resized.append((name, tuple(tensors[name].shape), tuple(made.shape), how))
        report.matched = [each for each in report.matched if each != name]
        tensors[name] = made

    if new.in_chans != old.in_chans:
        roots = ("patch_embed.backbone.stem.conv", "patch_embed.backbone.conv")
        stems = ("conv1", "patch_embed.convs.0", *roots, "patch_embed.proj")
        stem = next(name for stem in stems if (name := f"backbone.{stem}.weight") in tensors)
        change(stem, "channels summed or repeated", adapt_channels(tensors[stem], new.in_chans))
    if new.num_classes == old.num_classes:
        return
    for name in CLASS_HEAD:
        report.dropped.append((name, f"{new.num_classes} classes are asked for, the file has {old.num_classes}"))
        report.matched = [each for each in report.matched if each != name]
        tensors.pop(name, None)
    if (content := tensors.get("queries.content.weight")) is not None:
        labels = torch.randn(new.num_classes, content.shape[1])
        change("queries.content.weight", "new labels, the queries' own row kept", torch.cat([labels, content[-1:]]))


def _build(
    config: DetectorConfig, tensors: dict[str, Tensor], report: LoadReport, allow: Sequence[str], path: Path
) -> Detector:
    model = blank(lambda: Detector(config))
    wanted = model.state_dict()
    missing = [name for name in wanted if name not in tensors]
    fresh = CLASS_HEAD if set(CLASS_HEAD) <= set(missing) else ()  # a new head is made whole or not at all
    report.created += [(name, "new, at random: train it") for name in fresh]
    report.missing += [name for name in missing if name not in fresh]
    left = [name for name in tensors if name not in wanted]
    theirs = {ours: old.partition(", ")[0] for old, new, _ in report.renamed for ours in new.split(", ")}
    report.unexpected += [theirs.get(name, name) for name in left]
    refuse_gaps(report, allow, path, "DETR")
    refuse_shapes(tensors, wanted, path)
    if missing:  # start them as a fresh model does
        model = Detector(config)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items() if name in wanted}
    model.load_state_dict(contiguous, strict=False, assign=True)
    return model
