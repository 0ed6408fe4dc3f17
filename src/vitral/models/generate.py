"""Writing token by token: greedy, by beam search, or by sampling.

B sources, K beams (or draws) of each, R = B K rows, V vocabulary. What is written for a source depends neither on the
others in its batch nor on padding. Knows nothing of words.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from vitral.errors import InputError
from vitral.models.seq2seq import Memory, check_tokens

Method = Literal["greedy", "beam", "sample"]
EarlyStopping = bool | Literal["never"]
METHODS = ("greedy", "beam", "sample")
NEVER = float("-inf")


@runtime_checkable
class Author(Protocol):
    """What can write: `vitral.models.seq2seq.DecoderModel`, or a file that was made of one."""

    @property
    def vocab_size(self) -> int:
        """V, tokens that it may write."""
        ...

    @property
    def max_length(self) -> int:
        """The most tokens that it reads."""
        ...

    def encode(self, source: Tensor, mask: Tensor | None) -> Memory | None:
        """What it looks at while it writes; None if the source is what it goes on with."""
        ...

    def new_cache(self) -> "Kept":
        """What it remembers while it writes, still empty."""
        ...

    def next_logits(self, tokens: Tensor, memory: Memory | None, mask: Tensor | None, cache: Any) -> Tensor:
        """(R, T) -> logits (R, V) of the token after the last; without a cache, all tokens are given anew."""
        ...


class Kept(Protocol):
    """What is remembered of tokens that were read."""

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows of tokens in this order, each as often as it is named; and these sources, None for all."""
        ...


@dataclass(frozen=True)
class Generated:
    """One sequence that was written."""

    tokens: list[int]
    """What was written, without the prompt and without EOS."""
    score: float
    """Sum of the log probabilities of its tokens and of EOS, divided by their number to the power of the penalty."""
    ended: bool
    """Whether EOS ended it; else the maximum length did."""


@torch.inference_mode()
def generate(
    model: Author,
    source: Tensor,
    *,
    max_length: int,
    eos: int,
    bos: int | None = None,
    pad: int = 0,
    mask: Tensor | None = None,
    method: Method = "greedy",
    beam: int = 4,
    n_best: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    never: Sequence[int] = (),
    cache: bool = True,
) -> list[list[Generated]]:
    """Write at most `max_length` tokens, EOS included, for each source: the `n_best` of each, best first.

    The source is what `model.encode` takes, and writing begins after `bos`; or, for a language model, prompts (B, T).
    `mask` is False on their padding, `never` are tokens that are not written. Options that only one method has:

    - beam: `beam`, the width, of which 1 is greedy; `early_stopping` as in transformers: True stops when `beam`
      sequences have ended, False when no open one would beat them at its present length, "never" when none ever can.
    - sample: `temperature`; `top_k`, the most tokens to choose from; `top_p`, the share of probability that they need
      not exceed; `seed`, one for all sources alike or one for each. `n_best` is the number of draws, in their order.
    """
    _check(model, method, max_length, beam, n_best, temperature, top_k, top_p, eos)
    writer = _Writer.begin(model, source, mask, bos, pad, max_length, cache)
    writer.never = list(never)
    if method == "beam" and beam > 1:
        return _beam(writer, max_length, eos, pad, beam, n_best, length_penalty, early_stopping)
    if method == "sample":
        choose = _sampler(_uniforms(seed, writer.sources, n_best, max_length), temperature, top_k, top_p)
    else:
        choose = _greedy
    return _one_by_one(writer, max_length, eos, pad, n_best, length_penalty, choose)


# ---- the model, as the methods see it ----


