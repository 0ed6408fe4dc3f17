"""A label for every word: data, places of words among tokens, metrics, training, answers, report, command line."""

import csv
import io
import json
import random
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import f1_score

import vitral
from vitral.cli.main import main
from vitral.config import TextOptions, TrainConfig
from vitral.data.sources.open import open_data
from vitral.data.tags import make_tags
from vitral.data.targets import View
from vitral.data.text import tokenized
from vitral.data.tokenizer import BPE, EOS, PAD, SOS, UNK, Characters, tidy
from vitral.errors import DataError, InputError
from vitral.inference.predictor import Predictor
from vitral.models.seq2seq import TextEncoder
from vitral.tasks.base import Frame
from vitral.tasks.open import infer_task, load_task, make_inputs, make_task
from vitral.tasks.tag import Tag, word_losses
from vitral.tasks.tag_metrics import entities, is_bio, tag_metrics
from vitral.weights.rundir import read_run_config

SMALL = {"tokenizer": "characters", "width": 32, "heads": 2, "encoder_layers": 2, "drop_rate": 0.0}
QUICK = {"batch_size": 32, "lr": 3e-3, "text": SMALL, "warmup_epochs": 0.1, "quiet": True, "log_steps": 1, "ema": 0.9}
CONLL = """-DOCSTART- -X- O

Anna NNP B-PER
Rossi NNP I-PER
sings VB O

Bring\tB-X\tO
it\tO

lonely
word O
"""


def digit_sentences(count=1000):
    """Digits that stand together are one number: the tag of a word depends on the word before it."""
    chance = random.Random(3)
    texts = [chance.choices("abcd12", k=chance.randint(1, 4)) for _ in range(count)]
    return [(" ".join(words), " ".join(digit_tags(words))) for words in texts]


def digit_tags(words):
    inside = [word.isdigit() for word in words]
    return ["BI"[before] + "-NUM" if here else "O" for before, here in pairwise([False, *inside])]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("tags") / "numbers.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("words", "tags"), *digit_sentences()])
    return path


@pytest.fixture(scope="module")
def run(path):
    return vitral.train(path, out=path.parent / "run", epochs=16, test_fraction=0.1, **QUICK)


def frame(text):
    return Frame(text, (1, 1), View.whole())


# ---- data ----


