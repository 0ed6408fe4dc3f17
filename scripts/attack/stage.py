"""What every campaign has: a name, a size, a stage to work on, and a place for what fails."""

import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any, Protocol

PROGRESS_SECONDS = 10.0
"""How often the progress of a campaign is printed."""


class Campaign(Protocol):
    """A kind of attack."""

    name: str
    size: int
    """Tries at full size."""
    failure: str
    """What counts as a failure."""

    def run(self, stage: "Stage") -> None:
        """Make all tries of the stage and report what failed to it."""
        ...


@dataclass
class Stage:
    """One campaign in progress. Its methods may be called from several threads."""

    campaign: str
    seed: int
    count: int
    """Tries to make."""
    work: Path
    """An empty folder."""
    failures: Path
    """Where failures are saved."""
    number: int | None = None
    """The only try to make, or None for all."""
    done: int = 0
    failed: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._began, self._printed = Lock(), time.monotonic(), 0.0

    @property
    def numbers(self) -> list[int]:
        """The numbers of the tries to make."""
        return list(range(self.count)) if self.number is None else [self.number]

    @property
    def seconds(self) -> float:
        """Time since the campaign began."""
        return time.monotonic() - self._began

    def chance(self, number: object) -> Random:
        """The random numbers of one try, independent of all other tries."""
        return Random(f"{self.seed} {self.campaign} {number}")

    def step(self, tries: int = 1) -> None:
        """Count tries that are done."""
        with self._lock:
            self.done += tries
            if self.seconds - self._printed >= PROGRESS_SECONDS:
                self._printed = self.seconds
                self.report()

    def report(self) -> None:
        """Print a line of progress to stderr."""
        line = f"{self.campaign}: {self.done:,} of {len(self.numbers):,} tries, {len(self.failed)} failures"
        print(f"{line}, {self.seconds:.0f} s", file=sys.stderr, flush=True)

    def fail(
        self, number: int, reason: str, details: str = "", *, source: Path | None = None,
        files: Mapping[str, bytes] | None = None, facts: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Save a failure with all that reproduces it: the try's seed and number, and the bytes that were used."""
        with self._lock:
            folder = self.failures / f"{self.campaign}-{number:05d}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            command = ["python", "scripts/attack", "--only", self.campaign, "--seed", self.seed, "--number", number]
            document = {
                "campaign": self.campaign, "number": number, "seed": self.seed, "reason": reason,
                "reproduce": shlex.join(map(str, command)), **(facts or {}),
            }  # fmt: skip
            (folder / "failure.json").write_text(json.dumps(document, indent=1) + "\n")
            (folder / "details.txt").write_text(f"{reason}\n\n{details}\n", errors="backslashreplace")
            for name, data in (files or {}).items():
                (folder / name).write_bytes(data)
            if source is not None and source.exists():
                shutil.copytree(source, folder / "input", symlinks=True)
            self.failed.append(document)
            print(f"{self.campaign}: try {number} failed: {reason} ({folder})", file=sys.stderr, flush=True)
