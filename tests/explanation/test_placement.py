"""A planted hot patch covers exactly the pixels of the original image that the patch was computed from."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import redraw
from vitral import Predictor, create_model, explain
from vitral.config import Preprocess
from vitral.data.transforms import eval_transform, resize, resized_size
from vitral.errors import UnknownNameError
from vitral.explanation.colours import paint
from vitral.explanation.figures import draw
from vitral.explanation.page import picture_url
from vitral.explanation.placement import DRAWN, STRENGTH, as_picture, place

GRID = (3, 4)
PATCH = 8
MODES = {
    "squash": {"crop_mode": "squash"},
    "squash and crop": {"crop_mode": "squash_center", "crop_pct": 0.75},
    "crop": {"crop_mode": "center", "crop_pct": 1.0},
    "resize and crop": {"crop_mode": "center", "crop_pct": 0.8},
    "pad": {"crop_mode": "pad"},
}
SIZES = [(203, 307), (311, 149)]


@pytest.fixture(scope="module")
def model():
    options = {"img_size": (GRID[0] * PATCH, GRID[1] * PATCH), "patch_size": PATCH, "num_classes": 5}
    return redraw(create_model("vit_tiny_patch16_224", embed_dim=48, depth=1, num_heads=2, **options))


def predictor_of(model, mode):
    model.preprocess = replace(model.preprocess, interpolation="bilinear", **MODES[mode])
    return Predictor(model)


def photo(size, seed=0):
    """A smooth image of no more than 200 per channel, so that a white rectangle is unique."""
    coarse = torch.rand(1, 3, 9, 7, generator=torch.Generator().manual_seed(seed))
    return (200 * torch.nn.functional.interpolate(coarse, size, mode="bilinear")[0]).to(torch.uint8)


def patch_of_pixels(size, p: Preprocess):
    """(H, W): the patch that receives most of each pixel, -1 for pixels that are cropped away; and which are ties.

    This differentiates the preprocessing itself, along each axis, and knows nothing of crops or coordinates.
    """
    x = torch.zeros(3, *size, requires_grad=True)
    prepared, resized = eval_transform(x, p)[0], resize(x, resized_size(size, p), p.interpolation)[0]
    found, close = [], []
    for axis in (0, 1):
        bands = prepared.sum(1 - axis).unfold(0, PATCH, PATCH).sum(1)
        shares = [torch.autograd.grad(each, x, retain_graph=True)[0][0].sum(1 - axis) for each in bands]
        whole = torch.autograd.grad(resized.sum(), x, retain_graph=True)[0][0].sum(1 - axis)
        shares = torch.stack([sum(shares), *shares]) / whole
        shares /= shares[0].max()  # of a pixel that is not cropped away
        shares[0] = 1 - shares[0]  # what becomes part of no patch
        best = shares.topk(2, dim=0)
        found.append(best.indices[0] - 1)
        close.append(best.values[0] - best.values[1] < 0.04)
    rows, columns = found[0][:, None], found[1]
    return torch.where((rows < 0) | (columns < 0), -1, rows * GRID[1] + columns), close[0][:, None] | close[1]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_each_pixel_belongs_to_the_patch_that_was_computed_from_it(model, mode, size):
    predictor = predictor_of(model, mode)
    made = explain(predictor, photo(size), "rollout")
    numbers = torch.arange(1.0, 13.0).view(GRID)
    placed = place(made)
    drawn = torch.where(placed.inside(), placed.spread(numbers, "patches"), 0)[: size[0], : size[1]] - 1
    expected, ties = patch_of_pixels(size, predictor.preprocess)
    assert ties.float().mean() < 0.05
    assert torch.equal(drawn[~ties].long(), expected[~ties])
    assert placed.size == size or mode == "pad"


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("mode", MODES)
def test_a_planted_patch_is_drawn_on_what_the_patch_shows(model, tmp_path, mode, orientation):
    """A white rectangle in a file turned by EXIF fills one patch of the input; the hot patch covers the rectangle."""
    predictor = predictor_of(model, mode)
    size, row, column = (264, 320), 1, 1
    left, top, right, bottom = explain(predictor, photo(size), "rollout").crop
    pixels = photo(size)
    down = [round(top + k * (bottom - top) / GRID[0]) for k in (row, row + 1)]
    across = [round(left + k * (right - left) / GRID[1]) for k in (column, column + 1)]
    pixels[:, down[0] : down[1], across[0] : across[1]] = 255
    image = Image.fromarray(as_picture(pixels))
    turn = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = image.transpose(turn[orientation]) if orientation in turn else image
    file.save(tmp_path / "x.jpg", exif=exif, quality=95)
    made = explain(predictor, tmp_path / "x.jpg", "rollout")
    assert (made.original.int() - pixels.int()).abs().float().mean() < 3  # upright
    white = (made.image > 230).all(0).view(GRID[0], PATCH, GRID[1], PATCH).float().mean((1, 3))
    assert white[row, column] > 0.55  # the model was fed the rectangle in this patch, blurred at its edges
    assert white.sum() - white[row, column] < 0.1
    hot = torch.zeros(GRID)
    hot[row, column] = 1
    made = replace(made, maps=hot[None])
    placed = place(made)
    covered = placed.inside() & (placed.spread(hot, "patches") > 0.5)
    assert made.size == size
    assert torch.equal(covered[: size[0], : size[1]], (pixels == 255).all(0))


def test_the_png_has_the_pixels_of_the_original_and_its_map(model, tmp_path):
    """A photograph of 1,000 pixels and a model of 32: every pixel of the file, except for outlines, is as expected."""
    pixels = photo((668, 1000))
    pixels[:, ::2, ::2] //= 2  # detail that no resampling would keep
    Image.fromarray(as_picture(pixels)).save(tmp_path / "x.png")
    made = explain(predictor_of(model, "resize and crop"), tmp_path / "x.png", "attention", head=0)
    with Image.open(made.save(tmp_path / "y.png")) as written:
        picture = np.asarray(written.convert("RGB"))
    H, W = made.size
    (y, x) = find(picture, as_picture(pixels)[:40])
    assert np.array_equal(picture[y : y + 60, x : x + W], as_picture(pixels)[:60])
    figure = made.figure()
    left, _, right, top = figure.axes[1].get_position().extents
    y, x = round(len(picture) * (1 - top)), round(picture.shape[1] * left)
    assert round(picture.shape[1] * right) - x == W
    shown, placed = picture[y : y + H, x : x + W].astype(int), place(made)
    for row, column in np.ndindex(GRID):
        (x0, y0), (x1, y1) = placed.corner(row, column), placed.corner(row + 1, column + 1)
        inner = slice(round(y0) + 8, round(y1) - 8), slice(round(x0) + 8, round(x1) - 8)
        colour = paint(made.maps[0])[row, column]
        expected = (1 - STRENGTH) * as_picture(pixels)[inner] + STRENGTH * colour
        assert np.abs(shown[inner] - expected).max() <= 0.51


def find(picture, part):
    """Row and column at which a part is in a picture."""
    row = part[0].tobytes()
    for y in range(len(picture) - len(part)):
        at = picture[y].tobytes().find(row)
        if at >= 0 and np.array_equal(picture[y : y + len(part), at // 3 : at // 3 + part.shape[1]], part):
            return y, at // 3
    raise AssertionError("the picture does not contain the part")


def test_smooth_maps_have_the_values_of_the_patches_at_their_centres_and_stay_between_them(model):
    made = explain(predictor_of(model, "squash"), photo((240, 320)), "rollout")
    map_, placed = made.maps[0].double(), place(made)
    smooth, patches = placed.spread(map_, "smooth"), placed.spread(map_, "patches")
    corners = smooth[[39, 40]][:, [39, 40]]  # around the centre of the first cell of 80 x 80 pixels
    assert corners.mean().item() == pytest.approx(map_[0, 0].item(), rel=0.01)
    assert smooth.max() <= map_.max() + 1e-12
    assert smooth.min() >= map_.min() - 1e-12
    assert torch.equal(smooth[:40, :40], map_[0, 0].expand(40, 40))  # constant outside of the outer centres
    assert patches.unique().tolist() == map_.unique().tolist()
    assert smooth[120, 160].item() == pytest.approx(map_[1, 1:3].mean().item(), rel=0.02)
    with pytest.raises(UnknownNameError, match="unknown style 'smoth'; did you mean smooth"):
        made.figure("smoth")


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_the_original_is_kept_at_its_own_resolution_up_to_a_bound(model, tmp_path, suffix):
    """JPEG files are decoded at a fraction of their size for a small model, but not for drawing."""
    sharp = torch.zeros(3, 600, 1000, dtype=torch.uint8)
    sharp[:, :, ::2] = 255
    Image.fromarray(as_picture(sharp)).save(tmp_path / f"x{suffix}", quality=95)
    made = explain(predictor_of(model, "crop"), tmp_path / f"x{suffix}", "rollout")
    assert made.size == tuple(made.original.shape[1:]) == (600, 1000)
    assert made.original.float().std() > 100
    large = explain(predictor_of(model, "crop"), np.zeros((500, 4000), np.uint8), "rollout")
    assert large.size == (500, 4000)
    assert tuple(large.original.shape[1:]) == (DRAWN // 8, DRAWN)
    assert large.crop == pytest.approx((2000 - 1000 / 3, 0, 2000 + 1000 / 3, 500), abs=0.01 * 500)


def test_padding_is_part_of_the_picture(model):
    made = explain(predictor_of(model, "pad"), torch.full((3, 90, 240), 9, dtype=torch.uint8), "rollout")
    placed = place(made)
    assert placed.size == (180, 240)  # 24 x 32 pixels of the input
    assert not placed.cropped
    padding = (255 * torch.tensor(model.preprocess.mean)).round().to(torch.uint8)
    assert torch.equal(placed.picture[:, 150, 10], padding)
    assert made.crop == (0, 0, 240, 180)
    assert made.cell == (60, 60)


@pytest.mark.parametrize(
    ("size", "drawn"), [((28, 28), (364, 364)), ((300, 350), (600, 700)), ((400, 900), (400, 900))]
)
def test_small_images_are_enlarged_by_integer_factors(model, size, drawn):
    made = explain(predictor_of(model, "squash"), photo(size), "rollout")
    ax = made.figure().axes[0]
    assert ax.images[0].get_array().shape[:2] == drawn
    assert [round(side) for side in ax.bbox.size] == [drawn[1], drawn[0]]


def test_many_panels_are_made_smaller(model):
    made = explain(predictor_of(model, "squash"), photo((1200, 1600)), "rollout")
    many = replace(made, maps=made.maps[:1].expand(30, -1, -1), titles=["map"] * 30)
    shapes = {ax.images[0].get_array().shape[:2] for ax in draw(many, pixels=1e6).axes}
    assert len(shapes) == 1
    (H, W), *_ = shapes
    assert 0.95e6 < 31 * H * W < 1.05e6


def test_pages_have_photographs_as_jpeg_and_small_pictures_as_png():
    noise = np.random.default_rng(0).integers(0, 255, (300, 400, 3), np.uint8)
    assert picture_url(Image.fromarray(noise)).startswith("data:image/jpeg;base64,")
    assert picture_url(Image.fromarray(noise[:28, :28])).startswith("data:image/png;base64,")
    buffer = io.BytesIO()
    Image.fromarray(noise).save(buffer, "PNG")
    assert len(picture_url(Image.fromarray(noise))) < len(buffer.getvalue())


def test_plain_values_give_the_place_in_pixels_of_the_original(model):
    document = explain(predictor_of(model, "crop"), photo((203, 307)), "rollout").to_dict()
    left, top, right, bottom = document["crop"]
    assert (document["size"], top, bottom) == ((203, 307), 0, 203)
    assert left + right == pytest.approx(307, abs=307 / 36)  # centred, up to a pixel of the input
    assert document["cell"] == pytest.approx([203 / 3, (right - left) / 4], abs=1e-3)
