"""A training run from data to run directory: sets up what the loop needs, and writes down what comes out."""

import json
import platform
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitral import __version__
from vitral.config import Preprocess, TrainConfig
from vitral.data.loader import TrainLoader, eval_batches
from vitral.data.sources.base import Data
from vitral.data.transforms import normalize
from vitral.errors import CheckpointError, DataError
from vitral.models.cost import model_cost
from vitral.models.zoo import MODELS, create_model
from vitral.tasks.classify import Classify, fit_temperature
from vitral.tasks.metrics import classification_metrics
from vitral.training.card import model_card
from vitral.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from vitral.training.distributed import Processes, processes
from vitral.training.log import RunLog
from vitral.training.loop import Hooks, fit
from vitral.training.precision import resolve_device, resolve_precision
from vitral.weights.atomic import save_tensors, write_atomically
from vitral.weights.load import is_source, load_model, with_stochastic_depth
from vitral.weights.rundir import CONFIG, WEIGHTS, config_document, read_run_config

# Options that may differ when a run goes on: they change where and how fast it runs, not what it computes.
MAY_DIFFER = {"device", "workers", "save_minutes", "save_steps", "log_steps", "max_minutes"}


@dataclass(frozen=True)
class Run:
    """A finished run: where it lies, and its metrics by split."""

    path: Path
    metrics: dict[str, Any]
    wrote: bool = True
    """Whether this process is the one that wrote it."""


def train_model(
    data: Data, config: TrainConfig, out: Path, *, resume: bool = False, quiet: bool = False, command: str = ""
) -> Run:
    """Train a classifier on a data set and write its run directory."""
    data = data.with_splits(config.val_fraction, config.test_fraction, seed=0)
    if len(data.classes) < 2:
        raise DataError(f"{data.name} has only one class ({data.classes[0]}); classification needs at least two.")
    device = resolve_device(config.device)
    dtype, notice = resolve_precision(config.precision, device)
    with processes(device) as who:
        checkpoint, notes = _open_run(out, config, resume, who)
        task = Classify(data.classes, config.label_smoothing)
        model = _make_model(data, config, task, device)
        preprocess = model.preprocess
        loader = TrainLoader(
            data, preprocess, config.augment, config.batch_size, config.seed, config.strict, config.workers,
            who.rank, who.world,
        )  # fmt: skip
        log = RunLog(out / "metrics.jsonl" if who.first else None, quiet, checkpoint.step if checkpoint else 0)
        with log, _signals() as stop:
            size = "x".join(map(str, model.config.image))
            built = f"{config.model}: {model_cost(model.config).params:,} parameters, images of {size}"
            for note in [data.describe(), *data.notes, built, *filter(None, [notice]), *notes]:
                log.say(note)
            torch.manual_seed(config.seed)
            describe = _description(data, config, model, command)
            if who.first:
                write_atomically(out / CONFIG, config_document(describe))

            def validate() -> dict[str, float]:
                return _evaluate_sums(model, task, data, preprocess, config, device, who)

            def keep_best() -> None:
                if who.first and config.select == "best":
                    save_tensors(out / "best.safetensors", model.state_dict())

            def save(state: Checkpoint) -> None:
                if who.first:
                    save_checkpoint(out / "checkpoints", state)

            hooks = Hooks(log.line, validate if "val" in data.splits else None, save, keep_best, log.warn, stop)
            state = fit(model, task, loader, preprocess, config, hooks, who, device, dtype, checkpoint)
            if state.unreadable:
                log.warn(f"{state.unreadable} reads of images failed; vitral check names the files")
            if config.select == "best" and (out / "best.safetensors").is_file():
                from safetensors.torch import load_file

                model.load_state_dict(load_file(out / "best.safetensors"))
            if not who.first:
                return Run(out, {}, wrote=False)
            return _finish(out, model, data, preprocess, config, device, describe, log)


def _make_model(data: Data, config: TrainConfig, task: Classify, device: torch.device) -> Any:
    options: dict[str, Any] = {"in_chans": 1 if data.mode == "grey" else 3}
    if config.img_size is not None:
        options["img_size"] = config.img_size
    options |= task.model_options()
    if config.model not in MODELS and is_source(config.model):
        torch.manual_seed(config.seed)  # the new head's weights
        model = load_model(config.model, quiet=True, **options)
        return with_stochastic_depth(model, config.drop_path_rate).to(device)
    return create_model(config.model, seed=config.seed, drop_path_rate=config.drop_path_rate, **options).to(device)


def _open_run(out: Path, config: TrainConfig, resume: bool, who: Processes) -> tuple[Checkpoint | None, list[str]]:
    """Make the run directory, or find the checkpoint to go on from; the first process looks, and all heed it."""
    problem = ""
    if who.first:
        problem = _why_not(out, config, resume)
        if not problem and not resume:
            out.mkdir(parents=True, exist_ok=True)
    if who.any(bool(problem)):
        raise CheckpointError(problem or f"the first process could not open {out}.")
    if not resume:
        return None, []
    checkpoint, problems = load_newest(out / "checkpoints")
    notes = [f"warning: {text} The one before is used." for text in problems]
    here = f"going on from step {checkpoint.step}" if checkpoint else "no checkpoint yet: starting from the beginning"
    return checkpoint, [*notes, here]


