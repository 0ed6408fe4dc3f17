"""Text through the whole of vitral: data, tokens, training, answers, report, command line."""

import io
import json
import math
import re
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitral
from vitral.cli.main import main
from vitral.config import TextOptions, TrainConfig, Writing
from vitral.data.inputs import TextInputs
from vitral.data.loader import TrainLoader, eval_batches
from vitral.data.sources.digits_lines import make_digit_lines
from vitral.data.sources.open import open_data
from vitral.data.targets import View
from vitral.data.text import load_running_text, make_pairs, tokenized
from vitral.data.tokenizer import EOS, PAD, SOS, UNK, Characters
from vitral.errors import CheckpointError, ConfigError, DataError, InputError
from vitral.explanation.explain import explain
from vitral.explanation.writing import align
from vitral.inference.predictor import Predictor
from vitral.models.generate import Generated
from vitral.models.seq2seq import Seq2Seq, TextDecoder, TextEncoder
from vitral.tasks.base import Frame
from vitral.tasks.complete import Complete
from vitral.tasks.open import infer_task, make_inputs, make_task
from vitral.tasks.write import Translate, token_losses
from vitral.weights.rundir import load_run

SMALL = {"tokenizer": "characters", "width": 32, "heads": 2, "encoder_layers": 1, "decoder_layers": 2, "drop_rate": 0.0}
QUICK = {"batch_size": 16, "lr": 1e-2, "text": SMALL, "warmup_epochs": 0.1, "quiet": True, "log_steps": 1, "ema": 0.9}
WORDS = [
    "one",
    "uno",
    "two",
    "due",
    "three",
    "tre",
    "four",
    "quattro",
    "five",
    "cinque",
    "six",
    "sei",
    "seven",
    "sette",
    "eight",
    "otto",
    "nine",
    "nove",
    "ten",
    "dieci",
]


SENTENCES = ["the cat sat on the mat", "a dog ate his hat", "one bird and a tree", "my house is small"]


def replace_options(**text):
    return QUICK | {"text": SMALL | text}


