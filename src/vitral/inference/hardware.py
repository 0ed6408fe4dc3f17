"""Processor, cores and memory of this machine, from the standard library only."""

import os
import platform
from pathlib import Path
from typing import Any


def processor() -> str:
    """Name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(": ")[2] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def describe_hardware() -> dict[str, Any]:
    """Processor, cores and bytes of memory."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    total, available = _memory()
    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory": total,
        "memory_available": available,
    }


def _memory() -> tuple[int | None, int | None]:
    """Bytes of memory, and how many of them are available; None if the system does not report it."""
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
        kilobytes = {words[0].rstrip(":"): int(words[1]) for words in lines}
        return 1024 * kilobytes["MemTotal"], 1024 * kilobytes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), None
    except (AttributeError, OSError, ValueError):
        return None, None
