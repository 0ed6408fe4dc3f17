"""Every engine answers as torch does, and `auto` measures once."""

import json
import os
import stat
import subprocess
import sys

import pytest
import torch
from PIL import Image

from helpers import difference, images
from tiny import pictures, tiny_predictor
from vitral.cli.main import main
from vitral.errors import ConfigError, InputError, VitralError
from vitral.inference import choose, packages
from vitral.inference.engines import Eager
from vitral.inference.predictor import Predictor


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitral"


def agree(a, b):
    if isinstance(b, torch.Tensor):
        return difference(a, b) < 1e-4
    return difference(a.logits, b.logits) < 1e-4 and difference(a.boxes, b.boxes) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "engine"),
    [("detect", "compile"), ("classify", "onnxruntime"), ("segment", "openvino")],
)
def test_every_engine_answers_as_torch_does(what, engine, cache, capsys):
    eager = tiny_predictor(what)
    other = Predictor(eager.model, engine=engine, batch_size=3)
    assert other.engine == engine
    for batch in (3, 2, 1):
        x = images(batch, 3, 20, 24, seed=batch)
        assert agree(other.logits(x), eager.logits(x))
    with pytest.raises(InputError, match=r"images must be float32 \(B, 3, 20, 24\)"):
        other.logits(images(1, 3, 16, 16))
    a, b = eager.predict(pictures()), other.predict(pictures())
    assert [type(one) for one in a] == [type(one) for one in b]
    torch.testing.assert_close(
        other.embed(pictures()), eager.embed(pictures()), rtol=1e-4, atol=1e-5
    )  # the model's own
    if engine == "compile":
        assert "compiling the model, once" in capsys.readouterr().err
        return
    assert "exporting the model" in capsys.readouterr().err
    (kept,) = [path for path in (cache / "exports").iterdir() if path.suffix in (".onnx", ".xml")]
    Predictor(eager.model, engine=engine)
    assert capsys.readouterr().err == ""  # the second time, the file is there
    kept.write_bytes(b"damaged")
    again = Predictor(eager.model, engine=engine)
    assert agree(again.logits(x), eager.logits(x))


@pytest.mark.slow
def test_an_onnx_file_runs_in_openvino_too(tmp_path):
    import vitral

    eager = tiny_predictor("detect")
    vitral.export(eager, tmp_path / "m.onnx")
    other = Predictor(tmp_path / "m.onnx", engine="openvino")
    assert other.engine == "openvino"
    assert agree(other.logits(images(3, 3, 20, 24)), eager.logits(images(3, 3, 20, 24)))


def test_eager_is_the_model_itself():
    predictor = tiny_predictor("classify")
    x = images(3, 3, 20, 24)
    assert predictor.engine == "eager"
    assert torch.equal(predictor.logits(x), predictor.model(x).detach())
    assert torch.equal(Eager(predictor.model).run(x), predictor.logits(x))


# ---- compiled ----


COMPILE = """
import torch
from tiny import tiny_predictor
from helpers import images
from vitral.inference.predictor import Predictor
made, real = [], torch._inductor.aoti_compile_and_package
torch._inductor.aoti_compile_and_package = lambda *rest, **more: made.append(1) or real(*rest, **more)
predictor = Predictor(tiny_predictor("classify").model, engine="compile")
assert predictor.engine == "compile"
found = torch.cat([predictor.logits(images(batch, 3, 20, 24)).flatten() for batch in (3, 2)])
print(len(made), found.tolist())
"""


