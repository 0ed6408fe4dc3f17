"""Writing text: the caption of an image, or the translation of a text.

Training shows the decoder the target shifted right, SOS y_1 ... y_n, and asks for y_1 ... y_n EOS; PAD counts nowhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self, TypedDict

import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitral.config import Preprocess, Seq2SeqConfig, TextOptions, TrainConfig, Writing
from vitral.data.noise import Noise
from vitral.data.sources.base import Data
from vitral.data.targets import Targets
from vitral.data.text import Tokens, longest, too_long
from vitral.data.tokenizer import EOS, PAD, REPLACEMENT, SOS, UNK, Tokenizer, pad
from vitral.errors import ConfigError, DataError
from vitral.models.backbone import Backbone
from vitral.models.generate import Author, Generated, generate
from vitral.models.seq2seq import Seq2Seq, TextEncoder
from vitral.models.vit import VisionTransformer
from vitral.schema import Count
from vitral.tasks.base import Answer, Found, Frame, Task, load_tokenizer, rest_pooling, speaks
from vitral.tasks.drawing import captioned
from vitral.tasks.metrics import Interval, Table
from vitral.tasks.text_metrics import text_metrics
from vitral.weights.rundir import Described

CUT = " ..."
"""After a text that was stopped before its end."""


@dataclass(frozen=True)
class Written(Answer):
    """The texts that were written for an input, the best first, with their scores."""

    texts: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    """Whether each came to its end, or was stopped."""

    columns: ClassVar[tuple[str, ...]] = ("rank", "written", "score", "ended")

    def content(self) -> dict[str, Any]:
        """Texts with scores."""
        rows = zip(self.texts, self.scores, self.ended, strict=True)
        return {"texts": [{"text": text, "score": score, "ended": ended} for text, score, ended in rows]}

    def text(self) -> str:
        """The text; of several, each with its score on a line."""
        told = [text + CUT * (not ended) for text, ended in zip(self.texts, self.ended, strict=True)]
        if len(told) == 1:
            return told[0]
        return "".join(f"\n  {score:8.4f}  {text}" for text, score in zip(told, self.scores, strict=True))

    def rows(self) -> list[list[str]]:
        """One row a text."""
        rows = zip(self.texts, self.scores, self.ended, strict=True)
        return [[str(i), text, f"{s:.6g}", "yes" if ended else "no"] for i, (text, s, ended) in enumerate(rows, 1)]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image with the best text below."""
        return captioned(image, self.texts[0])


def token_losses(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """(B, T): cross-entropy of the logits (B, T, V) of each next token, 0 on PAD."""
    each = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, label_smoothing=smoothing, reduction="none"
    )
    return each.view(targets.shape)


def token_hits(logits: Tensor, targets: Tensor) -> Tensor:
    """(B,): the share of each sequence's tokens that are the likeliest where all before them are given."""
    real = targets != PAD
    return ((logits.argmax(2) == targets) & real).sum(1) / real.sum(1)


