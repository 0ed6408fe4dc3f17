"""The tokenizers that a run or an exported file records, and whether they fit its model."""

from vitral.config import TextConfig
from vitral.data.tokenizer import Tokenizer, tokenizer_from_dict
from vitral.weights.rundir import Described, naming


def load_tokenizer(about: Described, which: str) -> Tokenizer:
    """The tokenizer of what is read ("source") or written ("target")."""
    if which not in about.tokenizers:
        raise about.wrong("tokenizers", f"an object with the key {which}")
    with naming(f"{about.source}, tokenizer {which}"):
        return tokenizer_from_dict(about.tokenizers[which])


def speaks(model: TextConfig, tokenizer: Tokenizer, length: int) -> bool:
    """Whether a model knows the tokens of a tokenizer, and sequences of that length."""
    return model.vocab_size == len(tokenizer) and model.max_length >= length
