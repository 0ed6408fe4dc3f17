"""The result of opening a source: images or texts that are read one by one, a target for each, and named splits."""

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
    "box_clipped": "boxes extend beyond their image and were clipped",
    "box_outside": "boxes are outside their image and were dropped",
    "box_empty": "boxes have no area and were dropped",
    "box_invalid": "boxes have invalid coordinates and were dropped",
    "bad_line": "lines cannot be read and were dropped",
    "empty_class": "classes have no training image; add images or remove the class",
    "empty_source": "lines have an empty text and were dropped",
    "empty_target": "lines have no text to write and were dropped",
    "bad_shape": "outlines cannot be drawn; their boxes are ignored in the masks",
    "bad_target": "rows have no usable target and were dropped",
    "image_size": "images have a size that differs from the annotated one",
    "mask_size": "masks differ in size from their image and were dropped with it",
    "mask_unreadable": "masks cannot be read and were dropped with their image",
    "missing_image": "annotations refer to images that do not exist and were dropped",
    "missing_mask": "images have no mask and were dropped",
    "unknown_class": "annotations have an unknown class and were dropped",
}
"""Kinds of annotation problems, and how each was handled."""
FATAL = {"empty_class"}
"""Kinds that prevent training."""
TEST_FRACTION = 0.15
"""Share of the training images that become the test split of data without one."""
ENOUGH_TO_TEST = 50
"""Fewer images than this are not split further by default."""


class Rasters(Protocol):
    """A sequence of images or masks, each decoded on access."""

    def __len__(self) -> int: ...

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """One image as uint8 (C, H, W)."""
        ...

    def name(self, index: int) -> str:
        """The name of the image in messages."""
        ...


class Images(Rasters, Protocol):
    """A sequence of images whose content can be compared."""

    def content(self, index: int) -> bytes:
        """The bytes of the file, or of the pixels of an image in memory."""
        ...


@dataclass(frozen=True)
class ImageArray:
    """Images of one size, in memory as uint8 (N, C, H, W)."""

    pixels: Tensor

    def __len__(self) -> int:
        return len(self.pixels)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """One image; grey becomes RGB by repetition, RGB becomes grey by its mean."""
        return to_mode(self.pixels[index], mode)

    def name(self, index: int) -> str:
        """The number of the image."""
        return f"image {index}"

    def content(self, index: int) -> bytes:
        """Shape and pixels."""
        pixels = self.pixels[index]
        return repr(tuple(pixels.shape)).encode() + pixels.contiguous().numpy().tobytes()


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
        """The path of the image."""
        return str(self.paths[index])

    def content(self, index: int) -> bytes:
        """The file."""
        return self.paths[index].read_bytes()


@dataclass(frozen=True)
class EncodedImages:
    """Encoded images, in memory or in files."""

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
        """The origin of the image."""
        return self.names[index]

    def content(self, index: int) -> bytes:
        """The encoded image."""
        file = self.files[index]
        return file if isinstance(file, bytes) else file.read_bytes()


@dataclass(frozen=True)
class Texts:
    """Texts in memory."""

    lines: list[str]

    def __len__(self) -> int:
        return len(self.lines)

    def name(self, index: int) -> str:
        """The text itself."""
        return self.lines[index]

    def content(self, index: int) -> bytes:
        """The text itself."""
        return self.lines[index].encode()


def to_mode(x: Tensor, mode: ImageMode) -> Tensor:
    """(..., C, H, W) with the number of channels of the mode."""
    if mode == "rgb" and x.shape[-3] == 1:
        return x.expand(*x.shape[:-3], 3, *x.shape[-2:])
    if mode == "grey" and x.shape[-3] == 3:
        return x.float().mean(-3, keepdim=True).round().to(x.dtype)
    return x


