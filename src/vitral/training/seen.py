"""Hashes of a run's training inputs: find them again in other data, and recreate the run's split of the same data."""

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from vitral.config import TrainConfig
from vitral.data.sources.base import Data
from vitral.errors import CheckpointError
from vitral.weights.atomic import save_tensors
from vitral.weights.files import read_tensors
from vitral.weights.rundir import is_run, read_run_config

SEEN = "train_images.safetensors"
"""8 bytes per training input: about 0.5 MB for 60,000 images."""


@dataclass(frozen=True)
class Seen:
    """The training inputs of a run, and the configuration of its split."""

    train: Tensor
    """(n,) int64: hashes of the training inputs, see `Data.hashes`."""
    data: int
    """Hash of all inputs and targets of the data set."""
    config: TrainConfig

    def contains(self, data: Data, indices: Tensor) -> Tensor:
        """(n,) True for each chosen input that the run was trained on."""
        return torch.isin(data.hashes(indices), self.train)

    def split_like_run(self, data: Data) -> Data:
        """The run's own data with the run's split; other data, and data with splits of their own, unchanged."""
        if "train" not in data.splits:
            return data
        config = self.config
        split = data.with_splits(config.val_fraction, config.test_fraction, config.split_seed)
        if set(split.splits) == set(data.splits):
            return data
        hashes = data.hashes()
        same = _hash_of(data, hashes) == self.data and torch.isin(self.train, hashes[split.splits["train"]]).all()
        return split if same else data


def write_seen(run: Path, data: Data) -> None:
    """Record the training split of data that already have all their splits."""
    hashes = data.hashes()
    save_tensors(
        run / SEEN,
        {"train": hashes[data.splits["train"]].unique(), "data": torch.tensor([_hash_of(data, hashes)])},
    )


def read_seen(source: str | Path) -> Seen | None:
    """The record of a run; None for other sources, and for runs without one."""
    run = Path(source)
    if not source or not is_run(run) or not (run / SEEN).is_file():
        return None
    try:
        tensors = read_tensors(run / SEEN)
        train, data = tensors["train"], int(tensors["data"])
        config = read_run_config(run).training(TrainConfig)
    except (CheckpointError, KeyError, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{run / SEEN} cannot be read ({error}); remove it to evaluate without comparing with the training images."
        ) from error
    return Seen(train, data, config)


def _hash_of(data: Data, hashes: Tensor) -> int:
    both = hashes.numpy().tobytes() + data.targets.contiguous().numpy().tobytes()
    return int.from_bytes(blake2b(both, digest_size=8).digest(), "little", signed=True)
