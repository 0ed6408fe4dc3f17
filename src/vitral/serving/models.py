"""Models by name, each with a thread of its own, and the questions that one can be asked."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.config import Serving, pair
from vitral.data.images import ImageLimits
from vitral.data.inputs import ImageInputs
from vitral.errors import InputError, UnreachableError, VitralError, unknown_name
from vitral.explanation.explain import Explanation, Shown, check_takes, explain, methods_of
from vitral.explanation.page import are_vast
from vitral.inference.predictor import Predictor, Ready
from vitral.models.backbone import Backbone
from vitral.models.vit import VisionTransformer
from vitral.serving.batching import Batcher
from vitral.serving.logs import Metrics, log
from vitral.tasks.base import Answer
from vitral.tasks.write import Writes

INDEX = "index"
"""What the index is called, in answers and numbers."""
LEFT_OUT = ("occlusion", "merging")
"""Ways to explain that would keep others waiting, or that make a model of their own."""


@dataclass(frozen=True)
class Predict:
    """What does the model say?"""

    top_k: int = field(compare=False)  # whoever asks for more or fewer labels may go in the same batch

    def prepare(self, predictor: Predictor, item: bytes | str) -> tuple[Ready, int]:
        """What can be done outside of the model's thread."""
        return predictor.ready(item, item if isinstance(item, str) else predictor.inputs.what), self.top_k

    def run(self, predictor: Predictor, items: list[tuple[Ready, int]]) -> list[Answer]:
        """An answer for each."""
        ready, counts = zip(*items, strict=True)
        return [answer.cut(k) for answer, k in zip(predictor.answer(ready, max(counts)), counts, strict=True)]


@dataclass(frozen=True)
class Embed:
    """What does its head receive?"""

    def prepare(self, predictor: Predictor, item: bytes | str) -> Ready:
        """What can be done outside of the model's thread."""
        return predictor.ready(item, predictor.inputs.what)

    def run(self, predictor: Predictor, items: list[Ready]) -> list[Tensor]:
        """A vector for each."""
        return list(predictor.vectors([item.x for item in items]))


@dataclass(frozen=True)
class Explain:
    """What does it look at?"""

    method: str
    layer: int | None
    head: int | None
    target: str | None
    patch: tuple[int, int] | None
    rows: bool

    @property
    def asked(self) -> dict[str, Any]:
        """What only some methods take."""
        return {"layer": self.layer, "head": self.head, "target": self.target, "patch": self.patch}

    def prepare(self, predictor: Predictor, item: bytes) -> Shown:
        """Read the image; this does not need the model's thread. The client draws on its own copy of the original."""
        check_takes(self.method, self.asked, {"target": "class"})
        return Shown.to(predictor, item, original=False)

    def run(self, predictor: Predictor, items: list[Shown]) -> list[Explanation | VitralError]:
        """An explanation for each, one after the other."""
        return [self._explain(predictor, item) for item in items]

    def _explain(self, predictor: Predictor, item: Shown) -> Explanation | VitralError:
        rows = self.rows and self.method == "attention" and _are_few(predictor.backbone)
        try:
            return explain(predictor, item, self.method, **self.asked, interactive=rows)
        except VitralError as error:
            return error


def _are_few(model: Backbone) -> bool:
    """Whether all attention rows of a model are few enough to be sent; else each block and patch is asked for."""
    return isinstance(model, VisionTransformer) and not are_vast(model, model.config.grid)


@dataclass(frozen=True)
class Search:
    """What is like it in the index?"""

    top_k: int = field(compare=False)

    def prepare(self, index: Any, item: bytes | str) -> tuple[Ready, int]:
        """The image or text as the model of the index is fed it."""
        return index.predictor.ready(item, index.predictor.inputs.what), self.top_k

    def run(self, index: Any, items: list[tuple[Ready, int]]) -> list[Any]:
        """The nearest of each."""
        ready, counts = zip(*items, strict=True)
        vectors = index.predictor.vectors([item.x for item in ready])
        try:
            return [some[:k] for some, k in zip(index.search_vectors(vectors, max(counts)), counts, strict=True)]
        except UnreachableError as error:  # none of them can be found: no need to try each alone
            return [error] * len(items)


class Served:
    """A model, or an index, that questions are put to."""

    def __init__(self, name: str, subject: Any, options: Serving, metrics: Metrics) -> None:
        self.name, self.subject = name, subject
        self.predictor: Predictor = subject if isinstance(subject, Predictor) else subject.predictor
        if isinstance(self.predictor.inputs, ImageInputs):
            most_bytes = int(options.max_body_mb * 2**20)
            self.predictor.inputs.limits = ImageLimits(max_bytes=most_bytes, max_pixels=options.max_pixels)
        self.batcher = Batcher(
            lambda question, items: question.run(subject, items), options, metrics.batches_of(name),
            alone=lambda question: isinstance(question, Explain),
        )  # fmt: skip

    def warm_up(self) -> None:
        """Look at blank images, one alone and one for each core: nobody waits for what an engine compiles then."""
        predictor = self.predictor
        if not isinstance(predictor.inputs, ImageInputs) or isinstance(predictor.task, Writes):
            return
        blank = torch.zeros(len(predictor.preprocess.mean), *pair(predictor.preprocess.img_size), dtype=torch.uint8)
        try:
            for number in (1, torch.get_num_threads()):
                several = [blank] * number
                if self.subject is predictor:
                    predictor.logits(predictor.inputs.normal(predictor.inputs.stack(several)))
                else:
                    predictor.vectors(several)
        except Exception as error:  # other images may pass, and other models do: no reason not to start
            log("warm_up_failed", model=self.name, fault=f"{type(error).__name__}: {error}")

    def methods(self) -> list[str]:
        """Ways to explain what it does with an image."""
        return [name for name in methods_of(self.predictor) if name not in LEFT_OUT]


def name_sources(sources: Sequence[str], taken: Sequence[str] = ()) -> dict[str, str]:
    """Names and sources, from NAME=SOURCE or a source alone, whose name is that of its folder or file."""
    named: dict[str, str] = {}
    for source in sources:
        name, equals, rest = source.partition("=")
        if not equals or Path(source).exists():
            stem = Path(source.rstrip("/")).name
            name, rest = (stem if Path(source).is_dir() else stem.split(".")[0]), source
        if not re.fullmatch(r"[\w.-]{1,64}", name):
            raise InputError(
                f"{name!r} cannot be the name of a model: letters, digits, _, . and - only; give NAME={rest}."
            )
        if name in taken:
            raise InputError(f"{name} is what the index is called; give the model another name: NAME={rest}.")
        if name in named:
            raise InputError(f"two models are called {name}; give one another name: NAME={rest}.")
        named[name] = rest
    return named


def find(models: dict[str, Served], name: str) -> Served:
    """The model of that name, or the first if none is named."""
    if name and name not in models:
        raise unknown_name("model", name, models)
    return models[name] if name else next(iter(models.values()))
