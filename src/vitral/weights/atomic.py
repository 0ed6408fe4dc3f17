"""Atomic writes: after a crash there is the old file or the new one, never half of one."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from vitral.errors import CheckpointError
from vitral.weights.lock import BusyError, locked

SUFFIX = ".vitral.tmp"
"""End of the names of workspaces."""


@contextmanager
def workspace(path: Path) -> Iterator[Path]:
    """An empty folder next to `path`, on the same disk, in which to make what is then moved there.

    It is locked while this process uses it and removed at the end. If the process is killed, the next one that
    makes a workspace in the same place removes it.
    """
    remove_orphans(path.parent)
    with ExitStack() as held:
        files = _claim(path, held) / "files"
        files.mkdir()
        yield files


def _claim(path: Path, held: ExitStack) -> Path:
    """Create a workspace and lock it."""
    while True:
        place = Path(tempfile.mkdtemp(prefix=f".{path.name[:32]}.", suffix=SUFFIX, dir=path.parent))
        held.callback(shutil.rmtree, place, ignore_errors=True)
        try:
            held.enter_context(locked(place))
        except BusyError:  # another process took it for an orphan before it was locked
            continue
        except CheckpointError:  # a disk without locks: no process can take it for an orphan
            pass
        return place


def remove_orphans(folder: Path) -> None:
    """Remove the workspaces of processes that were killed; those of a living process are locked, and stay."""
    for place in folder.glob(f".*{SUFFIX}"):
        with suppress(CheckpointError), locked(place):
            shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            place.rmdir()  # Windows keeps the folder of a file that is open, here its lock


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; the file replaces `path` at the end, in one step."""
    try:
        with workspace(path) as folder:
            temporary = folder / path.name
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    except (OSError, SafetensorError) as error:
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
    """Wait until the names in a folder are on the disk; Windows offers no such call."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
