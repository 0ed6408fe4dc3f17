import io
import json

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from helpers import redraw
from vitral import save_model
from vitral.cli.main import main
from vitral.config import Running
from vitral.errors import ImageError, InputError
from vitral.inference.predictor import Predictor
from vitral.models.merge import merged
from vitral.models.zoo import create_model
from vitral.tasks.classify import Prediction


@pytest.fixture(scope="module")
def predictor():
    model = create_model("vit_lite_conv_patch4_32", num_classes=5, seed=0)
    model.labels = ["ant", "bee", "cow", "dog", "emu"]
    return Predictor(model, batch_size=3)


@pytest.fixture
def pictures(tmp_path):
    paths = []
    for i in range(7):
        paths.append(tmp_path / f"{i}.png")
        pixels = np.random.default_rng(i).integers(0, 256, (40 + i, 50, 3), np.uint8)
        Image.fromarray(pixels).save(paths[-1])
    return paths


def test_every_form_of_an_image_gives_the_same_answer(predictor, pictures):
    image = Image.open(pictures[2]).convert("RGB")
    array = np.asarray(image)
    forms = [
        *(pictures[2], str(pictures[2]), pictures[2].read_bytes(), image, array),
        torch.from_numpy(array.copy()).permute(2, 0, 1),
    ]
    answers = [predictor.predict(form)[0] for form in forms]
    for answer in answers:
        assert answer.labels == answers[0].labels
        assert answer.probabilities == answers[0].probabilities


def test_alone_in_a_list_and_in_a_folder(predictor, pictures):
    together = predictor.predict(pictures)
    folder = predictor.predict(pictures[0].parent)
    assert [a.name for a in folder] == [str(p) for p in pictures]
    for i, path in enumerate(pictures):
        alone = predictor.predict(path)[0]
        assert alone.labels == together[i].labels == folder[i].labels
        assert alone.probabilities == pytest.approx(together[i].probabilities, abs=1e-6)


def test_probabilities_are_sorted_and_sum_to_1(predictor, pictures):
    (answer,) = predictor.predict(pictures[0], top_k=99)
    assert len(answer.labels) == 5
    assert answer.probabilities == sorted(answer.probabilities, reverse=True)
    assert sum(answer.probabilities) == pytest.approx(1)
    assert len(predictor.predict(pictures[0], top_k=2)[0].labels) == 2


@pytest.mark.parametrize(("workers", "most"), [(0, 6), (1, 9 + 1), (2, 10 + 1)])
def test_a_stream_takes_no_more_than_it_needs(predictor, pictures, workers, most):
    predictor, taken = Predictor(predictor.model, batch_size=3, workers=workers), []

    def endless():
        for i in range(10**9):
            taken.append(i)
            yield pictures[i % 7]

    stream = predictor.stream(endless())
    for _ in range(4):
        next(stream)
    assert len(taken) <= most


def test_an_unreadable_image_fails_alone(predictor, pictures):
    pictures[1].write_bytes(b"broken")
    answers = list(predictor.stream(pictures))
    assert [bool(a.error) for a in answers] == [False, True, False, False, False, False, False]
    assert "1.png is not an image" in answers[1].to_dict()["error"]
    assert answers[2].to_dict()["predictions"][0]["label"] == answers[2].labels[0]
    with pytest.raises(ImageError, match=r"1\.png is not an image"):
        predictor.predict(pictures)


@pytest.mark.parametrize("workers", [1, 2, 20])
def test_workers_change_nothing_but_the_time(predictor, pictures, workers):
    pictures[4].write_bytes(b"broken")
    paths = [*pictures, pictures[0].parent / "none.png", *pictures[:2]]
    alone = list(Predictor(predictor.model, batch_size=3, workers=0).stream(paths))
    ahead = list(Predictor(predictor.model, batch_size=3, workers=workers).stream(paths))
    assert ahead == alone
    assert [bool(a.error) for a in ahead] == [i in (4, 7) for i in range(10)]


