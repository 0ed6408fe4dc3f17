"""What is kept between processes, in the user's cache folder: where it lies, and what tells one model from another."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn


def cache_folder(what: str) -> Path:
    """Where things of one kind are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "vitral" / what


def digest(tensors: Iterable[Tensor]) -> str:
    """A number of the shapes and contents of tensors."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return sha.hexdigest()


def digest_config(model: nn.Module) -> str:
    """A number of what a model is, whatever its weights."""
    about = [type(model).__name__, model.extra_repr(), model.config.to_dict(), list(model.state_dict())]  # type: ignore[operator, union-attr]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def digest_weights(model: nn.Module) -> str:
    """A number of what a model is, its weights included."""
    return f"{digest_config(model)} {digest(model.state_dict().values())}"


def keep_newest(files: Iterable[Path], limit: int, always: Path) -> None:
    """Remove the files that were not used for longest beyond so many bytes; one is always kept."""
    found = [(file.stat(), file) for file in files if file.exists()]
    total = 0
    for stat, each in sorted(found, key=lambda pair: pair[0].st_mtime_ns, reverse=True):
        total += stat.st_size
        if total > limit and each.name.split(".")[0] != always.name.split(".")[0]:  # weights may lie beside it
            each.unlink(missing_ok=True)
