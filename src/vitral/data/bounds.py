"""What a file may cost beside its pixels: refuses, before anything is decoded, what no camera or encoder writes.

A few bytes can ask for hours of work: scans without end, tags by the million, pixels that Pillow reads in Python. The
bounds lie far above real files; below them a file costs a few times a plain one of as many pixels, or about a second.
"""

import io
import re
import struct
from collections.abc import Iterator

import numpy as np
from PIL import Image

from vitral.errors import ImageError

_STEPS = 2**20
"""Reads, or pixels, that Pillow may go through one by one in Python: about a second."""
_IN_PYTHON = {
    "bmp_rle": "run lengths",
    "ppm": "values of another maximum than 255",
    "ppm_plain": "values written as text",
}
"""Decoders of Pillow that are written in Python."""
_COMMENTS = 1000
"""In values written as text. For each of them Pillow copies a megabyte."""
_EXIF_BYTES = 2**18
"""A segment of a JPEG holds a quarter of this."""

# JPEG
_SCANS = 64
"""A progressive file has about ten. Each is a walk over the whole image, and may be of a few bytes."""
_SEGMENTS = 4096
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # those three are a value, a restart and filling
_WITHOUT_LENGTH = frozenset([*range(0xC0), 0xC8, 0xD8, 0xD9, *range(0xF0, 0xFE)])
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_PROGRESSIVE = frozenset([0xC2, 0xC6, 0xCA, 0xCE])
_END, _SCAN, _APP1 = 0xD9, 0xDA, 0xE1

# PNG
_CHUNKS = 2**16
_COMPRESSED = frozenset([b"iCCP", b"zTXt", b"iTXt"])
_COMPRESSED_CHUNKS = 64
"""Each may unpack to a megabyte."""

# TIFF
_TAGS = 4096
_TAG_VALUES = 2**19
"""Enough for the places and lengths of tiles of 16 x 16 pixels in a large photograph."""
_RATIONAL = 32
"""What a fraction costs beside a whole number: each becomes an object."""
_TILES = 2**16
_TYPES = {1: "u1", 2: "u1", 3: "u2", 4: "u4", 5: "u8", 6: "i1", 7: "u1", 8: "i2", 9: "i4", 10: "i8", 11: "f4", 12: "f8",
          13: "u4", 16: "u8", 17: "i8", 18: "u8"}  # fmt: skip
_BYTES, _RATIONALS = frozenset([1, 2, 7]), frozenset([5, 10])
_COMPRESSION, _TILE_WIDTH, _TILE_HEIGHT = 259, 322, 323
_LENGTHS = frozenset([279, 325])
"""How many bytes each strip or tile has in the file."""
_DIRECTORIES = frozenset([0x8769, 0x8825, 0xA005])
"""Tags that lead to further tags, which Pillow reads as well: EXIF, GPS, interoperability."""


class Sparing(io.BytesIO):
    """Bytes as a file that raises an error when it is read in too many pieces."""

    __slots__ = ("_image", "_left")  # quicker than a dictionary, in what every image goes through

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self._image, self._left = name, _STEPS

    def read(self, size: int | None = -1, /) -> bytes:
        """Read as from any file."""
        self._left -= 1
        if self._left < 0:
            raise ImageError(f"{self._image} consists of more than {_STEPS:,} small pieces; save it again as PNG.")
        return io.BytesIO.read(self, size)


def check_bytes(data: bytes, max_pixels: int, name: str) -> None:
    """Refuse what would cost too much to open or to decode."""
    if data.startswith(b"\xff\xd8\xff"):
        _check_jpeg(data, name)
    elif data.startswith(b"\x89PNG"):
        _check_png(data, name)
    elif data.startswith((b"II*\0", b"II\0*", b"II+\0", b"MM\0*", b"MM*\0", b"MM\0+")):
        _check_tiff(data, max_pixels, name)


def check_opened(image: Image.Image, data: bytes, name: str) -> None:
    """Refuse what would cost too much to decode, now that Pillow has read the header."""
    check_exif(image, name)
    tiles = getattr(image, "tile", [])
    pixels = image.width * image.height
    slow = _IN_PYTHON.get(tiles[0][0]) if tiles else None
    if slow and pixels > _STEPS:
        raise ImageError(
            f"{name} has {image.width} x {image.height} pixels as {slow}, which is slow to read, more than the limit "
            f"of {_STEPS:,}; save it again as PNG."
        )
    if slow == _IN_PYTHON["ppm_plain"] and data.count(b"#") > _COMMENTS:
        raise ImageError(
            f"{name} has {data.count(b'#'):,} comments, more than the limit of {_COMMENTS:,}; remove them."
        )
    decoded = sum((right - left) * (bottom - top) for _, (left, top, right, bottom), *_ in tiles)
    if len(tiles) > _TILES or decoded > 8 * pixels:  # a plane for each colour is as many times the pixels
        raise ImageError(f"{name} has {len(tiles):,} strips or tiles, more than its pixels need; save it again as PNG.")


def check_exif(image: Image.Image, name: str) -> None:
    """Refuse tags that would cost too much to read; a PNG may have them behind its pixels."""
    _check_exif(len(image.info.get("exif") or image.info.get("Raw profile type exif") or b""), name)


