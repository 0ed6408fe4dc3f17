"""The pieces that the sections of a comparison's report are made of."""

import html
import io
from collections.abc import Sequence

from matplotlib.figure import Figure

from vitral.reporting.charts import Chart, spread_chart
from vitral.reporting.html import section


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def section_of(chart: Chart, note: str = "") -> str:
    """A chart in a section of its own, with a remark."""
    return section(chart.title, spread_chart(chart) + (soft(note) if note else ""))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def soft(text: str) -> str:
    """A remark."""
    return f'<p class="soft">{html.escape(text)}</p>'
