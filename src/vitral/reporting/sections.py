"""What a report shows for each task: tables, charts, and pictures of predictions next to the truth."""

import html
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.config import Writing
from vitral.data.images import AtLeast
from vitral.data.sources.base import Data
from vitral.data.targets import Boxes, View
from vitral.data.transforms import normalize
from vitral.display import as_png, png_url
from vitral.errors import CheckpointError
from vitral.explanation.explain import explain
from vitral.explanation.faithfulness import curves
from vitral.explanation.figures import draw
from vitral.explanation.page import picture_url
from vitral.explanation.placement import DEFAULT_STYLE, place
from vitral.explanation.relevance import attribution, grad_cam, input_gradients
from vitral.explanation.writing import align
from vitral.inference.predictor import Predictor
from vitral.models.cost import model_cost
from vitral.models.vit import VisionTransformer
from vitral.reporting.charts import confusion_matrix, histogram, line_chart, reliability_chart, scatter_chart
from vitral.tasks.base import Answer, Task
from vitral.tasks.classify import Classify
from vitral.tasks.drawing import boxed, overlaid
from vitral.tasks.open import load_task
from vitral.tasks.regress import Regress
from vitral.tasks.tag import Tag, join_tags
from vitral.tasks.text_metrics import edit_distance
from vitral.tasks.write import Write
from vitral.weights.files import read_tensors
from vitral.weights.rundir import read_run_config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVALUATION = "evaluation.safetensors"
SHOT, SMALL_SHOT = 448, 112
"""Longest side of a map in the report, shown at half of that on a usual screen; smaller images are enlarged to 112."""
FIGURE_PIXELS = 1e6
"""Pixels of all panels of a figure in the report."""


class Section(NamedTuple):
    """A part of a report, which is drawn when its body is called."""

    title: str
    body: Callable[[], str]
    wide: bool = True
    """Whether it takes the whole width."""


@dataclass(frozen=True)
class Evaluated:
    """What a report shows: the run, its task, the outputs that it kept of its evaluation, the data, and the split."""

    run: Path
    task: Task
    metrics: dict[str, Any]
    """Metrics of the split."""
    evaluation: dict[str, Tensor]
    data: Data
    part: str

    @property
    def labels(self) -> list[str]:
        """Names of classes, or of numbers."""
        return self.task.labels

    def kept(self, name: str) -> Tensor:
        """What the task kept of the split's samples."""
        tensor, indices = (self.evaluation.get(f"{self.part}.{each}") for each in (name, "indices"))
        if tensor is None or indices is None or not tensor.ndim or len(tensor) != len(indices):
            raise CheckpointError(
                f"{self.run / EVALUATION} holds no {self.part}.{name} for each sample; resume the finished run to "
                f"evaluate it again."
            )
        return tensor


def evaluated(run: Path, data: Data, part: str) -> Evaluated:
    """Read what a run kept of its evaluation on a split, and check that it is of these data."""
    config = read_run_config(run)
    task, kept = load_task(config), read_tensors(run / EVALUATION)
    made = Evaluated(run, task, config.measured(task.measures)[part], kept, data, part)
    indices = made.kept("indices")
    if indices.dtype != torch.int64 or not bool(((indices >= 0) & (indices < len(data.inputs))).all()):
        raise CheckpointError(f"{run / EVALUATION} is not of {data.name}: its indices are out of range.")
    return made


def sections(s: Evaluated) -> list[Section]:
    """The sections of the run's task, the quickest first."""
    return SECTIONS[s.task.name](s)


def _classify(s: Evaluated) -> list[Section]:
    confusion = s.metrics["confusion"]
    if any(len(row) != len(s.labels) for row in (confusion, *confusion)):
        raise CheckpointError(f"{s.run}: metrics.{s.part}.confusion must be a row and a column for each label.")
    shown = [
        Section("Calibration", partial(_calibration, s), wide=False),
        Section("By class", partial(_table, s.metrics["by_class"], "class"), wide=False),
        Section("Confusion", partial(confusion_matrix, confusion, s.labels)),
    ]
    if s.data.what == "texts":
        return [*shown, Section("Most confident mistakes", partial(_text_mistakes, s))]
    return [
        *shown,
        Section("Most confident mistakes", partial(_mistakes, s)),
        Section("What it looks at", partial(_looks, s)),
        Section("Is that true to the model?", partial(_faithful, s)),
    ]


