"""report.html of a run: one file that needs nothing else, for a laptop or a phone, by day or by night."""

import html
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from vitral.config import TrainConfig
from vitral.data.sources.base import Data
from vitral.reporting.charts import bar_chart, line_chart
from vitral.reporting.sections import Section, evaluated, sections
from vitral.tasks.base import Task
from vitral.tasks.open import load_inputs, load_task
from vitral.training.card import kind_of
from vitral.training.log import read_metrics
from vitral.training.reserve import report_seconds
from vitral.weights.atomic import write_atomically
from vitral.weights.rundir import REPORT, History, Provenance, RunConfig, read_run_config

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --line: #d9dee6; --page: #fafbfc; --card: #fff;
  --one: #0b62a4; --two: #c2570c; --three: #2e7d4f; --four: #8e3d9e; --five: #9a7b0a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #343c4a; --page: #14181f;
  --card: #1b212b; --one: #6cb4f0; --two: #f0a35e; --three: #6fce97; --four: #d596e4; --five: #dcc25a;
  --bad: #f2877f; } }
* { box-sizing: border-box }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 1.2rem 1rem 3rem }
h1 { font-size: 1.5rem; margin: .4rem 0 0 } h2 { font-size: 1.05rem; margin: 0 0 .6rem }
p { margin: .3rem 0 } .soft { color: var(--soft) }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 420px), 1fr)); gap: 1rem;
  margin-top: 1rem }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 1rem; overflow-x: auto }
.wide { grid-column: 1 / -1 }
.big { font-size: 2rem; font-weight: 650; line-height: 1.1 } .facts { display: flex; flex-wrap: wrap; gap: 1.6rem }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: .92rem }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line) }
th:first-child, td:first-child, .texts td, .texts th { text-align: left } .texts td { vertical-align: top }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font-size: 11px; font-family: inherit }
.legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .82rem; color: var(--soft) }
.legend svg { display: inline; width: 22px; margin-right: .35rem }
.shots { display: flex; flex-wrap: wrap; gap: .8rem } figure { margin: 0; width: 112px; font-size: .8rem }
figure.line { width: 232px } figure.line img { width: 232px; height: auto } .figure { max-width: 100% }
figure.pair { width: 328px } figure.pair img { width: 160px; height: 160px }
figure.photo { width: 224px } figure.photo img { width: 224px; height: 224px; image-rendering: auto;
  object-position: bottom; background: none }
figure img { width: 112px; height: 112px; object-fit: contain; image-rendering: pixelated; border-radius: 6px;
  background: #8884 } figcaption b { color: var(--bad) }
code { font-size: .88rem; overflow-wrap: anywhere }
"""


def write_report(run: Path, data: Data, quiet: bool = True) -> Path:
    """Write report.html from the files of a run directory, with pictures from the data and explanations of them.

    When the time of `report_seconds` is over, the remaining sections are left out, and the report names them.
    """
    config = read_run_config(run)
    task = load_task(config)
    metrics = config.measured(task.measures)
    part = "test" if "test" in metrics else "val"
    spent = config.history.spent
    seconds = report_seconds(config.training(TrainConfig), spent.seconds if spent else 0.0)
    shown = draw_sections(sections(evaluated(run, data, part)), seconds, quiet) if part in metrics else []
    path = run / REPORT
    write_atomically(path, _report(config, task, metrics, read_metrics(run), shown).encode(errors="replace"))
    return path


def _report(run: RunConfig, task: Task, metrics: dict[str, Any], lines: list[dict[str, Any]], shown: list[str]) -> str:
    made = run.history
    parts = [_summary(run, task, metrics), _diagnosis(made), _baselines(made, task, metrics), _curves(lines, task)]
    parts += shown
    parts.append(section("How it was made", making(made), wide=True))
    kind = kind_of(run.preprocess is not None, run.architecture)
    return page(f"{made.model_name} on {made.data.name}", f"A {kind} trained with vitral {made.vitral}", parts)


def draw_sections(sections: list[Section], seconds: float, quiet: bool) -> list[str]:
    """Draw sections until the time is over; the last one then names those that are left out."""
    began, drawn = time.monotonic(), []
    console = Console(stderr=True, quiet=quiet, highlight=False)
    with Progress(console=console, transient=True, disable=quiet or not sys.stderr.isatty()) as bar:
        for title, body, wide in bar.track(sections, description="writing the report"):
            if time.monotonic() - began > seconds:
                break
            drawn.append(section(title, body(), wide))
    left = [html.escape(each.title) for each in sections[len(drawn) :]]
    if left:
        limit = f"The time for the report ({seconds:.0f} s) was over before these sections: {', '.join(left)}."
        drawn.append(section("Left out", f"<p>{limit}</p>", wide=True))
    return drawn


def page(title: str, about: str, parts: list[str]) -> str:
    """A page of sections under a title."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"<h1>{html.escape(title)}</h1>"
        f'<p class="soft">{html.escape(about)}</p>'
        f'<div class="grid">{"".join(parts)}</div></main></body></html>\n'
    )


