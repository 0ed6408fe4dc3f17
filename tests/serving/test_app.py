"""Every address: what it answers, that library, command line and server say the same, and what it refuses."""

import asyncio
import base64
import gc
import io
import json
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from PIL import Image
from small_server import KEY, as_form, as_json, client, differences, picture

import vitral
from vitral import serving
from vitral.cli.main import main
from vitral.config import Serving
from vitral.errors import CheckpointError, ImageError, UnreachableError, VitralError
from vitral.explanation import page
from vitral.inference.predictor import Predictor
from vitral.serving import app, thumbnails
from vitral.serving.models import Predict, Search
from vitral.serving.schema import ExplainRequest
from vitral.serving.thumbnails import MOST

IMAGES = ["classify", "regress", "multilabel", "segment", "detect"]
FORM = {"content-type": "multipart/form-data; boundary=b"}
CONTENT = {"classify": "predictions", "regress": "values", "multilabel": "probabilities", "segment": "classes",
           "detect": "objects", "translate": "texts"}  # fmt: skip


def error(response, status, code):
    """The sentence of a refusal."""
    assert response.status_code == status, response.text
    told = response.json()
    assert list(told) == ["error"]
    assert told["error"]["code"] == code
    return told["error"]["message"]


def same(a, b):
    """Equal but for the last digits; maps are told to five of them."""
    return differences(a, b, rel=1e-4) == []


@pytest.mark.parametrize("task", IMAGES)
def test_library_command_line_and_server_say_the_same(runs, served, task, tmp_path, capsys):
    kinds = [("PNG", {}), ("JPEG", {"quality": 90}), ("WEBP", {"lossless": True})]
    files = []
    for i in range(9):
        kind, options = kinds[i % 3]
        files.append(tmp_path / f"{i}.{kind.lower()}")
        files[-1].write_bytes(picture(i, (40 + 9 * i, 60 + 31 * (i % 4)), kind, **options))
    library = [a.content() for a in Predictor(runs[task]).predict(files)]
    assert main(["predict", str(runs[task]), *map(str, files), "--top-k", "5", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for i, path in enumerate(files):
        send = (as_json if i % 2 else as_form)(path.read_bytes(), model=task)
        response = served.post("/v1/predict", **send)
        assert response.status_code == 200, response.text
        told = response.json()
        assert told["model"] == told["task"] == task
        del printed[i]["image"]
        for content in (library[i], printed[i]):
            assert same(json.loads(json.dumps(content)), {k: told[k] for k in content})
        assert CONTENT[task] in library[i]


def test_texts_too(runs, served):
    text = "twenty-one"
    told = served.post("/v1/predict", json={"model": "translate", "text": text}).json()
    (answer,) = Predictor(runs["translate"]).predict(text)
    assert same(answer.content(), {"texts": told["texts"]})
    form = served.post("/v1/predict", files={"text": (None, text), "model": (None, "translate")}).json()
    assert form["texts"] == told["texts"]
    assert "reads texts; send a text" in error(
        served.post("/v1/predict", **as_form(picture(), model="translate")), 422, "bad_input"
    )
    assert "reads images; send an image" in error(
        served.post("/v1/predict", json={"model": "classify", "text": text}), 422, "bad_input"
    )
    message = error(served.post("/v1/predict", json={"model": "translate", "text": "one " * 500}), 422, "bad_input")
    with pytest.raises(VitralError) as raised:
        Predictor(runs["translate"]).predict("one " * 500)
    assert message == str(raised.value)


@pytest.mark.parametrize("task", ["classify", "segment"])
def test_embeddings_are_the_librarys(runs, served, task):
    data = picture(3)
    told = served.post("/v1/embed", **as_form(data, model=task)).json()
    expected = Predictor(runs[task]).embed(data)[0]
    assert torch.allclose(torch.tensor(told["embedding"]), expected, atol=1e-5)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"layer": 1, "head": 0, "patch": (3, 5)},
        {"method": "rollout"},
        {"method": "relevance", "target": "3"},
        {"method": "tokens", "layer": 0},
        {"method": "positions"},
    ],
)
def test_explanations_are_the_librarys(runs, served, asked):
    data = picture(5)
    expected = json.loads(json.dumps(vitral.explain(runs["classify"], data, **asked).to_dict()))
    fields = {("class" if k == "target" else k): v for k, v in asked.items()}
    form = fields | ({"patch": "3,5"} if "patch" in fields else {})
    for send in (as_json(data, model="classify", **fields), as_form(data, model="classify", **form)):
        response = served.post("/v1/explain", **send)
        assert response.status_code == 200, response.text
        told = response.json()
        assert same(expected, {k: told[k] for k in expected})
        assert set(told) == {*expected, "model", "timing"}
    rows = served.post("/v1/explain", **as_json(data, model="classify", rows=True)).json()
    assert rows["rows"]["queries"] == 17
    assert rows["image"]


