"""`vitral search`: what in an index is like an image or a text."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from vitral.cli.output import print_json


@dataclass(frozen=True)
class Options:
    """Find what is most like an image (or a text) in an index that vitral index made.

    Examples: vitral search photos.index photo.jpg; vitral search photos.index new-photos/ --top-k 5 --out found.html;
    vitral search sentences.index "where is the station" --json
    """

    index: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="INDEX")]
    """Folder of the index, or postgresql://user@host/database?table=NAME."""
    queries: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE|DIR|TEXT...")]
    """Images, folders or quoted patterns; for an index of texts: texts, files with one on each line, or - for lines on
    standard input."""
    top_k: Annotated[int, tyro.conf.arg(metavar="K")] = 10
    """Neighbours of each query."""
    model: Annotated[str, tyro.conf.arg(metavar="SOURCE", help_behavior_hint="")] = ""
    """Where the model of the index is now, if it has moved."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="")] = ""
    """Write queries and neighbours as a page with pictures."""
    json: bool = False
    """Print JSON instead of lines."""


def run(options: Options) -> None:
    """Print the neighbours of each query."""
    from vitral.cli.predict import find_images, find_texts
    from vitral.retrieval.index import Index

    index = Index(options.index, source=options.model or None)
    asked = find_images(options.queries) if index.manifest.what == "image" else find_texts(options.queries)
    queries = [str(query) for query in asked]
    found = index.search(queries, options.top_k)
    if options.out:
        from vitral.reporting.search import write_results

        write_results(Path(options.out), index, queries, found)
    if options.json:
        rows = zip(queries, found, strict=True)
        print_json([{"query": query, "matches": [match.to_dict() for match in some]} for query, some in rows])
        return
    for query, matches in zip(queries, found, strict=True):
        print(f"{query}:")
        for match in matches:
            print(f"  {match.score:.4f}  {match.name}")