class _Writer:
    """Feeds a decoder, and remembers what it has read: in a cache, or else as tokens that it reads anew each time."""

    def __init__(self, model: Author, memory: Memory | None, prompt: Tensor, mask: Tensor | None) -> None:
        self.model, self.memory, self.mask = model, memory, mask
        self.new = prompt  # (R, n), not read yet
        self.sources = len(prompt)
        self.never: list[int] = []
        self.cache: Kept | None = None

    @classmethod
    def begin(
        cls,
        model: Author,
        source: Tensor,
        mask: Tensor | None,
        bos: int | None,
        pad: int,
        max_length: int,
        cache: bool,
    ) -> "_Writer":
        """Encode the sources, once; or take them as the prompts that they are."""
        memory = model.encode(source, mask)
        if memory is None:
            check_tokens(source, mask, model.vocab_size, model.max_length, what="prompt")
            writer = cls(model, None, *_to_the_right(source, mask))
        elif bos is None:
            raise InputError("writing needs a token to begin after; give bos=.")
        else:
            prompt = torch.full((len(memory.tokens), 1), bos, device=memory.tokens.device)
            writer = cls(model, memory, prompt, None)
        longest = writer.new.shape[1] + max_length - 1  # the last token is never read
        limit = model.max_length
        if longest > limit:
            raise InputError(
                f"max_length must be at most {limit - writer.new.shape[1] + 1} here, as the decoder reads "
                f"{limit} tokens, got {max_length}."
            )
        size = model.vocab_size
        for name, token in (("bos", bos), ("pad", pad)):
            if token is not None and not 0 <= token < size:
                raise InputError(f"{name} must be a token from 0 to {size - 1}, got {token}.")
        writer.cache = model.new_cache() if cache else None
        return writer

    def read(self) -> Tensor:
        """Read what is new, and return log p of each next token: (R, V)."""
        logits = self.model.next_logits(self.new, self.memory, self.mask, self.cache).float()
        logits[:, self.never] = NEVER
        return logits.log_softmax(-1)

    def write(self, tokens: Tensor) -> None:
        """Add a token (R) to each row."""
        self.new = tokens[:, None] if self.cache else torch.cat([self.new, tokens[:, None]], dim=1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)

    def select(self, rows: Tensor, sources: Tensor | None = None) -> None:
        """Keep these rows, in this order and as often as they are named; and these sources, None for all."""
        self.new = self.new[rows]
        if self.mask is not None:
            self.mask = self.mask[rows]
        if self.cache is not None:
            self.cache.select(rows, sources)
        if sources is not None:
            self.sources = len(sources)
            if self.memory is not None:
                self.memory = self.memory.select(sources)


