"""`.pt2` files before torch opens them: it would unpickle and run what is in them, so all but a graph is refused."""

import io
import json
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator
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
_PLAIN = (
    f"extra/{DOCUMENT}", "archive_format", "archive_version", "byteorder", ".data/version", ".data/serialization_id"
)  # fmt: skip
_PAYLOADS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_TENSOR = re.compile(r"(weight|tensor)_\d+")
_PAYLOAD = re.compile(r"data/(weights/weight|constants/tensor)_\d+")
"""What torch reads as plain bytes; under any other name it would unpickle."""
_FORMS = ("builtins.tuple", "builtins.dict", None)


def checked_program(path: Path) -> io.BytesIO:
    """The archive, entry by entry as it was checked: tensors as plain bytes, a graph of torch's operations, no more."""
    copied = io.BytesIO()
    try:
        with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copied, "w") as copy:
            names = archive.namelist()
            if len({name.casefold() for name in names}) < len(names):
                raise _refusal(path, "two entries of one name")
            for name in names:
                content = archive.read(name)
                _check_entry(path, name, content)
                copy.writestr(name, content)
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, TypeError, AttributeError, EOFError) as error:
        raise CheckpointError(f"{path} cannot be read; it is damaged or no .pt2 file ({error}).") from error
    except RecursionError as error:
        raise _refusal(path, "a document that is nested too deeply") from error
    copied.seek(0)
    return copied


def part_of(module: torch.fx.GraphModule, inputs: Collection[str], outputs: Iterable[int]) -> torch.fx.GraphModule:
    """What leads from some inputs of a graph, told by name, to some outputs, told by number."""
    graph = torch.fx.Graph()
    found: Any = graph.graph_copy(module.graph, {})
    graph.output(tuple(found[i] for i in outputs))
    graph.eliminate_dead_code(lambda node: node.op == "output" or node.name in inputs)
    taken = [node.name for node in graph.nodes if node.op == "placeholder"]
    if taken != list(inputs):
        raise ValueError(f"it takes {', '.join(taken)}, not {', '.join(inputs)}")
    return torch.fx.GraphModule(module, graph)


def _check_entry(path: Path, name: str, content: bytes) -> None:
    inside = name.partition("/")[2]
    if inside == "models/model.json":
        for key, text in _strings(_read_json(path, name, content)):
            _check_string(path, key, text)
    elif inside in _PAYLOADS:
        for about in _read_json(path, name, content)["config"].values():
            if about["use_pickle"] is not False or not _TENSOR.fullmatch(about["path_name"]):
                raise _refusal(path, f"pickled tensors ({name})")
    elif inside == "data/sample_inputs/model.pt":
        try:
            torch.load(io.BytesIO(content), weights_only=True)
        except Exception as error:
            raise _refusal(path, f"a pickle that is more than tensors ({name})") from error
    elif inside not in _PLAIN and not _PAYLOAD.fullmatch(inside):
        raise _refusal(path, f"more than a graph and its weights ({name})")


def _read_json(path: Path, name: str, content: bytes) -> Any:
    if len(content) > _MOST_JSON:
        raise _refusal(path, f"{name}, which is too large")
    return json.loads(content)


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
