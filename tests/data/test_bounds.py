"""Files within the limits of bytes and pixels that would take minutes or hours: refused before a decoder begins."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from vitral.data import images as module
from vitral.data.images import ImageLimits, read_image
from vitral.errors import ImageError


@pytest.fixture
def decoded(monkeypatch):
    """Names of the decoders that have begun."""
    begun, prepare, jpeg = [], ImageFile.ImageFile.load_prepare, module._import_simplejpeg()
    assert jpeg is not None
    decode = jpeg.decode_jpeg

    def load_prepare(image):
        begun.append(image.tile[0][0])
        prepare(image)

    def decode_jpeg(*args, **options):
        begun.append("simplejpeg")
        return decode(*args, **options)

    monkeypatch.setattr(ImageFile.ImageFile, "load_prepare", load_prepare)
    monkeypatch.setattr(jpeg, "decode_jpeg", decode_jpeg)
    return begun


@pytest.fixture(params=["simplejpeg", "jpeg"])
def decoder(request, monkeypatch):
    if request.param == "jpeg":
        monkeypatch.setattr(module, "_import_simplejpeg", lambda: None)
    return request.param


def encode(kind, mode="RGB", **options):
    rows, columns = np.mgrid[0:30, 0:44]
    picture = np.stack([rows * 5, columns * 5, (rows + columns) * 3 % 256], -1).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


def rationals(count):
    """EXIF whose orientation is as many fractions."""
    return struct.pack("<2sHLHHHLLL", b"II", 42, 8, 1, 0x0112, 5, count, 26, 0) + struct.pack("<LL", 3, 7) * count


class TestJpeg:
    def segment(self, marker, content):
        return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content

    def several_scans(self, count):
        """A colour JPEG that is not progressive, a component to a scan, again and again."""
        grey = encode("JPEG", "L", quality=90)
        frame, scan = grey.index(b"\xff\xc0"), grey.index(b"\xff\xda")
        head = grey[: frame + 2] + b"\0\x11" + grey[frame + 4 : frame + 9] + b"\3\1\x11\0\2\x11\0\3\x11\0"
        scans = [grey[scan : scan + 5] + bytes([1 + i % 3]) + grey[scan + 6 : -2] for i in range(count)]
        return head + grey[frame + 13 : scan] + b"".join(scans) + grey[-2:]

    @pytest.mark.parametrize(
        "between",
        [
            pytest.param(b"", id="nothing"),
            pytest.param(b"\xff\xff\xff", id="filling"),
            pytest.param(b"\0\0\xff\0", id="bytes"),
            pytest.param(b"\xff\xd3", id="a restart"),
            pytest.param(b"\xff\xfe\0\0", id="a comment shorter than its length"),
            pytest.param(b"\xff\xfe\0\6\xff\xd9\xff\xd9", id="a comment with an end"),
        ],
    )
    def test_scans_without_end(self, decoded, decoder, between):
        data = encode("JPEG", progressive=True)
        last = data[data.rindex(b"\xff\xda") : -2]
        with pytest.raises(
            ImageError, match="image is a JPEG of more than 64 scans, where ten are usual; save it again"
        ):
            read_image(data[:-2] + (between + last) * 60 + data[-2:])
        assert decoded == []
        assert read_image(data).shape == (3, 30, 44)
        assert decoded == [decoder]

    def test_scans_without_end_in_a_sequential_file(self, decoded, decoder):
        x = read_image(self.several_scans(3))
        assert x.shape == (3, 30, 44)
        assert decoded == [decoder]
        with pytest.raises(ImageError, match="more than 64 scans"):
            read_image(self.several_scans(66))
        assert decoded == [decoder]

    def test_scans_of_several_images_in_a_file(self, decoded):
        buffer, pictures = io.BytesIO(), [Image.new("RGB", (44, 30))] * 9
        pictures[0].save(buffer, "MPO", save_all=True, append_images=pictures, progressive=True)
        assert buffer.getvalue().count(b"\xff\xda") > 64
        assert read_image(buffer.getvalue()).shape == (3, 30, 44)
        assert decoded == ["jpeg"]

    def test_what_only_looks_like_scans(self, decoder):
        """In metadata, among restarts, and after the end, where phones keep a film."""
        data = encode("JPEG", progressive=True, restart_marker_blocks=1)
        more = data[:2] + self.segment(0xFE, b"\xff\xda" * 100) + data[2:] + b"\xff\xda" * 100
        assert read_image(more).equal(read_image(data))

    def test_segments_without_end(self, decoded):
        data = encode("JPEG")
        for before in (b"", b"\xff\xd9"):  # Pillow looks on after an end
            with pytest.raises(ImageError, match="image is a JPEG of more than 4,096 segments; save it again without"):
                read_image(data[:2] + before + self.segment(0xFE, b"") * 4096 + data[2:])
        assert decoded == []
        assert read_image(data[:2] + self.segment(0xFE, b"") * 4000 + data[2:]).equal(read_image(data))

    def test_exif_of_many_segments(self, decoded):
        data, exif = encode("JPEG"), rationals(40_000)
        parts = [self.segment(0xE1, b"Exif\0\0" + exif[i : i + 65_000]) for i in range(0, len(exif), 65_000)]
        with pytest.raises(ImageError, match=r"image has [\d,]+ bytes of EXIF, more than the limit of 262,144"):
            read_image(data[:2] + b"".join(parts) + data[2:])
        assert decoded == []

    @pytest.mark.parametrize("junk", [b"\0", b"\xff"])
    def test_junk_between_segments(self, decoded, junk):
        data = encode("JPEG")
        with pytest.raises(
            ImageError, match="image consists of more than 1,048,576 small pieces; save it again as PNG"
        ):
            read_image(data[:2] + self.segment(0xFE, b"") + junk * 2**21 + data[2:])
        assert decoded == []


class TestPng:
    def chunk(self, kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    def with_chunks(self, chunks, after=False):
        data = encode("PNG")
        at = len(data) - 12 if after else 33
        return data[:at] + chunks + data[at:]

    @pytest.mark.parametrize("after", [False, True])
    @pytest.mark.parametrize("kind", [b"iCCP", b"zTXt", b"iTXt"])
    def test_texts_that_unpack_to_much(self, decoded, kind, after):
        text = {b"iCCP": b"a\0\0", b"zTXt": b"\0\0", b"iTXt": b"a\0\1\0\0\0"}[kind] + zlib.compress(b"x" * 99)
        with pytest.raises(
            ImageError, match="image is a PNG of more than 64 compressed texts or profiles; save it again"
        ):
            read_image(self.with_chunks(self.chunk(kind, text) * 65, after))
        assert decoded == []
        assert read_image(self.with_chunks(self.chunk(kind, text) * 64, after)).equal(read_image(encode("PNG")))

    @pytest.mark.parametrize("kind", [b"IDAT", b"prVt"])
    def test_chunks_without_end(self, decoded, kind):
        with pytest.raises(ImageError, match="image is a PNG of more than 65,536 chunks; save it again"):
            read_image(self.with_chunks(self.chunk(kind, b"") * 2**16))
        assert decoded == []

    @pytest.mark.parametrize("after", [False, True])
    def test_exif_of_many_values(self, decoded, after, monkeypatch):
        """What stands behind the pixels is seen only once they are decoded, and not read either."""
        monkeypatch.setattr(Image.Exif, "load", lambda *given: pytest.fail("the tags are read"))
        exif = rationals(40_000)
        hexadecimal = b"Raw profile type exif\0\nexif\n8\n" + exif.hex().encode()
        for chunk in (self.chunk(b"eXIf", exif), self.chunk(b"tEXt", hexadecimal)):
            with pytest.raises(ImageError, match=r"image has [\d,]+ bytes of EXIF, more than the limit of 262,144"):
                read_image(self.with_chunks(chunk, after))
        assert decoded == (["zip", "zip"] if after else [])


PLAIN = {256: (4, [44]), 257: (4, [30]), 258: (3, [8]), 259: (3, [1]), 262: (3, [1]), 277: (3, [1])}
"""Tags of a grey TIFF, to which those of strips or tiles are added."""
FORMS = {3: "H", 4: "L", 5: "Q"}


class TestTiff:
    def tiff(self, tags, data=bytes(44 * 30)):
        """A little-endian file of these tags; `None` stands for the place of the data."""
        start = 14 + 12 * len(tags)
        at = start + sum(struct.calcsize(f"<{len(v)}{FORMS[kind]}") for kind, v in tags.values())
        entries, rest = b"", b""
        for tag, (kind, values) in sorted(tags.items()):
            packed = struct.pack(f"<{len(values)}{FORMS[kind]}", *[at if v is None else v for v in values])
            place = packed.ljust(4, b"\0") if len(packed) <= 4 else struct.pack("<L", start + len(rest))
            entries += struct.pack("<HHL", tag, kind, len(values)) + place
            rest += packed if len(packed) > 4 else b""
        head = struct.pack("<2sHLH", b"II", 42, 8, len(tags)) + entries + bytes(4) + rest
        return head.ljust(at, b"\0") + data

    def strips(self, count=1, rows=30):
        return {273: (4, [None] * count), 278: (4, [rows]), 279: (4, [44 * rows] * count)}

    def test_a_plain_one_passes(self, decoded):
        assert read_image(self.tiff(PLAIN | self.strips())).shape == (3, 30, 44)
        packed = self.tiff(PLAIN | {259: (3, [8])} | self.strips(), zlib.compress(bytes(44 * 30)).ljust(1320, b"\0"))
        assert read_image(packed).shape == (3, 30, 44)
        assert decoded == ["raw", "libtiff"]

    def test_tags_of_many_values(self, decoded):
        for kind, count in ((5, 2**14 + 1), (3, 2**19 + 1)):
            with pytest.raises(
                ImageError, match="image is a TIFF whose tags have more than 524,288 values; save it again"
            ):
                read_image(self.tiff(PLAIN | self.strips() | {282: (kind, [7] * count)}))
        assert decoded == []

    def test_tags_of_many_values_in_a_further_directory(self, decoded):
        """EXIF beside the tags of the image; it may also lead to itself."""
        data = self.tiff(PLAIN | self.strips() | {0x8769: (4, [None])}, b"")
        place = len(data)
        exif = struct.pack("<HHHLLHHLLL", 2, 0x829A, 5, 2**15, place + 30, 0xA005, 4, 1, place, 0)
        with pytest.raises(ImageError, match="whose tags have more than 524,288 values"):
            read_image(data + exif + bytes(8 * 2**15))
        assert decoded == []

    def test_tags_that_hold_the_same_bytes(self, decoded):
        """Each of them would be copied: a file of megabytes that becomes thousands of times as many."""
        data = self.tiff(PLAIN | self.strips() | {60_000 + i: (4, [None]) for i in range(99)})
        shared = struct.pack("<HHLL", 60_000, 7, len(data), 0)
        for i in range(99):
            entry = struct.pack("<HHL", 60_000 + i, 4, 1)
            at = data.index(entry)
            data = data[:at] + struct.pack("<H", 60_000 + i) + shared[2:] + data[at + 12 :]
        with pytest.raises(ImageError, match="image is a TIFF whose tags hold the same bytes again and again; save it"):
            read_image(data)
        assert decoded == []

    def test_more_tags_than_any_file_has(self, decoded):
        for form, head in (
            ("<HHLL", struct.pack("<2sHLH", b"II", 42, 8, 4097)),
            ("<HHQQ", b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 2**60)),
        ):
            with pytest.raises(ImageError, match="image is a TIFF of more than 4,096 tags in one place; save it again"):
                read_image(head + struct.pack(form, 256, 4, 1, 44) * 4097)
        assert decoded == []

    def test_strips_that_cover_each_other(self, decoded):
        """Every second strip of this file is nearly the whole image."""
        with pytest.raises(
            ImageError, match="image has 1,000 strips or tiles, more than its pixels need; save it again"
        ):
            read_image(self.tiff(PLAIN | self.strips(1000, 29)))
        assert decoded == []

    @pytest.mark.parametrize("kind", [3, 4])
    def test_tiles_that_share_their_bytes(self, decoded, kind):
        tile = zlib.compress(bytes(16 * 16)).ljust(70_000 if kind == 4 else 3_000, b"\0")
        places = {322: (3, [16]), 323: (3, [16]), 324: (4, [None] * 6), 325: (kind, [len(tile)] * 6)}
        said = rf"whose strips or tiles have {6 * len(tile):,} bytes in a file of [\d,]+, so that they overlap; save it"
        with pytest.raises(ImageError, match=said):
            read_image(self.tiff(PLAIN | {259: (3, [8])} | places, tile))
        assert decoded == []
        places[324] = (4, [400 + i * len(tile) for i in range(6)])
        whole = self.tiff(PLAIN | {259: (3, [8])} | places, b"").ljust(400, b"\0") + tile * 6
        assert read_image(whole).shape == (3, 30, 44)

    def test_a_tile_far_larger_than_the_image(self, decoded):
        places = {322: (4, [3000]), 323: (4, [2000]), 324: (4, [None]), 325: (4, [99])}
        with pytest.raises(
            ImageError, match="image is a TIFF with tiles of 3000 x 2000 pixels, more than the limit of 5,0"
        ):
            read_image(self.tiff(PLAIN | {259: (3, [8])} | places), limits=ImageLimits(max_pixels=5_000_000))
        assert decoded == []

    def test_directories_that_are_not_there(self):
        """Tags that lead nowhere are nobody's harm."""
        data = self.tiff(PLAIN | self.strips() | {0x8769: (4, [2**31]), 0x8825: (4, [2**32 - 1])})
        assert read_image(data).shape == (3, 30, 44)


