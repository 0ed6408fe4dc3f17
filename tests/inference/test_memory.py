"""What is told to the C library."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vitral.inference import memory


def test_glibc_is_told_the_limits(monkeypatch):
    told = {}

    def mallopt(name, value):
        told[name] = value
        return 1

    monkeypatch.setattr(memory.sys, "platform", "linux")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace(mallopt=mallopt))
    assert memory.keep_freed_memory()
    assert told == {-3: 32 * 2**20, -1: 2**31 - 1, -2: 64 * 2**20, -8: 1}


def test_elsewhere_nothing_is_done(monkeypatch):
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: SimpleNamespace())
    assert not memory.keep_freed_memory()
    assert not memory.give_freed_memory_back()
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: 1 / 0)
    assert not memory.keep_freed_memory()
    assert not memory.give_freed_memory_back()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")
def test_it_may_be_called_again():
    assert memory.keep_freed_memory() == memory.keep_freed_memory()


CHILD = """
import torch
from vitral.inference.memory import give_freed_memory_back, keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

assert keep_freed_memory()
blocks = [torch.ones(2**18) for _ in range(200)]  # 1 MiB each
between = blocks[::20]  # what is still in use keeps the rest from going by itself
full = resident()
del blocks
kept = resident()
assert give_freed_memory_back()
print(full - kept, kept - resident(), sum(int(b.sum()) for b in between))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_what_is_kept_is_given_back_when_asked():
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    freed, given, left = map(int, done.stdout.split())
    assert freed < 20 * 2**20
    assert given > 150 * 2**20
    assert left == 10 * 2**18
