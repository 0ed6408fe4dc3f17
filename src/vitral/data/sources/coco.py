"""COCO's JSON: boxes, and masks drawn from outlines or run lengths when they are asked for; and back again.

One file, or a folder with one for each part: `annotations/instances_train*.json`, or `train/_annotations.coco.json`.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitral.data.images import LIMITS, ORIENTATION, AtLeast, ImageMode, upright_size
from vitral.data.sources.base import Data, ImageFiles, Problem, problem, problem_notes
from vitral.data.sources.folder import PARTS
from vitral.data.targets import IGNORE, Boxes, Masks, usable_box
from vitral.errors import DataError

Outline = list[np.ndarray] | dict[str, Any] | None
"""Polygons (n, 2) in pixels, or run lengths, or nothing that could be drawn."""
FAR = 1e9
"""No box reaches further, in pixels."""
MOST_CLASSES = 254
"""Numbers of a mask that are left beside background and what is ignored."""
LISTS = ("images", "annotations", "categories")
LYING = {5: (False, False), 6: (True, False), 7: (True, True), 8: (False, True)}
"""EXIF's orientations of a file that lies on its side: whether to mirror it across, and down, once transposed."""


# ---- reading ----


def is_coco_folder(path: Path) -> bool:
    """Whether a folder holds COCO files where they usually lie."""
    return bool(_files(path))


def load_coco(path: Path) -> Data:
    """Read one JSON file, or those of a folder's parts; bad annotations are listed in `problems`."""
    files = {"train": path} if path.is_file() else _files(path)
    if "train" not in files:
        raise DataError(f"{path} has COCO files for {', '.join(files) or 'no part'} but none for the training part.")
    documents = {part: _parse(file) for part, file in files.items()}
    notes: list[str] = []
    classes = _classes(path, documents, notes)
    problems: list[Problem] = []
    found = _Found()
    splits = {}
    for part, document in documents.items():
        start = len(found.paths)
        _read_part(files[part], document, classes, found, problems)
        splits[part] = torch.arange(start, len(found.paths))
    if not len(splits["train"]):
        first = problems[0]["error"] if problems else "the list of images is empty"
        raise DataError(f"{files['train']}: none of its images was found ({first}); put them beside the file.")
    if found.crowds:
        notes.append(f"{found.crowds:,} crowds were left out of the boxes; masks ignore them")
    turned = sum(turn in LYING for turn in found.turns)
    if turned:
        notes.append(f"the annotations of {turned:,} images are for the unturned file and were turned by its EXIF")
    present = torch.zeros(len(found.paths), len(classes))
    for target, rows in zip(present, found.rows, strict=True):
        target[rows[:, 0].long()] = 1
    names = ["background", *classes]
    drawn = any(outline is not None for shapes in found.shapes for _, outline, _ in shapes)
    masks = Masks(DrawnMasks(found.shapes, found.sizes, found.turns, found.paths), names) if drawn else None
    return Data(
        name=path.stem,
        inputs=ImageFiles(found.paths),
        targets=present,
        classes=classes,
        splits=splits,
        notes=[*notes, *problem_notes(problems)],
        kind="labels",
        boxes=Boxes(found.rows, max(1, *map(len, found.rows))),
        masks=masks,
        mask_classes=names if drawn else None,
        problems=problems,
    )


@dataclass
class _Found:
    """What was read so far, image by image."""

    paths: list[Path] = field(default_factory=list)
    sizes: list[tuple[int, int]] = field(default_factory=list)
    """(height, width) that the annotations are for."""
    turns: list[int] = field(default_factory=list)
    """EXIF orientation by which the annotations are still to be turned, 1 for none."""
    rows: list[Tensor] = field(default_factory=list)
    shapes: list[list[tuple[int, Outline, list[float]]]] = field(default_factory=list)
    crowds: int = 0


def _files(path: Path) -> dict[str, Path]:
    """The COCO file of each part of a folder."""
    found: dict[str, Path] = {}
    for part, words in PARTS.items():
        own = re.compile(rf"({'|'.join(words)})(19|20)?\d*")
        listed = [
            file
            for file in sorted((path / "annotations").glob("*.json"))
            if own.fullmatch(file.stem.removeprefix("instances_"))
        ]
        inside = [
            file
            for folder in sorted(p for p in path.iterdir() if p.is_dir() and own.fullmatch(p.name))
            for file in _lone_file(folder)
        ]
        if listed or inside:
            found[part] = (listed + inside)[0]
    if not found:
        lone = _lone_file(path) or _lone_file(path / "annotations")
        found = {"train": lone[0]} if lone else {}
    return found


