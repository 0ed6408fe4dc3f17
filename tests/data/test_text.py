from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fetch_en_it
from vitral.data.sources.digits import load_digits
from vitral.data.sources.digits_lines import HIGH, MOST, WIDE, make_digit_lines
from vitral.data.sources.numbers_en_it import LIMIT, SMALL, english, italian, make_numbers
from vitral.data.text import bucketed, load_pairs, make_pairs
from vitral.data.tokenizer import tidy
from vitral.errors import DataError


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return path


class TestLoadPairs:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.csv", 'source,target\nhello,ciao\n"yes, please","sì, grazie"\n'),
            ("a.tsv", "en\tit\nhello\tciao\nyes, please\tsì, grazie\n"),
            ("a.tsv", "hello\tciao\nyes, please\tsì, grazie\n"),
            ("a.tsv", "hello\tciao\r\nyes, please\tsì, grazie"),
            ("a.jsonl", '{"input": "hello", "output": "ciao"}\n\n{"output": "sì, grazie", "input": "yes, please"}\n'),
            ("a.CSV", "\ufeffText,Label\nhello,ciao\n\n\"yes, please\",\"sì, grazie\"\n"),
            ("a.csv", "id,src,tgt\n1,hello,ciao\n2,\"yes, please\",\"si\u0300, grazie \"\n"),
        ],
    )  # fmt: skip
    def test_the_formats(self, tmp_path, name, text):
        pairs = load_pairs(write(tmp_path / name, text))
        assert pairs.lines == ["hello", "yes, please"]
        assert pairs.texts == ["ciao", "sì, grazie"]
        assert pairs.splits["train"].tolist() == [0, 1]
        assert pairs.problems == []
        assert pairs.name == "a"

    def test_columns_by_name(self, tmp_path):
        path = write(tmp_path / "a.csv", "a,b,en,it\n1,2,3,4\n")
        assert load_pairs(path, "b", "a").lines == ["2"]
        assert load_pairs(path, "b", "a").texts == ["1"]
        assert load_pairs(path, source_column="en").texts == ["4"]
        assert load_pairs(path, target_column="it").lines == ["3"]
        two = write(tmp_path / "b.csv", "x,split,y\n1,train,2\n")
        assert load_pairs(two, source_column="y").texts == ["1"]
        assert load_pairs(two, target_column="y").lines == ["1"]

    def test_tsv_has_no_quotes(self, tmp_path):
        pairs = load_pairs(write(tmp_path / "a.tsv", 'the "cat\til "gatto\nthe dog\til cane\n'))
        assert pairs.lines == ['the "cat', "the dog"]
        assert "no header" in pairs.notes[0]

    def test_splits(self, tmp_path):
        text = "split\ten\tit\ntrain\ta\tb\nvalidation\tc\td\nTest\te\tf\ntrain\tg\th\n"
        pairs = load_pairs(write(tmp_path / "a.tsv", text))
        assert {k: v.tolist() for k, v in pairs.splits.items()} == {"train": [0, 3], "val": [1], "test": [2]}
        assert pairs.describe() == "a: 4 texts, each with a text to write, 1 characters, split train/val/test 2/1/1"

    def test_what_cannot_be_used_is_left_out_and_listed(self, tmp_path):
        lines = ['{"source": "a", "target": "b"}', '{"source": " ", "target": "b"}', '{"source": "a", "target": null}',
                 "{", "[1]", '{"source": "a"}', '{"source": 3, "target": "c"}']  # fmt: skip
        pairs = load_pairs(write(tmp_path / "a.jsonl", "\n".join(lines)))
        assert (pairs.lines, pairs.texts) == (["a", "3"], ["b", "c"])
        kinds = [p["kind"] for p in pairs.problems]
        assert kinds == ["empty_source", "empty_target", "bad_line", "bad_line", "bad_line"]
        assert set(kinds) == {"bad_line", "empty_source", "empty_target"}
        assert pairs.problems[0]["error"] == f"{tmp_path / 'a.jsonl'} line 2: source is empty"
        assert pairs.problems[4]["error"].endswith("line 6: it has no target")
        assert "3 lines cannot be read and were dropped (vitral check lists them)" in pairs.notes

    def test_lines_of_another_width(self, tmp_path):
        pairs = load_pairs(write(tmp_path / "a.tsv", "a\tb\nc\nd\te\tf\ng\th\n"))
        assert pairs.lines == ["a", "g"]
        assert [p["image"].rpartition(" ")[2] for p in pairs.problems] == ["2", "3"]
        assert pairs.problems[0]["error"].endswith("it has 1 fields, and 2 are expected")
        assert load_pairs(write(tmp_path / "a.csv", "en,it\na\nb,c\n")).lines == ["b"]

    @pytest.mark.parametrize(
        ("name", "text", "said"),
        [
            ("a.csv", "", "has no lines"),
            ("a.csv", "en,it\n", "has no lines"),
            ("a.tsv", "\n\n", "has no lines"),
            ("a.csv", "one,two\n1,2\n", "its columns are one, two; name them with --text-column and --label-column"),
            ("a.tsv", "1\t2\t3\n4\t5\t6\n", "no columns with usual names"),
            ("a.jsonl", "{\n[\n", "its columns are none"),
            ("a.csv", "en,it\n,b\na,\n", "no usable pair of texts; the first problem is .* line 2: en is empty"),
            (
                "a.csv",
                "split,en,it\nhidden,a,b\ntrain,c,d\n",
                "column split must hold train, val and test, got hidden, t",
            ),
            ("a.csv", "split,en,it\ntest,a,b\n", "got test; mend it"),
            ("a.csv", "split,en,it\n,a,b\ntrain,c,d\n", "got nothing, train; mend it"),
            ("a.xlsx", "x", r"unknown kind \(.xlsx\); give a CSV, TSV or JSONL file"),
            ("a", "x", r"unknown kind \(no suffix\)"),
        ],
    )
    def test_bad_files(self, tmp_path, name, text, said):
        with pytest.raises(DataError, match=said):
            load_pairs(write(tmp_path / name, text))

    def test_unreadable_files(self, tmp_path):
        with pytest.raises(DataError, match=r"cannot be read .*No such file"):
            load_pairs(tmp_path / "none.csv")
        (tmp_path / "latin.csv").write_bytes("en,it\nyes,sì\n".encode("latin-1"))
        with pytest.raises(DataError, match=r"cannot be read .* give a text file in UTF-8"):
            load_pairs(tmp_path / "latin.csv")

    def test_columns_that_are_not_there(self, tmp_path):
        path = write(tmp_path / "a.csv", "en,it\na,b\n")
        with pytest.raises(DataError, match="no column 'fr', its columns are en, it; name another with --text-column"):
            load_pairs(path, "fr", "it")
        with pytest.raises(DataError, match="no column 'fr', it has no header; name another with --label-column"):
            load_pairs(write(tmp_path / "a.tsv", "a\tb\n"), target_column="fr")

    @given(st.text(st.characters(codec=None)))
    def test_tidy_changes_nothing_twice(self, text):
        once = tidy(text)
        assert tidy(once) == once
        once.encode()
        assert once == once.strip()

    def test_half_characters_are_replaced(self):
        assert tidy("a\ud800  b") == "a\ufffd b"
        assert tidy("e\u0301\n") == "é"


