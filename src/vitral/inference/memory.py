"""Keep the memory that a forward pass frees, so that the next need not ask the system for it again; or give it back."""

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # glibc's names in malloc.h
_MIB = 2**20
LARGEST = 32 * _MIB
"""Blocks up to this size come from memory that is kept; glibc takes no larger number."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for the next pass; elsewhere nothing is done. Return whether it was told.

    Each large tensor otherwise is fresh memory that the system clears page by page. Calling it again changes nothing.
    """
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    settings = (
        (_MMAP_THRESHOLD, LARGEST),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 * _MIB),
        (_ARENA_MAX, 1),  # what one thread keeps, another may use
    )
    return all(mallopt(name, value) == 1 for name, value in settings)


def give_freed_memory_back() -> bool:
    """Give all that is kept and not in use to the system; whoever needs it next asks again. Return whether any was."""
    malloc_trim = _of_glibc("malloc_trim")
    return malloc_trim is not None and malloc_trim(0) == 1


class FreedMemory:
    """Gives freed memory back when a process grows: a few large blocks would otherwise be kept for good.

    A server calls `check` a few times a second. A process that is still larger at the next checks, because the block is
    in use or because its work needs more than before, tries again; after `TRIES` in a row the larger size is accepted.
    """

    SECONDS = 60.0
    """Memory is given back at least this often: blocks in use between freed ones would prevent their reuse."""
    GROWTH = 0.01
    """The share by which the process may exceed its usual size before."""
    TRIES = 4

    def __init__(self) -> None:
        self._usual, self._tries = resident(), 0
        self._given = time.monotonic()

    def check(self) -> bool:
        """Give memory back if the process has grown or the last time was long ago; return whether it was done."""
        now, size = time.monotonic(), resident()
        overdue = now - self._given >= self.SECONDS
        if size <= (1 + self.GROWTH) * self._usual:
            self._tries = 0
            if not overdue:
                return False
        elif self._tries == self.TRIES:
            self._usual, self._tries = size, 0
            return False
        else:
            self._tries += 1
        give_freed_memory_back()
        self._given = now
        if overdue:
            self._usual = resident()
        return True


def resident() -> int:
    """The size of this process in main memory, in bytes; 0 on systems that do not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def _of_glibc(name: str) -> Any:
    """A function of the C library, None on other systems, and where the library is another."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
