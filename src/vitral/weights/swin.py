"""Swin's files (Liu et al., 2021): its authors', timm's, and Hugging Face's on disk and in memory, read and written.

Names become ours, which are timm's, by a table of patterns, applied in order. Shapes tell the model, heads and windows
included; activation, epsilon and image size come from `config.json`, and else are as Swin was trained.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import Preprocess, SwinConfig
from vitral.errors import CheckpointError, ConfigError, VitralError
from vitral.models.init import blank
from vitral.models.swin import SwinTransformer, init_swin
from vitral.weights import huggingface, timm
from vitral.weights.adapt import adapt_channels, resize_patches
from vitral.weights.detect import SWIN_TABLES
from vitral.weights.files import WeightFile
from vitral.weights.layout import FUSE_QKV, Known, Names, Pattern, Plan, Rule, fitting_labels, rule, translate
from vitral.weights.load import read_plan, refuse_broken, refuse_gaps, refuse_shapes
from vitral.weights.report import LoadReport

Size = int | tuple[int, int]
SwinLayout = Literal["official", "timm", "huggingface"]
HEAD = ("head.fc.weight", "head.fc.bias")
TABLE = "attn.relative_position_bias_table"


def _stage(text: str, step: int) -> Callable[[re.Match[str]], str]:
    """Merging counted to the stage that it leads to, or from which it comes."""
    return lambda found: text.format(int(found[1]) + step)


# ---- names: theirs to ours, and ours to theirs ----

READ: dict[SwinLayout, list[Pattern]] = {
    "timm": [],
    "official": [
        (r"^encoder\.", ""),  # around it in the files of its pretraining (SimMIM)
        (r"^layers\.(\d{1,3})\.downsample\.", _stage("layers.{}.downsample.", +1)),
        (r"^head\.", "head.fc."),
    ],
    "huggingface": [
        (r"^swin\.", ""),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        (r"^encoder\.layers\.(\d{1,3})\.downsample\.", _stage("layers.{}.downsample.", +1)),
        (r"^encoder\.layers\.", "layers."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.attention\.(self|relative_position_bias)\.relative_position_", ".attn.relative_position_"),
        (r"\.attention\.self\.(q|k|v)(uery|ey|alue)\.", r".attn.\1."),
        (r"\.attention\.([qkv])_proj\.", r".attn.\1."),
        (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
        (r"^layernorm\.", "norm."),
        (r"^classifier\.", "head.fc."),
    ],
}
WRITE: dict[SwinLayout, list[Pattern]] = {
    "timm": [],
    "official": [
        (r"^layers\.(\d{1,3})\.downsample\.", _stage("layers.{}.downsample.", -1)),
        (r"^head\.fc\.", "head."),
    ],
    "huggingface": [
        (r"^patch_embed\.proj\.", "swin.embeddings.patch_embeddings.projection."),
        (r"^patch_embed\.norm\.", "swin.embeddings.norm."),
        (r"^layers\.(\d{1,3})\.downsample\.", _stage("swin.encoder.layers.{}.downsample.", -1)),
        (r"^layers\.", "swin.encoder.layers."),
        (r"\.norm1\.", ".layernorm_before."),
        (r"\.norm2\.", ".layernorm_after."),
        (r"\.attn\.relative_position_bias_table$", ".attention.self.relative_position_bias_table"),
        (r"\.attn\.q\.", ".attention.self.query."),
        (r"\.attn\.k\.", ".attention.self.key."),
        (r"\.attn\.v\.", ".attention.self.value."),
        (r"\.attn\.proj\.", ".attention.output.dense."),
        (r"\.mlp\.fc1\.", ".intermediate.dense."),
        (r"\.mlp\.fc2\.", ".output.dense."),
        (r"^norm\.", "swin.layernorm."),
        (r"^head\.fc\.", "classifier."),
    ],
}
ABOUT: dict[SwinLayout, str] = {
    "official": "Swin of its authors",
    "timm": "timm's Swin",
    "huggingface": "Hugging Face's Swin",
}
DROP = {
    r"layers\..*\.(relative_position_index|attn_mask)": "numbers that are counted, not learned",
    r"(embeddings\.)?mask_token|decoder\..*": "of the pretraining alone",
}
OURS = re.compile(r"(patch_embed|layers|norm|head)\.")


def layout_of(names: Names) -> SwinLayout:
    """Whose names these are: the authors' merge patches at the end of a stage, timm at the beginning of the next."""
    if any(re.search(SWIN_TABLES[1], name) for name in names):
        return "huggingface"
    authors = (r"^encoder\.", r"^head\.(weight|bias)$", r"^layers\.0\.downsample\.")
    return "official" if any(re.search(pattern, name) for pattern in authors for name in names) else "timm"