class TestTextPairs:
    def test_counts_must_agree(self):
        three = make_pairs("three", [("a", "d"), ("b", "e"), ("c", "f")], {"train": torch.arange(3)})
        with pytest.raises(DataError, match="three has 3 texts but texts to write for 2"):
            replace(three, texts=["d", "e"])
        with pytest.raises(DataError, match="none has no texts"):
            make_pairs("none", [], {})

    def test_splits_that_are_missing_are_cut_from_the_training_part(self):
        sources = [f"s{i % 53}" for i in range(211)]
        pairs = make_pairs("p", list(zip(sources, sources, strict=True)), {"train": torch.arange(211)})
        cut = pairs.with_splits(0.1, 0.2, seed=3)
        assert list(cut.splits) == ["train", "val", "test"]
        assert torch.cat(list(cut.splits.values())).sort().values.tolist() == list(range(211))
        words = [{sources[i] for i in part.tolist()} for part in cut.splits.values()]
        assert sum(map(len, words)) == 53  # equal sources stay together
        assert (len(words[1]), len(words[2])) == (round(0.1 * (53 - 11)), 11)
        again = pairs.with_splits(0.1, 0.2, seed=3)
        assert all(torch.equal(a, b) for a, b in zip(again.splits.values(), cut.splits.values(), strict=True))
        assert not torch.equal(pairs.with_splits(0.1, 0.2, seed=4).splits["test"], cut.splits["test"])
        assert "22" not in pairs.describe()
        assert len(cut.notes) == 2

    def test_one_pair_stays_for_training(self):
        pairs = make_pairs("p", [("a", "b"), ("a", "c")], {"train": torch.arange(2)}).with_splits(0.5, 0.5, seed=0)
        assert list(pairs.splits) == ["train"]


