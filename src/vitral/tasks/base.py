"""What a task is to the loop, the predictor and the report: none of them knows any task by name."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from PIL import Image
from torch import Tensor, nn

from vitral.config import BackboneConfig, Preprocess, TextConfig, TextPool, TrainConfig
from vitral.data.noise import Noise
from vitral.data.sources.base import Data
from vitral.data.targets import Targets, View
from vitral.data.tokenizer import Tokenizer, tokenizer_from_dict
from vitral.display import Table, Tabular, drawn_html, html_table, short, short_list
from vitral.models.backbone import Backbone
from vitral.tasks.objective import Objective
from vitral.weights.rundir import Baselines, Described, Finding, naming

Found = dict[str, Tensor]
"""What is kept of a model's outputs to judge them by, with the targets: the first axis of each counts images."""
Trivial = Callable[[Found], Found | None]
"""A predictor that does not learn: given what was found on a split (for its targets), returns what this predictor would
have found; None if it cannot be compared there."""
ENOUGH = 3
"""Samples of a class in a split from which on it is a finding that the class is never predicted."""


def map_tensors(function: Callable[..., Tensor], *outputs: Any) -> Any:
    """Apply a function to every tensor of what a model gives: one, or lists, tuples and dataclasses of such.

    Several outputs of the same form are gone through together, and the function is given a tensor of each.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return function(*outputs)
    if isinstance(first, list | tuple):
        return type(first)(map_tensors(function, *parts) for parts in zip(*outputs, strict=True))
    if not is_dataclass(first) or isinstance(first, type):
        assert len(outputs) == 1, f"what is no tensor, {type(first).__name__}, has no part in others"
        return first
    named = {f.name: [getattr(each, f.name) for each in outputs] for f in fields(first)}
    return replace(first, **{name: map_tensors(function, *parts) for name, parts in named.items()})


def rest_pooling(backbone: Backbone) -> None:
    """Nothing reads the pooled vector: its weights, where there are any, are not trained."""
    for part in backbone.unused_without_pooling():
        part.requires_grad_(False)


@dataclass(frozen=True)
class Frame:
    """One image or text that was fed: its name, its size, and the part of it that the model saw."""

    name: str
    size: tuple[int, int]
    view: View
    note: str = ""
    """What one should know about how it was read."""


@dataclass(frozen=True, repr=False)
class Answer(Tabular):
    """The answer for one image or text, or the reason why there is none."""

    name: str
    error: str = ""
    note: str = field(default="", kw_only=True)
    """A remark on the answer, for the user."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of a table of answers, after the name of the input."""
    formats: ClassVar[tuple[str, ...]] = ()
    """How a value of each column is written, as of `format`."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}: {short(self.error or self.text())})"

    def _repr_html_(self) -> str:
        if self.error:
            return html_table(("name", "error"), [(self.name, self.error)])
        return drawn_html(self.name, self.draw) + html_table(self.columns, self.records(), short(self.name))

    def table(self) -> Table:
        """The name of the input and the values; one row without values if there is an error."""
        rows = [] if self.error else self.records()
        return ("name", *self.columns), [[self.name, *row] for row in rows or [[None] * len(self.columns)]]

    def to_dict(self, what: str = "image") -> dict[str, Any]:
        """As plain values; `what` is the word for what was fed."""
        if self.error:
            return {what: self.name, "error": self.error}
        return {what: self.name, **self.content(), **({"note": self.note} if self.note else {})}

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """The answer itself as plain values."""

    def cut(self, top_k: int) -> Self:
        """The same with only its `top_k` likeliest labels, if the answer is a ranking of labels."""
        return self

    @abstractmethod
    def text(self) -> str:
        """The answer in a line."""

    @abstractmethod
    def records(self) -> list[list[Any]]:
        """The answer as rows of plain values, under `columns`."""

    def rows(self) -> list[list[str]]:
        """The same as text, in the formats of the columns."""
        return [
            ["" if value is None else format(value, spec) for value, spec in zip(row, self.formats, strict=True)]
            for row in self.records()
        ]

    @abstractmethod
    def draw(self, image: Image.Image) -> Image.Image:
        """The image with the answer on it."""

    def pictures(self, image: Image.Image) -> dict[str, Image.Image]:
        """Pictures to write of the answer, by the ends of their names."""
        return {".png": self.draw(image)}


class Answers(list[Any], Tabular):
    """Answers for several inputs: a list, and one table."""

    FEW: ClassVar[int] = 6
    """Answers that a notebook shows one by one, with their pictures; of more it shows the table."""

    def __repr__(self) -> str:
        return short_list(self)

    def table(self) -> Table:
        """The rows of all answers."""
        tables = [answer.table() for answer in self]
        return tables[0][0] if tables else ("name",), [row for _, rows in tables for row in rows]

    def _repr_html_(self) -> str:
        return "".join(answer._repr_html_() for answer in self) if len(self) <= self.FEW else super()._repr_html_()


class Task(Objective):
    """Head, targets, loss, metrics and decoding of one task."""

    name: ClassVar[str]
    answer: ClassVar[type[Answer]]
    headline: ClassVar[str]
    """The metric that is shown first."""
    headline_words: ClassVar[str]
    what: ClassVar[str]
    """What a model does, after "A Vision Transformer that", for {n} labels."""
    measures: ClassVar[Any]
    """The type hint that the metrics of a run must conform to: what summaries, reports and comparisons read."""
    compared: ClassVar[Mapping[str, str]] = {}
    """Metrics that baselines are compared by, with their formats; % is a percentage, and `better` one of them."""
    least_gain: ClassVar[float] = 0.0
    """Advantage over a baseline, in the metric `better`, up to which a model is not better than the baseline."""
    missing_words: ClassVar[str] = "classes that are never predicted"
    balance: ClassVar[str] = ""
    """Options that give rare classes more weight, if there are any."""
    pool: ClassVar[TextPool] = "cls"
    """What the head of a text encoder reads."""

    labels: list[str]
    """Names of classes, or of numbers."""
    notes: Sequence[str] = ()
    """What was decided on the way, to be said to the user."""

    @classmethod
    @abstractmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The task as the training data states it."""

    @classmethod
    @abstractmethod
    def from_run(cls, about: Described) -> Self:
        """The task of a run or of an exported file, from what it records."""

    def fits(self, about: Described) -> bool:
        """Whether the model of a run gives what this task reads."""
        c = about.model
        if isinstance(c, TextConfig):
            right = about.architecture == "text_encoder" and (c.pool == "tokens") == (self.pool == "tokens")
            return right and c.num_classes == self.outputs
        return isinstance(c, BackboneConfig) and c.num_classes == self.outputs

    @property
    def outputs(self) -> int:
        """Outputs of a backbone's own head; 0 where the task brings a head along."""
        return len(self.labels)

    def usable(self, data: Data) -> Data:
        """The data without what the task cannot use."""
        return data

    @abstractmethod
    def targets(self, data: Data) -> Targets:
        """The targets of a data set, numbered as this task numbers them."""

    def build(self, backbone: Any) -> nn.Module:
        """The model, around a backbone or an encoder of texts that has `outputs` outputs."""
        return backbone

    def preprocess(self, p: Preprocess) -> Preprocess:
        """What is done to images, starting from what the backbone is used to."""
        return p

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor, noise: Noise) -> Any:
        """Outputs in training; a task may show the model more than the inputs."""
        return model(inputs)

    def run(self, model: nn.Module, inputs: Tensor, targets: Tensor | None = None) -> Any:
        """Outputs for inputs that are not trained on; targets are given where the outputs are to be judged."""
        return model(inputs)

    @abstractmethod
    def found(self, outputs: Any, targets: Tensor) -> Found:
        """What to keep of a batch for `metrics`."""

    @abstractmethod
    def metrics(self, found: Found) -> dict[str, Any]:
        """How good the answers are; the plain numbers among them are logged during training."""

    def calibrate(self, found: Found) -> None:
        """Settle on validation data what training leaves open, if there is anything."""

    def settings(self) -> dict[str, Any]:
        """What `from_run` needs besides the labels."""
        return {}

    @abstractmethod
    def summary(self, metrics: dict[str, Any]) -> str:
        """The metrics in a line."""

    def baseline(self, data: Data) -> dict[str, Trivial]:
        """Trivial predictors by name, fitted on the training split; none if the task has no such predictor."""
        return {}

    def baselines(self, data: Data, splits: Mapping[str, Found]) -> dict[str, Baselines]:
        """The metrics of each trivial predictor on splits of the data, of which the outputs of a model are given."""
        rows: dict[str, Baselines] = {split: {} for split in splits}
        for name, predict in self.baseline(data).items():
            for split, found in splits.items():
                if (trivial := predict(found)) is not None:
                    metrics = self.metrics(trivial)
                    rows[split][name] = {key: metrics[key] for key in self.compared}
        return {split: row for split, row in rows.items() if row}

    @property
    def score_words(self) -> str:
        """The metric `better` in words."""
        return self.headline_words if self.better == self.headline else self.better.upper()

    def baseline_summary(self, baselines: Baselines) -> str:
        """The baselines of a split in a line; empty if there are none."""
        rows = [f"{name} {self._compared_text(metrics)}" for name, metrics in baselines.items()]
        return f"baseline: {', '.join(rows)}" if rows else ""

    def _compared_text(self, metrics: Mapping[str, float]) -> str:
        shown = [
            form.replace("%", f"{100 * metrics[key]:.1f} %").format(metrics[key])
            for key, form in self.compared.items()
            if key in metrics
        ]
        return " and ".join(shown)

    def diagnose(self, metrics: dict[str, Any], baselines: Baselines, config: TrainConfig) -> list[Finding]:
        """What is wrong with the predictions on a split; a remedy is the options to change in the next run."""
        findings = []
        reached = {name: row[self.better] for name, row in baselines.items() if self.better in row}
        best = max(reached, key=lambda name: reached[name], default=None)
        if best is not None and metrics[self.better] <= reached[best] + self.least_gain:
            own, other = self._compared_text(metrics), self._compared_text(baselines[best])
            findings.append(
                Finding(
                    problem="not better than a baseline",
                    evidence=f"the model reaches {own}, {best} {other}",
                    remedy=f"--model auto {longer(config, 4)}",
                )
            )
        if missed := self.never_predicted(metrics):
            names = ", ".join(missed[:8]) + (" ..." if len(missed) > 8 else "")
            findings.append(
                Finding(
                    problem=self.missing_words,
                    evidence=f"{len(missed)} of {len(self.labels)} ({names})",
                    remedy=self.balance or longer(config),
                )
            )
        return findings

    def never_predicted(self, metrics: dict[str, Any]) -> list[str]:
        """Labels of at least `ENOUGH` samples of a split that the model does not predict, or not find, once."""
        return []

    def write(self, folder: Path, answers: list[Answer]) -> None:
        """Keep all answers together in the forms that others read, if there are any."""

    @abstractmethod
    def decode(self, outputs: Any, frames: Sequence[Frame], top_k: int) -> Iterator[Answer]:
        """Answers for a batch of outputs."""


def longer(config: TrainConfig, times: int = 2) -> str:
    """The option that multiplies the budget of a run."""
    if config.max_minutes is not None:
        return f"--max-minutes {times * config.max_minutes:g}"
    return f"--max-steps {times * config.max_steps}" if config.max_steps else f"--epochs {times * config.epochs}"


def load_tokenizer(about: Described, which: str) -> Tokenizer:
    """The tokenizer of what is read ("source") or written ("target")."""
    if which not in about.tokenizers:
        raise about.wrong("tokenizers", f"an object with the key {which}")
    with naming(f"{about.source}, tokenizer {which}"):
        return tokenizer_from_dict(about.tokenizers[which])


def speaks(model: TextConfig, tokenizer: Tokenizer, length: int) -> bool:
    """Whether a model knows the tokens of a tokenizer, and sequences of that length."""
    return model.vocab_size == len(tokenizer) and model.max_length >= length
