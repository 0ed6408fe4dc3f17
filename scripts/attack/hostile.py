"""Hostile HTTP against `vitral serve`: malformed, oversized, slow, crowded. The server must outlive all of it."""

import http.client
import json
import re
import signal
import socket
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from random import Random
from typing import Any
from urllib.parse import urlsplit

from process import serving

from attack.damage import ODD, mutate, mutate_image, mutate_json
from attack.images import picture, saved
from attack.server import BOUNDARY, HOST, as_form, as_json, request, save_small_model
from attack.stage import Stage

KEY = "a-key-of-24-characters-x"
HOSTILE = "127.0.0.2"
"""The address that hostile clients come from, where the system has it."""
OPTIONS = ("--upload-seconds", "2", "--max-body-mb", "1")
AT_ONCE = 20
TOGETHER = 100
"""Hostile requests between two good ones."""
CROWD = 600
"""Idle connections, more than the server takes."""
SILENCE = 30.0
"""Seconds without an answer after which a client was forgotten."""
AFTER = 0.3
"""Seconds in which the rest of an answer comes."""
BUSY = (503, 504)
"""What a server may answer that has too much to do; other codes from 500 are its own errors."""
PATHS = ("/v1/predict", "/v1/embed", "/v1/explain", "/v1/search")
IMAGE = saved(picture(), "PNG")


def _post(body: bytes, kind: str, path: str = PATHS[0], **headers: Any) -> bytes:
    lines = {"Authorization": f"Bearer {KEY}", "Content-Type": kind, "Content-Length": len(body), **headers}
    return request("POST", path, {name.replace("_", "-"): value for name, value in lines.items()}, body)


def _noise(chance: Random) -> bytes:
    return chance.randbytes(chance.randint(1, 3000)) + chance.choice([b"", b"\r\n\r\n"])


def _damaged(chance: Random) -> bytes:
    return mutate(_post(*chance.choice([as_json, as_form])(IMAGE), path=chance.choice(PATHS)), chance)


def _damaged_head(chance: Random) -> bytes:
    head, end, body = _post(*as_json(IMAGE)).partition(b"\r\n\r\n")
    return mutate(head, chance) + end + body


