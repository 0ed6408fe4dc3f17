"""What every source gives: images or texts that can be read one by one, a target for each, and named splits."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from vitral.data.images import AtLeast, ImageMode, read_image
from vitral.errors import DataError, ImageError

if TYPE_CHECKING:
    from vitral.data.targets import Boxes, Masks
    from vitral.data.tokenizer import Tokenizer

Kind = Literal["label", "labels", "numbers", "tags", "none"]
Problem = dict[Literal["kind", "image", "error"], str]

PROBLEMS = {
    "box_clipped": "boxes reach beyond their image and were cut to it",
    "box_outside": "boxes lie outside their image and were left out",
    "box_empty": "boxes have no area and were left out",
    "box_invalid": "boxes have impossible numbers and were left out",
    "bad_line": "lines cannot be read and were left out",
    "empty_source": "lines have an empty text and were left out",
    "empty_target": "lines have nothing to write and were left out",
    "bad_shape": "outlines cannot be drawn; their boxes are ignored in the masks",
    "bad_target": "rows have no usable target and were left out",
    "image_size": "images have another size than the one written down for them",
    "mask_size": "masks have another size than their image and were left out with it",
    "mask_unreadable": "masks cannot be read and were left out with their image",
    "missing_image": "annotations are for images that are not there and were left out",
    "missing_mask": "images have no mask and were left out",
    "unknown_class": "annotations are of an unknown class and were left out",
}
"""What can be wrong with an annotation, and what was done about it."""


class Images(Protocol):
    """A sequence of images, read when they are asked for."""

    def __len__(self) -> int: ...

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """One image as uint8 (C, H, W)."""
        ...

    def name(self, index: int) -> str:
        """What to call the image in a message."""
        ...


@dataclass(frozen=True)
class ImageArray:
    """Images of one size, held in memory as uint8 (N, C, H, W)."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """One image; grey becomes RGB by repetition, RGB becomes grey by its mean."""
        return to_mode(self.pixels[index], mode)

    def name(self, index: int) -> str:
        """Number of the image."""
        return f"image {index}"


@dataclass(frozen=True)
class ImageFiles:
    """Images in files."""

    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Decode one file."""
        return read_image(self.paths[index], mode, at_least)

    def name(self, index: int) -> str:
        """Path of the image."""
        return str(self.paths[index])


