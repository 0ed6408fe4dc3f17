import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from helpers import redraw
from vitral.data.sources.open import open_data
from vitral.explanation.placement import place
from vitral.reporting.charts import _ticks, confusion_matrix, line_chart
from vitral.reporting.sections import Evaluated, _looks
from vitral.tasks.classify import Classify


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
    section = text[text.index("What it looks at") : text.index("Is that true to the model?")]
    assert section.count("<figure>") == 8
    assert section.count("data:image/png;base64,") == 8


def test_it_is_whole_and_needs_nothing_else(page):
    tags = Tags()
    tags.feed(page[1])
    assert tags.open == []
    assert tags.outside == []
    assert "script" not in tags.seen
    assert "http" not in page[1].replace("http-equiv", "")
    assert tags.seen.count("svg") == 6


def test_it_says_what_the_run_measured(page):
    run, text = page
    for part in ("val", "test"):
        assert f"{100 * run.metrics[part]['accuracy']:.2f} %" in text
    mistakes = min(16, round(360 * (1 - run.metrics["test"]["accuracy"])))
    section = text[text.index("Most confident mistakes") : text.index("What it looks at")]
    assert section.count("<figure>") == mistakes
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


def test_maps_are_drawn_on_photographs_at_a_readable_size(tmp_path):
    """A model of 32 pixels and photographs of 900: the report shows these, with the crop of the model outlined."""
    model = redraw(
        vitral.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=1, num_heads=2, num_classes=2)
    )
    model.labels = ["ant", "bee"]
    vitral.save_model(model, tmp_path / "run", "vitral")
    pixels = np.random.default_rng(0).integers(0, 256, (600, 900, 3), np.uint8)
    for name in model.labels:
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.fromarray(pixels).resize((450, 300)).resize((900, 600)).save(tmp_path / "data" / name / "x.png")
    evaluation = {"test.indices": torch.tensor([0, 1]), "test.targets": torch.tensor([0, 1])}
    section = _looks(
        Evaluated(tmp_path / "run", Classify(model.labels), {}, evaluation, open_data(tmp_path / "data"), "test")
    )
    pictures = re.findall(r'<figure class=photo><img src="data:image/jpeg;base64,([^"]+)"', section)
    assert len(pictures) == 2
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(pictures[0])))).astype(int)
    made = vitral.explain(model, tmp_path / "data" / "ant" / "x.png", "relevance")
    placed = place(made, 448)
    assert shown.shape[:2] == placed.size == (299, 448)
    assert np.abs(shown - np.asarray(placed.outlined(placed.blend(made.maps[0], "patches")))).mean() < 6
    left = round(placed.crop[0])
    assert shown[100:200, left].mean() > 230  # white
    assert shown[100:200, left - 1].mean() < 40  # next to black
    assert len(section) < 400_000
