"""Folders of images and of masks: `images` beside `masks` (or `labels`, `annotations`), perhaps part by part.

A mask is an image of the same size whose every pixel says its class: by its number (grey or palette), or by its colour.
"""

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.data.images import SUFFIXES, AtLeast, ImageMode
from vitral.data.sources.base import Data, ImageFiles, Problem, problem, problem_notes, read_text
from vitral.data.sources.coco import size_of_file
from vitral.data.sources.folder import PARTS, list_images
from vitral.data.targets import IGNORE, Masks
from vitral.errors import DataError, ImageError

FOLDERS = ("masks", "labels", "annotations")
ENDINGS = ("", "_mask", "-mask", "_label", "_labels", "_gt")
"""What the name of a mask may add to the name of its image."""
NUMBERED = ("1", "L", "P", "I", "I;16")
GREY = 0x10101
"""A grey colour is its shade times this."""
LOSSY = (".jpg", ".jpeg", ".jpe")


def paired_folders(path: Path, names: tuple[str, ...]) -> dict[str, tuple[Path, Path]]:
    """Folders of images and of their annotations, part by part.

    `images/train` beside `labels/train`, `train/images` beside `train/labels`, or just `images` beside `labels`.
    """
    found: dict[str, tuple[Path, Path]] = {}
    for part, words in PARTS.items():
        own = re.compile(rf"({'|'.join(words)})\d*")
        parts = [p.name for base in (path, path / "images") for p in _folders(base) if own.fullmatch(p.name)]
        for word in parts:
            for name in names:
                for pair in (
                    (path / "images" / word, path / name / word),
                    (path / word / "images", path / word / name),
                ):
                    if part not in found and pair[0].is_dir() and pair[1].is_dir():
                        found[part] = pair
    if found and "train" not in found:
        raise DataError(f"{path} has images for {', '.join(found)} but none for a training part.")
    lone = next((path / name for name in names if (path / name).is_dir()), None)
    if not found and lone is not None and (path / "images").is_dir():
        found = {"train": (path / "images", lone)}
    return found


def _folders(path: Path) -> list[Path]:
    return sorted(p for p in path.iterdir() if p.is_dir()) if path.is_dir() else []


def is_masks_folder(path: Path) -> bool:
    """Whether there are images in a folder of masks beside one of images."""
    return any(
        file.suffix.lower() in SUFFIXES
        for _, masks in paired_folders(path, FOLDERS).values()
        for file in masks.rglob("*")
    )


