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
        self.board = _open_board(path.parent / "tensorboard", from_step) if path is not None else None
        if path is not None and path.exists():
            _cut_after(path, from_step)

    def __enter__(self) -> Self:
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
        """Write a line of metrics.jsonl and move the bar."""
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


def _cut_after(path: Path, step: int) -> None:
    """Drop the lines of steps after the checkpoint that a run resumes from, for they will be written again."""
    with path.open("rb") as file:
        parsed = ((line, _parse_line(line)) for line in file)
        kept = [line for line, values in parsed if values is not None and values["step"] <= step]
    path.write_bytes(b"".join(line.rstrip(b"\r\n") + b"\n" for line in kept))
