"""CIFAR-10 from a folder: the binary batches, the python batches, or PNG files of one image a row with JSON labels.

The python batches are pickles, and loading a pickle can run code: they are not loaded. Their opcodes are read as data,
the pixels and labels picked out, and nothing is carried out.
"""

import json
import pickletools
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitral.data.sources.base import Data, ImageArray
from vitral.errors import DataError

CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def is_cifar_folder(path: Path) -> bool:
    """Whether a folder holds batches of CIFAR-10 in any layout."""
    return any((path / name).is_file() for name in ("data_batch_1", "data_batch_1.bin", "data_batch_1.png"))


def load_cifar10(path: Path, name: str = "cifar10") -> Data:
    """Read the five training batches and the test batch."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    if (path / "data_batch_1.bin").is_file():
        parts = [_read_binary(path / f"{n}.bin") for n in [*names, "test_batch"]]
    elif (path / "data_batch_1.png").is_file():
        labels = {"train": _read_labels(path, "train"), "test": _read_labels(path, "test")}
        pixels = [_read_png(path / f"{n}.png") for n in [*names, "test_batch"]]
        starts = [0, *np.cumsum([len(p) for p in pixels[:5]]).tolist()]
        parts = [(p, labels["train"][starts[i] : starts[i] + len(p)]) for i, p in enumerate(pixels[:5])]
        parts.append((pixels[5], labels["test"]))
    else:
        parts = [_read_python(path / n) for n in [*names, "test_batch"]]
    for part, (pixels_of, labels_of) in zip([*names, "test_batch"], parts, strict=True):
        if len(pixels_of) != len(labels_of):
            raise DataError(f"{path}: {part} has {len(pixels_of)} images but {len(labels_of)} labels.")
    images = torch.from_numpy(np.concatenate([p for p, _ in parts]))
    targets = torch.from_numpy(np.concatenate([t for _, t in parts]).astype(np.int64))
    train = sum(len(p) for p, _ in parts[:5])
    splits = {"train": torch.arange(train), "test": torch.arange(train, len(images))}
    return Data(name, ImageArray(images), targets, CLASSES, splits, recipe="cifar10")


def _read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    data = np.fromfile(path, np.uint8)
    if data.size == 0 or data.size % 3073:
        raise DataError(f"{path} is not a binary batch of CIFAR-10: {data.size:,} bytes are no multiple of 3,073.")
    rows = data.reshape(-1, 3073)
    return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]


def _read_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels among a pickle's opcodes: the longest string, and the numbers that follow the word "labels"."""
    pixels, labels, after = b"", [], ""
    try:
        for opcode, value, _ in pickletools.genops(path.read_bytes()):
            if isinstance(value, str | bytes):
                text = value.encode("latin-1") if isinstance(value, str) else value
                after = text.decode("latin-1") if len(text) < 16 else ""
                pixels = max(pixels, text, key=len)
            elif after == "labels" and isinstance(value, int) and opcode.name.startswith("BININT"):
                labels.append(value)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a python batch of CIFAR-10 ({error}); try the binary version.") from error
    if not labels or len(pixels) != 3072 * len(labels) or max(labels) >= len(CLASSES):
        raise DataError(
            f"{path} is not a python batch of CIFAR-10: {len(pixels):,} bytes of pixels and {len(labels):,} labels "
            f"found; try the binary version (cifar-10-binary.tar.gz)."
        )
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), np.array(labels, np.uint8)


def _read_png(path: Path) -> np.ndarray:
    """A picture of 1024 x n pixels: row i is image i, pixel by pixel."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            pixels = np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if pixels.shape[1] != 1024:
        raise DataError(f"{path} is not a batch of CIFAR-10: it is {pixels.shape[1]} pixels wide, not 1,024.")
    return pixels.reshape(-1, 32, 32, 3).transpose(0, 3, 1, 2)


def _read_labels(path: Path, part: str) -> np.ndarray:
    for name in (f"{part}_lables.json", f"{part}_labels.json"):
        if (path / name).is_file():
            return np.array(json.loads((path / name).read_bytes()), np.uint8)
    raise DataError(f"{path} has no {part}_labels.json.")
