import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vitral.data.tokenizer import (
    BPE,
    EOS,
    PAD,
    REPLACEMENT,
    SOS,
    SPECIAL,
    TOKENIZERS,
    UNK,
    Characters,
    count_unknown,
    pad,
    tokenizer_from_dict,
)
from vitral.errors import DataError, UnknownNameError

TEXTS = [
    "the cat sat on the mat", "the dog sat on the log", "perché no, così è la città", "PAD SOS EOS UNK PAD SOS EOS UNK",
    "PAD PAD PAD  UNK UNK UNK [PAD] [PAD] <unk>", "tab\tand\nnew line, 1234 and 34 12", "e\u0301 accents ▁▁ é",
] * 3  # fmt: skip
ALPHABET = sorted(set("".join(TEXTS)))


@pytest.fixture(scope="module", params=["characters", "bpe"])
def tokenizer(request):
    return Characters.train(TEXTS) if request.param == "characters" else BPE.train(TEXTS, 120)


class TestBoth:
    def test_special_tokens_have_fixed_numbers(self, tokenizer):
        assert (PAD, SOS, EOS, UNK) == (0, 1, 2, 3)
        assert SPECIAL[UNK] == "UNK"
        assert min(min(tokenizer.encode(text)) for text in TEXTS) == len(SPECIAL)

    def test_decode_is_the_inverse_on_known_characters(self, tokenizer):
        @given(st.text(st.sampled_from(ALPHABET)))
        def law(text):
            ids = tokenizer.encode(text)
            assert tokenizer.decode(ids) == text
            assert all(len(SPECIAL) <= i < len(tokenizer) for i in ids)
            assert tokenizer.unknown(text) == []

        law()

    def test_unknown_characters_are_counted_and_shown(self, tokenizer):
        @given(st.text(st.one_of(st.sampled_from(ALPHABET), st.characters())))
        def law(text):
            ids, unknown = tokenizer.encode(text), tokenizer.unknown(text)
            assert ids.count(UNK) == len(unknown)
            assert tokenizer.decode(ids) == "".join(c if c in ALPHABET else REPLACEMENT for c in text)

        law()
        assert count_unknown(tokenizer, ["the ß", "ß汉t"]) == {"ß": 2, "汉": 1}

    def test_half_characters_are_unknown(self, tokenizer):
        assert tokenizer.encode("\ud800") == [UNK]

    def test_text_is_never_taken_for_a_special_token(self, tokenizer):
        for text in ("PAD SOS EOS UNK", "PAD ", "UNK \nEOS", "[PAD]", "<unk>"):
            ids = tokenizer.encode(text)
            assert min(ids) >= len(SPECIAL), text
            assert tokenizer.decode(ids) == text

    def test_decode_stops_at_the_end_and_passes_over_padding(self, tokenizer):
        ids = tokenizer.encode("the cat")
        assert tokenizer.decode([SOS, *ids, PAD, EOS, *ids]) == "the cat"
        assert tokenizer.decode([EOS, *ids]) == ""
        assert tokenizer.decode([UNK]) == REPLACEMENT
        assert tokenizer.decode(torch.tensor(ids).tolist()) == "the cat"

    def test_nothing_is_nothing(self, tokenizer):
        assert tokenizer.encode("") == []
        assert tokenizer.decode([]) == ""

    def test_saved_as_json_and_read_again(self, tokenizer):
        again = tokenizer_from_dict(json.loads(json.dumps(tokenizer.to_dict())))
        assert type(again) is type(tokenizer)
        assert len(again) == len(tokenizer)
        for text in [*TEXTS, "unseen: ß, the log and the mat"]:
            assert again.encode(text) == tokenizer.encode(text)
        assert again.to_dict() == tokenizer.to_dict()

    def test_training_is_deterministic(self, tokenizer):
        size = {} if tokenizer.kind == "characters" else {"size": len(tokenizer)}
        assert TOKENIZERS[tokenizer.kind].train(iter(TEXTS), **size).to_dict() == tokenizer.to_dict()

    @pytest.mark.parametrize("wrong", [10_007, -1])
    def test_a_token_of_another_model(self, tokenizer, wrong):
        with pytest.raises(DataError, match=f"token {wrong} is not in the vocabulary of {len(tokenizer)}; "):
            tokenizer.decode([wrong])

    @pytest.mark.parametrize("texts", [[], ["", ""]])
    def test_no_texts(self, tokenizer, texts):
        size = {} if tokenizer.kind == "characters" else {"size": 97}
        with pytest.raises(DataError, match="without any character"):
            TOKENIZERS[tokenizer.kind].train(texts, **size)


