import io
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.data import images as module
from vitral.data.images import LIMITS, AtLeast, ImageLimits, read_image, read_sized
from vitral.errors import ImageError


def gradient(height=24, width=40):
    """A picture in which every place has its own colour."""
    rows, columns = np.mgrid[0:height, 0:width]
    return np.stack([rows * 255 // height, columns * 255 // width, (rows + columns) * 3 % 256], -1).astype(np.uint8)


def encode(array_or_image, kind="PNG", **options):
    image = array_or_image if isinstance(array_or_image, Image.Image) else Image.fromarray(array_or_image)
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    if request.param == "pillow":
        monkeypatch.setattr(module, "_import_simplejpeg", lambda: None)
    elif module._import_simplejpeg() is None:
        pytest.fail("simplejpeg is a part of the test environment")
    return request.param


def test_png_is_exact():
    x = read_image(encode(gradient()))
    assert x.dtype == torch.uint8
    assert torch.equal(x, torch.from_numpy(gradient()).permute(2, 0, 1))


def test_a_path_is_read(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encode(gradient()))
    assert torch.equal(read_image(path), read_image(str(path)))


def test_jpeg_is_near(decoder):
    x = read_image(encode(gradient(), "JPEG", quality=95))
    reference = torch.from_numpy(gradient()).permute(2, 0, 1)
    assert (x.float() - reference.float()).abs().mean() < 6


def test_decoders_agree(monkeypatch):
    data = encode(gradient(64, 96), "JPEG", quality=90)
    ours = read_image(data)
    monkeypatch.setattr(module, "_import_simplejpeg", lambda: None)
    assert (ours.float() - read_image(data).float()).abs().mean() < 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_undone(decoder, orientation, kind):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(gradient(), kind, quality=95, exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        from PIL import ImageOps

        reference = np.asarray(ImageOps.exif_transpose(image))
    x = read_image(data).permute(1, 2, 0).numpy().astype(float)
    assert x.shape == reference.shape
    assert np.abs(x - reference).mean() < 2
    assert read_sized(data, "rgb", AtLeast(3, 2), LIMITS)[1] == reference.shape[:2]


def test_scaled_decoding_never_goes_below_what_is_wanted(decoder):
    exif = Image.Exif()
    exif[0x0112] = 6  # on its side
    for options in ({}, {"exif": exif}):
        data = encode(gradient(800, 1200), "JPEG", **options)
        x = read_image(data, at_least=AtLeast(150, 100))
        full = (1200, 800) if options else (800, 1200)
        assert x.shape[1] >= 150
        assert x.shape[2] >= 100
        assert x.shape[1] < full[0]
        assert abs(x.shape[1] / x.shape[2] - full[0] / full[1]) < 0.02
        assert read_sized(data, "rgb", AtLeast(150, 100), LIMITS)[1] == full


def test_grey(decoder):
    for kind in ("PNG", "JPEG"):
        x = read_image(encode(gradient(), kind), mode="grey")
        assert x.shape == (1, 24, 40)
        reference = gradient().astype(float) @ [0.299, 0.587, 0.114]
        assert np.abs(x[0].numpy() - reference).mean() < 4
    assert read_image(encode(gradient()[:, :, 0])).shape == (3, 24, 40)


def test_cmyk():
    red = Image.new("CMYK", (9, 7), (0, 255, 255, 0))
    x = read_image(encode(red, "JPEG", quality=95))
    assert x.shape == (3, 7, 9)
    assert x[0].float().mean() > 200
    assert x[1].float().mean() < 60


def test_palette_and_transparency_are_laid_on_white():
    transparent = Image.new("RGBA", (9, 7), (255, 0, 0, 0))
    assert (read_image(encode(transparent)) == 255).all()
    half = Image.new("RGBA", (9, 7), (255, 0, 0, 128))
    assert read_image(encode(half))[:, 0, 0].tolist() == pytest.approx([255, 127, 127], abs=1)
    palette = Image.fromarray(gradient()).quantize(16)
    assert read_image(encode(palette)).shape == (3, 24, 40)
    palette.info["transparency"] = 0
    assert read_image(encode(palette, "PNG", transparency=0)).shape == (3, 24, 40)


def test_sixteen_bits_keep_their_range():
    ramp = (np.arange(40 * 24).reshape(24, 40) * 65535 // 959).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        x = read_image(encode(Image.fromarray(ramp), kind), mode="grey")
        assert np.abs(x[0].numpy() - ramp / 257).max() <= 1


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO"])
def test_animations_give_their_first_frame(kind):
    frames = [Image.new("RGB", (9, 7), colour) for colour in ("red", "blue", "lime")]
    data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 3
    assert read_image(data)[:, 0, 0].tolist() == pytest.approx([255, 0, 0], abs=2)


def test_other_depths_are_stretched_over_their_range():
    ramp = np.arange(40 * 24).reshape(24, 40)
    for pixels, expected in (
        ((ramp % 256).astype(np.int32), ramp % 256),
        ((ramp * 60).astype(np.int32), ramp * 60 / 257),
        ((ramp * 1000 - 7).astype(np.int32), ramp * 255 / 959),
        ((ramp / 959 * 200).astype(np.float32), ramp * 200 / 959),
        ((ramp / 7 - 50).astype(np.float32), ramp * 255 / 959),
        (np.full((24, 40), 70_000, np.int32), np.zeros((24, 40))),
    ):
        x = read_image(encode(Image.fromarray(pixels), "TIFF"), mode="grey")
        assert np.abs(x[0].numpy() - expected).max() <= 0.501


@pytest.mark.parametrize("mode", ["rgb", "grey"])
@pytest.mark.parametrize("rows", [1, 5])
def test_bands_make_no_difference(monkeypatch, mode, rows):
    rgb = Image.fromarray(gradient())
    deep = [Image.fromarray((gradient()[:, :, 2].astype(int) * scale - 9).astype(np.int32)) for scale in (1, 999)]
    pictures = [encode(image, "TIFF") for image in (*deep, deep[0].convert("F"), rgb.convert("CMYK"))]
    pictures += [encode(rgb.convert("RGBA")), encode(rgb.quantize(16)), encode(rgb.quantize(16), transparency=3)]
    pictures += [encode(rgb, transparency=(0, 0, 0)), encode(gradient()[:, :, 0].astype(np.uint16) * 257)]
    whole = [read_image(data, mode) for data in pictures]
    monkeypatch.setattr(module, "_BAND", rows * 40)
    assert all(read_image(data, mode).equal(x) for data, x in zip(pictures, whole, strict=True))


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_conversions_need_little_memory(kind):
    """Beside what Pillow holds: the result, and a band of a few rows."""
    height, width = 1501, 2003
    ramp = np.linspace(0, 65535, height * width).reshape(height, width)
    deep = [Image.fromarray(ramp.astype(np.uint16))]
    if kind == "TIFF":
        deep += [Image.fromarray(ramp.astype(np.float32) * 3)]
    for image in (*deep, Image.new("RGBA", (width, height), (9, 99, 199, 100))):
        data = encode(image, kind)
        tracemalloc.start()
        try:
            x = read_image(data)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert x.shape == (3, height, width)
        assert peak < 8 * height * width


@pytest.mark.parametrize("kind", ["WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_other_formats(kind):
    assert read_image(encode(gradient(), kind)).shape == (3, 24, 40)


class TestBroken:
    def test_an_empty_file(self, tmp_path):
        (tmp_path / "empty.png").touch()
        with pytest.raises(ImageError, match=r"empty\.png is empty \(0 bytes\)"):
            read_image(tmp_path / "empty.png")

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(ImageError, match=r"none\.png does not exist"):
            read_image(tmp_path / "none.png")

    def test_a_folder(self, tmp_path):
        with pytest.raises(ImageError, match="cannot be read"):
            read_image(tmp_path)

    def test_not_an_image(self):
        with pytest.raises(ImageError, match="not an image of a known format"):
            read_image(b"hello, this is text")

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
    def test_cut_short(self, decoder, kind):
        data = encode(gradient(200, 300), kind)
        with pytest.raises(ImageError, match=r"cannot be decoded|not an image"):
            read_image(data[: len(data) // 2])

    def test_too_many_bytes(self):
        with pytest.raises(ImageError, match="more than the limit of 100"):
            read_image(encode(gradient()), limits=ImageLimits(max_bytes=100))

    def test_a_decompression_bomb_is_refused_by_its_header(self):
        data = encode(Image.new("L", (4000, 4000)))
        assert len(data) < 100_000
        with pytest.raises(ImageError, match="4000 x 4000 pixels, more than the limit of 1,000,000"):
            read_image(data, limits=ImageLimits(max_pixels=1_000_000))

    def test_formats_that_run_other_programs_are_not_opened(self):
        with pytest.raises(ImageError, match="not an image of a known format"):
            read_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\nshowpage\n")


def test_the_limits_are_checked_while_reading(tmp_path: Path):
    path = tmp_path / "large.png"
    path.write_bytes(b"\0" * 5000)
    with pytest.raises(ImageError, match="more than the limit of 1,000"):
        read_image(path, limits=ImageLimits(max_bytes=1000))


def test_even_scaling_keeps_every_pixel_in_its_place(decoder):
    for size, wanted, expected in (
        ((800, 1200), (200, 300), (200, 300)),
        ((800, 1200), (201, 300), (400, 600)),
        ((801, 1200), (200, 300), (801, 1200)),
        ((820, 1204), (200, 300), (205, 301)),
        ((820, 1206), (200, 300), (410, 603)),
    ):
        x = read_image(encode(gradient(*size), "JPEG"), at_least=AtLeast(*wanted, even=True))
        assert tuple(x.shape[1:]) == expected


def test_threads_that_decode_at_once_leave_warnings_as_they_were():
    """The first to begin is here the first to end: the other still decodes in peace, and then all is as before."""
    before = list(warnings.filters)
    module._QUIET.__enter__()
    module._QUIET.__enter__()
    module._QUIET.__exit__(None, None, None)
    warnings.warn("about metadata", UserWarning, stacklevel=1)  # an error, were it not ignored
    module._QUIET.__exit__(None, None, None)
    assert warnings.filters == before


def test_a_bomb_that_pillow_refuses_has_a_sentence_too(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with pytest.raises(ImageError, match="more pixels than any limit allows"):
        read_image(encode(gradient()))