class TestSlowFormats:
    """Those that Pillow reads in Python."""

    def rle(self, width, height, runs):
        head = struct.pack("<LLLHHLLLLLL", 40, width, height, 1, 8, 1, len(runs), 0, 0, 2, 0) + b"\0\0\xff\0\xff\0\0\0"
        return b"BM" + struct.pack("<LHHL", 14 + len(head) + len(runs), 0, 0, 14 + len(head)) + head + runs

    @pytest.mark.parametrize("comments", [1001, 50_000])
    def test_comments_among_values_written_as_text(self, decoded, comments):
        values = b"7 " * (44 * 30)
        with pytest.raises(
            ImageError, match=f"image has {comments:,} comments, more than the limit of 1,000; remove them"
        ):
            read_image(b"P2 44 30 255\n" + b"#\n" * comments + values)
        assert decoded == []
        assert (read_image(b"P2 44 30 255\n" + b"#\n" * 1000 + values) == 7).all()
        assert decoded == ["ppm_plain"]

    def test_comments_in_a_header(self, decoded):
        for kind in (b"P3", b"P6"):
            with pytest.raises(
                ImageError, match="image consists of more than 1,048,576 small pieces; save it again as PNG"
            ):
                read_image(kind + b"\n" + b"#\n" * 2**20 + b"44 30 255\n" + bytes(44 * 30 * 3))
        assert decoded == []
        x = read_image(b"P5\n# made by hand\n44 30 255\n" + b"#" * (44 * 30))  # there they are values
        assert (x == ord("#")).all()

    @pytest.mark.parametrize(
        ("head", "as_what"),
        [
            (b"P1 1025 1024\n", "values written as text"),
            (b"P2 1025 1024 255\n", "values written as text"),
            (b"P3 1025 1024 255\n", "values written as text"),
            (b"P5 1025 1024 254\n", "values of another maximum than 255"),
            (b"P6 1025 1024 65535\n", "values of another maximum than 255"),
        ],
    )
    def test_many_pixels_of_pnm(self, decoded, head, as_what):
        with pytest.raises(
            ImageError, match=f"image has 1025 x 1024 pixels as {as_what}, which is slow to read, more than"
        ):
            read_image(head + b"0 " * 2**20)
        assert decoded == []

    def test_binary_values_of_the_usual_maximum_have_no_such_limit(self):
        assert read_image(b"P5 1025 1024 255\n" + bytes(1025 * 1024)).shape == (3, 1024, 1025)

    def test_many_pixels_of_run_lengths(self, decoded):
        with pytest.raises(
            ImageError, match="image has 1025 x 1024 pixels as run lengths, which is slow to read, more than"
        ):
            read_image(self.rle(1025, 1024, b"\1\1\0\0" * 1024))
        assert decoded == []
        assert (read_image(self.rle(44, 30, b"\x2c\0\0\0" * 30))[0] == 255).all()
        assert decoded == ["bmp_rle"]

    def test_runs_that_lead_nowhere(self):
        """Beyond the end of a line they add no pixel: only the reads tell that it never ends."""
        with pytest.raises(ImageError, match="image consists of more than 1,048,576 small pieces"):
            read_image(self.rle(44, 30, b"\xff\1" * 2**19))

    @pytest.mark.parametrize("blocks", [b"!\xfe" + b"\1x" * 2**19 + b"\0", b"\0" * 2**20])
    def test_blocks_before_the_image_of_a_gif(self, decoded, blocks):
        data = encode("GIF", "L")
        at = 13 + (3 << (data[10] & 7) + 1 if data[10] & 128 else 0)
        with pytest.raises(
            ImageError, match="image consists of more than 1,048,576 small pieces; save it again as PNG"
        ):
            read_image(data[:at] + blocks + data[at:])
        assert decoded == []
        assert read_image(data[:at] + b"!\xfe\1x\0" + data[at:]).equal(read_image(data))
