"""Models of text as graphs of tokens, and exported files of them as what writes.

B sources, R rows of tokens (several may be of one source), M tokens of a source, P that were written and T new ones, n
of them whose next is asked for, L blocks, h heads of width d, V vocabulary. A model that looks at a source is one graph
of two parts: the encoder runs once, the decoder for each token. What the blocks remember is handed in and out: keys and
values of all of them side by side, (R, 2 L, h, tokens, d).
"""

from collections.abc import Sequence
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
    WHOLE,
    Parts,
    fix_positions,
    output_names,
    twin_of,
)
from vitral.models.seq2seq import (
    Cache,
    Decoder,
    DecoderModel,
    Memory,
    Seq2Seq,
    TextDecoder,
    TextEncoder,
    check_tokens,
)
from vitral.nn.attention import FixedKeys, GrowingKeys, KeysValues, Project
from vitral.nn.blocks import DecoderBlock

SOURCE, MEMORY, VISIBLE, TOKENS, PAST, PLACES = "source", "memory", "visible", "tokens", "past", "places"
"""Names of inputs: what is looked at, what was encoded, which of that is no padding, new tokens, what is remembered of
those before them, and the places of the new ones whose next is asked for."""


class TextGraph(nn.Module):
    """A graph that takes tokens: `inputs`, `outputs`, `sizes`, `parts` and `multiple` are those of `Graph`."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    sizes: tuple[dict[int, str], ...]
    """The axes of each input that have any size, and the words for them."""
    parts: Parts
    multiple = None
    """Images of any size are for models that write nothing."""
    model: nn.Module

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """Random inputs to run it with."""
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


class DecoderGraph(TextGraph):
    """Tokens (R, T), past (R, 2 L, h, P, d), places (n) -> logits (R, n, V), and present, the past of the next step."""

    inputs, outputs = (TOKENS, PAST, PLACES), ("logits", "present")
    sizes = ({0: "rows", 1: "tokens"}, {0: "rows", 3: "past"}, {0: "places"})

    def __init__(self, model: TextDecoder) -> None:
        super().__init__()
        self.model = model
        self.parts = {DECODER: (self.inputs, self.outputs)}

    def forward(self, tokens: Tensor, past: Tensor, places: Tensor) -> tuple[Tensor, ...]:
        """A step."""
        return _step(cast(TextDecoder, self.model).decoder, None, None, tokens, past, places)

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """Any tokens after any others, all places."""
        return _tokens(cast(DecoderModel, self.model), batch, seed)


class Seq2SeqGraph(TextGraph):
    """The encoder, source -> encoded (B, 2 L, h, M, d) and seen (B, M); and the decoder, which takes these row by row.

    Its inputs are memory (R, 2 L, h, M, d), visible (R, M), and those of `DecoderGraph`, and so are its outputs.
    """

    inputs = (SOURCE, MEMORY, VISIBLE, *DecoderGraph.inputs)
    outputs = ("encoded", "seen", *DecoderGraph.outputs)

    def __init__(self, model: Seq2Seq, shape: tuple[int, int, int] | None) -> None:
        """`shape` is that of an image, (C, H, W); None where texts are read."""
        super().__init__()
        self.model, self.shape = model, shape
        length, remembered = ({}, {}) if shape else ({1: "length"}, {3: "remembered"})
        seen = {axis - 2: word for axis, word in remembered.items()}
        self.sizes = ({0: "batch", **length}, {0: "rows", **remembered}, {0: "rows", **seen}, *DecoderGraph.sizes)
        self.parts = {ENCODER: ((SOURCE,), ("encoded", "seen")), DECODER: (self.inputs[1:], DecoderGraph.outputs)}

    def forward(
        self, source: Tensor, memory: Tensor, visible: Tensor, tokens: Tensor, past: Tensor, places: Tensor
    ) -> tuple[Tensor, ...]:
        """Both parts."""
        return *self.encode(source), *_step(cast(Seq2Seq, self.model).decoder, memory, visible, tokens, past, places)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values that the decoder's blocks make of a source, and which of its tokens are no padding."""
        model = cast(Seq2Seq, self.model)
        z, seen = model.encode(source)
        made = [cast(DecoderBlock, block).cross_attn.project(z, z) for block in model.decoder.blocks]
        return _side_by_side(made), torch.ones_like(z[..., 0], dtype=torch.bool) if seen is None else seen

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """A source; and for the decoder what was encoded of it, and any tokens."""
        model = cast(Seq2Seq, self.model)
        if self.shape is not None:
            source = torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))
        else:
            source = _texts(cast(TextConfig, model.config.encoder), batch, seed)
        with torch.no_grad():
            return source, *self.encode(source), *_tokens(model, batch, seed)


