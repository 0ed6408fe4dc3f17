"""Class folders of images, directly in a folder or in its `train`, `val` and `test` folders."""

from pathlib import Path

import torch

from vitral.data.images import SUFFIXES
from vitral.data.sources.base import Data, ImageFiles, problem, problem_notes
from vitral.errors import DataError

PARTS = {"train": ("train", "training"), "val": ("val", "valid", "validation"), "test": ("test", "testing")}


def load_folder(path: Path) -> Data:
    """Read class folders; classes without a training image are reported as problems."""
    roots = {part: root for part, names in PARTS.items() if (root := _first_folder(path, names)) is not None}
    if roots and "train" not in roots:
        raise DataError(f"{path} has {', '.join(r.name for r in roots.values())} but no train folder.")
    roots = roots or {"train": path}
    _require_classes(roots["train"])
    classes = sorted({name for root in roots.values() for name in _folders(root)})
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
    trained = set(targets[: len(splits["train"])])
    empty = [roots["train"] / name for label, name in enumerate(classes) if label not in trained]
    problems = [
        problem("empty_class", folder, "has no image" if folder.is_dir() else "does not exist") for folder in empty
    ]
    notes = problem_notes(problems)
    return Data(path.name, ImageFiles(paths), torch.tensor(targets), classes, splits, notes=notes, problems=problems)


def _first_folder(path: Path, names: tuple[str, ...]) -> Path | None:
    return next((path / name for name in names if (path / name).is_dir()), None)


def _folders(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def _require_classes(root: Path) -> None:
    folders = _folders(root)
    if len(folders) < 2:
        received = f"only one, {folders[0]}" if folders else "none"
        loose = " (it holds images without class folders)" if not folders and list_images(root) else ""
        raise DataError(f"{root} needs at least two folders, one for each class, got {received}{loose}.")


def list_images(folder: Path) -> list[Path]:
    """Every image file below a folder, sorted by name."""
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