def load_masks(path: Path) -> Data:
    """Pair images with masks by name, and look at every mask to know the classes."""
    problems: list[Problem] = []
    images: list[Path] = []
    masks: list[Path] = []
    splits = {}
    seen: list[_Seen] = []
    for part, (image_folder, mask_folder) in paired_folders(path, FOLDERS).items():
        start = len(images)
        for image, mask, look in _pairs(image_folder, mask_folder, problems):
            images.append(image)
            masks.append(mask)
            seen.append(look)
        splits[part] = torch.arange(start, len(images))
    if not splits or not len(splits["train"]):
        first = problems[0]["error"] if problems else "no image lies in it"
        raise DataError(f"{path} has no image with a usable mask to train on ({first}).")
    notes: list[str] = []
    code, classes = _code(path, seen, notes)
    known = {*code.values.tolist(), IGNORE * GREY if seen[0].colours else IGNORE}
    for mask, look in zip(masks, seen, strict=True):
        strange = [v // GREY if look.colours else v for v in sorted(look.values - known)]
        if strange:
            said = f"class {', '.join(map(str, strange[:5]))} where there are {len(classes)}; those pixels are ignored"
            problems.append(problem("unknown_class", mask, said))
    return Data(
        name=path.name,
        inputs=ImageFiles(images),
        targets=torch.zeros(len(images), 0),
        classes=classes,
        splits=splits,
        notes=[*notes, *problem_notes(problems)],
        kind="none",
        masks=Masks(MaskFiles(masks, code), classes),
        mask_classes=classes,
        problems=problems,
    )


@dataclass(frozen=True)
class _Seen:
    """What a look at a mask showed: its size, the numbers in it, and whether they are colours."""

    size: tuple[int, int]
    values: frozenset[int]
    colours: bool


@dataclass(frozen=True)
class _Code:
    """Numbers or colours as they stand in the files, in order, and the class of each; all others are ignored."""

    values: np.ndarray
    classes: np.ndarray

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        at = np.searchsorted(self.values, pixels).clip(max=len(self.values) - 1)
        return np.where(self.values[at] == pixels, self.classes[at], IGNORE).astype(np.uint8)


@dataclass(frozen=True)
class MaskFiles:
    """Masks in files, read as class numbers."""

    paths: Sequence[Path]
    code: _Code

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Class numbers, uint8 (1, H, W)."""
        try:
            pixels, _ = _pixels(self.paths[index])
        except (OSError, ValueError, SyntaxError) as error:
            raise ImageError(f"{self.paths[index]} cannot be read ({error}).") from error
        return torch.from_numpy(self.code(pixels))[None]

    def name(self, index: int) -> str:
        """Path of the mask."""
        return str(self.paths[index])


def _pixels(path: Path) -> tuple[np.ndarray, bool]:
    """(H, W) numbers as they stand in the file, and whether they are colours (red, green, blue as one number)."""
    with Image.open(path) as image:
        if image.mode in NUMBERED:
            return np.asarray(image).astype(np.int64), False
        rgb = np.asarray(image.convert("RGB")).astype(np.int64)
    return rgb @ np.array([1 << 16, 1 << 8, 1]), True


def _look(path: Path) -> _Seen | str:
    try:
        pixels, colours = _pixels(path)
    except (OSError, ValueError, SyntaxError) as error:
        return str(error)
    return _Seen(pixels.shape, frozenset(np.unique(pixels).tolist()), colours)  # type: ignore[arg-type]


def _pairs(images: Path, masks: Path, problems: list[Problem]) -> list[tuple[Path, Path, _Seen]]:
    """The images of a folder that have a mask of their size, and what was seen in it."""
    by_name = {str(p.relative_to(masks).with_suffix("")): p for p in list_images(masks)}
    lossy = next((p for p in by_name.values() if p.suffix.lower() in LOSSY), None)
    if lossy is not None:
        raise DataError(f"{lossy} is a JPEG, which blurs class numbers; store masks as PNG.")
    pairs = []
    for image in list_images(images):
        stem = str(image.relative_to(images).with_suffix(""))
        mask = next((by_name.pop(stem + ending) for ending in ENDINGS if stem + ending in by_name), None)
        if mask is None:
            problems.append(problem("missing_mask", image, f"there is no mask for it in {masks}"))
        else:
            pairs.append((image, mask))
    problems += [problem("missing_image", mask, f"there is no image for it in {images}") for mask in by_name.values()]
    with ThreadPoolExecutor() as pool:
        looks = list(pool.map(_look, (mask for _, mask in pairs)))
    good = []
    for (image, mask), look in zip(pairs, looks, strict=True):
        if isinstance(look, str):
            problems.append(problem("mask_unreadable", mask, look))
            continue
        try:
            width, height = size_of_file(image)
        except OSError:  # what cannot be read is the loader's to say, or to leave out
            width, height = look.size[::-1]
        if look.size != (height, width):
            said = f"has {look.size[1]} x {look.size[0]} pixels, its image {width} x {height}"
            problems.append(problem("mask_size", mask, said))
        else:
            good.append((image, mask, look))
    return good


def _code(path: Path, seen: list[_Seen], notes: list[str]) -> tuple[_Code, list[str]]:
    """Which number or colour is which class, and the names of the classes."""
    if len({look.colours for look in seen}) > 1:
        raise DataError(f"{path} mixes masks of class numbers with masks of colours; store all of them one way.")
    values = sorted(frozenset().union(*(look.values for look in seen)))
    names = _names(path)
    if seen[0].colours and all(v % GREY == 0 for v in values):  # grey, saved as RGB
        code, classes = _number_code([v // GREY for v in values], names, notes)
        return _Code(code.values * GREY, code.classes), classes
    if not seen[0].colours:
        return _number_code(values, names, notes)
    if len(values) >= IGNORE or (names is not None and len(names) < len(values)):
        most = f"{len(names)} classes" if names is not None else "at most 254 classes"
        raise DataError(f"{path}: the masks have {len(values):,} colours for {most}; give each class one colour.")
    colours = [f"#{v:06x}" for v in values]  # as names they tell apart data sets of other colours
    told = [f"{v} = {name}" for v, name in zip(colours, names, strict=False)] if names else colours
    notes.append(f"each colour of the masks is a class: {', '.join(told[:8])}{', ...' if len(values) > 8 else ''}")
    return _Code(np.array(values), np.arange(len(values))), names or colours


def _number_code(values: list[int], names: list[str] | None, notes: list[str]) -> tuple[_Code, list[str]]:
    if IGNORE in values and set(values) <= {0, IGNORE}:
        notes.append("the masks hold only 0 and 255: 255 is taken as class 1")
        return _Code(np.array([0, IGNORE]), np.array([0, 1])), _enough(names, 2)
    largest = max((v for v in values if v < IGNORE), default=0)
    if IGNORE in values:
        notes.append("pixels of 255 in the masks are ignored")
    classes = _enough(names, 1 if names else largest + 1)
    return _Code(np.arange(len(classes)), np.arange(len(classes))), classes


def _enough(names: list[str] | None, count: int) -> list[str]:
    names = names or []
    return names + [str(i) for i in range(len(names), count)]


def _names(path: Path) -> list[str] | None:
    """Names from `classes.txt`, one a line, or `classes.json`, a list or a table from number to name or back."""
    text, document = path / "classes.txt", path / "classes.json"
    if text.is_file():
        return [line.strip() for line in read_text(text).splitlines() if line.strip()]
    if not document.is_file():
        return None
    try:
        found = json.loads(document.read_bytes())
        if isinstance(found, dict):
            pairs = [(int(k), v) if str(k).isdigit() else (int(v), k) for k, v in found.items()]
            found = [name for _, name in sorted(pairs)]
            if [number for number, _ in sorted(pairs)] != list(range(len(pairs))):
                raise ValueError("its numbers do not run from 0 without a gap")
        return [str(name) for name in found]
    except (ValueError, TypeError) as error:
        raise DataError(f"{document} must be a list of names or a table of names and numbers ({error}).") from error