def number_pairs():
    pairs = list(zip(WORDS[::2], WORDS[1::2], strict=True)) * 6
    return make_pairs("few", pairs, {"train": torch.arange(60), "val": torch.arange(10), "test": torch.arange(10)})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small run of each task."""
    folder = tmp_path_factory.mktemp("runs")
    translated = vitral.train(number_pairs(), out=folder / "translate", epochs=60, **QUICK)
    lines = make_digit_lines(train=64, test=8, val=8)[0]
    options = QUICK | {"model": "vit_micro_conv_patch8_32", "img_size": (32, 128), "patch_size": (32, 8), "epochs": 2}
    captioned = vitral.train(lines, out=folder / "caption", **options)
    text = folder / "book.txt"
    text.write_text("\n\n".join(SENTENCES * 12))
    completed = vitral.train(text, out=folder / "complete", epochs=40, **QUICK)
    table = folder / "reviews.csv"
    kinds = ["good", "bad"]
    table.write_text("text,label\n" + "".join(f"a very {kinds[i % 2]} film {i},{kinds[i % 2]}\n" for i in range(60)))
    classified = vitral.train(table, out=folder / "classify", epochs=20, **QUICK)
    return {"translate": translated, "caption": captioned, "complete": completed, "classify": classified}


# ---- data ----


class TestSources:
    def test_tasks_are_told_by_the_data(self, tmp_path):
        assert infer_task(open_data("numbers-en-it")) == "translate"
        assert infer_task(open_data("digits-lines")) == "caption"
        (tmp_path / "a.txt").write_text("one line\nanother line\n")
        assert infer_task(open_data(tmp_path / "a.txt")) == "complete"
        (tmp_path / "a.csv").write_text("en,it\ncat,gatto\ndog,cane\n")
        assert infer_task(open_data(tmp_path / "a.csv")) == "translate"
        (tmp_path / "c.tsv").write_text("image\tlabel\na.png\tcat\n")
        with pytest.raises(DataError, match="names 1 images, none of which exists"):
            open_data(tmp_path / "c.tsv")
        (tmp_path / "d.tsv").write_text("text\tlabel\ncat\tanimal\nrose\tplant\n")
        assert infer_task(open_data(tmp_path / "d.tsv")) == "classify"
        (tmp_path / "e.csv").write_text("text,target\ngood,1\nbad,0\n")
        assert infer_task(open_data(tmp_path / "e.csv")) == "regress"
        (tmp_path / "f.csv").write_text("source,target,category\ngood,1,a\nbad,0,b\n")
        assert infer_task(open_data(tmp_path / "f.csv", None, "category", None, "source")) == "classify"
        (tmp_path / "g.jsonl").write_text('{"text": "good", "label": "a"}\n{"text": "bad", "label": "b"}\n')
        assert infer_task(open_data(tmp_path / "g.jsonl")) == "classify"
        (tmp_path / "b.csv").write_text("text,label\ncat,animal\nrose,plant\n")
        assert infer_task(open_data(tmp_path / "b.csv")) == "classify"
        assert infer_task(open_data(tmp_path / "b.csv", task="translate")) == "translate"

    def test_captions_in_a_table(self, tmp_path):
        for name in "abc":
            Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        (tmp_path / "t.csv").write_text("image,caption\na.png, a  cat \nb.png,\nc.png,a dog\nd.png,a cow\n")
        data = open_data(tmp_path / "t.csv")
        assert data.texts == ["a cat", "a dog"]
        assert infer_task(data) == "caption"
        assert sorted(p["kind"] for p in data.problems) == ["bad_target", "missing_image"]
        (tmp_path / "u.csv").write_text("image,label\na.png,a cat\nc.png,a dog\n")
        assert open_data(tmp_path / "u.csv", task="caption", label_column="label").texts == ["a cat", "a dog"]

    def test_an_image_with_several_captions_stays_in_one_part(self, tmp_path):
        for name in "abcde":
            Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
        rows = "".join(f"{name}.png,caption {i}\n" for i in range(8) for name in "abcde")
        (tmp_path / "t.csv").write_text("image,caption\n" + rows)
        data = open_data(tmp_path / "t.csv").with_splits(0.2, 0.2, seed=0)
        seen = [{data.inputs.name(i) for i in part.tolist()} for part in data.splits.values()]
        assert [len(names) for names in seen] == [3, 1, 1]
        assert len(set.union(*seen)) == 5

    def test_a_short_model_gets_short_pieces(self, tmp_path):
        (tmp_path / "a.txt").write_text("word " * 30 + "\n\n" + "short verse")
        data = load_running_text(tmp_path / "a.txt")
        data = TextInputs(Characters.train(data.lines), 19, ends=False).usable(data)
        assert max(map(len, data.lines)) <= 18
        assert "".join(data.lines[:-1]) == "word " * 30
        assert data.targets[:, 0].sum() == 2
        options = QUICK | {"text": SMALL | {"max_length": 12}}
        run = vitral.train(tmp_path / "a.txt", out=tmp_path / "run", epochs=1, val_fraction=0.3, **options)
        assert (run.path / "report.html").is_file()  # of the pieces, which are numbered otherwise than the paragraphs
        again = [vitral.evaluate(run.path, tmp_path / "a.txt", split=split) for split in ("train", "val")]
        assert sorted((metrics["left_out"], metrics["tokens"]) for metrics in again) == [(0, 11 + 1), (0, 150 + 1)]

    def test_texts_in_a_table(self, tmp_path):
        path = tmp_path / "t.tsv"
        path.write_text("words\tstars\nfine film\t1.5\n \t2\ndull\t4\n")
        data = open_data(path, task="regress", text_column="words", label_column="stars")
        assert data.lines == ["fine film", "dull"]
        assert data.targets.tolist() == [[1.5], [4.0]]
        assert data.describe() == "t: 2 texts, number stars, split train 2"

    def test_running_text_is_cut_after_spaces_and_goes_on(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("word " * 100 + "\n\n" + "short\nverse\n\n" + "x" * 500)
        data = load_running_text(path)
        assert "".join(data.lines[:3]) == "word " * 100
        assert data.targets[:, 0].tolist() == [0, 0, 1, 1, 0, 0, 1]
        assert data.lines[3] == "short\nverse"
        assert max(map(len, data.lines)) <= 240
        path.write_text("only this")
        with pytest.raises(DataError, match="too short to learn from"):
            load_running_text(path)

    def test_the_wrong_data_for_a_task(self, tmp_path):
        config = TrainConfig(text=TextOptions(tokenizer="characters"))
        pairs, lines = tokenized(number_pairs(), config.text), open_data("digits")
        with pytest.raises(DataError, match="few has texts, and --task caption reads images; leave --task out"):
            make_task("caption", pairs, config)
        with pytest.raises(DataError, match="has no texts to write"):
            make_task("translate", lines, config)
        with pytest.raises(DataError, match="is not plain text"):
            make_task("complete", pairs, config)
        with pytest.raises(DataError, match="few has texts, and images are needed"):
            _ = pairs.images
        with pytest.raises(DataError, match="digits has images, and texts are needed"):
            _ = lines.lines


# ---- what the model is fed ----


class TestInputs:
    def inputs(self, most=12, ends=True):
        return TextInputs(Characters.train(["abcd efgh"]), most, ends)

    def test_marks_around_a_text(self):
        tokens = self.inputs().read(" ab\n", whole=False).tolist()
        assert (tokens[0], tokens[-1], len(tokens)) == (SOS, EOS, 4)
        assert self.inputs(ends=False).read("ab", whole=False).tolist() == tokens[:-1]
        assert UNK in self.inputs().read("azb", whole=False)

    @pytest.mark.parametrize(
        ("text", "words"),
        [("", "the text is empty"), (" \n ", "the text is empty"), ("abcdefghabcd", "has 14 tokens.*at most 12"),
         (3, "reads texts, got int")],
    )  # fmt: skip
    def test_what_cannot_be_read(self, text, words):
        with pytest.raises(InputError, match=words):
            self.inputs().read(text, whole=False)

    def test_too_long_a_text_is_left_out_of_training_and_said(self):
        data = make_pairs("p", [("abc", "x"), ("a" * 11, "y"), ("b" * 10, "z")], {"train": torch.arange(3)})
        left = self.inputs().usable(data)
        assert left.splits["train"].tolist() == [0, 2]
        assert left.notes == ["1 texts have more than 10 tokens and were left out"]
        assert self.inputs().usable(left) is left

    def test_too_long_a_target_is_left_out(self):
        task = Translate(Characters.train(["xyz"]), 4, TextOptions())
        data = make_pairs("p", [("a", "xyz"), ("b", "xyzz")], {"train": torch.arange(2)})
        assert task.usable(data).splits["train"].tolist() == [0]

    def test_batches_are_of_like_length_and_every_epoch_has_all(self):
        config = TrainConfig(text=TextOptions(tokenizer="characters"))
        texts = [("ab " * (i % 37) + "c", "d" * (1 + i % 7)) for i in range(203)]
        data = tokenized(make_pairs("p", texts, {"train": torch.arange(203)}), config.text)
        task = make_task(None, data, config)
        inputs = make_inputs(data, config, task.name)
        loader = TrainLoader(data, inputs, config.augment, 8, 0, False, 0, 0, 1, task.targets(data))
        order = loader.order(3)
        assert len(order.unique()) == len(order) == 200
        missed = [set(range(203)) - set(loader.order(epoch).tolist()) for epoch in range(40)]
        assert len(set.union(*missed)) > 60  # those left out are any, not always the longest
        assert not torch.equal(order, loader.order(4))
        stream = loader.batches(25)
        batches = [next(stream) for _ in range(25)]
        widths = [int(b.inputs.shape[1]) for b in batches]
        filled = sum(int((b.inputs != PAD).sum()) for b in batches) / sum(b.inputs.numel() for b in batches)
        assert filled > 0.85  # by chance it would be about a half
        assert len(set(widths)) > 3
        whole, ours = batches[2], TrainLoader(data, inputs, config.augment, 8, 0, False, 0, 1, 2, task.targets(data))
        half = next(ours.batches(27))
        assert torch.equal(half.samples, whole.samples[4:])
        assert torch.equal(half.inputs[:, : whole.inputs.shape[1]], whole.inputs[4:, : half.inputs.shape[1]])

    def test_evaluation_reads_each_once_whatever_the_order(self):
        config = TrainConfig(text=TextOptions(tokenizer="characters"))
        data = tokenized(number_pairs(), config.text)
        task = make_task(None, data, config)
        inputs = make_inputs(data, config, task.name)
        found = list(eval_batches(data, torch.arange(60), inputs, 7, False, 0, task.targets(data)))
        assert torch.cat([b.samples for b in found]).sort().values.tolist() == list(range(60))
        for batch in found:
            for tokens, target, index in zip(batch.inputs, batch.targets, batch.samples.tolist(), strict=True):
                assert inputs.tokenizer.decode(tokens.tolist()) == data.lines[index]
                assert task.tokenizer.decode(target.tolist()) == data.texts[index]


# ---- loss and metrics ----


class TestLoss:
    def test_padding_counts_for_nothing(self):
        task = Translate(Characters.train(["abc"]), 9, TextOptions(), smoothing=0.1)
        torch.manual_seed(0)
        logits = torch.randn(2, 4, 7)
        targets = torch.tensor([[SOS, 4, 5, 6, EOS], [SOS, 4, EOS, PAD, PAD]])
        none, own = targets, torch.ones(2)
        kept = [(0, t) for t in range(4)] + [(1, 0), (1, 1)]
        each = []
        for b, t in kept:
            log_p = logits[b, t].log_softmax(0)
            each.append(-(0.9 * log_p[targets[b, t + 1]] + 0.1 * log_p.mean()))
        loss = task.loss(logits, targets, none, own)
        torch.testing.assert_close(loss, torch.stack(each).mean())
        changed = logits.clone()
        changed[1, 2:] = 99.0
        torch.testing.assert_close(task.loss(changed, targets, none, own), loss)
        wide = F.pad(targets, (0, 3), value=PAD), F.pad(logits, (0, 0, 0, 3))
        torch.testing.assert_close(task.loss(wide[1], wide[0], none, own), loss)

    def test_an_unknown_character_is_never_right(self):
        task = Translate(Characters.train(["ab"]), 5, TextOptions())
        said = [[Generated([UNK], -1.0, True)], [Generated([4], -1.0, True)]]
        found = task.found(said, torch.tensor([[SOS, UNK, EOS], [SOS, 4, EOS]]))
        assert task.metrics(found)["exact"] == 0.5

    def test_what_did_not_end_is_kept_as_far_as_it_went(self):
        task = Translate(Characters.train(["ab"]), 5, TextOptions())
        found = task.found([[Generated([4] * 5, -1.0, False)]], torch.tensor([[SOS, 4, 4, 4, 4, EOS]]))
        assert found["said"].shape == found["true"].shape == (1, 6)
        assert task.metrics(found)["cer"] == 0.25
        answer = next(task.decode([[Generated([4] * 5, -1.0, False)]], [frame()], 1))
        assert answer.text() == "aaaaa ..."
        assert answer.content()["texts"][0]["ended"] is False

    def test_a_language_model_is_judged_by_what_it_gives_each_token(self):
        task = Complete(Characters.train(["ab"]), 8, TextOptions())
        targets = torch.tensor([[SOS, 4, 5, EOS], [SOS, 5, PAD, PAD]])
        logits = torch.zeros(2, 3, 6)
        metrics = task.metrics(task.found(logits, targets))
        assert metrics["tokens"] == 4
        assert metrics["perplexity"] == pytest.approx(6)
        assert metrics["bits_per_character"] == pytest.approx(4 * math.log2(6) / 3)
        assert token_losses(logits, targets[:, 1:])[1].tolist() == pytest.approx([math.log(6), 0, 0])


def frame():
    return Frame("x", (1, 1), View.whole())


# ---- whole runs ----


class TestRuns:
    def test_pairs_are_learnt_and_written_again(self, runs):
        assert runs["translate"].metrics["test"]["exact"] == 1.0
        predictor = Predictor(runs["translate"].path)
        assert isinstance(predictor.model, Seq2Seq)
        said = [answer.texts[0] for answer in predictor.predict(WORDS[::2])]
        assert said == WORDS[1::2]

    def test_answers_depend_on_neither_batch_nor_neighbours(self, runs):
        together = Predictor(runs["translate"].path, writing=Writing(beam=3, n_best=3)).predict(WORDS[::2])
        alone = Predictor(runs["translate"].path, batch_size=1, writing=Writing(beam=3, n_best=3)).predict(WORDS[::2])
        for a, b in zip(together, alone, strict=True):
            assert a.texts == b.texts
            assert a.scores == pytest.approx(b.scores, abs=1e-4)
        assert len(together[0].texts) == 3
        assert together[0].scores == sorted(together[0].scores, reverse=True)

    def test_texts_have_classes_and_vectors_too(self, runs):
        predictor = Predictor(runs["classify"].path)
        assert isinstance(predictor.model, TextEncoder)
        assert runs["classify"].metrics["val"]["accuracy"] == 1.0
        told = predictor.predict(["a very bad film 3", "a very good film 977"])
        assert [answer.labels[0] for answer in told] == ["bad", "good"]
        rows = predictor.embed(["a very bad film 3", "good"])
        assert rows.shape == (2, 32)
        torch.testing.assert_close(rows[1:], predictor.embed("good"))  # padding changes nothing

    def test_a_text_is_gone_on_with(self, runs):
        predictor = Predictor(runs["complete"].path)
        assert isinstance(predictor.model, TextDecoder)
        prompts = [sentence[:6] for sentence in SENTENCES]
        answers = predictor.predict(prompts)
        right = [p + a.texts[0] == s for p, a, s in zip(prompts, answers, SENTENCES, strict=True)]
        assert sum(right) == 3  # the fourth is the validation part
        metrics = runs["complete"].metrics["val"]
        assert metrics["perplexity"] == pytest.approx(math.exp(-metrics["log_likelihood"]))
        book = runs["complete"].path.parent / "book.txt"
        again = vitral.evaluate(runs["complete"].path, book)  # the run's own data: its validation split
        assert again["perplexity"] == pytest.approx(metrics["perplexity"], rel=1e-4)
        assert vitral.evaluate(runs["complete"].path, book, split="train")["perplexity"] < 5
        ragged = ["a", "one bird an", "the ca", SENTENCES[0]]
        for prompt, answer in zip(ragged, predictor.predict(ragged), strict=True):
            assert predictor.predict(prompt)[0].texts == answer.texts  # alone as beside others
        drawn = Writing(sample=True, n_best=4, temperature=3.0, seed=5)
        first = Predictor(runs["complete"].path, writing=drawn).predict("the ")[0].texts
        assert first == Predictor(runs["complete"].path, writing=drawn).predict("the ")[0].texts
        assert len(set(first)) > 1

    def test_the_run_keeps_its_tokenizers(self, runs, tmp_path):
        saved = json.loads((runs["translate"].path / "tokenizer.json").read_text())
        assert set(saved) == {"source", "target"}
        shutil.copytree(runs["translate"].path, tmp_path / "run")
        (tmp_path / "run" / "tokenizer.json").unlink()
        with pytest.raises(
            CheckpointError, match=r"tokenizer.json must hold the tokenizers target and source, got none"
        ):
            Predictor(tmp_path / "run")

    @pytest.mark.parametrize("task", ["translate", "caption", "complete", "classify"])
    def test_each_has_a_report_and_a_card(self, runs, task):
        page = (runs[task].path / "report.html").read_text()
        card = (runs[task].path / "README.md").read_text()
        wanted = {"translate": "Worst predictions", "caption": "Worst predictions", "complete": "Continuations"}
        assert wanted.get(task, "Most confident mistakes") in page
        assert ("A Vision Transformer that" in card) == (task == "caption")
        assert ("images" in card) == (task == "caption")

    def test_evaluation_gives_what_training_gave(self, runs):
        again = vitral.evaluate(runs["translate"].path, number_pairs())
        assert again["exact"] == runs["translate"].metrics["test"]["exact"]
        assert again["chrf"] == runs["translate"].metrics["test"]["chrf"]

    def test_a_run_does_not_go_on_with_other_texts(self, runs, tmp_path):
        shutil.copytree(runs["translate"].path, tmp_path / "run")
        data = number_pairs()
        other = replace(data, texts=[text.replace("o", "z") for text in data.texts])
        with pytest.raises(CheckpointError, match="the texts of few have changed since"):
            vitral.train(other, out=tmp_path / "run", epochs=60, resume=True, **QUICK)

    def test_what_is_too_long_is_said_in_evaluation(self, runs):
        pairs = [("one", "uno"), ("two", "due"), ("one " * 20, "uno"), ("two", "due " * 20)]
        data = make_pairs("p", pairs, {"test": torch.arange(4)})
        found = vitral.evaluate(runs["translate"].path, data)
        assert (found["images"], found["left_out"], found["exact"]) == (2, 2, 1.0)
        assert found["summary"].endswith("; 2 too long and dropped")
        with pytest.raises(DataError, match="all 1 texts of the test split are too long for this model"):
            vitral.evaluate(runs["translate"].path, make_pairs("p", pairs[2:3], {"test": torch.arange(1)}))

    def test_a_run_goes_on_as_if_nothing_had_happened(self, runs, tmp_path):
        options = replace_options(drop_rate=0.1)
        whole = vitral.train(number_pairs(), out=tmp_path / "whole", epochs=4, **options)
        half = options | {"save_steps": 5}
        vitral.train(number_pairs(), out=tmp_path / "half", epochs=4, **half)
        first, *others = sorted((tmp_path / "half" / "checkpoints").iterdir())
        for path in others:
            shutil.rmtree(path)
        assert first.name == "step-000000010"  # in the middle of an epoch of three
        (tmp_path / "half" / "model.safetensors").unlink()
        vitral.train(number_pairs(), out=tmp_path / "half", epochs=4, resume=True, **half)
        a, b = load_run(whole.path).state_dict(), load_run(tmp_path / "half").state_dict()
        assert all(torch.equal(a[name], b[name]) for name in a)

    def test_writing_is_for_those_that_write(self, runs):
        with pytest.raises(InputError, match="trained to classify, and writes no text"):
            Predictor(runs["classify"].path, writing=Writing(beam=2))
        with pytest.raises(InputError, match="reads texts, not images"):
            _ = Predictor(runs["translate"].path).preprocess
        with pytest.raises(InputError, match="looks through a TextEncoder, not a ViT"):
            _ = Predictor(runs["translate"].path).vit
        with pytest.raises(ConfigError, match="the 3 best texts need a beam of at least 3, got 2"):
            Writing(beam=2, n_best=3)
        with pytest.raises(ConfigError, match="exclude each other"):
            Writing(beam=2, sample=True)


class TestLooking:
    def test_what_did_not_end_and_what_looks_like_mathematics(self, runs, tmp_path):
        pairs = [("$x_$", "a $y^$ $"), ("a", "b"), ("c", "d"), ("e", "f")] * 4
        data = make_pairs("odd", pairs, {"train": torch.arange(16), "val": torch.arange(4), "test": torch.arange(4)})
        run = vitral.train(data, out=tmp_path / "odd", epochs=1, **(QUICK | {"lr": 1e-6}))
        assert (run.path / "report.html").is_file()
        predictor = Predictor(run.path, writing=Writing(max_tokens=3))
        made = align(predictor, "$x_$")
        assert len(made.written) == len(made.rows) == 3
        assert "EOS" not in made.written
        assert made.save(tmp_path / "a.png").is_file()

    def test_rows_over_the_tokens_of_a_text(self, runs):
        predictor = Predictor(runs["translate"].path)
        made = align(predictor, "three")
        assert made.source == ["SOS", *"three", "EOS"]
        assert made.written == [*"tre", "EOS"]
        assert made.rows.shape == (4, 7)
        torch.testing.assert_close(made.rows.sum(1), torch.ones(4))
        every = torch.stack([align(predictor, "three", head=h).rows for h in range(2)])
        torch.testing.assert_close(every.mean(0), made.rows)
        assert not torch.allclose(align(predictor, "three", layer=0).rows, made.rows)
        with pytest.raises(InputError, match="layer must be from -2 to 1, got 5"):
            align(predictor, "three", layer=5)

    def test_maps_over_an_image(self, runs, tmp_path):
        predictor = Predictor(runs["caption"].path)
        picture = make_digit_lines(train=4, test=1, val=1)[0].inputs.pixels[0]
        made = explain(predictor, picture, "writing")
        said = predictor.predict(picture)[0]
        assert len(made.maps) == len(made.titles) == len(said.texts[0]) + said.ended[0]
        assert made.maps.shape[1:] == (1, 16)
        assert (made.maps >= 0).all()
        assert (made.maps.sum((1, 2)) <= 1 + 1e-5).all()  # [CLS] may take a part
        assert made.save(tmp_path / "a.png").stat().st_size > 1000
        assert "prediction: " in explain(predictor, picture, "attention").about
        with pytest.raises(InputError, match="does not look at one thing while it writes"):
            align(Predictor(runs["classify"].path), "film")


# ---- command line ----


class TestCommandLine:
    def say(self, capsys, *words):
        code = main(list(map(str, words)))
        out, err = capsys.readouterr()
        return code, out, err

    def test_texts_from_arguments_files_and_standard_input(self, runs, capsys, tmp_path, monkeypatch):
        run = runs["translate"].path
        code, out, err = self.say(capsys, "predict", run, "three", "")
        assert (code, out) == (0, "three: tre\n")
        assert err == "warning: the text is empty; give at least one character.\n"
        code, out, err = self.say(capsys, "predict", run, "", " ", "--json")
        assert (code, len(json.loads(out))) == (2, 2)
        assert err == "vitral: there is no answer for any of the 2 texts.\n"
        monkeypatch.setattr(
            "sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"\xff\xd8\xff\xe0\0\x10JFIF\0")))
        )
        code, out, err = self.say(capsys, "predict", run, "-")
        assert (code, out) == (2, "")
        assert err == "vitral: what comes on standard input is not text; - takes lines with texts.\n"
        (tmp_path / "in.txt").write_text("one\ntwo\n")
        assert self.say(capsys, "predict", run, tmp_path / "in.txt")[1] == "one: uno\ntwo: due\n"
        monkeypatch.setattr("sys.stdin", io.StringIO("ten\nnine\n"))
        assert self.say(capsys, "predict", run, "-")[1] == "ten: dieci\nnine: nove\n"

    def test_several_with_scores(self, runs, capsys):
        _, out, _ = self.say(capsys, "predict", runs["translate"].path, "two", "--beam", 4, "--n-best", 3, "--json")
        (answer,) = json.loads(out)
        assert answer["text"] == "two"
        assert answer["texts"][0]["text"] == "due"
        assert len(answer["texts"]) == 3
        _, out, _ = self.say(capsys, "predict", runs["translate"].path, "two ß", "--csv")
        header, row = out.splitlines()
        assert header == "text,rank,written,score,ended,error"
        assert re.fullmatch(r"two ß,1,\w+,-[\d.e-]+,(yes|no),", row)

    def test_unknown_characters_are_said(self, runs, capsys):
        _, out, _ = self.say(capsys, "predict", runs["translate"].path, "twoß")
        assert re.search(r"\(characters never seen in training: ß\)$", out.strip())

    def test_a_prompt(self, runs, capsys):
        run = runs["complete"].path
        told = Predictor(run).predict("one bi")[0].texts[0]
        assert self.say(capsys, "predict", run, "--prompt", "one bi")[1] == f"one bi: {told}\n"
        out = self.say(capsys, "predict", run, "--prompt", "one bi", "--max-tokens", 3)[1]
        assert out == f"one bi: {told[:3]} ...\n"
        code, _, err = self.say(capsys, "predict", runs["caption"].path, "--prompt", "x")
        assert code
        assert "reads images; --prompt is for those that read text" in err

    def test_the_table_of_looks(self, runs, capsys, tmp_path):
        _, out, _ = self.say(capsys, "explain", runs["translate"].path, "three", "--out", tmp_path / "a.png")
        assert "largest attention" in out
        assert (tmp_path / "a.png").is_file()

    def test_check(self, capsys):
        _, out, _ = self.say(capsys, "check", "numbers-en-it", "--json")
        report = json.loads(out)
        assert report["texts"] == 23000
        assert report["leaks_between_splits"] == []

    def test_eval(self, runs, capsys, tmp_path):
        path = tmp_path / "p.tsv"
        path.write_text("source\ttarget\none\tuno\ntwo\tdueX\n")
        _, out, _ = self.say(capsys, "eval", runs["translate"].path, path, "--json")
        assert json.loads(out)["exact"] == 0.5
        _, out, _ = self.say(capsys, "eval", runs["translate"].path, path, "--beam", 2)
        assert "exact 50.00 %" in out
        code, _, err = self.say(capsys, "eval", runs["classify"].path, runs["classify"].path.parent / "reviews.csv",
                                "--beam", 2)  # fmt: skip
        assert code
        assert "writes no text" in err
