"""`.pt2` files before torch opens them: it would unpickle and run what is in them, so all but a graph is refused."""

import io
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from vitral.errors import CheckpointError

DOCUMENT = "vitral.json"
"""Name, inside the archive, of what the file says about itself."""
_MOST_JSON = 2**28
_OPERATION = re.compile(r"torch\.ops\.aten\.\w+(\.\w+)?|_operator\.[a-z]+")
_WORD = re.compile(r"[\w.+-]*")
_SIZE = re.compile(r"(?:Symbol\('\w+'(?:, [a-z]+=True)*\)|(?:Integer|Add|Mul|Pow|Mod|FloorDiv)\b|-?\d+|[(), ])+")
"""A size that depends on the batch, as sympy writes it; sympy evaluates it when it is read."""
_FORMS = ("builtins.tuple", "builtins.dict", None)


def refuse_code(path: Path) -> None:
    """Raise unless an archive holds tensors as plain bytes and a graph of torch's own operations, and no more."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            if len(set(names)) < len(names):
                raise _refusal(path, "two entries of one name")
            for name in names:
                _check_entry(path, archive, name)
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, EOFError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read; it is damaged or no .pt2 file ({error}).") from error


def _check_entry(path: Path, archive: zipfile.ZipFile, name: str) -> None:
    inside = name.partition("/")[2]
    if inside.startswith("models/"):
        for key, text in _strings(_read_json(path, archive, name)):
            _check_string(path, key, text)
    elif inside.startswith(("data/weights/", "data/constants/")):
        if name.endswith(".json") and '"use_pickle": true' in json.dumps(_read_json(path, archive, name)):
            raise _refusal(path, f"pickled tensors ({name})")
    elif inside.startswith("data/sample_inputs/"):
        try:
            torch.load(io.BytesIO(archive.read(name)), weights_only=True)
        except Exception as error:
            raise _refusal(path, f"a pickle that is more than tensors ({name})") from error
    elif inside not in (f"extra/{DOCUMENT}", "archive_format", "archive_version", "byteorder") and ".data/" not in name:
        raise _refusal(path, f"more than a graph and its weights ({name})")


def _read_json(path: Path, archive: zipfile.ZipFile, name: str) -> Any:
    if archive.getinfo(name).file_size > _MOST_JSON:
        raise _refusal(path, f"{name}, which is too large")
    return json.loads(archive.read(name))


def _check_string(path: Path, key: str, text: str) -> None:
    """Names are words, operations torch's own, sizes plain sums and products."""
    if key == "target":
        right = _OPERATION.fullmatch(text)
    elif key in ("in_spec", "out_spec"):
        right = all(form in _FORMS and context in ("null", "[]", None) for form, context in _forms(json.loads(text)))
    else:
        right = _WORD.fullmatch(text) or (key == "expr_str" and _SIZE.fullmatch(text))
    if not right:
        raise _refusal(path, f"something that is no plain graph ({key} {text[:60]!r})")


def _strings(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a document with the key that it stands under, and every key."""
    if isinstance(node, str):
        yield key, node
    elif isinstance(node, dict):
        for name, value in node.items():
            yield "key", name
            yield from _strings(value, name)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value, key)


def _forms(node: Any) -> Iterator[tuple[Any, Any]]:
    """The kinds of containers that a form of inputs or outputs names."""
    if isinstance(node, list):
        for value in node:
            yield from _forms(value)
    elif isinstance(node, dict):
        yield node.get("type"), node.get("context")
        yield from _forms(node.get("children_spec"))


def _refusal(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} has {what}: opening it could run code. Files of vitral export have none of that.")