class TestBucketed:
    @given(
        st.lists(st.integers(0, 97), max_size=300), st.integers(1, 17), st.integers(0, 2**31), st.integers(0, 1000)
    )  # fmt: skip
    def test_every_sample_once_in_full_batches(self, lengths, batch_size, seed, epoch):
        batches = bucketed(lengths, batch_size, seed, epoch)
        assert sorted(i for batch in batches for i in batch.tolist()) == list(range(len(lengths)))
        assert sorted(map(len, batches), reverse=True)[:-1] == [batch_size] * (len(batches) - 1)
        again = bucketed(torch.tensor(lengths, dtype=torch.long), batch_size, seed, epoch)
        assert [b.tolist() for b in again] == [b.tolist() for b in batches]

    def test_similar_lengths_lie_together(self):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(1, 101, (5003,), generator=generator)

        def padded(batches):
            return sum(len(b) * int(lengths[b].max()) for b in batches) / int(lengths.sum())

        assert padded(torch.randperm(5003, generator=generator).split(31)) > 1.8
        assert padded(bucketed(lengths, 31, seed=0, epoch=0)) < 1.05

    def test_epochs_and_seeds_differ_and_long_ones_do_not_come_last(self):
        lengths = torch.arange(1009)
        orders = {tuple(torch.cat(bucketed(lengths, 7, s, e)).tolist()) for s in range(3) for e in range(3)}
        assert len(orders) == 9
        means = torch.tensor([lengths[b].float().mean() for b in bucketed(lengths, 7, 0, 0)])
        assert abs(torch.corrcoef(torch.stack([means, torch.arange(len(means)).float()]))[0, 1]) < 0.3

    def test_no_batch_size(self):
        with pytest.raises(DataError, match="got a batch size of 0; ask for 1 or more"):
            bucketed([1, 2], 0, 0, 0)


