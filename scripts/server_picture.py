"""A picture of the server's page: `python scripts/server_picture.py SOURCE IMAGE docs/images/server.png`.

Serves the model on a free port of this machine, gives the page the image in a browser, and keeps what it shows. Needs
chromium and playwright.
"""

import shutil
import subprocess
import sys

from playwright.sync_api import sync_playwright


def main() -> None:
    """Run the command."""
    source, image, out = sys.argv[1:4]
    command = [sys.executable, "-m", "vitral", "serve", source, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().rsplit(": ", 1)[1].strip()
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
                page = browser.new_page(viewport={"width": 1200, "height": 860})
                page.goto(url)
                page.locator("#samples button >> nth=0").wait_for()
                page.set_input_files("#file", image)
                page.locator("#lookCard").wait_for()
                page.locator("#busy").wait_for(state="hidden")
                page.screenshot(path=out)
                browser.close()
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
