"""The sections of a comparison's report that show what was measured on the trained models."""

import math
from collections.abc import Mapping
from statistics import mean, stdev
from typing import Any

from matplotlib.figure import Figure

from vitral.comparison.measure import Measured
from vitral.comparison.pictures import draw_fields
from vitral.comparison.tables import png, section_of, soft, table
from vitral.reporting.charts import Chart
from vitral.reporting.html import section
from vitral.reporting.sections import figure_tag

Found = Mapping[str, Measured]
"""What was measured, by model."""
Findings = tuple[list[str], dict[str, Chart], dict[str, Figure]]
"""Sections of the page; charts and figures by the names of their files."""


def findings(found: Found) -> Findings:
    """Everything that was measured."""
    if not found:
        return [], {}, {}
    fields = draw_fields(
        {name: each.field for name, each in found.items()},
        {name: _field_words(each.found["field"]) for name, each in found.items()},
        {name: each.found["field"] for name, each in found.items()},
    )
    looks = figure_tag(png(fields), "effective receptive fields of the middle cell of each model's last map")
    parts = [section("What a cell looks at", looks + _fields(found), wide=True)]
    charts = {
        "equivariance": equivariance(found),
        "shift-answers": shifts(found, "same", "Answers of shifted images", "share with the same answer, %", 100),
        "shift-features": shifts(
            found, "features", "Features of shifted images", "move, % of the distance between two images", 100
        ),
        "attention-distance": distances(found),
        "noise": spoiled(found, "noise", "Noise", "standard deviation, for pixels from 0 to 1"),
        "hidden": spoiled(found, "hidden", "Hidden pieces", "share of the pieces that is hidden"),
        "shuffled": spoiled(found, "shuffled", "Shuffled pieces", "pieces along a side"),
        "growth": growing(found),
    }
    notes = {
        "equivariance": "0: the map of a shifted image is the shifted map. 1: as different as two cells at random. "
        "Layers from the first (0) to the last (1).",
        "attention-distance": "Mean distance of a query from its keys, weighted by attention; mean and spread of the "
        "heads.",
        "growth": "Counted from the configs; the exponents are in the table.",
    }
    charts = {name: chart for name, chart in charts.items() if any(chart.series.values())}
    parts += [section_of(chart, notes.get(name, "")) for name, chart in charts.items()]
    parts.append(section("Cost as images grow", _growth(found), wide=True))
    images = next(iter(found.values())).found["images"]
    about = f"Measured on {images:,} images of the part that judges, on the first seed's model of the largest share."
    parts.append(section("Of these measures", soft(f"{about} docs/compare.md has their equations."), wide=True))
    return parts, charts, {"receptive-fields": fields}


def equivariance(found: Found) -> Chart:
    """Equivariance error against depth."""
    series = {}
    for name, each in found.items():
        rows = each.found["equivariance"]
        deepest = max((row["layer"] for row in rows), default=0) or 1
        series[name] = [(row["layer"] / deepest, row["error"], 0.0) for row in rows]
    return Chart("Equivariance error by layer", series, "depth of the layer", "error")


def shifts(found: Found, what: str, title: str, y_label: str, factor: float) -> Chart:
    """What shifts of the image do."""
    series = {
        name: [(row["pixels"], factor * row[what], 0.0) for row in each.found["shifts"]] for name, each in found.items()
    }
    return Chart(title, series, "pixels that the image is shifted by", y_label)


def distances(found: Found) -> Chart:
    """How far each layer's attention looks."""
    series = {
        name: [
            (layer, mean(heads), stdev(heads) if len(heads) > 1 else 0.0)
            for layer, heads in enumerate(each.found["attention_distance"], start=1)
        ]
        for name, each in found.items()  # one without attention keeps its colour, and has no line
    }
    return Chart("Attention distance", series, "layer", "pixels")


def spoiled(found: Found, way: str, title: str, x_label: str) -> Chart:
    """Accuracy on spoiled images."""
    series = {
        name: [(row["strength"], 100 * row["accuracy"], 0.0) for row in each.found["robustness"][way]]
        for name, each in found.items()
    }
    return Chart(title, series, x_label, "accuracy, %", log_x=way == "shuffled")


def growing(found: Found) -> Chart:
    """Multiply-adds against the side of the image."""
    series = {
        name: [(row["side"], row["macs"] / 1e6, 0.0) for row in each.found["growth"]["rows"]]
        for name, each in found.items()
    }
    return Chart(
        "Cost as images grow", series, "side of the image, pixels", "million multiply-adds", log_x=True, log_y=True
    )


def _fields(found: Found) -> str:
    rows = []
    for name, each in found.items():
        field = each.found["field"]
        theory = field["theoretical"]
        told = f"{theory['side']}{', then attention' if theory['kind'] == 'token' else ''}"
        rows.append(
            [name, told, f"{field['reach']}",
             f"{field['effective']:.1f}", " x ".join(map(str, field["cells"]))]
        )  # fmt: skip
    columns = ["model", "theoretical side, pixels", "side reached", "side of 90 %", "cells of the last map"]
    note = (
        "Bright: pixels that move the middle cell of the last map (mean absolute gradient; brightness is its square "
        "root). Dashed: what the cell, or its token before the first block, can see in theory. Reached: rows from the "
        "first to the last with any gradient. 90 %: a square of as many pixels as hold that share of it."
    )
    return soft(note) + table(columns, rows)


def _field_words(field: Mapping[str, Any]) -> list[str]:
    return [f"90 %: as {field['effective']:.1f} x {field['effective']:.1f} pixels"]


def _growth(found: Found) -> str:
    sides = sorted({row["side"] for each in found.values() for row in each.found["growth"]["rows"]})
    rows = []
    for name, each in found.items():
        grown = each.found["growth"]
        macs = {row["side"]: row["macs"] for row in grown["rows"]}
        told = [f"{grown['exponents'].get(part, math.nan):.2f}" for part in ("macs", "attention")]
        cells = [f"{macs[side] / 1e6:,.1f}" if side in macs else "" for side in sides]
        rows.append([name, *cells, *(word if word != "nan" else "" for word in told)])
    columns = ["model", *(f"{side} pixels" for side in sides), "exponent", "exponent of attention"]
    note = (
        "Million multiply-adds of one image. Exponent b of a fit a n^b, n the number of pixels, so of tokens: 1 is "
        "linear; attention between all tokens is 2, attention within windows 1."
    )
    return table(columns, rows) + soft(note)