def _multilabel(s: Evaluated) -> list[Section]:
    shown = [Section("By label", partial(_table, s.metrics["by_label"], "label"))]
    return shown if s.data.what == "texts" else [*shown, Section("Predictions", partial(_pictures, s, _labels_truth))]


def _regress(s: Evaluated) -> list[Section]:
    task = s.task
    assert isinstance(task, Regress)
    values, targets = task.split(s.kept("outputs").double())[0], s.kept("targets").double()
    shown = [Section("By target", partial(_table, s.metrics["by_target"], "target"))]
    for i, name in enumerate(task.labels):
        pairs = list(zip(targets[:, i].tolist(), values[:, i].tolist(), strict=True))
        errors = [predicted - true for true, predicted in pairs]
        chart = partial(scatter_chart, pairs, f"true {name}", f"predicted {name}")
        shown.append(Section(f"{name}: predicted and true values", chart, wide=False))
        shown.append(Section(f"{name}: errors", partial(histogram, errors, "predicted - true"), wide=False))
    if s.data.what == "texts":
        return shown
    worst = (values - targets).abs().mean(1).argsort(descending=True)[:12]
    return [*shown, Section("Largest errors", partial(_pictures, s, _numbers_truth, worst.tolist()))]


def _segment(s: Evaluated) -> list[Section]:
    return [
        Section("By class", partial(_table, s.metrics["by_class"], "class")),
        Section("Truth (left) and prediction (right)", partial(_pictures, s, mask_truth)),
    ]


def _detect(s: Evaluated) -> list[Section]:
    return [
        Section("By class", partial(_table, s.metrics["by_class"], "class")),
        Section("Truth (left) and prediction (right)", partial(_pictures, s, box_truth)),
    ]


def _caption(s: Evaluated) -> list[Section]:
    worst = [row for row, _, written, true in _written(s)[:12] if written != true]
    return [
        Section("By length, in characters", partial(_table, s.metrics["by_length"], "length"), wide=False),
        Section("Predictions", partial(_pictures, s, _text_truth)),
        Section("Worst predictions", partial(_pictures, s, _text_truth, worst)),
        Section("Where it looks while it writes", partial(_caption_looks, s)),
    ]


