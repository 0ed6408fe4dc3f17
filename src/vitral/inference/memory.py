"""Keep the memory that a forward pass frees, so that the next one need not ask the system for it again."""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # glibc's names in malloc.h
_MIB = 2**20
LARGEST = 32 * _MIB
"""Blocks up to this size come from memory that is kept; glibc takes no larger number."""


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed for the next pass; elsewhere nothing is done. Return whether it was told.

    Each large tensor otherwise is fresh memory that the system clears page by page. Calling it again changes nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return False
    settings = (
        (_MMAP_THRESHOLD, LARGEST),
        (_TRIM_THRESHOLD, 2**31 - 1),
        (_TOP_PAD, 64 * _MIB),
        (_ARENA_MAX, 1),  # what one thread keeps, another may use
    )
    return all(mallopt(name, value) == 1 for name, value in settings)
