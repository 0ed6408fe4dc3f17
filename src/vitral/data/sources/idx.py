"""IDX files, the format of MNIST and its likes: four files of images and labels, plain or gzipped."""

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch

from vitral.data.sources.base import Data, ImageArray
from vitral.errors import DataError

PARTS = {"train": "train", "test": "t10k"}
FASHION = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
MAX_BYTES = 4 * 2**30


def is_idx_folder(path: Path) -> bool:
    """Whether a folder holds the training images of such a set."""
    return _find(path, "train", "images-idx3") is not None


def load_idx(path: Path, name: str) -> Data:
    """Read the four files of a folder."""
    images, labels, splits, start = [], [], {}, 0
    for part, prefix in PARTS.items():
        pixels, targets = (_read(_need(path, prefix, kind)) for kind in ("images-idx3", "labels-idx1"))
        if pixels.ndim != 3 or targets.ndim != 1 or len(pixels) != len(targets):
            raise DataError(f"{path}: the {part} images and labels do not fit: {pixels.shape} and {targets.shape}.")
        images.append(torch.from_numpy(pixels)[:, None])
        labels.append(torch.from_numpy(targets).long())
        splits[part] = torch.arange(start, start + len(pixels))
        start += len(pixels)
    targets = torch.cat(labels)
    fashion = "fashion" in str(path).lower() or name == "fashion-mnist"
    classes = FASHION if fashion else [str(i) for i in range(int(targets.max()) + 1)]
    recipe = "fashion-mnist" if fashion else None
    return Data(name, ImageArray(torch.cat(images)), targets, classes, splits, mode="grey", recipe=recipe)


def _find(folder: Path, prefix: str, kind: str) -> Path | None:
    names = [f"{prefix}-{kind}-ubyte", f"{prefix}-{kind.replace('-idx', '.idx')}-ubyte"]
    return next((folder / f"{n}{end}" for n in names for end in ("", ".gz") if (folder / f"{n}{end}").is_file()), None)


def _need(folder: Path, prefix: str, kind: str) -> Path:
    found = _find(folder, prefix, kind)
    if found is None:
        raise DataError(f"{folder} has no {prefix}-{kind}-ubyte or {prefix}-{kind}-ubyte.gz.")
    return found


def _read(path: Path) -> np.ndarray:
    """One IDX file of unsigned bytes."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                data = file.read(MAX_BYTES)
        else:
            data = path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise DataError(f"{path} is not an IDX file of bytes: it begins with {data[:4]!r}.")
    shape = tuple(np.frombuffer(data, ">i4", count=data[3], offset=4).tolist())
    values = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
    if values.size != int(np.prod(shape)):
        raise DataError(f"{path} is cut short: {values.size:,} bytes for the shape {shape}.")
    return values.reshape(shape).copy()
