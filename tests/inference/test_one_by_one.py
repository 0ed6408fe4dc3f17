"""A large model in OpenVINO, called for one image at a time, answers as it would for all of them together."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import vitral
from helpers import difference, images
from tiny import tiny_predictor
from vitral.errors import CheckpointError
from vitral.inference import engines
from vitral.inference.engines import open_exported
from vitral.inference.export import convert_openvino
from vitral.inference.graph import WHOLE, graph_of
from vitral.inference.one_by_one import OneByOne, Requests, compile_openvino, for_one_image, work_of
from vitral.inference.timing import multiply_adds

pytest.importorskip("openvino")


@pytest.fixture
def threads():
    """A setter of torch's threads, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else [found.logits, found.boxes]


@pytest.mark.parametrize("what", ["classify", "detect", "segment mask"])
def test_every_model_answers_as_it_does_in_torch(what, tmp_path, monkeypatch, threads):
    monkeypatch.setattr(engines, "LARGE", 0)
    predictor = tiny_predictor(what)
    made = vitral.export(predictor, tmp_path / "m.xml")
    assert all(apart < 1e-4 for apart in made.differences.values())  # batches of 1 and 5
    for cores in (1, 2, 3):
        threads(cores)
        engine = open_exported(made.path)
        assert isinstance(engine._calls[WHOLE], OneByOne)
        for batch in (1, 2, 3, 7):
            x = images(batch, 3, 20, 24, seed=batch)
            with torch.inference_mode():
                for a, b in zip(tensors(engine(x)), tensors(predictor.model(x)), strict=True):
                    assert difference(a, b) < 1e-4


def called(what, made):
    """A model, and a call for it that writes down what it compiles: for how many images, how many at a time."""
    predictor = tiny_predictor(what)
    graph = graph_of(predictor.model, predictor.preprocess)

    def compile(model, streams):
        size = model.inputs[0].get_partial_shape()[0]
        made.append((str(size), streams, torch.get_num_threads()))
        return compile_openvino(model, streams)

    return predictor.model, OneByOne(convert_openvino(graph), graph.inputs, graph.outputs, compile)


def test_a_graph_is_compiled_when_it_is_needed_and_once(threads):
    threads(3)
    made = []
    model, call = called("classify", made)
    assert made == []
    for batch, more in ((1, [("1", 1, 3)]), (1, []), (2, [("?", 1, 3)]), (3, [("1", 3, 3)]), (8, []), (7, []), (2, [])):
        before = list(made)
        x = images(batch, 3, 20, 24, seed=batch)
        with torch.inference_mode():
            assert difference(call(x)[0], model(x)) < 1e-4
        assert made == before + more


def test_many_may_call_at_a_time(threads):
    threads(2)
    made = []
    model, call = called("classify", made)
    batches = [images(1 + i % 4, 3, 20, 24, seed=i) for i in range(40)]
    with torch.inference_mode():
        wanted = [model(x) for x in batches]

    def ask(x):
        torch.set_num_threads(2)  # each thread has a number of its own
        return call(x)[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(ask, batches))
    assert all(difference(a, b) < 1e-4 for a, b in zip(found, wanted, strict=True))
    assert sorted(made) == [("1", 1, 2), ("1", 2, 2)]


def test_work_is_that_which_torch_counts():
    for what in ("classify", "swin"):
        predictor = tiny_predictor(what)
        graph = graph_of(predictor.model, predictor.preprocess)
        counted = work_of(for_one_image(convert_openvino(graph)))
        assert counted == pytest.approx(multiply_adds(predictor.model, graph.shape), rel=0.02)


def test_small_models_and_free_sizes_are_called_for_all_images_together(tmp_path, monkeypatch):
    predictor = tiny_predictor("classify")
    vitral.export(predictor, tmp_path / "small.xml")
    assert isinstance(open_exported(tmp_path / "small.xml")._calls[WHOLE], Requests)
    monkeypatch.setattr(engines, "LARGE", 0)
    vitral.export(predictor, tmp_path / "free.xml", dynamic_size=True)
    assert isinstance(open_exported(tmp_path / "free.xml")._calls[WHOLE], Requests)


def test_a_file_that_cannot_be_compiled_is_said(tmp_path, monkeypatch):
    vitral.export(tiny_predictor("classify"), tmp_path / "m.xml")
    monkeypatch.setattr(engines, "LARGE", 0)
    engine = open_exported(tmp_path / "m.xml")
    monkeypatch.setattr(engines, "compile_openvino", lambda model, streams: 1 / 0)
    with pytest.raises(CheckpointError, match=r"m\.xml cannot be read; it is damaged"):
        engine(images(1, 3, 20, 24))