def _translate(s: Evaluated) -> list[Section]:
    rows = _written(s)
    some = [row[1:] for row in sorted(rows)[:: max(len(rows) // 12, 1)][:12]]
    worst = [row[1:] for row in rows[:12] if row[2] != row[3]]
    return [
        Section("By length, in characters", partial(_table, s.metrics["by_length"], "length"), wide=False),
        Section("Predictions", partial(_texts, some)),
        Section("Worst predictions", partial(_texts, worst)),
        Section("Where it looks while it writes", partial(_translate_looks, s)),
    ]


def _complete(s: Evaluated) -> list[Section]:
    return [Section("Continuations", partial(_continuations, s))]


def _continuations(s: Evaluated) -> str:
    """The second half of some pieces as the model would have written it."""
    predictor, rows = Predictor(s.run, writing=Writing(max_tokens=60)), []
    different = list(dict.fromkeys(s.data.lines[index] for index in s.kept("indices").tolist()))
    for text in different[-12:]:
        start = text[: text.rfind(" ", 0, len(text) // 2 + 1) + 1] or text[: len(text) // 2]
        rows.append((start, predictor.predict(start)[0].text(), text[len(start) :]))
    return _texts(rows)


def _tag(s: Evaluated) -> list[Section]:
    shown = [Section("By label", partial(_table, s.metrics["by_label"], "label"), wide=False)]
    if "by_entity" in s.metrics:
        shown.append(Section("By entity", partial(_table, s.metrics["by_entity"], "entity"), wide=False))
    return [*shown, Section("Most confident mistakes", partial(_tag_mistakes, s))]


SECTIONS: dict[str, Callable[[Evaluated], list[Section]]] = {
    "classify": _classify,
    "multilabel": _multilabel,
    "regress": _regress,
    "segment": _segment,
    "detect": _detect,
    "caption": _caption,
    "translate": _translate,
    "complete": _complete,
    "tag": _tag,
}

# ---- pictures of answers ----

Truth = Callable[[Evaluated, int, Image.Image], "Image.Image | str"]
"""The truth about an image of the data, as a picture or in words."""


def _target(s: Evaluated, index: int) -> list[float]:
    """The image's target, as the task numbers it."""
    return s.task.targets(s.data).take(index, View.whole(), (1, 1)).tolist()


def _labels_truth(s: Evaluated, index: int, image: Image.Image) -> str:
    labels = s.labels
    return ", ".join(name for name, y in zip(labels, _target(s, index), strict=True) if y > 0.5) or "no label"


def _numbers_truth(s: Evaluated, index: int, image: Image.Image) -> str:
    return "  ".join(f"{value:.4g}" for value in _target(s, index))


def mask_truth(s: Evaluated, index: int, image: Image.Image) -> Image.Image:
    """The image under its true mask."""
    mask = s.task.targets(s.data).take(index, View.whole(), (image.height, image.width))
    return overlaid(image, mask.numpy(), s.labels)


def box_truth(s: Evaluated, index: int, image: Image.Image) -> Image.Image:
    """The image with its true boxes."""
    boxes = s.task.targets(s.data)
    assert isinstance(boxes, Boxes)
    rows = boxes.rows[index]
    corners = rows[:, 1:] * rows.new_tensor([image.width, image.height] * 2)
    numbers = [int(k) for k in rows[:, 0].tolist()]
    return boxed(image, corners.tolist(), [s.labels[k] for k in numbers], numbers)


def _pictures(s: Evaluated, truth: Truth, rows: list[int] | None = None, count: int = 12) -> str:
    """Some images of the split, evenly spread, or chosen rows of it, with prediction and truth."""
    predictor, figures = Predictor(s.run), []
    total = len(s.kept("indices"))
    for i in rows if rows is not None else (k * total // count for k in range(min(count, total))):
        index = int(s.kept("indices")[i])
        pixels = s.data.images.read(index, predictor.mode)
        answer: Answer = predictor.predict(pixels)[0]
        image = Image.fromarray(np.ascontiguousarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()))
        true = truth(s, index, image)
        alt, told = html.escape(s.data.images.name(index)), html.escape(_short(answer.text()))
        if isinstance(true, str):
            line = image.width > 2 * image.height
            figures.append(
                f'<figure{" class=line" * line}><img src="{_datapng_url(image, 232 if line else 112)}" alt="{alt}">'
                f"<figcaption>predicted {told}<br>actual {html.escape(true)}</figcaption></figure>"
            )
        else:
            pair = "".join(
                f'<img src="{_datapng_url(picture, 320)}" alt="{what} of {alt}"> '
                for picture, what in ((true, "truth"), (answer.draw(image), "answer"))
            )
            figures.append(f'<figure class="pair">{pair}<figcaption>{told}</figcaption></figure>')
    return f'<div class="shots">{"".join(figures)}</div>'


def _short(text: str, most: int = 60) -> str:
    """A text that fits, cut between two answers, two words, or wherever."""
    start = text[: most - 2]
    cut = start.rpartition("  ")[0] or start.rpartition(" ")[0] or start
    return text if len(text) <= most else f"{cut} ..."


# ---- texts ----


def _text_truth(s: Evaluated, index: int, image: Image.Image) -> str:
    assert s.data.texts is not None
    return s.data.texts[index]


def _written(s: Evaluated) -> list[tuple[int, str, str, str]]:
    """Row, what was read, written, and should have been written, for all that the task kept; the worst first."""
    assert isinstance(s.task, Write)
    assert s.data.texts is not None
    tokenizer = s.task.tokenizer
    rows = []
    for row, (index, tokens) in enumerate(zip(s.kept("indices").tolist(), s.kept("said").tolist(), strict=True)):
        rows.append((row, s.data.inputs.name(index), tokenizer.decode(tokens), s.data.texts[index]))
    return sorted(rows, key=lambda r: edit_distance(r[2], r[3]) / max(len(r[3]), 1), reverse=True)


def _middle(s: Evaluated) -> int:
    """The number of an input of middling length."""
    return int(s.kept("indices")[len(s.kept("indices")) * 2 // 3])


def _caption_looks(s: Evaluated) -> str:
    predictor = Predictor(s.run)
    made = explain(predictor, s.data.images.read(_middle(s), predictor.mode), "writing")
    return _figure(draw(made, pixels=FIGURE_PIXELS), made.caption, "figure")


def _translate_looks(s: Evaluated) -> str:
    made = align(Predictor(s.run), s.data.lines[_middle(s)])
    return _figure(made.figure(), made.about)


def _figure(figure: "Figure", about: str, dpi: float | Literal["figure"] = 90) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return figure_tag(buffer.getvalue(), about)


def figure_tag(png: bytes, about: str) -> str:
    """A picture in the page, as wide as it is or as there is room for."""
    return f'<img class="figure" src="{png_url(png)}" alt="{html.escape(about)}">'


def _texts(rows: Sequence[Sequence[str]]) -> str:
    """What was read, what was written, and what should have been."""
    body = "".join(
        f"<tr><td>{html.escape(read)}</td><td>{html.escape(said)}</td>"
        f"<td>{'<span class=soft>the same</span>' if said == true else html.escape(true)}</td></tr>"
        for read, said, true in rows
    )
    return f'<table class="texts"><tr><th>input</th><th>prediction</th><th>truth</th></tr>{body}</table>'


def _text_mistakes(s: Evaluated, count: int = 16) -> str:
    """Texts under wrong classes."""
    labels, rows = s.labels, []
    for i, said, confidence in _confident_mistakes(s)[:count]:
        true = labels[int(s.kept("targets")[i])]
        rows.append((s.data.lines[int(s.kept("indices")[i])], f"{labels[said]} {100 * confidence:.0f} %", true))
    return _texts(rows) if rows else f"<p>None: every text of the {s.part} split was classified correctly.</p>"


def _tag_mistakes(s: Evaluated, count: int = 16) -> str:
    """Texts with their wrong words, those with the most confident mistake first."""
    said, true, sure = s.kept("said"), s.kept("true"), s.kept("sure")
    worst = torch.where(said != true, sure, 0).amax(1)
    assert isinstance(s.task, Tag)
    names = s.task.names
    rows = []
    for i in worst.argsort(descending=True)[: min(count, int((worst > 0).sum()))].tolist():
        words = s.data.lines[int(s.kept("indices")[i])].split()
        told, should = names(said[i : i + 1])[0], names(true[i : i + 1])[0]
        wrong = [k for k in range(len(words)) if told[k] != should[k]]
        shown = [join_tags([words[k] for k in wrong], [tags[k] for k in wrong]) for tags in (told, should)]
        rows.append((" ".join(words), *shown))
    return _texts(rows) if rows else f"<p>None: every word of the {s.part} split was tagged correctly.</p>"


# ---- classification ----


def _calibration(s: Evaluated) -> str:
    assert isinstance(s.task, Classify)
    error, temperature = s.metrics["ece"], s.task.temperature
    fitted = f"a temperature of {temperature:.2f} fitted on validation" if temperature != 1 else "no temperature"
    note = f'<p class="soft">Confidence is off by {100 * error:.1f} points on average, with {fitted}.</p>'
    return reliability_chart(s.metrics["calibration"]) + note


def _table(rows: dict[str, dict[str, float]], what: str) -> str:
    """One row a class, label or target; shares in percent."""
    columns = list(next(iter(rows.values()), {}))
    heads = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in [what, *columns])
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{_cell(row.get(key))}</td>' for key in columns)}</tr>"
        for name, row in rows.items()
    )
    return f"<table><tr>{heads}</tr>{body}</table>"


def _cell(value: float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"


def _confident_mistakes(s: Evaluated) -> list[tuple[int, int, float]]:
    """Row, predicted class and confidence of mistakes, the most confident first."""
    assert isinstance(s.task, Classify)
    logits, targets = s.kept("logits").double(), s.kept("targets")
    confidence, said = (logits / s.task.temperature).softmax(1).max(1)
    wrong = (said != targets).nonzero()[:, 0]
    wrong = wrong[confidence[wrong].argsort(descending=True)].tolist()
    return [(i, int(said[i]), float(confidence[i])) for i in wrong]


def _mistakes(s: Evaluated, count: int = 16) -> str:
    labels, figures = s.labels, []
    for i, said, confidence in _confident_mistakes(s)[:count]:
        index = int(s.kept("indices")[i])
        picture = _picture(s.data.images.read(index, "rgb", AtLeast(112, 112)))
        name, truth = html.escape(labels[said]), html.escape(labels[int(s.kept("targets")[i])])
        alt = html.escape(s.data.images.name(index))
        figures.append(
            f'<figure><img src="{picture}" alt="{alt}"><figcaption>predicted <b>{name}</b> {100 * confidence:.0f} %<br>'
            f"actual {truth}</figcaption></figure>"
        )
    if not figures:
        return f"<p>None: every image of the {s.part} split was classified correctly.</p>"
    return f'<div class="shots">{"".join(figures)}</div>'


def _shown_images(s: Evaluated) -> list[tuple[int, int]]:
    """The first image of each class, and its class, at most eight."""
    first: dict[int, int] = {}
    for index, label in zip(s.kept("indices").tolist(), s.kept("targets").tolist(), strict=True):
        if len(first) < 8:
            first.setdefault(label, index)
    return [(index, label) for label, index in first.items()]


def _looks(s: Evaluated) -> str:
    """The first image of each class, with the patches that support the prediction."""
    predictor, figures = Predictor(s.run), []
    method = "relevance" if isinstance(predictor.backbone, VisionTransformer) else "gradcam"
    for index, label in _shown_images(s):
        made = explain(predictor, s.data.images.read(index, predictor.mode), method)
        placed = place(made, SHOT, (SMALL_SHOT, SMALL_SHOT))
        picture = placed.outlined(placed.blend(made.maps[0], DEFAULT_STYLE))
        photo = " class=photo" * (max(picture.size) > 2 * SMALL_SHOT)
        name = html.escape(made.about)
        figures.append(
            f'<figure{photo}><img src="{picture_url(picture)}" alt="{name}"><figcaption>predicted {name}<br>'
            f"actual {html.escape(s.labels[label])}</figcaption></figure>"
        )
    how = {"relevance": "gradient times attention", "gradcam": "Grad-CAM on the last map"}[method]
    note = (
        f"Patches that support the prediction, the brighter the more: {how}. An outline marks the part of the image "
        f"that the model was given. <code>vitral explain</code> draws more maps."
    )
    return f'<div class="shots">{"".join(figures)}</div><p class="soft">{note}</p>'


def _faithful(s: Evaluated) -> str:
    """How the answer comes back as images are uncovered on blurred ones, in the order of the maps.

    The first images of the part, as many as a few seconds allow.
    """
    predictor = Predictor(s.run)
    count = int(max(4, min(64, 4e9 // model_cost(predictor.backbone.config).macs)))
    chosen = s.kept("indices")[:count].tolist()
    pixels = [predictor.prepare(s.data.images.read(index, predictor.mode)) for index in chosen]
    x = normalize(torch.stack(pixels), predictor.preprocess)
    target = predictor.outputs(x).argmax(1)
    model = predictor.backbone
    if isinstance(model, VisionTransformer):
        speaks = {"relevance": attribution(model, x, target)}
    else:
        speaks = {"Grad-CAM": grad_cam(model, x, target)}
    rivals = {
        **speaks,
        "input gradients": input_gradients(model, x, target),
        "chance": torch.rand(len(x), *model.grid_of(x), generator=torch.Generator().manual_seed(0)),
    }
    series, areas = {}, []
    for name, maps in rivals.items():
        measured = curves(model, x, maps, target)
        heights = measured.insertion.mean(0).tolist()
        series[name] = [(100 * i / (len(heights) - 1), height) for i, height in enumerate(heights)]
        areas.append(f"{name} {float(measured.insertion_auc.mean()):.3f}")
    note = (
        f"Probability of the answer as the most relevant patches are uncovered first, mean of {len(x)} images. "
        f"Area under the curve: {', '.join(areas)}; more is better."
    )
    chart = f'<div style="max-width: 560px">{line_chart(series, "% of patches uncovered")}</div>'
    return f'{chart}<p class="soft">{html.escape(note)}</p>'


def _picture(pixels: Tensor) -> str:
    """A thumbnail as a data URL."""
    return _datapng_url(Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()))


def _datapng_url(image: Image.Image, side: int = 112) -> str:
    image.thumbnail((side, side))
    return png_url(as_png(image))
