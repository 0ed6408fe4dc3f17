"""`vitral eval`: how a trained model does on labelled data."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from vitral.cli.output import print_json, print_table


@dataclass(frozen=True)
class Options:
    """Evaluate a trained model on labelled data.

    Examples: vitral eval runs/digits digits; vitral eval runs/photos new-photos/ --json
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """What vitral train takes: a name, a folder with a folder for each class, a CSV or Parquet file."""
    split: Annotated[str | None, tyro.conf.arg(metavar="PART", help_behavior_hint="(default: test, or else val)")] = (
        None
    )
    """Part of the data."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Print the metrics."""
    from vitral.api import evaluate

    metrics = evaluate(options.source, options.data, split=options.split)
    if options.json:
        print_json(metrics)
        return
    low, high = (100 * value for value in metrics["accuracy_95"])
    print_table(
        f"{options.source} on {metrics['data']}, {metrics['split']} part, {metrics['images']:,} images",
        ["class", "images", "recall", "precision", "F1"],
        [
            [name, f"{row['images']:,}", *(f"{100 * row[key]:.1f} %" for key in ("recall", "precision", "f1"))]
            for name, row in metrics["by_class"].items()
        ],
        note=f"accuracy {100 * metrics['accuracy']:.2f} % (95 %: {low:.2f} to {high:.2f}), "
        f"loss {metrics['calibrated_loss']:.3f}, calibration error {metrics['ece']:.3f}",
    )
