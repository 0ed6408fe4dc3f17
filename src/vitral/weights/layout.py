"""What a published layout of weights is: a table from its names to ours, read both ways.

A rule pairs names of ours with names in the file, and says what is done to the tensors between the two. `{i}` stands
for the number of a block, `*` for `weight` and `bias`. Our names are timm's (docs/weights.md).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vitral.errors import CheckpointError
from vitral.models.zoo import FAMILIES, Family

Names = Mapping[str, "Lazy"]
MAX_DEPTH = 1000


@dataclass(frozen=True)
class Lazy:
    """A tensor in a file: its shape and type are known, its numbers are read when they are asked for."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Size of the numbers."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


# ---- what is done to tensors on the way ----


@dataclass(frozen=True)
class Op:
    """From the tensors of a file to ours, and back; `write` is told the number of heads."""

    about: str
    read: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    write: Callable[[Sequence[Tensor], int], Sequence[Tensor]]


def _each(about: str, read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]) -> Op:
    return Op(about, lambda ts: [read(t) for t in ts], lambda ts, heads: [write(t) for t in ts])


SAME = _each("", lambda t: t, lambda t: t)
TRANSPOSE = _each("transposed", lambda t: t.t(), lambda t: t.t())
CONV = _each("HWIO to OIHW", lambda t: t.permute(3, 2, 0, 1), lambda t: t.permute(2, 3, 1, 0))
FLAT = _each("flattened", lambda t: t.flatten(), lambda t: t)
ONE_AXIS = _each("one axis more", lambda t: t[None], lambda t: t[0])
TWO_AXES = _each("two axes more", lambda t: t[None, None], lambda t: t[0, 0])
FUSE_QKV = Op("q, k, v fused", lambda ts: [torch.cat(list(ts))], lambda ts, heads: ts[0].chunk(3))
FUSE_GATE = Op("gate and value fused", lambda ts: [torch.cat(list(ts))], lambda ts, heads: ts[0].chunk(2))
JOIN_ROWS = Op(
    "rows joined", lambda ts: [torch.cat(list(ts), 1)], lambda ts, heads: ts[0].split([1, ts[0].shape[1] - 1], 1)
)
SPLIT_POOL = Op(
    "in_proj split",
    lambda ts: ts[0].split([len(ts[0]) // 3, 2 * len(ts[0]) // 3]),
    lambda ts, heads: [torch.cat(list(ts))],
)
HEADS_QKV = Op(
    "heads joined, q, k, v fused",
    lambda ts: [torch.cat([t.flatten(1).t() for t in ts])],
    lambda ts, heads: [t.t().unflatten(1, (heads, -1)) for t in ts[0].chunk(3)],
)
HEADS_QKV_BIAS = Op(
    "heads joined, q, k, v fused",
    lambda ts: [torch.cat([t.flatten() for t in ts])],
    lambda ts, heads: [t.unflatten(0, (heads, -1)) for t in ts[0].chunk(3)],
)
HEADS_OUT = Op(
    "heads joined",
    lambda ts: [ts[0].flatten(0, 1).t()],
    lambda ts, heads: [ts[0].t().unflatten(0, (heads, -1))],
)


# ---- rules ----


@dataclass(frozen=True)
class Rule:
    """Names of ours, names in the file, and what happens between them."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    op: Op = SAME

    def expand(self, depth: int) -> list["Rule"]:
        """One rule for each block and each of weight and bias."""
        rules: list[Rule] = [self]
        if any("*" in name for name in self.ours):
            rules = [r._fill("*", suffix) for r in rules for suffix in ("weight", "bias")]
        if any("{i}" in name for name in self.ours):
            rules = [r._fill("{i}", str(i)) for r in rules for i in range(depth)]
        return rules

    def _fill(self, place: str, text: str) -> "Rule":
        ours, theirs = (tuple(n.replace(place, text) for n in names) for names in (self.ours, self.theirs))
        return Rule(ours, theirs, self.op)


def rule(ours: str | tuple[str, ...], theirs: str | tuple[str, ...], op: Op = SAME) -> Rule:
    """A rule, of single names or several."""
    return Rule((ours,) if isinstance(ours, str) else ours, (theirs,) if isinstance(theirs, str) else theirs, op)


def rules(*pairs: tuple[str, str]) -> list[Rule]:
    """Rules that only rename."""
    return [rule(ours, theirs) for ours, theirs in pairs]


# ---- layouts ----


def settings(family: str, preprocess: Mapping[str, Any] | None = None, **model: Any) -> Family:
    """The settings of a family of the zoo, with those put over it in which a reference implementation differs."""
    base = FAMILIES[family]
    return Family(base.about, {**base.model, **model}, {**base.preprocess, **(preprocess or {})})


def strip_prefix(names: Names, prefix: str) -> dict[str, Lazy]:
    """Take a prefix off, wherever it stands; two names that become one are an error, not a loss."""
    stripped = {name.removeprefix(prefix): tensor for name, tensor in names.items()}
    if len(stripped) < len(names):
        twice = next(name for name in names if name.startswith(prefix) and name.removeprefix(prefix) in names)
        raise CheckpointError(
            f"the file holds {twice} and {twice.removeprefix(prefix)} too; it is not clear which to take."
        )
    return stripped


def has(names: Names, *ends: str) -> bool:
    """Whether each of the ends is a name, or the end of one."""
    return all(any(name == end or name.endswith(f".{end}") for name in names) for end in ends)


@dataclass(frozen=True)
class Layout:
    """One way in which files name their tensors, and the settings that the weights were trained or are run with."""

    name: str
    """The program whose files these are: google, timm, huggingface, ..."""
    about: str
    family: Family
    matches: Callable[[Names], bool]
    """Whether the names and shapes of a file are of this layout."""
    rules: Sequence[Rule]
    drop: Mapping[str, str] = field(default_factory=dict)
    """Pattern of names that are left out on purpose -> why."""
    prefixes: Sequence[str] = ()
    """Beginnings of names that say nothing and are taken off."""
    prepare: Callable[[Names], Names] | None = None
    """What is done to the names before all else."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Options of the model that the layout itself settles."""
    heads: Callable[[Names], int | None] | None = None
    """The number of heads, where a shape tells it."""

    def strip(self, names: Names) -> dict[str, Lazy]:
        """Take the prefixes off, wherever they stand."""
        stripped = dict(names if self.prepare is None else self.prepare(names))
        for prefix in self.prefixes:
            stripped = strip_prefix(stripped, prefix)
        return stripped


@dataclass(frozen=True)
class Known:
    """What the documents beside the weights say."""

    model: dict[str, Any] = field(default_factory=dict)
    size: Any = None
    preprocess: dict[str, Any] = field(default_factory=dict)
    labels: list[str] | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """How the tensors of a file become ours: the rules that apply, what is dropped, what nobody asked for."""

    tensors: Mapping[str, Lazy]
    steps: Sequence[Rule]
    dropped: Mapping[str, str]
    unexpected: Sequence[str]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of our tensors, found without reading a number."""
        shapes = {}
        for step in self.steps:
            if step.op is SAME:
                shapes |= {
                    ours: self.tensors[theirs].shape for ours, theirs in zip(step.ours, step.theirs, strict=True)
                }
                continue
            blank = [torch.empty(self.tensors[name].shape, device="meta") for name in step.theirs]
            try:
                made = step.op.read(blank)
            except (RuntimeError, IndexError, ValueError, TypeError):
                told = ", ".join(f"{name} {self.tensors[name].shape}" for name in step.theirs)
                raise CheckpointError(f"these tensors do not fit together as {step.ours[0]}: {told}.") from None
            shapes |= {name: tuple(tensor.shape) for name, tensor in zip(step.ours, made, strict=True)}
        return shapes

    def read(self, step: Rule) -> dict[str, Tensor]:
        """Our tensors of one step."""
        made = step.op.read([self.tensors[name].read() for name in step.theirs])
        return dict(zip(step.ours, made, strict=True))


def make_plan(layout: Layout, names: Names) -> Plan:
    """Match the names of a file with the rules of its layout."""
    tensors = layout.strip(names)
    numbers = (int(n) for name in tensors for n in re.findall(r"[._](\d{1,4})[./]", name))
    depth = 1 + min(max(numbers, default=0), MAX_DEPTH)
    steps, used, taken = [], set(), set()
    for step in (expanded for rule in layout.rules for expanded in rule.expand(depth)):
        if all(name in tensors for name in step.theirs) and not taken.intersection(step.ours):
            steps.append(step)
            used.update(step.theirs)
            taken.update(step.ours)
    rest = [name for name in tensors if name not in used]
    dropped = {name: why for name in rest if (why := _why_dropped(layout, name))}
    return Plan(tensors, steps, dropped, [name for name in rest if name not in dropped])


def _why_dropped(layout: Layout, name: str) -> str:
    return next((why for pattern, why in layout.drop.items() if re.fullmatch(pattern, name)), "")


# ---- names by patterns, for files whose tensors need no more than other names ----


def fitting_labels(labels: list[str] | None, num_classes: int, notes: list[str]) -> list[str] | None:
    """The labels, if there are as many as classes; if not, none, and a note."""
    if labels is None or len(labels) == num_classes:
        return labels
    notes.append(f"{len(labels)} labels for {num_classes} classes: they are left out")
    return None


Pattern = tuple[str, str | Callable[[re.Match[str]], str]]


def translate(name: str, table: Sequence[Pattern]) -> str:
    """A name of a file in our words."""
    for pattern, text in table:
        name = re.sub(pattern, text, name)
    return name
