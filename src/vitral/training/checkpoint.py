"""Checkpoints from which a run resumes bit for bit; writing one never endangers the one before.

A checkpoint is a folder `step-000000123` of safetensors files and a `state.json`, which is written last and holds the
size and checksum of every file. It is made under another name and renamed when complete. Nothing is ever unpickled.
"""

import json
import math
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from vitral.errors import CheckpointError, ConfigError
from vitral.schema import Count, conform, shortened
from vitral.weights.atomic import remove_orphans, sync_folder, write_atomically, write_tensors
from vitral.weights.files import is_plain_name, read_json, read_tensors

FORMAT_VERSION = 1
MAKING = ".making-"
"""Start of the name of a checkpoint that is not complete yet."""
_INFINITIES = {"inf": math.inf, "-inf": -math.inf}
"""How JSON, which has no infinite numbers, holds them."""
_ENTRIES = {"AdamW": {"step", "exp_avg", "exp_avg_sq"}, "Muon": {"momentum"}}
"""What each optimizer keeps of a parameter; `step` is one number, and the others have the parameter's shape."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to resume: groups of tensors (`model`, `ema`, `optimizer`, ...) and plain values."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    values: dict[str, Any]
    path: Path | None = None
    """The folder that it was read from."""


@dataclass(frozen=True)
class State:
    """What `state.json` of a checkpoint holds."""

    format_version: int
    step: Count
    files: dict[str, tuple[int, int]]
    """Size and CRC-32 of each file."""
    values: dict[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write `folder/step-...`, then remove all but the newest `keep`. On failure the earlier ones stay as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"step-{checkpoint.step:09d}"
    making = folder / f"{MAKING}{target.name}"
    shutil.rmtree(making, ignore_errors=True)
    try:
        making.mkdir()
        files = {}
        for group, tensors in checkpoint.tensors.items():
            path = making / f"{group}.safetensors"
            write_tensors(path, tensors)
            files[path.name] = _fingerprint(path)
        values = {name: str(v) if v in _INFINITIES.values() else v for name, v in checkpoint.values.items()}
        state = {"format_version": FORMAT_VERSION, "step": checkpoint.step, "files": files, "values": values}
        write_atomically(making / "state.json", json.dumps(state, indent=1).encode())
        shutil.rmtree(target, ignore_errors=True)
        making.rename(target)
        sync_folder(folder)
    except (OSError, SafetensorError, CheckpointError) as error:
        shutil.rmtree(making, ignore_errors=True)
        raise CheckpointError(
            f"checkpoint {target} cannot be written ({error}); the earlier ones are untouched. Is the disk full?"
        ) from error
    for old in list_checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint folders, the newest first. Earlier versions wrote step numbers with fewer digits."""
    steps = {path: number for path in folder.glob("step-*") if path.is_dir() and (number := _step(path)) is not None}
    return sorted(steps, key=lambda path: (steps[path], len(path.name)), reverse=True)


def _step(path: Path) -> int | None:
    """The step that the name of a checkpoint gives; None if the folder is no checkpoint."""
    name = re.fullmatch(r"step-([0-9]+)", path.name)
    return int(name[1]) if name else None


def remove_leftovers(run: Path) -> None:
    """Remove the temporary files that killed processes left in a run directory; for the holder of its lock."""
    remove_orphans(run)
    for folder in (run / "checkpoints").glob(f"{MAKING}step-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for file in run.glob(".*.tmp"):
        if re.search(r"\.[0-9]+\.tmp$", file.name) and file.is_file():  # the names that earlier versions gave
            file.unlink(missing_ok=True)


def load_newest(folder: Path, values: Any = dict[str, Any]) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, None if there is none, and what is wrong with those passed over.

    `values` is the type hint that the plain values of a checkpoint must conform to.
    """
    problems = []
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path, values), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def read_checkpoint(path: Path, values: Any = dict[str, Any]) -> Checkpoint:
    """Read one checkpoint, checking its values, and every file against its recorded size and checksum."""
    state_file = path / "state.json"
    try:
        state: State = conform(read_json(state_file), State, "")
        plain = {k: _INFINITIES.get(v, v) if isinstance(v, str) else v for k, v in state.values.items()}
        conform(plain, values, "values")
    except ConfigError as error:
        raise CheckpointError(f"{state_file}: {error} The checkpoint is damaged.") from error
    if state.format_version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {state.format_version}, this vitral reads {FORMAT_VERSION}.")
    tensors = {}
    for name, fingerprint in state.files.items():
        if not is_plain_name(name):
            raise CheckpointError(
                f"{state_file} names the file {shortened(name)}, which is not one of the checkpoint's."
            )
        if not (path / name).is_file() or _fingerprint(path / name) != fingerprint:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written.")
        tensors[Path(name).stem] = read_tensors(path / name)
    return Checkpoint(state.step, tensors, plain, path)


def _fingerprint(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file, read in pieces."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return path.stat().st_size, checksum


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The tensors of the optimisers' states under plain names: optimiser, parameter number, entry."""
    return {
        f"{i}.{number}.{key}": value
        for i, optimizer in enumerate(optimizers)
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def load_optimizer_tensors(optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Give the optimisers their states back; raises a `ValueError` if they are of other parameters."""
    states: list[dict[int, dict[str, Tensor]]] = [{} for _ in optimizers]
    for name, value in tensors.items():
        parts = re.fullmatch(r"(\d{1,9})\.(\d{1,9})\.(\w+)", name)
        if parts is None or int(parts[1]) >= len(optimizers):
            raise ValueError(f"optimizer has the tensor {shortened(name)}, which is of no optimizer of this run")
        states[int(parts[1])].setdefault(int(parts[2]), {})[parts[3]] = value
    for optimizer, state in zip(optimizers, states, strict=True):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, entries in state.items():
            shape = parameters[number].shape if number < len(parameters) else None
            right = all(value.shape == (() if key == "step" else shape) for key, value in entries.items())
            if not right or entries.keys() != _ENTRIES[type(optimizer).__name__]:
                raise ValueError(f"optimizer has a state of parameter {number} that does not fit the model")
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