def _other_protocol(chance: Random) -> bytes:
    return chance.choice([
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
        b"GET /\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 5000, b"HELO x\r\n\r\n", b"SSH-2.0-x\r\n\r\n",
        request("GET", "/", {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x"}),
    ])  # fmt: skip


def _odd_method(chance: Random) -> bytes:
    method = chance.choice(["HEAD", "OPTIONS", "TRACE", "CONNECT", "PUT", "DELETE", "PATCH", "X" * 3000, "GeT", "\x00"])
    return request(method, chance.choice([*PATHS, "/", "/healthz", "/docs", "/metrics", "*"]))


def _odd_path(chance: Random) -> bytes:
    path = chance.choice(
        [
            "/page/../../../../etc/passwd",
            "/page/%2e%2e/%2e%2e/etc/passwd",
            "/page/..%2f..%2fapp.py",
            "//",
            "/" * 5000,
            "/%00",
            "/v1/predict/../../x",
            "/%ff%fe",
            "http://example.org/",
            "/page/\\..\\..\\x",
            "/v1/predict?" + "a=b&" * 900,
            "/thumbnails/-1",
            "/thumbnails/99999999999999999999",
            "/page/é",
        ]
    )
    return request(chance.choice(["GET", "HEAD"]), path, {"Authorization": f"Bearer {KEY}"})


def _odd_host(chance: Random) -> bytes:
    hosts = ["", "example.org", "127.0.0.1:99999", "[::1", "a" * 3000, "localhost\r\nHost: x", "\x00", "é"]
    return request("GET", "/healthz", {"Host": chance.choice(hosts)})


def _wrong_key(chance: Random) -> bytes:
    odd = chance.choice(
        ["", "Bearer", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer " + "x" * 9000, "Bearer \xff", KEY]
    )
    return _post(*as_json(IMAGE), Authorization=odd)


def _flood_of_headers(chance: Random) -> bytes:
    count, size = chance.choice([(5000, 5), (1, 60_000), (100, 1000), (20_000, 0)])
    return request("GET", "/healthz", {f"X-{i}": "a" * size for i in range(count)})


def _odd_length(chance: Random) -> bytes:
    lengths = ["-1", "99999999", "9" * 400, "+5", "0x10", "5, 6", "", "1e3", "٣", "5\r\nContent-Length: 6"]
    more = chance.choice([{}, {"Transfer_Encoding": "chunked"}])
    return _post(*as_json(IMAGE), Content_Length=chance.choice(lengths), **more)


def _odd_chunks(chance: Random) -> bytes:
    head = request(
        "POST",
        PATHS[0],
        {
            "Authorization": f"Bearer {KEY}",
            "Content-Type": "application/json",
            "Transfer-Encoding": chance.choice(["chunked", "chunked, chunked", "gzip"]),
        },
    )
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    rest = [
        chunk * 20,
        b"-1\r\nx\r\n",
        b"f" * 40 + b"\r\n",
        b"5;" + b"x" * 9000 + b"\r\nabcde\r\n",
        b"zz\r\n",
        b"2\r\nabc\r\n",
    ]
    return head + chance.choice(rest)


def _damaged_form(chance: Random) -> bytes:
    body, kind = as_form(IMAGE)
    part = f"--{BOUNDARY}\r\nContent-Disposition: form-data; name=".encode()
    bodies = [
        mutate(body, chance), b"", part * 5000, (part + b'"image"\r\n\r\nx\r\n') * 2000,
        part + b'"' + b"a" * 20_000 + b'"\r\n\r\nx\r\n', b"\r\n" * 40_000, body[: chance.randrange(len(body))],
        f"--{BOUNDARY}\r\n".encode() + b"X: y\r\n" * 3000 + b"\r\nx",
    ]  # fmt: skip
    kinds = [kind, kind, kind, "multipart/form-data", "multipart/form-data; boundary=" + "x" * 300, "multipart/mixed"]
    return _post(chance.choice(bodies), chance.choice(kinds))


def _bomb_of_json(chance: Random) -> bytes:
    bodies = [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"image":' + b"9" * 100_000 + b"}",
        b'{"image":"' + b"\\u0041" * 100_000 + b'"}',
        b"{" + b'"image":"a",' * 30_000 + b'"x":1}',
        b'{"image":"' + b"A" * 900_000 + b'"}',
        b'"\\ud800"',
        b"NaN",
        b"",
        b'{"image":1e999999}',
        b'{"image":null}',
        b"\xff\xfe{",
        b"0" * 500_000,
    ]
    return _post(chance.choice(bodies), "application/json", chance.choice(PATHS))


def _odd_fields(chance: Random) -> bytes:
    document = json.loads(as_json(IMAGE)[0])
    document |= {chance.choice(["top_k", "model", "method", "layer", "patch", "text", "x"]): chance.choice(ODD)}
    return _post(mutate_json(json.dumps(document).encode(), chance), "application/json", chance.choice(PATHS))


def _damaged_image(chance: Random) -> bytes:
    return _post(*chance.choice([as_json, as_form])(mutate_image(IMAGE, chance)), path=chance.choice(PATHS))


def _bomb_of_pixels(chance: Random) -> bytes:
    side = chance.choice([60_000, 8_000, 2**31 - 1])

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(2**23), 9)
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return _post(*chance.choice([as_json, as_form])(image))


def _odd_headers(chance: Random) -> bytes:
    odd = chance.choice([
        {"Expect": "100-continue"}, {"Expect": "x"}, {"Content_Encoding": "gzip"}, {"Content_Type": "text/html"},
        {"Content_Type": "application/json; charset=utf-7"}, {"Accept": "\x01"}, {"Range": "bytes=0-99999999"},
        {"Origin": "http://example.org"}, {"Connection": "close, keep-alive"}, {"Transfer_Encoding": "identity"},
    ])  # fmt: skip
    return _post(*as_json(IMAGE), **odd)


def _many_at_once(chance: Random) -> bytes:
    return chance.choice([_post(*as_json(IMAGE)), request("GET", "/healthz"), request("GET", "/nothing")]) * 40


def _slow_body(chance: Random) -> bytes:
    whole = _post(*as_json(IMAGE))
    return whole[: len(whole) - chance.randint(1, 60)]


def _slow_head(chance: Random) -> bytes:
    return _post(*as_json(IMAGE))[: chance.randint(0, 60)]  # at times nothing at all


REQUESTS: tuple[Callable[[Random], bytes], ...] = (
    _noise, _damaged, _damaged_head, _other_protocol, _odd_method, _odd_path, _odd_host, _wrong_key, _flood_of_headers,
    _odd_length, _odd_chunks, _damaged_form, _bomb_of_json, _odd_fields, _damaged_image, _bomb_of_pixels, _odd_headers,
    _many_at_once, _slow_body, _slow_head,
)  # fmt: skip


class Hostile:
    """500 hostile requests, then more idle connections than the server takes."""

    name = "http"
    size = 500
    failure = (
        "a status from 500 but 503 and 504, a client forgotten for 30 s, a good request not answered with 200, an exit"
    )

    def run(self, stage: Stage) -> None:
        """Send the hostile requests, with good ones between them."""
        keys = stage.work / "keys.txt"
        keys.write_text(KEY)
        numbers = stage.numbers
        with serving(save_small_model(stage.work), "--api-key-file", keys, *OPTIONS) as (url, process, logged):
            address = (HOST, urlsplit(url).port)
            with ThreadPoolExecutor(AT_ONCE) as threads:
                for first in range(0, len(numbers), TOGETHER):
                    together = numbers[first : first + TOGETHER]
                    list(threads.map(lambda number: _attack(stage, address, number), together))
                    self._check(stage, address, process, together[-1], "after hostile requests")
            if stage.number is None:
                with ExitStack() as crowd:
                    for _ in range(CROWD):
                        crowd.enter_context(_connected(address))
                    self._check(stage, address, process, len(numbers), f"among {CROWD} idle connections")
                stage.step()
        broken = [line for line in logged if '"traceback"' in line or not line.startswith("{")]
        if broken:
            stage.fail(len(numbers) + 1, "the server logged an internal error", "\n".join(broken))
        if process.returncode not in (0, -signal.SIGTERM):  # the server is stopped by SIGTERM
            stage.fail(
                len(numbers) + 2, f"the server ended with exit code {process.returncode}", "\n".join(logged[-20:])
            )

    def _check(self, stage: Stage, address: tuple[str, int | None], process: Any, number: int, when: str) -> None:
        """Record a failure unless the server answers a good request."""
        try:
            client = http.client.HTTPConnection(*address, timeout=SILENCE)
            body, kind = as_json(IMAGE)
            client.request("POST", PATHS[0], body, {"Content-Type": kind, "Authorization": f"Bearer {KEY}"})
            response = client.getresponse()
            problem = "" if response.status == 200 else f"answered with {response.status}: {response.read(500)!r}"
            client.close()
        except (OSError, http.client.HTTPException) as error:
            problem = f"not answered ({error!r}), exit code {process.poll()}"
        if problem:
            stage.fail(number, f"{when} a good request was {problem}")


def _attack(stage: Stage, address: tuple[str, int | None], number: int) -> None:
    """Send one hostile request and check what comes back."""
    chance = stage.chance(number)
    make = REQUESTS[number % len(REQUESTS)]
    sent, leaves = make(chance), chance.random() < 0.1
    try:
        received = _exchange(address, sent, leaves)
    except TimeoutError:
        stage.fail(number, f"{make.__name__}: forgotten for {SILENCE:g} s", files={"request.bin": sent})
        received = b""
    statuses = [int(code) for code in re.findall(rb"^HTTP/1\.1 (\d{3})", received, re.MULTILINE)]
    bad = [status for status in statuses if status >= 500 and status not in BUSY]
    if bad:
        stage.fail(number, f"{make.__name__}: status {bad[0]}", files={"request.bin": sent, "answer.bin": received})
    stage.step()


def _exchange(address: tuple[str, int | None], data: bytes, leaves: bool) -> bytes:
    """What comes back for bytes; a client that leaves resets the connection instead of waiting."""
    received = b""
    with _connected(address) as s:
        try:
            s.sendall(data)
            if leaves:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            while chunk := s.recv(65536):
                received += chunk
                s.settimeout(AFTER)
        except TimeoutError:
            if not received:
                raise
        except ConnectionError:  # the server has hung up
            pass
    return received


def _connected(address: tuple[str, int | None]) -> socket.socket:
    try:
        return socket.create_connection(address, SILENCE, (HOSTILE, 0))
    except OSError as error:
        if not isinstance(error, ConnectionError | TimeoutError):  # there is only one loopback address here
            return socket.create_connection(address, SILENCE)
        raise
