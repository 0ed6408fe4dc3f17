"""Request bodies: JSON with base64, or a form with a file. All stays in memory; no name from a client is used."""

import base64
import binascii
from typing import Any, TypeVar

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitral.errors import InputError, unknown_name
from vitral.serving.refusals import RefusedError
from vitral.serving.schema import Asked

MAX_PARTS = 16
A = TypeVar("A", bound=Asked)


def read_request(body: bytes, content_type: str, kind: type[A]) -> tuple[A, bytes | str]:
    """What is asked, and the image or text it is asked about."""
    media, options = parse_options_header(content_type)
    if media == b"application/json":
        asked, image = _read_json(body, kind)
    elif media == b"multipart/form-data":
        asked, image = _read_form(body, options.get(b"boundary", b""), kind)
    else:
        raise RefusedError(
            415, "bad_content_type",
            f"send application/json or multipart/form-data, got {content_type[:100] or 'no Content-Type'!r}.",
        )  # fmt: skip
    text = "text" in asked.model_fields_set
    if text == (image is not None):
        raise InputError("give an image or a text" + (", not both." if text else "; there is neither."))
    return asked, asked.text if image is None else image


def _read_json(body: bytes, kind: type[A]) -> tuple[A, bytes | None]:
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error, kind) from None
    if "image" not in asked.model_fields_set:
        return asked, None
    try:
        return asked, base64.b64decode(asked.image, validate=True)
    except (binascii.Error, ValueError):
        raise RefusedError(
            422, "bad_base64", "image must be the file in base64, without line breaks or prefix."
        ) from None


def _read_form(body: bytes, boundary: bytes, kind: type[A]) -> tuple[A, bytes | None]:
    parts = _parts(body, boundary)
    image = parts.pop("image", None)
    fields: dict[str, Any] = {}
    for name, value in parts.items():
        if name not in (known := _names(kind)):
            raise unknown_name("field", name[:80], known)
        try:
            fields[name] = value.decode()
        except UnicodeDecodeError:
            raise RefusedError(400, "bad_form", f"the field {name[:40]!r} is not UTF-8.") from None
    if "patch" in fields:
        fields["patch"] = fields["patch"].split(",")
    try:
        return kind.model_validate(fields, strict=False), image
    except ValidationError as error:
        raise _refusal(error, kind) from None


def _parts(body: bytes, boundary: bytes) -> dict[str, bytes]:
    """The parts of a form by their names."""
    parts: dict[str, bytes] = {}
    header: list[bytes] = [b"", b""]
    state = {"name": "", "ended": False}
    data = bytearray()

    def begin() -> None:
        state["name"] = ""
        data.clear()

    def header_end() -> None:
        if header[0].lower() == b"content-disposition":
            name = parse_options_header(header[1])[1].get(b"name", b"")
            state["name"] = name.decode("utf-8", "replace")
        header[:] = [b"", b""]

    def part_end() -> None:
        name = str(state["name"])
        if not name or name in parts or len(parts) >= MAX_PARTS:
            raise RefusedError(
                400, "bad_form", f"each part of a form needs a name of its own, at most {MAX_PARTS} of them."
            )
        parts[name] = bytes(data)

    def add_to_header(place: int, chunk: bytes) -> None:
        header[place] += chunk

    try:
        parser = MultipartParser(boundary, {
            "on_part_begin": begin,
            "on_header_field": lambda chunk, start, end: add_to_header(0, chunk[start:end]),
            "on_header_value": lambda chunk, start, end: add_to_header(1, chunk[start:end]),
            "on_header_end": header_end,
            "on_part_data": lambda chunk, start, end: data.extend(memoryview(chunk)[start:end]),
            "on_part_end": part_end,
            "on_end": lambda: state.update(ended=True),
        })  # fmt: skip
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(400, "bad_form", f"the form cannot be read ({str(error)[:100]}).") from None
    if not state["ended"]:
        raise RefusedError(400, "bad_form", "the form is cut short, or its boundary is not that of the Content-Type.")
    return parts


def _names(kind: type[Asked]) -> list[str]:
    """What its fields are called by clients."""
    return [field.alias or name for name, field in kind.model_fields.items()]


def _refusal(error: ValidationError, kind: type[Asked]) -> Exception:
    """The first thing that is wrong, in a sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))[:80]
    if first["type"] == "json_invalid":
        return RefusedError(400, "bad_json", f"the body is not JSON ({first['msg'].removeprefix('Invalid JSON: ')}).")
    if first["type"] == "extra_forbidden":
        return unknown_name("field", place, _names(kind))
    got = first["input"] if isinstance(first["input"], int | float | bool | None) else type(first["input"]).__name__
    if isinstance(first["input"], str):
        got = repr(first["input"][:40])
    said = first["msg"][:1].lower() + first["msg"][1:]
    return RefusedError(422, "bad_field", f"{place or 'the body'}: {said}, got {got}.")
