"""Exported files of models that read or write text write what the run writes, with its scores, from the file alone."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitral
from helpers import difference, documented, redraw, same
from vitral.cli.main import main
from vitral.config import Preprocess, Seq2SeqConfig, TextConfig, TextOptions, ViTConfig, Writing
from vitral.data.tokenizer import BPE, Characters
from vitral.errors import CheckpointError, ConfigError, InputError
from vitral.inference.engines import _onnx_parts, open_exported, read_document
from vitral.inference.export import text_document, write_graph, write_onnx
from vitral.inference.predictor import Predictor
from vitral.inference.text import DecoderGraph, Seq2SeqGraph, WritingFile, text_graph_of
from vitral.models.generate import generate
from vitral.models.seq2seq import Memory, Seq2Seq, TextDecoder
from vitral.tasks.write import Writes
from vitral.weights.rundir import ARCHITECTURES, config_document

SUFFIXES = {"onnx": ".onnx", "openvino": ".xml"}
SOURCE = BPE.train(["a bad cab fed a dead cafe", 'a "<bed>" & a \x0b face \N{SNOWMAN}'] * 3, 40)
TARGET = Characters.train(["uvwxyz' &<"])
PREPROCESS = Preprocess(img_size=(14, 24), crop_mode="pad")
LABELS = ["A", "B", "O"]
TEXTS = ["a bad cab", "fed", "a dead cafe fed a bad cab", "bed", "a cab fed a face"]
WAYS = [Writing(), Writing(beam=3, n_best=2), Writing(sample=True, n_best=2, seed=3)]


def text_config(vocab_size, max_length, **more):
    options = {"embed_dim": 24, "depth": 2, "num_heads": 3, "mlp_width": 40}
    return TextConfig(vocab_size=vocab_size, max_length=max_length, **options, **more)


READS = text_config(len(SOURCE), 29, pad_token=0)
WRITES = text_config(len(TARGET), 9, tied_output=False)
VIT = ViTConfig(img_size=16, patch_size=4, num_classes=0, embed_dim=16, depth=1, num_heads=2)
MODELS = {
    "caption": ("seq2seq", Seq2SeqConfig(vit=VIT, decoder=WRITES)),
    "translate": ("seq2seq", Seq2SeqConfig(encoder=READS, decoder=replace(WRITES, block="post", output_bias=True))),
    "complete": ("text_decoder", text_config(len(SOURCE), 31, positions="learned", tied_output=False)),
    "classify": ("text_encoder", replace(READS, num_classes=3)),
    "regress": ("text_encoder", replace(READS, num_classes=2, pool="mean", positions="learned")),
    "tag": ("text_encoder", replace(READS, num_classes=3, pool="tokens")),
}


def write_run(folder: Path, what: str) -> Path:
    """A run directory of a tiny model, whose answers depend on all that it reads."""
    architecture, config = MODELS[what]
    model = redraw(ARCHITECTURES[architecture][1](config), seed=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "cross_attn" in name or "memory_proj" in name or ("encoder" in name and "norm" not in name):
                p.mul_(3.0)
    run = folder / what
    run.mkdir()
    save_file(model.state_dict(), run / "model.safetensors")
    labels = {"regress": ["x", "y"], "tag": LABELS, "classify": LABELS}.get(what, [])
    document = {
        "architecture": architecture,
        "model": config.to_dict(),
        "task": what,
        "labels": labels,
        "preprocess": PREPROCESS.to_dict() if what == "caption" else None,
        "source_length": 31 if what == "complete" else 29,
        "target_length": 9,
        "train": {"text": TextOptions().to_dict(), "regress": {}},
        "target_mean": [1.0, 2.0],
        "target_std": [3.0, 4.0],
    }
    (run / "config.json").write_bytes(config_document(document))
    tokenizers = {"source": SOURCE.to_dict(), "target": TARGET.to_dict()}
    (run / "tokenizer.json").write_text(json.dumps(tokenizers))
    return run


@pytest.fixture(scope="module")
def authors(files):
    """What writes: the model of a run, and its file."""
    opened = {}

    def get(what):
        if what not in opened:
            run, made = files(what, "onnx")
            opened[what] = Predictor(run).model, WritingFile(open_exported(made.path))
        return opened[what]

    return get


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A run and its exported file, each made when it is first asked for."""
    folder, runs, made = tmp_path_factory.mktemp("exported"), {}, {}

    def get(what, format):
        if what not in runs:
            runs[what] = write_run(folder, what)
        if (what, format) not in made:
            made[what, format] = vitral.export(runs[what], folder / f"{what}{SUFFIXES[format]}")
        return runs[what], made[what, format]

    return get


