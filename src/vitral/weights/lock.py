"""Locks on folders: held by one process, and released by the operating system when it ends, even by SIGKILL.

On a file system without such locks, `filelock` warns and writes a lock file that names the process instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from vitral.errors import CheckpointError

LOCK = ".lock"


class BusyError(CheckpointError):
    """A folder that another process writes to."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if needed.

    Raises:
        BusyError: if another process, or another part of this one, holds the lock.
        CheckpointError: if the folder cannot be created or locked.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise BusyError(f"another process is writing to {folder}; wait until it ends, or give another --out.") from None
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{folder} cannot be locked for writing ({why}); give an --out that is a folder on a writable disk with "
            f"file locks."
        ) from error
    try:
        yield
    finally:
        lock.release()