class HandedKeys(GrowingKeys):
    """Keys and values that are handed in, to which those of the new tokens come."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.all, self.length = (keys, values), keys.shape[2]

    def get(self, project: Project, keys: Tensor, values: Tensor) -> KeysValues:
        """Project the new tokens (R, T, D), and return all: (R, h, P + T, d) each."""
        k, v = project(keys, values)
        self.all = torch.cat([self.all[0], k], dim=2), torch.cat([self.all[1], v], dim=2)
        return self.all


def _step(
    decoder: Decoder, memory: Tensor | None, visible: Tensor | None, tokens: Tensor, past: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """The logits of what comes after the tokens at these places, and what is remembered of all tokens."""
    cache = Cache(decoder.depth)
    for i, block in enumerate(cache.blocks):
        block.own = HandedKeys(past[:, 2 * i], past[:, 2 * i + 1])
        if memory is not None:
            block.memory = FixedKeys((memory[:, 2 * i], memory[:, 2 * i + 1]))
    # Of the memory's tokens no more than their number is read: their keys and values are there.
    z = decoder(tokens, None if memory is None else Memory(memory[:, 0, 0], visible), None, cache)
    return decoder.logits(z[:, places]), _side_by_side([cast(HandedKeys, block.own).all for block in cache.blocks])


def _side_by_side(made: list[KeysValues]) -> Tensor:
    """Keys and values of each block (R, h, n, d) -> (R, 2 L, h, n, d)."""
    return torch.stack([one for both in made for one in both], dim=1)


def _texts(c: TextConfig, batch: int, seed: int) -> Tensor:
    """Random tokens (B, T), those after the ends of shorter texts being padding."""
    length = min(c.max_length, 7)
    tokens = torch.randint(0, c.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
    if c.pad_token is None:
        return tokens
    tokens = tokens.where(tokens != c.pad_token, (c.pad_token + 1) % c.vocab_size)
    ends = torch.arange(length) >= length - torch.arange(batch)[:, None] % length
    return tokens.masked_fill(ends, c.pad_token)


def _tokens(model: DecoderModel, batch: int, seed: int) -> tuple[Tensor, ...]:
    """Random tokens (R, T) after some others, for one row after none, and all their places.

    The graph is traced with more than one of each, however few the model reads: one or none would become constants.
    """
    c, generator = _decoder_config(model), torch.Generator().manual_seed(seed)
    before = 3 if batch == EXAMPLE_BATCH else min(3, c.max_length - 1) * (batch > 1)
    length = 5 if batch == EXAMPLE_BATCH else min(5, c.max_length - before)
    blocks, heads, d = keys_shape(model)
    tokens = torch.randint(0, c.vocab_size, (batch, length), generator=generator)
    return tokens, torch.randn(batch, blocks, heads, before, d, generator=generator), torch.arange(length)


def _decoder_config(model: DecoderModel) -> TextConfig:
    config: Any = model.config
    return config.decoder if isinstance(model, Seq2Seq) else config


def keys_shape(model: DecoderModel) -> tuple[int, int, int]:
    """(2 L, h, d) of what the decoder's blocks remember."""
    c = _decoder_config(model)
    return 2 * c.depth, c.num_heads, c.embed_dim // c.num_heads


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


class FileCache:
    """What the decoder of a file remembers: keys and values of its tokens, and those of each row's source."""

    def __init__(self, shape: Sequence[int]) -> None:
        """`shape` is that of keys and values, (2 L, h, d)."""
        blocks, heads, d = shape
        self.past = torch.zeros(1, blocks, heads, 0, d)
        self.looks_at: tuple[Tensor, ...] = ()

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows of tokens in this order, each as often as it is named; and these sources, None for all."""
        if sources is not None or len(rows) != len(self.past):  # else rows change places within their sources
            self.looks_at = ()
        self.past = self.past[rows]

    def spread(self, memory: Memory, rows: int) -> tuple[Tensor, ...]:
        """What was encoded, for each row that of its source."""
        if not self.looks_at:
            each = rows // len(memory.tokens)
            known = cast(tuple[Tensor, Tensor], memory)
            self.looks_at = known if each == 1 else tuple(part.repeat_interleave(each, 0) for part in known)
        return self.looks_at


class WritingFile:
    """An exported file as `vitral.models.generate` sees what writes."""

    def __init__(self, engine: FileEngine) -> None:
        self.engine = engine
        self.name: EngineName = engine.name
        about: dict[str, Any] = engine.document["parts"][DECODER]
        self.vocab_size, self.max_length, self._keys = about["vocabulary"], about["max_length"], about["keys"]

    def __call__(self, tokens: Tensor) -> Tensor:
        """(B, T) -> logits (B, T, V) of each next token, for a file that looks at nothing else."""
        return self._step(tokens, None, torch.arange(tokens.shape[1]), self.new_cache())

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory | None:
        """What the file looks at while it writes, if it does."""
        if ENCODER not in self.engine.parts:
            return None
        if mask is not None:
            raise InputError("an exported file takes no mask; it tells padding by its token.")
        return Memory(*self.engine.run_part(ENCODER, [self.engine.checked(source)]))

    def new_cache(self) -> FileCache:
        """What it remembers while it writes, still empty."""
        return FileCache(self._keys)

    def next_logits(
        self, tokens: Tensor, memory: Memory | None, mask: Tensor | None, cache: FileCache | None
    ) -> Tensor:
        """(R, T) -> logits (R, V) of the token after the last."""
        if mask is not None:
            raise InputError("an exported file goes on with prompts of one length, without padding.")
        return self._step(tokens, memory, torch.tensor([tokens.shape[1] - 1]), cache or self.new_cache())[:, 0]

    def _step(self, tokens: Tensor, memory: Memory | None, places: Tensor, cache: FileCache) -> Tensor:
        rows, past = len(tokens), cache.past
        check_tokens(tokens, None, self.vocab_size, self.max_length, past.shape[3])
        looks_at = () if memory is None else cache.spread(memory, rows)
        inputs = [*looks_at, tokens, past.expand(rows, -1, -1, -1, -1), places]
        logits, cache.past = self.engine.run_part(DECODER, inputs)
        return logits