class Writes(Task):
    """What all that write have in common: how, and with which tokens."""

    answer = Written
    spatial = True
    writing = Writing()

    def __init__(self, tokenizer: Tokenizer, max_length: int, options: TextOptions, smoothing: float = 0.0) -> None:
        """`max_length` tokens are written at most, EOS among them."""
        self.labels = []
        self.tokenizer, self.max_length, self.options, self.smoothing = tokenizer, max_length, options, smoothing

    @property
    def outputs(self) -> int:
        """None: the decoder has its own."""
        return 0

    def generate(self, model: Author, inputs: Tensor, room: int) -> list[list[Generated]]:
        """Write of the inputs, or after prompts of one length, at most `room` tokens."""
        w = self.writing
        found = generate(
            model, inputs, max_length=min(w.max_tokens or room, room), bos=SOS, eos=EOS, pad=PAD,
            method="sample" if w.sample else "beam" if w.beam > 1 else "greedy",
            beam=w.beam, n_best=w.n_best, length_penalty=w.length_penalty, temperature=w.temperature,
            top_k=w.sample_top_k, top_p=w.sample_top_p, seed=w.seed, never=(PAD, SOS, UNK),
        )  # fmt: skip
        return [sorted(several, key=lambda g: g.score, reverse=True) for several in found]

    def loss(self, outputs: Tensor, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Cross-entropy, the mean over all tokens that are no padding."""
        wanted = targets[:, 1:]
        return token_losses(outputs, wanted, self.smoothing).sum() / (wanted != PAD).sum()

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, float]:
        """Tokens told right where all before them are given."""
        return {"count": float(len(targets)), "token_accuracy": float(token_hits(outputs, targets[:, 1:]).sum())}

    def decode(self, outputs: list[list[Generated]], frames: Sequence[Frame], top_k: int) -> Iterator[Answer]:
        """Tokens to text."""
        for several, frame in zip(outputs, frames, strict=True):
            texts = [self.tokenizer.decode(g.tokens) for g in several]
            yield Written(frame.name, "", texts, [g.score for g in several], [g.ended for g in several])


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    exact: float
    exact_95: Interval
    cer: float
    words: float
    bleu: float
    chrf: float
    by_length: Table


class Write(Writes):
    """An encoder, of an image or of text, and a decoder that writes while it looks at what was encoded."""

    reads: ClassVar[str]
    """What it looks at while it writes."""
    headline = "exact"
    headline_words = "texts written without a mistake"
    measures = Measures

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """Tokens and their number from what is to be written in training."""
        texts = texts_of(data)
        if data.what != cls.reads:
            raise DataError(f"{data.name} has {data.what}, and --task {cls.name} reads {cls.reads}; leave --task out.")
        tokenizer = data.tokenizers["target"]
        most = config.text.max_length or longest(tokenizer, [texts[i] for i in data.splits["train"].tolist()], 1)
        return cls(tokenizer, most, config.text, config.label_smoothing)

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Tokens and their number."""
        return cls(load_tokenizer(about, "target"), about.given("target_length"), about.train.text)

    def fits(self, about: Described) -> bool:
        """Whether the model is an encoder of what the task reads, and a decoder of its tokens."""
        c = about.model
        right = isinstance(c, Seq2SeqConfig) and (c.vit is None) == (self.reads == "texts")
        return right and speaks(c.decoder, self.tokenizer, self.max_length)  # type: ignore[union-attr]

    def settings(self) -> dict[str, Any]:
        """The longest text."""
        return {"target_length": self.max_length}

    def usable(self, data: Data) -> Data:
        """Leave out what is too long to be written."""
        texts = texts_of(data)
        bad = too_long(self.tokenizer, texts, self.max_length - 1)
        return data.without(bad, f"texts to write have more than {self.max_length - 1} tokens and were left out")

    def targets(self, data: Data) -> Targets:
        """SOS, the text, EOS."""
        texts = texts_of(data)
        return Tokens(len(texts), partial(self._row, texts))

    def _row(self, texts: list[str], i: int) -> list[int]:
        return [SOS, *self.tokenizer.encode(texts[i]), EOS]

    def build(self, backbone: Backbone | TextEncoder) -> nn.Module:
        """The encoder with a decoder beside it."""
        o = self.options
        decoder = o.config(len(self.tokenizer), self.max_length, o.decoder_layers)
        if isinstance(backbone, VisionTransformer):
            rest_pooling(backbone)
            return Seq2Seq(Seq2SeqConfig(vit=backbone.config, decoder=decoder), backbone)
        if isinstance(backbone, Backbone):
            raise ConfigError(
                f"--task {self.name} needs a ViT (vitral models 'vit*'), got a {type(backbone).__name__}."
            )
        return Seq2Seq(Seq2SeqConfig(encoder=backbone.config, decoder=decoder), backbone)

    def preprocess(self, p: Preprocess) -> Preprocess:
        """The whole image, its aspect kept."""
        return replace(p, crop_mode="pad")

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor, noise: Noise) -> Tensor:
        """Logits (B, T, V) of each next token, all before it given."""
        return model(inputs, targets[:, :-1])

    def run(self, model: Any, inputs: Tensor, targets: Tensor | None = None) -> list[list[Generated]]:
        """What the model writes by itself."""
        return self.generate(model, inputs, self.max_length)

    def found(self, outputs: list[list[Generated]], targets: Tensor) -> Found:
        """Tokens that were written, and those that should have been, (B, max_length) each."""
        said = pad([[*several[0].tokens, EOS] for several in outputs])[0]
        return {name: self._filled(tokens) for name, tokens in (("said", said), ("true", targets[:, 1:].cpu()))}

    def _filled(self, tokens: Tensor) -> Tensor:
        """(B, T) -> (B, max_length + 1), PAD at the end: EOS is written even after a text that did not end."""
        return F.pad(tokens, (0, self.max_length + 1 - tokens.shape[1]), value=PAD).int()

    def metrics(self, found: Found) -> dict[str, Any]:
        """Exact matches, character errors, BLEU and chrF."""
        said, true = ([self.tokenizer.decode(row) for row in found[name].tolist()] for name in ("said", "true"))
        # A character that the tokenizer does not know is a mistake, even where the model says that it knows it not.
        return {"images": len(said), **text_metrics(said, [text.replace(REPLACEMENT, "\0") for text in true])}

    def summary(self, metrics: dict[str, Any]) -> str:
        """Exact matches and errors."""
        low, high = metrics["exact_95"]
        bleu = f", BLEU {metrics['bleu']:.1f}" if metrics["words"] >= 4 else ""  # it counts pieces of four words
        return (
            f"exact {100 * metrics['exact']:.2f} % (95 %: {100 * low:.2f} to {100 * high:.2f}), "
            f"character errors {100 * metrics['cer']:.2f} %, chrF {metrics['chrf']:.1f}{bleu}"
        )


def texts_of(data: Data) -> list[str]:
    """What is to be written of each input."""
    if data.texts is None or data.kind == "tags":
        raise DataError(f"{data.name} has no texts to write; name their column with --label-column.")
    return data.texts


class Caption(Write):
    """Image to text."""

    name = "caption"
    better = "chrf"
    what = "writes what it sees in an image"
    reads = "images"


class Translate(Write):
    """Text to text."""

    name = "translate"
    better = "chrf"
    what = "turns one text into another"
    reads = "texts"
