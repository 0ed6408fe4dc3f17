"""ONNX and OpenVINO files give the answers of the model, from the file only."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from helpers import difference, images, redraw, same
from tiny import MODELS, pictures, tiny_predictor
from vitral.cli.main import main
from vitral.errors import CheckpointError, ConfigError, InputError, VitralError
from vitral.inference import engines, export, packages
from vitral.inference.graph import graph_of
from vitral.inference.predictor import Predictor

FORMATS = {"onnx": ".onnx", "openvino": ".xml"}
QUICK = [("classify", "onnx"), ("detect", "onnx"), ("segment", "onnx")]
SLOW = [(what, "onnx") for what in MODELS if (what, "onnx") not in QUICK]
SLOW += [(what, "openvino") for what in ("classify", "embed", "segment", "detect", "detect learned")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Exported files, each made when it is first asked for."""
    folder, made = tmp_path_factory.mktemp("exported"), {}

    def get(what, format):
        if (what, format) not in made:
            predictor = tiny_predictor(what)
            path = folder / f"{what.replace(' ', '-')}{FORMATS[format]}"
            made[what, format] = (predictor, vitral.export(predictor, path))
        return made[what, format]

    return get


@pytest.mark.parametrize(("what", "format"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_the_file_alone_answers_as_the_model(files, what, format):
    predictor, made = files(what, format)
    assert set(made.differences) == {1, 5}
    assert max(made.differences.values()) < 1e-5
    again = Predictor(made.path, batch_size=2)
    assert again.task.name == predictor.task.name
    assert again.labels == predictor.labels
    assert again.preprocess == predictor.preprocess
    x = images(3, 3, 20, 24)
    wanted, given = predictor.logits(x), again.logits(x)
    if what.startswith("detect"):
        assert difference(given.boxes, wanted.boxes) < 1e-4
        wanted, given = wanted.logits, given.logits
    assert difference(given, wanted) < 1e-4
    if what == "embed":
        torch.testing.assert_close(again.embed(pictures()), predictor.embed(pictures()), rtol=1e-3, atol=1e-4)
        with pytest.raises(InputError, match="has no classes"):
            again.predict(pictures())
    else:
        for a, b in zip(again.predict(pictures()), predictor.predict(pictures()), strict=True):
            assert same(a.content(), b.content())


@pytest.mark.slow
@pytest.mark.parametrize("suffix", FORMATS.values())
def test_windows_that_fit_are_exported_too(tmp_path, suffix):
    model = redraw(vitral.create_model("swin_micro_patch2_window4_32", num_classes=3, img_size=(32, 64)))
    made = vitral.export(model, tmp_path / f"swin{suffix}")
    x = images(3, 3, 32, 64)
    assert difference(Predictor(made.path).logits(x), Predictor(model).logits(x)) < 1e-4


FREE = [("classify", ".xml"), ("sinusoids", ".onnx"), ("segment", ".onnx"), ("detect", ".onnx"), ("cnn", ".onnx")]


@pytest.mark.parametrize(
    ("what", "suffix"), [("classify", ".onnx"), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in FREE)]
)
def test_a_file_may_take_images_of_any_size(tmp_path, what, suffix):
    predictor = tiny_predictor(what)
    made = vitral.export(predictor, tmp_path / f"m{suffix}", dynamic_size=True)
    assert max(made.differences.values()) < 1e-5
    again = Predictor(made.path)
    smallest = (12, 9) if what == "cnn" else (4, 8)
    for size in [(20, 24), (16, 16), (12, 40), smallest]:  # as it is fed, as its table is, larger and smaller
        x = images(3, 3, *size)
        wanted, given = predictor.logits(x), again.logits(x)
        if what == "detect":
            assert difference(given.boxes, wanted.boxes) < 1e-4
            wanted, given = wanted.logits, given.logits
        assert difference(given, wanted) < 1e-4
    assert json.loads(made.sidecar.read_text())["input"]["shape"] == ["batch", 3, "height", "width"]
    if what != "cnn":
        with pytest.raises(InputError, match=r"\(B, 3, H, W\), H and W multiples of 4 and 4, got .* \(1, 3, 20, 22\)"):
            again.logits(images(1, 3, 20, 22))
    again.preprocess = replace(again.preprocess, img_size=(28, 12))
    predictor.preprocess = again.preprocess
    a, b = (p.predict(pictures(1))[0].content() for p in (again, predictor))
    assert same(a, b)


@pytest.mark.parametrize(
    ("what", "name", "options", "why"),
    [
        ("swin", "m.onnx", {}, "this SwinTransformer cannot be exported for images of any size"),
        ("classify", "m.onnx", {"merge": 3}, "this MergingViT cannot be exported for images of any size"),
        ("classify", "m.pt2", {}, "any size go into onnx and openvino files, got pt2"),
        ("classify", "m.onnx", {"int8": True, "data": "digits"}, "int8 is calibrated for images of one size"),
    ],
)
def test_what_fixes_the_size_is_refused(tmp_path, what, name, options, why):
    with pytest.raises(VitralError, match=why):
        vitral.export(tiny_predictor(what), tmp_path / name, dynamic_size=True, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", [".onnx", pytest.param(".xml", marks=pytest.mark.slow)])
def test_merging_goes_into_the_file(tmp_path, suffix):
    predictor = tiny_predictor("classify")
    made = vitral.export(predictor, tmp_path / f"m{suffix}", merge=5)
    assert max(made.differences.values()) < 1e-5
    again, x = Predictor(made.path), images(3, 3, 20, 24)
    assert difference(again.logits(x), Predictor(predictor.model, merge=5).logits(x)) < 1e-4
    assert difference(again.logits(x), predictor.logits(x)) > 1e-3
    assert again.network.document["merge"] == 5
    assert again.task.temperature == 1.7
    with pytest.raises(InputError, match="token merging is for a plain ViT"):
        vitral.export(tiny_predictor("segment"), tmp_path / "s.onnx", merge=5)


def test_what_the_file_says_is_also_beside_it(files):
    _, made = files("classify", "onnx")
    inside, beside = engines.open_exported(made.path).document, json.loads(made.sidecar.read_text())
    assert {key: beside[key] for key in inside} == inside
    assert inside["temperature"] == 1.7
    assert inside["input"]["shape"] == ["batch", 3, 20, 24]
    assert beside["differences"] == {str(batch): value for batch, value in made.differences.items()}


def test_nothing_in_a_file_names_where_it_was_made(files):
    content = files("classify", "onnx")[1].path.read_bytes()
    assert str(Path(vitral.__file__).parent).encode() not in content
    assert b".py" not in content.replace(b".pyt", b"")


def test_resized_positions_are_constants(files):
    import onnx

    _, made = files("classify", "onnx")
    assert "Resize" not in {node.op_type for node in onnx.load(made.path).graph.node}


def test_a_graph_shares_the_models_weights_and_leaves_it_alone():
    predictor = tiny_predictor("classify")
    model, x = predictor.model, images(2, 3, 20, 24)
    with torch.no_grad():
        before, names = model(x), list(dict(model.named_modules()))
    graph = graph_of(model, predictor.preprocess)
    assert graph.model.head.weight.data_ptr() == model.head.weight.data_ptr()
    assert list(dict(model.named_modules())) == names
    with torch.no_grad():
        assert torch.equal(model(x), before)
        assert torch.equal(graph(x)[0], before)
    assert all(p.requires_grad for p in model.parameters())


def test_a_file_that_differs_is_not_left_behind(tmp_path, monkeypatch):
    predictor = tiny_predictor("classify")
    monkeypatch.setattr(export, "compare", lambda graph, path: {1: 0.0, 5: 3e-4})
    with pytest.raises(VitralError, match=r"m\.pt2 was not written: .* differs from the model by 3\.0e-04"):
        vitral.export(predictor, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_nan_is_a_difference(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "compare", lambda graph, path: {1: float("nan")})
    with pytest.raises(VitralError, match="was not written"):
        vitral.export(tiny_predictor("classify"), tmp_path / "m.pt2")


def test_the_name_tells_the_format(tmp_path):
    predictor = tiny_predictor("classify")
    for path, format, message in [
        ("m.zip", None, r"must end in one of \.onnx, \.xml, \.pt2, got m\.zip"),
        ("m.onnx", "openvino", r"must end in \.xml, got m\.onnx"),
        ("m.onnx", "tflite", "format must be one of onnx, openvino, pt2, got 'tflite'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            vitral.export(predictor, tmp_path / path, format)


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "onnxscript" else name)
    with pytest.raises(VitralError, match=r"export to ONNX needs onnxscript: pip install 'vitral\[export\]'"):
        vitral.export(tiny_predictor("classify"), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_no_model_to_look_into(files):
    _, made = files("detect", "onnx")
    with pytest.raises(InputError, match="an exported file or an ensemble of folds only gives predictions"):
        Predictor(made.path).embed(pictures())
    with pytest.raises(
        InputError, match=r"images must be float32 \(B, 3, 20, 24\).*got torch.float32 \(1, 3, 24, 20\)"
    ):
        Predictor(made.path).logits(images(1, 3, 24, 20))


def test_segmenters_slide_in_a_file_too(files):
    predictor, made = files("segment", "onnx")
    predictor = Predictor(predictor.model, slide=True)
    (a,), (b,) = (p.predict(pictures(1)) for p in (predictor, Predictor(made.path, slide=True)))
    assert np.mean(a.mask == b.mask) > 0.99


# ---- files of others ----


@pytest.mark.parametrize("suffix", FORMATS.values())
@pytest.mark.parametrize("content", [b"", b"no such thing" * 40])
def test_a_broken_file_is_one_sentence(tmp_path, suffix, content, capsys):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"m{suffix} cannot be read"):
        Predictor(path)
    assert main(["predict", str(tmp_path / f"other{suffix}"), "image.png"]) == 2
    assert f"other{suffix} does not exist" in capsys.readouterr().err


def test_an_onnx_file_of_others_is_refused(tmp_path):
    import onnx
    from onnx import TensorProto, helper

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match=r"m\.onnx does not say .*vitral convert .*m\.onnx FOLDER"):
        Predictor(tmp_path / "m.onnx")


def free_document(*sides, size=(8, 8), **more):
    shape = {"name": "x", "shape": ["b", 3, *sides], **more}
    return json.dumps({"input": shape, "outputs": ["y"], "preprocess": {"img_size": size}, "labels": []})


def test_sizes_that_are_free_may_be_said():
    engines.read_document(Path("m.onnx"), free_document("height", "width", multiple=[8, 4]))
    engines.read_document(Path("m.onnx"), free_document(8, 8))


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{",
        '{"outputs": 3}',
        '{"input": {"shape": ["batch", 3, 8, 8]}, "outputs": [], "preprocess": {}}',
        free_document(8, 8, size=(9, 8)),
        free_document("height", "width"),
        free_document("height", "width", multiple=[16, 0]),
        free_document("height", "width", multiple=[5, 8]),
        free_document("height", "width", multiple=[8]),
        free_document(8, 8, multiple=[8, 8]),
        free_document("height", 8, multiple=[8, 8]),
    ],
)
def test_broken_metadata_are_one_sentence(text):
    with pytest.raises(CheckpointError, match=r"m\.onnx: what it says about its inputs is broken"):
        engines.read_document(Path("m.onnx"), text)


# ---- the command line ----


def test_export_predict_and_eval_by_the_command_line(tmp_path, capsys):
    run = vitral.train("digits", out=tmp_path / "run", model="vit_nano_patch2_8", epochs=1, quiet=True)
    out = tmp_path / "digits.onnx"
    assert main(["export", str(run.path), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "onnx"
    Image.effect_noise((9, 11), 90).save(tmp_path / "a.png")
    answers = []
    for source in (run.path, out):
        assert main(["predict", str(source), str(tmp_path / "a.png"), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert same(*answers)
    metrics = vitral.evaluate(out, "digits")
    assert metrics["accuracy"] == pytest.approx(run.metrics["test"]["accuracy"], abs=1e-6)