@dataclass(frozen=True)
class Data:
    """A data set: images or texts, a target for each, the names of the classes, and the splits.

    `kind` describes `targets`: "label" one class number (N,), "labels" a 1 for each class that applies (N, K),
    "numbers" floats (N, K), "none" empty (N, 0), "tags" empty too: the tags of a text's words are in `texts`.
    `classes` also names the classes of the boxes.
    """

    name: str
    inputs: Images | Texts = field(repr=False)
    targets: Tensor = field(repr=False)
    classes: list[str]
    splits: dict[str, Tensor]
    mode: ImageMode = "rgb"
    recipe: str | None = None
    """Default recipe; None for data that are not embedded or published."""
    licence: str = "unknown"
    notes: list[str] = field(default_factory=list)
    """Decisions made while opening, to be printed: how columns were read, what was dropped."""
    kind: Kind = "label"
    target_names: list[str] | None = None
    """Names of the target numbers."""
    boxes: "Boxes | None" = None
    masks: "Masks | None" = None
    mask_classes: list[str] | None = None
    texts: list[str] | None = field(default=None, repr=False)
    """The text to write for each input (a caption, a translation), or the tags of its words, separated by spaces."""
    tokenizers: "Mapping[str, Tokenizer]" = field(default_factory=dict)
    """Trained tokenizers: "source" for the inputs, "target" for the texts to write."""
    problems: list[Problem] = field(default_factory=list)
    """Annotations that cannot be used unchanged: the kind (a key of PROBLEMS), the image, the error message."""

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
        """The inputs in one word: "images" or "texts"."""
        return "texts" if isinstance(self.inputs, Texts) else "images"

    @property
    def images(self) -> Images:
        """The inputs; an error if they are texts."""
        if isinstance(self.inputs, Texts):
            raise DataError(f"{self.name} has texts, and images are needed.")
        return self.inputs

    @property
    def lines(self) -> list[str]:
        """The inputs; an error if they are images."""
        if not isinstance(self.inputs, Texts):
            raise DataError(f"{self.name} has images, and texts are needed.")
        return self.inputs.lines

    def fingerprint(self) -> str | None:
        """A hash of all texts; None without texts."""
        lines = [*(self.lines if isinstance(self.inputs, Texts) else []), *(self.texts or [])]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16] if lines else None

    def hashes(self, indices: Tensor | None = None) -> Tensor:
        """(n,) int64: a hash of the content of each chosen input, by default of all.

        The content is the bytes of an image file, the pixels of an image in memory, or a text.
        """
        chosen = range(len(self.inputs)) if indices is None else indices.tolist()
        digests = [hashlib.blake2b(self._content(i), digest_size=8).digest() for i in chosen]
        return torch.tensor([int.from_bytes(each, "little", signed=True) for each in digests], dtype=torch.long)

    def _content(self, index: int) -> bytes:
        try:
            return self.inputs.content(index)
        except (OSError, ImageError):  # a file that cannot be read matches only itself
            return self.inputs.name(index).encode()

    def lengths(self) -> Tensor | None:
        """Characters read and written per input, for batches of similar length; None without text."""
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
            raise DataError(f"{self.name} has no usable {self.what[:-1]} in its training split{first}.")
        if empty:
            notes = [f"the {part} split has no usable {self.what[:-1]} and was dropped" for part in empty]
            object.__setattr__(self, "splits", {part: v for part, v in self.splits.items() if part not in empty})
            object.__setattr__(self, "notes", [*self.notes, *notes])

    def describe(self) -> str:
        """A one-line summary."""
        sizes = "/".join(f"{len(v):,}" for v in self.splits.values())
        what = [f"{len(self.inputs):,} {self.what}"]
        if self.texts is not None and self.kind == "tags":
            tags = [tag for text in self.texts for tag in text.split()]
            what.append(f"{len(tags):,} words, {len(set(tags))} tags")
        elif self.texts is not None:
            what.append(f"each with a text to write, {sum(map(len, self.texts)) / len(self.texts):.0f} characters")
        if self.kind == "label" or (self.boxes is not None and self.kind != "numbers"):
            what.append(f"{len(self.classes)} classes")
        elif self.kind == "labels":
            what.append(f"{len(self.classes)} classes, several per image")
        elif self.kind == "numbers":
            names = self.target_names or [str(i) for i in range(self.targets.shape[1])]
            what.append(f"{'numbers' if len(names) > 1 else 'number'} {', '.join(names)}")
        if self.boxes is not None:
            what.append(f"{sum(map(len, self.boxes.rows)):,} boxes")
        if self.mask_classes is not None:
            what.append(f"masks of {len(self.mask_classes)} classes")
        return f"{self.name}: {', '.join(what)}, split {'/'.join(self.splits)} {sizes}"

    @property
    def default_test_fraction(self) -> float:
        """Share of the training images to test on if none is configured.

        Embedded and published data (those with a recipe), texts, and fewer than `ENOUGH_TO_TEST` images are not split.
        """
        own = self.recipe is None and self.what == "images"
        return TEST_FRACTION if own and len(self.splits["train"]) >= ENOUGH_TO_TEST else 0.0

    def with_splits(self, val_fraction: float, test_fraction: float | None, seed: int) -> "Data":
        """Take missing validation and test splits from the training split, stratified by class.

        Args:
            val_fraction: Share of the training split for validation; 0 for no validation split.
            test_fraction: The same for testing; None for `default_test_fraction`.
            seed: Decides which inputs are taken; the same seed always takes the same ones.
        """
        data = self
        test_fraction = self.default_test_fraction if test_fraction is None else test_fraction
        for part, fraction in (("test", test_fraction), ("val", val_fraction)):
            if part not in data.splits and fraction:
                rest, cut = data._cut(fraction, seed)
                if not len(cut):
                    continue
                splits = data.splits | {"train": rest, part: cut}
                some = f"{len(cut):,} {data.what} ({fraction:.0%} of the training split)"
                note = f"no {part} split was given: {some} are used as one"
                data = replace(data, splits=splits, notes=[*data.notes, note])
        order = [part for part in ("train", "val", "test") if part in data.splits]
        return replace(data, splits={part: data.splits[part] for part in order})

    def with_label_fraction(self, fraction: float, seed: int) -> "Data":
        """Keep a share of the training split: stratified, at least one of each class; without classes, at random."""
        if fraction == 1:
            return self
        rest, kept = self._cut(fraction, seed)
        if self.kind == "label":
            single = ~torch.isin(self.targets[rest], self.targets[kept])  # the only one of its class
            kept = torch.cat([kept, rest[single]]).sort().values
        total = len(self.splits["train"])
        note = f"{len(kept):,} of {total:,} training {self.what} are used (--label-fraction {fraction:g})"
        return replace(self, splits=self.splits | {"train": kept}, notes=[*self.notes, note])

    def without(self, bad: Tensor, why: str) -> "Data":
        """Drop the inputs that are True from every split, and note their number."""
        parts = {part: indices[~bad[indices]] for part, indices in self.splits.items()}
        lost = sum(map(len, self.splits.values())) - sum(map(len, parts.values()))
        return replace(self, splits=parts, notes=[*self.notes, f"{lost:,} {why}"]) if lost else self

    def refuse_problems(self, strict: bool) -> None:
        """Raise a DataError if a problem prevents training; with `strict`, if there is any problem at all."""
        bad = [p for p in self.problems if strict or p["kind"] in FATAL]
        if bad:
            counts = "; ".join(problem_notes(bad))
            hint = " (--strict)" if strict else ""
            raise DataError(f"{self.name} has problems{hint}: {counts}; the first: {bad[0]['error']}.")

    def _cut(self, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
        """The training split in two: stratified, or with equal texts on the same side."""
        if isinstance(self.inputs, Texts) or self.texts is not None:  # an image may have several captions
            names = [self.inputs.name(i) for i in range(len(self.inputs))]
            return split_between(names, self.splits["train"], fraction, seed)
        return stratified_split(self.targets, self.splits["train"], fraction, seed)


def split_between(names: Sequence[str], indices: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split indices in two, the second with `fraction` of the distinct names, and never all of them."""
    members = indices.tolist()
    different = list(dict.fromkeys(names[i] for i in members))
    count = min(max(round(len(different) * fraction), 1), len(different) - 1)
    order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed))
    chosen = {different[i] for i in order[:count].tolist()}
    parts = [i for i in members if names[i] not in chosen], [i for i in members if names[i] in chosen]
    return torch.tensor(parts[0], dtype=torch.long), torch.tensor(parts[1], dtype=torch.long)


def stratified_split(targets: Tensor, indices: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split indices in two, the second with `fraction` of each class (at least one of a class of two or more).

    Targets that are not integers count as one class.
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
    """The text of a small file, such as a list of names."""
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read as UTF-8 text ({error}); save it as UTF-8.") from error


def problem(kind: str, image: object, error: str) -> Problem:
    """One annotation problem."""
    assert kind in PROBLEMS, kind
    return {"kind": kind, "image": str(image), "error": f"{image}: {error}"}


def problem_notes(problems: list[Problem]) -> list[str]:
    """One line per kind, with the number of problems."""
    kinds = [p["kind"] for p in problems]
    return [
        f"{kinds.count(kind):,} {words} (vitral check lists them)" for kind, words in PROBLEMS.items() if kind in kinds
    ]
