"""Fetch the drawings of Tux Paint with a sentence about each, and lay them out as images with captions.

    python scripts/fetch_stamps.py [--folder DIR] [--package FILE]

They are the PNG stamps of the Debian package tuxpaint-stamps-default (GPL-2 or later), which is fetched by
`apt-get download`, checked by its SHA-256, and neither installed nor run; this needs no root. Writes the images as they
are, most of them with a transparent ground, and captions.csv with the columns image, caption and split.
"""

import argparse
import csv
import hashlib
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fetch_en_it import key
from fetch_weights import cache_folder

REQUIREMENT = "tuxpaint-stamps-default=2022.06.04-1"
FILE = "tuxpaint-stamps-default_2022.06.04-1_all.deb"
SHA256 = "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34"
INSIDE = "usr/share/tuxpaint/stamps"
LICENCE = "GPL-2 or later"


def fetch(folder: Path | None = None, package: Path | None = None) -> Path:
    """The path of the data set, fetched if it is not there yet."""
    target = (folder or cache_folder()) / "stamps"
    if (target / "captions.csv").is_file():
        return target
    with extracted(package) as stamps:
        write(stamps, target)
    return target


@contextmanager
def extracted(package: Path | None = None) -> Iterator[Path]:
    """The folder of all stamps, one folder for each category, from a package on disk or from apt-get."""
    with tempfile.TemporaryDirectory() as place:
        package = package or download(Path(place))
        if hashlib.sha256(package.read_bytes()).hexdigest() != SHA256:
            raise SystemExit(f"{package} does not have the SHA-256 of the published {FILE}; it is not used.")
        run(["dpkg-deb", "--extract", str(package), place])
        yield Path(place) / INSIDE


def download(place: Path) -> Path:
    """The package, put by apt-get into a folder."""
    run(["apt-get", "download", REQUIREMENT], cwd=place)
    return place / FILE


def run(command: list[str], cwd: Path | None = None) -> None:
    """Run a command of Debian's, or say what to do where it does not work."""
    if shutil.which(command[0]) is None:
        raise SystemExit(f"{command[0]} is not on this system; run this script on Debian 12 or a system like it.")
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed ({done.stderr.strip()}); run apt-get update as root and try again, "
            f"or get {FILE} by hand and name it with --package."
        )


def write(stamps: Path, target: Path) -> None:
    """Copy every image that has a caption, then write the table."""
    images = sorted(stamps.rglob("*.png"))
    captions = {image: caption for image in images if (caption := caption_of(image))}
    rows = []
    for image, caption in captions.items():
        name = image.relative_to(stamps)
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image, target / name)
        rows.append((name.as_posix(), caption, part_of(caption)))
    with (target / "captions.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([("image", "caption", "split"), *rows])
    print(f"left out: {len(images) - len(rows)} images of {len(images)}, which have no caption")


def caption_of(image: Path) -> str:
    """The English caption, the first line of the text beside an image; nothing where there is none."""
    text = image.with_suffix(".txt")
    lines = text.read_text(encoding="utf-8").splitlines() if text.is_file() else []
    return " ".join(lines[0].split()) if lines else ""


def part_of(caption: str) -> str:
    """A tenth validates and a tenth tests, by the caption's letters and digits: equal ones are in one part."""
    place = int.from_bytes(hashlib.sha256(key(caption).encode()).digest()[:8], "big") % 10
    return {0: "test", 1: "val"}.get(place, "train")


def describe(target: Path) -> str:
    """What a data set holds, read from its table."""
    with (target / "captions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    captions = [row["caption"] for row in rows]
    words = sum(len(caption.split()) for caption in captions) / len(rows)
    parts = Counter(row["split"] for row in rows)
    counted = ", ".join(f"{part} {parts[part]}" for part in ("train", "val", "test"))
    return (
        f"{target}: {len(rows)} images ({counted}) with {len(set(captions))} different captions "
        f"of {words:.1f} words on average; {LICENCE}"
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--package", type=Path, help=f"{FILE}, if apt-get cannot fetch it")
    given = parser.parse_args()
    if given.package and not given.package.is_file():
        parser.error(f"--package {given.package} is no file; name a copy of {FILE}.")
    print(describe(fetch(given.folder, given.package)))


if __name__ == "__main__":
    main()
