"""What is told to the C library."""

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
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: 1 / 0)
    assert not memory.keep_freed_memory()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is of Linux")
def test_it_may_be_called_again():
    assert memory.keep_freed_memory() == memory.keep_freed_memory()
