"""Models of text as graphs of tokens, and exported files of them as what writes.

B sources, R rows of tokens (several may be of one source), M tokens of a source, T of what is written, D width, V
vocabulary. A model that looks at a source is one graph of two parts that share no tensor: the encoder runs once, the
decoder for each token. Files have no cache: all tokens so far are read anew.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from vitral.config import EngineName, Preprocess, TextConfig, pair
from vitral.errors import InputError
from vitral.inference.engines import FileEngine
from vitral.inference.graph import (
    DECODER,
    ENCODER,
    EXAMPLE_BATCH,
    INPUT,
    WHOLE,
    Parts,
    fix_positions,
    output_names,
    twin_of,
)  # fmt: skip
from vitral.models.seq2seq import DecoderModel, Memory, Seq2Seq, TextDecoder, TextEncoder, check_tokens

SOURCE, MEMORY, VISIBLE, TOKENS, PLACES = "source", "memory", "visible", "tokens", "places"
"""Names of inputs: what is looked at, what was encoded, which of that is no padding, tokens, and places in them."""
EXAMPLE_LENGTH = 7
"""Tokens that a graph is traced with, where the model reads so many."""


class TextGraph(nn.Module):
    """A graph that takes tokens: `inputs`, `outputs`, `sizes` and `parts` are those of `Graph`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[dict[int, str], ...]
    """The axes of each input that have any size, and the words for them."""
    parts: Parts
    model: nn.Module

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """Random inputs to run it with."""
        raise NotImplementedError

    @property
    def limits(self) -> dict[str, int]:
        """The most that a size may be, by its word."""
        raise NotImplementedError


class ReaderGraph(TextGraph):
    """Tokens (B, T) -> logits, or the embedding where there is no head."""

    inputs = (TOKENS,)
    sizes = ({0: "batch", 1: "length"},)

    def __init__(self, model: TextEncoder) -> None:
        super().__init__()
        self.model, self.outputs = model, output_names(model)
        self.parts = {WHOLE: (self.inputs, self.outputs)}

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        """What the model gives."""
        return (self.model(tokens),)

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """Texts of different lengths."""
        return (_texts(cast(TextConfig, self.model.config), batch, seed),)

    @property
    def limits(self) -> dict[str, int]:
        """The longest text."""
        return {"length": cast(TextConfig, self.model.config).max_length}


