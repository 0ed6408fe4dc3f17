"""The page of an explanation in a browser: mouse, keys and buttons, offline, on a laptop and on a phone."""

import base64
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import redraw
from vitral import create_model, explain
from vitral.explanation.colours import number, paint, scale_of
from vitral.explanation.placement import place

MODEL = {"embed_dim": 48, "depth": 3, "num_heads": 3, "img_size": (64, 96), "num_classes": 7}


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    Image.linear_gradient("L").convert("RGB").save(folder / "x.png")
    made = explain(
        redraw(create_model("vit_tiny_patch16_224", **MODEL)), folder / "x.png", "relevance", interactive=True
    )
    return made.save(folder / "x.html"), made


@pytest.fixture
def page(browser, page_file):
    page = browser.new_page(viewport={"width": 1100, "height": 760})
    page.asked, page.said = [], []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.goto(page_file[0].as_uri())
    page.wait_for_function("document.getElementById('say').textContent.length > 5")
    yield page
    assert page.said == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    page.close()


def says(page):
    return page.inner_text("#say")


def looks_most(rows, layer, query):
    """Row and column, from 1, that the mean of heads looks at most, and how much."""
    mean = (rows.shares[layer, :, query].double() / 255 * rows.largest[layer, :, query, None]).mean(0)
    best = int(mean.argmax())
    return f"row {best // 6 + 1}, column {best % 6 + 1}, {number(100 * float(mean[best]))} % of its attention"


def box_of(page, made, row, column):
    """Left, top, width and height of a patch on the screen."""
    canvas, (left, top, _, _), (h, w) = page.locator("#canvas").bounding_box(), made.crop, made.cell
    scale = canvas["width"] / made.size[1]
    return canvas["x"] + scale * (left + column * w), canvas["y"] + scale * (top + row * h), scale * w, scale * h


def hover(page, made, row, column):
    left, top, width, height = box_of(page, made, row, column)
    page.mouse.move(left + width / 2, top + height / 2)


def opened(browser, path, **options):
    page = browser.new_page(viewport={"width": 1100, "height": 760}, **options)
    page.goto(path.as_uri())
    page.wait_for_function("document.getElementById('say').textContent.length > 5")
    return page


@pytest.mark.slow
def test_hovering_a_patch_shows_where_it_looks(page, page_file):
    page.select_option("#map", "-1")
    hover(page, page_file[1], 1, 3)
    expected = looks_most(page_file[1].rows, 2, 1 + 6 + 3)
    assert says(page) == f"The patch in row 2, column 4, block 2, mean of heads: looks most at {expected}."
    frame = page.locator("#frame").bounding_box()
    expected = box_of(page, page_file[1], 1, 3)
    assert [frame[side] for side in ("x", "y", "width", "height")] == pytest.approx(expected, abs=1)
    canvas = page.locator("#canvas").bounding_box()
    page.mouse.move(canvas["x"] + 3, canvas["y"] + 3)  # outside of the model's crop
    assert says(page).startswith("The patch in row 2, column 4")


@pytest.mark.slow
def test_hovering_a_map_shows_its_values(page, page_file):
    map_ = page_file[1].maps[0]
    assert page.inner_text("#range") == scale_of(map_).text()
    assert page.inner_text("#most") == number(float(map_.max()))
    hover(page, page_file[1], 1, 3)
    assert says(page).startswith(f"gradient x attention: {number(float(map_[1, 3]))} in row 2, column 4")


@pytest.mark.slow
def test_keys(page, page_file):
    page.keyboard.press("c")
    assert says(page) == f"[CLS], block 2, mean of heads: looks most at {looks_most(page_file[1].rows, 2, 0)}."
    page.keyboard.press("[")
    assert "block 1" in says(page)
    page.keyboard.press("h")
    assert "head 0" in says(page)
    page.keyboard.press("ArrowRight")
    assert "row 3, column 5, block 1" in says(page)
    page.keyboard.press("o")
    assert page.inner_text("#show") == "Show overlay"
    page.keyboard.press("m")
    assert says(page).startswith("gradient x attention: ")
    page.keyboard.press("m")
    assert says(page).startswith("gradient rollout: ")


@pytest.mark.slow
def test_buttons_and_sliders(page):
    assert says(page).startswith("gradient x attention: ")
    page.select_option("#map", "1")
    assert says(page).startswith("gradient rollout: ")
    page.select_option("#map", "-1")
    assert says(page).startswith("[CLS], block 2")
    page.locator("#layer").fill("0")
    assert "block 0" in says(page)
    page.select_option("#head", "1")
    assert "head 1" in says(page)
    page.click("#play")
    page.wait_for_function("document.getElementById('say').textContent.includes('block 1')")
    page.click("#play")


@pytest.mark.slow
def test_the_page_names_image_and_model_and_what_was_explained(page, page_file):
    assert page.inner_text("#title") == page_file[1].caption
    assert page.inner_text("#about") == (
        f"{page_file[1].name} · input of the model: {page_file[1].part}, at 96 x 64 pixels"
    )
    assert page.locator("#note").is_hidden()


