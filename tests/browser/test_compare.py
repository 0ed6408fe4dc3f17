"""The report of a comparison in a browser: on a laptop and on a phone, with nothing fetched and nothing cut off."""

import pytest

import vitral


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    made = vitral.compare(
        "digits", models=["vit_nano_patch2_8", "vit_nano_conv_patch2_8"], fractions=[0.1, 1], seeds=1, max_steps=2,
        patch_sizes=[4], images=8, quiet=True, out=tmp_path_factory.mktemp("browser") / "compare",
    )  # fmt: skip
    return made.path / "report.html"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_is_complete(browser, report, width, scheme):
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(report.as_uri())
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert said == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll in their own box
    assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
    assert page.locator("section > svg").count() >= 12  # a chart each
    colours = page.evaluate("[...document.querySelectorAll('polyline')].map(p => getComputedStyle(p).stroke)")
    assert len(set(colours)) >= 2
    assert "none" not in colours
    page.close()
