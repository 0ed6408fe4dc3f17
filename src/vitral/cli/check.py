"""`vitral check`: find the problems of a data set before training on it."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from vitral.cli.output import print_json, print_table


@dataclass(frozen=True)
class Options:
    """Read every image of a data set and list all problems in one pass.

    With --strict the exit code is 1 if there is a problem, for use in CI.

    Examples:
      vitral check photos/
      vitral check labels.csv --json
      vitral check photos/ --strict
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """Data as for vitral train: a name, a folder (class folders, COCO, Ultralytics, masks), a CSV or Parquet file."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table; several, separated by commas, for numbers or 0 and 1."""
    task: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Type of a table's labels: classify, multilabel or regress; inferred from the cells by default."""
    text_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of texts to read in a table."""
    strict: bool = False
    """Exit with code 1 if there is a problem."""
    json: bool = False
    """Print JSON instead of tables."""


TITLES = {
    "unreadable": "cannot be read",
    "duplicates": "are identical",
    "leaks_between_splits": "are in more than one split",
    "same_image_other_label": "are the same image under different labels",
    "classes_alike_but_for_case": "classes that differ only in spelling",
    "rare_classes": "classes with few images",
    "extreme_sizes": "is tiny or very long",
}


def run(options: Options) -> int:
    """Print the report and return the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    from vitral.data.check import check_data
    from vitral.data.sources.open import open_data

    data = open_data(options.data, options.image_column, options.label_column, options.task, options.text_column)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=len(data.inputs))
        report = check_data(data, lambda done, total: bar.update(task, completed=done))
    failed = options.strict and bool(report["problems"])
    if options.json:
        print_json(report)
        return int(failed)
    print(data.describe())
    for note in data.notes:
        print(note)
    if report["sizes"]:
        named = ", ".join(f"{name} {width} x {height}" for name, (height, width) in report["sizes"].items())
        print(f"image width x height in pixels: {named}")
    if report["classes"]:
        print_table("classes", ["class", "images"], [[name, f"{count:,}"] for name, count in report["classes"].items()])
    if report["numbers"]:
        rows = [[name, *(f"{value:.4g}" for value in found.values())] for name, found in report["numbers"].items()]
        print_table("numbers", ["number", "smallest", "mean", "largest"], rows)
    for kind, title in TITLES.items():
        _print_entries(title, report[kind])
    for kind, entries in report["annotations"].items():
        _print_entries(kind.replace("_", " "), entries)
    print(f"{report['problems']} problems" if report["problems"] else "no problems found")
    return int(failed)


def _print_entries(title: str, entries: list[Any]) -> None:
    for entry in entries[:10]:
        print(f"{title}: {_text(entry)}")
    if len(entries) > 10:
        print(f"{title}: and {len(entries) - 10} more; --json lists them all")


def _text(entry: Any) -> str:
    if isinstance(entry, dict):
        return entry["error"]
    return entry if isinstance(entry, str) else ", ".join(entry)
