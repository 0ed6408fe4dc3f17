"""`load_model` and `create_model`: published weights, or a run of our own, to a model with the original's outputs."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitral.config import ViTConfig
from vitral.errors import CheckpointError, ConfigError
from vitral.models import zoo
from vitral.models.backbone import Backbone, backbone_of
from vitral.models.build import build_backbone
from vitral.models.cnn import ResNet
from vitral.models.detector import Detector
from vitral.models.init import blank, init_weights
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer
from vitral.nn.positions import resize_positions
from vitral.weights.adapt import adapt_channels, resize_patches
from vitral.weights.detect import Detected, detect, is_detector, is_resnet, is_swin
from vitral.weights.fetch import locate, open_located
from vitral.weights.files import WeightFile
from vitral.weights.layout import Plan
from vitral.weights.pretrained import default_weights
from vitral.weights.report import LoadReport
from vitral.weights.rundir import AnyModel, is_run, load_run
from vitral.weights.timm import first_conv

Size = int | tuple[int, int]
ADAPTABLE = ("num_classes", "img_size", "in_chans", "patch_size")
"""Options of a model that loading can change."""
_SETTINGS = ("act", "norm_eps", "num_heads", "global_pool", "pos_prefix", "pos_resize")
_PREPROCESSING = ("mean", "std", "interpolation", "crop_mode", "crop_pct")


def load_model(
    source: str | os.PathLike[str],
    *,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
    patch_size: Size | None = None,
    native_size: Size | None = None,
    family: str | None = None,
    num_heads: int | None = None,
    allow: Sequence[str] = (),
    quiet: bool = False,
    mapped: bool = True,
) -> Any:
    """Load a model: pretrained weights by name, a run directory, a file of weights or its folder, `hf-hub:owner/name`.

    Args:
        source: NAME.TAG of `vitral.list_models(pretrained=True)`, a path, or a repository of the hub. Of the hub also
            NAME.TAG@REVISION and hf-hub:owner/name@REVISION. What is not on this machine is downloaded.
        num_classes: Outputs; another number than the file's gets a new head.
        img_size: Height and width of the images; positions are resized to it.
        in_chans: Channels of the images; patch weights are summed or repeated.
        patch_size: Height and width of a patch; patch weights are resampled.
        native_size: Size of the images that the file was trained on, if its position table is not square.
        family: Settings that the file leaves open, a key of `vitral.models.zoo.FAMILIES`.
        num_heads: Attention heads, if the usual number for the width is wrong.
        allow: Patterns of tensor names that may be missing or left over.
        quiet: Do not print the summary of the load to stderr.
        mapped: Leave weights in their file, mapped into memory: loading is fast, but the file must not be overwritten
            or truncated in place while the model is in use. False copies them into memory.

    Returns:
        A `VisionTransformer`, `SwinTransformer`, `ResNet` or `Detector` in eval mode, with `preprocess`, `labels` and
        `load_report`.

    Raises:
        CheckpointError: The weights cannot be fetched, read or recognised, or do not fit.
        ConfigError: The model does not accept one of the options.

    Example:
        `load_model("vit_small_patch14_dinov2.lvd142m", img_size=224)`
    """
    source = os.fspath(source)
    path = locate(source)
    if path.is_dir() and is_run(path):
        if family is not None or num_heads is not None or native_size is not None:
            raise ConfigError(
                f"{source} is a run of vitral and tells its family, heads and size itself; leave them out."
            )
        model = load_run(path, mapped)
        model.load_report = LoadReport(str(source), "a run of vitral", matched=list(model.state_dict()))
        asked = {"num_classes": num_classes, "img_size": img_size, "in_chans": in_chans, "patch_size": patch_size}
        asked = {key: value for key, value in asked.items() if value is not None}
        return _adapt_run(model, path, asked) if asked else model
    file = open_located(path, source, mapped)
    if is_detector(file.tensors):
        from vitral.weights.detr import load_detector

        if family is not None or patch_size is not None or native_size is not None:
            raise ConfigError(f"{source} is a DETR detector: it takes no family, patch_size or native_size.")
        detector = load_detector(file, str(source), num_classes, img_size, in_chans, num_heads, allow)
        if not quiet:
            print(detector.load_report.summary(), file=sys.stderr)
        return detector
    if is_resnet(file.tensors):
        from vitral.weights.resnet import load_resnet

        unmeant = {"family": family, "patch_size": patch_size, "native_size": native_size, "num_heads": num_heads}
        if any(value is not None for value in unmeant.values()):
            raise ConfigError(f"{source} is a ResNet: it takes no {', '.join(unmeant)}.")
        model = load_resnet(file, str(source), num_classes, img_size, in_chans, allow)
        if not quiet:
            print(model.load_report.summary(), file=sys.stderr)
        return model
    if is_swin(file.tensors):
        from vitral.weights.swin import load_swin

        if family is not None or num_heads is not None or native_size is not None:
            raise ConfigError(
                f"{source} is a Swin, whose shapes tell all: it takes no family, num_heads or native_size."
            )
        swin = load_swin(file, str(source), num_classes, img_size, in_chans, patch_size, allow=allow)
        if not quiet:
            print(swin.load_report.summary(), file=sys.stderr)
        return swin
    found = detect(file, family, img_size, native_size, **({} if num_heads is None else {"num_heads": num_heads}))
    target = _target(found.config, num_classes, img_size, in_chans, patch_size)
    report = _begin_report(str(source), file, found, target)
    tensors = _read_tensors(found, report)
    refuse_broken(tensors, report.source)
    model = _build(target, _adapt(tensors, found.config, target, report), report, allow, file.path)
    preprocess = found.preprocess.for_channels(target.in_chans)
    model.preprocess = replace(preprocess, img_size=target.image) if img_size or patch_size else preprocess
    model.labels = found.labels if target.num_classes == found.config.num_classes else None
    model.load_report = report
    if not quiet:
        print(report.summary(), file=sys.stderr)
    return model.eval()


def load_backbone(source: str, **asked: Any) -> Backbone:
    """A model to start from, adapted as `load_model` does: itself, or the one inside a run of another task."""
    path = locate(source)
    if path.is_dir() and is_run(path):
        model = load_run(path)
        backbone = backbone_of(model)
        if not isinstance(backbone, Backbone):
            raise ConfigError(
                f"{source} is a run without a ViT or its like; training starts from one, or from a named model."
            )
        backbone.preprocess = model.preprocess  # type: ignore[assignment]
        return cast(Backbone, _adapt_run(backbone, path, asked))
    model = load_model(source, quiet=True, **asked)
    if not isinstance(model, Backbone):
        raise ConfigError(f"{source} is a detector; training starts from a plain ViT or its like.")
    return model


def create_model(
    name: str, *, pretrained: bool = False, seed: int | None = None, zero_head: bool = False, **options: Any
) -> Backbone:
    """Build a named model, with fresh or with published weights.

    Args:
        name: A name of `vitral.list_models()`; with `pretrained` one of `vitral.list_models(pretrained=True)`, with
            timm's default tag if it has none, and with @REVISION of the hub if wanted.
        pretrained: Load published weights, which are downloaded on first use.
        seed: Where the random weights come from, of pretrained models those of a new head; by default torch's own
            generator.
        zero_head: Start the classifier at 0 (fresh weights only).
        **options: Fields of the model's config (docs/options.md). Pretrained weights accept `num_classes`, `img_size`,
            `in_chans`, `patch_size` and `drop_path_rate`.

    Returns:
        The model, with its preprocessing in `model.preprocess`.

    Raises:
        ConfigError: An option does not exist, or pretrained weights cannot be changed by it.
        CheckpointError: The weights cannot be fetched or read.

    Example:
        `create_model("vit_small_patch16_224", pretrained=True, num_classes=10, img_size=96, in_chans=1)`
    """
    if not pretrained:
        return zoo.create_model(name, seed=seed, zero_head=zero_head, **options)
    fixed = sorted(set(options) - {*ADAPTABLE, "drop_path_rate"}) + ["zero_head"] * zero_head
    if fixed:
        raise ConfigError(
            f"pretrained weights do not accept {', '.join(fixed)}; with pretrained=True, num_classes, img_size, "
            f"in_chans, patch_size and drop_path_rate can be set."
        )
    rate = options.pop("drop_path_rate", 0.0)
    with torch.random.fork_rng(enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return with_stochastic_depth(load_backbone(default_weights(name), **options), rate)


def with_stochastic_depth(model: Backbone, rate: float) -> Backbone:
    """The same weights in a model that drops branches at random while it trains, where it can."""
    if rate == getattr(model.config, "drop_path_rate", rate):
        return model
    again = blank(lambda: build_backbone(replace(model.config, drop_path_rate=rate)))
    again.load_state_dict(model.state_dict(), assign=True)
    again.preprocess, again.labels, again.load_report = model.preprocess, model.labels, model.load_report
    return again


def with_pooling(model: Backbone, pool: str | None, layers: int | None) -> Backbone:
    """The same weights in a ViT whose head, which is new, reads something else; None leaves a setting as it is."""
    given = {"global_pool": pool, "pool_layers": layers}
    changed = {k: v for k, v in given.items() if v is not None and v != getattr(model.config, k, None)}
    if not changed:
        return model
    if not isinstance(model.config, ViTConfig):
        raise ConfigError(f"--pool and --pool-layers are for ViTs; this model is a {type(model).__name__}.")
    again = build_backbone(ViTConfig.from_dict({**model.config.to_dict(), **changed}))
    body = {name: value for name, value in model.state_dict().items() if not name.startswith(("head.", "attn_pool."))}
    again.load_state_dict(again.state_dict() | body)
    again.preprocess, again.load_report = model.preprocess, model.load_report
    return again


def _target(
    config: ViTConfig, num_classes: int | None, img_size: Size | None, in_chans: int | None, patch_size: Size | None
) -> ViTConfig:
    """The config of the model that is asked for."""
    options = {name: getattr(config, name) for name in config.to_dict()}
    for name, value in (("img_size", img_size), ("in_chans", in_chans), ("patch_size", patch_size)):
        if value is not None:
            options[name] = value
    if num_classes is not None and num_classes != config.num_classes:
        options |= {"num_classes": num_classes, "head": "linear" if config.head != "distilled" else "distilled"}
    return ViTConfig.from_dict(options)


def _begin_report(source: str, file: WeightFile, found: Detected, target: ViTConfig) -> LoadReport:
    report = LoadReport(source, found.told, notes=[*file.notes, *found.notes])
    report.dropped += list(found.plan.dropped.items())
    report.unexpected += found.plan.unexpected
    for name in _SETTINGS:
        report.settings.append((name, str(getattr(target, name)), found.reasons.get(name, found.layout.about)))
    preprocess = found.preprocess.for_channels(target.in_chans)
    for name in _PREPROCESSING:
        report.settings.append((name, str(getattr(preprocess, name)), found.reasons[name]))
    return report


def read_plan(plan: Plan, report: LoadReport) -> dict[str, Tensor]:
    """The tensors of a plan under our names, in fp32, and a line of the report for each."""
    tensors: dict[str, Tensor] = {}
    for step in plan.steps:
        for name, tensor in plan.read(step).items():
            tensors[name] = _as_weight(report, name, tensor)
        if step.ours == step.theirs:
            report.matched += step.ours
        else:
            report.renamed.append((", ".join(step.theirs), ", ".join(step.ours), step.op.about))
    return tensors


def _read_tensors(found: Detected, report: LoadReport) -> dict[str, Tensor]:
    tensors = read_plan(found.plan, report)
    if found.config.pre_norm and "head.weight" in tensors and "head.bias" not in tensors:
        tensors["head.bias"] = torch.zeros(len(tensors["head.weight"]))
        report.created.append(("head.bias", "zeros: CLIP's projection has no bias"))
    return tensors


def _as_weight(report: LoadReport, name: str, tensor: Tensor) -> Tensor:
    """The tensor in fp32, or an error where it is of whole numbers."""
    if not tensor.is_floating_point():
        raise CheckpointError(f"{report.source}: {name} is {tensor.dtype}, but weights are floating point.")
    if tensor.dtype != torch.float32:
        note = f"{tensor.dtype} converted to torch.float32".replace("torch.", "")
        report.notes += [note] * (note not in report.notes)
        tensor = tensor.float()
    return tensor


def refuse_broken(tensors: Mapping[str, Tensor], source: str) -> None:
    """Raise unless every number is finite."""
    for name, tensor in tensors.items():
        # A sum is one quick look; every number is looked at only if it fails.
        if not math.isfinite(tensor.sum()) and not tensor.isfinite().all():
            raise CheckpointError(f"{source}: {name} holds NaN or infinite numbers; the file is damaged.")


def _adapt(tensors: dict[str, Tensor], old: ViTConfig, new: ViTConfig, report: LoadReport) -> dict[str, Tensor]:
    """Bring tensors to the model that is asked for, and write down how."""
    tensors = dict(tensors)

    def change(name: str, how: str, make: Callable[[Tensor], Tensor]) -> None:
        before = tensors[name]
        tensors[name] = make(before)
        report.resized.append((name, tuple(before.shape), tuple(tensors[name].shape), how))

    if old.stem == "shifted" and (new.in_chans, new.patch) != (old.in_chans, old.patch):
        raise ConfigError("shifted patches are for the channels and patch they were made for; leave both as they are.")
    patches, positions = "patch_embed.proj.weight", "pos_embed"
    if new.in_chans != old.in_chans:
        change(f"{first_conv(old)}.weight", "channels summed or repeated", lambda w: adapt_channels(w, new.in_chans))
    if new.patch != old.patch and old.stem == "linear":
        change(patches, "by pseudo-inverse (FlexiViT)", lambda w: resize_patches(w, new.patch))
    elif new.patch != old.patch:
        _refuse_another_stem(old, new)
    if new.grid != old.grid and positions in tensors:
        change(
            positions, str(new.pos_resize), lambda table: resize_positions(table, old.grid, new.grid, new.pos_resize)
        )
    if new.num_classes != old.num_classes:
        for name in [name for name in tensors if name.startswith("head.")]:
            report.dropped.append((name, f"{new.num_classes} classes are asked for, the file has {old.num_classes}"))
            del tensors[name]
    return tensors


def _refuse_another_stem(old: ViTConfig, new: ViTConfig) -> None:
    """Raise unless a conv stem for other patches has the same layers, which then only take other strides."""
    if old.stem == "resnet":
        raise ConfigError(
            f"the patches of a hybrid are cells of its CNN's map, {old.patch[0]}x{old.patch[1]} pixels; "
            f"leave patch_size out."
        )
    if len(old.stem_layers) != len(new.stem_layers):
        raise ConfigError(
            f"the {old.stem} stem has {len(old.stem_layers)} layers for patches of {old.patch_size}, but "
            f"{len(new.stem_layers)} for {new.patch_size}: leave patch_size out; img_size, too, changes their number."
        )


def _build(
    config: ViTConfig, tensors: dict[str, Tensor], report: LoadReport, allow: Sequence[str], path: Path
) -> VisionTransformer:
    model = blank(lambda: VisionTransformer(config))
    wanted = dict(model.named_parameters())
    missing = [name for name in wanted if name not in tensors]
    head = [name for name in wanted if name.startswith("head.")]
    fresh = head if set(head) <= set(missing) else []  # a new head is made whole or not at all
    report.created += [(name, "new, at random: train it") for name in fresh]
    report.missing += [name for name in missing if name not in fresh]
    report.unexpected += [name for name in tensors if name not in wanted]
    refuse_gaps(report, allow, path)
    refuse_shapes(tensors, wanted, path)
    if missing:  # start them as a fresh model does
        model.to_empty(device="cpu")
        init_weights(model)
    modules = dict(model.named_modules())
    for name in wanted.keys() & tensors.keys():  # as load_state_dict(assign=True) does, in a fifth of its time
        owner, _, parameter = name.rpartition(".")
        setattr(modules[owner], parameter, nn.Parameter(tensors[name].contiguous()))
    return model


def refuse_shapes(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Raise unless every tensor has the shape that the model wants."""
    for name, tensor in tensors.items():
        if name in wanted and tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, "
                f"but the other shapes ask for {tuple(wanted[name].shape)}."
            )