def given(what):
    """Five inputs."""
    if what != "caption":
        return TEXTS
    return [np.random.default_rng(i).integers(0, 256, (30 + 7 * i, 41, 3), np.uint8) for i in range(5)]


QUICK = [("translate", "onnx"), ("complete", "onnx"), ("tag", "onnx")]
SLOW = [(what, format) for what in MODELS for format in SUFFIXES if (what, format) not in QUICK]


@pytest.mark.parametrize(("what", "format"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_the_file_alone_answers_as_the_run(files, what, format):
    run, made = files(what, format)
    assert set(made.differences) == {1, 5}
    assert max(made.differences.values()) < 1e-5
    eager, again = Predictor(run), Predictor(made.path)
    assert again.engine == {"onnx": "onnxruntime", "openvino": "openvino"}[format]
    assert again.task.name == what
    for writing in WAYS if isinstance(eager.task, Writes) else [None]:
        eager.task.writing = again.task.writing = writing
        for n in (1, 5):
            wanted, found = eager.predict(given(what)[:n]), again.predict(given(what)[:n])
            assert all(same(a.content(), b.content(), 1e-4) for a, b in zip(found, wanted, strict=True))
        if writing:
            assert len({round(answer.scores[0], 3) for answer in wanted}) == 5  # it does look at what it is given


def test_what_a_file_of_text_says_is_also_beside_it(files):
    _, made = files("translate", "onnx")
    inside, beside = open_exported(made.path).document, json.loads(made.sidecar.read_text())
    assert {key: beside[key] for key in inside} == inside
    assert inside["tokenizers"] == {"source": SOURCE.to_dict(), "target": TARGET.to_dict()}
    assert inside["input"] == {
        "name": "source", "shape": ["batch", "length"], "type": "int64", "vocabulary": len(SOURCE), "max_length": 29
    }  # fmt: skip
    decoder = inside["parts"]["decoder"]
    assert [(part["name"], part["shape"], part["type"]) for part in decoder["inputs"]] == [
        ("memory", ["rows", 4, 3, "remembered", 8], "float32"),
        ("visible", ["rows", "remembered"], "bool"),
        ("tokens", ["rows", "tokens"], "int64"),
        ("past", ["rows", 4, 3, "past", 8], "float32"),
        ("places", ["places"], "int64"),
    ]
    assert decoder["keys"] == [4, 3, 8]
    assert inside["parts"]["encoder"]["outputs"] == ["encoded", "seen"]


def test_the_encoder_runs_once_and_each_part_by_itself(files, monkeypatch):
    import onnx

    _, made = files("translate", "onnx")
    engine = open_exported(made.path)
    models = {part: onnx.load_from_string(model) for part, model in _onnx_parts(made.path, engine.parts).items()}
    used = {part: {tensor.name for tensor in model.graph.initializer} for part, model in models.items()}
    assert {name.split(".")[-2] for name in used["encoder"] if ".decoder." in name} == {"k", "v"}  # of the source
    assert not any(".encoder." in name or "cross_attn.k" in name for name in used["decoder"])
    calls = []
    inner = type(engine)._tensors
    monkeypatch.setattr(type(engine), "_tensors", lambda self, part, x: calls.append(part) or inner(self, part, x))
    Predictor(made.path).predict(TEXTS)
    assert calls[0] == "encoder"
    assert set(calls[1:]) == {"decoder"}


def test_a_graph_of_parts_is_the_model():
    config = MODELS["translate"][1]
    model = redraw(Seq2Seq(config))
    graph = text_graph_of(model, None)
    assert isinstance(graph, Seq2SeqGraph)
    assert graph.model.decoder.output.bias.data_ptr() == model.decoder.output.bias.data_ptr()
    assert model.decoder.token_embed.pos_embed is None  # the model is left alone
    source, memory, visible, tokens, past, places = graph.examples(5)
    nothing = past[:, :, :, :0]
    with torch.no_grad():
        encoded, seen, logits, present = graph(source, memory, visible, tokens, nothing, places)
        assert difference(logits, model(source, tokens)) < 1e-6
        assert torch.equal(encoded, memory)
        assert torch.equal(seen, source != 0)
        assert not bool(seen.all())
        first = graph(source, memory, visible, tokens[:, :2], nothing, places[1:2])
        assert difference(first[2], logits[:, 1:2]) < 1e-6
        then = graph(source, memory, visible, tokens[:, 2:], first[3], places[:-2])
        assert difference(then[2], logits[:, 2:]) < 1e-5
        assert difference(then[3], present) < 1e-5


def test_places_choose_among_the_logits(authors):
    model, author = authors("complete")
    tokens = torch.arange(4, 4 + 15).view(3, 5)
    with torch.no_grad():
        wanted = model(tokens)
    assert difference(author(tokens), wanted) < 1e-5
    assert difference(author.next_logits(tokens, None, None, None), wanted[:, -1]) < 1e-5
    assert author.encode(tokens) is None


def test_one_token_one_text_and_the_longest_are_taken(authors):
    model, author = authors("complete")
    for rows, length in ((1, 1), (1, 31), (3, 1)):
        tokens = torch.full((rows, length), 5)
        with torch.no_grad():
            assert difference(author(tokens), model(tokens)) < 1e-5
    with pytest.raises(InputError, match=r"tokens must be at most max_length \(31\) long, got 32"):
        author(torch.full((1, 32), 5))
    with pytest.raises(InputError, match=rf"tokens must be from 0 to {len(SOURCE) - 1}, got 0 to 99"):
        author(torch.tensor([[0, 99]]))


def test_rows_of_one_source_share_what_was_encoded(authors):
    model, author = authors("translate")
    source = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    tokens = torch.tensor([[1, 5], [1, 6], [1, 7], [1, 8], [1, 9], [1, 4]])  # three for each
    with torch.no_grad():
        memory = author.encode(source)
        assert isinstance(memory, Memory)
        looks_at = model.encode(source)
        wanted = model.next_logits(tokens, looks_at, None, None)
        assert difference(author.next_logits(tokens, memory, None, None), wanted) < 1e-5
        cache, rows = author.new_cache(), torch.tensor([2, 1, 1, 3, 5, 5])
        author.next_logits(tokens[:, :1], memory, None, cache)
        assert len({id(cache.spread(memory, 6)) for _ in range(2)}) == 1
        cache.select(rows)
        wanted = model.next_logits(torch.cat([tokens[rows, :1], tokens[:, 1:]], 1), looks_at, None, None)
        assert difference(author.next_logits(tokens[:, 1:], memory, None, cache), wanted) < 1e-5
        kept = torch.tensor([1])
        cache.select(torch.tensor([4, 3, 5]), kept)  # the second source goes on alone
        read = torch.cat([tokens[rows, :1], tokens[:, 1:]], 1)[[4, 3, 5]]
        more = torch.tensor([[5], [6], [7]])
        wanted = model.next_logits(torch.cat([read, more], 1), looks_at.select(kept), None, None)
        assert difference(author.next_logits(more, memory.select(kept), None, cache), wanted) < 1e-5


def test_a_mask_cannot_be_given_to_a_file(authors):
    _, author = authors("translate")
    source = torch.tensor([[1, 5, 2]])
    with pytest.raises(InputError, match="takes no mask"):
        author.encode(source, source != 0)
    with pytest.raises(InputError, match="prompts of one length"):
        author.next_logits(source, None, source != 0, None)
    with pytest.raises(InputError, match="only a Seq2Seq or a TextDecoder can write, got FakeWriter"):
        generate(type("FakeWriter", (), {})(), source, max_length=3, eos=2)


def test_text_that_cannot_be_read_is_one_sentence(files):
    _, made = files("translate", "onnx")
    answers = list(Predictor(made.path).stream(["", "a cab " * 30, "fed"]))
    assert answers[0].error == "the text is empty; give at least one character."
    assert "tokens, and the model reads at most 29" in answers[1].error
    assert not answers[2].error


def test_logits_of_tokens_and_none_of_what_writes(files):
    run, made = files("tag", "onnx")
    tokens = torch.tensor([[1, 5, 6, 2], [1, 7, 2, 0]])
    assert difference(Predictor(made.path).logits(tokens), Predictor(run).logits(tokens)) < 1e-5
    with pytest.raises(InputError, match="source must be at most max_length"):
        Predictor(made.path).logits(torch.ones(1, 30, dtype=torch.long))
    with pytest.raises(InputError, match="source must be whole numbers"):
        Predictor(made.path).logits(torch.ones(1, 3, 14, 24))
    with pytest.raises(InputError, match="a model that writes gives texts"):
        Predictor(files("complete", "onnx")[1].path).logits(tokens)


@pytest.mark.parametrize("what", ["translate", "tag"])
def test_engines_of_a_run_of_text_are_refused_with_a_way_out(files, what):
    run, _ = files(what, "onnx")
    with pytest.raises(InputError, match=r"run in torch; for another engine, export the run \(vitral export\)"):
        Predictor(run, engine="onnxruntime")


def test_int8_of_text_is_refused(files, tmp_path):
    run, _ = files("translate", "onnx")
    with pytest.raises(ConfigError, match="int8 is for models of images"):
        vitral.export(run, tmp_path / "m.onnx", int8=True, data="numbers-en-it")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_an_onnx_file_of_text_runs_in_openvino_too(files):
    run, made = files("translate", "onnx")
    other = Predictor(made.path, engine="openvino", writing=WAYS[1])
    assert other.engine == "openvino"
    wanted = Predictor(run, writing=WAYS[1]).predict(TEXTS)
    assert all(same(a.content(), b.content(), 1e-4) for a, b in zip(other.predict(TEXTS), wanted, strict=True))


def test_texts_of_two_tokens_can_be_exported(tmp_path):
    """Where the longest text is as short as can be, its length may still vary."""
    model = redraw(TextDecoder(text_config(7, 2)))
    graph = text_graph_of(model, None)
    assert isinstance(graph, DecoderGraph)
    document = text_document(graph, {"preprocess": None, "labels": [], "source_length": 2})
    made = write_graph(graph, document, tmp_path / "m.onnx", "onnx", write_onnx)
    author = WritingFile(open_exported(made.path))
    for tokens in (torch.tensor([[3]]), torch.tensor([[3, 6]])):
        with torch.no_grad():
            assert difference(author(tokens), model(tokens)) < 1e-5


# ---- programs for torch ----


@pytest.mark.slow
@pytest.mark.parametrize("what", [what for what in MODELS if what != "translate"])
def test_a_program_computes_what_the_model_does(files, what, tmp_path):
    written = vitral.export(files(what, "onnx")[0], tmp_path / "m.pt2")
    assert set(written.differences) == {1, 5}
    assert max(written.differences.values()) < 1e-5


def test_the_example_for_text_writes_what_the_run_writes(files, tmp_path, monkeypatch):
    run, _ = files("translate", "onnx")
    monkeypatch.chdir(tmp_path)
    assert max(vitral.export(run, "translator.pt2").differences.values()) < 1e-5
    names = {}
    exec(documented("export.md", "translator.pt2"), names)
    predictor = Predictor(run)
    ((best, *_),) = predictor.outputs(names["source"])
    assert len(best.tokens) > 2
    assert names["written"][: len(best.tokens)] == list(best.tokens)
    assert names["about"]["tokenizers"]["target"] == TARGET.to_dict()


# ---- files of others ----


BROKEN = {
    "a vocabulary": lambda d: d["input"].update(vocabulary="many"),
    "a length": lambda d: d.update(source_length=-3),
    "a length to write": lambda d: d.update(target_length="long"),
    "a part without inputs": lambda d: d["parts"]["decoder"].pop("inputs"),
    "no decoder": lambda d: d["parts"].pop("decoder"),
    "a decoder without sizes": lambda d: d["parts"]["decoder"].pop("max_length"),
    "keys": lambda d: d["parts"]["decoder"].update(keys=[4, 3]),
    "a name": lambda d: d["parts"]["decoder"]["inputs"][0].update(name=3),
}
MISFIT = {
    "no parts": lambda d: d.pop("parts"),
    "another name": lambda d: d["parts"]["decoder"]["inputs"][0].update(name="nothing"),
    "an output": lambda d: d["parts"]["decoder"].update(outputs=["nothing"]),
    "half of the tokenizers": lambda d: d["tokenizers"].pop("target"),
    "another task": lambda d: d.update(task="tag"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_documents_of_text_are_one_sentence(files, what):
    document = json.loads(files("translate", "onnx")[1].sidecar.read_text())
    assert read_document(Path("m.onnx"), json.dumps(document)) == document
    BROKEN[what](document)
    with pytest.raises(CheckpointError, match=r"m\.onnx: what it says about its inputs is broken"):
        read_document(Path("m.onnx"), json.dumps(document))


@pytest.mark.parametrize("what", MISFIT)
def test_a_document_that_does_not_fit_its_file_is_one_sentence(files, tmp_path, what):
    import onnx

    model = onnx.load(files("translate", "onnx")[1].path)
    (entry,) = [entry for entry in model.metadata_props if entry.key == "vitral"]
    document = json.loads(entry.value)
    MISFIT[what](document)
    entry.value = json.dumps(document)
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(CheckpointError, match=r"m\.onnx.* (is broken|is damaged)"):
        Predictor(tmp_path / "m.onnx")


# ---- the command line ----


def test_export_and_predict_of_text_by_the_command_line(files, tmp_path, capsys):
    run, _ = files("complete", "onnx")
    out = tmp_path / "c.onnx"
    assert main(["export", str(run), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "onnx"
    answers = []
    for source in (run, out):
        assert main(["predict", str(source), "--prompt", "a bad", "--beam", "3", "--n-best", "2", "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert same(*answers, 1e-4)
    assert len(answers[0][0]["texts"]) == 2


def test_metrics_of_a_file(files, tmp_path):
    run, made = files("translate", "onnx")
    (tmp_path / "pairs.tsv").write_text("a bad cab\tuvw\nfed\txyz\na cab fed a face\tzyx\n")
    wanted, found = (vitral.evaluate(source, tmp_path / "pairs.tsv", split="train") for source in (run, made.path))
    assert found == wanted
    assert found["images"] == 3


def test_perplexity_of_a_file(files, tmp_path):
    run, made = files("complete", "onnx")
    (tmp_path / "book.txt").write_text("\n\n".join(TEXTS * 3))
    wanted, found = (vitral.evaluate(source, tmp_path / "book.txt", split="train") for source in (run, made.path))
    assert found["perplexity"] == pytest.approx(wanted["perplexity"], rel=1e-5)


@pytest.mark.slow
def test_a_caption_of_a_file_by_the_command_line(files, tmp_path, capsys):
    run, made = files("caption", "onnx")
    Image.effect_noise((40, 31), 90).convert("RGB").save(tmp_path / "a.png")
    answers = []
    for source in (run, made.path):
        assert main(["predict", str(source), str(tmp_path / "a.png"), "--json"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert same(*answers, 1e-4)
