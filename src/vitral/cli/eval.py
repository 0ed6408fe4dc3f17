"""`vitral eval`: how a trained model does on labelled data."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from vitral.cli.output import print_json, print_table
from vitral.config import Writing


@dataclass(frozen=True)
class Options:
    """Evaluate a trained model on labelled data.

    Examples: vitral eval runs/digits digits; vitral eval runs/photos new-photos/ --json;
    vitral eval runs/numbers-en-it numbers-en-it --beam 4
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """What vitral train takes: a name, a folder with a folder for each class, a CSV or Parquet file."""
    split: Annotated[str | None, tyro.conf.arg(metavar="PART", help_behavior_hint="(default: test, or else val)")] = (
        None
    )
    """Part of the data."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table, or of what is to be written; several are separated by commas."""
    text_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of texts to read in a table."""
    writing: Annotated[Writing, tyro.conf.arg(name="")] = field(default_factory=Writing)
    """How text is written."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Print the metrics."""
    from vitral.api import evaluate
    from vitral.data.sources.open import open_data
    from vitral.weights.rundir import is_run, read_run_config

    source = Path(options.source)
    task = read_run_config(source).document["task"] if is_run(source) else None
    data = open_data(options.data, options.image_column, options.label_column, task, options.text_column)
    writing = options.writing if options.writing != Writing() else None
    metrics = evaluate(options.source, data, split=options.split, writing=writing)
    if options.json:
        print_json(metrics)
        return
    rows = next((metrics[key] for key in ("by_class", "by_label", "by_target", "by_length") if key in metrics), {})
    if not rows:
        print(f"{options.source} on {metrics['data']}, {metrics['split']} part, {metrics['images']:,} {data.what}")
        print(metrics["summary"])
        return
    columns = list(next(iter(rows.values()), {}))
    print_table(
        f"{options.source} on {metrics['data']}, {metrics['split']} part, {metrics['images']:,} {data.what}",
        ["", *columns],
        [[name, *(_cell(row[key]) for key in columns)] for name, row in rows.items()],
        note=metrics["summary"] + (f", calibration error {metrics['ece']:.3f}" if "ece" in metrics else ""),
    )


def _cell(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
