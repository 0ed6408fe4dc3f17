"""report.html of a comparison, in the look of a run's, and its charts as pictures."""

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitral.comparison.charts import against_cost, against_data, against_patch, on_the_way
from vitral.comparison.experiment import Result
from vitral.comparison.findings import Found, findings
from vitral.comparison.pictures import draw_chart
from vitral.comparison.plan import Candidate, Plan
from vitral.comparison.tables import png, section_of, soft, table
from vitral.comparison.verdict import Summary, judge
from vitral.config import TrainConfig
from vitral.reporting.html import making, page, section
from vitral.schema import conform
from vitral.weights.atomic import write_atomically
from vitral.weights.rundir import Provenance


def write_comparison(
    out: Path, document: dict[str, Any], plan: Plan, results: Sequence[Result], rows: Sequence[Summary],
    train: TrainConfig, found: Found,
) -> None:  # fmt: skip
    """Write report.html, and the main charts as PNG files under pictures/."""
    part = document["judged_on"]
    models = {each.label for each in plan.candidates}
    own = [row for row in rows if row.label in models]
    runs = [result for result in results if result.label in models]
    charts = {"accuracy-data": against_data(own, part), "accuracy-cost": against_cost(own, plan.candidates, part)}
    on_way = {"accuracy-macs": on_the_way(runs, "macs"), "accuracy-time": on_the_way(runs, "seconds")}
    charts |= {name: chart for name, chart in on_way.items() if any(chart.series.values())}
    judged = [row for row in rows if row.label in plan.rivals]
    parts = [section("Which is best", _verdicts(judged, document), wide=True)]
    parts += [section_of(chart) for chart in charts.values()]
    parts.append(section(f"Accuracy on the {part} part, %", _accuracies(own), wide=True))
    parts.append(section("What they cost", _costs(plan.candidates, own), wide=True))
    if plan.patched:
        pair = against_patch(rows, plan.patched, part)
        charts |= dict(zip(("patch-accuracy", "patch-cost"), pair, strict=True))
        parts += [section_of(chart) for chart in pair]
        parts.append(section("Patch sizes", _patches(plan.patched, rows), wide=True))
    shown, drawn, figures = findings(found)
    parts += shown
    charts |= drawn
    parts.append(section("How it was made", _making(document, plan, train), wide=True))
    title = f"{len(plan.candidates)} models on {document['data']['name']}"
    about = f"Compared by vitral {document['versions']['vitral']}, each run with {plan.budget}"
    write_atomically(out / "report.html", page(title, about, parts).encode())
    (out / "pictures").mkdir(exist_ok=True)
    for name, figure in ({name: draw_chart(chart) for name, chart in charts.items()} | figures).items():
        write_atomically(out / "pictures" / f"{name}.png", png(figure))


def _verdicts(rows: Sequence[Summary], document: dict[str, Any]) -> str:
    sentences = "".join(f"<p>{html.escape(sentence)}</p>" for _, sentence in judge(rows))
    seeds = max(row.seeds for row in rows)
    note = (
        f"Chance: in 95 % of cases two equal models would differ by less, by the spread over {seeds} seeds. "
        f"Every run: {document['budget']}, the same recipe, the same images for the same seed; the weights of the last "
        f"step are judged, so the {document['judged_on']} part has chosen nothing."
    )
    return sentences + soft(note if seeds > 1 else note.partition(". ")[2])


def _accuracies(rows: Sequence[Summary]) -> str:
    fractions = sorted({row.fraction for row in rows})
    labels = dict.fromkeys(row.label for row in rows)
    found = {(row.label, row.fraction): row for row in rows}
    heads = [f"{100 * f:g} % ({next(r.images for r in rows if r.fraction == f):,.0f} images)" for f in fractions]
    body = [[label, *(percent(found[label, f]) for f in fractions)] for label in labels]
    return table(["model", *heads], body)


def percent(row: Summary) -> str:
    """Accuracy with its spread."""
    return f"{100 * row.accuracy:.2f}" + (
        f"\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{100 * row.spread:.2f}" if row.spread is not None else ""
    )


def _costs(candidates: Sequence[Candidate], rows: Sequence[Summary]) -> str:
    largest = max(row.fraction for row in rows)
    found = {row.label: row for row in rows if row.fraction == largest}
    body = []
    for each in candidates:
        row = found[each.label]
        speed = row.macs / max(row.seconds, 1e-9)
        body.append(
            [each.label, f"{each.cost.params / 1e6:.3f}", f"{each.cost.macs / 1e6:.2f}", f"{row.macs / 1e12:.3g}",
             f"{row.seconds / 60:.2f}", f"{speed / 1e9:.1f}"]
        )  # fmt: skip
    columns = [
        "model", "million parameters", "million multiply-adds of an image", "10^12 multiply-adds of training",
        "minutes of training", "10^9 multiply-adds a second",
    ]  # fmt: skip
    note = "Training counts a forward pass and twice that for the backward pass; its minutes include validation."
    return table(columns, body) + soft(f"On {100 * largest:g} % of the training images. {note}")


def _patches(patched: Sequence[Candidate], rows: Sequence[Summary]) -> str:
    largest = max(row.fraction for row in rows)
    found = {row.label: row for row in rows if row.fraction == largest}
    body = []
    for each in patched:
        parts = each.cost.macs_by_part
        body.append(
            [f"P = {each.patch}", f"{each.cost.tokens:,}", f"{each.cost.macs / 1e6:.2f}",
             f"{parts.get('attention', 0) / 1e6:.2f}", f"{each.cost.params / 1e6:.3f}", percent(found[each.label])]
        )  # fmt: skip
    columns = ["patch", "tokens", "million multiply-adds", "of them attention", "million parameters", "accuracy, %"]
    return table(columns, body)


def _making(document: dict[str, Any], plan: Plan, train: TrainConfig) -> str:
    plain = TrainConfig().to_dict()
    told = {"model", "seed", "max_minutes", "max_steps", "device", "workers", "log_steps"}
    changed = [f"{k} {v}" for k, v in train.to_dict().items() if plain[k] != v and k not in told and k != "augment"]
    changed += [f"augment.{k} {v}" for k, v in train.to_dict()["augment"].items() if plain["augment"][k] != v]
    recipe = (
        f"All models use one recipe: {', '.join(changed) or 'the defaults'}; nothing was tuned for any of them here."
    )
    runs = f"{len(plan.trials)} runs; each is a run directory under runs/."
    made: Provenance = conform({**document, "seed": train.seed}, Provenance, "")
    return f"<p>{html.escape(recipe)}</p><p>{runs}</p>{making(made)}"
