"""Files that are there whole or not at all, whatever happens while they are written."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitral.errors import CheckpointError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to: after a crash there is either the old file or the new one, whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path} cannot be written ({why}); what was there before is untouched.") from error
    sync_folder(path.parent)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file."""
    with replacing(path) as temporary:
        write_tensors(temporary, tensors)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file and wait until it is on the disk."""
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)
    path.chmod(0o644)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
