"""A run without labels, from images to run directory: as `session`, with a method in place of a task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitral.config import PretrainConfig, ViTConfig
from vitral.data.loader import TrainLoader
from vitral.data.sources.base import Data
from vitral.data.targets import Values
from vitral.errors import ConfigError, DataError
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import is_model, model_spec
from vitral.tasks.dino import DINO
from vitral.tasks.mae import MAE
from vitral.tasks.method import Method
from vitral.training.card import pretrained_card
from vitral.training.checkpoint import Checkpoint, save_checkpoint
from vitral.training.distributed import Processes, processes
from vitral.training.log import RunLog
from vitral.training.loop import Hooks, fit, total_steps
from vitral.training.precision import resolve_device, resolve_precision
from vitral.training.session import (
    Run,
    make_backbone,
    metrics_of_finished,
    note_of_few,
    open_run,
    provenance,
    record_budget,
    signals,
    write_missing_report,
)
from vitral.weights.atomic import save_tensors, write_atomically
from vitral.weights.fetch import is_source
from vitral.weights.rundir import CONFIG, PRETRAIN, REPORT, WEIGHTS, architecture_of, config_document

Look = Callable[[Method, int], tuple[dict[str, float], str]]
"""How it goes after so many epochs: signals in numbers, and what is wrong, if anything."""
SIGNALS = ("knn", "teacher_entropy", "feature_rank", "feature_std")
"""What is shown while a run goes on."""


def make_method(config: PretrainConfig, in_chans: int, who: Processes) -> Method:
    """The method with the model that it trains."""
    torch.manual_seed(config.seed)  # of the heads
    given = is_source(config.model)
    if config.method == "dino":
        return DINO(_make_vit(config, in_chans), config, given, who.mean)
    # No part of MAE's loss reads [CLS]: what it learns is in the patches.
    return MAE(_make_vit(config, in_chans, global_pool="mean"), config, given)


def _make_vit(config: PretrainConfig, in_chans: int, **fresh: Any) -> VisionTransformer:
    """The ViT that is asked for: both methods hide or reorder its tokens."""
    other = is_model(config.model) and not isinstance(model_spec(config.model).config, ViTConfig)
    made = None if other else make_backbone(config, in_chans, 0, **fresh)
    if not isinstance(made, VisionTransformer):
        raise ConfigError(f"--method {config.method} is for ViTs (vitral models 'vit*'), and {config.model} is none.")
    return made


def pretrain_model(
    data: Data, config: PretrainConfig, out: Path, look: Look, *, resume: bool = False, quiet: bool = False,
    command: str = "", report: Callable[[Run], object] | None = None,
) -> Run:  # fmt: skip
    """Train a model on images without labels and write its run directory, which is locked until `report` has returned.

    `data` has the splits that are needed. With `resume`, a run in `out` continues from its newest checkpoint; if there
    is none, one is started.
    """
    if data.what != "images":
        raise DataError(f"{data.name} has {data.what}; pretraining is for images.")
    device = resolve_device(config.device)
    dtype, notice = resolve_precision(config.precision, device)
    with processes(device) as who, open_run(out, config, PRETRAIN, data, resume, who) as (resumed, checkpoint, notes):
        log = RunLog(out / "metrics.jsonl" if who.first else None, quiet, checkpoint.step if checkpoint else 0, SIGNALS)
        if resumed and (finished := metrics_of_finished(out, config, checkpoint)) is not None:
            log.say(f"{out} is finished and stays as it is; more --epochs or --max-steps would extend it")
            return write_missing_report(Run(out, finished, data, wrote=who.first), report)
        method = make_method(config, data.in_chans, who)
        method.model.to(device)
        nothing = Values(torch.zeros(len(data.inputs), 0))
        loader = TrainLoader(
            data, method.inputs, config.augment, config.batch_size, config.seed, config.strict, config.workers,
            who.rank, who.world, nothing,
        )  # fmt: skip
        if resumed:
            record_budget(out, config, checkpoint, total_steps(config, loader), who.first)
        with log, signals() as stop:
            few = note_of_few(total_steps(config, loader))
            for note in [data.describe(), *data.notes, _built(method), *filter(None, [notice]), *notes, *few]:
                log.say(note)
            torch.manual_seed(config.seed)
            describe = _description(data, config, method, command)
            if who.first and not (out / CONFIG).exists():
                write_atomically(out / CONFIG, config_document(describe))
            last, said = [""], set[str]()

            def validate(epoch: int) -> dict[str, float]:
                seen, trouble = look(method, epoch)
                stays = trouble == last[0] or epoch < 0  # once may pass by itself
                if trouble and stays and trouble not in said:
                    log.warn(trouble + " After so few steps it may only have hardly begun." * bool(few))
                    said.add(trouble)
                last[0] = trouble
                return {**seen, "collapsed": float(bool(trouble))}

            def save(state: Checkpoint) -> None:
                if who.first:
                    save_checkpoint(out / "checkpoints", state)

            hooks = Hooks(log.line, validate, save, lambda: None, log.warn, stop)
            state = fit(method.model, method, loader, config, hooks, who, device, dtype, checkpoint)
            if state.unreadable:
                log.warn(f"{state.unreadable} reads of images failed; vitral check names the files")
            if not who.first:
                return Run(out, {}, data, wrote=False)
            metrics = {"val": validate(-1)}
            if state.step % loader.steps_per_epoch:  # the clock ended it between evaluations
                epoch = state.step / loader.steps_per_epoch
                log.line(
                    {"split": "val", "step": state.step, "epoch": epoch, **metrics["val"], "seconds": state.seconds}
                )
            save_tensors(out / WEIGHTS, method.backbone.state_dict())
            write_atomically(out / "README.md", pretrained_card(describe, metrics["val"]).encode())
            (out / REPORT).unlink(missing_ok=True)  # of a run that was extended
            write_atomically(out / CONFIG, config_document({**describe, "metrics": metrics, "trouble": last[0]}))
        return write_missing_report(Run(out, metrics, data), report)


def _built(method: Method) -> str:
    """What is trained, in a line."""
    c = method.config
    params = sum(p.numel() for p in method.learner.parameters())
    heads = sum(p.numel() for p in method.model.parameters() if p.requires_grad) - params
    line = f"{c.model} by {method.name}: {params:,} parameters, {heads:,} more of heads; {method.inputs.size}"
    if not method.heads_warm_up:
        return line
    return f"{line}; {c.model} comes without heads: new ones learn alone for {c.head_warmup_epochs:g} epochs"


def _description(data: Data, config: PretrainConfig, method: Method, command: str) -> dict[str, Any]:
    vit = method.backbone
    assert vit.preprocess is not None
    return {
        "task": PRETRAIN,
        "method": method.name,
        "what": method.what,
        "labels": None,
        "model_name": config.model,
        "architecture": architecture_of(vit),
        "model": vit.config.to_dict(),
        "parameters": sum(p.numel() for p in vit.parameters()),
        "preprocess": vit.preprocess.to_dict(),
        **provenance(data, config, (), command),
    }
