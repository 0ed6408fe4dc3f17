"""Completing: a language model, which goes on with a text as those it was trained on went on."""

import math
from functools import partial
from typing import Any, Self, TypedDict

import torch
from torch import Tensor, nn

from vitral.config import TextConfig, TrainConfig
from vitral.data.noise import Noise
from vitral.data.sources.base import Data, Texts
from vitral.data.targets import Targets
from vitral.data.text import Tokens, reading_length
from vitral.data.tokenizer import EOS, PAD, SOS
from vitral.errors import DataError
from vitral.models.generate import Generated
from vitral.models.seq2seq import TextDecoder, TextEncoder
from vitral.schema import Count
from vitral.tasks.base import Found, load_tokenizer, speaks
from vitral.tasks.write import Writes, token_losses
from vitral.weights.rundir import Described


def refuse_other(data: Data) -> None:
    """Raise unless the data are running text."""
    if not isinstance(data.inputs, Texts) or data.texts is not None or data.kind != "none":
        raise DataError(f"{data.name} is not plain text; --task complete takes a text file (.txt).")


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    perplexity: float
    bits_per_character: float
    token_accuracy: float


class Complete(Writes):
    """A decoder alone. Each sample is a piece of text; EOS follows where a piece is the end of what it was cut from."""

    name = "complete"
    better = "log_likelihood"
    headline = "perplexity"
    headline_words = "perplexity of a token"
    what = "goes on with a text"
    measures = Measures

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The tokens are those of the texts."""
        refuse_other(data)
        return cls(data.tokenizers["source"], reading_length(data, config.text), config.text, config.label_smoothing)

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Tokens and their number."""
        return cls(load_tokenizer(about, "source"), about.given("source_length"), about.train.text)

    def fits(self, about: Described) -> bool:
        """Whether the model is a decoder of these tokens."""
        right = about.architecture == "text_decoder" and isinstance(about.model, TextConfig)
        return right and speaks(about.model, self.tokenizer, self.max_length)  # type: ignore[arg-type]

    def targets(self, data: Data) -> Targets:
        """SOS, the piece, and EOS where it ends."""
        refuse_other(data)
        return Tokens(len(data.lines), partial(self._row, data.lines, data.targets[:, 0].tolist()))

    def _row(self, lines: list[str], ends: list[float], i: int) -> list[int]:
        return [SOS, *self.tokenizer.encode(lines[i]), *([EOS] if ends[i] else [])]

    def build(self, backbone: TextEncoder) -> nn.Module:
        """The decoder, which has no use for an encoder."""
        o = self.options
        return TextDecoder(o.config(len(self.tokenizer), self.max_length, o.decoder_layers))

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor, noise: Noise) -> Tensor:
        """Logits (B, T, V) of each next token, all before it given."""
        return model(targets[:, :-1])

    def run(self, model: Any, inputs: Tensor, targets: Tensor | None = None) -> Tensor | list[list[Generated]]:
        """What comes after a prompt; or, where the whole text is known, the logits of its tokens."""
        if targets is not None:
            return model(targets[:, :-1])
        lengths = (inputs != PAD).sum(1)
        written: list[list[Generated]] = [[] for _ in inputs]
        for n in lengths.unique().tolist():  # each by itself, so that no prompt takes room from another
            rows = (lengths == n).nonzero()[:, 0]
            found = self.generate(model, inputs[rows, :n], self.max_length - n + 1)
            for row, each in zip(rows.tolist(), found, strict=True):
                written[row] = each
        return written

    def found(self, outputs: Tensor, targets: Tensor) -> Found:
        """For each piece: what its tokens cost, how many they and their characters are, and how many were told."""
        wanted = targets[:, 1:]
        real = wanted != PAD
        characters = [len(self.tokenizer.decode(row)) for row in targets.tolist()]
        return {
            "nats": token_losses(outputs, wanted).sum(1),
            "tokens": real.sum(1),
            "characters": torch.tensor(characters),
            "told": ((outputs.argmax(2) == wanted) & real).sum(1),
        }

    def metrics(self, found: Found) -> dict[str, Any]:
        """Perplexity of a token, bits for a character, and tokens told right."""
        nats, tokens = float(found["nats"].double().sum()), int(found["tokens"].sum())
        return {
            "images": len(found["nats"]),
            "tokens": tokens,
            "perplexity": math.exp(min(nats / tokens, 700.0)),
            "log_likelihood": -nats / tokens,
            "bits_per_character": nats / math.log(2) / max(int(found["characters"].sum()), 1),
            "token_accuracy": int(found["told"].sum()) / tokens,
        }

    def summary(self, metrics: dict[str, Any]) -> str:
        """The three of them."""
        return (
            f"perplexity {metrics['perplexity']:.2f}, {metrics['bits_per_character']:.3f} bits a character, "
            f"next token right {100 * metrics['token_accuracy']:.1f} %"
        )
