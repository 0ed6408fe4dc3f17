"""Tiny data sets and runs: one for every kind of task, for both ways to pretrain, and for a comparison."""

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import numpy as np
from PIL import Image

SIDE = 16
"""Height and width of the images."""
IMAGES = 24
NAMES = ("circle", "square", "line")
WORDS = ("old", "new", "red", "cat", "dog", "sun", "42", "7")


@dataclass(frozen=True)
class Run:
    """A command that writes a run directory, and what its model reads."""

    verb: Literal["train", "pretrain", "compare"]
    data: str
    options: tuple[str, ...]
    task: str | None = None
    reads: Literal["image", "text"] = "image"

    def source(self, folder: Path) -> str:
        """The name or path of the data."""
        return self.data if self.data == "digits" else str(folder / self.data)

    def command(self, folder: Path, out: Path, resume: bool = False) -> list[str]:
        """The words after `vitral`; `folder` has the data of `write_data`."""
        task = ["--task", self.task] if self.task else []
        again = ["--resume"] if resume and self.verb != "compare" else []  # a comparison resumes without a flag
        return [self.verb, self.source(folder), "--out", str(out), *self.options, *task, *again]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_STEPS = _words("--max-steps 8 --save-steps 1 --log-steps 1 --eval-every 1 --batch-size 8 --val-fraction 0.25")
_IMAGES = (*_STEPS, *_words(f"--model vit_nano_conv_patch2_8 --img-size {SIDE} --patch-size 4 --workers 0"))
_TEXT_MODEL = _words(
    "--text.tokenizer characters --text.width 32 --text.heads 2 --text.encoder-layers 1 --text.decoder-layers 1"
)
_PRETRAIN = _words(
    "--model vit_nano_patch2_8 --max-steps 8 --save-steps 1 --log-steps 1 --eval-every 1 --batch-size 256 "
    "--health-images 40 --neighbours 200"
)

RUNS = {
    "classify": Run("train", "digits", (*_STEPS, "--model", "vit_nano_patch2_8", "--batch-size", "64")),
    "multilabel": Run("train", "multilabel.csv", _IMAGES, "multilabel"),
    "regress": Run("train", "regress.csv", _IMAGES, "regress"),
    "segment": Run("train", "scenes", _IMAGES, "segment"),
    "detect": Run(
        "train", "boxes", (*_IMAGES, *_words("--detect.width 32 --detect.decoder-layers 1")), "detect"
    ),
    "caption": Run("train", "caption.csv", (*_IMAGES, *_TEXT_MODEL), "caption"),
    "translate": Run("train", "pairs.tsv", (*_STEPS, *_TEXT_MODEL), reads="text"),
    "complete": Run("train", "book.txt", (*_STEPS, *_TEXT_MODEL), reads="text"),
    "tag": Run("train", "tags.csv", (*_STEPS, *_TEXT_MODEL), reads="text"),
    "dino": Run(
        "pretrain", "digits",
        (*_PRETRAIN, *_words("--method dino --dino.prototypes 32 --dino.hidden 32 --dino.bottleneck 16")),
    ),
    "mae": Run("pretrain", "digits", (*_PRETRAIN, *_words("--method mae --mae.decoder-dim 16 --mae.decoder-depth 1"))),
    "compare": Run(
        "compare", "digits",
        _words("--models vit_nano_patch2_8,vit_nano_conv_patch2_8 --fractions 0.1 --seeds 1 --max-steps 4 --images 8 "
               "--save-steps 1 --log-steps 1 --batch-size 64"),
    ),
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Write the data sets of all runs; always the same."""
    chance = Random(0)
    pictures = folder / "scenes" / "images"
    masks = folder / "scenes" / "masks"
    (boxes := folder / "boxes" / "train").mkdir(parents=True)
    pictures.mkdir(parents=True)
    masks.mkdir(parents=True)
    found, rows = [], []
    for i in range(IMAGES):
        kind, left, top, size = chance.randrange(3), chance.randrange(8), chance.randrange(8), chance.randint(4, 8)
        pixels = np.array([chance.randrange(60) for _ in range(SIDE * SIDE * 3)], np.uint8).reshape(SIDE, SIDE, 3)
        pixels[top : top + size, left : left + size, kind] = 255
        mask = np.zeros((SIDE, SIDE), np.uint8)
        mask[top : top + size, left : left + size] = 1 + kind
        for path in (pictures, boxes):
            Image.fromarray(pixels).save(path / f"{i:02d}.png")
        Image.fromarray(mask).save(masks / f"{i:02d}.png")
        found.append({"id": i, "image_id": i, "category_id": kind, "bbox": [left, top, size, size], "area": size**2,
                      "iscrowd": 0})  # fmt: skip
        rows.append((f"scenes/images/{i:02d}.png", kind, left, top, size))
    document = {
        "images": [{"id": i, "file_name": f"{i:02d}.png", "height": SIDE, "width": SIDE} for i in range(IMAGES)],
        "categories": [{"id": i, "name": name} for i, name in enumerate(NAMES)],
        "annotations": found,
    }
    (boxes / "_annotations.coco.json").write_text(json.dumps(document))
    labels = [(image, ";".join(sorted({NAMES[kind], NAMES[left % 3]}))) for image, kind, left, _, _ in rows]
    _write_table(folder / "multilabel.csv", [("image", "labels"), *labels])
    _write_table(folder / "regress.csv", [("image", "target"), *((image, size + 0.5) for image, *_, size in rows)])
    captions = [(image, f"a {NAMES[kind]} of {size}") for image, kind, _, _, size in rows]
    _write_table(folder / "caption.csv", [("image", "caption"), *captions])
    texts = [" ".join([*chance.choices(WORDS, k=chance.randint(1, 6)), str(i)]) for i in range(40)]
    _write_table(folder / "tags.csv", [("words", "tags"), *((text, _tags(text)) for text in texts)])
    (folder / "pairs.tsv").write_text("".join(f"{text}\t{text.upper()}\n" for text in texts))
    (folder / "book.txt").write_text("\n\n".join(texts))


def _tags(text: str) -> str:
    return " ".join("NUM" if word.isdigit() else "O" for word in text.split())


def _write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
