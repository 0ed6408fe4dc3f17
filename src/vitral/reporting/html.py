"""report.html of a run: one file that needs nothing else, for a laptop or a phone, by day or by night."""

import base64
import html
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from vitral.config import ViTConfig
from vitral.data.images import AtLeast
from vitral.data.sources.base import Data
from vitral.data.transforms import decode_size
from vitral.explanation.explain import explain
from vitral.explanation.figures import blended
from vitral.inference.predictor import Predictor
from vitral.models.cost import model_cost
from vitral.reporting.charts import confusion_matrix, line_chart, reliability_chart
from vitral.weights.atomic import write_atomically
from vitral.weights.rundir import read_run_config

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5d6675; --line: #d9dee6; --page: #fafbfc; --card: #fff;
  --one: #0b62a4; --two: #c2570c; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --soft: #9aa4b5; --line: #343c4a; --page: #14181f;
  --card: #1b212b; --one: #6cb4f0; --two: #f0a35e; --bad: #f2877f; } }
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
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: auto; display: block } svg text { fill: var(--soft); font-size: 11px; font-family: inherit }
.shots { display: flex; flex-wrap: wrap; gap: .8rem } figure { margin: 0; width: 112px; font-size: .8rem }
figure img { width: 112px; height: 112px; object-fit: contain; image-rendering: pixelated; border-radius: 6px;
  background: #8884 } figcaption b { color: var(--bad) }
code { font-size: .88rem; overflow-wrap: anywhere }
"""


def write_report(run: Path, data: Data) -> Path:
    """Write report.html from what lies in the run directory, with pictures from the data and what is seen in them."""
    document = read_run_config(run).document
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluation = load_file(run / "evaluation.safetensors")
    part = "test" if "test" in document["metrics"] else "val"
    path = run / "report.html"
    looks = _looks(run, evaluation, document, data, part)
    write_atomically(path, _page(document, lines, evaluation, data, part, looks).encode())
    return path


def _page(
    document: dict[str, Any],
    lines: list[dict[str, Any]],
    evaluation: dict[str, Tensor],
    data: Data,
    part: str,
    looks: str,
) -> str:
    title = f"{document['model_name']} on {document['data']['name']}"
    sections = [_summary(document), _curves(lines)]
    if part in document["metrics"]:
        metrics = document["metrics"][part]
        sections += [
            _section("Calibration", reliability_chart(metrics["calibration"]) + _calibration_note(document, part)),
            _section("By class", _class_table(metrics["by_class"])),
            _section("Confusion", confusion_matrix(metrics["confusion"], document["labels"]), wide=True),
            _section("What it looks at", looks, wide=True),
            _section("Most confident mistakes", _mistakes(evaluation, document, data, part), wide=True),
        ]
    sections.append(_section("How it was made", _making(document), wide=True))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body><main>'
        f"<h1>{html.escape(title)}</h1>"
        f'<p class="soft">A Vision Transformer trained with vitral {html.escape(document["versions"]["vitral"])}</p>'
        f'<div class="grid">{"".join(sections)}</div></main></body></html>\n'
    )


def _section(title: str, body: str, wide: bool = False) -> str:
    return f"<section{' class=wide' if wide else ''}><h2>{html.escape(title)}</h2>{body}</section>"


def _summary(document: dict[str, Any]) -> str:
    facts = []
    for part, m in document["metrics"].items():
        low, high = (100 * value for value in m["accuracy_95"])
        facts.append(
            f'<div><div class="big">{100 * m["accuracy"]:.2f} %</div><div>{part} accuracy, {m["images"]:,} images</div>'
            f'<div class="soft">95 % interval {low:.2f} to {high:.2f} %</div></div>'
        )
    cost = model_cost(ViTConfig.from_dict(document["model"]))
    facts.append(
        f'<div><div class="big">{cost.params:,}</div><div>parameters</div>'
        f'<div class="soft">{cost.tokens} tokens, {cost.macs / 1e6:,.1f} million multiply-adds an image</div></div>'
    )
    return f'<section class="wide"><div class="facts">{"".join(facts)}</div></section>'


def _curves(lines: list[dict[str, Any]]) -> str:
    train = [line for line in lines if line["split"] == "train"]
    val = [line for line in lines if line["split"] == "val"]
    charts = ""
    for key, title, scale in (("loss", "Loss", 1.0), ("accuracy", "Accuracy, %", 100.0)):
        series = {
            "training": [(line["epoch"], scale * line[key]) for line in train],
            "validation": [(line["epoch"], scale * line[key]) for line in val],
        }
        charts += _section(title, line_chart({name: points for name, points in series.items() if points}, "epoch"))
    return charts


def _calibration_note(document: dict[str, Any], part: str) -> str:
    error, temperature = document["metrics"][part]["ece"], document["temperature"]
    fitted = f"a temperature of {temperature:.2f} fitted on validation" if temperature != 1 else "no temperature"
    return f'<p class="soft">Confidence is off by {100 * error:.1f} points on average, with {fitted}.</p>'


def _class_table(rows: dict[str, dict[str, float]]) -> str:
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{row['images']:,}</td>"
        + "".join(f"<td>{100 * row[key]:.1f}</td>" for key in ("recall", "precision", "f1"))
        + "</tr>"
        for name, row in rows.items()
    )
    return (
        f"<table><tr><th>class</th><th>images</th><th>recall %</th><th>precision %</th><th>F1 %</th></tr>{body}</table>"
    )


def _mistakes(evaluation: dict[str, Tensor], document: dict[str, Any], data: Data, part: str, count: int = 16) -> str:
    logits, targets = evaluation[f"{part}.logits"].double(), evaluation[f"{part}.targets"]
    confidence, said = (logits / document["temperature"]).softmax(1).max(1)
    wrong = (said != targets).nonzero()[:, 0]
    if not len(wrong):
        return f"<p>None: every image of the {part} part was told right.</p>"
    wrong = wrong[confidence[wrong].argsort(descending=True)][:count]
    labels, figures = document["labels"], []
    for i in wrong.tolist():
        index = int(evaluation[f"{part}.indices"][i])
        picture = _picture(data.images.read(index, "rgb", AtLeast(112, 112)))
        name, truth = html.escape(labels[int(said[i])]), html.escape(labels[int(targets[i])])
        alt = html.escape(data.images.name(index))
        figures.append(
            f'<figure><img src="{picture}" alt="{alt}"><figcaption>said <b>{name}</b> {100 * confidence[i]:.0f} %<br>'
            f"is {truth}</figcaption></figure>"
        )
    return f'<div class="shots">{"".join(figures)}</div>'


def _looks(run: Path, evaluation: dict[str, Tensor], document: dict[str, Any], data: Data, part: str) -> str:
    """The first image of each class, with the patches that speak for the answer."""
    if f"{part}.targets" not in evaluation:
        return ""
    predictor, figures, shown = Predictor(run), [], set()
    for i, label in enumerate(evaluation[f"{part}.targets"].tolist()):
        if label in shown or len(shown) == 8:
            continue
        shown.add(label)
        index = int(evaluation[f"{part}.indices"][i])
        pixels = data.images.read(index, predictor.mode, decode_size(predictor.preprocess))
        made = explain(predictor, pixels, "relevance")
        name = html.escape(made.about)
        figures.append(
            f'<figure><img src="{_data_url(blended(made.image, made.maps[0]))}" alt="{name}">'
            f"<figcaption>{name}<br>is {html.escape(document['labels'][label])}</figcaption></figure>"
        )
    note = "Patches that speak for the answer: gradient times attention, bright for much. vitral explain shows more."
    return f'<div class="shots">{"".join(figures)}</div><p class="soft">{note}</p>'


def _picture(pixels: Tensor) -> str:
    """A thumbnail as a data URL."""
    return _data_url(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))


def _data_url(image: Image.Image) -> str:
    image.thumbnail((112, 112))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _making(document: dict[str, Any]) -> str:
    data = document["data"]
    parts = ", ".join(f"{count:,} {part}" for part, count in data["splits"].items())
    notes = "".join(f"<p>{html.escape(note)}.</p>" for note in data["notes"])
    command = html.escape(document["command"] or "vitral.train(...) from Python")
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    return (
        f"<p>Data: {html.escape(data['name'])} ({parts}), licence: {html.escape(data['licence'])}.</p>{notes}"
        f"<p><code>{command}</code></p><p class=soft>seed {document['seed']}; {html.escape(versions)}</p>"
    )