def test_whoever_stops_early_leaves_no_thread(predictor, pictures):
    from threading import active_count

    before = active_count()
    for _ in Predictor(predictor.model, batch_size=2, workers=3).stream(pictures * 5):
        assert active_count() == before + 3
        break
    assert active_count() == before

    def interrupted():
        for _ in Predictor(predictor.model, batch_size=2, workers=3).stream(pictures * 5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert active_count() == before


def test_merging_is_an_option(predictor, pictures):
    plain, some = predictor.predict(pictures), Predictor(predictor.model, merge=3)
    x = torch.stack([some.inputs.normal(some.prepare(p)[None])[0] for p in pictures])
    with torch.no_grad():
        torch.testing.assert_close(some.outputs(x), merged(predictor.model, 3)(x))
    assert some.predict(pictures)[0].probabilities != plain[0].probabilities
    assert some.embed(pictures).shape == predictor.embed(pictures).shape


def test_embeddings_and_logits_are_the_models(predictor, pictures):
    from vitral.data.transforms import normalize

    x = normalize(torch.stack([predictor.prepare(p) for p in pictures]), predictor.preprocess)
    with torch.no_grad():
        torch.testing.assert_close(predictor.outputs(x), predictor.model(x))
        torch.testing.assert_close(predictor.embed(pictures), predictor.model.embed(x))


@pytest.mark.parametrize(
    "bad", [np.zeros((4, 4, 3)), np.zeros((4, 4, 7), np.uint8), torch.zeros(2, 3, 4, 4, dtype=torch.uint8)]
)
def test_arrays_of_another_kind_are_errors(predictor, bad):
    with pytest.raises(InputError, match="an image array must be uint8"):
        predictor.prepare(bad)


def test_an_empty_folder_is_an_error(predictor, tmp_path):
    with pytest.raises(ImageError, match="has no images in it"):
        predictor.predict(tmp_path)


def test_a_grey_model_takes_colour_pictures():
    grey = Predictor(create_model("vit_nano_patch2_8", seed=0))
    buffer = io.BytesIO()
    Image.new("RGB", (30, 20), "red").save(buffer, "PNG")
    assert isinstance(grey.predict(buffer.getvalue())[0], Prediction)
    assert grey.prepare(buffer.getvalue()).shape == (1, 8, 8)


def test_the_command_line_merges_and_reads_ahead(predictor, pictures, tmp_path, capsys):
    save_model(predictor.model, tmp_path / "run", "vitral")
    folder = str(pictures[0].parent)
    told = {}
    for options in ([], ["--workers", "0", "--batch-size", "2"], ["--merge", "3"], ["--merge", "0.4"]):
        assert main(["predict", str(tmp_path / "run"), *map(str, pictures), "--json", *options]) in (0, None)
        told[" ".join(options)] = json.loads(capsys.readouterr().out)
    top = {key: [a["predictions"][0]["probability"] for a in answers] for key, answers in told.items()}
    assert top["--workers 0 --batch-size 2"] == pytest.approx(top[""], abs=1e-5)
    merging = Predictor(predictor.model, merge=3).predict(folder)
    assert top["--merge 3"] == pytest.approx([a.probabilities[0] for a in merging], abs=1e-3)
    assert top["--merge 0.4"] != pytest.approx(top[""], abs=1e-6)
    for options, wrong in ((["--merge", "2.5"], "merge must be a whole number"), (["--workers", "-1"], "workers must")):
        assert main(["predict", str(tmp_path / "run"), folder, *options]) == 2
        assert wrong in capsys.readouterr().err


def test_evaluation_merges_too(tmp_path, capsys):
    model = redraw(create_model("vit_nano_patch2_8", num_classes=10, seed=0))
    model.labels = [str(i) for i in range(10)]
    save_model(model, tmp_path / "run", "vitral")
    plain = vitral.evaluate(tmp_path / "run", "digits")
    slow = vitral.evaluate(tmp_path / "run", "digits", running=Running(workers=0, batch_size=7))
    assert slow["loss"] == pytest.approx(plain["loss"], abs=1e-5)
    assert main(["eval", str(tmp_path / "run"), "digits", "--merge", "2", "--json"]) in (0, None)
    assert abs(json.loads(capsys.readouterr().out)["loss"] - plain["loss"]) > 1e-4
    assert main(["eval", str(tmp_path / "run"), "digits", "--merge", "2", "--probe", "knn"]) == 2
    assert "omit them with --probe" in capsys.readouterr().err


def test_a_batch_made_ready_one_by_one_is_answered_as_a_whole(predictor, pictures):
    ready = [predictor.ready(path, f"picture {i}") for i, path in enumerate(pictures)]
    answers = list(predictor.answer(ready, top_k=2))
    assert [answer.name for answer in answers] == [f"picture {i}" for i in range(len(pictures))]
    for answer, expected in zip(answers, predictor.predict(pictures, top_k=2), strict=True):
        assert answer.labels == expected.labels
        assert answer.probabilities == pytest.approx(expected.probabilities, abs=1e-6)
    assert torch.allclose(predictor.vectors([one.x for one in ready]), predictor.embed(pictures), atol=1e-5)
    with pytest.raises(ImageError, match="is empty"):
        predictor.ready(b"", "nothing")
