"""Results as short texts, HTML for notebooks, and pandas tables."""

import html
import io
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from helpers import redraw
from tiny import LABELS, MODELS, pictures, tiny_predictor
from vitral.comparison.compare import Comparison
from vitral.display import MOST_LINES, MOST_ROWS, html_table, short
from vitral.errors import VitralError
from vitral.retrieval.index import Index, Match, Matches, SearchResults
from vitral.tasks.base import Answers
from vitral.tasks.classify import Prediction
from vitral.tasks.detect import Objects
from vitral.tasks.metrics import grouped
from vitral.tasks.multilabel import Labels
from vitral.tasks.regress import Numbers
from vitral.tasks.segment import Mask
from vitral.tasks.tag import Tagged
from vitral.tasks.write import Written
from vitral.training.session import Run

EVIL = "<script>alert('\"&x')</script>"
ANSWERS = {
    "prediction": Prediction(EVIL, labels=[EVIL, "b"], probabilities=[0.75, 0.25]),
    "labels": Labels(EVIL, labels=[EVIL], probabilities={EVIL: 0.75, "b": 0.125}),
    "numbers": Numbers(EVIL, names=[EVIL, "b"], values=[1.5, 2.0], deviations=[0.5, 0.25]),
    "mask": Mask(EVIL, mask=np.array([[0, 1, 1], [1, 1, 1]], np.uint8), labels=["b", EVIL]),
    "objects": Objects(EVIL, labels=[EVIL], scores=[0.5], boxes=[[1.0, 2, 3, 4]], numbers=[0], size=(9, 8)),
    "written": Written(EVIL, texts=[EVIL, "b"], scores=[-0.5, -1.0], ended=[True, False]),
    "tagged": Tagged(EVIL, words=[EVIL, "b"], tags=["X", EVIL], probabilities=[0.5, 0.75]),
    "error": Prediction(EVIL, error=EVIL),
}
DISPLAYED = {
    **ANSWERS,
    "answers": Answers([ANSWERS["prediction"], ANSWERS["prediction"]]),
    "many answers": Answers([ANSWERS["prediction"]] * 9),
    "matches": Matches([Match(EVIL, 0.5, EVIL)]),
    "search": SearchResults([Matches([Match(EVIL, 0.5, EVIL)])]),
    "run": Run(Path(EVIL), {"test": {"images": 4, "accuracy": 0.5, "by_class": {EVIL: {EVIL: 1.0}}}}, None),
    "comparison": Comparison(Path(EVIL), {"verdicts": [{"sentence": EVIL}], "summary": [{"label": EVIL, EVIL: 0.5}]}),
}


class Page(HTMLParser):
    """Tags and texts of some HTML; it fails if a tag is not closed."""

    def __init__(self, source):
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.pictures, self._open = set(), [], [], []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "img":
            self.pictures.append(dict(attrs))
        else:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("what", DISPLAYED)
def test_html_escapes_text_from_outside(what):
    source = DISPLAYED[what]._repr_html_()
    assert "script" not in Page(source).tags
    assert EVIL not in source
    assert EVIL in "".join(Page(source).texts)
    assert html.escape(EVIL) in source


def test_pictures_and_their_captions_escape_the_name(tmp_path):
    folder = tmp_path / "<b onclick='x'>\"&"
    folder.mkdir()
    file = folder / "<i>.png"
    Image.fromarray(pictures(1)[0]).save(file)
    for shown in (
        Prediction(str(file), labels=["<u>"], probabilities=[1.0]),
        Matches([Match(str(file), 1.0, "<i>.png")]),
    ):
        page = Page(shown._repr_html_())
        assert not page.tags & {"b", "i", "u"}
        (picture,) = page.pictures
        assert picture["alt"] == str(file)
        assert set(picture) <= {"src", "alt", "style"}
        assert picture["src"].startswith("data:image/png;base64,")


@pytest.mark.parametrize("what", ANSWERS)
def test_the_text_of_an_answer_is_one_short_line(what):
    answer = ANSWERS[what]
    text = repr(answer)
    assert text.startswith(f"{type(answer).__name__}({EVIL!r}: ")
    assert "\n" not in text
    assert len(text) < 200
    assert short(answer.error or answer.text()) in text