@pytest.mark.parametrize("method", ["attention", "rollout"])
def test_rows_go_with_attention_if_they_are_few(runs, served, monkeypatch, method):
    ask = as_json(picture(5), model="classify", method=method, rows=True)
    config = vitral.load_model(runs["classify"]).config
    weights = config.depth * config.num_heads * 17 * 16
    monkeypatch.setattr(page, "LARGEST", weights)
    few = served.post("/v1/explain", **ask).json()
    monkeypatch.setattr(page, "LARGEST", weights - 1)
    vast = served.post("/v1/explain", **ask).json()
    assert ("rows" in few, "rows" in vast) == (method == "attention", False)
    assert few["image"] == vast["image"]
    assert few["maps"] == vast["maps"]


def test_an_option_that_a_method_does_not_take_is_called_what_the_client_calls_it(served):
    body = as_json(picture(), model="classify", **{"class": "7"})
    assert error(served.post("/v1/explain", **body), 422, "bad_input").startswith("attention does not accept class; ")


def test_what_cannot_be_explained_is_said_in_the_librarys_words(runs, served):
    data = picture()
    for asked, code in [
        ({"layer": 99}, "bad_input"), ({"method": "rollout", "layer": 1}, "bad_input"),
        ({"method": "relevance", "class": "cat"}, "unknown_name"), ({"patch": [900, 1]}, "bad_input"),
        ({"method": "relevance", "class": "²"}, "unknown_name"),
    ]:  # fmt: skip
        message = error(served.post("/v1/explain", **as_json(data, model="classify", **asked)), 422, code)
        asked = {("target" if k == "class" else k): v for k, v in asked.items()}
        with pytest.raises(VitralError) as raised:
            vitral.explain(runs["classify"], data, **asked)
        assert message == str(raised.value)
    refused = served.post("/v1/explain", **as_json(data, model="classify", method="occlusion"))
    assert "method" in error(refused, 422, "bad_field")


def test_models_health_and_metrics(served):
    told = served.get("/v1/models").json()
    assert [m["name"] for m in told["models"]] == [*IMAGES[:2], "multilabel", "segment", "detect", "translate"]
    first = told["models"][0]
    assert (first["task"], first["reads"], first["size"]) == ("classify", "image", [8, 8])
    assert first["labels"] == list("0123456789")
    assert "relevance" in first["explains"]
    assert "occlusion" not in first["explains"]
    assert "relevance" not in told["models"][4]["explains"]
    assert told["models"][5]["explains"] == []
    assert told["index"] is None
    assert served.get("/healthz").json() == {"status": "ok"}
    assert served.get("/readyz").json() == {"status": "ready"}
    served.post("/v1/predict", **as_form(picture()))
    numbers = served.get("/metrics").text
    assert 'vitral_requests_total{path="/v1/predict",status="200"}' in numbers
    assert 'vitral_batch_size_bucket{le="1.0",model="classify"}' in numbers
    assert 'vitral_taken{model="classify"} 0.0' in numbers


def test_the_first_model_is_the_default_and_an_unknown_one_is_named(served):
    assert served.post("/v1/predict", **as_form(picture())).json()["model"] == "classify"
    message = error(served.post("/v1/predict", **as_form(picture(), model="clasify")), 404, "unknown_model")
    assert message == "unknown model 'clasify'; did you mean classify?"


def test_a_bad_image_has_the_sentence_of_the_command_line(runs, served, tmp_path, capsys):
    for data in (b"", b"not an image", picture()[:60], picture(kind="JPEG")[:100], b"GIF89a" + bytes(40)):
        path = tmp_path / "image"
        path.write_bytes(data)
        assert main(["predict", str(runs["classify"]), str(path)]) == 2
        printed, last = capsys.readouterr().err.splitlines()
        assert last == "vitral: there is no answer for the image."
        printed = printed.removeprefix("warning: ")
        for send in (as_form(data), as_json(data)):
            assert error(served.post("/v1/predict", **send), 422, "bad_image") == printed.replace(str(path), "image")