def _to_the_right(prompt: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Move the padding of prompts (B, T) to the left, so that all of them end where writing begins."""
    if mask is None or bool(mask.all()):
        return prompt, None
    order = mask.long().argsort(dim=1, stable=True)
    return prompt.gather(1, order), mask.gather(1, order)


# ---- greedy and sampling ----

Choose = Callable[[Tensor, int, Tensor], Tensor]
"""log p (R, V), the step, and which rows these are among all (R) -> a token for each (R)."""


def _one_by_one(
    writer: _Writer, max_length: int, eos: int, pad: int, draws: int, penalty: float, choose: Choose
) -> list[list[Generated]]:
    """Write one token after the other, each row for itself."""
    B = writer.sources
    log_p = writer.read().repeat_interleave(draws, 0)
    device = log_p.device
    rows = torch.arange(B * draws, device=device)  # which rows are still in the batch
    writer.select(rows // draws)
    tokens = torch.full((B * draws, max_length), pad, device=device)
    total = torch.zeros(B * draws, dtype=torch.float64, device=device)
    length = torch.full((B * draws,), max_length, device=device)
    ended = torch.zeros(B * draws, dtype=torch.bool, device=device)
    for step in range(max_length):
        token = choose(log_p, step, rows)
        was_open = ~ended[rows]
        total[rows] += log_p.gather(1, token[:, None])[:, 0].double() * was_open
        token = token.where(was_open, pad)
        tokens[rows, step] = token
        ends = was_open & (token == eos)
        length[rows[ends]] = step + 1
        ended[rows[ends]] = True
        if step + 1 == max_length or bool(ended.all()):
            break
        sources = _worth_keeping(~ended[rows].view(-1, draws).all(dim=1))
        if sources is not None:
            kept = (sources[:, None] * draws + torch.arange(draws, device=device)).flatten()
            writer.select(kept, sources)
            rows, token = rows[kept], token[kept]
        writer.write(token)
        log_p = writer.read()
    score = total / length.double() ** penalty
    found = [
        Generated(row[: n - end], s, end)
        for row, n, s, end in zip(tokens.tolist(), length.tolist(), score.tolist(), ended.tolist(), strict=True)
    ]
    return [found[i : i + draws] for i in range(0, B * draws, draws)]


def _worth_keeping(is_open: Tensor) -> Tensor | None:
    """The sources to go on with, which are the open ones once they are at most half of the batch (b); None for all."""
    return is_open.nonzero()[:, 0] if 2 * int(is_open.sum()) <= len(is_open) else None


def _greedy(log_p: Tensor, step: int, rows: Tensor) -> Tensor:
    return log_p.argmax(-1)


def _uniforms(seed: int | Sequence[int], sources: int, draws: int, steps: int) -> Tensor:
    """A number in 0..1 for each step of each row (R, steps); a row's depend on its seed and its draw alone."""
    seeds = [seed] * sources if isinstance(seed, int) else list(seed)
    if len(seeds) != sources:
        raise InputError(f"seed must be one number, or one for each of the {sources} sources, got {len(seeds)}.")
    return torch.from_numpy(
        np.stack([np.random.default_rng([each, draw]).random(steps) for each in seeds for draw in range(draws)])
    )


def _sampler(uniforms: Tensor, temperature: float, top_k: int | None, top_p: float) -> Choose:
    """Sampling: the token at which the probabilities, summed from the largest on, pass the row's number."""

    def choose(log_p: Tensor, step: int, rows: Tensor) -> Tensor:
        sharp, order = (log_p.double() / temperature).sort(dim=-1, descending=True, stable=True)
        if top_k is not None:
            sharp, order = sharp[:, :top_k], order[:, :top_k]
        p = sharp.softmax(-1)
        p = p.where(p.cumsum(-1) - p < top_p, 0)  # the first stays, whatever top_p
        reach = p.cumsum(-1)
        u = uniforms.to(log_p.device)[rows, step, None] * reach[:, -1:]
        place = (reach <= u).sum(dim=-1, keepdim=True).clamp(max=p.shape[1] - 1)
        return order.gather(1, place)[:, 0]

    return choose


# ---- beam search ----


def _beam(
    writer: _Writer,
    max_length: int,
    eos: int,
    pad: int,
    K: int,
    n_best: int,
    penalty: float,
    early_stopping: EarlyStopping,
) -> list[list[Generated]]:
    """Beam search, with the rules of transformers: of 2 K candidates the first K may end, and the best K others go on.

    A candidate that has reached the maximum length has ended too. What is kept of a source no longer changes once its
    search is over, even where others in the batch go on.
    """
    B = writer.sources
    log_p = writer.read()
    device, V = log_p.device, log_p.shape[1]
    if V < 2:
        raise InputError(f"beam search needs a vocabulary of at least 2 tokens, got {V}.")
    writer.select(torch.arange(B, device=device).repeat_interleave(K))
    log_p = log_p.repeat_interleave(K, 0)

    open_tokens = torch.full((B, K, max_length), pad, device=device)
    open_scores = torch.full((B, K), NEVER, device=device)
    open_scores[:, 0] = 0.0  # all beams start alike: one speaks for them
    done_tokens, done_scores = open_tokens.clone(), torch.full((B, K), NEVER, device=device)
    done_lengths = torch.zeros(B, K, dtype=torch.long, device=device)
    done_ended = torch.zeros(B, K, dtype=torch.bool, device=device)
    left = torch.arange(B, device=device)  # which sources are still in the batch
    going = torch.ones(B, dtype=torch.bool, device=device)

    for step in range(max_length):
        b, length = len(left), step + 1
        candidates = (open_scores[left, :, None] + log_p.view(b, K, V)).flatten(1)  # (b, K V)
        scores, places = candidates.topk(2 * K)  # (b, 2 K)
        beams, tokens = places // V, places % V
        sequences = open_tokens[left[:, None], beams]  # (b, 2 K, max_length)
        sequences[:, :, step] = tokens
        is_eos = tokens == eos
        ends = is_eos if length < max_length else torch.ones_like(is_eos)

        # What ended, if it is among the first K, competes with what ended before.
        may_end = ends & (torch.arange(2 * K, device=device) < K) & (scores > NEVER) & going[left, None]
        ending = (scores / length**penalty).masked_fill(~may_end, NEVER)
        best, order = torch.cat([done_scores[left], ending], dim=1).topk(K)
        done_scores[left] = best
        lengths = torch.full_like(tokens, length)
        done_lengths[left] = torch.cat([done_lengths[left], lengths], dim=1).gather(1, order)
        done_ended[left] = torch.cat([done_ended[left], is_eos], dim=1).gather(1, order)
        done_tokens[left] = _gather(torch.cat([done_tokens[left], sequences], dim=1), order)
        if length == max_length:
            break

        # The best K of the others go on.
        best, order = scores.masked_fill(ends, NEVER).topk(K)
        open_scores[left], open_tokens[left] = best, _gather(sequences, order)
        going[left] &= _worth_going_on(best[:, 0], done_scores[left], length, max_length, penalty, early_stopping)
        if not going.any():
            break
        origin = torch.arange(b, device=device)[:, None] * K + beams.gather(1, order)  # the row each one comes from
        tokens, sources = tokens.gather(1, order), _worth_keeping(going[left])
        if sources is not None:
            origin, tokens, left = origin[sources], tokens[sources], left[sources]
        writer.select(origin.flatten(), sources)
        writer.write(tokens.flatten())
        log_p = writer.read()

    return [
        [
            Generated(row[: n - end], score, end)
            for row, n, score, end in zip(*of_source, strict=True)
            if score > NEVER  # fewer than K sequences may exist
        ][:n_best]
        for of_source in zip(
            done_tokens.tolist(), done_lengths.tolist(), done_scores.tolist(), done_ended.tolist(), strict=True
        )
    ]


def _worth_going_on(
    best_open: Tensor, done: Tensor, length: int, max_length: int, penalty: float, early_stopping: EarlyStopping
) -> Tensor:
    """Which sources (b) are not finished: `best_open` (b) is a sum of log p, `done` (b, K) are scores."""
    worst = done.amin(dim=1)  # no score at all while fewer than K have ended
    if early_stopping is True:
        return (worst == NEVER) & (best_open > NEVER)
    hoped = max_length if early_stopping == "never" and penalty > 0 else length
    return best_open / hoped**penalty > worst


def _gather(sequences: Tensor, order: Tensor) -> Tensor:
    """(b, n, length), (b, K) -> (b, K, length)."""
    return sequences.gather(1, order[:, :, None].expand(-1, -1, sequences.shape[2]))


# ---- checks ----


def _check(
    model: object,
    method: str,
    max_length: int,
    beam: int,
    n_best: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    eos: int,
) -> None:
    if not isinstance(model, Author):
        raise InputError(f"only a Seq2Seq or a TextDecoder can write, got {type(model).__name__}.")
    if method not in METHODS:
        raise InputError(f"method must be one of {', '.join(METHODS)}, got {method!r}.")
    whole = {"max_length": max_length, "beam": beam, "n_best": n_best, "top_k": 1 if top_k is None else top_k}
    for name, value in whole.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}.")
    most = {"greedy": 1, "beam": beam, "sample": n_best}[method]
    if n_best > most:
        raise InputError(f"n_best must be at most {most} with method {method}, got {n_best}; widen the beam.")
    if not temperature > 0:
        raise InputError(f"temperature must be above 0, got {temperature}; for the likeliest token, use greedy.")
    if not 0 < top_p <= 1:
        raise InputError(f"top_p must be above 0 and at most 1, got {top_p}.")
    if not 0 <= eos < model.vocab_size:
        raise InputError(f"eos must be a token from 0 to {model.vocab_size - 1}, got {eos}.")
