"""The server's page in a browser: a picture in, an answer out, and what the model looks at; laptop and phone."""

from pathlib import Path

import pytest
from process import serving
from small_server import picture, train_runs

import vitral
from helpers import redraw
from tiny import LABELS, MODELS

pytestmark = pytest.mark.slow
NAMELESS = """[...document.querySelectorAll("button, input, select, textarea, a, img, canvas, [role=img]")]
  .filter(e => e.checkVisibility() && !(e.ariaLabel || e.labels?.length || e.textContent.trim() || e.title ||
    e.closest("[role=img], [aria-hidden]") || e.hasAttribute("alt")))
  .map(e => e.outerHTML.slice(0, 80))"""
CONTRASTS = """(() => {
  const part = v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const parts = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => part(v / 255));
  const light = c => { const [r, g, b] = parts(c); return .2126 * r + .7152 * g + .0722 * b; };
  const clear = c => /, 0\\)$|transparent/.test(c);
  const ground = e => { while (e && clear(getComputedStyle(e).backgroundColor)) e = e.parentElement;
    return e ? getComputedStyle(e).backgroundColor : "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("p, span, label, button, h2, a, output, summary")]
    .filter(e => e.checkVisibility() && e.textContent.trim())
    .map(e => { const a = light(getComputedStyle(e).color), b = light(ground(e));
      return (Math.max(a, b) + .05) / (Math.min(a, b) + .05); });
})()"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return train_runs(tmp_path_factory.mktemp("page"), ("classify", "segment", "detect", "translate"))


@pytest.fixture(scope="module")
def address(runs):
    with serving(*runs.values()) as (url, _, _):
        yield url


def opened(browser, address, width=1280, height=860, **options):
    page = browser.new_page(viewport={"width": width, "height": height}, **options)
    page.said, page.asked = [], []
    page.on("console", lambda message: page.said.append(message.text))
    page.on("pageerror", lambda error: page.said.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    page.goto(address)
    page.locator("#samples button >> nth=3").wait_for()
    return page


@pytest.fixture
def page(browser, address):
    page = opened(browser, address)
    yield page
    assert page.said == []
    assert [url for url in page.asked if not url.startswith((address, "data:", "blob:"))] == []
    page.close()


def upload(page, data, name="picture.png", model="classify"):
    if page.input_value("#model") != model:
        page.select_option("#model", model)
    page.set_input_files("#file", {"name": name, "mimeType": "image/png", "buffer": data})
    page.locator("#timing:not(:empty)").wait_for()
    page.locator("#busy").wait_for(state="hidden")


def looks_most(explained, layer, query):
    """Row and column, from 1, that the mean of heads looks at most."""
    rows, (_, columns) = explained.rows, explained.grid
    mean = (rows.shares[layer, :, query].double() / 255 * rows.largest[layer, :, query, None]).mean(0)
    return f"row {int(mean.argmax()) // columns + 1}, column {int(mean.argmax()) % columns + 1}"


def test_from_upload_to_prediction_to_patch_to_block(page, runs):
    data = picture(3)
    upload(page, data)
    (expected,) = vitral.Predictor(runs["classify"]).predict(data)
    names = page.locator("#answer .name span:first-child").all_inner_texts()
    assert names == expected.labels
    made = vitral.explain(runs["classify"], data, interactive=True)
    rows, columns = made.grid
    say = page.locator("#say")
    assert say.inner_text().startswith(f"[CLS] looks most at {looks_most(made, 3, 0)}: ")
    box = page.locator("#canvas").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / columns, box["y"] + box["height"] * 1.5 / rows)
    query = 1 + columns + 2
    assert say.inner_text().startswith(f"The patch in row 2, column 3 looks most at {looks_most(made, 3, query)}: ")
    assert "block 3, mean of heads" in say.inner_text()
    page.locator("#layer").fill("1")
    assert say.inner_text().startswith(f"The patch in row 2, column 3 looks most at {looks_most(made, 1, query)}: ")
    assert "block 1" in say.inner_text()
    page.locator("#head").fill("0")
    assert "head 0" in say.inner_text()
    frame = page.locator("#frame").bounding_box()
    assert frame["width"] == pytest.approx(box["width"] / columns, abs=1)


def test_other_maps_and_keys(page):
    upload(page, picture(4))
    for view, title in (
        ("rollout", "rollout, mean of heads"),
        ("relevance", "gradient x attention"),
        ("gradcam", "Grad-CAM"),
    ):
        page.check(f"#views input[value={view}]")
        page.locator(f"#say:has-text('{title}: ')").wait_for()
    page.select_option("#map", "1")
    assert page.inner_text("#say").startswith("integrated gradients: ")
    page.check("#views input[value=attention]")
    page.locator("#say:has-text('[CLS]')").wait_for()
    page.focus("#stage")
    page.keyboard.press("[")
    assert "block 2" in page.inner_text("#say")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#say").startswith("The patch in row 3, column 4 ")
    page.keyboard.press("c")
    assert page.inner_text("#say").startswith("[CLS]")
    page.check("#views input[value=picture]")
    page.locator("#lookCard").wait_for(state="hidden")


@pytest.mark.parametrize("height", [620, 1000])
def test_what_is_pointed_at_is_the_patch_that_is_framed(browser, address, height):
    page = opened(browser, address, height=height)  # on a low screen the picture is narrower than its place
    upload(page, picture())
    box = page.locator("#canvas").bounding_box()
    assert box["width"] == pytest.approx(box["height"], abs=1)  # the model sees 8 x 8 pixels
    for at in (0.03, 0.97):
        page.mouse.move(box["x"] + at * box["width"], box["y"] + at * box["height"])
        n = 1 if at < 0.5 else 4
        assert page.inner_text("#say").startswith(f"The patch in row {n}, column {n} looks")
        frame = page.locator("#frame").bounding_box()
        assert frame["x"] == pytest.approx(box["x"] + (n - 1) * box["width"] / 4, abs=1)
    page.close()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A server of models that are no ViTs, that write, or that have no classes."""
    folder = tmp_path_factory.mktemp("others")
    train_runs(folder, ["caption"])
    for name, model in (("swin", "swin"), ("cnn", "cnn"), ("headless", "embed")):
        made = redraw(MODELS[model]())
        made.labels = LABELS if name in ("swin", "cnn") else None
        vitral.save_model(made, folder / name, layout="vitral")
    with serving(*(folder / name for name in ("swin", "cnn", "headless", "caption"))) as (url, _, _):
        yield url, folder