class TestSources:
    def test_conll(self, tmp_path):
        (tmp_path / "a.conll").write_text(CONLL)
        data = open_data(tmp_path / "a.conll")
        assert data.lines == ["Anna Rossi sings", "Bring it"]
        assert data.texts == ["B-PER I-PER O", "O O"]
        assert infer_task(data) == "tag"
        assert data.describe() == "a: 2 texts, 5 words, 3 tags, split train 2"
        (problem,) = data.problems
        assert problem["error"] == f"{tmp_path / 'a.conll'} line 10: line 10 has a word and no tag"
        (tmp_path / "a.txt").write_text(CONLL)
        assert open_data(tmp_path / "a.txt", task="tag").lines == data.lines

    @pytest.mark.parametrize("name", ["words", "tokens", "text"])
    @pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "lists"])
    def test_tables_tell_the_task(self, tmp_path, name, kind):
        rows = [("Anna  sings", "PER O"), ("a cat", "O")]
        rows += [("I am here", "O O O"), ('say "yes"', "O O")]
        path = tmp_path / f"a.{'jsonl' if kind == 'lists' else kind}"
        if kind == "csv":
            with path.open("w", newline="") as file:
                csv.writer(file).writerows([(name, "tags"), *rows])
        elif kind == "tsv":
            path.write_text(f"{name}\ttags\n" + "".join(f"{a}\t{b}\n" for a, b in rows))
        else:
            cells = [(a.split(), b.split()) if kind == "lists" else (a, b) for a, b in rows]
            path.write_text("".join(json.dumps({name: a, "tags": b}) + "\n" for a, b in cells))
        data = open_data(path)
        assert data.kind == "tags"
        assert infer_task(data) == "tag"
        assert data.lines == ["Anna sings", "I am here", 'say "yes"']
        assert data.texts == ["PER O", "O O O", "O O"]
        assert [p["kind"] for p in data.problems] == ["bad_target"]
        assert "it has 2 words and 1 tags" in data.problems[0]["error"]

    def test_parquet(self, tmp_path):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table(
            {"tokens": [["Anna", "sings"], ["ciò"]], "ner": [[1, 0], [0]], "split": ["train", "test"]}
        )
        parquet.write_table(table, tmp_path / "a.parquet")
        data = open_data(tmp_path / "a.parquet", task="tag", label_column="ner")
        assert data.lines == ["Anna sings", "ciò"]
        assert data.texts == ["1 0", "0"]
        assert {part: rows.tolist() for part, rows in data.splits.items()} == {"train": [0], "test": [1]}

    def test_labels_of_texts_stay_what_they_were(self, tmp_path):
        path = tmp_path / "a.csv"
        path.write_text('text,tags\na fine film,"drama,love"\ndull,drama\nso so,love\n')
        assert infer_task(open_data(path)) == "multilabel"
        path.write_text("image,words,tags\na.png,a b,O O\n")
        with pytest.raises(DataError, match="none of which exists"):
            open_data(path)

    @pytest.mark.parametrize(
        ("name", "text", "error"),
        [
            ("a.conll", "", "has no text; it should hold words with their tags"),
            (
                "a.conll",
                "Anna\nsings\n",
                "has no text with a tag for each word; the first problem: .*line 1 has a word",
            ),
            ("a.conll", "New York\tLOC\n", "'New York' is not one word"),
            (
                "a.csv",
                "words,label\na b,O O\n",
                r"no tag column \(tags\), its columns are words, label; .*--label-column",
            ),
            ("a.csv", "sentence,tags\na b,O O\n", r"no text column \(words, tokens, text\).*--text-column"),
            ("a.tsv", "words\ttags\ta\n", "no text column"),
            ("a.csv", "words,tags\n,O\n", "the text is empty"),
            ("a.csv", "words,tags,split\na,O,dev\n", "column of splits must hold train, val and test, got dev"),
            ("a.jsonl", '{"words": ["a", "b c"], "tags": ["O", "O"]}\n', "'b c' is not one word"),
            ("a.jsonl", '{"words": ["a"], "tags": ["O"]}\n[]\n{"words": "a"}\n', None),
        ],
    )
    def test_bad_files(self, tmp_path, name, text, error):
        path = tmp_path / name
        path.write_text(text)
        if error:
            with pytest.raises(DataError, match=error):
                open_data(path, task="tag")
        else:
            errors = [p["error"] for p in open_data(path, task="tag").problems]
            assert [e.partition(": ")[2] for e in errors] == ["it is no JSON object", "it has no tags"]

    def test_the_wrong_data_for_a_task(self):
        config = TrainConfig(text=TextOptions(tokenizer="characters"))
        data = tokenized(make_tags("few", [("a b", "X Y")], {"train": torch.arange(1)}), config.text)
        assert set(data.tokenizers) == {"source"}
        for task, words in (
            ("translate", "no texts to write"),
            ("complete", "not plain text"),
            ("classify", "one class"),
        ):
            with pytest.raises(DataError, match=words):
                make_task(task, data, config)
        with pytest.raises(DataError, match="digits has no tags for the words of its images; --task tag takes a CoNLL"):
            make_task("tag", open_data("digits"), config)
        same = tokenized(make_tags("same", [("a b", "X X")], {"train": torch.arange(1)}), config.text)
        with pytest.raises(DataError, match=r"same has only one tag \(X\)"):
            make_task("tag", same, config)

    def test_texts_without_a_tag_for_each_word_are_left_out(self):
        task = Tag(["X", "Y"], Characters.train(["ab "]), 9)
        data = make_tags("p", [("a b", "X Y"), ("a", "X Y"), ("b", "Y")], {"train": torch.arange(3)})
        left = task.usable(data)
        assert left.splits["train"].tolist() == [0, 2]
        assert left.notes == ["1 texts have not as many tags as words and were left out"]
        assert task.usable(left) is left
        with pytest.raises(DataError, match="tags that the model does not know: Z; it knows X, Y"):
            task.targets(make_tags("p", [("a", "Z")], {"train": torch.arange(1)}))


# ---- words and tokens ----

SEEN = [
    "The cat's 3rd name, “Ünal”, costs 10.50 €!",
    "an e-mail: a.b@c.it (1999-2001) ... l'uomo",
    "aaa aa a bb bbb",
] * 2
TOKENIZERS = {"characters": Characters.train(SEEN), "bpe": BPE.train(SEEN, 120)}
SPACE = {kind: tokenizer.encode(" ")[0] for kind, tokenizer in TOKENIZERS.items()}
TEXTS = st.one_of(
    st.text(max_size=30), st.text(alphabet="ab'1-. €\u0308\u00a0\u200b🙂", max_size=30), st.sampled_from(SEEN)
)


