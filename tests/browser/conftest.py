"""A real browser: Debian's chromium, or whichever the system has."""

import shutil

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def visit(browser):
    """Open a page as it must be: nothing is fetched, nothing goes wrong, nothing is cut off."""
    opened = []

    def open_page(path, width, scheme):
        page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        opened.append(page)
        asked, said = [], []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(path.as_uri())
        assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
        assert said == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll in their own box
        assert page.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        return page

    yield open_page
    for page in opened:
        page.close()


@pytest.fixture(scope="session")
def faults():
    """What keeps people out of a page as it is now, by axe-core: all that it calls serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    def find(page):
        found = Axe().run(page).response["violations"]
        return [
            f"{fault['id']}, {fault['impact']}: {node['target']}: {node['failureSummary']}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]

    return find
