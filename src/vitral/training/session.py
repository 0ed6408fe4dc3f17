"""A training run from data to run directory: sets up what the loop needs, and writes down what comes out."""

import json
import platform
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from vitral import __version__
from vitral.config import LoopConfig, TrainConfig
from vitral.data.inputs import ImageInputs, Inputs, TextInputs
from vitral.data.loader import TrainLoader, eval_batches
from vitral.data.sources.base import Data
from vitral.data.text import tokenized
from vitral.data.tokenizer import PAD
from vitral.display import Table, Tabular, html_table
from vitral.errors import CheckpointError, ConfigError, VitralError
from vitral.models.backbone import Backbone
from vitral.models.init import init_weights
from vitral.models.lora import merge_lora
from vitral.models.seq2seq import TextEncoder
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import create_model, model_spec
from vitral.tasks.base import Found, Task
from vitral.tasks.metrics import grouped
from vitral.tasks.open import TASKS, make_inputs, make_task
from vitral.training.card import model_card
from vitral.training.checkpoint import Checkpoint, load_newest, remove_leftovers, save_checkpoint
from vitral.training.diagnose import FEW_STEPS, diagnose
from vitral.training.distributed import Processes, processes
from vitral.training.finetune import choose_trained, count_parameters
from vitral.training.log import RunLog, read_metrics
from vitral.training.loop import Hooks, Saved, State, fit, total_steps
from vitral.training.precision import resolve_device, resolve_precision
from vitral.training.reserve import report_seconds, reserved_seconds
from vitral.training.seen import write_seen
from vitral.weights.atomic import save_tensors, write_atomically
from vitral.weights.fetch import is_source, origin_of
from vitral.weights.files import read_tensors
from vitral.weights.load import load_backbone, with_pooling, with_stochastic_depth
from vitral.weights.lock import locked
from vitral.weights.rundir import (
    CONFIG,
    REPORT,
    TOKENIZERS,
    WEIGHTS,
    Spent,
    architecture_of,
    config_document,
    read_run_config,
)

# Options that may differ when a run is resumed: they change where and how fast it runs, not what it computes.
MAY_DIFFER = {"device", "workers", "save_minutes", "save_steps", "log_steps"}
RESULT = ("spent", "metrics", "baselines", "diagnosis")
"""Keys of config.json that only a finished run has."""
BUDGET = {"epochs", "max_steps", "max_minutes"}
HELD_OUT = ("val", "test")
"""Splits that a finished model is evaluated on."""
LEAST_TRAINING = 0.1
"""Share of the minutes that is spent on training, however long the preparation took."""


