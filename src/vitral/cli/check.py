"""`vitral check`: look at a data set before training on it."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from vitral.cli.output import print_json, print_table


@dataclass(frozen=True)
class Options:
    """Read every image of a data set and report what is wrong or odd.

    Examples:
      vitral check photos/
      vitral check labels.csv --json
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """What vitral train takes: a name, a folder (of class folders, COCO, Ultralytics, masks), a CSV or Parquet file."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table; several, separated by commas, for numbers or 0 and 1."""
    task: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """What a table's labels are for: classify, multilabel or regress; told by the cells if it is not given."""
    text_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of texts to read in a table."""
    json: bool = False
    """Print JSON instead of tables."""


TITLES = {
    "unreadable": "cannot be read",
    "duplicates": "are there more than once",
    "leaks_between_splits": "are in more than one split",
    "same_image_other_label": "are the same image under different labels",
    "classes_alike_but_for_case": "classes that differ only in spelling",
    "rare_classes": "classes with few images",
    "extreme_sizes": "are tiny or very long",
}


def run(options: Options) -> None:
    """Print the report."""
    from rich.console import Console
    from rich.progress import Progress

    from vitral.data.check import check_data
    from vitral.data.sources.open import open_data

    data = open_data(options.data, options.image_column, options.label_column, options.task, options.text_column)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=len(data.inputs))
        report = check_data(data, lambda done, total: bar.update(task, completed=done))
    if options.json:
        print_json(report)
        return
    print(data.describe())
    for note in data.notes:
        print(note)
    if report["classes"]:
        print_table("classes", ["class", "images"], [[name, f"{count:,}"] for name, count in report["classes"].items()])
    if report["numbers"]:
        rows = [[name, *(f"{value:.4g}" for value in found.values())] for name, found in report["numbers"].items()]
        print_table("numbers", ["number", "smallest", "mean", "largest"], rows)
    for kind, title in TITLES.items():
        _print_entries(title, report[kind])
    for kind, entries in report["annotations"].items():
        _print_entries(kind.replace("_", " "), entries)
    print(f"{report['problems']} problems" if report["problems"] else "nothing wrong was found")


def _print_entries(title: str, entries: list[Any]) -> None:
    for entry in entries[:10]:
        print(f"{title}: {_text(entry)}")
    if len(entries) > 10:
        print(f"{title}: and {len(entries) - 10} more; --json lists them all")


def _text(entry: Any) -> str:
    if isinstance(entry, dict):
        return entry["error"]
    return entry if isinstance(entry, str) else ", ".join(entry)
