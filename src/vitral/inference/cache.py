"""What is kept between processes, in the user's cache folder: where it lies, and what tells one model from another."""

import hashlib
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from vitral.errors import VitralError
from vitral.weights.fetch import cache_folder

CACHE_BYTES = 2**32
"""What models of one kind, exported or compiled, may hold; beyond it, those not used for longest are removed."""


def private_folder(what: str) -> Path:
    """Such a place, for things that are run as code: made now if need be, and refused if others may write to it."""
    folder = cache_folder(what)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        raise VitralError(
            f"{folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to another place."
        ) from error
    mine = not hasattr(os, "getuid") or about.st_uid == os.getuid()
    if not mine or not stat.S_ISDIR(about.st_mode) or about.st_mode & 0o022:
        raise VitralError(f"{folder} can be written by others, and what lies in it is run; remove it.")
    return folder


def key_of(about: object) -> str:
    """A short name for whatever plain values tell one thing in the cache from another."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]


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
    for about, each in sorted(found, key=lambda pair: pair[0].st_mtime_ns, reverse=True):
        total += about.st_size
        if total > limit and each.name.split(".")[0] != always.name.split(".")[0]:  # weights may lie beside it
            each.unlink(missing_ok=True)