KNOWN = {
    0: ("zero", "zero"), 1: ("one", "uno"), 3: ("three", "tre"), 8: ("eight", "otto"), 10: ("ten", "dieci"),
    11: ("eleven", "undici"), 12: ("twelve", "dodici"), 13: ("thirteen", "tredici"), 14: ("fourteen", "quattordici"),
    15: ("fifteen", "quindici"), 16: ("sixteen", "sedici"), 17: ("seventeen", "diciassette"),
    18: ("eighteen", "diciotto"), 19: ("nineteen", "diciannove"), 20: ("twenty", "venti"),
    21: ("twenty-one", "ventuno"), 22: ("twenty-two", "ventidue"), 23: ("twenty-three", "ventitré"),
    28: ("twenty-eight", "ventotto"), 29: ("twenty-nine", "ventinove"), 30: ("thirty", "trenta"),
    31: ("thirty-one", "trentuno"), 33: ("thirty-three", "trentatré"), 38: ("thirty-eight", "trentotto"),
    40: ("forty", "quaranta"), 44: ("forty-four", "quarantaquattro"), 48: ("forty-eight", "quarantotto"),
    50: ("fifty", "cinquanta"), 53: ("fifty-three", "cinquantatré"), 60: ("sixty", "sessanta"),
    61: ("sixty-one", "sessantuno"), 67: ("sixty-seven", "sessantasette"), 70: ("seventy", "settanta"),
    78: ("seventy-eight", "settantotto"), 80: ("eighty", "ottanta"), 81: ("eighty-one", "ottantuno"),
    83: ("eighty-three", "ottantatré"), 88: ("eighty-eight", "ottantotto"), 90: ("ninety", "novanta"),
    91: ("ninety-one", "novantuno"), 99: ("ninety-nine", "novantanove"), 100: ("one hundred", "cento"),
    101: ("one hundred and one", "centouno"), 103: ("one hundred and three", "centotré"),
    108: ("one hundred and eight", "centootto"), 111: ("one hundred and eleven", "centoundici"),
    118: ("one hundred and eighteen", "centodiciotto"), 121: ("one hundred and twenty-one", "centoventuno"),
    123: ("one hundred and twenty-three", "centoventitré"), 180: ("one hundred and eighty", "centottanta"),
    188: ("one hundred and eighty-eight", "centottantotto"), 200: ("two hundred", "duecento"),
    208: ("two hundred and eight", "duecentootto"), 283: ("two hundred and eighty-three", "duecentottantatré"),
    303: ("three hundred and three", "trecentotré"), 800: ("eight hundred", "ottocento"),
    888: ("eight hundred and eighty-eight", "ottocentottantotto"),
    999: ("nine hundred and ninety-nine", "novecentonovantanove"), 1000: ("one thousand", "mille"),
    1001: ("one thousand and one", "milleuno"), 1003: ("one thousand and three", "milletré"),
    1008: ("one thousand and eight", "milleotto"), 1021: ("one thousand and twenty-one", "milleventuno"),
    1080: ("one thousand and eighty", "milleottanta"), 1100: ("one thousand one hundred", "millecento"),
    1492: ("one thousand four hundred and ninety-two", "millequattrocentonovantadue"),
    1861: ("one thousand eight hundred and sixty-one", "milleottocentosessantuno"),
    2000: ("two thousand", "duemila"), 2023: ("two thousand and twenty-three", "duemilaventitré"),
    3000: ("three thousand", "tremila"), 3003: ("three thousand and three", "tremilatré"),
    8000: ("eight thousand", "ottomila"), 8008: ("eight thousand and eight", "ottomilaotto"),
    10_000: ("ten thousand", "diecimila"), 21_000: ("twenty-one thousand", "ventunomila"),
    23_000: ("twenty-three thousand", "ventitremila"),
    28_100: ("twenty-eight thousand one hundred", "ventottomilacento"),
    100_000: ("one hundred thousand", "centomila"), 100_001: ("one hundred thousand and one", "centomilauno"),
    101_000: ("one hundred and one thousand", "centounomila"),
    108_180: ("one hundred and eight thousand one hundred and eighty", "centoottomilacentottanta"),
    180_000: ("one hundred and eighty thousand", "centottantamila"),
    333_333: ("three hundred and thirty-three thousand three hundred and thirty-three",
              "trecentotrentatremilatrecentotrentatré"),
    500_000: ("five hundred thousand", "cinquecentomila"),
    999_999: ("nine hundred and ninety-nine thousand nine hundred and ninety-nine",
              "novecentonovantanovemilanovecentonovantanove"),
}  # fmt: skip

ITALIAN_VALUES = {
    "uno": 1, "due": 2, "tre": 3, "quattro": 4, "cinque": 5, "sei": 6, "sette": 7, "otto": 8, "nove": 9, "dieci": 10,
    "undici": 11, "dodici": 12, "tredici": 13, "quattordici": 14, "quindici": 15, "sedici": 16, "diciassette": 17,
    "diciotto": 18, "diciannove": 19,
    "venti": 20, "trenta": 30, "quaranta": 40, "cinquanta": 50, "sessanta": 60, "settanta": 70, "ottanta": 80,
    "novanta": 90, "vent": 20, "trent": 30, "quarant": 40, "cinquant": 50, "sessant": 60, "settant": 70, "ottant": 80,
    "novant": 90,
}  # fmt: skip


def values(word, values_of):
    """Every number that a word below a thousand can be read as, all ways of cutting it into known words."""
    found = {0} if not word else set()
    for start, value in values_of.items():
        if word.startswith(start):
            for rest in values(word.removeprefix(start), values_of):
                if rest == 0 or (value >= 20 and rest < 10):  # a unit may follow the tens, and nothing else
                    found.add(value + rest)
    return found


