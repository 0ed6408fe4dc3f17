"""The report in a browser: on a laptop and on a phone, light and dark, with nothing fetched and nothing cut off."""

import pytest

import vitral


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    run = vitral.train("digits", out=tmp_path_factory.mktemp("browser") / "run", epochs=2, quiet=True)
    return run.path / "report.html"


def luminance(page):
    red, green, blue = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")[:3]
    return 0.299 * red + 0.587 * green + 0.114 * blue


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_is_complete(visit, report, faults, width, scheme):
    page = visit(report, width, scheme)
    assert faults(page) == []
    assert page.locator("svg").count() >= 3
    assert (luminance(page) > 128) == (scheme == "light")
