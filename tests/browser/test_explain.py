"""The page of an explanation in a browser: mouse, keys and buttons, offline, on a laptop and on a phone."""

import pytest
from PIL import Image

from helpers import redraw
from vitral import create_model, explain

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
    """Row and column, from 1, that the mean of heads looks at most; scaled rows as the page has them."""
    best = int(rows[layer].float().mean(0)[query].argmax())
    return f"row {best // 6 + 1}, column {best % 6 + 1}"


@pytest.mark.slow
def test_hovering_a_patch_shows_where_it_looks(page, page_file):
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 3.5 / 6, box["y"] + box["height"] * 1.5 / 4)
    expected = looks_most(page_file[1].rows, 2, 1 + 6 + 3)
    assert says(page) == f"The patch in row 2, column 4, layer 2, mean of heads: looks most at {expected}."


@pytest.mark.slow
def test_keys(page, page_file):
    page.keyboard.press("c")
    assert says(page) == f"[CLS], layer 2, mean of heads: looks most at {looks_most(page_file[1].rows, 2, 0)}."
    page.keyboard.press("[")
    assert "layer 1" in says(page)
    page.keyboard.press("h")
    assert "head 0" in says(page)
    page.keyboard.press("ArrowRight")
    assert "row 3, column 2, layer 1" in says(page)
    page.keyboard.press("o")
    assert page.inner_text("#show") == "Show overlay"


@pytest.mark.slow
def test_buttons_and_sliders(page):
    assert says(page).startswith("gradient x attention: most at")
    page.click("#other")
    assert says(page).startswith("[CLS], layer 2")
    page.locator("#layer").fill("0")
    assert "layer 0" in says(page)
    page.select_option("#head", "1")
    assert "head 1" in says(page)
    page.click("#play")
    page.wait_for_function("document.getElementById('say').textContent.includes('layer 1')")
    page.click("#play")


@pytest.mark.slow
def test_it_fits_a_phone(browser, page_file):
    page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page.goto(page_file[0].as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()
