"""Request bodies: JSON with base64, or a form with a file. All stays in memory; no name from a client is used."""

import base64
import binascii
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitral.errors import InputError, unknown_name
from vitral.serving.refusals import RefusedError
from vitral.serving.schema import MAX_TEXT, Asked, AskedText

MAX_PARTS = 16
MAX_HEADERS, MAX_HEADER_BYTES = 8, 4096
"""Of each part of a form."""
MAX_SIGNS = MAX_TEXT + 100
"""Quotes, commas and brackets of a JSON document: the longest text may be of nothing else, an image has none."""
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
    text = asked.text if isinstance(asked, AskedText) and "text" in asked.model_fields_set else None
    if image is not None and text is not None:
        raise InputError("give an image or a text, not both.")
    if image is not None:
        return asked, image
    if text is None:
        what = "an image or a text; there is neither" if isinstance(asked, AskedText) else "an image; there is none"
        raise InputError(f"give {what}.")
    return asked, text


def _read_json(body: bytes, kind: type[A]) -> tuple[A, bytes | None]:
    if sum(map(body.count, (b'"', b",", b"[", b"{"))) > MAX_SIGNS:  # to read it would keep everybody waiting
        raise RefusedError(400, "bad_json", "the body has far more fields than any request.")
    try:
        document = from_json(body)
    except ValueError as error:
        raise RefusedError(400, "bad_json", f"the body is not JSON ({error}).") from None
    for name in document if isinstance(document, dict) else ():
        _check_name(name, kind)
    asked = _validate(kind, document)
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
        _check_name(name, kind)
        try:
            fields[name] = value.decode()
        except UnicodeDecodeError:
            raise RefusedError(400, "bad_form", f"the field {name[:40]!r} is not UTF-8.") from None
    if "patch" in fields:
        fields["patch"] = fields["patch"].split(",")
    return _validate(kind, fields, strict=False), image


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
        }, max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES)  # fmt: skip
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise RefusedError(400, "bad_form", f"the form cannot be read ({str(error)[:100]}).") from None
    if not state["ended"]:
        raise RefusedError(400, "bad_form", "the form is cut short, or its boundary is not that of the Content-Type.")
    return parts


def _check_name(name: str, kind: type[Asked]) -> None:
    """Raise for a field that is not asked for."""
    known = [field.alias or ours for ours, field in kind.model_fields.items()]
    if name not in known:
        raise unknown_name("field", name[:80], known)


def _validate(kind: type[A], fields: Any, strict: bool = True) -> A:
    """Fields as what is asked, or the first thing that is wrong with them, in a sentence."""
    try:
        return kind.model_validate(fields, strict=strict)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(map(str, first["loc"]))[:80]
    got = first["input"] if isinstance(first["input"], int | float | bool | None) else type(first["input"]).__name__
    if isinstance(first["input"], str):
        got = repr(first["input"][:40])
    said = first["msg"][:1].lower() + first["msg"][1:]
    raise RefusedError(422, "bad_field", f"{place or 'the body'}: {said}, got {got}.")
