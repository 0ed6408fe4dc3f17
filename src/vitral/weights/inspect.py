"""What a file of weights is, told from its names and shapes alone."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from vitral.errors import CheckpointError
from vitral.models.cnn import ResNet
from vitral.models.init import blank
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer
from vitral.weights import resnet
from vitral.weights.detect import detect, is_resnet, is_swin
from vitral.weights.fetch import locate, open_located
from vitral.weights.rundir import is_run, read_run_config
from vitral.weights.swin import ABOUT, preprocess_source, read_config, read_names, read_preprocess


@dataclass(frozen=True)
class Inspection:
    """What was found."""

    source: str
    layout: str
    params: int
    bytes: int
    settings: list[tuple[str, Any, str]]
    """Option, value, where it comes from."""
    notes: list[str]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    problem: str
    """Why it cannot be loaded; empty if it can."""

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold."""
        return {**asdict(self), "loads": not self.problem}


def inspect_weights(source: str, family: str | None = None, num_heads: int | None = None) -> Inspection:
    """Look at a file of weights, its folder, a run directory or a repository of the hub."""
    path = locate(source)
    file = open_located(path, source)
    settings: list[tuple[str, Any, str]]
    if path.is_dir() and is_run(path):
        run = read_run_config(path)
        layout, build, spare = "a run of vitral", run.build, set()
        told = run.preprocess.to_dict() if run.preprocess else {}
        settings = [(k, v, "config.json") for k, v in (run.model.to_dict() | told).items()]
        names, notes = {name: t.shape for name, t in file.tensors.items()}, list(file.notes)
    elif is_swin(file.tensors):
        plan, kind = read_names(file)
        swin, reasons, known = read_config(file, plan, kind)
        layout, build, spare = f"{ABOUT[kind]}, told by its tensor names", (lambda: SwinTransformer(swin)), set()
        told = read_preprocess(file, kind, swin, known).to_dict()
        settings = [(name, value, reasons.get(name, "the shapes")) for name, value in swin.to_dict().items()]
        settings += [(name, value, preprocess_source(name, kind, known)) for name, value in told.items()]
        notes = [
            *file.notes,
            *known.notes,
            *(f"left out: {name} ({why})" for name, why in list(plan.dropped.items())[:4]),
        ]
        names = plan.shapes() | dict.fromkeys(plan.unexpected, ())
    elif is_resnet(file.tensors):
        plan = resnet.read_names(file)
        cnn, known = resnet.read_config(file, plan)
        layout, build, spare = resnet.about(known), (lambda: ResNet(cnn)), set(plan.dropped)
        told = resnet.read_preprocess(file, cnn, known).to_dict()
        settings = [(name, value, "the shapes") for name, value in cnn.to_dict().items()]
        settings += [(name, value, resnet.preprocess_source(name, known)) for name, value in told.items()]
        notes, names = [*file.notes, *known.notes], plan.shapes()
    else:
        found = detect(file, family, **({} if num_heads is None else {"num_heads": num_heads}))
        layout, config = found.told, found.config
        build, spare = (lambda: VisionTransformer(config)), {"head.bias"} if config.pre_norm else set()
        notes = [
            *file.notes,
            *found.notes,
            *(f"left out: {name} ({why})" for name, why in list(found.plan.dropped.items())[:4]),
        ]
        values = config.to_dict() | {k: v for k, v in found.preprocess.to_dict().items() if k != "img_size"}
        settings = [(k, v, found.reasons[k]) for k, v in values.items() if k in found.reasons]
        names = found.plan.shapes() | dict.fromkeys(found.plan.unexpected, ())
    tensors = {name: (t.shape, str(t.dtype).removeprefix("torch.")) for name, t in file.tensors.items()}
    params = sum(torch.Size(t.shape).numel() for t in file.tensors.values())
    return Inspection(source, layout, params, file.bytes, settings, notes, tensors, _problem(build, names, spare))


def _problem(build: Callable[[], nn.Module], names: dict[str, tuple[int, ...]], spare: set[str]) -> str:
    """Why tensors of these names and shapes do not make the model, or nothing; `spare` ones may be missing."""
    try:
        model = blank(build)
    except CheckpointError as error:
        return str(error)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name in wanted:
        if name not in names and name not in spare:
            return f"{name} is missing."
    for name, shape in names.items():
        if name not in wanted:
            return f"{name} has no place in the model."
        if shape != wanted[name]:
            return f"{name} has shape {shape}, the model wants {wanted[name]}."
    return ""