@pytest.mark.parametrize(
    ("what", "columns", "first"),
    [
        ("prediction", ["label", "probability"], [EVIL, 0.75]),
        ("labels", ["label", "probability", "present"], [EVIL, 0.75, True]),
        ("numbers", ["target", "value", "deviation"], [EVIL, 1.5, 0.5]),
        ("mask", ["label", "pixels", "share"], ["b", 1, 1 / 6]),
        ("objects", ["label", "score", "x0", "y0", "x1", "y1"], [EVIL, 0.5, 1.0, 2.0, 3.0, 4.0]),
        ("written", ["rank", "written", "score", "ended"], [1, EVIL, -0.5, "yes"]),
        ("tagged", ["word", "tag", "probability"], [EVIL, "X", 0.5]),
    ],
)
def test_an_answer_is_a_table_of_plain_values(what, columns, first):
    frame = ANSWERS[what].to_pandas()
    assert list(frame.columns) == ["name", *columns]
    assert frame.iloc[0].tolist() == [EVIL, *first]
    assert len(ANSWERS[what].rows()[0]) == len(columns)
    both = Answers([ANSWERS[what], ANSWERS[what]]).to_pandas()
    assert len(both) == 2 * len(frame)


def test_numbers_of_a_table_are_numbers():
    frame = Answers([ANSWERS["prediction"]] * 2).to_pandas()
    assert frame.groupby("label")["probability"].mean().to_dict() == {EVIL: 0.75, "b": 0.25}


def test_an_answer_with_an_error_is_a_row_without_values():
    frame = Answers([ANSWERS["error"], ANSWERS["prediction"]]).to_pandas()
    assert frame["name"].tolist() == [EVIL] * 3
    assert frame["label"].isna().tolist() == [True, False, False]


def test_rows_of_a_csv_file_keep_their_format():
    assert ANSWERS["prediction"].rows()[0] == [EVIL, "0.750000"]
    assert ANSWERS["labels"].rows() == [[EVIL, "0.750000", "1"], ["b", "0.125000", "0"]]
    assert ANSWERS["numbers"].rows()[1] == ["b", "2", "0.25"]
    assert Numbers("x", names=["a"], values=[1.5]).rows() == [["a", "1.5", ""]]
    assert ANSWERS["mask"].rows()[1] == [EVIL, "5", "0.833333"]
    assert ANSWERS["objects"].rows() == [[EVIL, "0.500000", "1.00", "2.00", "3.00", "4.00"]]
    assert ANSWERS["written"].rows()[1] == ["2", "b", "-1", "no"]


def test_without_pandas_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(VitralError, match=r"to_pandas needs pandas.*pip install 'vitral\[data\]'"):
        ANSWERS["prediction"].to_pandas()


def test_a_long_table_and_a_long_list_are_cut():
    source = html_table(["n"], [[i] for i in range(MOST_ROWS + 1207)])
    assert source.count("<tr>") == MOST_ROWS + 1
    assert "1,207 more rows" in source
    text = repr(Answers([ANSWERS["prediction"]] * (MOST_LINES + 3)))
    assert text.count("Prediction(") == MOST_LINES
    assert text.endswith("... 3 more]")


def test_answers_of_a_predictor_show_their_pictures(tmp_path):
    predictor = tiny_predictor("detect")
    files = []
    for i, pixels in enumerate(pictures(2)):
        files.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(pixels).save(files[-1])
    answers = predictor.predict(files, top_k=2)
    assert isinstance(answers, list)
    assert len(Page(answers._repr_html_()).pictures) == 2
    assert set(answers.to_pandas()["name"]) == set(files)
    Path(files[0]).unlink()  # nothing to draw on
    assert len(Page(answers._repr_html_()).pictures) == 1
    Path(files[1]).write_bytes(b"no image")
    assert Page(answers._repr_html_()).pictures == []


def test_a_mask_is_not_drawn_on_a_file_that_has_changed(tmp_path):
    file = tmp_path / "a.png"
    Image.fromarray(pictures(1)[0]).save(file)
    answer = tiny_predictor("segment").predict(file)[0]
    assert len(Page(answer._repr_html_()).pictures) == 1
    Image.fromarray(pictures(2)[1]).save(file)  # of another size
    assert Page(answer._repr_html_()).pictures == []


