"""Every promise in SECURITY.md names a test that exists."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_promise_is_held_by_a_test():
    promises = re.findall(r"^\| (.+?) \| `(tests/\S+?)::(test_\w+)` \|$", PAGE, re.MULTILINE)
    assert len(promises) > 15
    assert len(promises) == PAGE.count("\n| ") - 1  # every row of the table but its head
    for promise, file, test in promises:
        assert re.search(rf"def {test}\(", (ROOT / file).read_text()), promise


def test_the_page_says_what_is_supported_how_to_report_and_what_is_trusted():
    for title in ("Supported versions", "Report a vulnerability", "Threat model", "Promises"):
        assert f"## {title}" in PAGE
    for word in ("**Images**", "**Weights**", "**Run directories.**", "**Requests to the server**"):
        assert word in PAGE
