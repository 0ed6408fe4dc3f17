"""Trains what the plan says, keeping what is there, and reads the results from the run directories."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from vitral.comparison.plan import Plan, Trial
from vitral.config import CompareConfig, TrainConfig
from vitral.data.sources.base import Data
from vitral.errors import CheckpointError, ConfigError
from vitral.schema import conform
from vitral.tasks.classify import Classify
from vitral.training.distributed import world_size
from vitral.training.log import read_metrics
from vitral.training.session import MAY_DIFFER, other_options, train_model
from vitral.weights.atomic import remove_orphans, write_atomically
from vitral.weights.files import read_json
from vitral.weights.lock import LOCK, locked
from vitral.weights.rundir import is_run, naming, read_run_config

STARTED = "compare.json"
"""What a comparison was started with."""
SWEPT = {"model", "patch_size", "label_fraction"}
"""Options that differ from run to run."""


@dataclass(frozen=True)
class Result:
    """What came out of one run."""

    label: str
    model: str
    patch_size: int | None
    fraction: float
    seed: int
    images: int
    """Training images that it saw."""
    accuracy: float
    accuracy_95: tuple[float, float]
    """Interval of the accuracy, from the number of images that judged."""
    steps: int
    seconds: float
    macs: int
    """Multiply-adds of its training."""
    curve: list[dict[str, float]]
    """Validation accuracy on the way: step, seconds, macs, accuracy."""
    path: str


class Compared(TypedDict):
    """The data of a comparison."""

    data: str
    splits: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Started:
    """What a comparison was started with, as `compare.json` records it."""

    data: Compared
    train: TrainConfig
    max_macs: float | None


@contextmanager
def open_comparison(out: Path, data: Data, compare: CompareConfig, train: TrainConfig) -> Iterator[None]:
    """Lock the folder of a comparison, and start one there or check that it can be continued with these options."""
    if world_size() > 1:
        raise ConfigError("vitral compare runs in one process; start it without torchrun.")
    with locked(out):
        remove_orphans(out)
        _start_or_check(out, data, compare, train)
        yield


def _start_or_check(out: Path, data: Data, compare: CompareConfig, train: TrainConfig) -> None:
    """Write down what a new comparison is made of; raise if there is one that was made of something else.

    Models, fractions, seeds and patch sizes may be added later: they are further runs, not other ones.
    """
    place = out / STARTED
    now: Compared = {"data": data.name, "splits": {part: len(indices) for part, indices in data.splits.items()}}
    if place.is_file():
        with naming(place):
            before: Started = conform(read_json(place), Started, "")
        if before.data != now:
            raise CheckpointError(f"{out} compares models on {_said(before.data)}, not on {_said(now)}; give another "
                                  f"--out.")  # fmt: skip
        problem = other_options(out, before.train, train, MAY_DIFFER | SWEPT)
        if not problem and before.max_macs != compare.max_macs:
            macs = f"max_macs: {before.max_macs} in the run, {compare.max_macs} now"
            problem = f"{out} was started with other options ({macs}); use the same, or another --out."
        if problem:
            raise CheckpointError(problem)
        return
    if any(file.name != LOCK for file in out.iterdir()):
        raise CheckpointError(f"{out} is not empty and holds no comparison to continue; give another --out.")
    document = {"data": now, "train": train.to_dict(), "max_macs": compare.max_macs}
    write_atomically(place, (json.dumps(document, indent=1) + "\n").encode())


def _said(data: Compared) -> str:
    splits = ", ".join(f"{count:,} {part}" for part, count in data["splits"].items())
    return f"{data['data']} ({splits})"


def run_trials(data: Data, plan: Plan, say: Callable[[str], None], quiet: bool, command: str) -> list[Result]:
    """Train every run that is not finished; an unfinished one goes on where it stopped."""
    results = []
    for number, trial in enumerate(plan.trials, start=1):
        which = f"run {number} of {len(plan.trials)}: {trial.describe()}"
        kept = finished(trial.path)
        if not kept:
            resume = is_run(trial.path)
            say(f"{which}{', goes on' if resume else ''}")
            hidden = quiet or not sys.stderr.isatty()
            train_model(data, trial.train, trial.path, resume=resume, quiet=hidden, command=command)
        results.append(read_result(trial))
        found = results[-1]
        told = f"{100 * found.accuracy:.2f} % after {found.steps:,} steps, {found.seconds:.0f} s"
        say(f"{which} is kept: {told}" if kept else f"  {told}")
    return results


def finished(path: Path) -> bool:
    """Whether a run is there with its metrics."""
    return is_run(path) and read_run_config(path).finished


def judged_on(metrics: dict[str, Any]) -> str:
    """The part that judges: test, or else validation."""
    return "test" if "test" in metrics else "val"


def read_result(trial: Trial) -> Result:
    """What a finished run says of itself."""
    run = read_run_config(trial.path)
    metrics = run.measured(Classify.measures)
    if not metrics:
        raise CheckpointError(f"{trial.path} was judged on nothing; give --test-fraction or --val-fraction.")
    spent, config, each = run.history.spent, trial.train, trial.candidate
    if spent is None or judged_on(metrics) not in metrics:
        raise CheckpointError(f"{trial.path} does not record its steps and metrics; remove it, and compare again.")
    judged = metrics[judged_on(metrics)]
    curve = [
        {"step": line["step"], "seconds": line["seconds"], "macs": trial.macs(line["step"]),
         "accuracy": line["accuracy"]}
        for line in read_metrics(trial.path) if line["split"] == "val" and "accuracy" in line
    ]  # fmt: skip
    if "val" in metrics and (not curve or curve[-1]["step"] < spent.steps):
        curve.append({"step": spent.steps, "seconds": spent.seconds, "macs": trial.macs(spent.steps),
                      "accuracy": metrics["val"]["accuracy"]})  # fmt: skip
    return Result(
        label=each.label, model=each.model, patch_size=each.patch_size, fraction=config.label_fraction,
        seed=config.seed, images=trial.images, accuracy=judged["accuracy"], accuracy_95=tuple(judged["accuracy_95"]),
        steps=spent.steps, seconds=spent.seconds, macs=trial.macs(spent.steps), curve=curve,
        path=str(trial.path),
    )  # fmt: skip
