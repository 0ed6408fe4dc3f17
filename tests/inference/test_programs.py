"""`.pt2` files are written, verified, and run by torch as the page on export shows; vitral opens none of them."""

import ast
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import vitral
from helpers import difference, documented, images, tampered
from tiny import pictures, tiny_predictor
from vitral.cli.main import main
from vitral.errors import CheckpointError, VitralError
from vitral.inference.predictor import Predictor
from vitral.weights.files import OPENERS

ROOT = Path(__file__).parents[2]
REFUSED = "is a program exported for torch .* opening one can run code"
TEXT = b"print('ran')\n"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and the program that it was exported to."""
    predictor = tiny_predictor("classify")
    return predictor, vitral.export(predictor, tmp_path_factory.mktemp("program") / "m.pt2")


# ---- written ----


SLOW = ["regress", "embed", "segment", "segment mask", "swin", "cnn", "detect", "detect learned"]


@pytest.mark.parametrize("what", [pytest.param(what, marks=pytest.mark.slow) for what in SLOW])
def test_torch_computes_what_the_model_does(tmp_path, what):
    predictor, x = tiny_predictor(what), images(3, 3, 20, 24)
    written = vitral.export(predictor, tmp_path / "m.pt2")
    assert set(written.differences) == {1, 5}
    assert max(written.differences.values()) < 1e-5
    outputs = torch.export.load(written.path).module()(x)
    wanted = predictor.logits(x)
    wanted = (wanted.logits, wanted.boxes) if what.startswith("detect") else (wanted,)
    assert all(difference(a, b) < 1e-5 for a, b in zip(outputs, wanted, strict=True))


@pytest.mark.slow
def test_merging_goes_into_a_program(tmp_path):
    predictor, x = tiny_predictor("classify"), images(3, 3, 20, 24)
    written = vitral.export(predictor, tmp_path / "m.pt2", merge=5)
    (logits,) = torch.export.load(written.path).module()(x)
    assert difference(logits, Predictor(predictor.model, merge=5).logits(x)) < 1e-5
    assert difference(logits, predictor.logits(x)) > 1e-3


def test_a_program_is_verified_as_it_was_written(tmp_path, monkeypatch):
    save = torch.export.save

    def save_other_weights(program, path, **more):
        name = next(name for name in program.state_dict if name.endswith("head.bias"))
        program.state_dict[name] = nn.Parameter(program.state_dict[name] + 0.1)
        save(program, path, **more)

    monkeypatch.setattr(torch.export, "save", save_other_weights)
    with pytest.raises(VitralError, match=r"m\.pt2 was not written: .* differs from the model by"):
        vitral.export(tiny_predictor("classify"), tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


def test_nothing_in_a_program_names_where_it_was_made(made):
    content = made[1].path.read_bytes()
    assert str(Path(vitral.__file__).parent).encode() not in content
    assert b".py" not in content.replace(b".pyt", b"")


# ---- run, as docs/export.md shows ----


def test_the_example_for_images_gives_the_logits_of_the_predictor(made, tmp_path, monkeypatch):
    predictor, written = made
    monkeypatch.chdir(tmp_path)
    shutil.copy(written.path, "model.pt2")
    picture = np.random.default_rng(0).integers(0, 256, (20, 24, 3), np.uint8)
    Image.fromarray(picture).save("image.png")
    names = {}
    exec(documented("export.md", "model.pt2"), names)
    pixels = torch.from_numpy(picture).permute(2, 0, 1)
    wanted = predictor.logits(predictor.inputs.normal(pixels[None]))
    assert difference(names["logits"], wanted) < 1e-5
    assert names["label"] == predictor.labels[int(wanted.argmax())]
    assert json.loads(written.sidecar.read_text()).items() >= names["about"].items()


# ---- opened by nobody ----


class Writer(nn.Module):
    """What becomes, by an edit of one node, a program that writes a file."""

    def __init__(self):
        super().__init__()
        self.register_buffer("text", torch.tensor(list(TEXT), dtype=torch.uint8))

    def forward(self, pixels):
        torch.zeros(len(TEXT), dtype=torch.uint8).copy_(self.text)
        return (pixels.mean((2, 3)) @ torch.ones(3, 5),)


def in_model(edit):
    """A change of `models/model.json`, for `tampered`."""

    def change(name, content):
        if not name.endswith("models/model.json"):
            return content
        document = json.loads(content)
        edit(document["graph_module"]["graph"])
        return json.dumps(document).encode()

    return change


def write_a_file(graph):
    (node,) = [node for node in graph["nodes"] if node["target"] == "torch.ops.aten.zeros.default"]
    (dtype,) = [each for each in node["inputs"] if each["name"] == "dtype"]
    given = {"filename": {"as_string": "PIL.py"}, "shared": {"as_bool": True}, "size": {"as_int": len(TEXT)}}
    node["target"] = "torch.ops.aten.from_file.default"
    node["inputs"] = [*({"name": name, "arg": arg, "kind": 1} for name, arg in given.items()), dtype]


def slow_size(graph):
    sizes = [{"as_expr": {"expr_str": "Mod(Pow(7,Pow(9,9)),3)", "hint": None}}]
    next(iter(graph["tensor_values"].values())).update(sizes=sizes)


@pytest.fixture(scope="module")
def hostile(made, tmp_path_factory):
    """Programs by what is wrong with them, each with the document of a file of ours."""
    folder, good = tmp_path_factory.mktemp("hostile"), made[1].path
    batch = ({0: torch.export.Dim("batch")},)
    program = torch.export.export(Writer(), (torch.zeros(2, 3, 20, 24),), dynamic_shapes=batch, strict=False)
    program._guards_code = []
    for node in program.graph.nodes:
        node.meta = {key: node.meta[key] for key in ("val",) if key in node.meta}
    with zipfile.ZipFile(good) as archive:
        document = archive.read("m/extra/vitral.json").decode()
    torch.export.save(program, folder / "plain.pt2", extra_files={"vitral.json": document})
    bomb = shutil.copy(good, folder / "bomb.pt2")
    with zipfile.ZipFile(bomb, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("m/data/weights/weight_99", bytes(2**27))
    return {
        "writes a file": tampered(folder / "plain.pt2", folder / "writes.pt2", in_model(write_a_file)),
        "an expression that takes hours": tampered(good, folder / "slow.pt2", in_model(slow_size)),
        "a bomb": bomb,
        "as we write it": good,
    }


@pytest.fixture
def unopened(monkeypatch):
    """Fail if anything of the archive is read but its directory."""
    read = zipfile.ZipFile.open

    def fail(*rest, **more):
        raise AssertionError("the archive was opened")

    def read_data(archive, *rest, **more):
        return (fail if Path(archive.filename).stem == "m" else read)(archive, *rest, **more)

    monkeypatch.setattr(zipfile.ZipFile, "open", read_data)
    for reader in ("torch.export.load", "torch.load", "torch._C.PyTorchFileReader"):
        monkeypatch.setattr(reader, fail)


@pytest.fixture
def unbound(monkeypatch):
    """Fail if a server gets as far as to listen."""
    monkeypatch.setattr("vitral.serving.server.bind", lambda *rest: None)
    monkeypatch.setattr("vitral.serving.server.serve", lambda *rest: pytest.fail("it listens"))


def test_the_attack_is_real(hostile, tmp_path, monkeypatch):
    """Without this, the refusals below could be those of a harmless file."""
    monkeypatch.chdir(tmp_path)
    torch.export.load(hostile["writes a file"]).module()(torch.zeros(1, 3, 20, 24))
    assert Path("PIL.py").read_bytes() == TEXT


@pytest.mark.parametrize("door", ["Predictor", "predict", "serve"])
def test_a_program_that_writes_files_is_refused(hostile, unbound, door, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(pictures(1)[0]).save("a.png")
    shutil.copy(hostile["writes a file"], "m.pt2")
    if door == "Predictor":
        with pytest.raises(CheckpointError, match=REFUSED):
            Predictor("m.pt2").predict("a.png")
    else:
        assert main([door, "m.pt2", *(["a.png"] if door == "predict" else [])]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert re.search(REFUSED, err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "m.pt2"]


SUFFIXES = [".pt2", ".PT2", ".xml", "", *OPENERS]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("what", ["writes a file", "an expression that takes hours", "a bomb", "as we write it"])
def test_a_program_is_refused_unread_under_every_name(hostile, unopened, what, suffix, tmp_path):
    path = shutil.copy(hostile[what], tmp_path / f"m{suffix}")
    for door in (Predictor, vitral.load_model):
        with pytest.raises(CheckpointError, match=REFUSED) as error:
            door(path)
        assert "\n" not in str(error.value)
        assert f'torch.export.load("m{suffix}").module()' in str(error.value)


COMMANDS = [
    ["predict", "m.pt2", "a.png"],
    ["eval", "m.pt2", "digits"],
    ["eval", "m.pt2", "digits", "--probe", "knn"],
    ["serve", "m.pt2"],
    ["bench", "m.pt2"],
    ["explain", "m.pt2", "a.png"],
    ["index", "m.pt2", "photos"],
    ["inspect", "m.pt2"],
    ["convert", "m.pt2", "out", "--to", "vitral"],
    ["export", "m.pt2", "--out", "m.onnx"],
    ["train", "digits", "--model", "m.pt2", "--out", "out"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_refuses_a_program_in_one_line(made, unopened, unbound, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copy(made[1].path, "m.pt2")
    Path("photos").mkdir()
    for place in ("a.png", "photos/a.png"):
        Image.fromarray(pictures(1)[0]).save(place)
    assert main(command) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(rf"vitral: m\.pt2 {REFUSED}.*\n", err), err
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["a.png", "a.png", "m.pt2"]


def test_a_program_that_is_not_there_is_missing(tmp_path):
    with pytest.raises(CheckpointError, match=r"m\.pt2 does not exist"):
        Predictor(tmp_path / "m.pt2")


def test_a_run_directory_may_be_called_like_a_program(made, tmp_path):
    vitral.save_model(made[0].model, tmp_path / "run.pt2", layout="vitral")
    x = images(2, 3, 20, 24)
    assert difference(Predictor(tmp_path / "run.pt2").logits(x), made[0].logits(x)) < 1e-5


def test_what_runs_a_file_is_called_for_our_own_files_only():
    """`.pt2` by the verification of what was just written, machine code by the private cache; TorchScript by nobody."""
    runs = {"torch.export.load": ["export.py"], "torch._inductor.aoti_load_package": ["compiled.py"]}
    runs |= {"torch.jit.load": [], "pickle.load": [], "pickle.loads": [], "torch.export.pt2_archive": []}
    found = {name: [] for name in runs}
    for path in sorted((ROOT / "src" / "vitral").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in found:
                found[ast.unparse(node)].append(path.name)
    assert found == runs