@pytest.mark.parametrize(
    ("send", "status", "code", "says"),
    [
        ({"content": b"x"}, 415, "bad_content_type", "got 'no Content-Type'"),
        ({"content": b"x", "headers": {"content-type": "image/png"}}, 415, "bad_content_type", "image/png"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "bad_json", "not JSON"),
        ({"json": []}, 422, "bad_field", "the body"),
        ({"json": {}}, 422, "bad_input", "there is neither"),
        ({"json": {f"k{i}": 1 for i in range(60_000)}}, 400, "bad_json", "far more fields"),
        ({"json": {"patch": list(range(110_000))}}, 400, "bad_json", "far more fields"),
        ({"json": {f"k{i}": 1 for i in range(1000)}}, 422, "unknown_name", "unknown field 'k0'"),
        ({"json": {"text": '"' * 100_000}}, 422, "bad_input", "send an image"),
        ({"json": {"image": "", "text": "a"}}, 422, "bad_input", "not both"),
        ({"json": {"image": "%%%"}}, 422, "bad_base64", "base64"),
        ({"json": {"image": "data:image/png;base64,AAAA"}}, 422, "bad_base64", "prefix"),
        ({"json": {"image": "AAAA", "top_k": 0}}, 422, "bad_field", "or equal to 1, got 0"),
        ({"json": {"image": "AAAA", "top_k": "5"}}, 422, "bad_field", "top_k"),
        ({"json": {"image": "AAAA", "topk": 5}}, 422, "unknown_name", "unknown field 'topk'; did you mean top_k?"),
        ({"json": {"image": "AAAA", "url": "http://example.com/a.png"}}, 422, "unknown_name", "unknown field 'url'"),
        ({"files": {"image": ("a", b"x"), "topk": (None, "5")}}, 422, "unknown_name", "did you mean top_k?"),
        ({"files": {"image": ("a", b"x"), "top_k": (None, "many")}}, 422, "bad_field", "'many'"),
        ({"files": {"image": ("a", b"x"), "model": (None, b"\xff")}}, 400, "bad_form", "not UTF-8"),
        ({"files": {"file": ("a", b"\xff")}}, 422, "unknown_name", "unknown field 'file'; known: image, "),
        ({"files": [("image", ("a", b"x")), ("image", ("b", b"y"))]}, 400, "bad_form", "a name of its own"),
        ({"content": b"--b\r\n", "headers": FORM}, 400, "bad_form", "cut short"),
        ({"content": b"--b--", "headers": {"content-type": "multipart/form-data"}}, 400, "bad_form", ""),
        ({"content": b"hello", "headers": FORM}, 400, "bad_form", ""),
    ],
)  # fmt: skip
def test_a_bad_request_is_told_what_is_wrong(served, send, status, code, says):
    assert says in error(served.post("/v1/predict", **send), status, code)


def test_addresses_and_methods_that_do_not_exist(served):
    assert "/docs" in error(served.get("/v2/predict"), 404, "not_found")
    refused = served.get("/v1/predict")
    error(refused, 405, "bad_method")
    assert refused.headers["allow"] == "POST"
    error(served.get("/page/../app.py"), 404, "not_found")
    error(served.get("/page/%2e%2e/app.py"), 404, "not_found")


def test_an_error_of_ours_says_nothing_of_how_it_came_about(runs, monkeypatch, caplog):
    predictor = Predictor(runs["classify"])
    monkeypatch.setattr(predictor, "answer", lambda *_: 1 / 0)
    with client({"m": predictor}) as c:
        response = c.post("/v1/predict", **as_form(picture()))
    assert "an error of ours" in error(response, 500, "internal")
    assert "ZeroDivision" not in response.text
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "default-src 'none'" in response.headers["content-security-policy"]


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (CheckpointError("postgresql://keeper@db.internal/prod: no such table"), 500, "internal"),
        (UnreachableError("db.internal does not answer"), 503, "unreachable"),
    ],
)
def test_what_is_wrong_with_the_index_is_for_the_log(runs, tmp_path, monkeypatch, caplog, fault, status, code):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(picture())
    index, _ = vitral.Index.build(runs["classify"], tmp_path / "photos", tmp_path / "i")
    tries = []

    def search(vectors, top_k):
        tries.append(len(vectors))
        raise fault

    monkeypatch.setattr(index, "search_vectors", search)
    caplog.set_level("INFO", "vitral.serve")
    with client({"m": runs["classify"]}, index=index) as c:
        response = c.post("/v1/search", **as_form(picture()))
    assert "internal/" not in response.text
    assert "db" not in error(response, status, code)
    assert [record.args["fault"] for record in caplog.records if "fault" in record.args] == [str(fault)]
    assert tries == [1]