@dataclass(frozen=True)
class EncodedImages:
    """Images that lie in memory as files do, or in files."""

    files: Sequence[bytes | Path]
    names: Sequence[str]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Decode one."""
        try:
            return read_image(self.files[index], mode, at_least)
        except ImageError as error:
            raise ImageError(f"{self.name(index)}: {error}") from error

    def name(self, index: int) -> str:
        """Where it comes from."""
        return self.names[index]


@dataclass(frozen=True)
class Texts:
    """Texts, held in memory."""

    lines: list[str]

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, index: int) -> str:
        """The text itself."""
        return self.lines[index]


def to_mode(x: Tensor, mode: ImageMode) -> Tensor:
    """(..., C, H, W) in the number of channels of the mode."""
    if mode == "rgb" and x.shape[-3] == 1:
        return x.expand(*x.shape[:-3], 3, *x.shape[-2:])
    if mode == "grey" and x.shape[-3] == 3:
        return x.float().mean(-3, keepdim=True).round().to(x.dtype)
    return x


@dataclass(frozen=True)
class Data:
    """A data set: images or texts, a target for each, the names of the classes, and the splits.

    What `targets` holds is its `kind`: "label" one class number (N,), "labels" a 1 for each class that applies (N, K),
    "numbers" floats (N, K), "none" nothing (N, 0), "tags" nothing either: the tags of a text's words stand in `texts`.
    `classes` also names the classes of the boxes.
    """

    name: str
    inputs: Images | Texts = field(repr=False)
    targets: Tensor = field(repr=False)
    classes: list[str]
    splits: dict[str, Tensor]
    mode: ImageMode = "rgb"
    recipe: str | None = None
    """Recipe to train with when none is asked for."""
    licence: str = "unknown"
    notes: list[str] = field(default_factory=list)
    """What was decided on the way, to be said to the user."""
    kind: Kind = "label"
    target_names: list[str] | None = None
    """What the numbers of the targets are called."""
    boxes: "Boxes | None" = None
    masks: "Masks | None" = None
    mask_classes: list[str] | None = None
    texts: list[str] | None = field(default=None, repr=False)
    """What is to be written of each: a caption, a translation; or the tags of its words, with spaces between them."""
    tokenizers: "Mapping[str, Tokenizer]" = field(default_factory=dict)
    """What makes tokens of the texts once it is trained: "source" of the inputs, "target" of what is to be written."""
    problems: list[Problem] = field(default_factory=list)
    """Annotations that could not be used as they are: the kind (a key of PROBLEMS), the image, the error in words."""

    def __post_init__(self) -> None:
        if not len(self.inputs):
            raise DataError(f"{self.name} has no {self.what}.")
        if len(self.inputs) != len(self.targets):
            raise DataError(f"{self.name} has {len(self.inputs)} {self.what} but {len(self.targets)} labels.")
        for what, targets in (("boxes", self.boxes), ("masks", self.masks), ("texts to write", self.texts)):
            if targets is not None and len(targets) != len(self.inputs):
                raise DataError(f"{self.name} has {len(self.inputs)} {self.what} but {what} for {len(targets)}.")
        self._drop_empty_parts()

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return 1 if self.mode == "grey" else 3

    @property
    def what(self) -> str:
        """The word for what a model is fed."""
        return "texts" if isinstance(self.inputs, Texts) else "images"

    @property
    def images(self) -> Images:
        """The inputs, which must be images."""
        if isinstance(self.inputs, Texts):
            raise DataError(f"{self.name} has texts where images are needed.")
        return self.inputs

    @property
    def lines(self) -> list[str]:
        """The inputs, which must be texts."""
        if not isinstance(self.inputs, Texts):
            raise DataError(f"{self.name} has images where texts are needed.")
        return self.inputs.lines

    def fingerprint(self) -> str | None:
        """What tells these texts from others, None where there are none."""
        lines = [*(self.lines if isinstance(self.inputs, Texts) else []), *(self.texts or [])]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else None

    def lengths(self) -> Tensor | None:
        """Characters that are read and written for each input, by which batches are put together; None without text."""
        total = torch.zeros(len(self.inputs), dtype=torch.long)
        parts = [self.lines if isinstance(self.inputs, Texts) else None, self.texts]
        for texts in (part for part in parts if part is not None):
            total += torch.tensor([len(text) for text in texts])
        return total if any(part is not None for part in parts) else None

    def _drop_empty_parts(self) -> None:
        empty = [part for part, indices in self.splits.items() if not len(indices)]
        if "train" in empty:
            why = self.problems[0]["error"] if self.problems else self.notes[-1] if self.notes else ""
            first = f" ({why})" if why else ""
            raise DataError(f"{self.name} has no usable {self.what[:-1]} in its training part{first}.")
        if empty:
            notes = [f"the {part} part has no usable {self.what[:-1]} and is left out" for part in empty]
            object.__setattr__(self, "splits", {part: v for part, v in self.splits.items() if part not in empty})
            object.__setattr__(self, "notes", [*self.notes, *notes])

    def describe(self) -> str:
        """One line that says what this is."""
        sizes = "/".join(f"{len(v):,}" for v in self.splits.values())
        what = [f"{len(self.inputs):,} {self.what}"]
        if self.texts is not None and self.kind == "tags":
            tags = [tag for text in self.texts for tag in text.split()]
            what.append(f"{len(tags):,} words, {len(set(tags))} tags")
        elif self.texts is not None:
            what.append(f"and what to write of each, {sum(map(len, self.texts)) / len(self.texts):.0f} characters")
        if self.kind == "label" or (self.boxes is not None and self.kind != "numbers"):
            what.append(f"{len(self.classes)} classes")
        elif self.kind == "labels":
            what.append(f"{len(self.classes)} classes, several to an image")
        elif self.kind == "numbers":
            names = self.target_names or [str(i) for i in range(self.targets.shape[1])]
            what.append(f"{'numbers' if len(names) > 1 else 'number'} {', '.join(names)}")
        if self.boxes is not None:
            what.append(f"{sum(map(len, self.boxes.rows)):,} boxes")
        if self.mask_classes is not None:
            what.append(f"masks of {len(self.mask_classes)} classes")
        return f"{self.name}: {', '.join(what)}, split {'/'.join(self.splits)} {sizes}"

    def with_splits(self, val_fraction: float, test_fraction: float, seed: int) -> "Data":
        """Cut the parts that are missing from the training part, class by class, always the same way."""
        data = self
        for part, fraction in (("test", test_fraction), ("val", val_fraction)):
            if part not in data.splits and fraction:
                rest, cut = data._cut(fraction, seed)
                if not len(cut):
                    continue
                splits = data.splits | {"train": rest, part: cut}
                some = f"{len(cut):,} {data.what} ({fraction:.0%} of the training part)"
                note = f"no {part} part was given: {some} serve as one"
                data = replace(data, splits=splits, notes=[*data.notes, note])
        order = [part for part in ("train", "val", "test") if part in data.splits]
        return replace(data, splits={part: data.splits[part] for part in order})

    def with_label_fraction(self, fraction: float, seed: int) -> "Data":
        """Keep a share of the training part: class by class, at least one of each; without classes, at random."""
        if fraction == 1:
            return self
        rest, kept = self._cut(fraction, seed)
        if self.kind == "label":
            alone = ~torch.isin(self.targets[rest], self.targets[kept])  # the only one of its class
            kept = torch.cat([kept, rest[alone]]).sort().values
        total = len(self.splits["train"])
        note = f"{len(kept):,} of {total:,} training {self.what} are used (--label-fraction {fraction:g})"
        return replace(self, splits=self.splits | {"train": kept}, notes=[*self.notes, note])

    def without(self, bad: Tensor, why: str) -> "Data":
        """Leave the inputs that are True out of every part, and say how many there are in all."""
        parts = {part: indices[~bad[indices]] for part, indices in self.splits.items()}
        lost = sum(map(len, self.splits.values())) - sum(map(len, parts.values()))
        return replace(self, splits=parts, notes=[*self.notes, f"{lost:,} {why}"]) if lost else self

    def _cut(self, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """The training part in two: class by class, or so that what is the same stays together."""
        if isinstance(self.inputs, Texts) or self.texts is not None:  # an image may have several captions
            names = [self.inputs.name(i) for i in range(len(self.inputs))]
            return split_between(names, self.splits["train"], fraction, seed)
        return stratified_split(self.targets, self.splits["train"], fraction, seed)


def split_between(names: Sequence[str], indices: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split indices in two, the second with `fraction` of the different names, and never all of them."""
    members = indices.tolist()
    different = list(dict.fromkeys(names[i] for i in members))
    count = min(max(round(len(different) * fraction), 1), len(different) - 1)
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed))
    chosen = {different[i] for i in order[:count].tolist()}
    parts = [i for i in members if names[i] not in chosen], [i for i in members if names[i] in chosen]
    return torch.tensor(parts[0], dtype=torch.long), torch.tensor(parts[1], dtype=torch.long)