def _why_not(out: Path, config: TrainConfig, resume: bool) -> str:
    """Why a run cannot start, or go on, in this place with these options; nothing if it can."""
    if not resume:
        taken = (out / CONFIG).exists() or (out / "checkpoints").exists()
        return f"{out} holds a run already; pass --resume to go on with it, or another --out." if taken else ""
    if not (out / CONFIG).is_file():
        return f"{out} holds no run to go on with; leave --resume out to start one."
    saved = read_run_config(out).document["train"]
    now = json.loads(json.dumps(config.to_dict()))
    different = [key for key in now if key not in MAY_DIFFER and saved.get(key) != now[key]]
    named = "; ".join(f"{key}: {saved.get(key)!r} in the run, {now[key]!r} now" for key in different)
    return f"{out} was started with other options ({named}); use the same, or another --out." if different else ""


@contextmanager
def _signals() -> Iterator[Any]:
    """Turn Ctrl-C and SIGTERM into a wish to stop, which the loop grants after a checkpoint."""
    wish: list[int] = []

    def note(number: int, frame: object) -> None:
        if wish:
            raise KeyboardInterrupt  # the second time at once
        wish.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: somebody else's signals
        before = {}
    try:
        yield lambda: bool(wish)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@torch.no_grad()
def _evaluate_sums(
    model: nn.Module,
    task: Classify,
    data: Data,
    preprocess: Preprocess,
    config: TrainConfig,
    device: torch.device,
    who: Processes,
) -> dict[str, float]:
    """Metrics on the validation part, each process taking its share."""
    sums = {"count": 0.0, "loss": 0.0, "accuracy": 0.0}
    share = data.splits["val"][who.rank :: who.world]
    for batch in eval_batches(data, share, preprocess, config.batch_size, config.strict, 0):
        for name, value in task.sums(
            model(normalize(batch.images.to(device), preprocess)), batch.targets.to(device)
        ).items():
            sums[name] += value
    sums = who.sum(sums)
    return {name: value / max(sums["count"], 1) for name, value in sums.items() if name != "count"}


@torch.no_grad()
def predict_logits(
    model: nn.Module, data: Data, indices: Tensor, preprocess: Preprocess, batch_size: int
) -> dict[str, Tensor]:
    """Logits of chosen images, with their targets and numbers; unreadable images are left out."""
    device = next(model.parameters()).device
    logits, targets, numbers = [], [], []
    for batch in eval_batches(data, indices, preprocess, batch_size, False, 0):
        logits.append(model(normalize(batch.images.to(device), preprocess)).float().cpu())
        targets.append(batch.targets)
        numbers.append(batch.samples)
    return {"logits": torch.cat(logits), "targets": torch.cat(targets), "indices": torch.cat(numbers)}


def _finish(
    out: Path, model: Any, data: Data, preprocess: Preprocess, config: TrainConfig, device: torch.device,
    describe: dict[str, Any], log: RunLog,
) -> Run:  # fmt: skip
    """Evaluate the finished model on the parts that were kept apart, and write everything down."""
    model.eval()
    parts = {
        p: predict_logits(model, data, data.splits[p], preprocess, 256) for p in ("val", "test") if p in data.splits
    }
    temperature = fit_temperature(parts["val"]["logits"], parts["val"]["targets"]) if "val" in parts else 1.0
    metrics = {
        p: classification_metrics(v["logits"], v["targets"], data.classes, temperature) for p, v in parts.items()
    }
    save_tensors(out / "evaluation.safetensors", {f"{p}.{k}": t for p, v in parts.items() for k, t in v.items()})
    save_tensors(out / WEIGHTS, model.state_dict())
    (out / "best.safetensors").unlink(missing_ok=True)
    write_atomically(out / CONFIG, config_document({**describe, "temperature": temperature, "metrics": metrics}))
    write_atomically(out / "README.md", model_card(describe, metrics).encode())
    for part, m in metrics.items():
        low, high = (100 * v for v in m["accuracy_95"])
        accuracy = f"accuracy {100 * m['accuracy']:.2f} % (95 %: {low:.2f} to {high:.2f})"
        log.say(f"{part}: {accuracy}, {m['images']:,} images")
    return Run(out, metrics)


def _description(data: Data, config: TrainConfig, model: Any, command: str) -> dict[str, Any]:
    return {
        "task": "classify",
        "labels": data.classes,
        "model_name": config.model,
        "model": model.config.to_dict(),
        "preprocess": model.preprocess.to_dict(),
        "train": config.to_dict(),
        "data": {
            "name": data.name,
            "mode": data.mode,
            "splits": {part: len(indices) for part, indices in data.splits.items()},
            "licence": data.licence,
            "notes": data.notes,
        },
        "seed": config.seed,
        "command": command,
        "versions": {"vitral": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "git_revision": _git_revision(),
    }


def _git_revision() -> str | None:
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or None
