"""Lengths in damaged files that are larger than the files."""

import pytest

from vitral.config import TextConfig
from vitral.errors import ConfigError
from vitral.weights.files import _Bounded


def test_a_read_never_asks_for_more_than_the_file_holds(tmp_path):
    path = tmp_path / "x.pt"
    path.write_bytes(b"0123456789")
    with _Bounded(path) as file:
        assert file.read(4) == b"0123"
        assert file.read(2**62) == b"456789"  # io.BufferedReader itself would raise MemoryError
        assert file.read(1) == b""
        assert file.read(-1) == b""


@pytest.mark.parametrize("token", [-1, 256, 10**30])
def test_the_padding_token_is_one_of_the_vocabulary(token):
    with pytest.raises(ConfigError, match="pad_token must be a token below vocab_size"):
        TextConfig(vocab_size=256, pad_token=token)
