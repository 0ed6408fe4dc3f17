import re
from html.parser import HTMLParser

import pytest

import vitral
from vitral.reporting.charts import _ticks, confusion_matrix, line_chart


class Tags(HTMLParser):
    """Checks that what is opened is closed, and notes what is loaded from elsewhere."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.outside = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.outside += [v for k, v in attrs if k in ("src", "href") and not v.startswith("data:")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    run = vitral.train(
        "digits", out=tmp_path_factory.mktemp("r") / "run", epochs=2, quiet=True, command="vitral train <x>"
    )
    return run, (run.path / "report.html").read_text()


def test_it_shows_what_the_model_looks_at(page):
    _, text = page
    section = text[text.index("What it looks at") : text.index("Most confident mistakes")]
    assert section.count("<figure>") == 8
    assert section.count("data:image/png;base64,") == 8


def test_it_is_whole_and_needs_nothing_else(page):
    tags = Tags()
    tags.feed(page[1])
    assert tags.open == []
    assert tags.outside == []
    assert "script" not in tags.seen
    assert "http" not in page[1].replace("http-equiv", "")
    assert tags.seen.count("svg") == 5


def test_it_says_what_the_run_measured(page):
    run, text = page
    for part in ("val", "test"):
        assert f"{100 * run.metrics[part]['accuracy']:.2f} %" in text
    mistakes = min(16, round(360 * (1 - run.metrics["test"]["accuracy"])))
    assert text[text.index("Most confident mistakes") :].count("<figure>") == mistakes
    assert "154,666" in text
    assert "vitral train &lt;x&gt;" in text
    assert "prefers-color-scheme: dark" in text


def test_confusions_of_many_classes_are_listed():
    counts = [[0] * 40 for _ in range(40)]
    counts[3][5] = 7
    text = confusion_matrix(counts, [f"<{i}>" for i in range(40)])
    assert "&lt;3&gt; said to be &lt;5&gt;</td><td>7" in text


def test_lines_stay_inside_their_chart():
    text = line_chart({"a": [(0, 5.0), (3, float("nan")), (9, 80.0)]}, "epoch")
    (points,) = re.findall(r'points="([^"]+)"', text)
    for point in points.split():
        x, y = map(float, point.split(","))
        assert 0 <= x <= 460
        assert 0 <= y <= 240
    assert line_chart({"a": []}, "epoch") == "<p>Nothing was logged.</p>"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.2, 2.4), (-3, 97), (1e-6, 2e-6)])
def test_ticks_are_round_and_inside(low, high):
    ticks = _ticks(low, high)
    assert 2 <= len(ticks) <= 6
    assert all(low - 1e-9 <= t <= high + 1e-9 for t in ticks)
