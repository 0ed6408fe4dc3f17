"""`vitral check`: look at a data set before training on it."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from vitral.cli.output import print_json, print_table


@dataclass(frozen=True)
class Options:
    """Read every image of a data set and report what is wrong or odd.

    Examples: vitral check photos/; vitral check labels.csv --json
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """What vitral train takes: a name, a folder with a folder for each class, a CSV or Parquet file."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table."""
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

    data = open_data(options.data, options.image_column, options.label_column)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=len(data.images))
        report = check_data(data, lambda done, total: bar.update(task, completed=done))
    if options.json:
        print_json(report)
        return
    print(data.describe())
    print_table("classes", ["class", "images"], [[name, f"{count:,}"] for name, count in report["classes"].items()])
    for kind, title in TITLES.items():
        for entry in report[kind][:10]:
            print(f"{title}: {_text(entry)}")
        if len(report[kind]) > 10:
            print(f"{title}: and {len(report[kind]) - 10} more")
    print(f"{report['problems']} problems" if report["problems"] else "nothing wrong was found")


def _text(entry: Any) -> str:
    if isinstance(entry, dict):
        return entry["error"]
    return entry if isinstance(entry, str) else ", ".join(entry)
