"""Results for people: HTML for notebooks, tables as pandas data frames, short texts.

Names of files, labels and all other text from outside are escaped.
"""

import base64
import html
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from PIL import Image

from vitral.data.images import read_image, small_picture
from vitral.errors import ImageError, VitralError

if TYPE_CHECKING:
    from pandas import DataFrame

Table = tuple[Sequence[str], Sequence[Sequence[object]]]
"""Names of columns, and rows of plain values."""
MOST_ROWS = 50
"""Rows of a table in a notebook."""
MOST_LINES = 10
"""Items of a list that its text shows."""
MOST_LETTERS = 100
"""Length of the text of one result."""
SIDE = 320
"""Largest side of a picture in a notebook, in pixels."""


class Tabular(ABC):
    """A result that is also a table: a data frame in pandas, and HTML in a notebook."""

    @abstractmethod
    def table(self) -> Table:
        """Names of columns, and rows of plain values."""

    def to_pandas(self) -> "DataFrame":
        """Return the table as a pandas data frame.

        Raises:
            VitralError: pandas is not installed.

        Example:
            >>> predictor.predict("photos/").to_pandas().groupby("label").size()
        """
        try:
            import pandas
        except ImportError:
            raise VitralError("to_pandas needs pandas, which is not installed: pip install 'vitral[data]'.") from None
        columns, rows = self.table()
        return pandas.DataFrame([list(row) for row in rows], columns=list(columns))

    def _repr_html_(self) -> str:
        return html_table(*self.table())


def html_table(columns: Sequence[str], rows: Sequence[Sequence[object]], caption: str = "") -> str:
    """Return a table as HTML, its first `MOST_ROWS` rows."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell(value))}</td>' for value in row)}</tr>" for row in rows[:MOST_ROWS]
    )
    more = f"<p>{len(rows) - MOST_ROWS:,} more rows</p>" if len(rows) > MOST_ROWS else ""
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return names with their values as HTML, under a title."""
    rows = "".join(
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(cell(value))}</td></tr>" for name, value in facts.items()
    )
    return f"<table><caption>{html.escape(title)}</caption><tbody>{rows}</tbody></table>"


def cell(value: object) -> str:
    """Return a value as the text of a table's cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def short(text: str, letters: int = MOST_LETTERS) -> str:
    """Return a text on one line, cut off after so many letters."""
    line = " ".join(text.split())
    return line if len(line) <= letters else f"{line[: letters - 3]}..."


def short_list(items: Sequence[object]) -> str:
    """Return a list with one item per line, its first `MOST_LINES` items."""
    lines = [*map(repr, items[:MOST_LINES]), *[f"... {len(items) - MOST_LINES:,} more"] * (len(items) > MOST_LINES)]
    return "[" + ",\n ".join(lines) + "]"


def png_url(png: bytes) -> str:
    """Return the address of a picture that is inside the page."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def as_png(picture: Image.Image) -> bytes:
    """Return a picture as the bytes of a PNG file."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def thumbnail(name: str, side: int) -> bytes | None:
    """Return a small PNG of an image file; None if it cannot be read."""
    try:
        return as_png(small_picture(name, side))
    except ImageError:
        return None


def drawn_html(name: str, draw: Callable[[Image.Image], Image.Image]) -> str:
    """Return the image file `name` with a result drawn on it; nothing if there is no such file, or it has changed."""
    if not os.path.isfile(name):
        return ""
    try:
        pixels = read_image(name)
        picture = draw(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))
    except (ImageError, ValueError, IndexError):  # the size of the file is no longer that of the result
        return ""
    picture.thumbnail((SIDE, SIDE))
    return f'<img src="{png_url(as_png(picture))}" alt="{html.escape(name)}">'


def gallery_html(items: Iterable[tuple[str, str]], side: int = 112) -> str:
    """Return names of image files with their captions as HTML: a row of small pictures."""
    figures = []
    for name, caption in items:
        png = thumbnail(name, side)
        style = "min-width: 64px; image-rendering: pixelated"
        picture = f'<img src="{png_url(png)}" alt="{html.escape(name)}" style="{style}">' if png else "cannot be read"
        figures.append(
            f'<figure style="display: inline-block; margin: 4px" title="{html.escape(name)}">{picture}'
            f"<figcaption>{html.escape(caption)}</figcaption></figure>"
        )
    return f"<div>{''.join(figures)}</div>"