def _lone_file(folder: Path) -> list[Path]:
    """The file that Roboflow writes, or the one file of a folder that looks like COCO's."""
    if (folder / "_annotations.coco.json").is_file():
        return [folder / "_annotations.coco.json"]
    files = [file for file in sorted(folder.glob("*.json")) if _looks_like_coco(file)]
    return files if len(files) == 1 else []


def _looks_like_coco(file: Path) -> bool:
    """Whether COCO's three lists are in the file; the whole of it is read only if one of them begins early."""
    lists = [re.compile(rf'"{key}"\s*:\s*\['.encode()) for key in LISTS]
    with file.open("rb") as opened:
        text = opened.read(65536)
        if text.lstrip()[:1] != b"{" or not any(key.search(text) for key in lists):
            return False
        text += opened.read()
    return all(key.search(text) for key in lists)


def _parse(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON ({error}).") from error
    for key, needs in zip(LISTS, (("id", "file_name"), (), ("id", "name")), strict=True):
        entries = document.get(key) if isinstance(document, dict) else None
        if not isinstance(entries, list) or not all(_has(entry, needs) for entry in entries):
            told = f", each with {' and '.join(needs)}" if needs else ""
            raise DataError(f"{file} is not a COCO file of instances: it needs a list {key!r}{told}.")
    return document


def _has(entry: Any, keys: tuple[str, ...]) -> bool:
    return isinstance(entry, dict) and all(isinstance(entry.get(key), int | str) for key in keys)


def _key(entry: dict[str, Any], name: str) -> int | str | None:
    """The number that an annotation refers to something by, None where there is none."""
    value = entry.get(name)
    return value if isinstance(value, int | str) else None


def _classes(path: Path, documents: dict[str, dict[str, Any]], notes: list[str]) -> list[str]:
    """Names of the categories in order of their numbers, the training part's first.

    A category that nothing is annotated with and that is only the family name of others (Roboflow writes one) is none.
    """
    names: list[str] = []
    families: list[str] = []
    for document in documents.values():
        used = {_key(a, "category_id") for a in document["annotations"]}
        above = {str(c.get("supercategory")) for c in document["categories"]}
        for category in sorted(document["categories"], key=lambda c: (str(type(c["id"])), c["id"])):
            name = str(category["name"])
            if category["id"] not in used and name in above and str(category.get("supercategory")) != name:
                families.append(name)
            elif name not in names:
                names.append(name)
    families = sorted(set(families) - set(names))
    if families:
        notes.append(f"{', '.join(families)} only names a family of classes and is none itself")
    if not 0 < len(names) <= MOST_CLASSES:
        raise DataError(f"{path} has {len(names)} categories; there must be 1 to {MOST_CLASSES}.")
    return names


def _read_part(
    file: Path, document: dict[str, Any], classes: list[str], found: _Found, problems: list[Problem]
) -> None:
    """Read the images of one file and their annotations."""
    numbers = {name: i for i, name in enumerate(classes)}
    number_of = {c["id"]: numbers[str(c["name"])] for c in document["categories"] if str(c["name"]) in numbers}
    annotations: dict[Any, list[dict[str, Any]]] = {image["id"]: [] for image in document["images"]}
    for entry in document["annotations"]:
        if _key(entry, "image_id") in annotations:
            annotations[entry["image_id"]].append(entry)
        else:
            said = "annotated, but not in the list of images"
            problems.append(problem("missing_image", f"image {entry.get('image_id')}", said))
    folder = _image_folder(file, [str(image["file_name"]) for image in document["images"]])
    for image in document["images"]:
        path, entries = folder / str(image["file_name"]), annotations[image["id"]]
        if not path.is_file():
            problems.append(problem("missing_image", path, f"does not exist ({len(entries)} annotations)"))
            continue
        try:
            size, turn = _size(image, path, problems)
        except (OSError, UnidentifiedImageError, ValueError):
            problems.append(problem("missing_image", path, f"is no image ({len(entries)} annotations)"))
            continue
        rows: list[list[float]] = []
        shapes: list[tuple[int, Outline, list[float]]] = []
        for entry in entries:
            _read_annotation(entry, path, size, number_of, rows, shapes, found, problems)
        found.paths.append(path)
        found.sizes.append(size)
        found.turns.append(turn)
        found.rows.append(_turned_boxes(torch.tensor(rows, dtype=torch.float64).view(-1, 5), turn))
        found.shapes.append(shapes)


def _image_folder(file: Path, names: list[str]) -> Path:
    """Where most of the first images lie: beside the file, in `images`, or in a folder called like the part."""
    part = file.stem.removeprefix("instances_")
    bases = [file.parent, file.parent.parent]
    places = [base / below for base in bases for below in ("", "images", part, f"images/{part}", f"{part}/images")]
    return max(places, key=lambda place: sum((place / name).is_file() for name in names[:50]))


def _size(image: dict[str, Any], path: Path, problems: list[Problem]) -> tuple[tuple[int, int], int]:
    """(height, width) as written down, else as the file says; and how to turn what is annotated at that size.

    A written size that is the upright one swapped tells that the annotator's tool paid no heed to the EXIF.
    """
    (width, height), turn = _size_and_turn(path)
    written = (image.get("height", 0), image.get("width", 0))
    if not all(isinstance(v, int) and v > 0 for v in written) or math.prod(written) > LIMITS.max_pixels:
        return (height, width), 1
    if turn in LYING and written == (width, height) != (height, width):
        return written, turn
    if written != (height, width):
        said = f"is written down as {written[1]} x {written[0]} pixels but has {width} x {height}"
        problems.append(problem("image_size", path, said))
    return written, 1


def size_of_file(path: Path) -> tuple[int, int]:
    """(width, height) of an image file by its header, as it is looked at: turned if its EXIF says so."""
    return _size_and_turn(path)[0]


def _size_and_turn(path: Path) -> tuple[tuple[int, int], int]:
    with Image.open(path) as image:
        height, width = upright_size(image)
        return (width, height), image.getexif().get(ORIENTATION, 1)


def _turned_boxes(rows: Tensor, turn: int) -> Tensor:
    """Boxes (n, 5) of a file that lies on its side, as they are when it stands."""
    if turn not in LYING:
        return rows
    across, down = LYING[turn]
    label, y0, x0, y1, x1 = rows.unbind(1)
    if across:
        x0, x1 = 1 - x1, 1 - x0
    if down:
        y0, y1 = 1 - y1, 1 - y0
    return torch.stack([label, x0, y0, x1, y1], 1)


def _turned_mask(mask: np.ndarray, turn: int) -> np.ndarray:
    """(H, W) of a file that lies on its side -> (W, H) as it is when it stands."""
    if turn not in LYING:
        return mask
    across, down = LYING[turn]
    return mask.T[:: -1 if down else 1, :: -1 if across else 1].copy()


def _read_annotation(
    entry: dict[str, Any], path: Path, size: tuple[int, int], number_of: dict[Any, int], rows: list[list[float]],
    shapes: list[tuple[int, Outline, list[float]]], found: _Found, problems: list[Problem],
) -> None:  # fmt: skip
    """Add one annotation's box and outline, or what is wrong with it."""
    height, width = size
    outline, wrong = _outline(entry.get("segmentation"), size)
    if entry.get("iscrowd"):
        found.crowds += 1
        if outline is not None:
            shapes.insert(0, (IGNORE, outline, []))
        return
    number = number_of.get(_key(entry, "category_id"))
    if number is None:
        problems.append(problem("unknown_class", path, f"category {entry.get('category_id')} is not in the list"))
        return
    box = entry.get("bbox")
    if box is None and isinstance(outline, list):
        low, high = (getattr(np.concatenate(outline), side)(0) for side in ("min", "max"))
        box = [*low.tolist(), *(high - low).tolist()]
    if not isinstance(box, list) or len(box) != 4 or not all(isinstance(v, int | float) and abs(v) < FAR for v in box):
        problems.append(problem("box_invalid", path, f"the box must be four numbers, got {box}"))
        return
    x, y, w, h = box
    written = f"x {x:g}, y {y:g}, width {w:g}, height {h:g} (pixels, in an image of {width} x {height})"
    corners = [x / width, y / height, (x + w) / width, (y + h) / height]
    fractions, kind, error = usable_box(corners, written, 1 / max(size))
    if kind:
        problems.append(problem(kind, path, error))
    if fractions is None:
        return
    rows.append([number, *fractions])
    if wrong:
        problems.append(problem("bad_shape", path, wrong))
    shapes.append((number + 1, outline, fractions))


def _outline(value: Any, size: tuple[int, int]) -> tuple[Outline, str]:
    """A segmentation as it can be drawn, or None, and what is wrong with it."""
    if not value:
        return None, ""
    try:
        if isinstance(value, dict):
            runs = _runs(value)
            if tuple(value["size"]) != size or sum(runs) != math.prod(size) or min(runs, default=0) < 0:
                return None, f"run lengths for {value['size']} (height, width) in an image of {list(size)}"
            return value, ""
        polygons = [np.asarray(p, np.float64).reshape(-1, 2) for p in value]
        if any(len(p) < 3 or not np.isfinite(p).all() for p in polygons):
            return None, "an outline has fewer than three points or impossible numbers"
        return polygons, ""
    except (ValueError, TypeError, KeyError, IndexError, OverflowError):
        return None, "the segmentation is neither polygons nor run lengths"


@dataclass(frozen=True)
class DrawnMasks:
    """Masks drawn when they are read, later objects over earlier ones; one without an outline is ignored in its box."""

    shapes: list[list[tuple[int, Outline, list[float]]]]
    sizes: list[tuple[int, int]]
    turns: list[int]
    paths: Sequence[Path]

    def __len__(self) -> int:
        return len(self.shapes)

    def read(self, index: int, mode: ImageMode, at_least: AtLeast | None = None) -> Tensor:
        """Class numbers, uint8 (1, H, W)."""
        height, width = self.sizes[index]
        mask = np.zeros((height, width), np.uint8)
        for number, outline, box in self.shapes[index]:
            if outline is None:
                x0, y0, x1, y1 = box
                rows = slice(math.floor(y0 * height), math.ceil(y1 * height))
                mask[rows, math.floor(x0 * width) : math.ceil(x1 * width)] = IGNORE
            elif isinstance(outline, dict):
                mask[rle_to_mask(outline).numpy()] = number
            else:
                for polygon in outline:
                    mask[_filled(polygon, height, width)] = number
        return torch.from_numpy(_turned_mask(mask, self.turns[index]))[None]

    def name(self, index: int) -> str:
        """The image that the mask belongs to."""
        return f"mask of {self.paths[index]}"


def _filled(polygon: np.ndarray, height: int, width: int) -> np.ndarray:
    """(H, W) True where a pixel's centre lies inside: right of an odd number of the row's crossings with the edges.

    Pillow's polygons are no help: they have the pixels on the edge too, and so are half a pixel too large all round.
    """
    (x0, y0), (x1, y1) = polygon.T, np.roll(polygon, -1, 0).T
    rows = np.arange(height)[:, None] + 0.5  # (H, 1) against the edges (E,)
    crosses = (np.minimum(y0, y1) <= rows) & (rows < np.maximum(y0, y1))
    row, edge = crosses.nonzero()
    share = (rows[row, 0] - y0[edge]) / (y1[edge] - y0[edge])
    x = x0[edge] + share * (x1[edge] - x0[edge])
    crossings = np.zeros((height, width + 1), np.int32)
    np.add.at(crossings, (row, np.ceil(x - 0.5).clip(0, width).astype(int)), 1)
    return (crossings.cumsum(1)[:, :width] & 1).astype(bool)


# ---- run lengths ----


def mask_to_rle(mask: Tensor, compressed: bool = False) -> dict[str, Any]:
    """(H, W) -> COCO's run lengths: zeros and ones in turn, down the columns, as a list or as its compressed string."""
    flat = np.asarray(mask.bool().cpu()).T.reshape(-1)
    changes = (np.diff(flat.astype(np.int8)) != 0).nonzero()[0] + 1
    edges = [0] * (1 + bool(flat.size and flat[0])) + changes.tolist() + [flat.size]
    counts = np.diff(edges).tolist()
    return {"size": list(mask.shape), "counts": _to_string(counts) if compressed else counts}


def rle_to_mask(rle: dict[str, Any]) -> Tensor:
    """COCO's run lengths, a list or the compressed string -> (H, W) bool."""
    height, width = rle["size"]
    runs = _runs(rle)
    if sum(runs) != height * width or min(runs, default=0) < 0:
        raise DataError(f"run lengths make {sum(runs):,} pixels, not {height} x {width}; is the string cut short?")
    flat = np.repeat(np.arange(len(runs)) % 2 == 1, runs)
    return torch.from_numpy(flat.reshape(width, height).T.copy())


def _runs(rle: dict[str, Any]) -> list[int]:
    counts = rle["counts"]
    return [int(n) for n in counts] if isinstance(counts, list) else _from_string(counts)


def _to_string(counts: list[int]) -> str:
    """Five bits to a character, least first, from '0' up; the sixth says that more follow.

    From the fourth on, a count is given as its difference from the one before the last.
    """
    text = []
    for i, count in enumerate(counts):
        value = count - counts[i - 2] if i > 2 else count
        more = True
        while more:
            bits, value = value & 31, value >> 5
            more = value != (-1 if bits & 16 else 0)
            text.append(chr(48 + bits + 32 * more))
    return "".join(text)


def _from_string(text: str | bytes) -> list[int]:
    counts: list[int] = []
    value = shift = 0
    for letter in text.encode() if isinstance(text, str) else text:
        bits = letter - 48
        if not 0 <= bits < 64:
            raise ValueError(f"{chr(letter)!r} is no part of compressed run lengths")
        value |= (bits & 31) << shift
        shift += 5
        if bits < 32:
            value -= (bits & 16) << (shift - 4)  # the last bit is the sign
            counts.append(value + counts[-2] if len(counts) > 2 else value)
            value = shift = 0
    return counts


# ---- writing ----


@dataclass(frozen=True)
class Instance:
    """An object found in an image: its class, its box as x0, y0, x1, y1 in fractions, and perhaps more."""

    label: int
    box: tuple[float, float, float, float]
    score: float | None = None
    mask: Tensor | None = None
    """(H, W) of the image."""


def coco_document(
    names: Sequence[str], sizes: Sequence[tuple[int, int]], predictions: Sequence[Sequence[Instance]],
    classes: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """COCO's document for images with their (height, width) and the objects in each.

    Its `annotations` alone are what COCO calls results, where every object has a score.
    """
    annotations: list[dict[str, Any]] = []
    for number, ((height, width), found) in enumerate(zip(sizes, predictions, strict=True), start=1):
        for instance in found:
            x0, y0, x1, y1 = instance.box
            x, y, w, h = x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height
            entry = {"id": len(annotations) + 1, "image_id": number, "category_id": instance.label + 1, "iscrowd": 0}
            entry |= {"bbox": [x, y, w, h], "area": w * h}
            if instance.score is not None:
                entry["score"] = instance.score
            if instance.mask is not None:
                entry |= {"segmentation": mask_to_rle(instance.mask, compressed=True)}
                entry |= {"area": int(instance.mask.bool().sum())}
            annotations.append(entry)
    images = [
        {"id": i, "file_name": name, "height": h, "width": w}
        for i, (name, (h, w)) in enumerate(zip(names, sizes, strict=True), start=1)
    ]
    categories = [{"id": i, "name": name} for i, name in enumerate(classes, start=1)]
    return {"images": images, "annotations": annotations, "categories": categories}


def write_coco(
    path: Path, names: Sequence[str], sizes: Sequence[tuple[int, int]], predictions: Sequence[Sequence[Instance]],
    classes: Sequence[str],
) -> None:  # fmt: skip
    """Write the document of `coco_document` as JSON."""
    path.write_text(json.dumps(coco_document(names, sizes, predictions, classes)))


class Detected(Protocol):
    """The objects that were found in an image."""

    @property
    def name(self) -> str:
        """The image's path."""
        ...

    @property
    def size(self) -> tuple[int, int]:
        """Its height and width; nothing (0, 0) for one that could not be read."""
        ...

    @property
    def boxes(self) -> Sequence[Sequence[float]]:
        """x0, y0, x1, y1 of each object in the image's pixels."""
        ...

    @property
    def scores(self) -> Sequence[float]:
        """How sure each of them is."""
        ...

    @property
    def numbers(self) -> Sequence[int]:
        """The class number of each."""
        ...


def write_predictions(path: Path, answers: Iterable[Detected], classes: Sequence[str]) -> None:
    """Write what was found as a COCO document; images that could not be read are left out."""
    answers = [answer for answer in answers if all(answer.size)]
    found = [
        [
            Instance(number, to_fractions(box, answer.size), score)
            for number, box, score in zip(answer.numbers, answer.boxes, answer.scores, strict=True)
        ]
        for answer in answers
    ]
    write_coco(path, [answer.name for answer in answers], [answer.size for answer in answers], found, classes)


def to_fractions(box: Sequence[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """x0, y0, x1, y1 in pixels -> in fractions of an image of that (height, width)."""
    height, width = size
    x0, y0, x1, y1 = box
    return x0 / width, y0 / height, x1 / width, y1 / height