class TestBPE:
    def test_frequent_words_become_one_token(self):
        tokenizer = BPE.train(["the cat and the dog"] * 5, 60)
        assert len(tokenizer.encode("the")) == len(tokenizer.encode(" the")) == 1
        assert len(tokenizer) <= 60

    def test_it_is_shorter_than_characters(self):
        tokenizer = BPE.train(TEXTS, 120)
        assert sum(len(tokenizer.encode(t)) for t in TEXTS) < 0.5 * sum(map(len, TEXTS))

    def test_a_vocabulary_too_small(self):
        with pytest.raises(DataError, match=r"a vocabulary of 5 cannot hold the 3 different characters .* for 7 or"):
            BPE.train(["abc"], 5)
        assert len(BPE.train(["abc"], 7)) == 7

    def test_without_the_library(self, monkeypatch):
        saved = BPE.train(TEXTS, 120).to_dict()
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(DataError, match=r"needs tokenizers: pip install 'vitral\[train\]'"):
            BPE.train(TEXTS, 120)
        loaded = tokenizer_from_dict(saved)
        assert loaded.decode([SOS, EOS]) == ""
        with pytest.raises(DataError, match=r"pip install 'vitral\[train\]'"):
            loaded.encode("the")


class TestDamaged:
    @pytest.mark.parametrize(
        ("saved", "said"),
        [
            ({"kind": "characters"}, "no list 'tokens' of strings, only kind"),
            ({"kind": "characters", "tokens": ["a", 3]}, "no list 'tokens'"),
            ({"kind": "characters", "tokens": ["a", "bc"]}, "'bc', which is not one character"),
            ({"kind": "characters", "tokens": ["a", "b", "b"]}, "'b' stands in it twice"),
            ({"kind": "bpe", "tokens": ["a", "b"]}, "no list 'merges' of pairs"),
            ({"kind": "bpe", "tokens": ["a", "b"], "merges": [["a"]]}, "no list 'merges' of pairs"),
            ({"kind": "bpe", "tokens": ["a", "b"], "merges": [["a", "b"]]}, "merges 'a' and 'b', no tokens of its"),
        ],
    )
    def test_what_is_wrong_is_said(self, saved, said):
        with pytest.raises(DataError, match=said):
            tokenizer_from_dict(saved)

    @pytest.mark.parametrize("kind", ["words", None])
    def test_an_unknown_kind(self, kind):
        with pytest.raises(UnknownNameError, match=f"unknown kind of tokenizer {kind!r}; known: bpe, characters"):
            tokenizer_from_dict({"kind": kind, "tokens": []})


class TestPad:
    @given(st.lists(st.lists(st.integers(1, 97)), min_size=1))
    def test_rows_are_the_sequences(self, sequences):
        batch, mask = pad(sequences)
        assert batch.shape == mask.shape == (len(sequences), max(map(len, sequences)))
        assert (batch.dtype, mask.dtype) == (torch.long, torch.bool)
        assert [row[keep].tolist() for row, keep in zip(batch, mask, strict=True)] == sequences
        assert (batch[~mask] == PAD).all()
        assert (mask.int().diff(dim=1) <= 0).all()  # the padding stands at the end

    def test_none_cannot_be_padded(self):
        with pytest.raises(DataError, match="a batch of 0 sequences cannot be padded; give at least one"):
            pad([])
