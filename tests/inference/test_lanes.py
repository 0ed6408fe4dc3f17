"""A batch that is cut up gives what it would give whole."""

import multiprocessing
import threading

import pytest
import torch

from helpers import difference, images
from tiny import tiny_predictor
from vitral.inference.engines import Eager, Packed
from vitral.inference.lanes import in_lanes
from vitral.inference.packed import packed
from vitral.inference.predictor import Predictor
from vitral.models.detector import DetectorOutput


@pytest.fixture(params=[1, 2, 3])
def cores(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 7, 12])
def test_every_row_comes_once_and_in_order(rows, cores):
    seen = []

    def double(part):
        seen.append((len(part), torch.get_num_threads(), threading.current_thread().name))
        return DetectorOutput(2 * part, part, [(part + 1, part)])

    x = torch.arange(rows * 3.0).view(rows, 3)
    found = in_lanes(double, x)
    for a, b in ((found.logits, 2 * x), (found.boxes, x), (found.aux[0][0], x + 1)):
        assert torch.equal(a, b)
    lanes = [each for each in seen if "lane" in each[2]]
    others = [each for each in seen if "lane" not in each[2]]
    share = rows // cores if cores > 1 else 0
    assert [each[:2] for each in lanes] == ([(share, 1)] * cores if share else [])
    assert sum(size for size, _, _ in others) == rows - share * cores
    assert all(number == cores for _, number, _ in others)
    assert torch.get_num_threads() == cores


def test_an_error_comes_through(cores):
    def fail(part):
        raise KeyError("seven")

    with pytest.raises(KeyError, match="seven"):
        in_lanes(fail, torch.zeros(6, 1))
    assert torch.equal(in_lanes(lambda part: part, torch.ones(6, 1)), torch.ones(6, 1))


def test_a_forked_process_has_lanes_of_its_own():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.zeros(4, 1)
        in_lanes(torch.Tensor.contiguous, x)
        child = multiprocessing.get_context("fork").Process(target=in_lanes, args=(torch.Tensor.contiguous, x))
        child.start()
        child.join(60)
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("what", ["classify", "detect", "segment"])
def test_the_packed_engine_answers_as_one_without_lanes(what, cores):
    twin = packed(tiny_predictor(what).model)
    x = images(7, 3, 20, 24)
    whole, cut = Eager(twin)(x), Packed(twin)(x)
    if what == "detect":
        assert difference(cut.boxes, whole.boxes) < 1e-5
        whole, cut = whole.logits, cut.logits
    assert difference(cut, whole) < 1e-5
    assert not cut.requires_grad


def test_embedding_goes_through_them_too(cores):
    eager = tiny_predictor("classify")
    pictures = [image.mul(40).to(torch.uint8) for image in images(5, 3, 16, 16).abs()]
    made = Predictor(eager.model, engine="packed")
    assert difference(made.vectors(pictures), eager.vectors(pictures)) < 1e-5
