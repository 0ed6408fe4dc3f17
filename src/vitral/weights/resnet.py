"""ResNet's files (He et al., 2016): timm's and torchvision's, whose names are ours, read and written.

Shapes tell the model. Preprocessing and labels come from timm's `config.json`, and else are torchvision's.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from vitral.config import Preprocess, ResNetConfig, ResNetKind
from vitral.errors import CheckpointError, ConfigError
from vitral.models.cnn import ResNet
from vitral.models.init import blank
from vitral.weights import timm
from vitral.weights.adapt import adapt_channels
from vitral.weights.files import WeightFile
from vitral.weights.layout import Known, Plan, fitting_labels, rule
from vitral.weights.load import read_plan, refuse_broken, refuse_gaps, refuse_shapes
from vitral.weights.report import LoadReport

Size = int | tuple[int, int]
FIRST, HEAD = "conv1.weight", ("fc.weight", "fc.bias")
DROP = {r".*\.num_batches_tracked": "count of the batches that the norms saw in training"}
TORCHVISION = {"interpolation": "bilinear", "crop_pct": 0.875}


def load_resnet(
    file: WeightFile,
    source: str,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
    allow: Sequence[str] = (),
) -> ResNet:
    """The ResNet in a file, ready to predict. The options are those of `load_model`."""
    plan = read_names(file)
    found, known = read_config(file, plan)
    config = _target(found, num_classes, img_size, in_chans)
    report = LoadReport(source, about(known), notes=[*file.notes, *known.notes])
    report.dropped += list(plan.dropped.items())
    tensors = read_plan(plan, report)
    refuse_broken(tensors, report.source)
    model = _build(config, _adapt(tensors, found, config, report), report, allow, file.path)
    model.preprocess = read_preprocess(file, config, known)
    for name in ("mean", "std", "interpolation", "crop_mode", "crop_pct"):
        report.settings.append((name, str(getattr(model.preprocess, name)), preprocess_source(name, known)))
    labels = known.labels if config.num_classes == found.num_classes else None
    model.labels = fitting_labels(labels, config.num_classes, report.notes)
    model.load_report = report
    return model.eval()


def adapt_resnet(
    model: ResNet,
    path: Path,
    num_classes: int | None = None,
    img_size: Size | None = None,
    in_chans: int | None = None,
) -> ResNet:
    """A ResNet of a run of our own, brought to other classes or channels, or fed images of another size."""
    old = model.config
    new = _target(old, num_classes, img_size, in_chans)
    report = LoadReport(str(path), "a run of vitral", matched=list(model.state_dict()))
    adapted = _build(new, _adapt(dict(model.state_dict()), old, new, report), report, (), path)
    adapted.preprocess = replace(model.preprocess.for_channels(new.in_chans), img_size=new.image)
    adapted.labels = model.labels if new.num_classes == old.num_classes else None
    adapted.load_report = report
    return adapted.eval()


def _target(config: ResNetConfig, num_classes: int | None, img_size: Size | None, in_chans: int | None) -> ResNetConfig:
    """The config of the model that is asked for."""
    asked = {"num_classes": num_classes, "img_size": img_size, "in_chans": in_chans}
    return replace(config, **{name: value for name, value in asked.items() if value is not None})


def read_names(file: WeightFile) -> Plan:
    """How the tensors of a file become ours: under their own names."""
    dropped = {name: why for name in file.tensors for pattern, why in DROP.items() if re.fullmatch(pattern, name)}
    return Plan(file.tensors, [rule(name, name) for name in file.tensors if name not in dropped], dropped, [])


def read_config(file: WeightFile, plan: Plan) -> tuple[ResNetConfig, Known]:
    """The model that the shapes tell of, and what lies beside the weights."""
    try:
        known = timm.read_config(file.config) if "architecture" in file.config else Known()
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise CheckpointError(f"a document beside {file.path} does not say what it should ({error}).") from error
    shapes = plan.shapes()
    kind = kind_of(shapes)
    if kind is None:
        raise CheckpointError(f"{file.path} looks like a ResNet, but is none of {', '.join(get_args(ResNetKind))}.")
    if len(shapes[FIRST]) != 4 or len(shapes.get(HEAD[0], (0, 0))) != 2:
        raise CheckpointError(f"{file.path} looks like a ResNet, but its shapes do not fit together.")
    size = (file.config.get("pretrained_cfg") or {}).get("input_size")
    options: dict[str, Any] = {"img_size": tuple(size[1:])} if isinstance(size, list) and len(size) == 3 else {}
    told, stride = file.config.get("architecture", kind), _output_stride(file)
    if re.search(r"resnet(blur|aa)", str(told)) or stride not in (16, 32):
        raise CheckpointError(
            f"{file.path} is a {told} with an output_stride of {stride}, as its config.json says; the ResNets here "
            "have plain pools, and an output_stride of 32 or 16."
        )
    options |= {"dilation": True} if stride == 16 else {}
    classes = shapes.get(HEAD[0], (0,))[0]
    return ResNetConfig(kind=kind, in_chans=shapes[FIRST][1], num_classes=classes, **options), known


def _output_stride(file: WeightFile) -> Any:
    """How far apart the cells of the last map are, in pixels; 32 where nothing says so."""
    arguments = file.config.get("model_args")
    return arguments.get("output_stride", 32) if isinstance(arguments, Mapping) else 32


def kind_of(shapes: Mapping[str, tuple[int, ...]]) -> ResNetKind | None:
    """Which ResNet has these blocks, if any."""

    def depth(stage: int) -> int:
        blocks = {found[1] for name in shapes if (found := re.match(rf"layer{stage}\.(\d+)\.", name))}
        return len(blocks)

    depths = [count for stage in range(1, 6) if (count := depth(stage))]
    bottleneck = "layer1.0.conv3.weight" in shapes
    for kind in get_args(ResNetKind):
        c = ResNetConfig(kind=kind)
        if [depth for _, _, depth in c.stages] == depths and c.bottleneck == bottleneck:
            return kind
    return None


def read_preprocess(file: WeightFile, config: ResNetConfig, known: Known) -> Preprocess:
    """What is done to an image: as the document says, and else as torchvision evaluates its weights."""
    try:
        made = Preprocess.from_dict({"img_size": config.image} | (known.preprocess or TORCHVISION))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the preprocessing beside {file.path} cannot be used: {error}") from error
    return made.for_channels(config.in_chans)


def preprocess_source(name: str, known: Known) -> str:
    """Where an option of the preprocessing comes from."""
    return "a file beside the weights" if name in known.preprocess else "torchvision"


def about(known: Known) -> str:
    """Whose file it is, and what told it."""
    return f"ResNet of timm or torchvision, told by its tensor names{' and config.json' if known.preprocess else ''}"


def _adapt(tensors: dict[str, Tensor], old: ResNetConfig, new: ResNetConfig, report: LoadReport) -> dict[str, Tensor]:
    """Bring tensors to the channels and classes that are asked for."""
    changed: set[str] = set()
    if new.in_chans != old.in_chans:
        made = adapt_channels(tensors[FIRST], new.in_chans)
        report.resized.append((FIRST, tuple(tensors[FIRST].shape), tuple(made.shape), "channels summed or repeated"))
        tensors[FIRST] = made
        changed.add(FIRST)
    if new.num_classes != old.num_classes:
        for name in [name for name in HEAD if tensors.pop(name, None) is not None]:
            report.dropped.append((name, f"{new.num_classes} classes are asked for, the file has {old.num_classes}"))
            changed.add(name)
    report.matched = [name for name in report.matched if name not in changed]
    return tensors


def _build(
    config: ResNetConfig, tensors: dict[str, Tensor], report: LoadReport, allow: Sequence[str], path: Path
) -> ResNet:
    shapes = blank(lambda: ResNet(config)).state_dict()
    wanted = {name: tensor for name, tensor in shapes.items() if not name.endswith("num_batches_tracked")}
    missing = [name for name in wanted if name not in tensors]
    fresh = HEAD if set(HEAD) <= set(missing) else ()  # a new head is made whole or not at all
    report.created += [(name, "new, at random: train it") for name in fresh]
    report.missing += [name for name in missing if name not in fresh]
    report.unexpected += [name for name in tensors if name not in shapes]
    refuse_gaps(report, allow, path, "ResNet")
    refuse_shapes(tensors, wanted, path)
    model = ResNet(config)
    model.load_state_dict({name: tensor for name, tensor in tensors.items() if name in shapes}, strict=False)
    return model


# ---- written ----


def write_timm_config(c: ResNetConfig, p: Preprocess, labels: list[str] | None) -> dict[str, Any]:
    """timm's `config.json`."""
    if c.small or c.frozen_norm:
        lacks = f"{c.kind} for small images" if c.small else "ResNet whose batch norms are fixed"
        raise ConfigError(f"timm has no {lacks}; write it as vitral.")
    document = {
        "architecture": c.kind,
        "num_classes": c.num_classes,
        "num_features": c.feature_dim,
        "global_pool": "avg",
        "model_args": {"in_chans": c.in_chans} | ({"output_stride": 16} if c.dilation else {}),
        "pretrained_cfg": timm.write_pretrained(c, p, "fc", first="conv1"),
    }
    return document | ({"label_names": labels} if labels else {})