def read_names(file: WeightFile) -> tuple[Plan, SwinLayout]:
    """How the tensors of a file become ours, and whose file it is."""
    layout = layout_of(file.tensors)
    ours_of = {name: translate(name, READ[layout]) for name in file.tensors}
    if len(set(ours_of.values())) < len(ours_of):
        taken = list(ours_of.values())
        twice = next(name for name in taken if taken.count(name) > 1)
        raise CheckpointError(f"{file.path} holds {twice} under two names; it is not clear which to take.")
    theirs_of = {ours: name for name, ours in ours_of.items()}
    steps: list[Rule] = []
    dropped, unexpected = {}, []
    for name, ours in ours_of.items():
        parts = [re.sub(r"\.attn\.[qkv]\.", f".attn.{part}.", ours) for part in "qkv"]
        why = next((why for pattern, why in DROP.items() if re.fullmatch(pattern, ours)), None)
        if why is not None:
            dropped[name] = why
        elif re.search(r"\.attn\.[qkv]\.", ours) and all(part in theirs_of for part in parts):
            if ours == parts[0]:
                together = tuple(theirs_of[part] for part in parts)
                steps.append(rule(ours.replace(".attn.q.", ".attn.qkv."), together, FUSE_QKV))
        elif OURS.match(ours):
            steps.append(rule(ours, name))
        else:
            unexpected.append(name)
    return Plan(file.tensors, steps, dropped, unexpected), layout


def write_names(tensors: Mapping[str, Tensor], layout: SwinLayout) -> dict[str, Tensor]:
    """Our tensors under the names of a layout: for Hugging Face those on disk, which every version of it reads."""
    tensors = dict(tensors)
    if layout == "huggingface":
        for name in [name for name in tensors if ".attn.qkv." in name]:
            for part, tensor in zip("qkv", tensors.pop(name).chunk(3), strict=True):
                tensors[name.replace(".qkv.", f".{part}.")] = tensor.contiguous()
    return {translate(name, WRITE[layout]): tensor for name, tensor in tensors.items()}