@pytest.mark.parametrize("kind", TOKENIZERS)
class TestPlaces:
    @given(text=TEXTS)
    @settings(max_examples=200, deadline=None)
    def test_a_text_has_the_tokens_of_its_words(self, kind, text):
        tokenizer, text = TOKENIZERS[kind], tidy(text)
        words = text.split()
        pieces = [(" " * (i > 0)) + word for i, word in enumerate(words)]
        assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)
        if words:
            *places, end = Tag(["X"], tokenizer, 99).places(text)
            whole = [SOS, *tokenizer.encode(text), EOS]
            assert whole[end] == EOS
            assert len(places) == len(words)
            ends = accumulate((len(tokenizer.encode(piece)) for piece in pieces), initial=1)
            for word, piece, start, place in zip(words, pieces, ends, places, strict=False):
                alone = piece[0] == " " and tokenizer.encode(piece) == tokenizer.encode(" ") + tokenizer.encode(word)
                assert place == start + alone
                assert alone or whole[place] != SPACE[kind]

    def test_a_space_never_seen_is_a_space_too(self, kind):
        tokenizer = {"characters": Characters.train(["ab"]), "bpe": BPE.train(["abab"], 9)}[kind]
        assert Tag(["X"], tokenizer, 9).places("ß ab ß")[0] == 1
        assert tokenizer.encode(" ß") == [UNK, UNK]
        assert Tag(["X"], tokenizer, 9).places("ß ß") == [1, 3, 4]

    def test_targets_stand_at_first_tokens(self, kind):
        tokenizer = TOKENIZERS[kind]
        data = make_tags("p", [("a bbb aa", "Y X Y"), ("cat's", "X")], {"train": torch.arange(2)})
        task = Tag(["X", "Y"], tokenizer, 20)
        targets = task.targets(data)
        rows = [targets.take(i, View.whole(), (1, 1)) for i in range(2)]
        for row, line in zip(rows, data.lines, strict=True):
            assert len(row) == len(tokenizer.encode(line)) + 2
        batch = targets.stack(rows)
        assert task.names(batch) == [["Y", "X", "Y"], ["X"]]
        assert batch[:, 0].tolist() == [0, 0]
        assert batch[:, 1].tolist() == [2, 1]


# ---- loss and metrics ----


class TestLoss:
    def task(self, smoothing=0.0):
        return Tag(["O", "B-X", "I-X"], Characters.train(["ab "]), 11, smoothing)

    def test_only_words_count_whatever_the_padding(self):
        task, targets = self.task(0.1), torch.tensor([[0, 2, 0, 3, 0], [0, 1, 0, 0, 0]])
        torch.manual_seed(0)
        logits = torch.randn(2, 5, 3)
        each = []
        for b, t in ((0, 1), (0, 3), (1, 1)):
            log_p = logits[b, t].log_softmax(0)
            each.append(-(0.9 * log_p[targets[b, t] - 1] + 0.1 * log_p.mean()))
        own = torch.ones(2)
        loss = task.loss(logits, targets, targets, own)
        torch.testing.assert_close(loss, torch.stack(each).mean())
        wide, more = F.pad(logits, (0, 0, 0, 4), value=7.0), F.pad(targets, (0, 4))
        torch.testing.assert_close(task.loss(wide, more, more, own), loss)
        assert task.sums(wide, more) == task.sums(logits, targets)
        narrow, padded = task.found(logits, targets), task.found(wide, more)
        assert narrow["said"].shape == narrow["true"].shape == narrow["sure"].shape == (2, 11)
        assert narrow["nats"].shape == (2,)
        for name in narrow:
            torch.testing.assert_close(narrow[name], padded[name])
        assert word_losses(logits, targets)[targets == 0].tolist() == [0.0] * 7

    def test_what_is_found_gives_the_metrics(self):
        task, targets = self.task(), torch.tensor([[0, 2, 0, 3, 1], [0, 1, 0, 0, 0]])
        logits = F.one_hot(torch.tensor([[2, 1, 2, 2, 2], [2, 0, 2, 2, 2]]), 3) * 5.0
        metrics = task.metrics(task.found(logits, targets))
        assert metrics["images"] == 2
        assert metrics["words"] == 4
        assert metrics["accuracy"] == 0.75
        assert metrics["exact"] == 0.5
        real = targets > 0
        assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits[real], targets[real] - 1)))
        assert task.sums(logits, targets) == {"count": 2.0, "accuracy": pytest.approx(2 / 3 + 1)}
        assert "F1 of entities 0.0000" in task.summary(metrics)  # said X over three words, it is over two


