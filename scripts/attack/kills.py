"""SIGKILL at random moments of training, pretraining and comparisons, and whether a resume repairs everything.

Moments are measured in the processor time of the process, so that they do not depend on what else the machine does.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack.runs import RUNS, write_data
from attack.stage import Stage
from vitral.weights.rundir import CONFIG, WEIGHTS

AT_ONCE = 2
"""Processes that run at the same time."""
MOST = 3
"""Kills of one run, at most."""
POLL = 0.003
"""Seconds between two looks at a process."""
DELAY = 0.02
"""Seconds that a kill comes later, at most: the clock stands still while a process waits for the disk."""
HANGS = 600.0
"""Seconds after which a process is taken to hang."""
METRICS = "metrics.jsonl"
TIMES = ("seconds", "images_per_second")
"""Fields of metrics.jsonl that are times."""
MAY_DIFFER = (".lock", "tensorboard")
"""Names in a run directory that need not be the same: a lock that nobody holds, and event files named by the time."""


@dataclass(frozen=True)
class Whole:
    """A run that was not interrupted."""

    out: Path
    begins: float
    """Seconds of processor time until its directory was there."""
    ends: float
    """Seconds of processor time until it ended."""


class Kills:
    """100 kills, spread over every kind of run."""

    name = "kills"
    size = 100
    failure = (
        "after kills and a resume: an exit code but 0, other weights or metrics than without, other files in the run"
    )

    def run(self, stage: Stage) -> None:
        """Kill run after run, each kind in turn and at least once, until there were enough kills."""
        write_data(stage.work)
        kinds = list(RUNS) if stage.number is None else [_kind(stage.number)]
        with ThreadPoolExecutor(AT_ONCE) as threads:
            whole = dict(zip(kinds, threads.map(lambda kind: _run_whole(stage.work, kind), kinds), strict=True))
            numbers = itertools.count() if stage.number is None else iter(stage.numbers)
            for drive in [threads.submit(_drive, stage, whole, numbers) for _ in range(AT_ONCE)]:
                drive.result()


def _kind(number: int) -> str:
    return list(RUNS)[number % len(RUNS)]


def _drive(stage: Stage, whole: dict[str, Whole], numbers: Iterator[int]) -> None:
    for number in numbers:
        if number >= len(RUNS) and stage.done >= stage.count and stage.number is None:
            return
        _attempt(stage, number, whole[_kind(number)])


def _attempt(stage: Stage, number: int, whole: Whole) -> None:
    """Start a run, kill and resume it a few times, let it end, and compare it with the uninterrupted one."""
    kind, chance, killed = _kind(number), stage.chance(number), []
    (place := stage.work / f"{number}").mkdir()
    out, code = place / "run", None
    for _ in range(chance.randint(1, MOST)):
        moment, delay = chance.uniform(0.9 * whole.begins, whole.ends), chance.uniform(0, DELAY)
        code = _run(stage.work, kind, out, moment, delay)
        if code is not None:  # it ended before
            break
        killed.append(round(moment, 3))
        stage.step()
    if code is None:
        code = _run(stage.work, kind, out)
    problems = [f"exit code {code}"] if code else _differences(whole.out, out)
    if problems:
        facts = {"kind": kind, "killed_after_processor_seconds": killed, "command": RUNS[kind].command(stage.work, out)}
        details = "\n".join([*problems, "", (place / "log.txt").read_text(errors="replace")])
        stage.fail(number, f"{kind}, killed {len(killed)} times: {problems[0]}", details, source=out, facts=facts)


def _run_whole(work: Path, kind: str) -> Whole:
    """Run one that is not killed."""
    (place := work / f"whole-{kind}").mkdir()
    out, begins, spent = place / "run", None, 0.0
    with _started(work, kind, out) as process:
        while process.poll() is None:
            spent = _processor_seconds(process.pid) or spent
            if begins is None and out.exists():
                begins = spent
            time.sleep(POLL)
    if process.returncode or begins is None:
        raise RuntimeError(f"{kind} cannot be run:\n{(place / 'log.txt').read_text(errors='replace')}")
    return Whole(out, begins, spent)


def _run(work: Path, kind: str, out: Path, kill_after: float | None = None, delay: float = 0.0) -> int | None:
    """Start or resume a run; its exit code, or None if it was killed after so much processor time and a delay."""
    began = time.monotonic()
    with _started(work, kind, out) as process:
        while process.poll() is None:
            if kill_after is not None and _processor_seconds(process.pid) >= kill_after:
                time.sleep(delay)
                process.kill()
                return None if process.wait() == -signal.SIGKILL else process.returncode
            if time.monotonic() - began > HANGS:
                process.kill()
            time.sleep(POLL)
    return process.returncode


def _processor_seconds(pid: int) -> float:
    """Processor time that a process has used, 0 if it is gone (Linux only)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _started(work: Path, kind: str, out: Path) -> subprocess.Popen[bytes]:
    words = RUNS[kind].command(work, out, resume=(out / CONFIG).exists())
    with (out.parent / "log.txt").open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "vitral", *words], stdout=log, stderr=log)


def _differences(whole: Path, out: Path) -> list[str]:
    """How a run that was killed differs from one that was not."""
    expected, actual = (
        {str(path.relative_to(run)): path for path in sorted(run.rglob("*")) if not _may_differ(path.relative_to(run))}
        for run in (whole, out)
    )
    problems = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    problems += [f"{name} was left" for name in actual.keys() - expected.keys()]
    for name in expected.keys() & actual.keys():
        a, b = expected[name], actual[name]
        if a.name == WEIGHTS and a.read_bytes() != b.read_bytes():
            problems.append(f"{name} has other weights")
        if a.name == METRICS and _without_times(a) != _without_times(b):
            problems.append(f"{name} has other metrics")
    return sorted(problems)


def _may_differ(path: Path) -> bool:
    return any(part in MAY_DIFFER for part in path.parts)


def _without_times(path: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, path.read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]
