"""A large model in OpenVINO, called for one image at a time, answers as it would for all of them together."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import vitral
from helpers import difference, images, tensors
from tiny import tiny_predictor
from vitral.errors import CheckpointError
from vitral.inference import engines, one_by_one
from vitral.inference.engines import open_exported
from vitral.inference.export import convert_openvino
from vitral.inference.graph import WHOLE, graph_of
from vitral.inference.one_by_one import OneByOne, Requests, compile_openvino, for_one_image, work_of
from vitral.inference.timing import multiply_adds


@pytest.mark.parametrize(
    "what", ["classify", *(pytest.param(what, marks=pytest.mark.slow) for what in ("detect", "segment mask"))]
)
def test_every_model_answers_as_it_does_in_torch(what, tmp_path, monkeypatch, threads):
    monkeypatch.setattr(one_by_one, "LARGE", 0)
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

    def compile(model, streams, threads):
        size = model.inputs[0].get_partial_shape()[0]
        made.append((str(size), streams, threads))
        return compile_openvino(model, streams, threads)

    whole = convert_openvino(graph)
    return predictor.model, OneByOne(whole, for_one_image(whole), graph.inputs, graph.outputs, compile)


@pytest.mark.slow
def test_a_graph_is_compiled_when_it_is_needed_and_once(threads):
    threads(3)
    made = []
    model, call = called("classify", made)
    assert made == []
    threads(1)  # what counts is how many there were at the beginning
    for batch, more in ((1, [("1", 1, 3)]), (1, []), (2, [("?", 1, 3)]), (3, [("1", 3, 3)]), (8, []), (7, []), (2, [])):
        before = list(made)
        x = images(batch, 3, 20, 24, seed=batch)
        with torch.inference_mode():
            assert difference(call(x)[0], model(x)) < 1e-4
        assert made == before + more


@pytest.mark.slow
def test_many_may_call_at_a_time(threads):
    threads(2)
    made = []
    model, call = called("classify", made)
    batches = [images(1 + i % 4, 3, 20, 24, seed=i) for i in range(40)]
    with torch.inference_mode():
        wanted = [model(x) for x in batches]

    with ThreadPoolExecutor(4) as pool:
        found = [outputs[0] for outputs in pool.map(call, batches)]
    assert all(difference(a, b) < 1e-4 for a, b in zip(found, wanted, strict=True))
    assert sorted(made) == [("1", 1, 2), ("1", 2, 2)]


@torch.inference_mode()
def test_a_batch_of_many_is_handed_over_part_by_part(threads, monkeypatch):
    monkeypatch.setattr(one_by_one, "IN_ORDER", 2)
    threads(2)
    model, call = called("classify", [])
    for batch in (4, 8, 9, 11):
        x = images(batch, 3, 20, 24, seed=batch)
        assert difference(call(x)[0], model(x)) < 1e-4


class Request:
    """A request that gives its input, unless that is negative, and tells whether it runs."""

    def __init__(self):
        self.running, self.waits, self.x = False, 0, None

    def start_async(self, feeds, share_inputs):
        assert not self.running
        self.running, self.x = True, feeds["x"]

    def wait(self):
        self.running, self.waits = False, self.waits + 1
        if self.x is not None and self.x[0] < 0:
            raise RuntimeError("no such luck")

    @property
    def results(self):
        assert not self.running
        return {"y": self.x}


class Model:
    """A compiled model that remembers its requests."""

    def __init__(self):
        self.requests = []

    def create_infer_request(self):
        self.requests.append(Request())
        return self.requests[-1]


def test_a_call_that_fails_ends_all_of_its_batch_and_spoils_no_other():
    model = Model()
    requests = Requests(model, ["x"], ["y"])
    calls = [[torch.tensor([float(i)])] for i in (1, -2, 3, 4)]
    with pytest.raises(RuntimeError, match="no such luck"):
        requests.each(calls)
    assert not any(request.running for request in model.requests)
    assert all(request.waits for request in model.requests)
    (y,) = requests.each([calls[0], calls[2], calls[3]])
    assert y.tolist() == [1, 3, 4]
    assert len(model.requests) == 4  # the three that were well are used again
    requests(calls[0][0])
    assert len(model.requests) == 4


@pytest.mark.slow
def test_work_is_that_which_torch_counts():
    for what in ("classify", "swin", "segment", "regress"):
        predictor = tiny_predictor(what)
        graph = graph_of(predictor.model, predictor.preprocess)
        counted = work_of(for_one_image(convert_openvino(graph)))
        assert counted == pytest.approx(multiply_adds(predictor.model, graph.shape), rel=0.02)


@pytest.mark.slow
def test_small_models_and_free_sizes_are_called_for_all_images_together(tmp_path, monkeypatch):
    predictor = tiny_predictor("classify")
    vitral.export(predictor, tmp_path / "small.xml")
    assert isinstance(open_exported(tmp_path / "small.xml")._calls[WHOLE], Requests)
    monkeypatch.setattr(one_by_one, "LARGE", 0)
    vitral.export(predictor, tmp_path / "free.xml", dynamic_size=True)
    assert isinstance(open_exported(tmp_path / "free.xml")._calls[WHOLE], Requests)


@pytest.mark.slow
def test_a_file_that_cannot_be_compiled_is_said(tmp_path, monkeypatch):
    vitral.export(tiny_predictor("classify"), tmp_path / "m.xml")
    monkeypatch.setattr(one_by_one, "LARGE", 0)
    engine = open_exported(tmp_path / "m.xml")
    monkeypatch.setattr(engines, "compile_openvino", lambda *what: 1 / 0)
    with pytest.raises(CheckpointError, match=r"m\.xml cannot be read; it is damaged"):
        engine(images(1, 3, 20, 24))
