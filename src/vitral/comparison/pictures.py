"""The charts and maps of a comparison as PNG files, for documents."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullFormatter, ScalarFormatter
from torch import Tensor

from vitral.explanation.colours import colormap
from vitral.reporting.charts import Chart

COLOURS = ("#c2570c", "#0b62a4", "#5d6675", "#2e7d4f", "#8e3d9e", "#9a7b0a")
"""Those of the report by day."""


def draw_chart(chart: Chart) -> Figure:
    """The lines with their spread as bars."""
    figure = Figure(figsize=(6.4, 4.0))
    ax = figure.subplots(gridspec_kw={"left": 0.11, "right": 0.97, "top": 0.92, "bottom": 0.13})
    for i, (name, line) in enumerate(chart.series.items()):
        if not line:  # its colour stays its own
            continue
        x, y, spread = zip(*line, strict=True)
        style = ("-", "--", ":", "-.")[i // len(COLOURS) % 4]
        bars = spread if any(spread) else None
        ax.errorbar(x, y, bars, color=COLOURS[i % len(COLOURS)], marker="o", ms=4, capsize=3, ls=style, label=name)
    if chart.log_x:
        ax.set_xscale("log")
        values = sorted({x for line in chart.series.values() for x, _, _ in line})
        if len(values) <= 6:
            ax.set_xticks(values)
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_formatter(NullFormatter())
    if chart.log_y:
        ax.set_yscale("log")
    ax.set_xlabel(chart.x_label)
    ax.set_ylabel(chart.y_label)
    ax.set_title(chart.title, fontsize=10)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def draw_fields(
    maps: Mapping[str, Tensor], titles: Mapping[str, Sequence[str]], fields: Mapping[str, Mapping[str, Any]]
) -> Figure:
    """What the middle cell of each model's last map looks at, bright for much; what theory allows is dashed."""
    columns = min(len(maps), 4)
    rows = math.ceil(len(maps) / columns)
    figure = Figure(figsize=(2.5 * columns, 3.0 * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_axis_off()
    for ax, (name, map_) in zip(axes, maps.items(), strict=False):
        H, W = map_.shape
        ax.imshow(map_.sqrt().numpy(), cmap=colormap(False), interpolation="nearest", extent=(0, W, H, 0))
        side, start = fields[name]["theoretical"]["side"], fields[name]["theoretical"]["start"]
        if start is not None:
            ax.add_patch(Rectangle((start[1], start[0]), side, side, fill=False, edgecolor="white", lw=1.2, ls="--"))
        ax.set_xlim(0, W)
        ax.set_ylim(H, 0)
        ax.set_title("\n".join([name, *titles[name]]), fontsize=7.5)
    return figure
