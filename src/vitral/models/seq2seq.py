"""The encoder-decoder Transformer (Vaswani et al., 2017, arXiv:1706.03762), and each of its halves alone.

B batch, T tokens, M tokens of the source, D width, V vocabulary. A mask of tokens is True on those that count. Knows
tokens as numbers only, and nothing of losses; `generate` writes with what is built here.
"""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import Preprocess, Seq2SeqConfig, TextConfig
from vitral.errors import InputError
from vitral.models.parts import BLOCKS
from vitral.models.vit import VisionTransformer
from vitral.nn.attention import Attention, CrossAttention, causal_mask, key_mask
from vitral.nn.blocks import RESIDUALS, BlockCache, DecoderBlock, PositionedBlock
from vitral.nn.mlp import MLP
from vitral.nn.pooling import ClsPool, MeanPool
from vitral.nn.positions import GridCache, sincos_1d


class Memory(NamedTuple):
    """An encoded source: what a decoder looks at."""

    tokens: Tensor
    """(B, M, D)."""
    visible: Tensor | None
    """Which of them are no padding (B, M); None for all."""

    def select(self, rows: Tensor) -> "Memory":
        """Keep these sources."""
        return Memory(self.tokens[rows], None if self.visible is None else self.visible[rows])


class Cache:
    """Keys and values of every block of a decoder, so that each token is computed once. For inference alone."""

    def __init__(self, depth: int) -> None:
        self.blocks = [BlockCache() for _ in range(depth)]

    @property
    def length(self) -> int:
        """Tokens that the decoder has read."""
        return self.blocks[0].own.length

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows of tokens in this order, each as often as it is named; and these sources, None for all."""
        for block in self.blocks:
            block.own.select(rows)
            if sources is not None:
                block.memory.select(sources)


# ---- the parts that all have ----


class TokenEmbedding(nn.Module):
    """z_0 = E[token] sqrt(D) + P[place], with or without the factor; then a LayerNorm if wanted."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        D = c.embed_dim
        self.max_length = c.max_length
        self.scale = math.sqrt(D) if c.scale_embedding else 1.0
        self.tokens = nn.Embedding(c.vocab_size, D)
        self.pos_embed = nn.Parameter(torch.zeros(c.max_length, D)) if c.positions == "learned" else None
        self.norm = nn.LayerNorm(D, eps=c.norm_eps) if c.norm_embedding else nn.Identity()
        self.drop = nn.Dropout(c.drop_rate)
        self._cache = GridCache()

    def forward(self, tokens: Tensor, mask: Tensor | None, past: int = 0) -> Tensor:
        """Tokens (B, T) -> (B, T, D). The mask (B, past + T) is for all tokens; padding has no place of its own."""
        if mask is None:
            places = torch.arange(past, past + tokens.shape[1], device=tokens.device)
        else:
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, past:]
        return self.drop(self.norm(self.tokens(tokens) * self.scale + self.table()[places]))

    def table(self) -> Tensor:
        """P (max_length, D)."""
        if self.pos_embed is not None:
            return self.pos_embed
        E = self.tokens.weight
        return self._cache.get((E.dtype, E.device), lambda: sincos_1d(torch.arange(self.max_length), E.shape[1]).to(E))

    def check(self, tokens: Tensor, mask: Tensor | None, past: int = 0, what: str = "tokens") -> None:
        """Raise unless these are tokens of the vocabulary (B, T), at most `max_length`, with a mask of their shape."""
        check_tokens(tokens, mask, self.tokens.num_embeddings, self.max_length, past, what)


