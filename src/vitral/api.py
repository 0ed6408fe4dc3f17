"""The public functions: what one calls from Python, and what every verb of the command line calls."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitral.config import TrainConfig
from vitral.data.sources.base import Data
from vitral.data.sources.open import open_data
from vitral.errors import ConfigError
from vitral.inference.evaluate import evaluate_run
from vitral.recipes import read_recipe
from vitral.reporting.html import write_report
from vitral.training.session import Run, train_model


def resolve_config(data: Data, given: Mapping[str, Any]) -> TrainConfig:
    """Defaults, under the recipe of the data if it has one, under the options given."""
    recipe = read_recipe(data.recipe) if data.recipe else {}
    merged = recipe | dict(given)
    if "augment" in recipe and isinstance(given.get("augment"), Mapping):
        merged["augment"] = recipe["augment"] | dict(given["augment"])
    return TrainConfig.from_dict(merged)


def train(
    data: str | Path | Data,
    *,
    out: str | Path,
    task: str = "classify",
    resume: bool = False,
    quiet: bool = False,
    command: str = "",
    **options: Any,
) -> Run:
    """Train a model and write its run directory `out`; `options` are fields of `vitral.config.TrainConfig`.

    `vitral.train("digits", out="runs/digits", epochs=20)`. `data` is a name or path, or what `open_data` gave.
    """
    if task != "classify":
        raise ConfigError(f"task must be classify, got {task!r}.")
    opened = data if isinstance(data, Data) else open_data(data)
    config = resolve_config(opened, options)
    return train_and_report(opened, config, Path(out), resume=resume, quiet=quiet, command=command)


def train_and_report(data: Data, config: TrainConfig, out: Path, *, resume: bool, quiet: bool, command: str) -> Run:
    """Training, then the report."""
    run = train_model(data, config, out, resume=resume, quiet=quiet, command=command)
    if run.wrote:
        write_report(out, data)
    return run


def evaluate(source: str | Path, data: str | Path | Data, *, split: str | None = None) -> dict[str, Any]:
    """Metrics of a trained model on a split of labelled data: the test part, or else validation, or everything."""
    return evaluate_run(source, data if isinstance(data, Data) else open_data(data), split)