def test_what_cannot_be_reached_is_tried_once_for_all_of_a_batch(runs):
    def search_vectors(vectors, top_k):
        tries.append(len(vectors))
        raise UnreachableError("db.internal does not answer")

    tries, predictor = [], Predictor(runs["classify"])
    index = SimpleNamespace(predictor=predictor, search_vectors=search_vectors)
    found = Search(3).run(index, [(predictor.ready(picture(i), "image"), 3) for i in range(5)])
    assert tries == [5]
    assert [type(error) for error in found] == [UnreachableError] * 5


def test_headless_models_embed_and_say_that_they_cannot_predict():
    model = vitral.create_model("vit_nano_conv_patch2_8", num_classes=0)
    with client({"m": Predictor(model)}) as c:
        assert "no classes" in error(c.post("/v1/predict", **as_form(picture())), 422, "bad_input")
        assert len(c.post("/v1/embed", **as_form(picture())).json()["embedding"]) == model.config.embed_dim


def test_search_with_small_pictures_of_what_was_found(runs, tmp_path):
    photos = tmp_path / "photos"
    (photos / "sub").mkdir(parents=True)
    for i, name in enumerate(("a.png", "sub/b.png", "gone.png")):
        (photos / name).write_bytes(picture(i + 1, (400, 300) if i else (30, 20)))
    index, _ = vitral.Index.build(runs["classify"], photos, tmp_path / "i")
    (photos / "gone.png").unlink()
    asked = (photos / "sub" / "b.png").read_bytes()
    (expected,) = index.search(photos / "sub" / "b.png", top_k=3)
    with client({"m": runs["classify"]}, index=vitral.Index(tmp_path / "i")) as c:
        assert c.get("/v1/models").json()["index"] == 3
        told = c.post("/v1/search", **as_form(asked, top_k=3, thumbnails="true")).json()
        assert [m["name"] for m in told["matches"]] == [match.item for match in expected]
        assert [str(photos / m["name"]) for m in told["matches"]] == [match.name for match in expected]
        assert [m["score"] for m in told["matches"]] == pytest.approx([match.score for match in expected], abs=1e-5)
        assert told["matches"][0]["name"] == "sub/b.png"
        assert {m["name"]: bool(m["thumbnail"]) for m in told["matches"]} == {
            "a.png": True, "sub/b.png": True, "gone.png": False,
        }  # fmt: skip
        assert str(tmp_path) not in json.dumps(told)
        plain = c.post("/v1/search", **as_json(picture())).json()
        assert [m["thumbnail"] for m in plain["matches"]] == [None] * 3
        error(c.post("/v1/search", **as_form(b"junk")), 422, "bad_image")
        assert "unknown field 'model'" in error(
            c.post("/v1/search", **as_json(picture(), model="m")), 422, "unknown_name"
        )


def test_small_pictures_are_few_small_and_remembered(runs, tmp_path, monkeypatch):
    (photos := tmp_path / "photos").mkdir()
    for i in range(MOST + 3):
        (photos / f"{i:02}.png").write_bytes(picture(i, (30, 400 + i)))
    vitral.Index.build(runs["classify"], photos, tmp_path / "i")
    made = []
    real = thumbnails.small_picture
    monkeypatch.setattr(thumbnails, "small_picture", lambda path, *rest: made.append(path) or real(path, *rest))
    with client({"m": runs["classify"]}, index=vitral.Index(tmp_path / "i")) as c:
        ask = as_form(picture(), top_k=MOST + 3, thumbnails="true")
        first = c.post("/v1/search", **ask).json()["matches"]
        assert [bool(match["thumbnail"]) for match in first] == [True] * MOST + [False] * 3
        sizes = {Image.open(io.BytesIO(base64.b64decode(match["thumbnail"]))).size for match in first[:MOST]}
        assert {max(size) for size in sizes} == {160}
        assert sorted(made) == sorted(str(photos / match["name"]) for match in first[:MOST])
        assert c.post("/v1/search", **ask).json()["matches"] == first
        assert len(made) == MOST
        changed = photos / first[0]["name"]
        changed.write_bytes(picture(99, (300, 300)))
        again = c.post("/v1/search", **ask).json()["matches"]
        assert len(made) == MOST + 1
        assert again[0]["thumbnail"] != first[0]["thumbnail"]


