"""English number words and the Italian ones, 0 to 999,999, spelt by rule: a translation whose every truth is known.

Where Italian allows two spellings, one is used throughout. `cento` keeps its vowel before uno, undici and otto
(centouno, centootto), and loses it before ottanta only (centottanta, duecentottantotto), as Hoepli's "Si dice o non si
dice?" has it under centuno; and uno stays whole before mila (ventunomila).
"""

from functools import cache

import torch
from torch import Tensor

from vitral.data.noise import Noise
from vitral.data.sources.base import Data
from vitral.data.text import make_pairs
from vitral.errors import DataError

LIMIT = 1_000_000
"""The first number that is not spelt."""
SMALL = 100
"""Numbers below this are all trained on: they are the words that the others are made of."""
HELD_OUT = 0.1
"""Share of the other numbers that is kept for validation, and again for the test."""

# ---- English ----

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def english(n: int) -> str:
    """British words: a hyphen in twenty-one, "and" before what is below a hundred, no commas."""
    thousands, rest = _halves(n)
    if not thousands:
        return _english_group(rest)
    words = f"{_english_group(thousands)} thousand"
    if not rest:
        return words
    return f"{words} and {_english_group(rest)}" if rest < 100 else f"{words} {_english_group(rest)}"


@cache
def _english_group(n: int) -> str:
    hundreds, rest = divmod(n, 100)
    if hundreds:
        return f"{_ONES[hundreds]} hundred" + (f" and {_english_group(rest)}" if rest else "")
    if n < 20:
        return _ONES[n]
    return _TENS[n // 10 - 2] + (f"-{_ONES[n % 10]}" if n % 10 else "")


# ---- Italian ----

_UNITS = (
    "zero", "uno", "due", "tre", "quattro", "cinque", "sei", "sette", "otto", "nove", "dieci", "undici", "dodici",
    "tredici", "quattordici", "quindici", "sedici", "diciassette", "diciotto", "diciannove",
)  # fmt: skip
_DECINE = ("venti", "trenta", "quaranta", "cinquanta", "sessanta", "settanta", "ottanta", "novanta")


def italian(n: int) -> str:
    """One word, with the accent on a final tre that is not alone."""
    thousands, rest = _halves(n)
    start = "" if not thousands else "mille" if thousands == 1 else f"{_italian_group(thousands)}mila"
    word = start + (_italian_group(rest) if rest or not start else "")
    return f"{word.removesuffix('tre')}tré" if word.endswith("tre") and word != "tre" else word


@cache
def _italian_group(n: int) -> str:
    hundreds, rest = divmod(n, 100)
    if hundreds:
        cento = "cento" if hundreds == 1 else f"{_UNITS[hundreds]}cento"
        if rest // 10 == 8:
            cento = cento.removesuffix("o")  # centottanta
        return cento + (_italian_group(rest) if rest else "")
    if n < 20:
        return _UNITS[n]
    tens, unit = _DECINE[n // 10 - 2], n % 10
    if unit in (1, 8):
        tens = tens[:-1]  # ventuno, ventotto
    return tens + (_UNITS[unit] if unit else "")


def _halves(n: int) -> tuple[int, int]:
    """Thousands, and what is below a thousand."""
    if not 0 <= n < LIMIT:
        raise DataError(f"numbers are spelt from 0 to {LIMIT - 1:,}, got {n:,}; give one between.")
    return divmod(n, 1000)


# ---- the data set ----


def make_numbers(train: int = 20_000, test: int = 2_000, val: int = 1_000, seed: int = 0) -> Data:
    """Pairs of number words, as many as can be of three digits as of four, five and six; all below 100 to train.

    The seed alone decides which numbers are held out, whatever the sizes: a number never changes sides.
    """
    noise = Noise(seed, torch.arange(LIMIT))
    part, rank = noise.uniform("part")[:, 0], noise.uniform("rank")[:, 0]
    drawn = {
        "train": _draw(part >= 2 * HELD_OUT, rank, train - min(train, SMALL), "train"),
        "val": _draw((part >= HELD_OUT) & (part < 2 * HELD_OUT), rank, val, "val"),
        "test": _draw(part < HELD_OUT, rank, test, "test"),
    }
    drawn["train"] = [*range(min(train, SMALL)), *drawn["train"]]
    numbers = [n for members in drawn.values() for n in members]
    places = torch.arange(len(numbers)).split([len(members) for members in drawn.values()])
    return make_pairs(
        "numbers-en-it",
        [(english(n), italian(n)) for n in numbers],
        splits={name: place for name, place in zip(drawn, places, strict=True) if len(place)},
        licence="none needed (made by rule)",
        recipe="numbers-en-it",
    )


def _draw(allowed: Tensor, rank: Tensor, count: int, what: str) -> list[int]:
    """The allowed numbers of lowest rank, shared among the lengths of three to six digits, evenly while they last."""
    pools = []
    for digits in (3, 4, 5, 6):
        low, high = 10 ** (digits - 1), 10**digits
        members = allowed[low:high].nonzero()[:, 0] + low
        pools.append(members[rank[members].argsort()])
    there = sum(map(len, pools))
    if count > there:
        raise DataError(
            f"{what} has {there:,} numbers of three to six digits, {count:,} were asked for; ask for fewer."
        )
    chosen: list[int] = []
    for left, pool in zip((4, 3, 2, 1), pools, strict=True):  # the shorter the numbers, the fewer there are
        chosen += pool[: (count - len(chosen)) // left].tolist()
    return chosen
