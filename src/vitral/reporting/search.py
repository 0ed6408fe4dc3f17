"""Pages of search results: each query with its neighbours, or groups of near copies."""

import html
from collections.abc import Sequence
from pathlib import Path

from vitral.display import png_url, thumbnail
from vitral.reporting.html import page, section
from vitral.retrieval.index import Index, Match
from vitral.weights.atomic import write_atomically

SIDE = 160
"""Largest side of a picture in the page, in pixels."""
MOST = 200
"""Queries or groups that a page shows."""


def write_results(path: Path, index: Index, found: Sequence[tuple[str, Sequence[Match]]]) -> None:
    """Write each query with its nearest items."""
    images = index.manifest.what == "image"
    parts = []
    for query, matches in found[:MOST]:
        first = _item(query, "the query", images)
        rest = "".join(_item(match.name, f"{match.score:.3f}", images) for match in matches)
        parts.append(section(Path(query).name if images else query, _row(first + rest, images), wide=True))
    about = f"the nearest of {len(index):,} {index.manifest.what}s, by the cosine of their vectors"
    _write(path, f"Search in {index.store.title}", about, parts, len(found))


def write_duplicates(path: Path, index: Index, groups: Sequence[Sequence[str]], least: float) -> None:
    """Write groups of items that are nearly the same."""
    images = index.manifest.what == "image"
    parts = [
        section(f"{len(group)} alike", _row("".join(_item(name, "", images) for name in group), images), wide=True)
        for group in groups[:MOST]
    ]
    about = f"{len(groups):,} groups among {len(index):,} {index.manifest.what}s, cosine at least {least:g}"
    _write(path, f"Near copies in {index.store.title}", about, parts, len(groups))


def _write(path: Path, title: str, about: str, parts: list[str], count: int) -> None:
    about += f"; the first {MOST} of {count:,} are shown" * (count > MOST)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, page(title, about, parts).encode())


def _row(body: str, images: bool) -> str:
    return f'<div class="shots">{body}</div>' if images else f"<table class=texts>{body}</table>"


def _item(name: str, said: str, image: bool) -> str:
    if not image:
        return f"<tr><td>{html.escape(name)}</td><td>{html.escape(said)}</td></tr>"
    caption = html.escape(" ".join(filter(None, [said, Path(name).name])))
    png = thumbnail(name, SIDE)
    picture = f'<img src="{png_url(png)}" alt="{caption}">' if png else "cannot be read now"
    return f'<figure title="{html.escape(name)}">{picture}<figcaption>{caption}</figcaption></figure>'