def check_tokens(
    tokens: Tensor, mask: Tensor | None, vocab_size: int, max_length: int, past: int = 0, what: str = "tokens"
) -> None:
    """Raise unless these are tokens of a vocabulary (B, T), at most `max_length`, with a mask of their shape."""
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.dtype not in (torch.int64, torch.int32):
        got = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise InputError(f"{what} must be whole numbers (B, T), got {got}.")
    if torch.compiler.is_compiling():  # what is recorded is for any size
        return
    B, T = tokens.shape
    if not tokens.numel():
        raise InputError(f"{what} must not be empty, got shape {(B, T)}.")
    if past + T > max_length:
        raise InputError(
            f"{what} must be at most max_length ({max_length}) long, got {past + T}; shorten them, "
            f"or make the model with a larger max_length."
        )
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (B, past + T)):
        raise InputError(f"the mask of {what} must be boolean {(B, past + T)}, got {mask.dtype} {tuple(mask.shape)}.")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise InputError(f"{what} must be from 0 to {vocab_size - 1}, got {low} to {high}.")
    if mask is not None and not mask.any(dim=1).all():
        raise InputError(f"the mask of {what} hides a whole sequence; leave at least one token of each.")


def make_mlp(c: TextConfig) -> MLP:
    """The MLP of a block."""
    return MLP(c.embed_dim, c.mlp_width, c.mlp_width, c.embed_dim, c.act, c.drop_rate)


def make_encoder_blocks(c: TextConfig) -> nn.ModuleList:
    """The blocks of an encoder: those of a ViT."""
    D = c.embed_dim
    return nn.ModuleList(
        BLOCKS[c.block](
            D, Attention(D, c.num_heads, True, c.attn_drop_rate, c.drop_rate), make_mlp(c), c.norm_eps, None, 0.0
        )
        for _ in range(c.depth)
    )


def make_decoder_blocks(c: TextConfig, memory: bool) -> nn.ModuleList:
    """The blocks of a decoder, which look at a memory too if there is one."""

    def attention() -> CrossAttention:
        return CrossAttention(c.embed_dim, c.num_heads, True, c.attn_drop_rate, c.drop_rate)

    end = (c.norm_eps, RESIDUALS[c.block])
    return nn.ModuleList(
        DecoderBlock(c.embed_dim, attention(), attention(), make_mlp(c), *end)
        if memory
        else PositionedBlock(c.embed_dim, attention(), make_mlp(c), *end)
        for _ in range(c.depth)
    )


def make_final_norm(c: TextConfig) -> nn.Module:
    """A last LayerNorm where the blocks end without one."""
    return nn.LayerNorm(c.embed_dim, eps=c.norm_eps) if c.block == "pre" else nn.Identity()