class TestMetrics:
    def test_entities(self):
        assert entities(["B-A", "I-A", "O", "B-B", "B-B", "I-B"]) == {("A", 0, 2), ("B", 3, 4), ("B", 4, 6)}
        assert entities(["I-A", "I-A", "O", "I-B", "I-A"]) == {("A", 0, 2), ("B", 3, 4), ("A", 4, 5)}  # strays begin
        assert entities(["B-A", "I-B"]) == {("A", 0, 1), ("B", 1, 2)}
        assert entities(["B-A-C", "I-A-C"]) == {("A-C", 0, 2)}
        assert entities(["O"]) == entities([]) == set()

    def test_what_is_bio(self):
        assert is_bio(["O", "B-PER", "I-PER"])
        assert is_bio(["B-PER"])
        for labels in (["O"], ["NOUN", "VERB"], ["O", "B-"], ["O", "B"], ["O", "B-PER", "E-PER"], ["B-PER", "X"]):
            assert not is_bio(labels)

    def test_by_hand(self):
        true = [["B-P", "I-P", "O", "B-L"], ["O", "O"], ["B-P", "O"]]
        said = [["B-P", "I-P", "O", "B-P"], ["O", "O"], ["B-P", "I-P"]]
        metrics = tag_metrics(said, true, ["B-L", "B-P", "I-P", "O"])
        # Words: 6 of 8 right. Entities: 3 true, 3 said, of which P 0-2 alone has its type and both ends.
        assert metrics["accuracy"] == 6 / 8
        assert metrics["accuracy_95"] == pytest.approx([0.40927, 0.92852], abs=1e-4)
        assert metrics["exact"] == 1 / 3
        assert metrics["entity_precision"] == metrics["entity_recall"] == metrics["entity_f1"] == metrics["f1"] == 1 / 3
        assert metrics["entities"] == 3
        assert metrics["by_entity"]["P"] == {"entities": 2, "precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5}
        assert metrics["by_entity"]["L"] == {"entities": 1, "precision": 0.0, "recall": 0.0, "f1": 0.0}
        assert metrics["by_label"]["B-P"] == {"words": 2, "precision": 2 / 3, "recall": 1.0, "f1": 4 / 5}
        assert metrics["by_label"]["O"] == {"words": 4, "precision": 1.0, "recall": 3 / 4, "f1": 6 / 7}
        assert metrics["f1_macro"] == pytest.approx((0 + 4 / 5 + 2 / 3 + 6 / 7) / 4)

    def test_macro_is_scikit_learns(self):
        generator = torch.Generator().manual_seed(1)
        names = ["N", "V", "ADJ", "never"]
        said, true = ([names[i] for i in torch.randint(3, (47,), generator=generator).tolist()] for _ in range(2))
        metrics = tag_metrics([said[:20], said[20:]], [true[:20], true[20:]], names)
        assert metrics["f1"] == pytest.approx(f1_score(true, said, average="macro"))
        assert metrics["by_label"]["never"]["words"] == 0
        assert "entity_f1" not in metrics
        with pytest.raises(DataError, match="no words to measure"):
            tag_metrics([], [], names)


# ---- whole runs ----


class TestRuns:
    def test_a_rule_is_learnt(self, run):
        assert run.metrics["test"]["accuracy"] == 1.0
        assert run.metrics["test"]["exact"] == run.metrics["test"]["entity_f1"] == 1.0
        predictor = Predictor(run.path)
        assert isinstance(predictor.model, TextEncoder)
        assert predictor.labels == ["B-NUM", "I-NUM", "O"]
        (answer,) = predictor.predict(" a  1 2 d\n")
        assert (answer.words, answer.tags) == (["a", "1", "2", "d"], ["O", "B-NUM", "I-NUM", "O"])
        assert answer.text() == "a/O 1/B-NUM 2/I-NUM d/O"
        assert min(answer.probabilities) > 0.5

    def test_answers_depend_on_neither_batch_nor_padding(self, run):
        texts = ["a", "1 2 a", "b 1 1 2", "1"]
        together, alone = Predictor(run.path), Predictor(run.path, batch_size=1)
        for a, b in zip(together.predict(texts), alone.predict(texts), strict=True):
            assert a.tags == b.tags
            assert a.probabilities == pytest.approx(b.probabilities, abs=1e-5)

    def test_the_run_remembers_all(self, run, path):
        about = read_run_config(run.path)
        assert about.task == "tag"
        assert about.model.pool == "tokens"
        assert set(about.tokenizers) == {"source"}
        assert load_task(about).places("ab 1") == [1, 4, 5]
        assert vitral.evaluate(run.path, path, split="train")["accuracy"] == 1.0

    def test_what_comes_by_itself_is_what_training_saw(self, run, path):
        config = TrainConfig(text=TextOptions(tokenizer="characters"))
        data = tokenized(open_data(path), config.text)
        task = make_task(None, data, config)
        inputs = make_inputs(data, config, task.name)
        batch = inputs.feed(data, task.targets(data), 1.0, 0, False)[torch.arange(7), torch.arange(7)]
        assert batch.inputs.shape == batch.targets.shape
        assert not batch.targets[(batch.inputs == PAD) | (batch.inputs == SOS) | (batch.inputs == EOS)].any()
        assert task.names(batch.targets) == [tags.split() for tags in data.texts[:7]]

    def test_report_and_card(self, run):
        page, card = ((run.path / name).read_text() for name in ("report.html", "README.md"))
        assert "Most confident mistakes" in page
        assert "None: every word of the test split was tagged correctly." in page
        assert "A Transformer that gives each word of a text one of 3 tags: B-NUM, I-NUM, O." in card

    def test_mistakes_and_entities_are_shown(self, tmp_path):
        pairs = [("Anna <sings>", "B-P O"), ("a Rossi", "O B-P"), ("Rossi", "B-P")] * 8
        data = make_tags("p", pairs, {"train": torch.arange(24), "val": torch.arange(2)})
        made = vitral.train(data, out=tmp_path / "run", epochs=1, **QUICK | {"lr": 0.0})
        page = (tmp_path / "run" / "report.html").read_text()
        assert "By entity" in page
        assert made.metrics["val"]["entities"] == 2
        wrong = round((1 - made.metrics["val"]["accuracy"]) * 4)
        assert wrong > 0
        table = page[page.index("Most confident mistakes") :]
        assert table.count("&lt;sings&gt;") + table.count("<td>a Rossi</td>") >= 1

    def test_no_vector_for_a_text(self, run):
        with pytest.raises(InputError, match="has a vector for each token, not one for a text"):
            Predictor(run.path).embed("a 1")


# ---- command line ----


class TestCommandLine:
    def say(self, capsys, *words):
        code = main(list(map(str, words)))
        out, err = capsys.readouterr()
        return code, out, err

    def test_predict(self, run, capsys):
        code, out, err = self.say(capsys, "predict", run.path, "a 1", "")
        assert (code, out) == (0, "a 1: a/O 1/B-NUM\n")
        assert err == "warning: the text is empty; give at least one character.\n"
        _, out, _ = self.say(capsys, "predict", run.path, "a 1", "--json")
        (answer,) = json.loads(out)
        assert [(row["word"], row["tag"]) for row in answer["words"]] == [("a", "O"), ("1", "B-NUM")]
        _, out, _ = self.say(capsys, "predict", run.path, "a 1", "--csv")
        rows = list(csv.reader(io.StringIO(out)))
        assert rows[0] == ["text", "word", "tag", "probability", "error"]
        assert [row[:3] for row in rows[1:]] == [["a 1", "a", "O"], ["a 1", "1", "B-NUM"]]

    def test_train_eval_check(self, path, run, capsys, tmp_path):
        (tmp_path / "a.conll").write_text("a O\n1 B-NUM\n\nc O\n\nbare\n")
        options = ["--epochs", 1, "--text.width", 16, "--text.heads", 2, "--text.tokenizer", "characters"]
        code, out, err = self.say(capsys, "train", path, "--task", "tag", "--out", tmp_path / "run", *options)
        assert code == 0
        assert "numbers: 1,000 texts" in err
        assert "report.html" in out
        _, out, _ = self.say(capsys, "eval", run.path, tmp_path / "a.conll", "--json")
        assert json.loads(out)["words"] == 3
        _, out, _ = self.say(capsys, "eval", run.path, tmp_path / "a.conll")
        assert "accuracy 100.00 % of words" in out
        assert "NUM" in out
        _, out, _ = self.say(capsys, "check", tmp_path / "a.conll")
        assert "bad line: " in out
        assert "line 6 has a word and no tag" in out
        (tmp_path / "b.conll").write_text("a O\n1 NEW\n")
        code, _, err = self.say(capsys, "eval", run.path, tmp_path / "b.conll")
        assert code
        assert "tags that the model does not know: NEW" in err

    def test_decoding_takes_the_text_as_it_was_read(self):
        task = Tag(["X", "Y"], Characters.train(["ab "]), 9)
        outputs = torch.zeros(1, 6, 2)
        outputs[0, 1, 0], outputs[0, 3, 1] = 3.0, 3.0
        (answer,) = task.decode(outputs, [frame(" a  ab ")], 1)
        assert answer.tags == ["X", "Y"]
        assert answer.content()["words"][0] == {"word": "a", "tag": "X", "probability": pytest.approx(0.952574)}
        assert answer.rows()[1] == ["ab", "Y", "0.952574"]