def test_a_swin_is_asked_block_by_block_and_patch_by_patch(browser, others):
    url, folder = others
    page, data = opened(browser, url), picture(7)
    upload(page, data, model="swin")
    say = page.locator("#say")

    def expect(**asked):
        made = vitral.explain(folder / "swin", data, **asked)
        best, columns = int(made.maps[0].argmax()), made.grid[1]
        who = "The patch in" if "patch" in asked else "All patches together look"
        page.locator(f"#say:has-text('most at row {best // columns + 1}, column {best % columns + 1}: ')").wait_for()
        assert say.inner_text().startswith(who)
        assert f"block {made.layer}, mean of heads" in say.inner_text()
        return made

    expect()
    page.focus("#stage")
    page.keyboard.press("[")
    expect(layer=2)
    page.focus("#stage")
    page.keyboard.press("[")
    made = expect(layer=1)
    box, (rows, columns) = page.locator("#canvas").bounding_box(), made.grid
    assert (rows, columns) == (8, 8)
    page.mouse.click(box["x"] + box["width"] * 2.5 / columns, box["y"] + box["height"] * 5.5 / rows)
    page.locator("#say:has-text('The patch in row 6, column 3')").wait_for()
    expect(layer=1, patch=(5, 11))
    page.select_option("#map", "2")
    assert "head 0" in say.inner_text()
    page.click("#cls")
    page.locator("#say:has-text('All patches together')").wait_for()
    assert page.said == []
    page.close()


def test_other_models_show_what_they_can(browser, others, faults):
    url, folder = others
    page, data = opened(browser, url), picture(7)
    upload(page, data, model="cnn")
    views = page.locator("#views input")
    assert views.evaluate_all("all => all.map(e => e.value)") == ["picture", "gradcam", "tokens"]
    page.check("#views input[value=gradcam]")
    made = vitral.explain(folder / "cnn", data, "gradcam")
    page.locator("#say:has-text('Grad-CAM: ')").wait_for()
    assert page.input_value("#class") == made.label
    other = next(label for label in LABELS if label != made.label)
    page.select_option("#class", other)
    page.locator(f"#lookNote:has-text('{other}')").wait_for()
    assert page.input_value("#class") == other
    assert faults(page) == []
    page.select_option("#model", "headless")
    page.locator("#say:has-text('[CLS] looks most at')").wait_for()
    assert "no classes" in page.inner_text("#answer")
    page.select_option("#model", "caption")
    page.locator("#answer .written").wait_for()
    page.check("#views input[value=writing]")
    page.locator("#mapLabel:has-text('Token')").wait_for()
    made = vitral.explain(folder / "caption", data, "writing")
    assert page.locator("#map option").all_inner_texts() == made.titles
    assert faults(page) == []
    assert page.said == []
    page.close()


