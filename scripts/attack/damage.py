"""Ways to damage bytes and JSON documents. The same random numbers always do the same damage."""

import json
import zlib
from random import Random
from typing import Any

NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFFF)
"""Values at which sizes and counts overflow, change sign or become absurd."""
HEAD = 3000
"""Bytes at the beginning, which hold the names and sizes in most formats."""
DEEP = "a value nested very deeply"
ODD = (
    *(None, True, False, 0, 1, -1, 0.5, 2**31, -(2**63), 10**30, 1e308, float("nan"), float("inf"), -0.0),
    *("", "x", "x" * 5000, "../../etc/passwd", "\x00", "é\n", "1", "nan", [], {}, [None], [[1], [2, 3]], {"x": 1}),
    DEEP,
)  # fmt: skip
"""Values that a reader may not expect."""
PNG = b"\x89PNG\r\n\x1a\n"


def mutate(data: bytes, chance: Random) -> bytes:
    """Damage bytes in one way: cut off, cut out, double, insert, overwrite, flip bits, or replace a number."""
    made = bytearray(data)
    at = chance.randrange(chance.choice([len(made), min(len(made), HEAD)])) if made else 0
    length = chance.randint(1, 64)
    match chance.randrange(8):
        case 0:
            del made[at:]
        case 1:
            del made[at : at + length]
        case 2:
            made[at:at] = made[at : at + length]
        case 3:
            made[at:at] = chance.randbytes(length)
        case 4:
            made[at : at + length] = chance.randbytes(length)
        case 5:
            for _ in range(chance.randint(1, 8) if made else 0):
                made[chance.randrange(len(made))] ^= 1 << chance.randrange(8)
        case 6:
            for _ in range(4 if made else 0):
                made[chance.randrange(min(len(made), HEAD))] ^= 1 << chance.randrange(8)
        case 7:
            size = chance.choice([1, 2, 4, 8])
            number = chance.choice(NUMBERS) % 2 ** (8 * size)
            made[at : at + size] = number.to_bytes(size, chance.choice(["little", "big"]))
    return bytes(made)


def mutate_image(data: bytes, chance: Random) -> bytes:
    """Damage an image once or twice, often in its header; half of the damaged PNG files get valid checksums."""
    made = data
    for _ in range(chance.randint(1, 2)):
        if chance.random() < 0.3:
            head = chance.randint(8, 80)
            made = mutate(made[:head], chance) + made[head:]
        else:
            made = mutate(made, chance)
    return seal_png(made) if made.startswith(PNG) and chance.random() < 0.5 else made


def seal_png(data: bytes) -> bytes:
    """The same PNG file with the right checksum for every chunk, so that a reader does not stop at the first."""
    made, at = bytearray(data), len(PNG)
    while at + 12 <= len(made):
        end = at + 8 + int.from_bytes(made[at : at + 4], "big")
        if end + 4 > len(made):
            break
        made[end : end + 4] = zlib.crc32(made[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(made)


def mutate_json(data: bytes, chance: Random) -> bytes:
    """Damage a JSON document: an odd value, a key that is lost, renamed or added; or, at times, its bytes."""
    if chance.random() < 0.2:
        return mutate(data, chance)
    document = json.loads(data)
    for _ in range(chance.randint(1, 2)):
        document = _edited(document, chance)
    depth = chance.choice([50, 5000, 200_000])
    text = json.dumps(document).replace(json.dumps(DEEP), "[" * depth + "]" * depth)
    return text.encode()


def mutate_json_lines(data: bytes, chance: Random) -> bytes:
    """Damage one line of JSON, or the bytes."""
    lines = data.splitlines(keepends=True)
    if not lines or chance.random() < 0.3:
        return mutate(data, chance)
    at = chance.randrange(len(lines))
    lines[at] = mutate_json(lines[at], chance) + b"\n"
    return b"".join(lines)


def _edited(document: Any, chance: Random) -> Any:
    """The document with one place of it changed."""
    places = list(_places(document))
    if not places:
        return chance.choice(ODD)
    holder, key = chance.choice(places)
    match chance.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[chance.choice([f"{key}x", "", key.upper()])] = holder.pop(key)
        case 2 if isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
            holder[key] = chance.choice([-holder[key], holder[key] + 1, holder[key] * 10**6, float(holder[key])])
        case _:
            holder[key] = chance.choice(ODD)
    return document


def _places(document: Any) -> Any:
    """Every place in a document, as a container and the key in it."""
    keys = list(document) if isinstance(document, dict) else range(len(document)) if isinstance(document, list) else ()
    for key in keys:
        yield document, key
        yield from _places(document[key])