def read_group(word):
    """Every number below a thousand that an Italian word can be."""
    found = values(word, ITALIAN_VALUES)
    if "cent" in word:
        digit, _, rest = word.partition("cent")
        hundreds = 100 * (ITALIAN_VALUES[digit] if digit else 1)
        found |= {hundreds + v for v in values(rest.removeprefix("o"), ITALIAN_VALUES)}
        found |= {hundreds + v for v in values(rest, ITALIAN_VALUES)}
    return found


def read_italian(word):
    """Every number that an Italian word can be: a reader, so that nothing is shared with the writer."""
    plain = word.replace("é", "e")
    if plain == "zero":
        return {0}
    if plain.startswith("mille"):
        return {1000 + v for v in read_group(plain.removeprefix("mille"))}
    if "mila" in plain:
        thousands, _, rest = plain.partition("mila")
        return {1000 * t + v for t in read_group(thousands) for v in read_group(rest)}
    return read_group(plain)


def read_english(words):
    """The number that English words are."""
    units = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
    numbers = {w: i for i, w in enumerate([*units.split(), "seventeen", "eighteen", "nineteen"])}
    tens = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
    numbers |= {w: 10 * i for i, w in enumerate(tens, start=2)}
    done = now = 0
    for word in words.replace("-", " ").split():
        if word == "hundred":
            now *= 100
        elif word == "thousand":
            done, now = 1000 * now, 0
        elif word != "and":
            now += numbers[word]
    return done + now


SAMPLE = [*range(2100), *range(2100, LIMIT, 487)]


class TestNumberWords:
    def test_known_ones(self):
        assert len(KNOWN) >= 60
        assert {n: (english(n), italian(n)) for n in KNOWN} == KNOWN

    def test_a_reader_finds_the_number_again(self):
        assert [n for n in SAMPLE if read_italian(italian(n)) != {n}] == []
        assert [n for n in SAMPLE if read_english(english(n)) != n] == []

    def test_different_numbers_have_different_words(self):
        assert len({italian(n) for n in range(LIMIT)}) == LIMIT
        assert len({english(n) for n in range(LIMIT)}) == LIMIT

    def test_accents_stand_on_a_last_tre_only(self):
        for n in SAMPLE:
            word = italian(n)
            assert word.count("é") == (n % 10 == 3 and n % 100 != 13 and n != 3), word
            assert "é" not in word[:-1]
            assert " " not in word

    @pytest.mark.parametrize("n", [-1, LIMIT])
    def test_numbers_beyond(self, n):
        for spell in (english, italian):
            with pytest.raises(DataError, match=f"numbers are spelt from 0 to 999,999, got {n:,}; give one between"):
                spell(n)


class TestMakeNumbers:
    @pytest.fixture(scope="class")
    def numbers(self):
        return make_numbers(train=5003, test=1009, val=211)

    @staticmethod
    def of(pairs, part):
        return [read_english(pairs.lines[i]) for i in pairs.splits[part].tolist()]

    def test_sizes_and_pairs(self, numbers):
        assert [len(v) for v in numbers.splits.values()] == [5003, 211, 1009]
        assert list(numbers.splits) == ["train", "val", "test"]
        for source, target in list(zip(numbers.lines, numbers.texts, strict=True))[::13]:
            assert read_italian(target) == {read_english(source)}

    def test_held_out_numbers_are_never_trained_on(self, numbers):
        parts = {part: self.of(numbers, part) for part in numbers.splits}
        assert len({n for members in parts.values() for n in members}) == 5003 + 211 + 1009
        larger = make_numbers(train=50_021, test=5003, val=0)
        assert "val" not in larger.splits
        assert not set(self.of(larger, "train")) & {*parts["test"], *parts["val"]}
        assert set(self.of(larger, "test")) > set(parts["test"])

    def test_small_numbers_are_trained_on_and_all_lengths_covered(self, numbers):
        train, test = self.of(numbers, "train"), self.of(numbers, "test")
        assert set(range(SMALL)) < set(train)
        assert set(Counter(len(str(n)) for n in train)) == {1, 2, 3, 4, 5, 6}
        digits = Counter(len(str(n)) for n in test)
        assert set(digits) == {3, 4, 5, 6}
        assert min(digits.values()) > 50

    def test_the_seed_decides(self, numbers):
        assert make_numbers(train=5003, test=1009, val=211).lines == numbers.lines
        assert make_numbers(train=5003, test=1009, val=211, seed=1).lines != numbers.lines

    def test_too_many(self):
        with pytest.raises(DataError, match=r"test has \d+,\d+ numbers .*, 500,000 were asked for; ask for fewer"):
            make_numbers(test=500_000)


