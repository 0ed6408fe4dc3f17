"""The server's page in a browser: a picture in, an answer out, and what the model looks at; laptop and phone."""

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from process import serving
from small_server import KEY, picture, train_runs

import vitral
from helpers import redraw
from tiny import LABELS, MODELS
from vitral.config import ViTConfig
from vitral.data.sources.coco import mask_to_rle
from vitral.explanation.placement import place
from vitral.models.vit import VisionTransformer

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

PIXELS = """points => {
  const shown = document.getElementById("canvas"), copy = document.createElement("canvas");
  [copy.width, copy.height] = [shown.width, shown.height];
  const pen = copy.getContext("2d", { willReadFrequently: true });
  pen.drawImage(shown, 0, 0);
  const at = (part, size) => Math.floor(part * size);
  return points.map(([x, y]) => [...pen.getImageData(at(x, copy.width), at(y, copy.height), 1, 1).data].slice(0, 3));
}"""
HAND_OVER = """([kind, bytes]) => {
  const data = new DataTransfer(), stage = document.getElementById("stage");
  data.items.add(new File([new Uint8Array(bytes)], "a.png", { type: "image/png" }));
  const more = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
  stage.dispatchEvent(kind === "paste" ? new ClipboardEvent(kind, more) : new DragEvent(kind, more));
  return stage.classList.contains("over");
}"""
PRESS = """keys => {
  for (const key of keys) document.getElementById("stage").dispatchEvent(new KeyboardEvent("keydown", { key }));
}"""
HOLD_FIRST_BITMAP = """() => {
  const real = createImageBitmap, first = new Promise(go => { window.letGo = go; });
  let asked = 0;
  const late = item => first.then(() => real(item)).finally(() => { window.there = true; });
  window.createImageBitmap = item => asked++ ? real(item) : late(item);
}"""
COUNT_LAYERS = """() => {
  window.layers = 0;
  window.OffscreenCanvas = class extends OffscreenCanvas { constructor(...size) { super(...size); window.layers++; } };
}"""


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


def crop_on(page, made):
    """Left, top, width and height of the model's crop on the screen."""
    canvas, (left, top, right, bottom) = page.locator("#canvas").bounding_box(), made.crop
    scale = canvas["width"] / made.size[1]
    return canvas["x"] + scale * left, canvas["y"] + scale * top, scale * (right - left), scale * (bottom - top)


