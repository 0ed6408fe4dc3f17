"""Bytes to pixels: a file or its bytes become a uint8 tensor (C, H, W), C = 3 or 1, or one clear error.

JPEG goes through simplejpeg where it is installed, decoded at a fraction of its size when a small image is wanted; all
else through Pillow. Rotation by EXIF, CMYK, 16 bits, palettes, transparency, animations: each handled here on purpose.
What a file may cost beside its pixels is in `bounds`.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Literal, NamedTuple, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from vitral.data.bounds import Sparing, check_bytes, check_exif, check_opened
from vitral.errors import ConfigError, ImageError

ImageMode = Literal["rgb", "grey"]

SUFFIXES = (".jpg", ".jpeg", ".jpe", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm")
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
ORIENTATION = 0x0112
"""The tag of EXIF that says how a picture is to be turned."""
_LYING = (5, 6, 7, 8)
"""Its values for a file that lies on its side."""
_BAND = 2**18
"""Pixels that are converted at a time."""


@dataclass(frozen=True)
class ImageLimits:
    """What an untrusted image may cost."""

    max_bytes: int = 64 * 2**20
    max_pixels: int = 100_000_000

    def __post_init__(self) -> None:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        if self.max_pixels > most > 0:
            raise ConfigError(f"max_pixels must be at most {most:,}, what Pillow opens, got {self.max_pixels:,}.")


LIMITS = ImageLimits()


class _Quiet:
    """Ignores warnings while any thread is within; the last to leave puts the filters back.

    (`catch_warnings` in several threads at once would leave the filters of one for good.)
    """

    def __init__(self) -> None:
        self._lock, self._within = Lock(), 0

    def __enter__(self) -> None:
        with self._lock:
            self._within += 1
            if self._within == 1:
                self._caught = warnings.catch_warnings()
                self._caught.__enter__()
                warnings.simplefilter("ignore")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._within -= 1
            if self._within == 0:
                self._caught.__exit__(None, None, None)


_QUIET = _Quiet()


class AtLeast(NamedTuple):
    """How small a JPEG may be made while it is decoded, which is far quicker than afterwards."""

    height: int
    width: int
    even: bool = False
    """Only by a factor that divides both sides: the picture then keeps its place to the pixel."""


def _import_simplejpeg() -> ModuleType | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return simplejpeg


def read_image(
    source: str | Path | bytes,
    mode: ImageMode = "rgb",
    at_least: AtLeast | None = None,
    limits: ImageLimits = LIMITS,
) -> Tensor:
    """Read a file or bytes as uint8 (C, H, W); a large JPEG may come out smaller, but not below `at_least`."""
    return read_sized(source, mode, at_least, limits)[0]


def read_sized(
    source: str | Path | bytes, mode: ImageMode, at_least: AtLeast | None, limits: ImageLimits
) -> tuple[Tensor, tuple[int, int]]:
    """The same, and the height and width that it has when it is read whole."""
    name = "image" if isinstance(source, bytes) else str(source)
    data = source if isinstance(source, bytes) else _read_bytes(Path(source), limits)
    if not data:
        raise ImageError(f"{name} is empty (0 bytes); replace or remove the file.")
    if len(data) > limits.max_bytes:
        raise ImageError(
            f"{name} has {len(data):,} bytes, more than the limit of {limits.max_bytes:,}; make it smaller."
        )
    try:
        with _QUIET:  # Pillow warns about broken metadata; pixels are all that counts here
            image = _open(data, limits, name)
            if image.format == "JPEG":
                return _decode_jpeg(image, data, mode, at_least)
            x = _decode(image, mode, name)
            return x, (x.shape[1], x.shape[2])
    except ImageError:
        raise
    except Image.DecompressionBombError:
        raise ImageError(
            f"{name} has more pixels than any limit allows ({limits.max_pixels:,}); make it smaller."
        ) from None
    except UnidentifiedImageError:
        raise ImageError(f"{name} is not an image of a known format ({', '.join(_FORMATS)}).") from None
    except Exception as error:  # decoders raise nearly anything on broken files
        raise ImageError(
            f"{name} cannot be decoded ({str(error).strip() or type(error).__name__}): it is damaged or cut short."
        ) from error


def small_picture(source: str | Path, side: int, limits: ImageLimits = LIMITS) -> Image.Image:
    """A file as a picture to look at, whose sides are at most `side`."""
    pixels = read_image(source, at_least=AtLeast(side, side), limits=limits)
    picture = Image.fromarray(pixels.permute(1, 2, 0).numpy())
    picture.thumbnail((side, side))
    return picture


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Height and width of an opened image as it is looked at: turned if its EXIF says so."""
    width, height = image.size
    lies = image.getexif().get(ORIENTATION) in _LYING and image.format != "TIFF"  # which Pillow turns itself
    return (width, height) if lies else (height, width)