class TestDigitLines:
    @pytest.fixture(scope="class")
    def lines(self):
        return make_digit_lines(train=307, test=101, val=53)[0]

    @pytest.fixture(scope="class")
    def digits(self):
        return make_digit_lines(train=307, test=101, val=53)[1]

    def test_what_a_picture_reads_is_written_in_it(self, lines, digits):
        assert lines.inputs.pixels.shape == (461, 1, HIGH, WIDE)
        assert lines.inputs.pixels.dtype == torch.uint8
        assert len(lines.inputs) == len(lines.texts) == 461
        labels = load_digits().targets
        for text, row in zip(lines.texts, digits, strict=True):
            shown = row[row >= 0]
            assert text == "".join(str(int(labels[k])) for k in shown)
            assert (row[: len(shown)] >= 0).all()
        assert {len(text) for text in lines.texts} == set(range(1, MOST + 1))
        assert set("".join(lines.texts)) == set("0123456789")

    def test_parts_show_different_digits(self, lines, digits):
        assert {k: len(v) for k, v in lines.splits.items()} == {"train": 307, "val": 53, "test": 101}
        shown = {part: set(digits[members].flatten().tolist()) - {-1} for part, members in lines.splits.items()}
        assert not shown["train"] & shown["test"]
        assert not shown["train"] & shown["val"]
        assert not shown["val"] & shown["test"]
        held_out = load_digits().splits
        assert shown["test"] <= set(held_out["test"].tolist())
        assert shown["train"] | shown["val"] <= set(held_out["train"].tolist())

    def test_the_seed_decides(self, lines):
        again, _ = make_digit_lines(train=307, test=101, val=53)
        assert torch.equal(again.inputs.pixels, lines.inputs.pixels)
        assert again.texts == lines.texts
        other, _ = make_digit_lines(train=307, test=101, val=53, seed=1)
        assert not torch.equal(other.inputs.pixels, lines.inputs.pixels)
        assert other.texts != lines.texts

    def test_more_ink_for_more_digits(self, lines):
        """Every digit of a line is on the picture: columns with ink are as many as a line of its length needs."""
        inked = (lines.inputs.pixels[:, 0] > 140).any(1).sum(1)
        lengths = torch.tensor([len(text) for text in lines.texts])
        assert (inked >= 3 * lengths).all()

    def test_pictures_differ_in_place_and_size(self, lines):
        ink = lines.inputs.pixels[:, 0] > 140
        tops = ink.any(2).int().argmax(1)
        lefts = ink.any(1).int().argmax(1)
        assert len(tops.unique()) > 8
        assert len(lefts.unique()) > 40

    def test_without_validation(self):
        lines, _ = make_digit_lines(train=17, test=0, val=0)
        assert list(lines.splits) == ["train"]

    @pytest.mark.parametrize("sizes", [(0, 0, 0), (5, -1, 0)])
    def test_impossible_sizes(self, sizes):
        with pytest.raises(DataError, match="lines cannot be drawn; ask for one or more"):
            make_digit_lines(*sizes)


