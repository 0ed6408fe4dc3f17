"""Tagging: a label for every word of a text, by an encoder alone.

B texts, T tokens, K labels. The label of a word sits on its first token, with or without the space before the word but
never on a space alone. A target is the number of a label from 1, or 0 where none is asked for: at SOS, EOS, padding and
all other tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NotRequired, Self, TypedDict

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.config import TrainConfig
from vitral.data.sources.base import Data
from vitral.data.sources.table import sorted_classes
from vitral.data.targets import Targets
from vitral.data.text import Tokens, reading_length
from vitral.data.tokenizer import Tokenizer, tidy
from vitral.errors import DataError
from vitral.schema import Count
from vitral.tasks.base import Answer, Found, Frame, Task, load_tokenizer
from vitral.tasks.drawing import captioned
from vitral.tasks.metrics import Interval, Table
from vitral.tasks.tag_metrics import tag_metrics
from vitral.weights.rundir import Described

NONE = 0
"""Target of a token that has no label; the padding of targets too."""


@dataclass(frozen=True)
class Tagged(Answer):
    """The words of a text, each with its likeliest tag and the probability of that."""

    words: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    columns: ClassVar[tuple[str, ...]] = ("word", "tag", "probability")

    def content(self) -> dict[str, Any]:
        """Words with tags and probabilities."""
        rows = zip(self.words, self.tags, self.probabilities, strict=True)
        return {"words": [{"word": word, "tag": tag, "probability": round(p, 6)} for word, tag, p in rows]}

    def text(self) -> str:
        """Each word with its tag behind it."""
        return join_tags(self.words, self.tags)

    def rows(self) -> list[list[str]]:
        """One row a word."""
        rows = zip(self.words, self.tags, self.probabilities, strict=True)
        return [[word, tag, f"{p:.6f}"] for word, tag, p in rows]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image with the words below."""
        return captioned(image, self.text())