def _read_bytes(path: Path, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limits.max_bytes + 1)
    except FileNotFoundError:
        raise ImageError(f"{path} does not exist.") from None
    except OSError as error:
        raise ImageError(f"{path} cannot be read ({error.strerror}).") from error


def _open(data: bytes, limits: ImageLimits, name: str) -> Image.Image:
    """An image of which only the header is read, unless it would cost too much to read more."""
    check_bytes(data, limits.max_pixels, name)
    image = Image.open(Sparing(data, name), formats=_FORMATS)
    width, height = image.size
    if width * height > limits.max_pixels:
        raise ImageError(
            f"{name} has {width} x {height} pixels, more than the limit of {limits.max_pixels:,}; make it smaller."
        )
    check_opened(image, data, name)
    return image


def _decode(image: Image.Image, mode: ImageMode, name: str) -> Tensor:
    image.load()
    check_exif(image, name)
    turn = image.getexif().get(ORIENTATION, 1)  # none any more where Pillow has undone it, as in a TIFF
    return _rotate(_to_tensor(image, mode), turn)


def _decode_jpeg(
    image: Image.Image, data: bytes, mode: ImageMode, at_least: AtLeast | None
) -> tuple[Tensor, tuple[int, int]]:
    """The image, perhaps smaller, and its whole size."""
    size, turn = upright_size(image), image.getexif().get(ORIENTATION, 1)
    if at_least is not None and turn in _LYING:
        at_least = AtLeast(at_least.width, at_least.height, at_least.even)
    if at_least is not None and at_least.even:
        at_least = _evenly(at_least, image.height, image.width)
    jpeg = _import_simplejpeg() if image.mode in ("RGB", "L") else None
    if jpeg is not None:
        return _rotate(_by_simplejpeg(jpeg, data, mode, at_least), turn), size
    if at_least is not None:
        image.draft(None, (at_least.width, at_least.height))
    return _rotate(_to_tensor(image, mode), turn), size


def _evenly(at_least: AtLeast, height: int, width: int) -> AtLeast | None:
    """The smallest half, quarter or eighth that divides both sides and is large enough; None for the whole."""
    for factor in (8, 4, 2):
        fits = height >= factor * at_least.height and width >= factor * at_least.width
        if fits and height % factor == 0 == width % factor:
            return AtLeast(height // factor, width // factor)
    return None


def _by_simplejpeg(jpeg: ModuleType, data: bytes, mode: ImageMode, at_least: AtLeast | None) -> Tensor:
    height, width = (at_least.height, at_least.width) if at_least else (0, 0)
    pixels = jpeg.decode_jpeg(
        data, colorspace="RGB" if mode == "rgb" else "GRAY", min_height=height, min_width=width, min_factor=1.0
    )
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _rotate(x: Tensor, orientation: int) -> Tensor:
    """Undo the camera's orientation, as EXIF numbers it."""
    if orientation in _LYING:
        x = x.transpose(1, 2)  # 5: mirrored along the main diagonal
    if orientation in (2, 3, 6, 7):
        x = x.flip(2)
    if orientation in (3, 4, 7, 8):
        x = x.flip(1)
    return x


def _to_tensor(image: Image.Image, mode: ImageMode) -> Tensor:
    """uint8 (C, H, W), made band by band, so that all between takes little memory."""
    width, height = image.size
    pixels = np.empty((height, width, 3 if mode == "rgb" else 1), np.uint8)
    depth = _depth(image) if image.mode.startswith("I") or image.mode == "F" else None
    rows = max(1, _BAND // width)
    for top in range(0, height, rows):
        band = image.crop((0, top, width, min(top + rows, height)))
        if depth is not None:
            band = _to_8_bits(band, *depth)
        pixels[top : top + rows] = np.asarray(_to_mode(band, mode)).reshape(-1, width, pixels.shape[2])
    return torch.from_numpy(pixels).permute(2, 0, 1)


def _depth(image: Image.Image) -> tuple[float, float]:
    """What becomes 0, and the factor to 8 bits: 16 bits keep their range, other depths are stretched over theirs."""
    if image.mode.startswith("I;16"):
        return 0, 1 / 257
    low, high = cast("tuple[float, float]", image.getextrema())
    if image.mode == "I" and 255 < high <= 65535:
        return 0, 1 / 257
    if low < 0 or high > 255:
        return low, 255 / ((high - low) or 1)
    return 0, 1


def _to_8_bits(image: Image.Image, low: float, factor: float) -> Image.Image:
    pixels = np.round((np.asarray(image, np.float64) - low) * factor)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def _to_mode(image: Image.Image, mode: ImageMode) -> Image.Image:
    """No palette, transparency laid on white, RGB or grey."""
    if image.mode in ("P", "PA", "LA", "La", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB" if mode == "rgb" else "L")