def section(title: str, body: str, wide: bool = False) -> str:
    """One section of a page."""
    keys = " tabindex=0" if "<table" in body else ""  # one wider than a phone is scrolled by keys too
    return f"<section{' class=wide' if wide else ''}{keys}><h2>{html.escape(title)}</h2>{body}</section>"


def _summary(run: RunConfig, task: Task, metrics: dict[str, Any]) -> str:
    made, facts = run.history, []
    for part, m in metrics.items():
        share = task.headline in ("accuracy", "exact")
        value = f"{100 * m[task.headline]:.2f} %" if share else f"{m[task.headline]:.4g}"
        judged = f"{part} {task.headline_words}, {m['images']:,} {made.data.what}"
        facts.append(
            f'<div><div class="big">{value}</div><div>{html.escape(judged)}</div>'
            f'<div class="soft">{html.escape(task.summary(m))}</div>'
            f'<div class="soft">{html.escape(task.baseline_summary(made.baselines.get(part, {})))}</div></div>'
        )
    facts.append(
        f'<div><div class="big">{made.parameters:,}</div><div>parameters</div>'
        f'<div class="soft">{html.escape(made.model_name)}, {load_inputs(run).size}</div></div>'
    )
    return f'<section class="wide"><div class="facts">{"".join(facts)}</div></section>'


def _diagnosis(made: History) -> str:
    """The problems of the run; nothing if there are none."""
    items = "".join(
        f"<p><b>{html.escape(each.problem.capitalize())}</b>: {html.escape(each.evidence)}.<br>"
        f"Next: <code>{html.escape(each.remedy)}</code></p>"
        for each in made.diagnosis
    )
    return section("Diagnosis", items, wide=True) if items else ""


def _baselines(made: History, task: Task, metrics: dict[str, Any]) -> str:
    """The score of the model over those of trivial predictors, on the test split or else the validation split."""
    split = next((split for split in ("test", "val") if split in metrics), "")
    bars = {name: row[task.better] for name, row in made.baselines.get(split, {}).items() if task.better in row}
    if not bars:
        return ""
    title = f"{task.score_words} on the {split} split, compared with baselines"
    return section(
        title[0].upper() + title[1:], bar_chart({"this model": metrics[split][task.better]} | bars), wide=True
    )


def _curves(lines: list[dict[str, Any]], task: Task) -> str:
    train = [line for line in lines if line["split"] == "train"]
    val = [line for line in lines if line["split"] == "val"]
    charts = ""
    for key, title in {"loss": "loss", task.headline: task.headline_words}.items():
        series = {
            name: [(line["epoch"], line[key]) for line in part if key in line]
            for name, part in (("training", train), ("validation", val))
        }
        if any(series.values()):
            charts += section(
                title.capitalize(), line_chart({name: points for name, points in series.items() if points}, "epoch")
            )
    return charts


def making(made: Provenance) -> str:
    """The data that a model was trained on, and the command that trained it."""
    data = made.data
    splits = html.escape(", ".join(f"{count:,} {split}" for split, count in data.splits.items()))
    notes = "".join(f"<p>{html.escape(note)}.</p>" for note in data.notes)
    command = html.escape(made.command or "a call from Python")
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    return (
        f"<p>Data: {html.escape(data.name)} ({splits}), licence: {html.escape(data.licence)}.</p>{notes}"
        f"<p><code>{command}</code></p><p class=soft>seed {made.seed}; {html.escape(versions)}</p>"
    )
