"""How good texts are beside those they should be: exact ones, errors by character, BLEU and chrF.

Knows nothing about models or tokens; it sees lists of strings.
"""

from collections import defaultdict
from typing import Any

from vitral.errors import DataError
from vitral.tasks.metrics import wilson_interval


def edit_distance(a: str, b: str) -> int:
    """The fewest characters to insert, delete or replace to make b of a (Levenshtein, 1966).

    Bit-parallel (Myers, 1999, as put by Hyyrö, 2003): bit i of an integer stands for row i of a column of the table.
    Neighbours in the table differ by at most 1, so two integers hold a column: where it rises and where it falls.
    """
    if not a:
        return len(b)
    places: dict[str, int] = defaultdict(int)
    for i, character in enumerate(a):
        places[character] |= 1 << i
    rows, last = (1 << len(a)) - 1, 1 << (len(a) - 1)
    rises, falls, distance = rows, 0, len(a)  # down the first column: 0, 1, 2, ...
    for character in b:
        equal = places.get(character, 0)
        free = (((equal & rises) + rises) ^ rises) | equal | falls  # the step along the diagonal costs nothing
        right_up, right_down = falls | (rows & ~(free | rises)), free & rises
        distance += bool(right_up & last) - bool(right_down & last)
        right_up, right_down = right_up << 1 | 1, right_down << 1  # along the first row: 0, 1, 2, ...
        rises, falls = rows & (right_down | ~(free | right_up)), rows & free & right_up
    return distance


def text_metrics(said: list[str], true: list[str]) -> dict[str, Any]:
    """Share of exact texts with its interval, character error rate, BLEU and chrF of 100, and a table by length."""
    if len(said) != len(true):
        raise DataError(f"{len(said)} texts were said and {len(true)} are true; give one of each for every example.")
    if not true:
        raise DataError("there are no texts to measure; give at least one.")
    pairs = [(edit_distance(s, t), len(t)) for s, t in zip(said, true, strict=True)]
    total = _rates(pairs)
    low, high = wilson_interval(sum(distance == 0 for distance, _ in pairs), len(pairs))
    return {
        "exact": total["exact"],
        "exact_95": [low, high],
        "cer": total["cer"],
        **_corpus_scores(said, true),
        "by_length": _by_length(pairs),
    }


def _rates(pairs: list[tuple[int, int]]) -> dict[str, Any]:
    """Count, share of exact texts and character error rate of pairs (distance, characters of the true text)."""
    errors, characters = (sum(numbers) for numbers in zip(*pairs, strict=True))
    return {
        "count": len(pairs),
        "exact": sum(distance == 0 for distance, _ in pairs) / len(pairs),
        "cer": errors / max(characters, 1),  # all true texts may be empty
    }


def _by_length(pairs: list[tuple[int, int]]) -> dict[str, dict[str, Any]]:
    """The rates of true texts of 1, 2-3, 4-7, 8-15, ... characters, of those lengths that occur."""
    groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for pair in pairs:
        groups[pair[1].bit_length()].append(pair)
    return {_length_name(bits): _rates(groups[bits]) for bits in sorted(groups)}


def _length_name(bits: int) -> str:
    """The lengths that are written with as many bits: 3 -> 4-7."""
    return str(bits) if bits < 2 else f"{1 << (bits - 1)}-{(1 << bits) - 1}"


def _corpus_scores(said: list[str], true: list[str]) -> dict[str, Any]:
    """BLEU and chrF as sacrebleu computes them by default, and how it names that BLEU."""
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError:
        raise DataError("BLEU and chrF need sacrebleu: pip install 'vitral[train]'.") from None
    bleu = BLEU()
    return {
        "words": sum(len(text.split()) for text in true) / len(true),
        "bleu": float(bleu.corpus_score(said, [true]).score),
        "chrf": float(CHRF().corpus_score(said, [true]).score),
        "bleu_signature": str(bleu.get_signature()),
    }
