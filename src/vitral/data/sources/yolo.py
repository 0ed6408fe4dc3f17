"""Ultralytics folders: `images/train` next to `labels/train`, one text file per image, one line per box.

A line is `class cx cy w h` in fractions of the image. `data.yaml` names the classes.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vitral.data.sources.base import Data, ImageFiles, Problem, problem, problem_notes, read_text
from vitral.data.sources.coco import Detected, to_fractions
from vitral.data.sources.folder import list_images
from vitral.data.sources.masks import paired_folders
from vitral.data.targets import Boxes, box_xyxy_to_cxcywh, usable_box
from vitral.errors import DataError

LABELS = ("labels",)
ELSEWHERE = ("classes", "notes", "README")
"""Text files that annotation tools store among the labels but that hold none."""


def is_yolo_folder(path: Path) -> bool:
    """Whether there is a folder of label files next to a folder of images."""
    return any(next(labels.rglob("*.txt"), None) for _, labels in paired_folders(path, LABELS).values())


def load_yolo(path: Path) -> Data:
    """Read the folder; bad lines and boxes are listed in `problems`, an image without a file has no objects."""
    names = _names(path)
    problems: list[Problem] = []
    paths: list[Path] = []
    found: list[list[list[float]]] = []
    splits = {}
    outlines = 0
    for part, (images, labels) in paired_folders(path, LABELS).items():
        start = len(paths)
        texts = {str(p.relative_to(labels).with_suffix("")): p for p in sorted(labels.rglob("*.txt"))}
        for image in list_images(images):
            text = texts.pop(str(image.relative_to(images).with_suffix("")), None)
            rows, drawn = _read(text, image, len(names) if names else None, problems) if text else ([], 0)
            paths.append(image)
            found.append(rows)
            outlines += drawn
        problems += [
            problem("missing_image", text, f"there is no image for it in {images}")
            for text in texts.values()
            if text.stem not in ELSEWHERE
        ]
        splits[part] = torch.arange(start, len(paths))
    if not splits or not len(splits["train"]):
        raise DataError(f"{path} has no images in the training part; put them in images/train.")
    largest = max((int(row[0]) for rows in found for row in rows), default=-1)
    classes = names or [str(i) for i in range(largest + 1)]
    if not classes:
        raise DataError(f"{path} has no box and no data.yaml with names, so its classes are unknown; add data.yaml.")
    notes = [f"{outlines:,} outlines are taken as the boxes around them"] if outlines else []
    if names is None:
        notes.append("there is no data.yaml with names: classes are called by their numbers")
    present = torch.zeros(len(paths), len(classes))
    for target, rows in zip(present, found, strict=True):
        target[[int(row[0]) for row in rows]] = 1
    return Data(
        name=path.name,
        inputs=ImageFiles(paths),
        targets=present,
        classes=classes,
        splits=splits,
        notes=[*notes, *problem_notes(problems)],
        kind="labels",
        boxes=Boxes([torch.tensor(rows, dtype=torch.float64).view(-1, 5) for rows in found], max(1, *map(len, found))),
        problems=problems,
    )


def _read(text: Path, image: Path, count: int | None, problems: list[Problem]) -> tuple[list[list[float]], int]:
    """Class, x0, y0, x1, y1 of each box in a file, and the number of boxes drawn from outlines."""
    rows: list[list[float]] = []
    outlines = 0
    try:
        lines = text.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        problems.append(problem("bad_line", text, f"cannot be read ({error})"))
        return rows, outlines
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            label, *values = [float(word) for word in line.split()]
        except ValueError:
            label, values = 0.0, []
        outline = len(values) >= 6 and len(values) % 2 == 0
        if not (len(values) == 4 or outline) or not label.is_integer():
            error = f"line {number} should be `class cx cy w h`, got {line.strip()[:60]!r}"
            problems.append(problem("bad_line", text, error))
            continue
        if label < 0 or (count is not None and label >= count):
            problems.append(
                problem(
                    "unknown_class",
                    image,
                    f"class {label:.0f} of line {number} is not one of the {count or 'non-negative'} classes",
                )
            )
            continue
        if outline:
            box = [min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])]
        else:
            cx, cy, w, h = values
            box = [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]
        written = f"of line {number}, `{line.strip()[:60]}`, in fractions of the image,"
        fractions, kind, error = usable_box(box, written)
        if kind:
            problems.append(problem(kind, image, error))
        if fractions is not None:
            rows.append([label, *fractions])
            outlines += outline
    return rows, outlines


def _names(path: Path) -> list[str] | None:
    """The names in `data.yaml` or `dataset.yaml`, or None."""
    files = [path / f"{stem}.{end}" for stem in ("data", "dataset") for end in ("yaml", "yml")]
    file = next((f for f in files if f.is_file()), None)
    if file is None:
        return None
    text = read_text(file)
    try:
        import yaml
    except ImportError:
        return _in_order(file, simple_names(text))
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DataError(f"{file} cannot be read as YAML ({str(error).splitlines()[0]}).") from error
    return _in_order(file, document.get("names") if isinstance(document, dict) else None)


def _in_order(file: Path, found: Any) -> list[str]:
    if isinstance(found, dict):
        keys = sorted(found, key=lambda k: int(k) if str(k).isdigit() else -1)
        if [str(k) for k in keys] == [str(i) for i in range(len(keys))]:
            found = [found[k] for k in keys]
    if not isinstance(found, list) or not found:
        raise DataError(f"{file} should name the classes: `names:` with a list, or a table from 0 without a gap.")
    return [str(name) for name in found]


def simple_names(text: str) -> list[str] | dict[str, str] | None:
    """The list or table under `names:` of a simple YAML text, used if PyYAML is not installed."""
    at = re.search(r"^names\s*:(.*)$", text, re.MULTILINE)
    if at is None:
        return None
    inline = at.group(1).split(" #")[0].strip()
    if inline[:1] in "[{" and inline:
        whole = text[at.start(1) :].strip()
        inside = whole[1 : whole.find("]" if whole[0] == "[" else "}")]
        words = [word.strip() for word in inside.split(",") if word.strip()]
        if whole[0] == "[":
            return [_unquoted(word) for word in words]
        return {_unquoted(k): _unquoted(v) for k, _, v in (word.partition(":") for word in words)}
    items: list[str] = []
    table: dict[str, str] = {}
    for line in text[at.end() :].splitlines():
        plain = line.split(" #")[0].strip()
        if not plain or plain.startswith("#"):
            continue
        if plain.startswith("- "):
            items.append(_unquoted(plain[2:]))
        elif line[:1].isspace() and ":" in plain:
            key, _, value = plain.partition(":")
            table[_unquoted(key)] = _unquoted(value)
        else:
            break
    return items or table or None


def _unquoted(word: str) -> str:
    word = word.strip()
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def write_yolo(folder: Path, answers: Iterable[Detected]) -> None:
    """Write a text file with the name of each image; images that could not be read get none."""
    texts: dict[str, str] = {}
    for answer in answers:
        if not all(answer.size):
            continue
        stem = Path(answer.name).stem
        if stem in texts:
            raise DataError(
                f"two images are called {stem}, but each needs a {stem}.txt of its own; write COCO instead."
            )
        boxes = torch.tensor([to_fractions(box, answer.size) for box in answer.boxes], dtype=torch.float64).view(-1, 4)
        lines = zip(answer.numbers, box_xyxy_to_cxcywh(boxes).tolist(), strict=True)
        texts[stem] = "".join(f"{number} {' '.join(f'{v:.6f}' for v in box)}\n" for number, box in lines)
    folder.mkdir(parents=True, exist_ok=True)
    for stem, text in texts.items():
        (folder / f"{stem}.txt").write_text(text)
