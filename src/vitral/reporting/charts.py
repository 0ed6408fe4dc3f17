"""Charts as inline SVG, in the page's own colours."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 240, 44, 34, 12, 10
COLOURS = ("var(--two)", "var(--one)", "var(--soft)", "var(--three)", "var(--four)", "var(--five)")
SHAPES = ("", "6 4", "2 3", "9 3 2 3")
"""Dashes of the lines after the colours have all been used."""


@dataclass(frozen=True)
class Chart:
    """Lines of points (x, y, spread) over a common axis, the spread drawn as far up as down."""

    title: str
    series: Mapping[str, Sequence[tuple[float, float, float]]]
    x_label: str
    y_label: str
    log_x: bool = False
    """Equal steps along the axis are equal factors; a tick at each x that occurs, if they are few."""
    log_y: bool = False


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / count))
    step = next(step * k for k in (1, 2, 5, 10) if (high - low) / (step * k) <= count)
    first = math.ceil(low / step) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


def _frame(
    x: tuple[float, float], y: tuple[float, float], x_label: str, x_ticks: dict[float, str] | None = None,
    y_ticks: dict[float, str] | None = None,
) -> tuple[str, Any, Any]:  # fmt: skip
    """Axes, grid and labels, and the maps from values to places."""

    def at_x(value: float) -> float:
        return LEFT + (value - x[0]) / max(x[1] - x[0], 1e-12) * (WIDTH - LEFT - RIGHT)

    def at_y(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y[0]) / max(y[1] - y[0], 1e-12) * (HEIGHT - BOTTOM - TOP)

    parts = []
    for value, name in (_named(_ticks(*y)) if y_ticks is None else y_ticks).items():
        parts.append(
            f'<path d="M{LEFT} {at_y(value):.1f}H{WIDTH - RIGHT}" stroke="var(--line)"/>'
            f'<text x="{LEFT - 6}" y="{at_y(value) + 4:.1f}" text-anchor="end">{name}</text>'
        )
    for value, name in (_named(_ticks(*x)) if x_ticks is None else x_ticks).items():
        parts.append(f'<text x="{at_x(value):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{html.escape(x_label)}</text>')
    return "".join(parts), at_x, at_y


def _named(ticks: list[float]) -> dict[float, str]:
    return {value: f"{value:.6g}" for value in ticks}


def _svg(body: str, label: str, width: float = WIDTH, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">{body}</svg>'


def line_chart(series: dict[str, list[tuple[float, float]]], x_label: str) -> str:
    """Lines over a common axis, named in a legend."""
    points = [p for line in series.values() for p in line if all(map(math.isfinite, p))]
    if not points:
        return "<p>Nothing was logged.</p>"
    low, high = min(y for _, y in points), max(y for _, y in points)
    room = (high - low or abs(high) or 1) * 0.05
    body, at_x, at_y = _frame((0, max(x for x, _ in points)), (low - room, high + room), x_label)
    ends = [line[-1][1] for line in series.values()]
    legend = (
        HEIGHT - BOTTOM - 16 * len(series) if sum(ends) / len(ends) > (low + high) / 2 else 20
    )  # where the lines end not
    for i, (name, line) in enumerate(series.items()):
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in line if math.isfinite(y))
        colour = COLOURS[i % len(COLOURS)]
        body += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'
        place = WIDTH - RIGHT - 32 - 6.2 * max(map(len, series))
        body += f'<path d="M{place} {legend + 16 * i}h16" stroke="{colour}" stroke-width="3"/>'
        body += f'<text x="{place + 21}" y="{legend + 4 + 16 * i}">{html.escape(name)}</text>'
    return _svg(body, f"{', '.join(series)} over {x_label}")


def spread_chart(chart: Chart) -> str:
    """The lines with their points and spreads; what is which stands below, for names may be long."""
    points = [(x, y, s) for line in chart.series.values() for x, y, s in line if all(map(math.isfinite, (x, y, s)))]
    points = [p for p in points if (p[0] > 0 or not chart.log_x) and (p[1] > 0 or not chart.log_y)]
    if not points:
        return "<p>Nothing was measured.</p>"
    to_x, to_y = (math.log10 if log else float for log in (chart.log_x, chart.log_y))
    low_x, high_x = min(to_x(x) for x, _, _ in points), max(to_x(x) for x, _, _ in points)
    low_x = low_x if chart.log_x else min(low_x, 0.0)
    ends = [to_y(e) for _, y, s in points for e in ((y - s, y + s) if not chart.log_y else (y,))]
    room, side = (max(ends) - min(ends) or 1) * 0.06, (high_x - low_x or 1) * 0.03
    body, at_x, at_y = _frame(
        (low_x - side, high_x + side),
        (min(ends) - room, max(ends) + room),
        chart.x_label,
        _log_ticks(sorted({x for x, _, _ in points})) if chart.log_x else None,
        _decades(min(ends), max(ends)) if chart.log_y else None,
    )
    body += f'<text x="{LEFT}" y="{TOP - 2}">{html.escape(chart.y_label)}</text>'
    legend = ""
    for i, (name, line) in enumerate(chart.series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], SHAPES[i // len(COLOURS) % len(SHAPES)]
        places = [(at_x(to_x(x)), at_y(to_y(y)), x, y, s) for x, y, s in line if (x, y, s) in points]
        if not places:  # its colour stays its own
            continue
        path = " ".join(f"{px:.1f},{py:.1f}" for px, py, *_ in places)
        style = f'stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        body += f'<polyline points="{path}" fill="none" {style}/>'
        for px, py, x, y, s in places:
            if s and not chart.log_y:
                body += (
                    f'<path d="M{px:.1f} {at_y(y - s):.1f}V{at_y(y + s):.1f}" stroke="{colour}" stroke-width="1.4"/>'
                )
            told = f"{name}: {y:.4g}{f' ± {s:.2g}' if s else ''} at {x:.4g}"
            body += f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colour}"><title>{html.escape(told)}</title>'
            body += "</circle>"
        swatch = f'<svg viewBox="0 0 22 8" aria-hidden="true"><path d="M0 4h22" {style}/></svg>'
        legend += f"<span>{swatch}{html.escape(name)}</span>"
    named = ", ".join(name for name, line in chart.series.items() if line)
    picture = _svg(body, f"{chart.title}: {named} over {chart.x_label}")
    return f'{picture}<p class="legend">{legend}</p>'


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _log_ticks(values: list[float]) -> dict[float, str]:
    """The values themselves where they are few, else powers of ten, by their logarithms."""
    if len(values) <= 6:
        return {math.log10(value): _number(value) for value in values}
    return _decades(math.log10(values[0]), math.log10(values[-1]))


def _decades(low: float, high: float) -> dict[float, str]:
    """Powers of ten between two logarithms; 2 and 5 of each too where they are few."""
    steps = (1,) if high - low > 3 else (1, 2, 5)
    ticks = (k * 10**p for p in range(math.floor(low), math.ceil(high) + 1) for k in steps)
    return {math.log10(t): _number(t) for t in ticks if low - 0.05 <= math.log10(t) <= high + 0.05}


def reliability_chart(bins: list[dict[str, float]]) -> str:
    """Accuracy against confidence; on the diagonal, 80 % sure means right 80 % of the time."""
    body, at_x, at_y = _frame((0, 1), (0, 1), "confidence")
    body += f'<path d="M{at_x(0)} {at_y(0)}L{at_x(1)} {at_y(1)}" stroke="var(--soft)" stroke-dasharray="4 4"/>'
    total = sum(b["count"] for b in bins)
    for b in bins:
        radius, x, y = 3 + 9 * math.sqrt(b["count"] / total), at_x(b["confidence"]), at_y(b["accuracy"])
        title = f"{b['count']:,} images, confidence {b['confidence']:.2f}, right {b['accuracy']:.2f}"
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="var(--one)" fill-opacity=".6">'
        body += f"<title>{title}</title></circle>"
    body += f'<text x="{LEFT + 8}" y="{TOP + 12}">share that was right (area: number of images)</text>'
    return _svg(body, "accuracy against confidence")


def confusion_matrix(counts: list[list[int]], labels: list[str], most: int = 30) -> str:
    """Rows: what it is; columns: what was said. Beyond `most` classes only the worst confusions are listed."""
    pairs = [(counts[i][j], i, j) for i in range(len(counts)) for j in range(len(counts)) if i != j and counts[i][j]]
    if len(labels) > most:
        rows = "".join(
            f"<tr><td>{html.escape(labels[i])} said to be {html.escape(labels[j])}</td><td>{n}</td></tr>"
            for n, i, j in sorted(pairs, reverse=True)[:20]
        )
        return f"<table><tr><th>confusion</th><th>images</th></tr>{rows}</table>"
    cell, margin = 36, 84
    size = cell * len(labels)
    body = ""
    for i, row in enumerate(counts):
        total = sum(row) or 1
        name = html.escape(labels[i] if len(labels[i]) <= 12 else labels[i][:11] + "…")
        body += f'<text x="{margin - 6}" y="{20 + cell * i + cell / 2 + 4}" text-anchor="end">{name}</text>'
        x, y = margin + cell * i + cell / 2, 30 + size
        body += f'<text x="{x}" y="{y}" text-anchor="end" transform="rotate(-45 {x} {y})">{name}</text>'
        for j, n in enumerate(row):
            colour = "var(--one)" if i == j else "var(--bad)"
            shade = 0.08 + 0.75 * (n / total) ** 0.5 if n else 0.03
            x0, y0, side = margin + cell * j, 20 + cell * i, cell - 1
            body += f'<rect x="{x0}" y="{y0}" width="{side}" height="{side}" fill="{colour}" opacity="{shade:.2f}"/>'
            if n:
                body += (
                    f'<text x="{x0 + cell / 2}" y="{y0 + cell / 2 + 4}" text-anchor="middle" '
                    f'style="fill: var(--ink)">{n}</text>'
                )
    body += f'<text x="{margin}" y="12">columns: what was said; rows: what it is</text>'
    picture = _svg(body, "confusion matrix", margin + size + 10, size + 90)
    return f'<div style="max-width: {margin + size + 150}px">{picture}</div>'


def scatter_chart(points: list[tuple[float, float]], x_label: str, y_label: str, most: int = 1500) -> str:
    """A point for each pair, on equal axes, with the diagonal on which both are the same; at most 1,500 of them."""
    low, high = min(min(p) for p in points), max(max(p) for p in points)
    room = (high - low or abs(high) or 1) * 0.03
    body, at_x, at_y = _frame((low - room, high + room), (low - room, high + room), x_label)
    line = f"M{at_x(low):.1f} {at_y(low):.1f}L{at_x(high):.1f} {at_y(high):.1f}"
    body += f'<path d="{line}" stroke="var(--soft)" stroke-dasharray="4 4"/>'
    for x, y in points[:: -(-len(points) // most)]:
        body += f'<circle cx="{at_x(x):.1f}" cy="{at_y(y):.1f}" r="2.2" fill="var(--one)" fill-opacity=".45"/>'
    body += f'<text x="{LEFT + 8}" y="{TOP + 12}">{html.escape(y_label)}</text>'
    return _svg(body, f"{y_label} against {x_label}")


def histogram(values: list[float], x_label: str, bins: int = 31) -> str:
    """How often values fall into each of even bins."""
    low, high = min(values), max(values)
    width = (high - low) / bins or 1.0
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / width), bins - 1)] += 1
    body, at_x, at_y = _frame((low, low + bins * width), (0, max(counts) * 1.05), x_label)
    for i, n in enumerate(counts):
        x, side = at_x(low + i * width), at_x(low + (i + 1) * width) - at_x(low + i * width)
        body += f'<rect x="{x:.1f}" y="{at_y(n):.1f}" width="{max(side - 1, 1):.1f}" '
        body += f'height="{at_y(0) - at_y(n):.1f}" fill="var(--one)"><title>{n:,}</title></rect>'
    return _svg(body, f"histogram of {x_label}")


def bar_chart(bars: Mapping[str, float]) -> str:
    """A horizontal bar with its value for each name, the first in another colour; a value below 0 has no bar."""
    row, start, room = 22, 130, WIDTH - 130 - 56
    longest = max(max(bars.values()), 1e-12)
    parts = []
    for i, (name, value) in enumerate(bars.items()):
        width = room * max(value, 0.0) / longest
        parts.append(
            f'<text x="{start - 8}" y="{i * row + 15}" text-anchor="end">{html.escape(name)}</text>'
            f'<rect x="{start}" y="{i * row + 4}" width="{width:.1f}" height="{row - 8}" rx="2" '
            f'fill="{COLOURS[1] if i == 0 else COLOURS[2]}"/>'
            f'<text x="{start + width + 6:.1f}" y="{i * row + 15}">{value:.4g}</text>'
        )
    label = ", ".join(f"{name} {value:.4g}" for name, value in bars.items())
    return _svg("".join(parts), label, height=len(bars) * row)
