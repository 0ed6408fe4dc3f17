"""Pictures of a model that learns without labels, and report.html of such a run."""

import copy
import html
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vitral.data.transforms import normalize
from vitral.explanation.explain import explain
from vitral.explanation.placement import DEFAULT_STYLE, as_picture, place
from vitral.inference.predictor import Predictor
from vitral.reporting.charts import line_chart
from vitral.reporting.html import making, page, section
from vitral.reporting.sections import figure_tag
from vitral.tasks.method import Method
from vitral.training.log import read_metrics
from vitral.weights.atomic import write_atomically
from vitral.weights.rundir import REPORT, read_run_config

PICTURES = 8
"""Images whose attention or reconstruction is drawn."""
HEADS = 6
"""Heads that are drawn apart, at most."""
LAST = "last.png"
_PICTURE = re.compile(r"last\.png|epoch-[0-9]{4,9}\.png")
GAP = 4
CHARTS = {
    "loss": "loss",
    "knn": "k-NN accuracy on images kept apart",
    "teacher_entropy": "entropy of the teacher's answers, in nats",
    "teacher_information": "what the teacher's answers tell about the image, in nats",
    "feature_rank": "effective rank of the features",
    "feature_std": "spread of the features, 1 if even",
}


def draw_progress(method: Method, images: Sequence[Tensor], folder: Path, epoch: int) -> None:
    """Write what the method shows of images (C, H, W), after so many epochs; -1 stands for the end of the run."""
    vit = copy.deepcopy(method.backbone).cpu().eval()
    predictor = Predictor(vit)
    prepared = [predictor.prepare(image) for image in images]
    rows = [_attention_row(predictor, x) for x in prepared]
    device = next(method.model.parameters()).device
    x = normalize(torch.stack(prepared), predictor.preprocess).to(device)
    made = [_large(picture) for picture in method.pictures(x)]
    name = LAST if epoch < 0 else f"epoch-{epoch:04d}.png"
    _save(rows, folder / "attention" / name)
    if made:
        _save([[picture] for picture in made], folder / method.name / name, columns=2)


def _attention_row(predictor: Predictor, image: Tensor) -> list[Image.Image]:
    """An image, the mean of the last block's heads on it, and some heads one by one."""
    shown = explain(predictor, image)
    maps = [shown.maps[0], *shown.maps[2 : 2 + HEADS]]  # the second is their maximum
    placed = place(shown, least=(112, 112))
    pictures = [as_picture(placed.picture), *(placed.blend(map_, DEFAULT_STYLE) for map_ in maps)]
    return [Image.fromarray(picture) for picture in pictures]


def _large(picture: Image.Image, least: int = 112) -> Image.Image:
    """At least so many pixels high, by whole factors."""
    factor = max(1, -(-least // picture.height))
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _save(rows: list[list[Image.Image]], path: Path, columns: int = 1) -> None:
    """Rows of pictures as one, several rows side by side."""
    lines = [[picture for row in rows[i : i + columns] for picture in row] for i in range(0, len(rows), columns)]
    width, height = rows[0][0].width, rows[0][0].height
    sheet = Image.new(
        "RGB", (max(map(len, lines)) * (width + GAP) - GAP, len(lines) * (height + GAP) - GAP), (128, 128, 128)
    )
    for i, line in enumerate(lines):
        for k, picture in enumerate(line):
            sheet.paste(picture, (k * (width + GAP), i * (height + GAP)))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)


def write_pretraining_report(run: Path) -> Path:
    """Write report.html from the files of a run directory."""
    config = read_run_config(run)
    made, signals = config.history, config.measured(dict[str, float]).get("val", {})
    title = f"{made.model_name} on {made.data.name}, without labels"
    parts = [_summary(signals, made.trouble), *_charts(read_metrics(run)), *_pictures(run, made.method)]
    parts.append(section("How to go on", _next(run), wide=True))
    parts.append(section("How it was made", making(made), wide=True))
    about = f"A Vision Transformer that learned to {made.what}, with vitral {made.vitral}"
    path = run / REPORT
    write_atomically(path, page(title, about, parts).encode(errors="replace"))
    return path


def _summary(signals: dict[str, float], trouble: str) -> str:
    facts = [
        f'<div><div class="big">{_value(name, signals[name])}</div><div>{html.escape(words)}</div></div>'
        for name, words in CHARTS.items()
        if name in signals and name in ("knn", "feature_rank", "feature_std", "loss")
    ]
    health = f"<p><b>{html.escape(trouble)}</b></p>" if trouble else "<p>No sign of collapse at the end of the run.</p>"
    return f'<section class="wide"><div class="facts">{"".join(facts)}</div>{health}</section>'


def _value(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if name == "knn" else f"{value:.4g}"


def _charts(lines: list[dict[str, Any]]) -> list[str]:
    charts = []
    for name, words in CHARTS.items():
        series = {
            title: points
            for title, part in (("training", "train"), ("kept apart", "val"))
            if (points := [(line["epoch"], line[name]) for line in lines if line["split"] == part and name in line])
        }
        if series:
            charts.append(section(words[0].upper() + words[1:], line_chart(series, "epoch")))
    return charts


def _pictures(run: Path, method: str) -> list[str]:
    """The first and the last picture of each kind."""
    kinds = {
        "attention": "What it looks at: image, mean of the last block's heads, heads apart",
        "mae": "What it fills in: image, what it saw, what it made of that",
    }
    shown = []
    for kind in (kind for kind in kinds if kind in ("attention", method)):
        files = sorted(file for file in (run / "pictures" / kind).glob("*.png") if _PICTURE.fullmatch(file.name))
        for file in dict.fromkeys([*files[:1], *files[-1:]]):
            when = "at the end" if file.name == LAST else f"after epoch {int(file.stem.removeprefix('epoch-'))}"
            shown.append(section(f"{kinds[kind]} ({when})", figure_tag(file.read_bytes(), kinds[kind]), wide=True))
    return shown


def _next(run: Path) -> str:
    commands = (
        f"vitral eval {run} DATA --probe knn",
        f"vitral train DATA --model {run} --preset full --out runs/finetuned",
        f"vitral explain {run} image.png --out image.html",
    )
    return "".join(f"<p><code>{html.escape(command)}</code></p>" for command in commands)