def _check_exif(length: int, name: str) -> None:
    if length > _EXIF_BYTES:
        raise ImageError(
            f"{name} has {length:,} bytes of EXIF, more than the limit of {_EXIF_BYTES:,}; save it again without."
        )


def _check_jpeg(data: bytes, name: str) -> None:
    """Go from segment to segment, over the data of scans, as decoders do."""
    at, scans, exif, frame, components = 2, 0, 0, 0, b""
    for _ in range(_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None:
            return
        at = found.end()
        marker = data[at - 1]
        if marker == _END and scans:
            return
        if marker in _WITHOUT_LENGTH:
            continue
        length = max(2, int.from_bytes(data[at : at + 2], "big"))
        if marker in _FRAMES:
            frame, components = marker, data[at + 7 : at + 8]
        elif marker == _APP1 and data.startswith(b"Exif\0\0", at + 2):
            exif += length
            _check_exif(exif, name)
        elif marker == _SCAN:
            scans += 1
            if scans == 1 and frame not in _PROGRESSIVE and data[at + 2 : at + 3] == components:
                return  # the whole image: decoders take no scan after it
            if scans > _SCANS:
                raise ImageError(
                    f"{name} is a JPEG of more than {_SCANS} scans, where ten are usual; save it again as a plain JPEG."
                )
        at += length
    raise ImageError(f"{name} is a JPEG of more than {_SEGMENTS:,} segments; save it again without metadata.")


def _check_png(data: bytes, name: str) -> None:
    at, compressed = 8, 0
    for _ in range(_CHUNKS):
        if at + 8 > len(data):
            return
        length, kind = struct.unpack_from(">I4s", data, at)
        if kind == b"IEND":
            return
        compressed += kind in _COMPRESSED
        if compressed > _COMPRESSED_CHUNKS:
            raise ImageError(
                f"{name} is a PNG of more than {_COMPRESSED_CHUNKS} compressed texts or profiles; "
                "save it again without metadata."
            )
        at += length + 12
    raise ImageError(f"{name} is a PNG of more than {_CHUNKS:,} chunks; save it again.")


def _check_tiff(data: bytes, max_pixels: int, name: str) -> None:
    values, held, stored, compressed, tile = 0, 0, 0.0, False, {_TILE_WIDTH: 0, _TILE_HEIGHT: 0}
    for tag, kind, content in _tags(data, name):
        held += content.nbytes
        if held > 2 * len(data):
            raise ImageError(f"{name} is a TIFF whose tags hold the same bytes again and again; save it again as PNG.")
        if kind not in _BYTES or tag in _LENGTHS:
            values += len(content) * (_RATIONAL if kind in _RATIONALS else 1)
        if values > _TAG_VALUES:
            raise ImageError(
                f"{name} is a TIFF whose tags have more than {_TAG_VALUES:,} values; save it again as PNG."
            )
        if tag in _LENGTHS:
            stored = max(stored, float(np.minimum(content.astype(np.float64), len(data)).sum()))
        elif tag == _COMPRESSION:
            compressed |= bool((content[:1] != 1).any())
        elif tag in tile:
            tile[tag] = max(tile[tag], *content[:1].tolist())
    if compressed and stored > 2 * len(data):
        raise ImageError(
            f"{name} is a TIFF whose strips or tiles have {stored:,.0f} bytes in a file of {len(data):,}, so that "
            "they overlap; save it again as PNG."
        )
    if tile[_TILE_WIDTH] * tile[_TILE_HEIGHT] > max_pixels:
        raise ImageError(
            f"{name} is a TIFF with tiles of {tile[_TILE_WIDTH]} x {tile[_TILE_HEIGHT]} pixels, more than the limit of "
            f"{max_pixels:,}; save it again with smaller tiles."
        )


def _tags(data: bytes, name: str) -> Iterator[tuple[int, int, np.ndarray]]:
    """(tag, type, values) of the first image of a TIFF, and of the directories that its tags lead to."""
    order, large = "<" if data.startswith(b"II") else ">", data[2:3] == b"+"
    head, entry, place = (
        struct.Struct(order + form) for form in (("Q", "HHQ8s", "Q") if large else ("H", "HHL4s", "L"))
    )

    def number(form: struct.Struct, at: int) -> int:
        return form.unpack(data[at : at + form.size].ljust(form.size, b"\0"))[0]

    starts = [number(place, place.size)]
    for start in starts:  # which grow meanwhile
        count = number(head, start)
        if count > _TAGS or len(starts) > 8:
            raise ImageError(f"{name} is a TIFF of more than {_TAGS:,} tags in one place; save it again as PNG.")
        start += head.size
        end = min(start + count * entry.size, len(data))
        for tag, kind, length, content in entry.iter_unpack(data[start : end - (end - start) % entry.size]):
            form = np.dtype(order + _TYPES.get(kind, "u1"))
            size, at, holder = length * form.itemsize, 0, content
            if size > place.size:
                (at,), holder = place.unpack(content), data
            if kind not in _TYPES or not length or at + size > len(holder):
                continue  # there is nothing to read
            found = np.frombuffer(holder, form, length, at)
            yield tag, kind, found
            if tag in _DIRECTORIES and int(found[0]) not in starts:
                starts.append(int(found[0]))