@pytest.mark.slow
def test_a_second_process_does_not_compile_again(cache):
    eager = tiny_predictor("classify")
    wanted = torch.cat([eager.logits(images(batch, 3, 20, 24)).flatten() for batch in (3, 2)])
    counts = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", COMPILE], capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        count, _, logits = done.stdout.partition(" ")
        counts.append(int(count))
        assert difference(torch.tensor(json.loads(logits)), wanted) < 1e-4
    assert counts == [1, 0]
    (kept,) = (cache / "compiled").iterdir()
    assert kept.suffix == ".pt2"  # and nothing that the compiler left behind
    assert stat.S_IMODE((cache / "compiled").stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_what_is_not_there_or_damaged_is_compiled_anew(cache, monkeypatch, content, capsys):
    model = tiny_predictor("classify").model
    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", fail)
    if content:
        monkeypatch.setattr("vitral.inference.compiled.key_of", lambda about: "key")
        (cache / "compiled").mkdir(mode=0o700, parents=True)
        (cache / "compiled" / "key.pt2").write_bytes(content)
    with pytest.raises(VitralError, match=r"cannot be compiled \(no g\+\+ here\); torch needs a C\+\+ compiler"):
        Predictor(model, engine="compile")
    assert "compiling the model, once" in capsys.readouterr().err
    assert [file.name for file in (cache / "compiled").iterdir()] == ["key.pt2"] * bool(content)


def fail(*rest, **more):
    raise RuntimeError("no g++ here")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_nothing_is_run_from_a_folder_that_others_write_to(cache, mode):
    (cache / "compiled").mkdir(parents=True)
    (cache / "compiled").chmod(mode)
    with pytest.raises(VitralError, match="compiled can be written by others, and what lies in it is run"):
        Predictor(tiny_predictor("classify").model, engine="compile")


def test_a_link_to_another_folder_is_not_followed(cache, tmp_path):
    cache.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (cache / "compiled").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(VitralError, match="can be written by others"):
        Predictor(tiny_predictor("classify").model, engine="compile")


# ---- auto ----


class Fake(Eager):
    """An engine that is as slow as it is told to be, on a clock of its own."""

    clock = 0.0
    seconds = None

    def __init__(self, model, name):
        super().__init__(model)
        self.name, self.made_in = name, torch.get_num_threads()

    def run(self, x):
        assert self.made_in == torch.get_num_threads()
        Fake.clock += Fake.seconds(self.name, self.made_in, len(x))
        return torch.zeros(len(x), 5)


@pytest.fixture
def fakes(monkeypatch):
    """Engines of known speed, and a clock that they alone move."""
    made, speeds = [], {"eager": 3.0, "packed": 2.5, "openvino": 1.0, "onnxruntime": 2.0}
    monkeypatch.setattr(Fake, "seconds", lambda name, threads, batch: speeds[name] * batch)

    def make(name, model, preprocess=None):
        made.append((name, torch.get_num_threads()))
        return Fake(model, name)

    monkeypatch.setattr(choose, "SECONDS", 0)
    monkeypatch.setattr(choose, "make_engine", make)
    monkeypatch.setattr(choose, "Eager", lambda model: make("eager", model))
    monkeypatch.setattr("vitral.inference.timing.time.perf_counter", lambda: Fake.clock)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield speeds, made
    torch.set_num_threads(threads)


def remembered():
    return list(json.loads(choose.choices_file().read_text()).values())


def test_auto_takes_the_fastest_says_so_and_measures_once(fakes, capsys):
    speeds, made = fakes
    model = tiny_predictor("classify").model
    made.clear()
    assert Predictor(model, engine="auto", batch_size=3).engine == "openvino"
    assert (
        "the fastest here is openvino, 2 threads, batches of 3 (openvino, 2 threads, batches of 3: 1e+03 ms; "
        "onnxruntime, 2 threads, batches of 3: 2e+03 ms; packed" in capsys.readouterr().err
    )
    assert made == [
        (name, 2) for name in ("eager", "packed", "openvino", "onnxruntime")
    ]  # so slow that one thread is not tried
    made.clear()
    assert Predictor(model, engine="auto", batch_size=3).engine == "openvino"
    assert made == [("eager", 2), ("openvino", 2)]
    assert capsys.readouterr().err == ""
    speeds["eager"] = 0.5  # another batch is another question
    assert Predictor(model, engine="auto", batch_size=5).engine == "eager"
    assert [choice["engine"] for choice in remembered()] == ["openvino", "eager"]


def test_auto_finds_the_number_of_threads_of_small_models(fakes, monkeypatch):
    _, made = fakes
    monkeypatch.setattr(Fake, "seconds", lambda name, threads, batch: 0.01 * threads * (1 + (name != "eager")))
    model, x = tiny_predictor("classify").model, images(3, 3, 20, 24)
    for _ in range(2):  # measured, then remembered
        predictor = Predictor(model, engine="auto", batch_size=3)
        assert (predictor.engine, predictor.network.threads) == ("eager", 1)
        assert predictor.logits(x).shape == (3, 5)  # Fake.run looks how many threads there are
        assert torch.get_num_threads() == 2
    assert made[-1] == ("eager", 1)
    assert remembered() == [{"engine": "eager", "threads": 1, "batch_size": 3}]


def test_auto_finds_the_size_of_batches_unless_it_is_given(fakes, monkeypatch):
    monkeypatch.setattr(Fake, "seconds", lambda name, threads, batch: {1: 3.0, 8: 9.0, 32: 40.0}[batch])
    model = tiny_predictor("classify").model
    assert Predictor(model, engine="auto").batch_size == 8
    assert Predictor(model, engine="auto").batch_size == 8  # remembered
    assert Predictor(model, engine="auto", batch_size=32).batch_size == 32
    assert Predictor(model).batch_size == 32


@pytest.mark.parametrize("content", [b"", b"{broken", b"[1, 2]", b'{"x": 3}', b"\xff\xfe"])
def test_a_corrupt_memory_is_measured_anew(fakes, content):
    choose.choices_file().parent.mkdir(parents=True)
    choose.choices_file().write_bytes(content)
    assert Predictor(tiny_predictor("classify").model, engine="auto").engine == "openvino"
    assert [choice["engine"] for choice in remembered() if isinstance(choice, dict)] == ["openvino"]


@pytest.mark.parametrize(
    "choice",
    [
        "openvino",
        {"engine": "tpu"},
        {"engine": "tpu", "threads": 1, "batch_size": 2},
        {"engine": "eager", "threads": 3, "batch_size": 2},
        {"engine": "eager", "threads": 1, "batch_size": "2"},
        {"engine": ["eager"], "threads": 1, "batch_size": 0},
    ],
)
def test_a_choice_that_makes_no_sense_is_measured_anew(fakes, choice, monkeypatch):
    monkeypatch.setattr(choose, "read_choices", lambda: {"key": choice})
    monkeypatch.setattr(choose, "key_of", lambda about: "key")
    assert Predictor(tiny_predictor("classify").model, engine="auto", batch_size=2).engine == "openvino"


def test_auto_goes_on_where_nothing_can_be_kept(fakes, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert Predictor(tiny_predictor("classify").model, engine="auto").engine == "openvino"


def test_auto_takes_what_is_there(fakes, monkeypatch):
    monkeypatch.setattr(choose, "find_spec", lambda name: None)
    assert Predictor(tiny_predictor("classify").model, engine="auto").engine == "packed"
    monkeypatch.setattr(choose, "can_pack", lambda: False)
    assert Predictor(tiny_predictor("classify").model, engine="auto").engine == "eager"


def test_an_engine_that_fails_is_left_out(fakes, monkeypatch, capsys):
    inner = choose.make_engine

    def make(name, *rest):
        if name == "openvino":
            raise VitralError("no such luck.")
        return inner(name, *rest)

    monkeypatch.setattr(choose, "make_engine", make)
    assert Predictor(tiny_predictor("classify").model, engine="auto").engine == "onnxruntime"
    assert "openvino is left out: no such luck." in capsys.readouterr().err


def test_auto_measures_exported_files_too_and_the_command_line_says_it_once(tmp_path, monkeypatch, capsys):
    import vitral

    monkeypatch.setattr(choose, "SECONDS", 0)
    monkeypatch.setattr(choose, "find_spec", lambda name: None)  # no other engine to choose
    vitral.export(tiny_predictor("classify"), tmp_path / "m.onnx")
    (tmp_path / "some").mkdir()
    for i, picture in enumerate(pictures()):
        Image.fromarray(picture).save(tmp_path / "some" / f"{i}.png")
    answers, told = [], []
    for options in ([], ["--engine", "auto"], ["--engine", "auto"]):
        assert main(["predict", str(tmp_path / "m.onnx"), str(tmp_path / "some"), "--json", *options]) == 0
        out, err = capsys.readouterr()
        answers.append(json.loads(out))
        told.append(err.count("the fastest here is"))
    assert told == [0, 1, 0]
    assert [[a["predictions"][0]["label"] for a in answer] for answer in answers[1:]] == [
        [a["predictions"][0]["label"] for a in answers[0]]
    ] * 2
    assert main(["predict", str(tmp_path / "m.onnx"), str(tmp_path / "some" / "0.png"), "--engine", "auto"]) == 0
    assert "batches of 1 (" in capsys.readouterr().err  # one image is a batch of one
    assert sorted(choice["engine"] for choice in remembered()) == ["onnxruntime", "onnxruntime"]


@pytest.mark.slow
def test_auto_has_the_choice_of_two_engines_for_onnx(tmp_path, capsys):
    import vitral

    eager = tiny_predictor("classify")
    vitral.export(eager, tmp_path / "m.onnx")
    predictor = Predictor(tmp_path / "m.onnx", engine="auto", batch_size=3)
    err = capsys.readouterr().err
    assert "onnxruntime, " in err
    assert "openvino, " in err
    assert predictor.engine in ("onnxruntime", "openvino")
    assert agree(predictor.logits(images(3, 3, 20, 24)), eager.logits(images(3, 3, 20, 24)))


# ---- mistakes ----


def test_mistakes_are_one_sentence(monkeypatch):
    model = tiny_predictor("classify").model
    with pytest.raises(
        ConfigError, match="engine must be one of eager, packed, compile, onnxruntime, openvino, got 'tensorrt'"
    ):
        Predictor(model, engine="tensorrt")
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    with pytest.raises(VitralError, match=r"the openvino engine needs openvino: pip install 'vitral\[export\]'"):
        Predictor(model, engine="openvino")


def test_what_a_processor_announces_and_does_not_have_is_not_used(monkeypatch):
    tried = []
    monkeypatch.delenv(packages.ISA, raising=False)
    monkeypatch.setattr(packages, "_announces_matrix_units", lambda: True)
    monkeypatch.setattr(packages, "_child_lives", lambda code: tried.append(code))
    packages.import_openvino()
    assert len(tried) == 1
    assert packages.os.environ[packages.ISA] == packages.SAFE_ISA
    packages.import_openvino()
    assert len(tried) == 1  # it is settled for this process
    monkeypatch.delenv(packages.ISA)


def test_a_child_that_dies_of_a_signal_is_noticed():
    assert packages._child_lives("raise SystemExit(3)")
    assert not packages._child_lives("import os, signal; os.kill(os.getpid(), signal.SIGILL)")


@pytest.mark.slow
def test_the_trial_of_the_processor_is_a_program_that_runs():
    done = subprocess.run([sys.executable, "-c", packages._INT8], capture_output=True, text=True, check=False)
    assert done.returncode <= 0, done.stderr  # it may die here; a mistake in it would be 1