def test_a_text_file_gets_the_servers_sentence_and_the_next_picture_an_answer(browser, address):
    page = opened(browser, address)
    page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"not a picture"})
    page.locator("#error").wait_for()
    assert page.inner_text("#error").startswith("image is not an image of a known format")
    assert page.get_attribute("#error", "role") == "alert"
    assert page.locator("#empty").is_visible()
    assert all("422" in line for line in page.said)  # what chromium says of any answer that is not 2xx
    upload(page, picture())
    assert page.locator("#error").is_hidden()
    assert page.locator("#empty").is_hidden()
    page.close()


def test_boxes_masks_and_texts(page):
    for model in ("segment", "detect"):
        upload(page, picture(1, (64, 64)), model=model)
        assert page.is_checked("#views input[value=picture]")
        assert page.locator("#canvas").is_visible()
    page.select_option("#model", "translate")
    page.fill("#text", "twenty-one")
    page.click("#texts button")
    page.locator("#answer .written").first.wait_for()


def test_samples_paste_and_share(page):
    page.click("#samples button[title=window]")
    page.locator("#timing:not(:empty)").wait_for()
    with page.expect_download() as saved:
        page.click("#share")
    assert saved.value.suggested_filename == "vitral.png"
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def test_it_is_named_for_those_who_do_not_see_it(page):
    upload(page, picture())
    nameless = page.evaluate(NAMELESS)
    assert nameless == []
    assert page.get_attribute("html", "lang") == "en"
    assert page.locator("h1").count() == 1
    assert page.get_attribute("#stage", "aria-label").startswith("Attention: ")
    assert page.get_attribute("#answer", "aria-live") == "polite"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_can_be_read(browser, address, width, scheme):
    page = opened(browser, address, width, color_scheme=scheme)
    upload(page, picture())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20
    assert min(contrasts) >= 4.5
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_on_it_keeps_people_out(browser, address, faults, width, scheme):
    page = opened(browser, address, width, color_scheme=scheme)
    assert faults(page) == []
    upload(page, picture())
    assert page.locator("#say").is_visible()
    page.click("#lookCard summary")
    assert faults(page) == []
    for view in ("gradcam", "tokens", "picture"):
        page.check(f"#views input[value={view}]")
        page.locator("#busy").wait_for(state="hidden")
        assert faults(page) == []
    for model in ("segment", "detect"):
        upload(page, picture(1, (64, 64)), model=model)
        assert faults(page) == []
    page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"not a picture"})
    page.locator("#error").wait_for()
    assert faults(page) == []
    page.select_option("#model", "translate")
    assert faults(page) == []
    page.evaluate("document.getElementById('keyDialog').showModal()")
    assert faults(page) == []
    page.goto(f"{address}/docs")
    page.locator("h2:has-text('/v1/predict')").wait_for()
    assert faults(page) == []
    page.close()


def test_on_a_phone_there_is_the_camera_and_patches_are_tapped(browser, address, faults):
    page = opened(browser, address, 393, has_touch=True, is_mobile=True)
    assert page.locator("label[for=camera]").is_visible()
    assert "Drop" not in page.inner_text("#empty")
    assert faults(page) == []
    with page.expect_file_chooser() as chosen:
        page.tap("#stage")
    chosen.value.set_files({"name": "a.png", "mimeType": "image/png", "buffer": picture()})
    page.locator("#say:has-text('[CLS]')").wait_for()
    box = page.locator("#canvas").bounding_box()
    page.touchscreen.tap(box["x"] + 0.6 * box["width"], box["y"] + 0.3 * box["height"])
    page.locator("#say:has-text('The patch in row 2, column 3 looks')").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 393
    assert faults(page) == []
    page.close()


def test_a_key_is_asked_for_once(browser, runs, tmp_path):
    (tmp_path / "keys").write_text("a-key-of-24-characters-x\n")
    with serving(runs["classify"], "--api-key-file", tmp_path / "keys") as (url, _, _):
        page = browser.new_page()
        page.goto(url)
        page.fill("#keyInput", "a-key-of-24-characters-x")
        page.click("#keyDialog button.primary")
        page.locator("#samples button >> nth=3").wait_for()
        upload(page, picture())
        page.reload()
        page.locator("#samples button >> nth=3").wait_for()
        assert page.locator("#keyDialog").is_hidden()
        page.goto(f"{url}/docs")
        page.locator("h2:has-text('/v1/predict')").wait_for()
        page.close()
