"""How good tags are beside the true ones: by word, by label, by text, and by entity where they are BIO.

Knows nothing about models or tokens; it sees the tags of texts as lists of strings.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from vitral.errors import DataError
from vitral.tasks.metrics import wilson_interval

Tags = Sequence[Sequence[str]]
"""The tags of several texts."""
Entity = tuple[str, int, int]
"""Its type, its first word, and the word after its last."""


def tag_metrics(said: Tags, true: Tags, labels: Sequence[str]) -> dict[str, Any]:
    """Accuracy of words with its interval, macro F1, texts without a mistake, a table by label; entities where BIO.

    `f1` is that of entities where the labels are BIO, or else the mean over the labels that occur. The interval takes
    words to be independent of each other.
    """
    pairs = [pair for rows in zip(said, true, strict=True) for pair in zip(*rows, strict=True)]
    if not pairs:
        raise DataError("there are no words to measure; give at least one.")
    hits = Counter(s for s, t in pairs if s == t)
    told, there = Counter(s for s, _ in pairs), Counter(t for _, t in pairs)
    by_label = {name: {"words": there[name], **_scores(hits[name], told[name], there[name])} for name in labels}
    macro = sum(by_label[name]["f1"] for name in there) / len(there)
    return {
        "images": len(true),
        "words": len(pairs),
        "accuracy": hits.total() / len(pairs),
        "accuracy_95": list(wilson_interval(hits.total(), len(pairs))),
        "f1": macro,
        "f1_macro": macro,
        "exact": sum(list(s) == list(t) for s, t in zip(said, true, strict=True)) / len(true),
        "by_label": by_label,
        **(entity_metrics(said, true) if is_bio(labels) else {}),
    }


def _scores(hits: int, told: int, there: int) -> dict[str, float]:
    """Precision, recall and their harmonic mean F1; 0 where there is nothing to divide by."""
    return {
        "precision": hits / told if told else 0.0,
        "recall": hits / there if there else 0.0,
        "f1": 2 * hits / (told + there) if told + there else 0.0,
    }


# ---- entities ----


def is_bio(labels: Sequence[str]) -> bool:
    """Whether labels mark entities: B-X at the first word of one of type X, I-X within it, O outside of all."""
    marks = [label.partition("-") for label in labels if label != "O"]
    return bool(marks) and all(mark in ("B", "I") and kind for mark, _, kind in marks)


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities that BIO tags mark (IOB2).

    A stray I-X, which goes on with no entity of type X, begins one, as in CoNLL's own script conlleval.
    """
    found, open_kind, start = set(), "", 0
    for i, tag in enumerate([*tags, "O"]):
        mark, _, kind = tag.partition("-")
        if open_kind and (mark != "I" or kind != open_kind):
            found.add((open_kind, start, i))
            open_kind = ""
        if kind and not open_kind:
            open_kind, start = kind, i
    return found


def entity_metrics(said: Tags, true: Tags) -> dict[str, Any]:
    """Precision, recall and F1 of entities, over all and by type; one counts if its type and both ends are right."""
    hits, told, there = Counter[str](), Counter[str](), Counter[str]()
    for said_tags, true_tags in zip(said, true, strict=True):
        found, wanted = entities(said_tags), entities(true_tags)
        for counter, several in ((hits, found & wanted), (told, found), (there, wanted)):
            counter.update(kind for kind, _, _ in several)
    total = _scores(hits.total(), told.total(), there.total())
    kinds = sorted(told | there)
    return {
        "f1": total["f1"],
        "entities": there.total(),
        **{f"entity_{name}": value for name, value in total.items()},
        "by_entity": {k: {"entities": there[k], **_scores(hits[k], told[k], there[k])} for k in kinds},
    }
