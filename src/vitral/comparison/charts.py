"""What the results of a comparison look like as lines: accuracy against data, cost, time and patch size."""

from collections.abc import Sequence
from statistics import mean, stdev
from typing import Literal

from vitral.comparison.experiment import Result
from vitral.comparison.plan import Candidate
from vitral.comparison.verdict import Summary
from vitral.reporting.charts import Chart

Points = list[tuple[float, float, float]]


def against_data(rows: Sequence[Summary], part: str) -> Chart:
    """Accuracy against the number of training images."""
    series: dict[str, Points] = {}
    for row in rows:
        series.setdefault(row.label, []).append((row.images, 100 * row.accuracy, 100 * (row.spread or 0.0)))
    return Chart("Accuracy against data", series, "training images", f"{part} accuracy, %", log_x=True)


def on_the_way(results: Sequence[Result], axis: Literal["macs", "seconds"]) -> Chart:
    """Validation accuracy during training on the largest share, mean of the seeds, as far as all of them came."""
    largest = max(result.fraction for result in results)
    series: dict[str, Points] = {}
    for label in dict.fromkeys(result.label for result in results):
        curves = [r.curve for r in results if r.label == label and r.fraction == largest]
        places = zip(*curves, strict=False)
        series[label] = [
            (mean(p[axis] for p in place) / (1e12 if axis == "macs" else 60), *_spread([p["accuracy"] for p in place]))
            for place in places
        ]
    unit = "multiply-adds of training, in 10^12" if axis == "macs" else "minutes of training"
    title = f"Accuracy against {'multiply-adds' if axis == 'macs' else 'time'}"
    share = f"{100 * largest:g} % of the data"
    return Chart(title, series, f"{unit} ({share})", "validation accuracy, %")


def against_cost(rows: Sequence[Summary], candidates: Sequence[Candidate], part: str) -> Chart:
    """Accuracy on the largest share against what one image costs."""
    largest = max(row.fraction for row in rows)
    macs = {each.label: each.cost.macs / 1e6 for each in candidates}
    series = {
        row.label: [(macs[row.label], 100 * row.accuracy, 100 * (row.spread or 0.0))]
        for row in rows
        if row.fraction == largest
    }
    label = f"million multiply-adds of one image ({100 * largest:g} % of the data)"
    return Chart("Accuracy against the cost of an image", series, label, f"{part} accuracy, %", log_x=True)


def against_patch(rows: Sequence[Summary], patched: Sequence[Candidate], part: str) -> tuple[Chart, Chart]:
    """Accuracy and cost of a ViT against its patch size."""
    largest = max(row.fraction for row in rows)
    found = {row.label: row for row in rows if row.fraction == largest}
    points: Points = [
        (float(c.patch), 100 * found[c.label].accuracy, 100 * (found[c.label].spread or 0.0)) for c in patched
    ]
    macs: Points = [(float(c.patch), c.cost.macs / 1e6, 0.0) for c in patched]
    name = patched[0].model
    return (
        Chart("Accuracy against patch size", {name: points}, "P, pixels", f"{part} accuracy, %", log_x=True),
        Chart(
            "Cost against patch size", {name: macs}, "P, pixels", "million multiply-adds", log_x=True, log_y=True
        ),
    )  # fmt: skip


def _spread(values: Sequence[float]) -> tuple[float, float]:
    return 100 * mean(values), 100 * stdev(values) if len(values) > 1 else 0.0
