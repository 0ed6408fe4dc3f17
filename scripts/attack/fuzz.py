"""Tries that are independent of each other, run in child processes under a watchdog and a memory limit.

A child reports after every try. One that dies or does not answer in time is a failure of the try it was working on;
another child continues with the next. `Random(seed, campaign, number)` decides everything about a try.
"""

import faulthandler
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

from attack.stage import Stage
from vitral.errors import VitralError

START_SECONDS = 300.0
"""How long a child may take to start and to open what it needs."""
CHILDREN = 2
INPUT, LOG = "input", "log.txt"
"""What a child has in its folder: the damaged files of a try, and all that was printed."""
LAST = 4000
"""Characters of a child's output that are saved with a failure."""


class Fuzz(ABC):
    """A campaign of damaged files. Everything but `run` is called in a child process."""

    name: str
    size: int
    failure: str
    seconds: float
    """Longest time of a try."""
    memory: int
    """Address space, in bytes, that tries may take beyond what the child had before the first."""

    @abstractmethod
    def prepare(self, folder: Path) -> None:
        """Write what all children use into `folder`, once."""

    @abstractmethod
    def begin(self, folder: Path) -> None:
        """Open what was prepared, once in every child."""

    @abstractmethod
    def damage(self, place: Path, number: int, chance: Random) -> None:
        """Write the damaged files of a try into `place`, an empty folder."""

    @abstractmethod
    def attack(self, place: Path, number: int) -> None:
        """Read the damaged files; whatever is raised is a failure."""

    def run(self, stage: Stage) -> None:
        """Share the tries between the children."""
        shared, log = stage.work / "shared", stage.work / "prepare.txt"
        shared.mkdir()
        _join(_start(_prepare, self, shared, log), log)
        numbers = iter(stage.numbers)  # whichever child is free takes the next
        with ThreadPoolExecutor(CHILDREN) as threads:
            drives = [
                threads.submit(_drive, self, stage, numbers, shared, stage.work / str(i)) for i in range(CHILDREN)
            ]
            for drive in drives:
                drive.result()


@contextmanager
def refusals(kind: type[VitralError] = VitralError) -> Iterator[None]:
    """Accept an error of this kind, in one line, unless a lack of memory is behind it."""
    try:
        yield
    except kind as error:
        if "\n" in str(error).strip():
            raise AssertionError(f"the message of the refusal has several lines: {error}") from error
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, MemoryError) or "allocate" in str(cause):
                raise AssertionError(f"refused only because there was not enough memory: {error}") from error
            cause = cause.__cause__ or cause.__context__


# ---- the parent ----


def _start(target: Any, *args: Any) -> Any:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _join(process: Any, log: Path) -> None:
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the campaign could not be prepared:\n{_tail(log)}")


def _drive(campaign: Fuzz, stage: Stage, numbers: Iterator[int], shared: Path, own: Path) -> None:
    """Make tries in one child after another, each used until it dies."""
    own.mkdir()
    number = next(numbers, None)
    while number is not None:
        pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        process = _start(_work, campaign, stage.seed, shared, own, theirs)
        theirs.close()
        try:
            if not pipe.poll(START_SECONDS) or _received(pipe) is None:
                raise RuntimeError(f"a child of {campaign.name} did not start:\n{_tail(own / LOG)}")
            alive = True
            while alive and number is not None:
                alive = _try(campaign, stage, number, own, pipe, process)
                number = next(numbers, None)
        finally:
            process.kill()
            process.join()
            pipe.close()


def _try(campaign: Fuzz, stage: Stage, number: int, own: Path, pipe: Connection, process: Any) -> bool:
    """One try; whether the child can be used for another."""
    pipe.send(number)
    if not pipe.poll(campaign.seconds):
        process.kill()
        reason, details = f"no answer after {campaign.seconds:g} s", _tail(own / LOG)
    elif (result := _received(pipe)) is None:
        process.join()
        reason, details = f"the process died (exit code {process.exitcode})", _tail(own / LOG)
    else:
        reason, details = result
    if reason:
        stage.fail(number, reason, details, source=own / INPUT)
    stage.step()
    return process.is_alive()


def _received(pipe: Connection) -> tuple[str, str] | None:
    """What a child reports; None if it has died."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        return None


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-LAST:] if log.exists() else ""


# ---- the child ----


def _prepare(campaign: Fuzz, folder: Path, log: Path) -> None:
    _redirect_output(log)
    campaign.prepare(folder)


def _work(campaign: Fuzz, seed: int, shared: Path, own: Path, pipe: Connection) -> None:
    """Make the tries whose numbers come through the pipe; report on each why it failed, or nothing."""
    place, current = own / INPUT, own / "current"
    _redirect_output(own / LOG)
    tempfile.tempdir = str(own)  # reports of internal errors are removed with it
    _go_to(current)
    campaign.begin(shared)
    _limit_memory(campaign.memory)
    pipe.send(("", ""))
    while True:
        number = pipe.recv()
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        try:
            campaign.damage(place, number, Random(f"{seed} {campaign.name} {number}"))
            campaign.attack(place, number)
            written = sorted(os.listdir(current))
            assert not written, f"files were written into the current directory: {', '.join(written)}"
            report = ("", "")
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            report = (f"{type(error).__name__}: {first[:200]}", traceback.format_exc())
            _go_to(current)
        pipe.send(report)


def _go_to(folder: Path) -> None:
    """Make an empty folder the current one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.chdir(folder)


def _redirect_output(log: Path) -> None:
    """Send everything that this process prints, native libraries included, to a file."""
    file = log.open("w")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    faulthandler.enable()


def _limit_memory(growth: int) -> None:
    """Let this process take so many bytes more than it has now (Linux only)."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + growth
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
