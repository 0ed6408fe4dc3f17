"""What every verb prints alike: JSON documents, tables, and numbers that people can read."""

import json
import shlex
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from vitral.config import Options
from vitral.errors import ConfigError


def command_line() -> str:
    """What was typed, nothing if this is not the command line."""
    return f"vitral {shlex.join(sys.argv[1:])}" if Path(sys.argv[0]).name in ("vitral", "__main__.py") else ""


def given_options(config: str, parsed: Options, flags: Set[str]) -> dict[str, Any]:
    """Return the options of the file `config`, if one is named, under those of `parsed` that flags have set."""
    from vitral.recipes import layered, read_config_file

    file = read_config_file(Path(config)) if config else {}
    return layered(file, {name: value for name, value in vars(parsed).items() if name in flags})


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(document, indent=2))


def check_page(flag: str, path: str) -> None:
    """Raise unless a page is to be written to what a browser opens, or none is."""
    if path and Path(path).suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"{flag} writes a page, so its name ends in .html, got {path}.")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Print a table; every column but the first is right-aligned. A narrow terminal wraps it: nothing is cut off."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=200, highlight=False, color_system="auto" if sys.stdout.isatty() else None)
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    with console.capture() as text:
        console.print(table)
    lines = [line.rstrip() for line in text.get().splitlines()]
    print("\n".join(lines + note.splitlines() + [""] * bool(note)))


def human(number: float, unit: str = "") -> str:
    """Write a number with three digits and a prefix: 86.6 M, 1.25 G."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or prefix == "T":
            break
        number /= 1000
    digits = f"{number:.3g}" if abs(number) < 100 else f"{number:.0f}"
    return f"{digits} {prefix}{unit}".rstrip()
