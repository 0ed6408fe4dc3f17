"""Tell what a name or path is by its structure, and open it."""

from pathlib import Path

from vitral.config import HUB
from vitral.data.sources.base import Data
from vitral.data.sources.cifar import is_cifar_folder, load_cifar10
from vitral.data.sources.digits import load_digits
from vitral.data.sources.folder import load_folder
from vitral.data.sources.hf import is_hf_folder, load_hf
from vitral.data.sources.idx import is_idx_folder, load_idx
from vitral.data.sources.scenes import make_scenes
from vitral.data.sources.table import load_table
from vitral.errors import DataError

# Where the sets that have a name may lie, besides a folder of that name here.
PLACES = {
    "fashion-mnist": ["/usr/share/dataset-fashion-mnist", "/usr/share/datasets/fashion-mnist", "data/fashion-mnist"],
    "mnist": ["data/mnist"],
    "cifar10": ["data/cifar10", "data/cifar-10-batches-bin", "cifar-10-batches-bin"],
}


def open_data(source: str | Path, image_column: str | None = None, label_column: str | None = None) -> Data:
    """Open an embedded name (`digits`), a known set, class folders, a CSV or Parquet file, a Hugging Face data set."""
    name, path = str(source), Path(source)
    if name == "digits":
        return load_digits()
    if name == "scenes":
        return make_scenes()[0]
    if name.startswith(HUB):
        return load_hf(name, image_column, label_column)
    if name in PLACES and not path.exists():
        found = next(
            (place for place in map(Path, PLACES[name]) if is_idx_folder(place) or is_cifar_folder(place)), None
        )
        if found is None:
            raise DataError(f"{name} was not found in {', '.join(PLACES[name])}; give the path of its folder instead.")
        path = found
    if not path.exists():
        known = ", ".join(["digits", "scenes", *PLACES])
        raise DataError(
            f"{name} does not exist; give a folder of class folders, a CSV or Parquet file, "
            f"hf-hub:owner/name, or one of {known}."
        )
    if path.is_file():
        if path.suffix.lower() not in (".csv", ".parquet"):
            raise DataError(
                f"{path} is a file of an unknown kind ({path.suffix or 'no suffix'}); give a CSV, Parquet or folder."
            )
        return load_table(path, image_column, label_column)
    if is_hf_folder(path):
        return load_hf(str(path), image_column, label_column)
    if is_idx_folder(path):
        return load_idx(path, name if name in PLACES else path.name)
    if is_cifar_folder(path):
        return load_cifar10(path, name if name in PLACES else path.name)
    if not any(path.iterdir()):
        raise DataError(f"{path} is empty; it should hold a folder of images for each class.")
    return load_folder(path)