def test_small_pictures_that_take_long_keep_nobody_waiting(runs, tmp_path, monkeypatch):
    (photos := tmp_path / "photos").mkdir()
    for i in range(3):
        (photos / f"{i}.png").write_bytes(picture(i))
    vitral.Index.build(runs["classify"], photos, tmp_path / "i")
    begun, end = threading.Event(), threading.Event()

    def endless(*_):
        begun.set()
        assert end.wait(60)
        raise ImageError("too late")

    monkeypatch.setattr(thumbnails, "small_picture", endless)
    with client({"m": Predictor(runs["classify"])}, index=vitral.Index(tmp_path / "i"), deadline=20) as c:
        server, asked = c.app.state.server, as_form(picture(), thumbnails="true")
        with ThreadPoolExecutor(3) as others:
            waiting = [others.submit(c.post, "/v1/search", **asked) for _ in range(3)]
            assert begun.wait(60)
            assert c.post("/v1/predict", **as_form(picture())).status_code == 200  # by readers that are free
            assert server.index.batcher.taken >= 1  # who waits for pictures still has a place
            end.set()
            assert [m["thumbnail"] for w in waiting for m in w.result().json()["matches"]] == [None] * 9
        assert server.index.batcher.taken == 0
        monkeypatch.setattr(thumbnails, "SECONDS", 0.0)
        assert [m["thumbnail"] for m in c.post("/v1/search", **asked).json()["matches"]] == [None] * 3


def test_whoever_asks_for_more_labels_goes_in_the_same_batch(runs):
    predictor = Predictor(runs["classify"])
    items = [Predict(k).prepare(predictor, picture(k)) for k in (2, 7, 3)]
    assert Predict(2) == Predict(7)
    answers = Predict(2).run(predictor, items)
    assert [len(answer.labels) for answer in answers] == [2, 7, 3]
    for answer, k in zip(answers, (2, 7, 3), strict=True):
        (alone,) = predictor.predict(picture(k), k)
        assert answer.labels == alone.labels
        assert answer.probabilities == pytest.approx(alone.probabilities, abs=1e-5)


def test_what_is_said_to_be_explained_can_be_asked_for(served):
    methods = set(get_args(ExplainRequest.model_fields["method"].annotation))
    told = [set(model["explains"]) for model in served.get("/v1/models").json()["models"]]
    assert any(told)
    assert all(some <= methods for some in told)


def test_without_an_index_search_says_so(served):
    assert "--index" in error(served.post("/v1/search", **as_form(picture())), 404, "no_index")


