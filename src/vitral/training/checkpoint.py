"""Checkpoints from which a run resumes bit for bit; writing one never endangers the one before.

A checkpoint is a folder `step-000000123` of safetensors files and a `state.json`, which is written last and holds the
size and checksum of every file. It is made under another name and renamed when complete. Nothing is ever unpickled.
"""

import json
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitral.errors import CheckpointError
from vitral.weights.atomic import remove_orphans, sync_folder, write_atomically, write_tensors

FORMAT_VERSION = 1
MAKING = ".making-"
"""Start of the name of a checkpoint that is not complete yet."""


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to resume: groups of tensors (`model`, `ema`, `optimizer`, ...) and plain values."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
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
        state = {"format_version": FORMAT_VERSION, "step": checkpoint.step, "files": files, "values": checkpoint.values}
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


def load_newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest checkpoint that is whole, None if there is none, and what is wrong with those passed over."""
    problems = []
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path), problems
        except CheckpointError as error:
            problems.append(str(error))
    return None, problems


def read_checkpoint(path: Path) -> Checkpoint:
    """Read one checkpoint, checking every file against its recorded size and checksum."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        version = state["format_version"]
        files, step, values = state["files"], int(state["step"]), state["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not whole: state.json is missing or broken ({error}).") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {version}, this vitral reads {FORMAT_VERSION}.")
    tensors = {}
    for name, fingerprint in files.items():
        file = path / Path(name).name
        if not file.exists() or _fingerprint(file) != fingerprint:
            raise CheckpointError(f"{path} is damaged: {name} is not what was written.")
        tensors[Path(name).stem] = load_file(file)
    return Checkpoint(step, tensors, values)


def _fingerprint(path: Path) -> list[int]:
    """Size and CRC-32 of a file, read in pieces."""
    checksum = 0
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return [path.stat().st_size, checksum]


def optimizer_tensors(optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """The tensors of the optimisers' states under plain names: optimiser, parameter number, entry."""
    return {
        f"{i}.{number}.{key}": value
        for i, optimizer in enumerate(optimizers)
        for number, entries in optimizer.state_dict()["state"].items()
        for key, value in entries.items()
    }


def load_optimizer_tensors(optimizers: list[torch.optim.Optimizer], tensors: dict[str, Tensor]) -> None:
    """Give the optimisers their states back."""
    for i, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            which, number, key = name.split(".", 2)
            if int(which) == i:
                state.setdefault(int(number), {})[key] = value
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
