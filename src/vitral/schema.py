"""Plain values, as JSON holds them, checked against type hints: a dataclass or a TypedDict is its own schema.

`conform(value, kind, name)` returns the value as the type hint `kind` describes it, or raises a `ConfigError` that
names the key, what is expected and what was found.
"""

import math
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from numbers import Integral, Real
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from vitral.errors import ConfigError, VitralError


@dataclass(frozen=True)
class Check:
    """A condition on a value, for `Annotated[kind, Check(...)]`, and the words for what is expected."""

    words: str
    holds: Callable[[Any], bool]


Finite = Annotated[float, Check("a finite number", math.isfinite)]
Positive = Annotated[float, Check("a finite number above 0", lambda value: 0 < value < math.inf)]
Count = Annotated[int, Check("an integer from 0 to 2^53", lambda value: 0 <= value <= 2**53)]
Length = Annotated[int, Check("an integer from 1 to 2^53", lambda value: 1 <= value <= 2**53)]

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def conform(value: Any, kind: Any, name: str) -> Any:
    """Return a plain value as the type hint `kind` describes it; raise a `ConfigError` if it is something else."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        value = conform(value, parts[0], name)
        for check in parts[1:]:
            if not check.holds(value):
                _refuse(value, check.words, name)
        return value
    if origin in (Union, types.UnionType):
        return _conform_union(value, parts, name)
    if origin is Literal:
        return value if value in parts else _refuse(value, f"one of {', '.join(map(str, parts))}", name)
    if kind in _SCALARS:
        return _SCALARS[kind](value, name)
    if is_dataclass(kind) and isinstance(value, kind):  # type: ignore[arg-type]
        return value
    if origin is dict or is_typeddict(kind) or is_dataclass(kind):
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            _refuse(value, "an object", name)
        return _conform_object(value, kind, name)
    assert origin in (list, tuple), f"{kind} is not a kind of value that JSON can hold"
    if not isinstance(value, list if origin is list else Sequence) or isinstance(value, str | bytes):
        _refuse(value, f"a list of {_plural(parts[0])}", name)
    if origin is tuple and parts[-1] is not Ellipsis:
        if len(value) != len(parts):
            _refuse(value, f"a list of {len(parts)} values", name)
        return tuple(conform(v, part, f"{name}[{i}]") for i, (v, part) in enumerate(zip(value, parts, strict=True)))
    return origin(conform(v, parts[0], f"{name}[{i}]") for i, v in enumerate(value))


def _conform_union(value: Any, parts: tuple[Any, ...], name: str) -> Any:
    if value is None and types.NoneType in parts:
        return None
    kinds = [part for part in parts if part is not types.NoneType]
    for kind in kinds[:-1]:
        try:
            return conform(value, kind, name)
        except ConfigError:
            continue
    return conform(value, kinds[-1], name)


def _conform_object(value: Mapping[str, Any], kind: Any, name: str) -> Any:
    """Build a dataclass, options or a dictionary from an object; keys that a dataclass does not name are ignored."""
    if get_origin(kind) is dict:
        return {key: conform(each, get_args(kind)[1], f"{name}.{key}" if name else key) for key, each in value.items()}
    if hasattr(kind, "from_dict"):
        try:
            return kind.from_dict(value)
        except VitralError as error:
            raise ConfigError(f"{name}: {error}") from error
    hints = get_type_hints(kind, include_extras=True)
    made: dict[str, Any] = {}
    if is_typeddict(kind):
        made, required = dict(value), kind.__required_keys__
    else:
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    for key, hint in hints.items():
        at = f"{name}.{key}" if name else key
        hint = get_args(hint)[0] if get_origin(hint) is NotRequired else hint
        if key in value:
            made[key] = conform(value[key], hint, at)
        elif key in required:
            raise ConfigError(f"{at} is missing.")
    return kind(**made)


def _whole(value: Any, name: str) -> int:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else _refuse(value, int, name)


def _number(value: Any, name: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        _refuse(value, float, name)
    try:
        return float(value)
    except OverflowError:
        _refuse(value, "a number that a computer can hold", name)


def _plain(kind: type) -> Callable[[Any, str], Any]:
    return lambda value, name: value if isinstance(value, kind) else _refuse(value, kind, name)


_SCALARS: dict[Any, Callable[[Any, str], Any]] = {int: _whole, float: _number, str: _plain(str), bool: _plain(bool)}


def _refuse(value: Any, expected: Any, name: str) -> NoReturn:
    raise ConfigError(f"{name} must be {_WORDS.get(expected, expected)}, got {shortened(value)}.")


def shortened(value: Any) -> str:
    """A value in an error message: short, whatever it is."""
    return reprlib.repr(value)


def _plural(kind: Any) -> str:
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    return {int: "integers", float: "numbers", str: "strings"}.get(kind, "values")