def test_pages_are_small_and_need_nothing_from_elsewhere(served):
    folder = Path(serving.__file__).parent / "page"
    files = [path.relative_to(folder).as_posix() for path in folder.rglob("*.*")]
    assert {"main.js", "index.html", "samples/digit.png"} < set(files)
    total = 0
    for name in ("/", "/docs", *(f"/page/{file}" for file in [*files, "maps.js", "colours.json"])):
        response = served.get(name)
        assert response.status_code == 200
        assert response.headers["content-security-policy"] == (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["referrer-policy"] == "no-referrer"
        total += len(response.content)
        text = response.text if not name.endswith("png") else ""
        assert "http://" not in text.replace("http://www.w3.org", "")
        assert "https://" not in text
    assert total < 200_000


def test_head_is_answered_wherever_get_is(served):
    paths = {route.path for route in served.app.routes if "GET" in route.methods}
    assert {"/", "/docs", "/openapi.json", "/healthz", "/readyz", "/metrics", "/v1/models"} < paths
    for path in (path.replace("{name:path}", "main.js") for path in sorted(paths)):
        head, get = served.head(path), served.get(path)
        assert head.status_code == get.status_code == 200, path
        assert head.content == b""
        changing = {"content-length"} if path == "/metrics" else set()
        assert {k: head.headers[k] for k in head.headers.keys() - changing} == {
            k: get.headers[k] for k in get.headers.keys() - changing
        }
    assert served.head("/page/missing.js").status_code == 404
    assert served.head("/v1/predict").status_code == 405
    assert {method for item in served.get("/openapi.json").json()["paths"].values() for method in item} == {
        "get",
        "post",
    }


def test_each_key_opens_and_nothing_else_does(runs):
    with client({"m": runs["classify"]}, keys=[KEY, "another-key-0123456789"]) as c:
        for headers in (
            {}, {"authorization": "Bearer wrong-wrong-wrong-wrong"}, {"authorization": KEY}, {"x-api-key": ""},
            {"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY}x"}, {"x-api-key": "é" * 20},
        ):  # fmt: skip
            for ask in (lambda h: c.get("/v1/models", headers=h), lambda h: c.get("/metrics", headers=h),
                        lambda h: c.post("/v1/predict", headers=h, **as_form(picture()))):  # fmt: skip
                sent = {k: v.encode() for k, v in headers.items()}
                refused = ask(sent)
                error(refused, 401, "no_key")
                assert refused.headers["www-authenticate"] == "Bearer"
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": "another-key-0123456789"}):
            assert c.get("/v1/models", headers=headers).status_code == 200
        for path in ("/", "/healthz", "/readyz", "/page/main.js", "/docs"):
            assert c.get(path).status_code == 200


def test_readers_leave_torchs_threads_to_the_model(runs):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with client({"classify": runs["classify"]}) as made:
            server = made.app.state.server
            told = [server.readers.submit(torch.get_num_threads) for _ in range(8)]
            assert {each.result() for each in told} == {1}
            assert server.models["classify"].batcher._thread.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_the_size_of_the_server_is_checked_regularly(runs, monkeypatch):
    given = threading.Event()
    monkeypatch.setattr(app, "MEMORY_SECONDS", 0.001)
    monkeypatch.setattr(app.FreedMemory, "check", lambda self: given.set())
    with client({"m": runs["classify"]}):
        for _ in range(2):  # and again
            assert given.wait(60)
            given.clear()


@pytest.mark.parametrize("fails", [False, True])
def test_a_model_has_looked_at_images_before_anybody_asks(runs, monkeypatch, caplog, fails):
    seen, predictor, before = [], Predictor(runs["classify"]), torch.get_num_threads()
    real = predictor.outputs

    def outputs(x):
        seen.append((len(x), torch.get_num_threads()))
        if fails and len(seen) == 1:
            raise RuntimeError("no such luck")
        return real(x)

    monkeypatch.setattr(predictor, "outputs", outputs)
    caplog.set_level("INFO", "vitral.serve")
    torch.set_num_threads(3)
    try:
        with client({"m": predictor}) as c:
            assert seen == ([(1, 3)] if fails else [(1, 3), (3, 3)])
            told = [record.args for record in caplog.records if record.name == "vitral.serve"]
            failed = {"event": "warm_up_failed", "model": "m", "fault": "RuntimeError: no such luck"}
            assert told == ([failed] if fails else [])
            assert c.get("/readyz").status_code == 200
            assert c.post("/v1/predict", **as_form(picture())).status_code == 200
    finally:
        torch.set_num_threads(before)


def test_what_nobody_waits_for_any_more_holds_nothing_in_the_queue(runs):
    """Uploads of clients that have left must not lie in memory, uncounted, until a reader comes to them."""

    class Upload:
        pass

    async def scenario():
        server = app.Server({"m": Predictor(runs["classify"])}, None, Serving(decoders=1))
        go = threading.Event()
        busy = asyncio.create_task(server.read(go.wait, 60))
        upload = Upload()
        held = weakref.ref(upload)
        waiting = asyncio.create_task(server.read(repr, upload))
        del upload
        await asyncio.sleep(0)
        assert held() is not None
        waiting.cancel()
        await asyncio.wait([waiting])
        del waiting
        gc.collect()
        left = held()
        go.set()
        await busy
        assert await server.read(len, "abc") == 3
        server.readers.shutdown()
        return left

    with ThreadPoolExecutor(1) as apart:  # the browser tests leave a loop running in this thread
        assert apart.submit(lambda: asyncio.run(asyncio.wait_for(scenario(), 60))).result() is None
