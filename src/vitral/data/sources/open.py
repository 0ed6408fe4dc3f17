"""Recognize the format of a name or path by its structure, and open it."""

from collections.abc import Callable
from pathlib import Path

import torch

from vitral.config import HUB
from vitral.data.sources.base import Data, ImageFiles
from vitral.data.sources.cifar import is_cifar_folder, load_cifar10
from vitral.data.sources.coco import is_coco_folder, load_coco
from vitral.data.sources.digits import load_digits
from vitral.data.sources.digits_lines import make_digit_lines
from vitral.data.sources.folder import list_images, load_folder
from vitral.data.sources.hf import is_hf_folder, load_hf
from vitral.data.sources.idx import is_idx_folder, load_idx
from vitral.data.sources.masks import is_masks_folder, load_masks
from vitral.data.sources.numbers_en_it import make_numbers
from vitral.data.sources.scenes import make_scenes
from vitral.data.sources.scenes_digits import make_digit_scenes, make_rotated_digits
from vitral.data.sources.shards import expand_shards, load_shards
from vitral.data.sources.table import load_table
from vitral.data.sources.yolo import is_yolo_folder, load_yolo
from vitral.data.tags import CONLL, is_tags, load_tags
from vitral.data.text import is_pairs, load_pairs, load_running_text
from vitral.errors import DataError

# Where named data sets are looked up, in addition to a folder of that name in the working directory.
PLACES = {
    "fashion-mnist": ["/usr/share/dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist", "data/fashion-mnist"],
    "mnist": ["data/mnist"],
    "cifar10": ["data/cifar10", "data/cifar-10-batches-bin", "cifar-10-batches-bin"],
}


MADE: dict[str, Callable[[], Data]] = {
    "digits-scenes": make_digit_scenes,
    "digits-rotated": make_rotated_digits,
    "digits-lines": lambda: make_digit_lines()[0],
    "numbers-en-it": make_numbers,
}
"""Generated data sets by name."""
PAIRS = (".tsv", ".jsonl", ".ndjson")


def open_data(
    source: str | Path,
    image_column: str | None = None,
    label_column: str | None = None,
    task: str | None = None,
    text_column: str | None = None,
) -> Data:
    """Open a data set.

    Args:
        source: An embedded name (`digits`), a named set, class folders, a COCO, Ultralytics or mask folder, a COCO
            file, a CSV or Parquet file, pairs of texts (TSV, JSONL, CSV), texts with a tag for each word (CoNLL, or a
            table), a text file, tar files of samples (`shards-{000..009}.tar`), or a Hugging Face data set.
        image_column: Image column of a table; by default the first with a usual name.
        label_column: Target column of a table; several are separated by commas.
        task: Task that decides the type of a table's targets; inferred from the cells by default.
        text_column: Text column of a table.

    Returns:
        The data, with all decisions in `notes` and all unusable annotations in `problems`.
    """
    name, path = str(source), Path(source)
    if name == "digits":
        return load_digits()
    if name == "scenes":
        return make_scenes()[0]
    if name in MADE:
        return MADE[name]()
    if name.startswith(HUB):
        return load_hf(name, image_column, label_column, task)
    if name in PLACES and not path.exists():
        found = next(
            (place for place in map(Path, PLACES[name]) if is_idx_folder(place) or is_cifar_folder(place)), None
        )
        if found is None:
            raise DataError(f"{name} was not found in {', '.join(PLACES[name])}; give the path of its folder instead.")
        path = found
    if expand_shards(name):
        return load_shards(name, task)
    if not path.exists():
        known = ", ".join(["digits", "scenes", *PLACES, *MADE])
        raise DataError(
            f"{name} does not exist; give a folder of class folders, a CSV or Parquet file, pairs of texts "
            f"(TSV, JSONL), a text file, shards-{{000..009}}.tar, hf-hub:owner/name, or one of {known}."
        )
    if path.is_file():
        if path.suffix.lower() == ".json":
            return load_coco(path)
        return _open_file(path, image_column, label_column, task, text_column)
    if is_hf_folder(path):
        return load_hf(str(path), image_column, label_column, task)
    if is_idx_folder(path):
        return load_idx(path, name if name in PLACES else path.name)
    if is_cifar_folder(path):
        return load_cifar10(path, name if name in PLACES else path.name)
    if not any(path.iterdir()):
        raise DataError(f"{path} is empty; it should hold a folder of images for each class.")
    for is_it, load in ((is_coco_folder, load_coco), (is_yolo_folder, load_yolo), (is_masks_folder, load_masks)):
        if is_it(path):
            return load(path)
    return load_folder(path)


def open_images(source: str | Path, image_column: str | None = None) -> Data:
    """Open images for training without labels: everything `open_data` opens, or a folder with images at any depth.

    Folders are classes only if there are no images next to them.
    """
    path = Path(source)
    files = list_images(path)
    try:
        data = open_data(source, image_column)
    except DataError:
        if not files:
            raise
        data = None
    loose = any(file.parent == path for file in files)
    if data is not None and not (loose and data.kind == "label" and isinstance(data.inputs, ImageFiles)):
        return data
    every = torch.arange(len(files))
    return Data(path.name, ImageFiles(files), torch.zeros(len(files), 0), [], {"train": every}, kind="none")


def _open_file(
    path: Path, image_column: str | None, label_column: str | None, task: str | None, text_column: str | None
) -> Data:
    """Open a file that is not COCO: recognized by its suffix, and a table by its task and columns."""
    suffix = path.suffix.lower()
    if task == "tag" or suffix == CONLL or (task is None and suffix in (".csv", *PAIRS) and is_tags(path)):
        return load_tags(path, text_column, label_column)
    if suffix == ".txt":
        return load_running_text(path)
    may_be_pairs = task is None and image_column is None and suffix in (".csv", *PAIRS)
    if task == "translate" or (may_be_pairs and is_pairs(path, text_column, label_column)):
        return load_pairs(path, text_column, label_column)
    if suffix not in (".csv", ".parquet", *PAIRS):
        kind = path.suffix or "no suffix"
        raise DataError(
            f"{path} is a file of an unknown kind ({kind}); give a CSV, TSV, Parquet, JSONL, CoNLL, text, tar or COCO "
            f"JSON file, or a folder."
        )
    return load_table(path, image_column, label_column, task, text_column)