class TestEnglishItalian:
    @pytest.mark.parametrize(
        ("english", "italian", "pair"),
        [
            ("_Open the file", "_Apri il file", ("Open the file", "Apri il file")),
            ("Save ~As a Copy...", "S~alva una copia…", ("Save As a Copy...", "Salva una copia...")),
            ("Save the &file now", "Salva il file ora (&f)", ("Save the file now", "Salva il file ora")),
            ("run pg_dump by hand", "esegui pg_dump a mano", ("run pg_dump by hand", "esegui pg_dump a mano")),
            ("<b>Not</b> a valid name\n", "Nome <b>non</b> valido\n", ("Not a valid name", "Nome non valido")),
            ("cannot open file %s", "impossibile aprire il file %s",
             ("cannot open file {1}", "impossibile aprire il file {1}")),
            ("the %s of the %d", "il %2$d del suo %1$s", ("the {1} of the {2}", "il {2} del suo {1}")),
            ("move %(a)s to the {b}", "sposta in {b} il %(a)s", ("move {1} to the {2}", "sposta in {2} il {1}")),
            ("Start %PRODUCTNAME right now", "Avvia %PRODUCTNAME adesso",
             ("Start LibreOffice right now", "Avvia LibreOffice adesso")),
            ("cannot open file %s", "impossibile aprire il file", None),
            ("two words", "due parole", None),
            ("Left as it is", "Left as it is", None),
            ("usage: copy <file> here now", "uso: copy <file> qui ora", None),
            ("  -x, --extract the files", "  -x, --extract i file", None),
            ("First line.\n\nSecond line here", "Prima riga.\n\nSeconda riga qui", None),
            ("word " * 21, "parola " * 21, None),
        ],
    )  # fmt: skip
    def test_sentences(self, english, italian, pair):
        assert fetch_en_it.clean(english, italian) == pair

    def test_catalogues(self, tmp_path):
        folder = tmp_path / "it" / "LC_MESSAGES"
        folder.mkdir(parents=True)
        messages = {
            b"": b"Content-Type: text/plain; charset=ISO-8859-1\n",
            b"menu\4Close the _window": "Chiudi la f_inèstra".encode("latin-1"),
            b"One file was found\0%d files were found": b"Un file \xe8 stato trovato\0Trovati %d file in tutto",
        }
        (folder / "a.mo").write_bytes(catalogue(messages))
        (folder / "b.mo").write_bytes(b"no catalogue at all")
        (folder / "iso_639.mo").write_bytes(catalogue({b"A long dead language": b"Una lingua ormai morta"}))
        pairs, brought = fetch_en_it.collect(fetch_en_it.find_catalogues([tmp_path]))
        assert {(english, italian) for _, english, italian in pairs} == {
            ("Close the window", "Chiudi la finèstra"),
            ("One file was found", "Un file è stato trovato"),
            ("{1} files were found", "Trovati {1} file in tutto"),
        }
        assert brought == {"a.mo": 3}

    def test_the_sentence_alone_decides_its_part(self):
        parts = Counter(fetch_en_it.part_of(f"sentence number {i}") for i in range(5003))
        assert set(parts) == {"train", "val", "test"}
        assert parts["train"] > 0.94 * 5003
        for i in range(997):
            assert fetch_en_it.part_of(f"Open number {i}: {{1}}...") == fetch_en_it.part_of(f"open number {i}")

    def test_the_table_is_read_by_load_pairs(self, tmp_path, monkeypatch, capsys):
        folder = tmp_path / "it" / "LC_MESSAGES"
        folder.mkdir(parents=True)
        messages = {f"sentence of number {i}".encode(): f"frase di numero {i}".encode() for i in range(200)}
        (folder / "a.mo").write_bytes(catalogue(messages))
        monkeypatch.setattr("sys.argv", ["fetch", "--folder", str(tmp_path), "--catalogues", str(tmp_path)])
        monkeypatch.setattr(fetch_en_it, "missing_packages", lambda: ["some-package"])
        fetch_en_it.main()
        assert "missing, so that there will be fewer pairs: some-package" in capsys.readouterr().out
        pairs = load_pairs(tmp_path / "en-it.tsv")
        assert len(pairs.lines) == 200
        assert set(pairs.splits) == {"train", "val", "test"}
        assert pairs.texts[pairs.lines.index("sentence of number 7")] == "frase di numero 7"

    def test_nothing_found(self, tmp_path, monkeypatch):
        monkeypatch.setattr("sys.argv", ["fetch", "--folder", str(tmp_path), "--catalogues", str(tmp_path)])
        with pytest.raises(SystemExit, match="no Italian message catalogue was found"):
            fetch_en_it.main()


def catalogue(messages):
    """A .mo file of the messages."""
    start = 28 + 16 * len(messages)
    tables, texts = [[], []], b""
    for table, column in zip(tables, zip(*messages.items(), strict=True), strict=True):
        for text in column:
            table += [len(text), start + len(texts)]
            texts += text + b"\0"
    head = [0x950412DE, 0, len(messages), 28, 28 + 8 * len(messages), 0, 0]
    return b"".join(v.to_bytes(4, "little") for v in [*head, *tables[0], *tables[1]]) + texts
