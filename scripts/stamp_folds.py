"""Write the eight largest categories of the Tux Paint stamps as five stratified folds of class folders.

    python scripts/stamp_folds.py DIR [--package FILE]

Each category has at most 70 images, drawn with seed 0: 451 in all. DIR/fold-K/ has train/CATEGORY/ and test/CATEGORY/;
every image is in the test part of exactly one fold.
"""

import argparse
import shutil
from pathlib import Path
from random import Random

from fetch_stamps import FILE, extracted

CATEGORIES, MOST, FOLDS, SEED = 8, 70, 5, 0


def choose(stamps: Path) -> dict[str, list[Path]]:
    """Images of the largest categories, at most so many of each, in random order."""
    found = {folder.name: sorted(folder.rglob("*.png")) for folder in sorted(stamps.iterdir()) if folder.is_dir()}
    largest = sorted(found, key=lambda name: (-len(found[name]), name))[:CATEGORIES]
    return {name: Random(f"{SEED} {name}").sample(found[name], min(len(found[name]), MOST)) for name in largest}  # noqa: S311


def write_folds(stamps: Path, folder: Path) -> int:
    """Copy the images into the folds and return how many there are."""
    chosen = choose(stamps)
    for fold in range(FOLDS):
        for name, images in chosen.items():
            for i, image in enumerate(images):
                part = "test" if i % FOLDS == fold else "train"
                flat = "-".join(image.relative_to(stamps / name).parts)  # subfolders become part of the name
                target = folder / f"fold-{fold}" / part / name / flat
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(image, target)
    return sum(map(len, chosen.values()))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--package", type=Path, help=f"{FILE}, if apt-get cannot fetch it")
    given = parser.parse_args()
    with extracted(given.package) as stamps:
        print(f"{given.folder}: {write_folds(stamps, given.folder)} images in {FOLDS} folds")


if __name__ == "__main__":
    main()
