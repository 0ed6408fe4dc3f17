"""Text to numbers and back: characters, or byte-pair encoding trained on the data.

Four numbers are the same in every tokenizer: PAD, SOS, EOS and UNK. What `encode` gives holds neither SOS nor EOS: who
feeds a model puts them where it wants them. A tokenizer is saved as plain JSON and knows nothing about models.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from vitral.errors import DataError, unknown_name

PAD, SOS, EOS, UNK = range(4)
SPECIAL = ("PAD", "SOS", "EOS", "UNK")
"""Names of the numbers that stand for no text."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What UNK is written as."""


def tidy(text: str) -> str:
    """A text as all texts are read: composed accents, single spaces, none at the ends, no halves of characters."""
    whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return " ".join(unicodedata.normalize("NFC", whole).split())


class Tokenizer(Protocol):
    """Text to numbers and back; its length is the number of different tokens, the special ones among them."""

    def __len__(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without SOS and EOS; a character never seen becomes UNK."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens up to the first EOS."""
        ...

    def unknown(self, text: str) -> list[str]:
        """The characters that `encode` makes UNK, one for each."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """All there is to it, as JSON takes it."""
        ...


class _Table:
    """What both kinds share: a token is a piece of text, told by its place in a list."""

    kind: ClassVar[str]

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = list(pieces)
        """Text of each token after the special ones."""
        self.numbers = {piece: i for i, piece in enumerate(self.pieces, start=len(SPECIAL))}
        if len(self.numbers) != len(self.pieces):
            twice = Counter(self.pieces).most_common(1)[0][0]
            raise DataError(f"a tokenizer must hold each token once, but {twice!r} stands in it twice; make it anew.")

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.pieces)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the tokens up to the first EOS; PAD and SOS are nothing, UNK is the replacement character."""
        return "".join(self._texts(ids))

    def _texts(self, ids: Sequence[int]) -> Iterator[str]:
        for number in ids:
            if number == EOS:
                return
            if not 0 <= number < len(self):
                raise DataError(
                    f"token {number} is not in the vocabulary of {len(self)}; the model and the tokenizer must be of "
                    "one run."
                )
            if number == UNK:
                yield REPLACEMENT
            elif number >= len(SPECIAL):
                yield self.pieces[number - len(SPECIAL)]

    def unknown(self, text: str) -> list[str]:
        """The characters that `encode` makes UNK, one for each."""
        return [character for character in text if character not in self.numbers]


# ---- characters ----


class Characters(_Table):
    """A token for each character of the training texts."""

    kind = "characters"

    @classmethod
    def train(cls, texts: Iterable[str]) -> "Characters":
        """Take every character that occurs, in the order of Unicode."""
        return cls(_alphabet(texts))

    def encode(self, text: str) -> list[int]:
        """A number for each character."""
        return [self.numbers.get(character, UNK) for character in text]

    def to_dict(self) -> dict[str, Any]:
        """The characters."""
        return {"kind": self.kind, "tokens": self.pieces}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "Characters":
        """The inverse of `to_dict`."""
        tokens = _tokens(saved)
        long = next((token for token in tokens if len(token) != 1), None)
        if long is not None:
            raise DataError(f"a tokenizer of characters holds {long!r}, which is not one character; make it anew.")
        return cls(tokens)


# ---- byte-pair encoding ----

# A word with the space before it, a number, a run of marks, or spaces (Radford et al., 2019): no pair crosses these.
_PIECES = r" ?\p{L}[\p{L}\p{M}]*| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# No piece has a space after a letter, so that no text can be taken for one of these.
_NAMES = tuple(f"{name} " for name in SPECIAL)
_SURROGATES = re.compile("[\ud800-\udfff]")
_DOUBLED = 2
"""How often a pair must occur to become a token."""


class BPE(_Table):
    """Tokens made by joining, again and again, the pair that occurs most often (Sennrich et al., 2016).

    Every token is a literal piece of text, spaces included, so that joining the tokens gives the text back.
    """

    kind = "bpe"

    def __init__(self, pieces: Sequence[str], merges: Sequence[tuple[str, str]]) -> None:
        super().__init__(pieces)
        self.merges = [(first, second) for first, second in merges]

    @classmethod
    def train(cls, texts: Iterable[str], size: int) -> "BPE":
        """Learn at most `size` tokens, the special ones and all characters of the texts among them."""
        texts = [_SURROGATES.sub(REPLACEMENT, text) for text in texts]
        alphabet = _alphabet(texts)
        least = len(SPECIAL) + len(alphabet)
        if size < least:
            raise DataError(
                f"a vocabulary of {size} cannot hold the {len(alphabet)} different characters of the texts; "
                f"ask for {least} or more."
            )
        library = _library()
        machine = library.Tokenizer(library.models.BPE())
        machine.pre_tokenizer = _split(library)
        trainer = library.trainers.BpeTrainer(
            vocab_size=size, min_frequency=_DOUBLED, special_tokens=list(_NAMES), show_progress=False,
            initial_alphabet=alphabet,
        )  # fmt: skip
        machine.train_from_iterator(texts, trainer)
        vocabulary = machine.get_vocab()
        pieces = sorted(vocabulary.keys() - set(_NAMES), key=vocabulary.__getitem__)
        return cls(pieces, _merges(machine))

    @cached_property
    def _machine(self) -> Any:
        """The library's tokenizer, made from the tokens alone, so that it takes no text for a special token."""
        library = _library()
        vocabulary = {name: i for i, name in enumerate(_NAMES)} | self.numbers
        try:
            model = library.models.BPE(vocab=vocabulary, merges=self.merges, unk_token=_NAMES[UNK], fuse_unk=False)
        except Exception as error:
            raise DataError(f"the merges of a tokenizer do not fit its tokens ({error}); make it anew.") from error
        machine = library.Tokenizer(model)
        machine.pre_tokenizer = _split(library)
        return machine

    def encode(self, text: str) -> list[int]:
        """The tokens that the learnt merges give."""
        return self._machine.encode(_SURROGATES.sub(REPLACEMENT, text)).ids

    def to_dict(self) -> dict[str, Any]:
        """The tokens, and the pairs in the order in which they are joined."""
        return {"kind": self.kind, "tokens": self.pieces, "merges": [list(pair) for pair in self.merges]}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> "BPE":
        """The inverse of `to_dict`."""
        tokens, merges = _tokens(saved), saved.get("merges")
        if not isinstance(merges, list) or not all(
            isinstance(pair, list | tuple) and [type(part) for part in pair] == [str, str] for pair in merges
        ):
            raise DataError("a saved tokenizer of kind bpe has no list 'merges' of pairs of strings; make it again.")
        loaded = cls(tokens, merges)
        known = loaded.numbers
        for first, second in loaded.merges:
            if not (first in known and second in known and first + second in known):
                raise DataError(f"a saved tokenizer merges {first!r} and {second!r}, no tokens of its; make it anew.")
        return loaded


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise DataError("a tokenizer of kind bpe needs tokenizers: pip install 'vitral[train]'.") from None
    return tokenizers


def _split(library: Any) -> Any:
    return library.pre_tokenizers.Split(library.Regex(_PIECES), "isolated")


def _merges(machine: Any) -> list[tuple[str, str]]:
    """The merges of a trained tokenizer, which shows them only as JSON."""
    return [(first, second) for first, second in json.loads(machine.to_str())["model"]["merges"]]


# ---- both ----

TOKENIZERS: dict[str, type[Characters] | type[BPE]] = {Characters.kind: Characters, BPE.kind: BPE}
"""Each kind by the name it is asked for and saved under."""


def tokenizer_from_dict(saved: Mapping[str, Any]) -> Characters | BPE:
    """The tokenizer that `to_dict` saved, of whichever kind."""
    kind = saved.get("kind")
    if not isinstance(kind, str) or kind not in TOKENIZERS:
        raise unknown_name("kind of tokenizer", kind, TOKENIZERS)
    return TOKENIZERS[kind].from_dict(saved)


def count_unknown(tokenizer: Tokenizer, texts: Iterable[str]) -> Counter[str]:
    """How often each character occurs that the tokenizer does not know."""
    return Counter(character for text in texts for character in tokenizer.unknown(text))


def pad(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Sequences of tokens as one batch (B, T), filled with PAD, and a mask (B, T) that is True on the sequences."""
    if not sequences:
        raise DataError("a batch of 0 sequences cannot be padded; give at least one.")
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    batch = torch.full(mask.shape, PAD)
    batch[mask] = torch.tensor([number for sequence in sequences for number in sequence], dtype=torch.long)
    return batch, mask


def _alphabet(texts: Iterable[str]) -> list[str]:
    alphabet = sorted(set().union(*texts))
    if not alphabet:
        raise DataError("a tokenizer cannot be made of texts without any character; give texts that hold some.")
    return alphabet


def _tokens(saved: Mapping[str, Any]) -> list[str]:
    tokens = saved.get("tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) and token for token in tokens):
        raise DataError(
            f"a saved tokenizer has no list 'tokens' of strings, only {', '.join(map(str, saved)) or 'nothing'}; "
            "make it anew."
        )
    return tokens
