"""Captions of explanations: the part of the image that was used, the prediction, and the class that was explained."""

from collections.abc import Callable
from math import log
from typing import Any

from torch import Tensor

from vitral.config import Preprocess, pair
from vitral.data.targets import View
from vitral.data.transforms import eval_view
from vitral.explanation.relevance import select
from vitral.inference.predictor import Predictor
from vitral.tasks.base import Frame
from vitral.tasks.classify import Classify
from vitral.tasks.write import Writes

Chosen = int | Callable[[Tensor], Tensor] | None
"""A class, a function of the output, or None for the most likely class."""


def prediction(predictor: Predictor, x: Tensor, chosen: Chosen, by_class: bool) -> dict[str, Any]:
    """Fields `about`, `answer`, `label` and `probability` of an explanation of the `chosen` class."""
    labels = predictor.labels
    if not (labels or callable(chosen) or isinstance(predictor.task, Writes)):
        return {}
    outputs = predictor.outputs(x)
    if callable(chosen):
        return {"about": f"your function, {float(select(outputs, chosen)):.4g}"}
    if not isinstance(predictor.task, Classify):
        frame = Frame("", (x.shape[2], x.shape[3]), View.whole())
        answer = next(predictor.task.decode(outputs, [frame], 1)).text()
        if not by_class:
            return {"about": f"prediction: {answer}", "answer": answer}
        label = labels[int(outputs[0, : len(labels)].argmax()) if chosen is None else chosen]
        return {"about": f"{label}; prediction: {answer}", "answer": answer, "label": label}
    probabilities = (outputs[0].double() / predictor.task.temperature).softmax(0).tolist()
    best = max(range(len(labels)), key=probabilities.__getitem__)
    answer = f"{labels[best]}, {_percent(probabilities[best])}"
    if not by_class:
        return {"about": f"prediction: {answer}", "answer": answer}
    number = best if chosen is None else chosen
    label, p = labels[number], probabilities[number]
    name = f"class {label}" if label.isdigit() else label
    about = f"{name}, {_percent(p)}" if number == best else f"{name} ({_percent(p)}; prediction: {answer})"
    return {"about": about, "answer": answer, "label": label, "probability": p}


def _percent(p: float) -> str:
    return f"{100 * p:.1f} %"


def part_shown(size: tuple[int, int], p: Preprocess) -> str:
    """The part of an image of `size` that is fed to the model, in words (width x height)."""
    H, W = size
    height, width = pair(p.img_size)
    view = eval_view(size, p)
    h, w = view.height * H, view.width * W
    if p.crop_mode == "pad":
        return f"all of {W} x {H}" + ", padded" * ((round(h), round(w)) != size)
    squash = p.crop_mode.startswith("squash")
    if not squash:  # the longer side is rounded down by less than a pixel, and therefore stretched slightly
        h, w = min(h, w * height / width), min(w, h * width / height)
    h, w = max(1, round(h)), max(1, round(w))
    text = f"all of {W} x {H}" if (h, w) == size else f"the middle {w} x {h} of {W} x {H}"
    squeezed = squash and abs(log(w / h * height / width)) > 0.02
    return text + f", squeezed to {width} x {height}" * squeezed
