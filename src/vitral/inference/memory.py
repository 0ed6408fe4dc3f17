"""Keep the memory that a forward pass frees, so that the next need not ask the system for it again; or give it back."""

import ctypes
import sys
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


def _of_glibc(name: str) -> Any:
    """A function of the C library, None on other systems, and where the library is another."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform.startswith("linux") else None