class Output(nn.Module):
    """logits = E z + b, with the table of embeddings E, or a matrix of its own in its place."""

    def __init__(self, c: TextConfig) -> None:
        super().__init__()
        self.weight = None if c.tied_output else nn.Parameter(torch.zeros(c.vocab_size, c.embed_dim))
        self.bias = nn.Parameter(torch.zeros(c.vocab_size)) if c.output_bias else None

    def forward(self, z: Tensor, E: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return F.linear(z, E if self.weight is None else self.weight, self.bias)


class TokenPool(nn.Module):
    """Every token for itself."""

    reads = None

    def forward(self, z: Tensor, visible: Tensor | None = None) -> Tensor:
        """(B, T, D) as it is."""
        return z


POOLS = {"cls": ClsPool, "mean": lambda: MeanPool(0), "tokens": TokenPool}


# ---- the two halves ----


class TextEncoder(nn.Module):
    """`model(tokens)` gives logits (B, classes) for tokens (B, T), or (B, T, classes) with `pool="tokens"`."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        c = config
        self.config = config
        self.preprocess = None
        self.labels: list[str] | None = None
        self.load_report: Any = None
        self.token_embed = TokenEmbedding(c)
        self.blocks = make_encoder_blocks(c)
        self.norm = make_final_norm(c)
        self.pool = POOLS[c.pool]()
        self.head = nn.Linear(c.embed_dim, c.num_classes) if c.num_classes else nn.Identity()
        init_text(self)

    def forward_features(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T) -> (B, T, D): every token after the last block."""
        mask = self.visible(tokens, mask)
        self.token_embed.check(tokens, mask, what="source")
        z = self.token_embed(tokens, mask)
        for block in self.blocks:
            z = block(z, key_mask(mask))
        return self.norm(z)

    def visible(self, tokens: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask that is given, or the one that the padding token tells, if there is one."""
        pad = self.config.pad_token
        return tokens != pad if mask is None and pad is not None else mask

    def embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T) -> what the head reads: (B, D), or (B, T, D) with `pool="tokens"`."""
        mask = self.visible(tokens, mask)
        self.token_embed.check(tokens, mask, what="source")
        z = self.token_embed(tokens, mask)
        *inner, last = self.blocks
        for block in inner:
            z = block(z, key_mask(mask))
        return self.pool(self.norm(last(z, key_mask(mask), self.pool.reads)), mask)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T) -> logits."""
        return self.head(self.embed(tokens, mask))


class Decoder(nn.Module):
    """Tokens to tokens, each of which sees those before it; with a memory, which all see, or without."""

    def __init__(self, c: TextConfig, memory: bool) -> None:
        super().__init__()
        self.depth = c.depth
        self.token_embed = TokenEmbedding(c)
        self.blocks = make_decoder_blocks(c, memory)
        self.norm = make_final_norm(c)
        self.output = Output(c)

    def forward(self, tokens: Tensor, memory: Memory | None, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """(B, T) -> (B, T, D), what `logits` reads; with a cache, tokens are the new ones and the mask is for all."""
        past = cache.length if cache else 0
        self.token_embed.check(tokens, mask, past)
        if memory is not None and not torch.compiler.is_compiling() and len(tokens) % len(memory.tokens):
            raise InputError(
                f"the rows of tokens must be as many as the sources, or some for each, got {len(tokens)} rows and "
                f"{len(memory.tokens)} sources."
            )
        causal = causal_mask(tokens.shape[1], past, mask, tokens.device)
        looks_at = (causal,) if memory is None else (memory.tokens, causal, key_mask(memory.visible))
        z = self.token_embed(tokens, mask, past)
        for block, kept in zip(self.blocks, cache.blocks if cache else [None] * self.depth, strict=True):
            z = block(z, *looks_at, cache=kept)
        return self.norm(z)

    def logits(self, z: Tensor) -> Tensor:
        """(..., D) -> (..., V)."""
        return self.output(z, self.token_embed.tokens.weight)


class DecoderModel(nn.Module):
    """What a model that writes is to `generate`: a decoder, with or without an encoder before it."""

    decoder: Decoder

    @property
    def vocab_size(self) -> int:
        """V, tokens that it may write."""
        return self.decoder.token_embed.tokens.num_embeddings

    @property
    def max_length(self) -> int:
        """The most tokens that it reads."""
        return self.decoder.token_embed.max_length

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory | None:
        """What it looks at while it writes: nothing but its own tokens."""
        return None

    def new_cache(self) -> Cache:
        """What it remembers while it writes, still empty."""
        return Cache(self.decoder.depth)

    def next_logits(self, tokens: Tensor, memory: Memory | None, mask: Tensor | None, cache: Cache | None) -> Tensor:
        """(R, T) -> logits (R, V) of the token after the last; the arguments are those of `decode`."""
        return self.decoder.logits(self.decoder(tokens, memory, mask, cache)[:, -1])


class TextDecoder(DecoderModel):
    """A language model: `model(tokens)` gives the logits (B, T, V) of each next token."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        self.config = config
        self.preprocess = None
        self.labels: list[str] | None = None
        self.load_report: Any = None
        self.decoder = Decoder(config, memory=False)
        init_text(self)

    def decode(self, tokens: Tensor, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """(B, T) -> logits (B, T, V). With a cache, `tokens` are the new ones, the mask (B, past + T) is for all."""
        return self.decoder.logits(self.decoder(tokens, None, mask, cache))

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(B, T) -> logits (B, T, V)."""
        return self.decode(tokens, mask)


# ---- the whole ----


class Seq2Seq(DecoderModel):
    """`model(source, tokens)` gives the logits (B, T, V) of each next token, where all before it are given.

    The source is images (B, C, H, W) with a mask of pixels (B, H, W), or tokens (B, M) with a mask of tokens.
    """

    def __init__(self, config: Seq2SeqConfig, encoder: "VisionTransformer | TextEncoder | None" = None) -> None:
        """`encoder` brings its weights along; it must be of `config.vit` or `config.encoder`."""
        super().__init__()
        c = config
        self.config = config
        self.preprocess = Preprocess(img_size=c.vit.img_size).for_channels(c.vit.in_chans) if c.vit else None
        self.labels: list[str] | None = None
        self.load_report: Any = None
        self.encoder = encoder or (VisionTransformer(c.vit) if c.vit else TextEncoder(cast(TextConfig, c.encoder)))
        width, D = self.encoder.config.embed_dim, c.decoder.embed_dim
        self.memory_proj = nn.Identity() if width == D else nn.Linear(width, D)
        self.decoder = Decoder(c.decoder, memory=True)
        init_text(self.decoder)
        init_text(self.memory_proj)

    @property
    def backbone(self) -> "VisionTransformer | TextEncoder":
        """The encoder."""
        return self.encoder

    def encode(self, source: Tensor, mask: Tensor | None = None) -> Memory:
        """Images or tokens -> the memory, computed once for however many tokens are written."""
        if isinstance(self.encoder, VisionTransformer):
            z = self.encoder.forward_features(source, pad=True, mask=mask)
            visible = None if mask is None else self.encoder.visible_tokens(source, pad=True, mask=mask)
        else:
            z, visible = self.encoder.forward_features(source, mask), self.encoder.visible(source, mask)
        return Memory(self.memory_proj(z), visible)

    def decode(self, tokens: Tensor, memory: Memory, mask: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """(B, T) -> logits (B, T, V). With a cache, `tokens` are the new ones, the mask (B, past + T) is for all."""
        return self.decoder.logits(self.decoder(tokens, memory, mask, cache))

    def forward(
        self, source: Tensor, tokens: Tensor, mask: Tensor | None = None, token_mask: Tensor | None = None
    ) -> Tensor:
        """A source and tokens (B, T), the target shifted right -> logits (B, T, V).

        Padding at the right of the tokens needs no `token_mask`: no token before it looks there.
        """
        return self.decode(tokens, self.encode(source, mask), token_mask)

    def attention(self, tokens: Tensor, memory: Memory, mask: Tensor | None = None) -> list[tuple[Tensor, Tensor]]:
        """Exact softmax rows of every decoder block: to tokens (B, h, T, T), and to the memory (B, h, T, M)."""
        self.decoder.token_embed.check(tokens, mask)
        causal, seen = causal_mask(tokens.shape[1], 0, mask, tokens.device), key_mask(memory.visible)
        z, rows = self.decoder.token_embed(tokens, mask), []
        for block in self.decoder.blocks:
            rows.append(cast(DecoderBlock, block).attention_rows(z, memory.tokens, causal, seen))
            z = block(z, memory.tokens, causal, seen)
        return rows


def init_text(model: nn.Module) -> None:
    """Starting weights: matrices xavier uniform, biases 0; normal embeddings of 1 / sqrt(D), and positions of 0.02."""
    for name, parameter in model.named_parameters():
        if parameter.device.type == "meta":  # shapes without numbers
            return
        if "norm" in name:
            continue
        if name.endswith("pos_embed"):
            nn.init.normal_(parameter, std=0.02)
        elif name.endswith(("tokens.weight", "output.weight")):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        elif parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