def stratified_split(targets: Tensor, indices: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split indices in two, the second with `fraction` of each class (at least one of a class of two or more).

    Targets that are no class numbers, which are whole, make one class.
    """
    if targets.is_floating_point():
        targets = torch.zeros(len(targets), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    rest, cut = [], []
    for label in targets[indices].unique().tolist():
        members = indices[targets[indices] == label]
        members = members[torch.randperm(len(members), generator=generator)]
        count = min(max(round(len(members) * fraction), 1), len(members) - 1) if len(members) > 1 else 0
        cut.append(members[:count])
        rest.append(members[count:])
    return torch.cat(rest).sort().values, torch.cat(cut).sort().values


def fold_numbers(targets: Tensor, folds: int, seed: int) -> Tensor:
    """The fold (n,) of each sample: 0 to folds - 1, each with its share of every class; numbers make one class."""
    if targets.is_floating_point() or targets.ndim > 1:
        targets = torch.zeros(len(targets), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(targets), generator=generator)
    order = order[targets[order].argsort(stable=True)]  # classes one after the other, each in random order
    numbers = torch.empty(len(targets), dtype=torch.long)
    numbers[order] = torch.arange(len(targets)) % folds
    return numbers


def read_text(file: Path) -> str:
    """The text of a small file that names things."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8.") from error


def problem(kind: str, image: object, error: str) -> Problem:
    """One thing that is wrong with an annotation."""
    assert kind in PROBLEMS, kind
    return {"kind": kind, "image": str(image), "error": f"{image}: {error}"}


def problem_notes(problems: list[Problem]) -> list[str]:
    """A line for each kind that was found, with how many there are."""
    kinds = [p["kind"] for p in problems]
    return [
        f"{kinds.count(kind):,} {words} (vitral check lists them)" for kind, words in PROBLEMS.items() if kind in kinds
    ]
