import random
import sys

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from vitral.errors import DataError
from vitral.tasks.metrics import wilson_interval
from vitral.tasks.text_metrics import edit_distance, text_metrics

few_letters = st.text("abcé", max_size=13)
any_text = st.text(max_size=47)

SAID = ["the cat is on the mat today", "hello there world", "a small red house by the sea"]
TRUE = ["the cat sat on the mat today", "hello world", "a small red house by the sea"]


def literal_distance(a, b):
    """The whole table, cell by cell."""
    D = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) + 1):
        for j in range(len(b) + 1):
            if i == 0 or j == 0:
                D[i][j] = i + j
            else:
                D[i][j] = min(D[i - 1][j] + 1, D[i][j - 1] + 1, D[i - 1][j - 1] + (a[i - 1] != b[j - 1]))
    return D[-1][-1]


class TestEditDistance:
    @pytest.mark.parametrize(
        ("a", "b", "distance"),
        [
            ("", "", 0),
            ("", "abc", 3),
            ("abc", "", 3),
            ("kitten", "sitting", 3),
            ("saturday", "sunday", 3),
            ("flaw", "lawn", 2),
            ("ab", "ba", 2),
            ("però", "pero", 1),
            ("😀a", "a", 1),
        ],
    )
    def test_by_hand(self, a, b, distance):
        assert edit_distance(a, b) == distance

    @given(few_letters, few_letters)
    def test_against_the_table_with_many_matches(self, a, b):
        assert edit_distance(a, b) == literal_distance(a, b)

    @given(any_text, any_text)
    def test_against_the_table_on_any_text(self, a, b):
        assert edit_distance(a, b) == literal_distance(a, b)

    @pytest.mark.parametrize("length", [31, 63, 64, 65, 131])
    def test_against_the_table_around_the_widths_of_words(self, length):
        draw = random.Random(length)
        a, b = ("".join(draw.choices("abcd", k=length + extra)) for extra in (0, 7))
        assert edit_distance(a, b) == literal_distance(a, b)

    @given(few_letters, few_letters, few_letters)
    def test_it_is_a_distance(self, a, b, c):
        assert edit_distance(a, a) == 0
        assert (edit_distance(a, b) == 0) == (a == b)
        assert edit_distance(a, b) == edit_distance(b, a)
        assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)

    @given(any_text, any_text)
    def test_it_lies_between_the_difference_of_the_lengths_and_the_longer_one(self, a, b):
        assert abs(len(a) - len(b)) <= edit_distance(a, b) <= max(len(a), len(b))


class TestTextMetrics:
    def test_by_hand(self):
        found = text_metrics(["a", "bx", "cat", "hallo"], ["a", "b", "bat", "hello"])
        assert found["exact"] == 1 / 4
        assert found["exact_95"] == list(wilson_interval(1, 4))
        assert found["cer"] == 3 / 10
        assert found["by_length"] == {
            "1": {"count": 2, "exact": 0.5, "cer": 0.5},
            "2-3": {"count": 1, "exact": 0.0, "cer": 1 / 3},
            "4-7": {"count": 1, "exact": 0.0, "cer": 1 / 5},
        }

    def test_lengths_double_and_come_in_order(self):
        true = ["x" * n for n in (100, 16, 15, 8, 7, 4, 3, 2, 1)]
        rows = text_metrics(true, true)["by_length"]
        assert list(rows) == ["1", "2-3", "4-7", "8-15", "16-31", "64-127"]
        assert [row["count"] for row in rows.values()] == [1, 2, 2, 2, 1, 1]

    def test_bleu_and_chrf_against_sacrebleu(self):
        found = text_metrics(SAID, TRUE)
        assert found["bleu"] == sacrebleu.corpus_bleu(SAID, [TRUE]).score
        assert found["chrf"] == sacrebleu.corpus_chrf(SAID, [TRUE]).score
        assert 0 < found["bleu"] < 100
        assert 0 < found["chrf"] < 100
        assert found["bleu_signature"].endswith(f"|version:{sacrebleu.__version__}")
        assert "tok:13a" in found["bleu_signature"]

    def test_what_is_said_and_what_is_true_are_told_apart(self):
        found = text_metrics(SAID, TRUE)
        assert found["cer"] != text_metrics(TRUE, SAID)["cer"]
        assert found["bleu"] != text_metrics(TRUE, SAID)["bleu"]

    def test_all_exact(self):
        found = text_metrics(TRUE, TRUE)
        assert (found["exact"], found["cer"]) == (1, 0)
        assert found["bleu"] == pytest.approx(100)
        assert found["chrf"] == pytest.approx(100)

    def test_the_error_rate_can_exceed_one(self):
        assert text_metrics(["many words"], ["no"])["cer"] == 8 / 2

    def test_the_error_rate_weighs_by_characters(self):
        assert text_metrics(["x", "abcdefghi"], ["a", "abcdefghi"])["cer"] == 1 / 10

    def test_empty_texts(self):
        assert text_metrics([""], ["abc"])["cer"] == 1
        assert text_metrics(["ab"], [""])["by_length"] == {"0": {"count": 1, "exact": 0.0, "cer": 2.0}}
        assert text_metrics([""], [""])["cer"] == 0

    @given(st.lists(st.tuples(few_letters, few_letters), min_size=1, max_size=7))
    def test_the_table_adds_up_to_the_whole(self, pairs):
        said, true = ([pair[i] for pair in pairs] for i in (0, 1))
        found = text_metrics(said, true)
        rows = found["by_length"].values()
        assert sum(row["count"] for row in rows) == len(pairs)
        assert sum(row["count"] * row["exact"] for row in rows) == pytest.approx(len(pairs) * found["exact"])
        assert found["exact_95"][0] <= found["exact"] <= found["exact_95"][1]

    def test_no_texts(self):
        with pytest.raises(DataError, match=r"^there are no texts to measure; give at least one\.$"):
            text_metrics([], [])

    def test_lists_of_two_lengths(self):
        with pytest.raises(DataError, match=r"^2 texts were said and 3 are true; give one of each for every example"):
            text_metrics(["a", "b"], ["a", "b", "c"])

    def test_without_sacrebleu(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
        with pytest.raises(DataError, match=r"need sacrebleu: pip install 'vitral\[train\]'"):
            text_metrics(["a"], ["a"])