class DecoderGraph(TextGraph):
    """Tokens (R, T), places (n) -> logits (R, n, V) of the tokens that come after those at these places."""

    inputs, outputs = (TOKENS, PLACES), ("logits",)
    sizes = ({0: "rows", 1: "tokens"}, {0: "places"})

    def __init__(self, model: TextDecoder) -> None:
        super().__init__()
        self.model = model
        self.parts = {DECODER: (self.inputs, self.outputs)}

    def forward(self, tokens: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """The logits."""
        decoder = cast(TextDecoder, self.model).decoder
        return (decoder.logits(decoder(tokens, None, None, None)[:, places]),)

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """Any tokens, all places."""
        return _tokens(cast(DecoderModel, self.model), batch, seed)

    @property
    def limits(self) -> dict[str, int]:
        """The longest text."""
        return {"tokens": cast(DecoderModel, self.model).max_length}


class Seq2SeqGraph(TextGraph):
    """The encoder, source -> encoded (B, M, D) and seen (B, M); and the decoder, which takes these row by row.

    Its inputs are memory (R, M, D), visible (R, M), tokens (R, T) and places (n), and logits (R, n, V) what it gives.
    """

    outputs = ("encoded", "seen", "logits")

    def __init__(self, model: Seq2Seq, shape: tuple[int, int, int] | None) -> None:
        """`shape` is that of an image, (C, H, W); None where texts are read."""
        super().__init__()
        self.model, self.shape = model, shape
        source, length = (SOURCE, {1: "length"}) if shape is None else (INPUT, {})
        self.inputs = (source, MEMORY, VISIBLE, TOKENS, PLACES)
        remembered = {0: "rows"} | ({} if shape else {1: "remembered"})
        self.sizes = ({0: "batch", **length}, remembered, remembered, {0: "rows", 1: "tokens"}, {0: "places"})
        self.parts = {
            ENCODER: ((source,), ("encoded", "seen")),
            DECODER: ((MEMORY, VISIBLE, TOKENS, PLACES), ("logits",)),
        }

    def forward(
        self, source: Tensor, memory: Tensor, visible: Tensor, tokens: Tensor, places: Tensor
    ) -> tuple[Tensor, ...]:
        """Both parts."""
        model = cast(Seq2Seq, self.model)
        z, seen = model.encode(source)
        seen = torch.ones_like(z[..., 0], dtype=torch.bool) if seen is None else seen
        written = model.decoder(tokens, Memory(memory, visible), None, None)
        return z, seen, model.decoder.logits(written[:, places])

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """A source; and for the decoder what was encoded of it, and any tokens."""
        model, generator = cast(Seq2Seq, self.model), torch.Generator().manual_seed(seed)
        if self.shape is not None:
            source = torch.randn(batch, *self.shape, generator=generator)
        else:
            source = _texts(cast(TextConfig, model.config.encoder), batch, seed)
        with torch.no_grad():
            z, seen = model.encode(source)
        seen = torch.ones(z.shape[:2], dtype=torch.bool) if seen is None else seen
        return source, z, seen, *_tokens(model, batch, seed)

    @property
    def limits(self) -> dict[str, int]:
        """The longest texts, read and written."""
        c = cast(Seq2Seq, self.model).config
        return {"tokens": c.decoder.max_length} | (
            {} if c.encoder is None else {"length": c.encoder.max_length, "remembered": c.encoder.max_length}
        )


def _texts(c: TextConfig, batch: int, seed: int) -> Tensor:
    """Random tokens (B, T), those after the ends of shorter texts being padding."""
    length = min(c.max_length, EXAMPLE_LENGTH)
    tokens = torch.randint(0, c.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
    if c.pad_token is None:
        return tokens
    tokens = tokens.where(tokens != c.pad_token, (c.pad_token + 1) % c.vocab_size)
    ends = torch.arange(length) >= length - torch.arange(batch)[:, None] % length
    return tokens.masked_fill(ends, c.pad_token)


def _tokens(model: DecoderModel, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens (R, T) that were written, and all their places."""
    length = min(model.max_length, EXAMPLE_LENGTH - 2)
    shape = (batch, length)
    return torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(seed)), torch.arange(
        length
    )


def text_graph_of(model: nn.Module, preprocess: Preprocess | None) -> TextGraph:
    """The graph of a model of text; its weights are the model's own, not copies."""
    twin = twin_of(model)
    shape = None if preprocess is None else (len(preprocess.mean), *pair(preprocess.img_size))
    graph = (
        Seq2SeqGraph(twin, shape) if isinstance(twin, Seq2Seq)
        else DecoderGraph(twin) if isinstance(twin, TextDecoder)
        else ReaderGraph(cast(TextEncoder, twin))
    )  # fmt: skip
    fix_positions(graph)
    return graph


# ---- what writes ----


class WritingFile:
    """An exported file as `vitral.models.generate` sees what writes."""

    def __init__(self, engine: FileEngine) -> None:
        self.engine = engine
        self.name: EngineName = engine.name
        about: dict[str, Any] = engine.document["parts"][DECODER]
        self.vocab_size, self.max_length = about["vocabulary"], about["max_length"]

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V) of each next token, for a file that looks at nothing else."""
        return self._logits(tokens, None, torch.arange(tokens.shape[1]))

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory | None:
        """What the file looks at while it writes, if it does."""
        if ENCODER not in self.engine.parts:
            return None
        if mask is not None:
            raise InputError("an exported file takes no mask; it tells padding by its token.")
        return Memory(*self.engine.run_part(ENCODER, [self.engine.checked(source)]))

    def new_cache(self) -> None:
        """No cache."""
        return

    def next_logits(self, tokens: Tensor, memory: Memory | None, mask: Tensor | None, cache: None) -> Tensor:
        """(R, T) -> logits (R, V) of the token after the last."""
        if mask is not None:
            raise InputError("an exported file goes on with prompts of one length, without padding.")
        return self._logits(tokens, memory, torch.tensor([tokens.shape[1] - 1]))[:, 0]

    def _logits(self, tokens: Tensor, memory: Memory | None, places: Tensor) -> Tensor:
        check_tokens(tokens, None, self.vocab_size, self.max_length)
        looks_at = ()
        if memory is not None and memory.visible is not None:
            each = tokens.shape[0] // memory.tokens.shape[0]
            looks_at = (memory.tokens.repeat_interleave(each, 0), memory.visible.repeat_interleave(each, 0))
        (logits,) = self.engine.run_part(DECODER, [*looks_at, tokens, places])
        return logits
