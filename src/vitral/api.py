"""The public functions: what one calls from Python, and what every verb of the command line calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitral.config import ProbeKind, Probing, TrainConfig, Writing
from vitral.data.sources.base import Data
from vitral.data.sources.open import open_data
from vitral.inference.evaluate import evaluate_run, probe_source
from vitral.models.vit import VisionTransformer
from vitral.recipes import list_recipes, read_recipe
from vitral.reporting.html import write_report
from vitral.tasks.open import infer_task
from vitral.training.session import Run, train_model
from vitral.weights.rundir import is_run, read_run_config


def resolve_config(data: Data, given: Mapping[str, Any], task: str | None = None) -> TrainConfig:
    """Defaults, under the recipe of the data, if they have one for the task or for all, under the options given.

    Groups of options, such as `augment`, are put over the recipe's one by one.
    """
    names = [f"{data.recipe}-{task or infer_task(data)}", data.recipe] if data.recipe else []
    recipe = next((read_recipe(name) for name in names if name in list_recipes()), {})
    groups = {
        key: recipe[key] | dict(given[key])
        for key in recipe
        if isinstance(recipe[key], dict) and isinstance(given.get(key), Mapping)
    }
    return TrainConfig.from_dict(recipe | dict(given) | groups)


def train(
    data: str | Path | Data,
    *,
    out: str | Path,
    task: str | None = None,
    resume: bool = False,
    quiet: bool = False,
    command: str = "",
    **options: Any,
) -> Run:
    """Train a model and write its run directory `out`; `options` are fields of `vitral.config.TrainConfig`.

    `vitral.train("digits", out="runs/digits", epochs=20)`. `data` is a name or path, or what `open_data` gave; `task`
    is one of `vitral.config.TaskName`, by default what the data are for.
    """
    if task is None and resume and is_run(Path(out)):
        task = read_run_config(Path(out)).document["task"]
    opened = data if isinstance(data, Data) else open_data(data, task=task)
    config = resolve_config(opened, options, task)
    return train_and_report(opened, config, Path(out), task=task, resume=resume, quiet=quiet, command=command)


def train_and_report(
    data: Data, config: TrainConfig, out: Path, *, task: str | None, resume: bool, quiet: bool, command: str
) -> Run:
    """Training, then the report."""
    run = train_model(data, config, out, task=task, resume=resume, quiet=quiet, command=command)
    if run.wrote:
        write_report(out, run.data)
    return run


def evaluate(
    source: str | Path, data: str | Path | Data, *, split: str | None = None, writing: Writing | None = None
) -> dict[str, Any]:
    """Metrics of a trained model on a split of labelled data: the test part, or else validation, or everything.

    `writing` is how a model that writes text does it: greedily if it is not given.
    """
    task = read_run_config(Path(source)).document["task"] if is_run(Path(source)) else None
    return evaluate_run(source, data if isinstance(data, Data) else open_data(data, task=task), split, writing)


def probe(
    source: str | Path | VisionTransformer,
    data: str | Path | Data,
    kind: ProbeKind = "knn",
    *,
    split: str | None = None,
    seed: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """What frozen features know of the classes: by their nearest neighbours ("knn") or a linear layer ("linear").

    `vitral.probe("runs/digits", "digits")`. `source` is a ViT, a run, a file of weights, hf-hub:owner/name, a named
    model with fresh weights from `seed`, or "pixels", the images themselves; `options` are fields of
    `vitral.config.Probing`.
    """
    opened = data if isinstance(data, Data) else open_data(data, task="classify")
    return probe_source(source, opened, kind, Probing.from_dict(options), split, seed)
