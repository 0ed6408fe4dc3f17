"""`vitral bench` measures what it says; the figures themselves are not tested."""

import json

import pytest
import torch

from helpers import difference, images, redraw
from vitral.cli.main import main
from vitral.errors import ConfigError, InputError
from vitral.inference import timing
from vitral.inference.bench import bench
from vitral.inference.peers import PEERS, peer_of
from vitral.inference.predictor import Predictor
from vitral.models.zoo import create_model

TINY = {"embed_dim": 24, "depth": 1, "num_heads": 3, "num_classes": 5, "img_size": 32}


def test_each_is_called_once_in_every_round_and_behind_others_each_time(monkeypatch):
    called, slept = [], []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    rivals = {name: (lambda name=name: called.append(name)) for name in "abc"}
    times = timing.interleave(rivals, 0, warmup=1, rounds=30, pause=0.25)
    assert called[:3] == ["a", "b", "c"]
    rounds = ["".join(called[i : i + 3]) for i in range(3, len(called), 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6  # every order comes
    assert {name: len(t) for name, t in times.items()} == {"a": 30, "b": 30, "c": 30}
    assert slept == [0.25] * 90


def test_multiply_adds_are_those_of_the_layers():
    layer = torch.nn.Conv2d(3, 5, 4, stride=4, bias=False)
    assert timing.multiply_adds(layer, (3, 8, 12)) == (2 * 3) * 5 * (3 * 4 * 4)


def test_peak_memory_sees_what_a_call_takes():
    _, grown = timing.peak_memory(lambda: torch.ones(2**25).sum())
    assert grown is None or 2**26 < grown < 2**28


def test_a_table_for_every_engine_and_batch(capsys):
    assert main(["bench", "vit_nano_patch2_8", "--engines", "eager", "--batch-sizes", "1,3", "--seconds", "0"]) == 0
    assert "of GEMM rate" in capsys.readouterr().out
    found = bench(Predictor(create_model("vit_nano_patch2_8", seed=0)), ["eager"], [2], [], 0)
    (row,) = found["rows"]
    assert row["ratio"] == 1
    assert row["images_per_second"] == pytest.approx(2000 / row["median_ms"])
    assert row["share_of_gemm_rate"] == pytest.approx(
        row["images_per_second"] * found["macs"] / row["gemm_gmacs_per_second"] / 1e9
    )
    json.dumps(found)


def test_merging_is_a_row_of_its_own(capsys):
    args = ["bench", "vit_nano_patch2_8", "--engines", "eager", "--batch-sizes", "2", "--seconds", "0", "--json"]
    assert main([*args, "--merge", "0,3"]) == 0
    exact, merging = json.loads(capsys.readouterr().out)["rows"]
    assert (exact["merge"], merging["merge"]) == (0, 3)
    share = [row["share_of_gemm_rate"] * row["median_ms"] * row["gemm_gmacs_per_second"] for row in (exact, merging)]
    assert share[1] < share[0]  # its multiply-adds are fewer


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--batch-sizes", "one"], "--batch-sizes takes whole numbers, got 'one'"),
        (["--merge", "some"], "--merge takes numbers, got 'some'"),
        (["--merge", "2.5"], "merge must be a whole number from 1 on, or a share of all below 1, got 2.5"),
        (["--batch-sizes", "0"], "batch sizes must be at least 1, got 0"),
        (["--engines", "tpu"], "engine must be one of eager, packed, compile, onnxruntime, openvino, got 'tpu'"),
        (["--engines", "eager", "--compare", "keras"], "compares with timm and transformers, got 'keras'"),
    ],
)
def test_mistakes_are_one_line(args, message, capsys):
    assert main(["bench", "vit_nano_patch2_8", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_same_weights(name):
    model = redraw(create_model("vit_tiny_patch16_224", **TINY))
    x = images(3, 3, 32, 32)
    with torch.no_grad():
        assert difference(peer_of(name, model)(x), model(x)) < 1e-4
    with pytest.raises(InputError, match="ViTs that classify"):
        peer_of(name, create_model("vit_tiny_patch16_224", **{**TINY, "num_classes": 0}))


def test_no_batches_are_refused():
    with pytest.raises(ConfigError, match="got none"):
        bench(Predictor(create_model("vit_nano_patch2_8", seed=0)), ["eager"], [], [], 0)