@dataclass(frozen=True, repr=False)
class Run(Tabular):
    """A finished run: its directory, and its metrics by split."""

    path: Path
    metrics: dict[str, Any]
    data: Data
    """The training data with the splits that were used; evaluations number its samples."""
    wrote: bool = True
    """Whether this process wrote the run."""

    def __fspath__(self) -> str:
        """The directory: a run is accepted wherever its path is."""
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}: {self._summary()})"

    def _summary(self) -> str:
        """The first metric of the task on each split."""
        headlines = {task.headline for task in TASKS.values()}
        shown = [
            f"{split} {name} {value:.4g}"
            for split, metrics in self.metrics.items()
            for name, value in metrics.items()
            if name in headlines
        ]
        return ", ".join(shown) or "no metrics"

    def table(self) -> Table:
        """Metrics by class (label, target or length) on the test split, or else validation.

        If the task has no such metrics, one row per split.
        """
        last = next((self.metrics[split] for split in ("test", "val") if split in self.metrics), {})
        word, rows = grouped(last)
        if not rows:
            return self._by_split()
        columns = list(next(iter(rows.values())))
        return (word, *columns), [[name, *(row.get(column) for column in columns)] for name, row in rows.items()]

    def _by_split(self) -> Table:
        """The plain numbers among the metrics, one row per split."""
        plain = {
            split: {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            for split, metrics in self.metrics.items()
        }
        columns = list(dict.fromkeys(name for row in plain.values() for name in row))
        return ("split", *columns), [[split, *(row.get(name) for name in columns)] for split, row in plain.items()]

    def _repr_html_(self) -> str:
        splits, by_group = self._by_split(), self.table()
        shown = html_table(*splits, caption=f"Run {self.path}, report in {self.path / REPORT}")
        return shown if by_group == splits else shown + html_table(*by_group)


class Start(Protocol):
    """What gives a new model a head before it is trained, and judges afterwards whether training was worth it."""

    result: dict[str, Any]
    """What is recorded in the run."""

    def prepare(self, model: Any, task: Task, data: Data, say: Callable[[str], None]) -> None:
        """Fit the head."""
        ...

    def prefers_training(self, found: Found, say: Callable[[str], None]) -> bool:
        """Whether the trained model, judged by what it found on validation images, is the better one."""
        ...

    def restore(self, model: Any) -> None:
        """Give an untrained model the fitted head again."""
        ...


def train_model(
    data: Data, config: TrainConfig, out: Path, *, task: str | None = None, resume: bool = False, quiet: bool = False,
    command: str = "", start: Start | None = None, report: Callable[[Run], object] | None = None,
) -> Run:  # fmt: skip
    """Train a model on a data set and write its run directory, which is locked until `report` has returned.

    The task is inferred from the data unless it is named. With `resume`, a run in `out` continues from its newest
    checkpoint; if there is none, one is started. `start` is what `config.probe` asks for.
    """
    assert (start is None) == (config.probe == "none")
    began = time.monotonic()
    data.refuse_problems(config.strict)
    data = data.with_splits(config.val_fraction, config.test_fraction, config.split_seed)
    split = data.with_label_fraction(config.label_fraction, config.seed)
    data = tokenized(split, config.text)
    made = make_task(task, data, config)
    texts = make_inputs(data, config, made.name)
    data = made.usable(texts.usable(data) if texts else data)
    device = resolve_device(config.device)
    dtype, notice = resolve_precision(config.precision, device)
    with processes(device) as who, open_run(out, config, made.name, data, resume, who) as (resumed, checkpoint, notes):
        log = RunLog(
            out / "metrics.jsonl" if who.first else None, quiet, checkpoint.step if checkpoint else 0, [made.headline]
        )
        if resumed and (metrics := metrics_of_finished(out, config, checkpoint)) is not None:
            log.say(f"{out} is finished and stays as it is; more --epochs or --max-steps would extend it")
            return write_missing_report(Run(out, metrics, data, wrote=who.first), report)
        model = _make_model(data, config, made, texts, device)
        choose_trained(model, config)
        drop_patches(model, config.patch_drop, made.name)
        inputs = texts or ImageInputs(model.preprocess)
        loader = TrainLoader(
            data, inputs, config.augment, config.batch_size, config.seed, config.strict, config.workers,
            who.rank, who.world, made.targets(data),
        )  # fmt: skip
        if resumed:
            record_budget(out, config, checkpoint, total_steps(config, loader), who.first)
        with log, signals() as stop:
            params, trained = count_parameters(model)
            learns = f", of which {trained:,} are trained" if trained != params else ""
            built = f"{_model_name(config, texts)} to {made.name}: {params:,} parameters{learns}, {inputs.size}"
            notes = [*notes, *note_of_few(total_steps(config, loader))]
            for note in [data.describe(), *data.notes, *made.notes, built, *filter(None, [notice]), *notes]:
                log.say(note)
            torch.manual_seed(config.seed)
            describe = _description(data, config, made, inputs, model, command)
            if who.first and not (out / CONFIG).exists():
                if data.tokenizers:
                    kept = {what: tokenizer.to_dict() for what, tokenizer in data.tokenizers.items()}
                    write_atomically(out / TOKENIZERS, json.dumps(kept, ensure_ascii=False).encode())
                write_atomically(out / CONFIG, config_document(describe))

            def evaluate(indices: Tensor) -> Found:
                return find(model, made, data, indices, inputs, config.batch_size)

            def validate(epoch: int) -> dict[str, float]:
                found = evaluate(data.splits["val"][who.rank :: who.world])
                metrics = made.metrics({name: who.gather(tensor) for name, tensor in found.items()})
                return {name: value for name, value in metrics.items() if isinstance(value, float)}

            def keep_best() -> None:
                if who.first and config.select == "best":
                    save_tensors(out / "best.safetensors", model.state_dict())

            def save(state: Checkpoint) -> None:
                if who.first:
                    save_checkpoint(out / "checkpoints", state)

            if start is not None:
                start.prepare(model, made, data, log.say)
            if config.probe == "only":
                state = State(finished=True)
            else:
                hooks = Hooks(log.line, validate if "val" in data.splits else None, save, keep_best, log.warn, stop)
                model.eval()
                seconds = _training_seconds(config, began, data, evaluate, log.say)
                state = fit(model, made, loader, config, hooks, who, device, dtype, checkpoint, seconds)
            if state.unreadable:
                log.warn(f"{state.unreadable} reads of images failed; vitral check names the files")
            if config.select == "best" and (out / "best.safetensors").is_file():
                load_best(model, out / "best.safetensors")
            merge_lora(model)  # what is evaluated and written is the plain model
            if not who.first:
                return Run(out, {}, data, wrote=False)
            if start is not None:
                judged = config.probe == "first" and "val" in data.splits
                if judged and not start.prefers_training(evaluate(data.splits["val"]), log.say):
                    model = _make_model(data, config, made, texts, device)
                    start.restore(model)
                describe |= {"probe": start.result}
            write_seen(out, split)
            run = _finish(out, model, made, data, inputs, config, describe, state, log)
        return write_missing_report(run, report)


def write_missing_report(run: Run, report: Callable[[Run], object] | None) -> Run:
    """Write the report of a run that has none yet, in the process that writes."""
    if report is not None and run.wrote and not (run.path / REPORT).exists():
        report(run)
    return run


def _training_seconds(
    config: TrainConfig, began: float, data: Data, evaluate: Callable[[Tensor], Found], say: Callable[[str], None]
) -> float | None:
    """Seconds of `max_minutes` that are left for training, after what has passed and what the end of the run needs."""
    if config.max_minutes is None:
        return None
    parts = [data.splits[part] for part in HELD_OUT if part in data.splits]
    reserved = reserved_seconds(config, torch.cat(parts), evaluate) if parts else report_seconds(config, 0.0)
    say(f"of {config.max_minutes:g} minutes, {reserved / 60:.2g} are reserved for the evaluation and the report")
    total = 60 * config.max_minutes
    return max(total - reserved - (time.monotonic() - began), LEAST_TRAINING * total)


def load_best(model: torch.nn.Module, path: Path) -> None:
    """Put the weights that were best on the validation split into the model."""
    try:
        model.load_state_dict(read_tensors(path))
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the model; remove it to keep the last weights.") from error


def note_of_few(steps: int) -> list[str]:
    """What to say about a run that ends before it has begun."""
    few = f"only {steps} steps in all: a smaller --batch-size or more --epochs trains longer"
    return [few] if steps < FEW_STEPS else []


def _make_model(data: Data, config: TrainConfig, task: Task, texts: TextInputs | None, device: torch.device) -> Any:
    torch.manual_seed(config.seed)  # the weights of new heads, and of all that reads text
    if texts is not None:
        if config.model != TrainConfig().model:
            raise ConfigError(
                f"{config.model} reads images, and {data.name} has texts: leave --model out; --text.width and the like "
                f"say how large the model is."
            )
        sizes = (len(texts.tokenizer), texts.max_length, config.text.encoder_layers)
        more = {"pad_token": PAD, "num_classes": task.outputs, "pool": task.pool}
        return task.build(TextEncoder(config.text.config(*sizes, **more))).to(device)
    backbone = make_backbone(config, data.in_chans, task.outputs)
    if task.outputs and backbone.labels not in (None, task.labels):
        init_weights(backbone.head)  # as many outputs, but learnt for others
    model = task.build(backbone)
    given = backbone.preprocess if config.crop is None else replace(backbone.preprocess, crop_mode=config.crop)
    model.preprocess = task.preprocess(given)  # type: ignore[assignment]
    return model.to(device)


def make_backbone(config: LoopConfig, in_chans: int, num_classes: int, **fresh: Any) -> Backbone:
    """The model that is asked for, from weights or, with options of its own, fresh."""
    options: dict[str, Any] = {"in_chans": in_chans, "num_classes": num_classes}
    options |= {name: value for name in ("img_size", "patch_size") if (value := getattr(config, name)) is not None}
    if not is_source(config.model):
        if hasattr(model_spec(config.model).config, "drop_path_rate"):  # not every network has branches to drop
            options["drop_path_rate"] = config.drop_path_rate
        return create_model(config.model, seed=config.seed, **options, **fresh)
    model = with_stochastic_depth(load_backbone(config.model, **options), config.drop_path_rate)
    return with_pooling(model, config.pool, config.pool_layers) if isinstance(config, TrainConfig) else model


def drop_patches(model: Any, rate: float, task: str) -> None:
    """Let training leave patches out; what is written of the model does not know of it."""
    if isinstance(model, VisionTransformer):
        model.patch_drop.rate = rate
    elif rate:
        raise ConfigError(
            f"--patch-drop leaves patches of an image out, and to {task} with a {type(model).__name__} takes every "
            f"token; leave it out."
        )


def _model_name(config: TrainConfig, texts: TextInputs | None) -> str:
    return config.model if texts is None else "transformer"


@contextmanager
def open_run(
    out: Path, config: LoopConfig, task: str, data: Data, resume: bool, who: Processes
) -> Iterator[tuple[bool, Checkpoint | None, list[str]]]:
    """Lock the run directory and yield whether it has a run to resume, the checkpoint if any, and what to report.

    Rank 0 holds the lock and decides; if it is refused, all ranks raise.
    """
    with ExitStack() as held:
        refused: VitralError | None = None
        checkpoint, problems = None, []
        if who.first:
            try:
                held.enter_context(locked(out))
                checkpoint, problems = load_newest(out / "checkpoints", Saved) if resume else (None, [])
                if problem := _why_not(out, config, task, data, resume, checkpoint):
                    raise CheckpointError(problem)
                remove_leftovers(out)
            except VitralError as error:
                refused = error
        if who.any(refused is not None):
            raise refused or CheckpointError(f"rank 0 could not open {out}.")
        if not who.any(who.first and (out / CONFIG).exists()):
            yield False, None, [f"no run in {out} yet: starting one"] if resume else []
            return
        if not who.first:
            checkpoint, problems = load_newest(out / "checkpoints", Saved)
        notes = [f"warning: {text} The one before is used." for text in problems]
        here = f"resuming from step {checkpoint.step}" if checkpoint else "no checkpoint yet: starting from step 0"
        yield True, checkpoint, [*notes, here]


def _why_not(out: Path, config: LoopConfig, task: str, data: Data, resume: bool, checkpoint: Checkpoint | None) -> str:
    """Why a run cannot start or resume in this place with these options; empty if it can."""
    if not (out / CONFIG).exists():
        lost = (out / "checkpoints").exists()
        return f"{out} has checkpoints but no {CONFIG}, which resuming needs; give another --out." if lost else ""
    if not resume:
        return f"{out} already holds a run; pass --resume to continue it, or give another --out."
    run = read_run_config(out)
    if run.task != task:
        return f"{out} is a run to {run.task}, not to {task}; omit --task, or give another --out."
    if run.history.data.texts != data.fingerprint():
        return f"the texts of {data.name} have changed since {out} was started; use the same, or another --out."
    saved, trained = run.training(type(config)), trained_options(out, type(config), checkpoint)
    for written in (saved, replace(saved, seed=run.history.seed)):  # the seed is in the file twice
        if edited := different_options(trained, written, MAY_DIFFER | BUDGET):
            named = "; ".join(f"{key}: {before!r} in training, {now!r} in the file" for key, before, now in edited)
            return f"{out / CONFIG} was edited ({named}); undo the edit, or start a run with another --out."
    return other_options(out, saved, config, MAY_DIFFER | BUDGET)


def trained_options(out: Path, kind: type[LoopConfig], checkpoint: Checkpoint | None) -> LoopConfig:
    """Return the options that a checkpoint was made with; those of config.json if it has none, as in old versions."""
    options = checkpoint.values.get("options") if checkpoint else None
    return read_run_config(out).training(kind) if options is None else kind.from_dict(options)


def other_options(out: Path, saved: LoopConfig, config: LoopConfig, may_differ: Set[str]) -> str:
    """Return an error message if the options that something was started with differ from those of now."""
    different = different_options(saved, config, may_differ)
    named = "; ".join(f"{key}: {before!r} in the run, {now!r} now" for key, before, now in different)
    return f"{out} was started with other options ({named}); use the same, or another --out." if different else ""


def different_options(before: LoopConfig, now: LoopConfig, may_differ: Set[str]) -> list[tuple[str, Any, Any]]:
    """Return the options that differ, with both values; those of a group by their full name, such as augment.flip."""
    was, is_ = _flat(before.to_dict()), _flat(now.to_dict())
    return [(key, was.get(key), is_[key]) for key in is_ if key not in may_differ and was.get(key) != is_[key]]


def _flat(options: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flat(value, f"{group}{key}.") if isinstance(value, Mapping) else {f"{group}{key}": value}
    return flat


def metrics_of_finished(out: Path, config: LoopConfig, checkpoint: Checkpoint | None) -> dict[str, Any] | None:
    """Return the metrics of a run that has used up this budget, and None of one that has something left to do."""
    trained = trained_options(out, type(config), checkpoint)
    same = all(getattr(trained, key) == getattr(config, key) for key in BUDGET)
    return read_run_config(out).history.metrics if same and (out / WEIGHTS).is_file() else None


def record_budget(out: Path, config: LoopConfig, checkpoint: Checkpoint | None, steps: int, write: bool) -> None:
    """Write a changed budget of a resumed run to config.json; raise if the run has trained for more than that.

    A run that was finished is then not finished any more; until it is, its files are those of the smaller budget.
    """
    if checkpoint is not None:
        done, seconds = checkpoint.step, checkpoint.values["seconds"]
        before = trained_options(out, type(config), checkpoint).max_minutes
        if done > steps:
            raise ConfigError(
                f"{out} has trained for {done} steps, and the budget is {steps}; give more --epochs or --max-steps."
            )
        if config.max_minutes not in (None, before) and seconds > 60 * config.max_minutes:
            raise ConfigError(
                f"{out} has trained for {seconds / 60:.3g} minutes, and the budget is {config.max_minutes:g}; "
                f"give more --max-minutes."
            )
    run = read_run_config(out)
    saved = run.training(type(config))
    if write and any(getattr(saved, key) != getattr(config, key) for key in BUDGET):
        kept = {key: value for key, value in run.document.items() if key not in (*RESULT, "tokenizers")}
        write_atomically(out / CONFIG, config_document({**kept, "train": config.to_dict()}))


@contextmanager
def signals() -> Iterator[Any]:
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
def find(
    model: Any, task: Task, data: Data, indices: Tensor, inputs: Inputs, batch_size: int, workers: int = 0
) -> Found:
    """What the task keeps of chosen images, and their numbers; unreadable images are left out.

    Of no images it keeps nothing, in the same shapes: a process without a share still takes part in what follows.
    """
    if not len(indices):
        some = find(model, task, data, next(iter(data.splits.values()))[:1], inputs, 1)
        return {name: tensor[:0] for name, tensor in some.items()}
    device = next((p.device for p in getattr(model, "parameters", list)()), torch.device("cpu"))  # an engine has none
    parts: dict[str, list[Tensor]] = {}
    for batch in eval_batches(data, indices, inputs, batch_size, False, workers, task.targets(data)):
        targets = batch.targets.to(device)
        outputs = task.run(model, inputs.normal(batch.inputs.to(device)), targets)
        kept = task.found(outputs, targets) | {"indices": batch.samples}
        for name, tensor in kept.items():
            parts.setdefault(name, []).append(tensor.cpu())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _finish(
    out: Path, model: Any, task: Task, data: Data, inputs: Inputs, config: TrainConfig, describe: dict[str, Any],
    state: State, log: RunLog,
) -> Run:  # fmt: skip
    """Evaluate the finished model on the held-out splits, compare it with baselines, diagnose it, and write the run."""
    save_tensors(out / WEIGHTS, model.state_dict())
    model.eval()
    parts = {
        p: find(model, task, data, data.splits[p], inputs, config.batch_size) for p in HELD_OUT if p in data.splits
    }
    if "val" in parts:
        task.calibrate(parts["val"])
    metrics = {part: task.metrics(found) for part, found in parts.items()}
    baselines = task.baselines(data, parts)
    save_tensors(out / "evaluation.safetensors", {f"{p}.{k}": t for p, v in parts.items() for k, t in v.items()})
    (out / "best.safetensors").unlink(missing_ok=True)
    spent = Spent(steps=state.step, seconds=state.seconds, skipped=state.skipped)
    findings = diagnose(out, task, config, describe["command"], read_metrics(out), spent, metrics, baselines)
    write_atomically(out / "README.md", model_card(describe, task, metrics, baselines).encode())
    (out / REPORT).unlink(missing_ok=True)  # of a run that was extended
    result = {
        "spent": asdict(spent),
        "metrics": metrics,
        "baselines": baselines,
        "diagnosis": list(map(asdict, findings)),
    }
    write_atomically(out / CONFIG, config_document({**describe, **task.settings(), **result}))
    for part, m in metrics.items():
        compared = task.baseline_summary(baselines.get(part, {}))
        log.say("; ".join(filter(None, [f"{part}: {task.summary(m)}, {m['images']:,} {data.what}", compared])))
    for finding in findings:
        log.warn(str(finding))
    return Run(out, metrics, data)


def _description(
    data: Data, config: TrainConfig, task: Task, inputs: Inputs, model: Any, command: str
) -> dict[str, Any]:
    parameters, trained = count_parameters(model)
    return {
        "task": task.name,
        "labels": task.labels,
        "model_name": _model_name(config, inputs if isinstance(inputs, TextInputs) else None),
        "architecture": architecture_of(model),
        "model": model.config.to_dict(),
        "parameters": parameters,
        "trained_parameters": trained,
        "preprocess": model.preprocess.to_dict() if model.preprocess else None,
        **provenance(data, config, task.notes, command),
        **inputs.settings(),
        **task.settings(),
    }


def provenance(data: Data, config: LoopConfig, notes: Sequence[str], command: str) -> dict[str, Any]:
    """Where a model comes from: what is needed to make it again."""
    return {
        "train": config.to_dict(),
        "data": {
            "name": data.name,
            "what": data.what,
            "texts": data.fingerprint(),
            "mode": data.mode,
            "splits": {part: len(indices) for part, indices in data.splits.items()},
            "licence": data.licence,
            "notes": [*data.notes, *notes],
        },
        "weights": origin_of(config.model) if is_source(config.model) else None,
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
