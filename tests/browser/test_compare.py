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
def test_it_fits_the_screen_and_is_complete(visit, report, faults, width, scheme):
    page = visit(report, width, scheme)
    assert faults(page) == []
    assert page.locator("section > svg").count() >= 12  # a chart each
    colours = page.evaluate("[...document.querySelectorAll('polyline')].map(p => getComputedStyle(p).stroke)")
    assert len(set(colours)) >= 2
    assert "none" not in colours
