"""`vitral predict`: labels for images, any number of them."""

import csv
import glob
import json as json_module
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitral.errors import ImageError


@dataclass(frozen=True)
class Options:
    """Predict the labels of images with a trained model.

    Examples: vitral predict runs/digits photo.png; vitral predict runs/photos folder/ --csv > answers.csv;
    find . -name "*.jpg" | vitral predict runs/photos -
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH...")]
    """Images, folders, quoted patterns, or - for a list of paths on standard input."""
    top_k: Annotated[int, tyro.conf.arg(metavar="K")] = 3
    """Labels for each image."""
    batch_size: Annotated[int, tyro.conf.arg(metavar="N")] = 32
    """Images at once."""
    json: bool = False
    """Print one JSON document."""
    csv: bool = False
    """Print CSV: image, label, probability, error."""


def find_images(paths: tuple[str, ...]) -> Iterator[str | Path]:
    """Every image that the paths name, one by one; a folder gives its images, - the lines of standard input."""
    from vitral.data.sources.folder import list_images

    if not paths:
        raise ImageError(
            "no images are named; give files, folders, quoted patterns, or - for a list on standard input."
        )
    for path in paths:
        if path == "-":
            yield from (line.rstrip("\n") for line in sys.stdin if line.strip())
        elif Path(path).is_dir():
            found = list_images(Path(path))
            if not found:
                raise ImageError(f"{path} has no images in it.")
            yield from found
        elif any(mark in path for mark in "*?[") and not Path(path).exists():
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                raise ImageError(f"no file matches {path}.")
            yield from matches
        else:
            yield path


def run(options: Options) -> None:
    """Print the answers as they come."""
    from rich.console import Console
    from rich.progress import track

    from vitral.inference.predictor import Predictor

    predictor = Predictor(options.source, batch_size=options.batch_size)
    answers = predictor.stream(find_images(options.paths), options.top_k)
    bar = Console(stderr=True)
    answers = track(answers, "predicting", console=bar, transient=True, disable=not sys.stderr.isatty())
    if options.csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(["image", "label", "probability", "error"])
        for answer in answers:
            pairs = zip(answer.labels, answer.probabilities, strict=True)
            rows = [[answer.name, label, f"{p:.6f}", ""] for label, p in pairs]
            writer.writerows(rows or [[answer.name, "", "", answer.error]])
    elif options.json:
        print("[", end="")
        for i, answer in enumerate(answers):
            print("," * (i > 0) + f"\n  {json_module.dumps(answer.to_dict())}", end="")
        print("\n]")
    else:
        for answer in answers:
            pairs = zip(answer.labels, answer.probabilities, strict=True)
            text = answer.error or "  ".join(f"{label} {100 * p:.1f} %" for label, p in pairs)
            print(f"{answer.name}: {text}")