def write_timm_config(c: SwinConfig, p: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """timm's `config.json`: an architecture to start from, what differs from it, and the preprocessing."""
    if c.act != "gelu":
        raise ConfigError(f"timm's Swin has the exact GELU, this model {c.act}; write it as vitral or huggingface.")
    arguments: dict[str, Any] = {
        "img_size": list(c.image),
        "patch_size": c.patch[0] if c.patch[0] == c.patch[1] else list(c.patch),
        "in_chans": c.in_chans,
        "embed_dim": c.embed_dim,
        "depths": list(c.depths),
        "num_heads": list(c.num_heads),
        "window_size": c.window_size if isinstance(c.window_size, int) else list(c.window_size),
        "mlp_ratio": c.mlp_ratio,
        "qkv_bias": c.qkv_bias,
    }
    document: dict[str, Any] = {
        "architecture": "swin_tiny_patch4_window7_224",
        "num_classes": c.num_classes,
        "num_features": c.pooled_dim,
        "global_pool": "avg",
        "model_args": arguments,
        "pretrained_cfg": timm.write_pretrained(c, p, "head.fc"),
    }
    return document | ({"label_names": labels} if labels else {})


def timm_tables(tensors: Mapping[str, Tensor], c: SwinConfig) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors with the tables that timm makes, whose windows are no larger than the map; and what was cut, said."""
    written, notes = dict(tensors), []
    for stage, M in enumerate(c.windows):
        sides = [min(M, -(-side // (P << stage))) for side, P in zip(c.image, c.patch, strict=True)]
        if sides == [M, M]:
            continue
        for name in [name for name in written if re.match(rf"layers\.{stage}\..*\.{TABLE}$", name)]:
            (m_h, m_w), table = sides, written[name].unflatten(0, (2 * M - 1, 2 * M - 1))
            written[name] = table[M - m_h : M + m_h - 1, M - m_w : M + m_w - 1].flatten(0, 1).contiguous()
        notes.append(
            f"timm's windows are no larger than the map: those of stage {stage} are cut from {M} to "
            f"{sides[0]} x {sides[1]}, all that images of {c.image[0]} x {c.image[1]} use"
        )
    return written, notes


def write_huggingface_config(c: SwinConfig, labels: list[str] | None) -> dict[str, Any]:
    """Hugging Face's `config.json`."""
    if not isinstance(c.window_size, int) or c.patch[0] != c.patch[1]:
        raise ConfigError(
            f"Hugging Face's Swin has one window for all stages and square patches, this model windows of {c.windows} "
            f"and patches of {c.patch}; write it as timm or vitral."
        )
    acts = {ours: theirs for theirs, ours in reversed(huggingface.ACTIVATIONS.items())}
    return {
        "architectures": ["SwinForImageClassification" if c.num_classes else "SwinModel"],
        "model_type": "swin",
        "image_size": c.image[0] if c.image[0] == c.image[1] else list(c.image),
        "patch_size": c.patch[0],
        "num_channels": c.in_chans,
        "embed_dim": c.embed_dim,
        "depths": list(c.depths),
        "num_heads": list(c.num_heads),
        "window_size": c.window_size,
        "mlp_ratio": c.mlp_ratio,
        "qkv_bias": c.qkv_bias,
        "hidden_act": acts.get(c.act, "gelu"),
        "layer_norm_eps": c.norm_eps,
        "use_absolute_embeddings": False,
        **huggingface.write_labels(c.num_classes, labels),
    }


# ---- the model in a file ----


def load_swin(
    file: WeightFile,
    source: str,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
    patch_size: Size | None = None,
    window_size: int | None = None,
    allow: Sequence[str] = (),
) -> SwinTransformer:
    """The Swin in a file, ready to predict. The options are those of `load_model`, and `window_size`, another M."""
    plan, layout = read_names(file)
    found, reasons, known = read_config(file, plan, layout)
    config = _target(found, num_classes, img_size, in_chans, patch_size, window_size)
    report = LoadReport(source, f"{ABOUT[layout]}, told by its tensor names", notes=[*file.notes, *known.notes])
    report.dropped += list(plan.dropped.items())
    report.unexpected += plan.unexpected
    tensors = read_plan(plan, report)
    refuse_broken(tensors, report.source)
    _adapt(tensors, found, config, report)
    model = _build(config, tensors, report, allow, file.path)
    preprocess = read_preprocess(file, layout, found, known)
    model.preprocess = preprocess.for_channels(config.in_chans)
    if img_size is not None:
        model.preprocess = replace(model.preprocess, img_size=img_size)
    report.settings += [(name, str(getattr(config, name)), why) for name, why in reasons.items()]
    for name in ("mean", "std", "interpolation", "crop_mode", "crop_pct"):
        report.settings.append((name, str(getattr(model.preprocess, name)), preprocess_source(name, layout, known)))
    if layout == "huggingface" and config.norm_eps != 1e-5:
        report.notes.append("Hugging Face keeps an epsilon of 1e-5 in the norms of patches and of merging")
    labels = known.labels if config.num_classes == found.num_classes else None
    model.labels = fitting_labels(labels, config.num_classes, report.notes)
    model.load_report = report
    return model.eval()


def adapt_swin(
    model: SwinTransformer,
    path: Path,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
    patch_size: Size | None = None,
    window_size: int | None = None,
) -> SwinTransformer:
    """A Swin of a run of our own, brought to other classes, channels, patches or windows, or to other images."""
    old = model.config
    new = _target(old, num_classes, img_size, in_chans, patch_size, window_size)
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


def _target(
    config: SwinConfig,
    num_classes: int | None,
    img_size: Size | None,
    in_chans: int | None,
    patch_size: Size | None,
    window_size: int | None,
) -> SwinConfig:
    """The config of the model that is asked for."""
    asked = {"num_classes": num_classes, "img_size": img_size, "in_chans": in_chans}
    asked |= {"patch_size": patch_size, "window_size": window_size}
    return replace(config, **{name: value for name, value in asked.items() if value is not None})


def read_config(file: WeightFile, plan: Plan, layout: SwinLayout) -> tuple[SwinConfig, dict[str, str], Known]:
    """The model that the shapes and `config.json` tell of, why, and what else lies beside the weights."""
    try:
        known = _read_documents(file, layout)
    except (TypeError, KeyError, AttributeError, ValueError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"a document beside {file.path} does not say what it should ({error}).") from error
    try:
        _refuse_others(file, layout, known)
        options = _from_shapes(plan.shapes())
        told = {name: known.model[name] for name in ("act", "norm_eps") if name in known.model}
        # Published at the size at which the last map is one window.
        side = options["windows"][-1] << (len(options["depths"]) - 1)
        size = known.size or tuple(P * side for P in options["patch_size"])
        config = SwinConfig(img_size=size, window_size=_one(options.pop("windows")), **options, **told)
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{file.path} looks like Swin, but has no {error.args[0]}.") from error
    except (VitralError, TypeError, ValueError, IndexError) as error:
        raise CheckpointError(f"{file.path} looks like Swin, but does not fit together: {error}") from error
    reasons = {name: "config.json" if name in told else "Swin" for name in ("act", "norm_eps")}
    reasons |= {"num_heads": "the shapes", "window_size": "the shapes"}
    return config, reasons | {"img_size": "config.json" if known.size else "the last map is one window"}, known


def _from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    def count(pattern: str) -> int:
        return len({found[0] for name in shapes if (found := re.match(pattern, name))})

    C, in_chans, *patch = shapes["patch_embed.proj.weight"]
    stages = count(r"layers\.\d+\.")
    tables = [shapes[f"layers.{i}.blocks.0.{TABLE}"] for i in range(stages)]
    width = shapes["layers.0.blocks.0.mlp.fc1.weight"][0]
    ratio = width / C
    return {
        "embed_dim": C,
        "in_chans": in_chans,
        "patch_size": tuple(patch),
        "num_classes": shapes.get(HEAD[0], (0,))[0],
        "depths": tuple(count(rf"layers\.{i}\.blocks\.\d+\.") for i in range(stages)),
        "num_heads": tuple(heads for _, heads in tables),
        "windows": tuple(_window(rows) for rows, _ in tables),
        "mlp_ratio": ratio if int(C * ratio) == width else math.nextafter(ratio, math.inf),
        "qkv_bias": "layers.0.blocks.0.attn.qkv.bias" in shapes,
    }


def _window(rows: int) -> int:
    """M, where the table of biases has (2M - 1)^2 rows."""
    M = (math.isqrt(rows) + 1) // 2
    if rows != (2 * M - 1) ** 2:
        raise CheckpointError(f"a table of position biases with {rows} rows is of no square window.")
    return M


def _one(windows: tuple[int, ...]) -> int | tuple[int, ...]:
    """One number where all are the same."""
    return windows[0] if len(set(windows)) == 1 else windows


def _read_documents(file: WeightFile, layout: SwinLayout) -> Known:
    """What the files beside the weights say, each read by the layout that writes it."""
    if layout == "huggingface":
        return huggingface.read_documents(file.config, file.preprocessor)
    if "architecture" not in file.config:
        return Known()
    known = timm.read_config(file.config)
    size = (file.config.get("pretrained_cfg") or {}).get("input_size")
    return replace(known, size=known.size or (size and tuple(size[1:])))


def _refuse_others(file: WeightFile, layout: SwinLayout, known: Known) -> None:
    """Raise where `config.json` asks for what is not built here."""
    kind = file.config.get("model_type", "swin")
    pool = known.model.get("global_pool", "mean")
    for wrong, what in (
        (layout == "huggingface" and kind != "swin", f"is a {kind}, not a Swin"),
        (file.config.get("use_absolute_embeddings"), "has a table of positions besides the biases"),
        (pool != "mean", f"pools by {pool}"),
    ):
        if wrong:
            raise CheckpointError(f"{file.path} {what} (config.json); vitral cannot build that.")


# ---- preprocessing ----


def read_preprocess(file: WeightFile, layout: SwinLayout, config: SwinConfig, known: Known) -> Preprocess:
    """What is done to an image: as the document says, and else as each program evaluates the published weights."""
    large = min(config.image) >= 384
    whole = {"crop_mode": "squash", "crop_pct": 1.0}
    usual: dict[str, Any] = {
        "official": whole if large else {"crop_pct": 0.875},
        "timm": {"crop_pct": 1.0 if large else 0.9},
        "huggingface": whole,
    }[layout]
    try:
        return Preprocess.from_dict({"img_size": config.image} | usual | known.preprocess)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the preprocessing beside {file.path} cannot be used: {error}") from error


def preprocess_source(name: str, layout: SwinLayout, known: Known) -> str:
    """Where an option of the preprocessing comes from."""
    return "a file beside the weights" if name in known.preprocess else ABOUT[layout]


# ---- tensors ----


def resize_bias(table: Tensor, M: int) -> Tensor:
    """A table of biases ((2M_0 - 1)^2, h) for windows of another side: each head's resized as a picture, bicubic."""
    old, new = math.isqrt(len(table)), 2 * M - 1
    pictures = table.T.unflatten(1, (old, old))[None]  # (1, h, 2M_0 - 1, 2M_0 - 1)
    return F.interpolate(pictures, size=(new, new), mode="bicubic", align_corners=False)[0].flatten(1).T.contiguous()


def _adapt(tensors: dict[str, Tensor], old: SwinConfig, new: SwinConfig, report: LoadReport) -> None:
    """Bring tensors to the channels, patches, windows and classes that are asked for."""

    def change(name: str, how: str, made: Tensor) -> None:
        report.resized.append((name, tuple(tensors[name].shape), tuple(made.shape), how))
        report.matched = [each for each in report.matched if each != name]
        tensors[name] = made

    patches = "patch_embed.proj.weight"
    if new.in_chans != old.in_chans:
        change(patches, "channels summed or repeated", adapt_channels(tensors[patches], new.in_chans))
    if new.patch != old.patch:
        change(patches, "by pseudo-inverse (FlexiViT)", resize_patches(tensors[patches], new.patch))
    for stage, (M_old, M) in enumerate(zip(old.windows, new.windows, strict=True)):
        for name in [name for name in tensors if re.match(rf"layers\.{stage}\..*\.{TABLE}$", name)]:
            if M_old != M:
                change(name, "bicubic", resize_bias(tensors[name], M))
    if new.num_classes != old.num_classes:
        for name in [name for name in HEAD if name in tensors]:
            report.dropped.append((name, f"{new.num_classes} classes are asked for, the file has {old.num_classes}"))
            report.matched = [each for each in report.matched if each != name]
            del tensors[name]


def _build(
    config: SwinConfig, tensors: dict[str, Tensor], report: LoadReport, allow: Sequence[str], path: Path
) -> SwinTransformer:
    model = blank(lambda: SwinTransformer(config))
    wanted = dict(model.named_parameters())
    missing = [name for name in wanted if name not in tensors]
    fresh = HEAD if set(HEAD) <= set(missing) else ()  # a new head is made whole or not at all
    report.created += [(name, "new, at random: train it") for name in fresh]
    report.missing += [name for name in missing if name not in fresh]
    theirs = {ours: old.partition(", ")[0] for old, ours, _ in report.renamed}
    report.unexpected += [theirs.get(name, name) for name in tensors if name not in wanted]
    refuse_gaps(report, allow, path, "Swin")
    refuse_shapes(tensors, wanted, path)
    if missing:  # start them as a fresh model does
        model.to_empty(device="cpu")
        init_swin(model)
    modules = dict(model.named_modules())
    for name in wanted.keys() & tensors.keys():
        owner, _, parameter = name.rpartition(".")
        setattr(modules[owner], parameter, nn.Parameter(tensors[name].contiguous()))
    return model
