"""Folders of images, one folder a class, with or without `train`, `val` and `test` above them."""

from pathlib import Path

import torch

from vitral.data.images import SUFFIXES
from vitral.data.sources.base import Data, ImageFiles
from vitral.errors import DataError

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}


def load_folder(path: Path) -> Data:
    """Read the tree; the names of the class folders are the labels."""
    roots = {part: root for part, names in PARTS.items() if (root := _first_folder(path, names)) is not None}
    if roots and "train" not in roots:
        raise DataError(f"{path} has {', '.join(r.name for r in roots.values())} but no train folder.")
    roots = roots or {"train": path}
    classes = _class_names(roots["train"])
    for root in roots.values():
        extra = sorted(set(_class_names(root)) - set(classes))
        if extra:
            raise DataError(f"{root} has classes that the training part has not: {', '.join(extra[:5])}.")
    paths: list[Path] = []
    targets: list[int] = []
    splits = {}
    for part, root in roots.items():
        start = len(paths)
        for label, name in enumerate(classes):
            files = list_images(root / name)
            paths += files
            targets += [label] * len(files)
        splits[part] = torch.arange(start, len(paths))
    empty = [name for label, name in enumerate(classes) if label not in set(targets[: len(splits["train"])])]
    if empty:
        raise DataError(
            f"{roots['train']} has classes without an image: {', '.join(empty[:5])}; fill or remove the folders."
        )
    return Data(path.name, ImageFiles(paths), torch.tensor(targets), classes, splits)


def _first_folder(path: Path, names: tuple[str, ...]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _class_names(root: Path) -> list[str]:
    folders = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if len(folders) < 2:
        found = f"only one, {folders[0]}" if folders else "none"
        loose = " (images lie in it without class folders)" if not folders and list_images(root) else ""
        raise DataError(f"{root} needs at least two folders, one for each class, got {found}{loose}.")
    return folders


def list_images(folder: Path) -> list[Path]:
    """Every image file below a folder, in order of name."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
