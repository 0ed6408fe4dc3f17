"""`vitral search`: what in an index is like an image or a text."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitral.cli.output import check_page, print_json
from vitral.config import Device
from vitral.errors import InputError


@dataclass(frozen=True)
class Options:
    """Find what is most like an image (or a text) in an index that vitral index made.

    Examples:
      vitral search photos.index photo.jpg
      vitral search photos.index new-photos/ --top-k 5 --out found.html
      vitral search sentences.index "where is the station" --json
    """

    index: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="INDEX")]
    """Folder of the index, or postgresql://user@host/database?table=NAME."""
    queries: Annotated[
        tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE|DIR|TEXT...", help_behavior_hint="")
    ]
    """Images, folders or quoted patterns; for an index of texts: texts, files with one on each line, or - for lines on
    standard input."""
    top_k: Annotated[int, tyro.conf.arg(metavar="K")] = 10
    """Neighbours of each query."""
    model: Annotated[str, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")] = ""
    """Where the model of the index is now, if it has moved."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="")] = ""
    """Write queries and neighbours as a page with pictures."""
    device: Device = "cpu"
    """Where the model runs."""
    json: bool = False
    """Print JSON instead of lines."""


def run(options: Options) -> None:
    """Print the neighbours of each query."""
    from vitral.cli.predict import find_images, find_texts
    from vitral.retrieval.index import Index

    check_page("--out", options.out)
    index = Index(options.index, source=options.model or None)
    if options.device != "cpu":
        index.load(device=options.device)
    asked = list(find_images(options.queries) if index.manifest.what == "image" else find_texts(options.queries))
    found = [(str(query), *each) for query, each in zip(asked, index.search_each(asked, options.top_k), strict=True)]
    if not found:
        raise InputError(f"there is no {index.manifest.what} to look for; give at least one.")
    images = index.manifest.what == "image"
    if all(error for _, _, error in found):
        lost = images and not Path(found[0][0]).exists()
        raise InputError(found[0][2] + " This is an index of images: give one to look for." * lost)
    if images and not Path(index.manifest.folder).exists():
        print(f"warning: {index.manifest.folder} is gone; if it has moved, vitral index finds it again: "
              f"vitral index {index.source} FOLDER --out {index.place}", file=sys.stderr)  # fmt: skip
    if options.out:
        from vitral.reporting.search import write_results

        write_results(Path(options.out), index, [(query, some) for query, some, error in found if not error])
    if options.json:
        print_json([
            {"query": query, "matches": [match.to_dict() for match in some]} | ({"error": error} if error else {})
            for query, some, error in found
        ])  # fmt: skip
        return
    for query, matches, error in found:
        if error:
            print(f"warning: {error}", file=sys.stderr)
            continue
        print(f"{query}:")
        for match in matches:
            print(f"  {match.score:.4f}  {match.name}")
    if options.out:
        print(f"page: {options.out}")