def join_tags(words: Sequence[str], tags: Sequence[str]) -> str:
    """`Anna/PER lives/O`."""
    return " ".join(f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    accuracy: float
    accuracy_95: Interval
    f1: float
    exact: float
    by_label: Table
    by_entity: NotRequired[Table]


class Tag(Task):
    """Softmax over the labels at each word, cross-entropy, accuracy of words, F1."""

    name = "tag"
    better = "f1"
    headline = "accuracy"
    headline_words = "accuracy of words"
    what = "gives each word of a text one of {n} tags"
    answer = Tagged
    measures = Measures
    spatial = True
    pool = "tokens"

    def __init__(self, labels: list[str], tokenizer: Tokenizer, max_length: int, label_smoothing: float = 0.0) -> None:
        """`max_length` tokens are read at most, SOS and EOS among them."""
        self.labels, self.max_length, self.label_smoothing = labels, max_length, label_smoothing
        self._tokens = cache(tokenizer.encode)

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The labels are the tags of the data."""
        labels = sorted_classes(tag for tags in tags_of(data) for tag in tags.split())
        if len(labels) < 2:
            raise DataError(f"{data.name} has only one tag ({labels[0]}); tagging needs at least two.")
        return cls(labels, data.tokenizers["source"], reading_length(data, config.text), config.label_smoothing)

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Labels, and the tokens that words are made of."""
        return cls(about.names, load_tokenizer(about, "source"), about.given("source_length"))

    def usable(self, data: Data) -> Data:
        """Leave out texts that do not have a tag for each word."""
        pairs = zip(data.lines, tags_of(data), strict=True)
        bad = torch.tensor([len(text.split()) != len(tags.split()) for text, tags in pairs])
        return data.without(bad, "texts have not as many tags as words and were left out")

    def targets(self, data: Data) -> Targets:
        """The number of a word's label at its first token; labels are told by their names."""
        texts, tags = data.lines, tags_of(data)
        numbers = {name: number for number, name in enumerate(self.labels, start=NONE + 1)}
        unknown = sorted({tag for line in tags for tag in line.split()} - set(numbers))
        if unknown:
            raise DataError(
                f"{data.name} has tags that the model does not know: {', '.join(unknown[:5])}; "
                f"it knows {', '.join(self.labels[:10])}."
            )
        return Tokens(len(texts), lambda i: self._row(texts[i], [numbers[tag] for tag in tags[i].split()]))

    def _row(self, text: str, numbers: list[int]) -> list[int]:
        *places, end = self.places(text)
        row = [NONE] * (end + 1)
        for place, number in zip(places, numbers, strict=True):
            row[place] = number
        return row

    def places(self, text: str) -> list[int]:
        """Where the first token of each word stands, SOS being at 0, and where EOS stands.

        No token reaches over a space, so that the tokens of a text are those of its words, each with its space.
        """
        places, end = [], 1
        for word in text.split():
            tokens = self._tokens(f" {word}" if places else word)
            alone = bool(places) and tokens[:1] == self._tokens(" ")
            places.append(end + alone)
            end += len(tokens)
        return [*places, end]

    def loss(self, outputs: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Cross-entropy of the logits (B, T, K), the mean over all words."""
        return word_losses(outputs, targets, self.label_smoothing).sum() / (targets != NONE).sum()

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """The share of each text's words told right."""
        real = targets != NONE
        right = (outputs.argmax(2) + 1 == targets) & real
        return {"count": float(len(targets)), "accuracy": float((right.sum(1) / real.sum(1)).sum())}

    def found(self, outputs: Tensor, targets: Tensor) -> Found:
        """Said and true numbers and probabilities of the said, (B, max_length) each, 0 but at words; losses (B,)."""
        sure, said = outputs.softmax(2).max(2)  # (B, T)
        real = targets != NONE
        kept = {"said": ((said + 1) * real).int(), "true": targets.int(), "sure": sure * real}
        room = self.max_length - targets.shape[1]
        return {name: F.pad(tensor, (0, room)) for name, tensor in kept.items()} | {
            "nats": word_losses(outputs, targets).sum(1)
        }

    def metrics(self, found: Found) -> dict[str, Any]:
        """Accuracy, F1, loss, and tables by label and by entity."""
        said, true = (self.names(found[name]) for name in ("said", "true"))
        metrics = tag_metrics(said, true, self.labels)
        return metrics | {"loss": float(found["nats"].double().sum()) / metrics["words"]}

    def names(self, numbers: Tensor) -> list[list[str]]:
        """The labels of each text's words, from (B, T)."""
        return [[self.labels[number - 1] for number in row if number != NONE] for row in numbers.tolist()]

    def summary(self, metrics: dict[str, Any]) -> str:
        """Accuracy and its interval, F1, and texts without a mistake."""
        low, high = (100 * value for value in metrics["accuracy_95"])
        whose = "of entities" if "entity_f1" in metrics else "of labels"
        return (
            f"accuracy {100 * metrics['accuracy']:.2f} % of words (95 %: {low:.2f} to {high:.2f}), "
            f"F1 {whose} {metrics['f1']:.4f}, {100 * metrics['exact']:.1f} % without a mistake"
        )

    def decode(self, outputs: Tensor, frames: Sequence[Frame], top_k: int) -> Iterator[Tagged]:
        """The likeliest label of each word."""
        for frame, p in zip(frames, outputs.double().softmax(2), strict=True):
            text = tidy(frame.name)
            sure, said = p[self.places(text)[:-1]].max(1)
            tags = [self.labels[number] for number in said.tolist()]
            yield Tagged(frame.name, words=text.split(), tags=tags, probabilities=sure.tolist())


def word_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """(B, T): cross-entropy of the logits (B, T, K) at each word, 0 elsewhere."""
    each = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten() - 1, ignore_index=NONE - 1, label_smoothing=smoothing, reduction="none"
    )
    return each.view(targets.shape)


def tags_of(data: Data) -> list[str]:
    """The tags of each text, with spaces between them."""
    if data.kind != "tags" or data.texts is None:
        raise DataError(
            f"{data.name} has no tags for the words of its {data.what}; --task tag takes a CoNLL file, or a table with "
            f"columns words and tags."
        )
    return data.texts
