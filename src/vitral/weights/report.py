"""What happened to every tensor when weights were loaded, and which settings were chosen, and why."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class LoadReport:
    """The account of a load. `print(report)` shows it as a table; `to_dict` gives plain values."""

    source: str
    layout: str
    """Whose file it is, and what told it."""
    matched: list[str] = field(default_factory=list)
    """Tensors that were taken as they are, under the same name."""
    renamed: list[tuple[str, str, str]] = field(default_factory=list)
    """Names in the file, our name, what was done on the way."""
    resized: list[tuple[str, tuple[int, ...], tuple[int, ...], str]] = field(default_factory=list)
    """Our name, shape in the file, shape in the model, how."""
    created: list[tuple[str, str]] = field(default_factory=list)
    """Tensors that the file has not, and what they start from."""
    dropped: list[tuple[str, str]] = field(default_factory=list)
    """Names in the file that were left out on purpose, and why."""
    missing: list[str] = field(default_factory=list)
    """Tensors of the model that the file should have and has not; allowed by name, or it would be an error."""
    unexpected: list[str] = field(default_factory=list)
    """Names in the file that nothing asked for; allowed by name, or it would be an error."""
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    """Option, value, where it comes from."""
    notes: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """One line."""
        counts = {
            "matched": len(self.matched),
            "renamed": len(self.renamed),
            "resized": len(self.resized),
            "new": len(self.created),
            "dropped": len(self.dropped),
            "missing": len(self.missing),
            "unexpected": len(self.unexpected),
        }
        told = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        return f"{self.source}: {self.layout}; tensors: {told or 'none'}"

    def rows(self) -> list[tuple[str, str, str]]:
        """What happened, to what, and how or why; like things on one row."""
        rows = [("matched", f"{len(self.matched)} tensors", "same name, same shape")] if self.matched else []
        by_how: dict[str, list[tuple[str, str]]] = {}
        for theirs, ours, how in self.renamed:
            by_how.setdefault(how, []).append((theirs, ours))
        for how, pairs in by_how.items():
            rows.append(
                ("renamed", f"{len(pairs)} tensors, such as {pairs[0][0]}", f"{pairs[0][1]}{f' ({how})' * bool(how)}")
            )
        for name, old, new, how in self.resized:
            rows.append(("resized", name, f"{_shape(old)} -> {_shape(new)}, {how}"))
        rows += [("new", name, how) for name, how in self.created]
        why: dict[str, list[str]] = {}
        for name, reason in self.dropped:
            why.setdefault(reason, []).append(name)
        for reason, names in why.items():
            more = f" and {len(names) - 1} more" * (len(names) > 1)
            rows.append(("dropped", f"{names[0]}{more}", reason))
        rows += [("missing", name, "allowed") for name in self.missing]
        rows += [("unexpected", name, "allowed") for name in self.unexpected]
        rows += [("setting", f"{option} = {value}", reason) for option, value, reason in self.settings]
        return rows + [("note", note, "") for note in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold."""
        return dict(vars(self))

    def __str__(self) -> str:
        rows = self.rows()
        first, second = (max((len(row[i]) for row in rows), default=0) for i in (0, 1))
        lines = [f"{what:{first}}  {name:{min(second, 70)}}  {how}".rstrip() for what, name, how in rows]
        return "\n".join([self.summary(), *lines])


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
