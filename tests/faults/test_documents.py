"""Damaged documents of run directories: whatever reads them succeeds or raises a VitralError."""

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import vitral
from attack.damage import mutate_json, mutate_json_lines
from attack.runs import RUNS, write_data
from vitral.cli.main import main
from vitral.data.sources.open import open_data
from vitral.errors import CheckpointError, DataError, VitralError
from vitral.inference.predictor import Predictor
from vitral.reporting.html import write_report
from vitral.reporting.pretrain import write_pretraining_report
from vitral.training.checkpoint import list_checkpoints, load_newest
from vitral.training.log import read_metrics
from vitral.training.loop import Saved
from vitral.weights.rundir import read_run_config

DEEP = "[" * 100_000 + "]" * 100_000
EVERY = 20
"""One of so many damaged runs is also resumed."""
FUZZ = settings(
    deadline=None, database=None, derandomize=True, phases=[Phase.generate],  # a shrinking run takes minutes
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


def call(words, code=(0,)):
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        assert main(words) in code, printed.getvalue()
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A function that returns the directory of a run, which is trained when it is first asked for."""
    folder = tmp_path_factory.mktemp("documents")
    write_data(folder)

    def train(name):
        if not (folder / name).exists():
            call(RUNS[name].command(folder, folder / name))
        return folder / name

    return train


@pytest.fixture
def copied(trained, tmp_path):
    """A function that returns a copy of a run, to be damaged, next to the data."""
    write_data(tmp_path)
    return lambda name: Path(shutil.copytree(trained(name), tmp_path / name))


def predict(name, path):
    Predictor(path).predict(Image.new("RGB", (20, 24)) if RUNS[name].reads == "image" else "red cat 42")


def report(name, path):
    run = RUNS[name]
    if run.verb == "train":
        write_report(path, open_data(run.source(path.parent), task=run.task))
    else:
        write_pretraining_report(path)


def resume(name, path, again, **options):
    """Resume a copy of a run; the command ends well or with one sentence."""
    shutil.copytree(path, again)
    try:
        return call(RUNS[name].command(path.parent, again, resume=True), **options)
    finally:
        shutil.rmtree(again)


def survive(name, path, readers):
    for reader in readers:
        try:
            reader(name, path)
        except VitralError as error:
            if "\n" in str(error).strip():
                raise AssertionError("the message has several lines") from error


def checkpoint(name, path):
    load_newest(path / "checkpoints", Saved)


@contextlib.contextmanager
def damaged(path, chance, kinds):
    """Damage one document of a run for a while; if anything fails, the damaged document is kept and named."""
    documents = [file for file in sorted(path.rglob("*.json*")) if file.name in kinds]
    kind = chance.choice(sorted({file.name for file in documents}))
    file = chance.choice([file for file in documents if file.name == kind])
    before = file.read_bytes()
    file.write_bytes((mutate_json_lines if file.suffix == ".jsonl" else mutate_json)(before, chance))
    try:
        yield
    except Exception as error:
        copy = shutil.copy(file, path.parent / f"damaged-{file.name}")
        error.add_note(f"{file.relative_to(path.parent)} was replaced by {copy}")
        raise
    finally:
        file.write_bytes(before)


def edit(file, change):
    """Change a JSON document."""
    document = json.loads(file.read_text())
    change(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("task"), "task is missing"),
        (lambda d: d.update(task=["regress"]), r"task must be a string, got \['regress'\]"),
        (lambda d: d.update(architecture=["vit"]), r"architecture must be a string, got \['vit'\]"),
        (lambda d: d.update(temperature="hot"), "temperature must be a number, got 'hot'"),
        (lambda d: d.update(temperature=0), "temperature must be a finite number above 0, got 0.0"),
        (lambda d: d.update(target_std=[None]), r"target_std\[0\] must be a number, got None"),
        (lambda d: d.update(labels=[1]), r"labels\[0\] must be a string, got 1"),
        (lambda d: d.update(data=7), "data must be an object, got 7"),
        (lambda d: d["data"].pop("splits"), "data.splits is missing"),
        (lambda d: d["train"].update(regress=[]), "train.regress must be an object"),
        (lambda d: d.update(baselines={"test": 7}), "baselines.test must be an object, got 7"),
        (lambda d: d.update(diagnosis=[{"problem": "x"}]), r"diagnosis\[0\].evidence is missing"),
        (lambda d: d["spent"].update(skipped=-1), "spent.skipped must be an integer from 0"),
        (lambda d: d.pop("train"), "train is missing"),
        (lambda d: d.update(task="segment"), "task must be what the model does"),
        (lambda d: d["model"].update(patch_size=None), "patch_size must"),
        (lambda d: d["model"].update(depth=10**12), "depth must be at most 1,024, got 1000000000000"),
    ],
)
def test_an_edited_config_is_refused_by_the_name_of_its_key(copied, change, words):
    path = copied("regress")
    edit(path / "config.json", change)
    with pytest.raises(CheckpointError, match=rf"config.json: .*{words}"):
        Predictor(path)


def test_weights_without_a_training_run_predict_and_have_no_history(copied):
    path = copied("multilabel")
    edit(path / "config.json", lambda d: d.pop("data"))
    predict("multilabel", path)
    with pytest.raises(CheckpointError, match="records no training run"):
        report("multilabel", path)


@pytest.mark.parametrize(
    "content", [DEEP.encode(), b'{"a": ' * 100_000, b"\xff\xfe", b'{"format_version": 1' + b"0" * 5000]
)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_document_that_is_no_json_is_refused(copied, content, name):
    path = copied("translate")
    (path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{name} cannot be read as JSON"):
        read_run_config(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(files=[1, 2]),
        lambda d: d.update(step="8"),
        lambda d: d.update(step=-1),
        lambda d: d.update(values=None),
        lambda d: d["values"].update(seconds=[]),
        lambda d: d["values"].update(finished="no"),
        lambda d: d["values"].update(ema_steps=1.5),
        lambda d: d["values"].pop("ema_steps"),
        lambda d: d["files"].update({"m" * 5000: [1, 2]}),
        lambda d: d["files"].update({"../config.json": [1, 2]}),
    ],
)
def test_a_checkpoint_with_wrong_types_is_passed_over(copied, change):
    checkpoints = copied("regress") / "checkpoints"
    newest, older = list_checkpoints(checkpoints)[:2]
    edit(newest / "state.json", change)
    loaded, problems = load_newest(checkpoints, Saved)
    assert loaded.path == older
    assert len(problems) == 1
    assert str(newest) in problems[0]


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(copied, trained, tmp_path):
    path = trained("regress")
    again = copied("regress")
    newest, *_ = list_checkpoints(again / "checkpoints")
    edit(newest / "state.json", lambda d: d["values"].update(best=[]))
    (again / "model.safetensors").unlink()  # a complete run would stay as it is
    printed = call(RUNS["regress"].command(path.parent, again, resume=True))
    assert f"{newest / 'state.json'}: values.best must be a number" in printed.replace("\n", "")
    assert (again / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("line", [b"\xff\xfe{}", DEEP.encode(), b'{"split": "train", "step": []}', b"7", b'{"step": 1'])
def test_damaged_lines_of_the_log_are_skipped(copied, trained, line):
    path = copied("regress")
    log = path / "metrics.jsonl"
    whole = read_metrics(path)
    log.write_bytes(line + b"\n" + log.read_bytes() + line)
    assert whole == read_metrics(path) != []
    report_before = (path / "report.html").read_bytes()
    write_report(path, open_data(RUNS["regress"].source(trained("regress").parent), task="regress"))
    assert (path / "report.html").read_bytes() == report_before
    (path / "model.safetensors").unlink()  # a complete run would stay as it is
    call(RUNS["regress"].command(trained("regress").parent, path, resume=True))
    assert line not in log.read_bytes().splitlines()


def test_a_report_is_not_made_of_other_classes(copied):
    path = copied("detect")
    edit(path / "config.json", lambda d: d["labels"].__setitem__(0, "edited"))
    with pytest.raises(DataError, match="classes that the model does not know: circle"):
        report("detect", path)


@pytest.mark.parametrize("name", ["s" * 5000 + ".safetensors", "\0.safetensors", "é" * 200 + ".safetensors"])
def test_shards_of_impossible_names_are_refused(tmp_path, name):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="shards must be plain file names") as raised:
        vitral.load_model(tmp_path)
    assert len(str(raised.value)) < 500


FAST = ["multilabel", "regress", "translate"]


@settings(FUZZ, max_examples=100)
@given(st.sampled_from(FAST), st.randoms(use_true_random=True))
def test_damaged_documents_are_read_or_refused(trained, name, chance):
    path = trained(name)
    with damaged(path, chance, ["config.json", "tokenizer.json", "metrics.jsonl", "state.json"]):
        survive(name, path, [predict, checkpoint, lambda _, path: read_metrics(path)])


@pytest.mark.slow
@settings(FUZZ, max_examples=2000)
@given(st.sampled_from(list(RUNS)), st.randoms(use_true_random=True))
def test_thousands_of_damaged_documents_are_read_or_refused(trained, name, chance):
    path = trained(name)
    with damaged(path, chance, ["config.json", "tokenizer.json", "metrics.jsonl", "state.json", "compare.json"]):
        if RUNS[name].verb != "compare":
            survive(name, path, [predict, report])
        if RUNS[name].verb == "compare" or chance.randrange(EVERY) == 0:
            resume(name, path, path.parent / "again", code=(0, 2))
