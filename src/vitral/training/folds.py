"""Cross-validation: every image is in the test split of exactly one of several runs, which together are an ensemble."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from vitral.data.sources.base import Data, fold_numbers
from vitral.errors import CheckpointError, ConfigError
from vitral.schema import conform
from vitral.weights.atomic import write_atomically
from vitral.weights.files import read_json
from vitral.weights.rundir import is_run, naming

FOLDS = "folds.json"


class Document(TypedDict):
    """folds.json."""

    folds: list[str]
    """Names of the run directories, next to this file."""
    metrics: dict[str, Any]
    """Mean and standard deviation over the folds."""


def split_folds(data: Data, folds: int, seed: int) -> list[Data]:
    """The training and validation images as folds: each is the test split of one data set and in training elsewhere.

    A test split that the data have is in none of them: it is left to evaluate the ensemble.
    """
    if folds < 2:
        raise ConfigError(f"folds must be at least 2, got {folds}.")
    images = torch.cat([data.splits[part] for part in ("train", "val") if part in data.splits]).sort().values
    if len(images) < 2 * folds:
        raise ConfigError(f"{folds} folds need at least {2 * folds} {data.what}, got {len(images)}; set --folds lower.")
    number = fold_numbers(data.targets[images], folds, seed)
    return [replace(data, splits={"train": images[number != k], "test": images[number == k]}) for k in range(folds)]


def fold_name(k: int) -> str:
    """The run directory of a fold."""
    return f"fold-{k + 1}"


def write_folds(out: Path, names: Sequence[str], metrics: dict[str, Any]) -> None:
    """Record which runs are the ensemble."""
    document = Document(folds=list(names), metrics=metrics)
    write_atomically(out / FOLDS, (json.dumps(document, indent=2) + "\n").encode())


def is_ensemble(path: Path) -> bool:
    """Whether a directory has the runs of several folds."""
    return (path / FOLDS).is_file()


def read_folds(out: Path) -> list[Path]:
    """The run directories of an ensemble."""
    with naming(out / FOLDS):
        document: Document = conform(read_json(out / FOLDS), Document, "")
    for name in document["folds"]:
        if name in ("", ".", "..") or Path(name).name != name or not is_run(out / name):
            raise CheckpointError(f"{out / FOLDS} names {name!r}, which is no run directory next to it.")
    if not document["folds"]:
        raise CheckpointError(f"{out / FOLDS} names no run directories.")
    return [out / name for name in document["folds"]]
