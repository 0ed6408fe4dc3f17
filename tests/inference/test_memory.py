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


@pytest.fixture
def process(monkeypatch):
    """A process whose size and clock are given, and how often memory was given back."""
    state = SimpleNamespace(size=100_000, now=0.0, given=0)
    monkeypatch.setattr(memory, "resident", lambda: state.size)
    monkeypatch.setattr(memory.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(memory, "give_freed_memory_back", lambda: setattr(state, "given", state.given + 1))
    return state


def sizes(process, freed, *values):
    """Whether memory is given back at each of these sizes."""
    done = []
    for process.size in values:
        done.append(freed.check())
    return done


def test_memory_is_given_back_when_the_process_grows(process):
    freed = memory.FreedMemory()
    assert sizes(process, freed, 100_000, 101_000, 99_000, 101_000) == [False] * 4
    assert sizes(process, freed, 101_001, 150_000, 100_000) == [True, True, False]
    assert process.given == 2


def test_a_larger_size_is_accepted_after_some_tries_in_a_row(process):
    freed = memory.FreedMemory()
    assert sizes(process, freed, *[150_000] * 3, 100_000) == [*[True] * 3, False]
    assert sizes(process, freed, *[150_000] * 4, 150_000, 151_500) == [*[True] * 4, False, False]
    assert sizes(process, freed, 151_501) == [True]


def test_a_process_that_stays_the_same_gives_back_once_a_minute(process):
    freed = memory.FreedMemory()
    given = []
    for process.now in range(0, 200, 10):
        if freed.check():
            given.append(process.now)
    assert given == [60, 120, 180]


def test_a_system_that_does_not_report_sizes_gives_back_once_a_minute(process, monkeypatch):
    freed = memory.FreedMemory()
    assert sizes(process, freed, 0, 0) == [False, False]
    process.now = 60.0
    assert freed.check()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports it this way")
def test_the_size_of_this_process_is_read():
    before = memory.resident()
    block = bytearray(b"x" * (64 * 2**20))
    assert memory.resident() - before > 48 * 2**20
    del block
