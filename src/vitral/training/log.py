"""What a run says while it goes: metrics.jsonl for machines, one line on the terminal for people, TensorBoard."""

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Self, TypedDict

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vitral.errors import VitralError
from vitral.schema import Count, Finite, conform
from vitral.weights.atomic import write_atomically
from vitral.weights.files import parse_json

METRICS = "metrics.jsonl"


class Line(TypedDict):
    """What every line of metrics.jsonl has; the other values of a line are numbers."""

    split: Literal["train", "val"]
    step: Count
    epoch: Finite
    seconds: Finite


class RunLog:
    """Appends to metrics.jsonl, and shows a bar on a terminal. A process that does not write gets no path."""

    def __init__(
        self, path: Path | None, quiet: bool, from_step: int = 0, headlines: Sequence[str] = ("accuracy",)
    ) -> None:
        self.path, self.headlines = path, headlines
        self.console = Console(stderr=True, quiet=quiet or path is None, highlight=False)
        hidden = quiet or path is None or not sys.stderr.isatty()
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), TextColumn("{task.percentage:3.0f} %"))
        self.bar = Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True, disable=hidden)
        self.task = self.bar.add_task("starting", total=1.0)
        self.val = ""
        self.from_step, self.board = from_step, None
        self.written: set[tuple[str, int]] = set()
        """Splits and steps of the lines that were there before."""

    def __enter__(self) -> Self:
        if self.path is not None:
            self.board = _open_board(self.path.parent / "tensorboard", self.from_step)
            if self.path.exists():
                self.written = _cut_after(self.path, self.from_step)
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
        if self.board is not None:
            self.board.close()

    def say(self, text: str) -> None:
        """Tell the user something."""
        self.console.print(text, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Tell the user something that is not as it should be."""
        self.console.print(f"warning: {text}", style="yellow", soft_wrap=True)

    def line(self, values: dict[str, Any]) -> None:
        """Write a line of metrics.jsonl, unless it was there before, and move the bar."""
        if (values["split"], values["step"]) in self.written:
            return
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(values) + "\n")
        if self.board is not None:
            for name in values.keys() - {"split", "step"}:
                self.board.add_scalar(f"{values['split']}/{name}", values[name], values["step"])
        if values["split"] == "val":
            told = [f"{name.replace('_', ' ')} {values[name]:.4g}" for name in self.headlines if name in values]
            self.val = f"  val {'  '.join(told)}" if told else ""
            if self.bar.disable:
                loss = f" loss {values['loss']:.3f}" if "loss" in values else ""
                self.say(f"epoch {values['epoch']:g}: {(loss + self.val).strip()}, {values['seconds']:.0f} s")
        else:
            text = f"epoch {values['epoch']:.1f}  loss {values['loss']:.3f}"
            speed = f"  {values['images_per_second']:,.0f} img/s"
            self.bar.update(self.task, completed=values["progress"], description=text + self.val + speed)


def _open_board(folder: Path, from_step: int) -> Any:
    """A writer of TensorBoard's event files where TensorBoard is installed, else None."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard.writer import SummaryWriter

    return SummaryWriter(str(folder), purge_step=from_step + 1 if from_step else None)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl in a run directory; damaged ones, such as one that a crash cut short, are skipped."""
    path = run / METRICS
    if not path.is_file():
        return []
    with path.open("rb") as file:
        return [values for line in file if (values := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """A line of metrics.jsonl, None if it is damaged."""
    try:
        values = parse_json(line, METRICS)
        rest = values.keys() - Line.__annotations__.keys()
        return conform(values, Line, "") | conform({name: values[name] for name in rest}, dict[str, float], "")
    except VitralError:
        return None


def _cut_after(path: Path, step: int) -> set[tuple[str, int]]:
    """Remove the lines of steps after `step`, from which a run is resumed; return the splits and steps of the others.

    A damaged line is removed too, and of two lines for one split and step the second.
    """
    kept: dict[tuple[str, int], bytes] = {}
    with path.open("rb") as file:
        for line in file:
            values = _parse_line(line)
            if values is not None and values["step"] <= step:
                kept.setdefault((values["split"], values["step"]), line.rstrip(b"\r\n") + b"\n")
    write_atomically(path, b"".join(kept.values()))
    return set(kept)
