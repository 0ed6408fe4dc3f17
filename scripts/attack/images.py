"""Damaged images of every format through the reader, and some of them through a predictor."""

import io
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageSequence
from PIL.TiffImagePlugin import ImageFileDirectory_v2

from attack.damage import mutate_image
from attack.fuzz import Fuzz, refusals
from vitral.data.images import LIMITS, ORIENTATION, read_sized
from vitral.errors import ImageError
from vitral.inference.predictor import Predictor
from vitral.models.zoo import create_model

EVERY = 20
"""Every so many images, one goes through the predictor too."""
PIXEL_BYTES = 12
"""Address space that a pixel may cost while it is decoded: Pillow's copy, ours, and the bytes between."""


def picture(size: tuple[int, int] = (52, 40), mode: str = "RGB", seed: int = 0) -> Image.Image:
    """A smooth random picture of a width and height."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).convert(mode)


def intact() -> dict[str, bytes]:
    """Whole images by name: each format with its compressions, depths, palettes, animations and metadata."""
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    frames = [picture(seed=seed) for seed in range(3)]
    deep = Image.fromarray(np.arange(40 * 52, dtype=np.uint16).reshape(40, 52) * 31)
    tiles = ImageFileDirectory_v2()
    tiles[33432] = "somebody"  # copyright
    return {
        "rgb.png": saved(picture(), "PNG"),
        "palette.png": saved(picture(mode="P"), "PNG", transparency=3),
        "alpha.png": saved(picture(mode="RGBA"), "PNG", exif=turned),
        "deep.png": saved(deep, "PNG"),
        "animated.png": saved(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "baseline.jpg": saved(picture(), "JPEG"),
        "progressive.jpg": saved(picture(), "JPEG", progressive=True, exif=turned, comment="words"),
        "grey.jpg": saved(picture(mode="L"), "JPEG", restart_marker_blocks=2),
        "cmyk.jpg": saved(picture(mode="CMYK"), "JPEG"),
        "one.gif": saved(picture(mode="P"), "GIF"),
        "animated.gif": saved(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "rgb.bmp": saved(picture(), "BMP"),
        "bits.bmp": saved(picture(mode="1"), "BMP"),
        "raw.tiff": saved(picture(), "TIFF", tiffinfo=tiles),
        "deflate.tiff": saved(picture(), "TIFF", compression="tiff_adobe_deflate"),
        "lzw.tiff": saved(deep, "TIFF", compression="tiff_lzw"),
        "fax.tiff": saved(picture(mode="1"), "TIFF", compression="group4"),
        "jpeg.tiff": saved(picture(), "TIFF", compression="jpeg"),
        "lossy.webp": saved(picture(), "WEBP", exif=turned),
        "lossless.webp": saved(picture(mode="RGBA"), "WEBP", lossless=True),
        "animated.webp": saved(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "rgb.ppm": saved(picture(), "PPM"),
    }


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


class Images(Fuzz):
    """10,000 damaged images."""

    name = "images"
    size = 10_000
    failure = "any error but an ImageError of one line, a crash, 20 s for an image, or memory beyond its pixels"
    seconds = 20.0
    memory = PIXEL_BYTES * LIMITS.max_pixels

    def prepare(self, folder: Path) -> None:
        """Make the images, each of which can be read."""
        for name, data in intact().items():
            assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == (3 if "animated" in name else 1)
            read_sized(data, "rgb", None, LIMITS)
            (folder / name).write_bytes(data)

    def begin(self, folder: Path) -> None:
        """Read the intact images, and make a model to run on the damaged ones."""
        torch.set_num_threads(1)
        self.whole = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        self.predictor = Predictor(create_model("vit_nano_patch2_8", num_classes=7, in_chans=3, seed=0))

    def damage(self, place: Path, number: int, chance: Random) -> None:
        """Write one image."""
        name = chance.choice(list(self.whole))
        (place / name).write_bytes(mutate_image(self.whole[name], chance))

    def attack(self, place: Path, number: int) -> None:
        """Read it from a file in colour or from bytes in grey; every now and then, predict."""
        (path,) = place.iterdir()
        with refusals(ImageError):
            if number % 2:
                pixels, size = read_sized(path, "rgb", None, LIMITS)
            else:
                pixels, size = read_sized(path.read_bytes(), "grey", None, LIMITS)
            assert pixels.dtype == torch.uint8, pixels.dtype
            assert pixels.shape == (3 if number % 2 else 1, *size), f"{tuple(pixels.shape)} against {size}"
        if number % EVERY == 0:
            with refusals(ImageError):
                (answer,) = self.predictor.predict(path)
                assert 0 <= answer.probabilities[0] <= 1
