"""What a task is to the loop, the predictor and the report: none of them knows any task by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
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
from vitral.models.backbone import Backbone
from vitral.tasks.objective import Objective
from vitral.weights.rundir import Described, naming

Found = dict[str, Tensor]
"""What is kept of a model's outputs to judge them by, with the targets: the first axis of each counts images."""


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


@dataclass(frozen=True)
class Answer(ABC):
    """The answer for one image, or why there is none."""

    name: str
    error: str = ""
    note: str = field(default="", kw_only=True)
    """What one should know about the answer."""

    columns: ClassVar[tuple[str, ...]] = ()
    """Columns of a table of answers, between the image's name and the error."""

    def to_dict(self, what: str = "image") -> dict[str, Any]:
        """As plain values; `what` is the word for what was fed."""
        if self.error:
            return {what: self.name, "error": self.error}
        return {what: self.name, **self.content(), **({"note": self.note} if self.note else {})}

    @abstractmethod
    def content(self) -> dict[str, Any]:
        """The answer itself as plain values."""

    def cut(self, top_k: int) -> Self:
        """The same with its `top_k` likeliest labels alone, where there are some to choose from."""
        return self

    @abstractmethod
    def text(self) -> str:
        """The answer in a line."""

    @abstractmethod
    def rows(self) -> list[list[str]]:
        """The answer as rows of a table, under `columns`."""

    @abstractmethod
    def draw(self, image: Image.Image) -> Image.Image:
        """The image with the answer on it."""

    def pictures(self, image: Image.Image) -> dict[str, Image.Image]:
        """What to keep of the answer as pictures, by the ends of their names."""
        return {".png": self.draw(image)}


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

    def write(self, folder: Path, answers: list[Answer]) -> None:
        """Keep all answers together in the forms that others read, if there are any."""

    @abstractmethod
    def decode(self, outputs: Any, frames: Sequence[Frame], top_k: int) -> Iterator[Answer]:
        """Answers for a batch of outputs."""


def load_tokenizer(about: Described, which: str) -> Tokenizer:
    """The tokenizer of what is read ("source") or written ("target")."""
    if which not in about.tokenizers:
        raise about.wrong("tokenizers", f"an object with the key {which}")
    with naming(f"{about.source}, tokenizer {which}"):
        return tokenizer_from_dict(about.tokenizers[which])


def speaks(model: TextConfig, tokenizer: Tokenizer, length: int) -> bool:
    """Whether a model knows the tokens of a tokenizer, and sequences of that length."""
    return model.vocab_size == len(tokenizer) and model.max_length >= length