def test_a_predictor_names_its_parts():
    predictor = tiny_predictor("classify")
    parameters = sum(p.numel() for p in predictor.model.parameters())
    model = f"VisionTransformer with {parameters:,} parameters, {predictor.inputs.size}"
    assert repr(predictor) == f"Predictor(classify (5 labels), {model}, eager engine on cpu)"
    page = "".join(Page(predictor._repr_html_()).texts)
    assert ", ".join(LABELS) in page
    predictor.labels = [EVIL] * 40
    assert "script" not in Page(predictor._repr_html_()).tags


def test_a_run_shows_its_metrics():
    by_class = {"cat": {"images": 7, "recall": 0.5}, "dog": {"images": 9, "recall": 0.25}}
    metrics = {"val": {"images": 8, "accuracy": 0.5}, "test": {"images": 16, "accuracy": 0.375, "by_class": by_class}}
    run = Run(Path("runs/pets"), metrics, None)
    assert repr(run) == "Run('runs/pets': val accuracy 0.5, test accuracy 0.375)"
    frame = run.to_pandas()
    assert list(frame.columns) == ["class", "images", "recall"]
    assert frame.set_index("class")["recall"].to_dict() == {"cat": 0.5, "dog": 0.25}
    page = "".join(Page(run._repr_html_()).texts)
    assert "runs/pets/report.html" in page
    assert "0.375" in page
    assert "dog" in page


def test_a_run_without_metrics_by_class_has_a_row_per_split():
    run = Run(Path("runs/dino"), {"val": {"loss": 2.5, "knn": 0.75, "list": [1]}}, None)
    frame = run.to_pandas()
    assert frame.to_dict("records") == [{"split": "val", "loss": 2.5, "knn": 0.75}]
    assert run._repr_html_().count("<table>") == 1
    assert repr(Run(Path("x"), {}, None)) == "Run('x': no metrics)"


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [({"by_target": {"x": {"mae": 1}}}, ("target", {"x": {"mae": 1}})), ({"loss": 1.0}, ("", {}))],
)
def test_metrics_are_grouped_by_what_their_table_names(metrics, expected):
    assert grouped(metrics) == expected


def test_an_explanation_is_a_picture():
    made = vitral.explain(tiny_predictor("classify", (16, 16)), pictures(1)[0])
    assert repr(made).startswith("Explanation(attention: block 1, from [CLS]")
    assert repr(made).endswith(f"{len(made.titles)} maps of 4x4 patches)")
    with Image.open(io.BytesIO(made._repr_png_())) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 100


def test_an_index_and_its_matches(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for i, pixels in enumerate(pictures(3)):
        Image.fromarray(pixels).save(folder / f"{i}.png")
    model = redraw(MODELS["classify"]())
    index, _ = Index.build(vitral.Predictor(model), folder, tmp_path / "index")
    assert repr(index) == f"Index({str(tmp_path / 'index')!r}: 3 images, 24 numbers each, exact search)"
    assert str(folder) in "".join(Page(index._repr_html_()).texts)
    found = index.search([folder / "1.png", folder / "2.png"], top_k=2)
    assert repr(found[0][0]) == "Match('1.png', 1.0000)"
    assert found[0][0].name == str(folder / "1.png")
    frame = found.to_pandas()
    assert list(frame.columns) == ["query", "name", "score"]
    assert frame["query"].tolist() == [0, 0, 1, 1]
    assert frame["name"].tolist() == [match.name for matches in found for match in matches]
    assert len(Page(found._repr_html_()).pictures) == 4
    assert len(Page(found[1]._repr_html_()).pictures) == 2


def test_a_comparison_shows_its_verdict():
    row = {"label": "vit", "fraction": 0.5, "accuracy": 0.75, "spread": None}
    made = Comparison(Path("runs/two"), {"verdicts": [{"sentence": "vit is best"}], "summary": [row]})
    assert repr(made) == "Comparison('runs/two': vit is best)"
    assert made.to_pandas()["accuracy"].tolist() == [0.75]
    assert "vit is best" in "".join(Page(made._repr_html_()).texts)
