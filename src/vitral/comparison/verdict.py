"""Which model is best with how much data, and whether that is more than luck of the seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from vitral.comparison.experiment import Result


@dataclass(frozen=True)
class Summary:
    """A model on one share of the data, over its seeds."""

    label: str
    fraction: float
    images: float
    accuracy: float
    """Mean over the seeds."""
    spread: float | None
    """Standard deviation over the seeds; None for one seed."""
    low: float
    high: float
    seeds: int
    seconds: float
    macs: float


def summarize(results: Sequence[Result]) -> list[Summary]:
    """One line for each model and share, in the order of the results."""
    groups: dict[tuple[str, float], list[Result]] = {}
    for result in results:
        groups.setdefault((result.label, result.fraction), []).append(result)
    rows = []
    for (label, fraction), group in groups.items():
        values = [result.accuracy for result in group]
        spread = stdev(values) if len(values) > 1 else None
        means = [mean(getattr(result, name) for result in group) for name in ("images", "seconds", "macs")]
        rows.append(
            Summary(label, fraction, means[0], mean(values), spread, min(values), max(values), len(values), *means[1:])
        )
    return rows


TIMES = {2: 3.04, 3: 1.60, 4: 1.22, 5: 1.03}
"""Student's t for 95 % with 2 n - 2 degrees of freedom, over sqrt(n): by so many spreads of a single difference must
means over n seeds differ to be more than chance. From 6 seeds on it is less than 1, which is asked for all the same."""


@dataclass(frozen=True)
class Verdict:
    """The best model with a share of the data, and what separates it from the next."""

    fraction: float
    best: str
    second: str | None
    gap: float
    """Accuracy of the best less that of the second."""
    spread: float | None
    """Standard deviation of such a difference between two single runs, sqrt(s_1^2 + s_2^2)."""
    seeds: int = 1
    """Of each of the two."""

    @property
    def chance(self) -> float | None:
        """The gap that two equal models would stay below in 95 % of cases; None where no spread is known."""
        return None if self.spread is None else TIMES.get(self.seeds, 1.0) * self.spread

    @property
    def clear(self) -> bool | None:
        """Whether the gap is more than chance gives; None where no spread is known."""
        return None if self.chance is None else self.gap > self.chance

    def sentence(self, accuracy: float) -> str:
        """The verdict in plain words."""
        told = f"With {100 * self.fraction:g} % of the training images {self.best} is best ({100 * accuracy:.2f} %)"
        if self.second is None:
            return f"{told}; it is the only one."
        told += f", {100 * self.gap:.2f} points before {self.second}"
        if self.chance is None:
            return f"{told}; with one seed nobody knows whether that is more than chance."
        relation = "more" if self.clear else "not more"
        return f"{told}: {relation} than chance gives with {self.seeds} seeds ({100 * self.chance:.2f} points)."


def judge(rows: Sequence[Summary]) -> list[tuple[Verdict, str]]:
    """A verdict for each share of the data, with its sentence."""
    verdicts = []
    for fraction in sorted({row.fraction for row in rows}):
        first, *rest = sorted((r for r in rows if r.fraction == fraction), key=lambda row: row.accuracy, reverse=True)
        if not rest:
            verdict = Verdict(fraction, first.label, None, 0.0, None)
        else:
            second = rest[0]
            known = first.spread is not None and second.spread is not None
            spread = math.hypot(first.spread or 0.0, second.spread or 0.0) if known else None
            seeds = min(first.seeds, second.seeds)
            verdict = Verdict(fraction, first.label, second.label, first.accuracy - second.accuracy, spread, seeds)
        verdicts.append((verdict, verdict.sentence(first.accuracy)))
    return verdicts