def test_a_planted_map_is_on_the_pixels_of_the_photograph(page, runs):
    """The canvas has the pixels of the photograph, which EXIF turns, and a planted map on the pixels of its patches."""
    upright = (np.arange(700 * 1000 * 3).reshape(700, 1000, 3) // 7 % 251).astype(np.uint8)
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(upright).transpose(Image.Transpose.ROTATE_90).save(buffer, "JPEG", exif=exif, quality=95)
    made = vitral.explain(runs["classify"], buffer.getvalue(), "rollout")
    planted = torch.arange(float(made.maps[0].numel())).view(made.grid)

    def plant(route):
        answer = route.fetch().json()
        route.fulfill(json=answer | {"maps": [planted.tolist()] * len(answer["maps"])})

    page.route("**/v1/explain", plant)
    upload(page, buffer.getvalue(), "photo.jpg")
    page.click("label:has-text('Rollout')")
    page.locator("#mapLabel").wait_for()
    page.locator("#strength").fill("100")
    placed = place(made)
    assert page.evaluate("[canvas.width, canvas.height]") == [1000, 700] == [placed.size[1], placed.size[0]]
    data = page.evaluate("canvas.toDataURL('image/png')").partition(",")[2]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")).astype(int)
    seen = np.ones(shown.shape[:2], bool)
    if placed.cropped:  # the outline covers the edges of the crop
        left, top, right, bottom = (round(edge) for edge in placed.crop)
        for edge in (left, right):
            seen[:, max(0, edge - 6) : edge + 6] = False
        for edge in (top, bottom):
            seen[max(0, edge - 6) : edge + 6] = False
    assert np.abs(shown - placed.blend(planted, "patches", 1.0))[seen & placed.inside().numpy()].max() == 0
    assert np.abs(shown - placed.blend(planted, "patches", 1.0))[seen].max() <= 4  # two decoders of JPEG
    page.unroute("**/v1/explain")


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
    assert box["width"] == pytest.approx(box["height"] * 52 / 40, abs=1)  # of the picture; the input has 8 x 8 pixels
    for at in (0.03, 0.97):
        page.mouse.move(box["x"] + at * box["width"], box["y"] + at * box["height"])
        n = 1 if at < 0.5 else 4
        assert page.inner_text("#say").startswith(f"The patch in row {n}, column {n} looks")
        frame = page.locator("#frame").bounding_box()
        assert frame["x"] == pytest.approx(box["x"] + (n - 1) * box["width"] / 4, abs=1)
    page.close()


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """A server of models that are no ViTs, that write, that have no classes, or very many patches."""
    folder = tmp_path_factory.mktemp("others")
    train_runs(folder, ["caption"])
    for name, model in (("swin", "swin"), ("cnn", "cnn"), ("headless", "embed")):
        made = redraw(MODELS[model]())
        made.labels = LABELS if name in ("swin", "cnn") else None
        vitral.save_model(made, folder / name, layout="vitral")
    fine = ViTConfig(img_size=128, patch_size=4, num_classes=5, embed_dim=16, depth=4, num_heads=4)
    vitral.save_model(redraw(VisionTransformer(fine)), folder / "fine", layout="vitral")
    with serving(*(folder / name for name in ("swin", "cnn", "headless", "fine", "caption"))) as (url, _, _):
        yield url, folder


@pytest.mark.parametrize(
    ("model", "all_look", "grid", "patch"),
    [("swin", "All patches together look", (8, 8), (5, 11)), ("fine", "[CLS] looks", (32, 32), (10, 22))],
)
def test_what_is_too_much_or_in_windows_is_asked_for_block_by_block(browser, others, model, all_look, grid, patch):
    url, folder = others
    page, data = opened(browser, url), picture(7)
    upload(page, data, model=model)
    say = page.locator("#say")

    def expect(**asked):
        made = vitral.explain(folder / model, data, **asked)
        best, columns = int(made.maps[0].argmax()), made.grid[1]
        who = "The patch in" if "patch" in asked else all_look
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
    (left, top, width, height), (rows, columns) = crop_on(page, made), made.grid
    assert (rows, columns) == grid
    page.mouse.click(left + width * 2.5 / columns, top + height * 5.5 / rows)
    page.locator("#say:has-text('The patch in row 6, column 3')").wait_for()
    expect(layer=1, patch=patch)
    page.select_option("#map", "2")
    assert "head 0" in say.inner_text()
    page.click("#cls")
    page.locator(f"#say:has-text('{all_look}')").wait_for()
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
    page.locator("#timing:has-text('model')").wait_for()
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
    assert page.inner_text("#error").startswith("notes.txt is not an image of a known format")
    assert page.get_attribute("#error", "role") == "alert"
    assert page.locator("#empty").is_visible()
    assert page.locator("#busy").is_hidden()
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


def grey(height, width, shade=96):
    Image.new("RGB", (width, height), (shade,) * 3).save(buffer := io.BytesIO(), "PNG")
    return buffer.getvalue()


def answer_with(page, **content):
    """Let the next predictions be this; the labels of the model, and the colours of classes."""
    told = {"model": "m", "timing": {"read_ms": 1, "wait_ms": 0, "run_ms": 2, "batch": 1}, "note": None, **content}
    page.unroute("**/v1/predict")
    page.route("**/v1/predict", lambda route: route.fulfill(json=told))
    known = page.request.get(f"{page.url}v1/models").json()["models"]
    colours = page.request.get(f"{page.url}page/colours.json").json()["classes"]
    return next(m["labels"] for m in known if m["name"] == content["task"]), colours


def test_a_picture_that_is_opened_late_does_not_take_the_place_of_the_next(page):
    page.evaluate(HOLD_FIRST_BITMAP)
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": grey(40, 40, shade=200)})
    upload(page, grey(40, 40, shade=50))
    page.evaluate("letGo()")
    page.wait_for_function("window.there")
    page.check("#views input[value=picture]")
    assert page.evaluate(PIXELS, [(0.5, 0.5)]) == [[50] * 3]


def test_boxes_are_where_the_answer_has_them(page):
    H, W, (x0, y0, x1, y1) = 60, 90, (20, 30, 70, 50)
    points = [
        (x0 / W, 40 / H),
        (x1 / W, 40 / H),
        (45 / W, y1 / H),
        (45 / W, 40 / H),
        (10 / W, 40 / H),
        (80 / W, 55 / H),
    ]
    labels, colours = answer_with(page, task="detect", size=[H, W], objects=[])
    upload(page, grey(H, W), model="detect")
    assert page.evaluate(PIXELS, points) == [[96] * 3] * 6
    thing = {"label": labels[4], "score": 0.5, "box": [x0, y0, x1, y1]}
    answer_with(page, task="detect", size=[H, W], objects=[thing])
    upload(page, grey(H, W), model="detect")
    assert page.evaluate(PIXELS, points) == [colours[4]] * 3 + [[96] * 3] * 3


@pytest.mark.parametrize(("size", "canvas"), [((40, 56), (672, 480)), ((1330, 2100), (1600, 1013))])
def test_masks_are_where_the_answer_has_them_and_are_painted_once(page, size, canvas):
    H, W = size
    mask = torch.zeros(2, H, W, dtype=torch.bool)
    mask[0, H // 4 : H // 2, W // 8 : W // 2] = True  # rows and columns differ, and so do the two classes
    mask[1, H // 2 :, W // 2 : -W // 8] = True
    points = [
        (0.3, 0.4),
        (0.15, 0.3),
        (0.45, 0.45),
        (0.6, 0.8),
        (0.85, 0.97),
        (0.3, 0.2),
        (0.3, 0.6),
        (0.6, 0.4),
        (0.95, 0.8),
    ]
    labels, colours = answer_with(page, task="segment", size=[H, W], classes=[])
    upload(page, grey(H, W), model="segment")
    assert page.evaluate(PIXELS, points) == [[96] * 3] * 9
    classes = [
        {"label": labels[n], "pixels": int(each.sum()), "share": 0.2, "rle": mask_to_rle(each)}
        for n, each in zip((3, 5), mask, strict=True)
    ]
    answer_with(page, task="segment", size=[H, W], classes=classes)
    page.evaluate(COUNT_LAYERS)
    upload(page, grey(H, W), model="segment")
    assert page.evaluate("[canvas.width, canvas.height]") == list(canvas)
    for width in (1100, 700):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function(f"innerWidth === {width}")
        assert page.evaluate("layers") == 1
        blend = [[round((96 * 127 + c * 128) / 255) for c in colours[n - 1]] for n in (3, 3, 3, 5, 5)]
        for got, wanted in zip(page.evaluate(PIXELS, points), blend + [[96] * 3] * 4, strict=True):
            assert got == pytest.approx(wanted, abs=2)
    (edge,) = page.evaluate(PIXELS, [(W // 8 / W + 1.2 / canvas[0], 0.4)])
    assert edge == [255] * 3


def test_samples_and_share(page):
    page.click("#samples button[title=window]")
    page.locator("#timing:not(:empty)").wait_for()
    with page.expect_download() as saved:
        page.click("#share")
    assert saved.value.suggested_filename == "vitral.png"
    assert Path(saved.value.path()).read_bytes().startswith(b"\x89PNG")


def test_pictures_are_pasted_and_dropped(page, runs):
    predictor = vitral.Predictor(runs["classify"])
    for seed, kind in ((5, "paste"), (8, "drop")):
        data = picture(seed)
        if kind == "drop":
            assert page.evaluate(HAND_OVER, ["dragover", []])
        assert not page.evaluate(HAND_OVER, [kind, list(data)])
        (expected,) = predictor.predict(data)
        likeliest = f"{100 * expected.probabilities[0]:.1f} %"
        page.locator(f"#answer li:first-child:has-text('{expected.labels[0]}'):has-text('{likeliest}')").wait_for()


def test_a_view_that_is_no_longer_wanted_does_not_come_back(page):
    upload(page, picture(4))
    held = []
    page.route("**/v1/explain", lambda route: held.append(route))
    again = {"name": "a.png", "mimeType": "image/png", "buffer": picture(5)}
    for view, ask in (
        ("Rollout", lambda: page.check("#views input[value=rollout]")),
        ("Attention", lambda: [page.check("#views input[value=attention]"), page.set_input_files("#file", again)]),
    ):
        with page.expect_request("**/v1/explain"):
            ask()
        page.locator(f"#busyWords:text-is('Computing: {view}')").wait_for()
        with page.expect_event("requestfailed") as left:
            page.check("#views input[value=picture]")
        assert left.value.url.endswith("/v1/explain")
        held.pop().continue_()
        page.locator("#busy").wait_for(state="hidden")
        assert page.is_checked("#views input[value=picture]")
        assert page.locator("#lookCard").is_hidden()
        assert page.locator("#error").is_hidden()
    page.unroute("**/v1/explain")
    page.check("#views input[value=attention]")
    page.locator("#say:has-text('[CLS]')").wait_for()
    assert page.is_checked("#views input[value=attention]")


def test_a_view_that_cannot_be_made_leaves_the_last(browser, address):
    page = opened(browser, address)
    upload(page, picture(4))
    page.route("**/v1/explain", lambda route: route.fulfill(status=503, json={"error": {"message": "too busy."}}))
    page.click("#views input[value=rollout]")
    page.locator("#error:has-text('too busy.')").wait_for()
    assert page.is_checked("#views input[value=attention]")
    assert page.locator("#say:has-text('[CLS]')").is_visible()
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_the_blocks_are_played(browser, address, width):
    page = opened(browser, address, width)
    page.clock.install(time=0)
    upload(page, picture(4))
    page.clock.pause_at(3_600_000)
    page.click("#play")
    assert page.inner_text("#play") == "Stop"
    for block in (0, 1, 2, 3, 0):
        page.clock.run_for(700)
        assert f"block {block}," in page.inner_text("#say")
        assert page.input_value("#layer") == str(block)
    page.click("#play")
    page.clock.run_for(7000)
    assert "block 0," in page.inner_text("#say")
    assert page.inner_text("#play") == "Play blocks"
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.said == []
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_patches_are_asked_one_by_one(browser, others, faults, width):
    page = opened(browser, others[0], width)
    upload(page, picture(7), model="fine")
    asked = [url for url in page.asked if url.endswith("/v1/explain")]
    page.evaluate(PRESS, ["[", "[", "ArrowRight", "Enter"])  # of keys in a row the last is asked
    page.locator("#say:has-text('The patch in row 17, column 18'):has-text('block 1, ')").wait_for()
    assert len([url for url in page.asked if url.endswith("/v1/explain")]) == len(asked) + 1
    held = []
    page.route("**/v1/explain", lambda route: held.append(route))
    canvas, made = page.locator("#canvas").bounding_box(), vitral.explain(others[1] / "fine", picture(7))
    left, top, side, _ = crop_on(page, made)
    x, y, cell = left - canvas["x"], top - canvas["y"], side / 32
    page.click("#canvas", position={"x": x + cell / 2, "y": y + cell / 2})
    page.locator("#busyWords:text-is('Computing: Attention')").wait_for()
    assert "The patch in row 17, column 18 looks" in page.inner_text("#say")  # until the answer is there
    page.hover("#canvas", position={"x": x + 4.5 * cell, "y": y + cell / 2})
    pointed, marked = page.locator("#frame").bounding_box(), page.locator("#asked").bounding_box()
    pill = page.locator("#busy").bounding_box()
    assert (marked["x"], marked["width"]) == pytest.approx((left, cell), abs=1)
    assert (pointed["x"], pointed["y"]) == pytest.approx((left + 4 * cell, top), abs=1)
    assert pill["x"] >= 0
    assert pill["x"] + pill["width"] <= width
    assert faults(page) == []
    held[0].continue_()
    page.locator("#say:has-text('The patch in row 1, column 1 looks')").wait_for()
    page.locator("#busy").wait_for(state="hidden")
    assert page.locator("#frame").bounding_box() == pointed
    assert page.said == []
    page.close()


@pytest.fixture(scope="module")
def indexed(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    (folder / "photos").mkdir()
    for seed in range(9):
        (folder / "photos" / f"a-rather-long-name-of-a-picture-{seed}.png").write_bytes(picture(seed))
    vitral.Index.build(runs["classify"], folder / "photos", folder / "index")
    with serving(runs["classify"], "--index", folder / "index") as (url, _, _):
        yield url


@pytest.mark.parametrize("width", [390, 1280])
def test_similar_pictures_are_shown(browser, indexed, faults, width):
    page = opened(browser, indexed, width)
    upload(page, picture(6))
    found = page.locator("#similar li")
    found.first.wait_for()
    assert found.count() == 8
    assert found.first.inner_text().split("\n")[::2] == ["a-rather-long-name-of-a-picture-6.png", "1.000"]
    assert "of 9" in page.inner_text("#similarNote")
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.evaluate("[...document.querySelectorAll('#similar p')].every(p => p.scrollWidth <= p.clientWidth)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert faults(page) == []
    assert page.said == []
    page.set_input_files("#file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"not a picture"})
    page.locator("#error").wait_for()
    page.locator("#busy").wait_for(state="hidden")
    assert page.locator("#similarCard").is_hidden()
    assert len([url for url in page.asked if url.endswith("/v1/search")]) == 1
    page.close()


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


def test_a_view_that_was_chosen_stays_for_the_next_picture_and_model(page):
    chosen = page.locator("#views input:checked")
    upload(page, picture(1))
    assert chosen.input_value() == "attention"
    page.check("#views input[value=rollout]")
    page.locator("#say:has-text('rollout')").wait_for()
    upload(page, picture(2))
    assert chosen.input_value() == "rollout"
    page.check("#views input[value=relevance]")
    page.locator("#classLabel").wait_for()
    upload(page, picture(1, (64, 64)), model="segment")  # which is not asked about classes
    assert chosen.input_value() == "picture"
    upload(page, picture(2))
    assert chosen.input_value() == "relevance"


def test_the_docs_tell_what_is_answered(page, address):
    page.goto(f"{address}/docs")
    predict = page.locator("section:has(h2:has-text('/v1/predict'))")
    predict.locator("summary").click()
    told = [table.locator("td:first-child").all_inner_texts() for table in predict.locator("table").all()]
    assert told[0] == ["image", "text", "model", "top_k"]
    assert told[1] == ["model", "timing", "note"]
    assert [fields[0] for fields in told[2:]] == ["task"] * 7
    assert told[2] == ["task", "predictions"]
    assert "list of {label, probability}" in predict.inner_text()
    explain = page.locator("section:has(h2:has-text('/v1/explain')) details")
    explain.locator("summary").click()
    assert "Rows and columns of patches." in explain.inner_text()


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


@pytest.fixture(scope="module")
def locked(runs, tmp_path_factory):
    (keys := tmp_path_factory.mktemp("locked") / "keys").write_text(f"{KEY}\n")
    with serving(runs["classify"], "--api-key-file", keys) as (url, _, _):
        yield url


def give(page, key):
    page.fill("#keyInput", key)
    page.click("#keyDialog button.primary")


def test_a_key_is_asked_for_once(browser, locked):
    page = browser.new_page()
    page.goto(locked)
    give(page, KEY)
    page.locator("#samples button >> nth=3").wait_for()
    upload(page, picture())
    page.reload()
    page.locator("#samples button >> nth=3").wait_for()
    assert page.locator("#keyDialog").is_hidden()
    page.goto(f"{locked}/docs")
    page.locator("h2:has-text('/v1/predict')").wait_for()
    page.close()


@pytest.mark.parametrize("width", [390, 1280])
def test_who_gave_no_key_can_give_one_later(browser, locked, faults, width):
    page = browser.new_page(viewport={"width": width, "height": 844})
    faulty = []
    page.on("pageerror", lambda error: faulty.append(str(error)))
    page.goto(locked)
    page.click("#keyDialog button:has-text('Cancel')")
    page.locator("#error:has-text('a key is needed')").wait_for()
    assert faults(page) == []
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": picture()})
    give(page, "another-key-0123456789")
    page.locator("#keyTitle:has-text('does not know the key')").wait_for()
    page.fill("#keyInput", KEY)
    page.keyboard.press("Escape")  # what was typed is not used
    page.locator("#keyDialog").wait_for(state="hidden")
    page.locator("#error:has-text('a key is needed')").wait_for()
    page.click("#key")
    give(page, KEY)
    page.locator("#samples button >> nth=3").wait_for()
    assert page.locator("#error").is_hidden()
    upload(page, picture())
    assert page.locator("#say").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert faulty == []
    page.close()


def test_a_picture_that_was_chosen_before_the_key_is_answered_after_it(browser, locked):
    page = browser.new_page()
    page.goto(locked)
    page.click("#keyDialog button:has-text('Cancel')")
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": picture()})
    give(page, KEY)
    page.locator("#timing:not(:empty)").wait_for()
    page.close()