@pytest.mark.slow
def test_it_opens_where_it_was_asked_to_with_the_colours_of_the_picture(browser, page_file, tmp_path):
    model = redraw(create_model("vit_tiny_patch16_224", **MODEL))
    made = explain(model, page_file[1].name, layer=1, head=2, patch=(80, 20), interactive=True)
    page = opened(browser, made.save(tmp_path / "x.html"))
    assert says(page).startswith("The patch in row 2, column 6, block 1, head 2: ")
    assert page.input_value("#head") == "2"
    assert page.locator("#shows").is_hidden()
    low, high = (number(100 * float(v)) for v in (made.maps[0].min(), made.maps[0].max()))
    assert page.inner_text("#range").endswith(f" % to {high} %")
    assert float(page.inner_text("#range").split()[0]) == pytest.approx(float(low), rel=0.03)
    page.locator("#strength").fill("100")
    cells = page.evaluate(
        "[...Array(24).keys()].map(i => grid.box(i)).map(({ x, y, w, h }) => "
        "[...pen.getImageData(x + w / 2, y + h / 2, 1, 1).data].slice(0, 3))"
    )
    assert np.abs(np.array(cells) - paint(made.maps[0]).reshape(-1, 3).astype(int)).max() <= 3
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("crop_mode", "size"),
    [("center", (667, 1000)), ("squash", (667, 1000)), ("pad", (667, 1000)), ("center", (40, 30))],
)
def test_a_planted_map_is_on_the_pixels_of_its_patches(browser, tmp_path, crop_mode, size):
    model = redraw(create_model("vit_tiny_patch16_224", **MODEL))
    model.preprocess = replace(model.preprocess, crop_mode=crop_mode)
    photo = np.full((*size, 3), 90, np.uint8)
    made = explain(model, photo, "rollout", interactive=True)
    planted = torch.arange(24.0).view(4, 6)
    made = replace(made, maps=planted[None], titles=["planted"])
    page = opened(browser, made.save(tmp_path / "x.html"))
    page.locator("#strength").fill("100")
    placed = place(made, 1200)
    scale = page.evaluate("scale")
    shown = pixels_of(page)
    assert shown.shape == (placed.size[0] * scale, placed.size[1] * scale, 3)
    large = replace(
        placed,
        picture=placed.picture.repeat_interleave(scale, 1).repeat_interleave(scale, 2),
        crop=tuple(scale * edge for edge in placed.crop),
        cell=tuple(scale * side for side in placed.cell),
    )
    seen = np.ones(shown.shape[:2], bool)
    if placed.cropped:  # the outline covers the edges of the crop
        left, top, right, bottom = (round(edge) for edge in large.crop)
        for edge in (left, right):
            seen[:, max(0, edge - 6) : edge + 6] = False
        for edge in (top, bottom):
            seen[max(0, edge - 6) : edge + 6] = False
    assert np.abs(shown - large.blend(planted, "patches", 1.0))[seen].max() <= 3  # JPEG
    page.select_option("#style", "smooth")
    assert np.abs(pixels_of(page) - large.blend(planted, "smooth", 1.0))[seen].max() <= 8
    page.close()


def pixels_of(page):
    data = page.evaluate("canvas.toDataURL('image/png')").partition(",")[2]
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)


@pytest.mark.slow
def test_outliers_are_cut_off_as_in_pictures(page):
    values = [0.5] * 24
    assert page.evaluate(f"scaleOf({values}.map((v, i) => i === 3 ? 9 : v)).top") == 9
    many = "const many = Array(400).fill(0.5); many[3] = 9; many[7] = 7;"
    rule = page.evaluate("String(scaleOf)").replace("N", "400")
    assert page.evaluate(f"(() => {{ {many} {rule}; return scaleOf(many); }})()") == {
        "low": 0.5, "high": 9, "top": 0.5, "cut": 2,
    }  # fmt: skip
    one = "const one = Array(400).fill(1e-6); one[3] = 0.9;"
    assert page.evaluate(f"(() => {{ {one} {rule}; return scaleOf(one).top; }})()") == 0.9


@pytest.mark.slow
def test_tokens_are_shown_in_their_colours(browser, page_file, tmp_path):
    model = redraw(create_model("vit_tiny_patch16_224", **MODEL))
    page = opened(browser, explain(model, page_file[1].name, "tokens", interactive=True).save(tmp_path / "x.html"))
    assert says(page) == "principal components of block 2."
    assert page.locator("#legend").is_hidden()
    page.close()


@pytest.mark.slow
def test_it_fits_a_phone(browser, page_file):
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page.goto(page_file[0].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_on_it_keeps_people_out(visit, page_file, faults, width, scheme):
    page = visit(page_file[0], width, scheme)
    page.wait_for_function("document.getElementById('say').textContent.length > 5")
    assert faults(page) == []
    page.select_option("#map", "-1")
    assert faults(page) == []