def refuse_gaps(report: LoadReport, allow: Sequence[str], path: Path, what_it_is: str = "ViT") -> None:
    """Raise for tensors that are missing or left over, unless a pattern in `allow` names them."""
    for what, names in (("lacks", report.missing), (f"has, beyond what a {what_it_is} needs,", report.unexpected)):
        rest = [name for name in names if not any(fnmatchcase(name, pattern) for pattern in allow)]
        if rest:
            more = f" and {len(rest) - 3} more" * (len(rest) > 3)
            raise CheckpointError(
                f"{path} ({report.layout.partition(',')[0]}) {what} {', '.join(rest[:3])}{more}; "
                f"if that is meant, name it: allow=[{rest[0]!r}]."
            )


def _adapt_run(model: AnyModel, path: Path, asked: dict[str, Any]) -> AnyModel:
    """A run of our own, brought to other classes, sizes or channels by the same steps."""
    if isinstance(model, Detector) and "patch_size" not in asked:
        from vitral.weights.detr import adapt_detector

        return adapt_detector(model, path, **asked)
    if isinstance(model, ResNet) and "patch_size" not in asked:
        from vitral.weights.resnet import adapt_resnet

        return adapt_resnet(model, path, **asked)
    if isinstance(model, SwinTransformer):
        from vitral.weights.swin import adapt_swin

        return adapt_swin(model, path, **asked)
    if not isinstance(model, VisionTransformer):
        raise ConfigError(f"{path} is a {type(model).__name__}, which does not take {', '.join(asked)}; leave it out.")
    old = model.config
    new = _target(old, *(asked.get(key) for key in ("num_classes", "img_size", "in_chans", "patch_size")))
    report = LoadReport(str(path), "a run of vitral")
    tensors = _adapt(model.state_dict(), old, new, report)
    adapted = _build(new, tensors, report, (), path)
    adapted.preprocess = replace(model.preprocess.for_channels(new.in_chans), img_size=new.image)
    adapted.labels = model.labels if new.num_classes == old.num_classes else None
    adapted.load_report = report
    return adapted.eval()
