"""Library, command line and server, each in its own way: the same answers for the same fifty pictures or texts."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_server import as_form, as_json, client, differences, picture, texts, train_runs

import vitral
from helpers import redraw
from vitral.data.sources.numbers_en_it import english

pytestmark = pytest.mark.slow
IMAGES = ("classify", "multilabel", "regress", "segment", "detect", "caption")
TEXTS = ("translate", "complete", "classify texts", "tag")
KINDS = (("PNG", {}), ("JPEG", {"quality": 85}), ("WEBP", {"lossless": True}))
SEVERAL = {"segment": "classes", "detect": "objects"}
"""What an answer has more than one of."""
COUNT = 50


def run_of(task, folder):
    """A run whose weights are drawn anew: barely trained ones say much the same about everything."""
    path = train_runs(folder, [task])[task]
    model = redraw(vitral.load_model(path))
    save_file({name: t.contiguous() for name, t in model.state_dict().items()}, path / "model.safetensors")
    return path


def command(*args):
    """What `vitral ... --json` prints, in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"}
    call = [sys.executable, "-m", "vitral", *map(str, args), "--json"]
    done = subprocess.run(call, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def post_all(served, path, sends):
    """Answers of the server, several at a time, so that they travel in batches."""
    with ThreadPoolExecutor(8) as clients:
        responses = list(clients.map(lambda send: served.post(path, **send), sends))
    assert [r.status_code for r in responses] == [200] * len(sends), responses[0].text
    return [r.json() for r in responses]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pictures")
    for i in range(COUNT):
        kind, options = KINDS[i % 3]
        size = (24 + 5 * (i % 7), 30 + 7 * (i % 5))
        (made / f"{i:02}.{kind.lower()}").write_bytes(picture(i, size, kind, **options))
    return made


@pytest.mark.parametrize("task", [*IMAGES, *TEXTS])
def test_predictions(task, folder, tmp_path):
    run = run_of(task, tmp_path)
    if task in IMAGES:
        given = sorted(folder.iterdir())
        printed = command("predict", run, folder)
        sends = [(as_form if i % 2 else as_json)(path.read_bytes()) for i, path in enumerate(given)]
    else:
        given = [english(37 * i) for i in range(COUNT)] if task == "translate" else texts(COUNT)
        (tmp_path / "given.txt").write_text("\n".join(given))
        printed = command("predict", run, tmp_path / "given.txt")
        sends = [{"json": {"text": text}} for text in given]
    predictor = vitral.Predictor(run)
    library = [answer.to_dict(predictor.inputs.what) for answer in predictor.predict(given)]
    assert differences(json.loads(json.dumps(library)), printed) == []
    with client({task: run}) as served:
        told = post_all(served, "/v1/predict", sends)
    for answer, expected, item in zip(told, printed, given, strict=True):
        assert expected.pop(predictor.inputs.what) == str(item)
        assert answer.pop("model") == task
        assert answer.pop("task") == predictor.task.name
        del answer["timing"]
        expected.setdefault("note", "")
    assert differences(told, printed) == []
    if task in SEVERAL:
        assert sum(len(answer[SEVERAL[task]]) for answer in printed) > COUNT
    assert len({json.dumps(answer) for answer in printed}) > COUNT // 2  # of inputs that differ


def test_embeddings_and_what_is_found_by_them(folder, tmp_path):
    run = run_of("classify", tmp_path)
    given = sorted(folder.iterdir())
    library = vitral.Predictor(run).embed(given)
    command("index", run, folder, "--out", tmp_path / "index")
    index = vitral.Index(tmp_path / "index")
    assert [item.name for item in index.items] == [path.name for path in given]
    torch.testing.assert_close(index.vectors, torch.nn.functional.normalize(library, dim=1), atol=1e-5, rtol=1e-5)
    sends = [as_form(path.read_bytes()) for path in given]
    found = index.search(given)
    printed = command("search", tmp_path / "index", folder)
    with client({"m": run}, index=index) as served:
        told = [answer["embedding"] for answer in post_all(served, "/v1/embed", sends)]
        matches = [answer["matches"] for answer in post_all(served, "/v1/search", sends)]
    torch.testing.assert_close(torch.tensor(told), library, atol=1e-5, rtol=1e-5)
    for path, few, said, answered in zip(given, found, printed, matches, strict=True):
        assert said["query"] == str(path)
        assert differences([match.to_dict() for match in few], said["matches"]) == []
        for match in answered:
            assert match.pop("thumbnail") is None
            match["name"] = str(folder / match["name"])
        assert differences(answered, said["matches"]) == []
        assert answered[0]["name"] == str(path)
