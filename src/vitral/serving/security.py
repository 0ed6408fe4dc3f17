"""Who may ask, and how much one may send: keys, hosts, sizes and times, before anything is read."""

import asyncio
import hashlib
import hmac
import ipaddress
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.config import Serving
from vitral.errors import ConfigError
from vitral.serving.connections import client_of
from vitral.serving.refusals import RefusedError, busy, gone

K = TypeVar("K")
V = TypeVar("V")
KEYS_VARIABLE = "VITRAL_API_KEYS"
DISCARD_SECONDS = 1.0
"""How long a client that is refused may go on sending."""
SHORTEST_KEY = 16
WRONG_KEYS = 10
"""Wrong keys that a client may send before it has to wait."""
WRONG_KEY_SECONDS = 1.0
"""Time between the checks of two keys after that."""
REMEMBERED_CLIENTS = 4096
"""Clients whose wrong keys, or right ones, are remembered."""
OPEN = ("/", "/docs", "/openapi.json", "/healthz", "/readyz")
"""What needs no key: pages, which hold no secret, and whether the server lives."""
PAGE = "/page/"
CROWDED = "vitral_crowded"
"""Set in the state of a request if the server has no place for its connection."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
SAFE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(self), microphone=(), geolocation=()",
}


class Keys:
    """API keys, of which only hashes are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._hashes)

    def admit(self, headers: Headers) -> bool:
        """Whether a request has one of the keys; takes as long for a wrong one as for a right one."""
        given = _hash(_key_of(headers))
        found = [hmac.compare_digest(given, known) for known in self._hashes]
        return any(found)


class Attempts:
    """How often each client may send a wrong key: `WRONG_KEYS` times at once, and then every `WRONG_KEY_SECONDS`.

    A client beyond that has to wait before another key of it is checked. A key that it has used before is exempt, so
    that clients which share an address, behind a proxy, do not lock each other out.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._forgotten: dict[str, float] = {}  # when the last wrong key of each client no longer counts
        self._used: dict[tuple[str, bytes], None] = {}

    def wait(self, client: str, key: str) -> float:
        """Seconds until a key of this client is checked."""
        if (client, _hash(key)) in self._used:
            return 0.0
        return max(0.0, self._forgotten.get(client, 0.0) - self._clock() - (WRONG_KEYS - 1) * WRONG_KEY_SECONDS)

    def note(self, client: str, key: str, right: bool) -> None:
        """Remember the result of a check, of the most recent clients only."""
        if right:
            _remember(self._used, (client, _hash(key)), None)
        else:
            last = max(self._forgotten.get(client, 0.0), self._clock())
            _remember(self._forgotten, client, last + WRONG_KEY_SECONDS)


def _remember(entries: dict[K, V], key: K, value: V) -> None:
    """Set an entry, and remove the one that was set the longest time ago if there are too many."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > REMEMBERED_CLIENTS:
        del entries[next(iter(entries))]


def _key_of(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(file: str, environment: Mapping[str, str]) -> Keys:
    """Keys of a file, one on each line, and of the environment, with commas between them."""
    keys = [key.strip() for key in environment.get(KEYS_VARIABLE, "").split(",")]
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8-sig").splitlines()
        except OSError as error:
            raise ConfigError(f"the keys in {file} cannot be read ({error.strerror}).") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"the keys in {file} cannot be read ({error}).") from error
        keys += [line for line in map(str.strip, lines) if not line.startswith("#")]
    keys = [key for key in keys if key]
    if file and not keys:
        raise ConfigError(f"{file} has no key in it; write one on a line, such as {secrets.token_urlsafe(24)}")
    if any(len(key) < SHORTEST_KEY for key in keys):
        raise ConfigError(f"an API key must have at least {SHORTEST_KEY} characters; one of yours is shorter.")
    if not all(key.isascii() and key.isprintable() for key in keys):
        raise ConfigError("an API key must be of plain letters, digits and signs (ASCII); one of yours is not.")
    return Keys(keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_protection(host: str, keys: Keys, insecure: bool) -> None:
    """Raise if others could ask without a key, and nobody said that they may."""
    if not (is_loopback(host) or keys or insecure):
        raise ConfigError(
            f"--host {host} lets other machines ask: give --api-key-file FILE or {KEYS_VARIABLE}, or --insecure if "
            "anybody may."
        )


class SafeHeaders:
    """Adds to every answer what keeps a browser from doing more with it than it should."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-cache" if scope["path"].startswith(PAGE) else "no-store")
            await send(message)

        await self.app(scope, receive, send_safely)


class Guard:
    """Refuses what has no key, comes under a strange name, is too large or too slow; hands the rest on, read.

    `hosts` are the names that the server may be called by, all if there are none: without keys, a web page could
    otherwise reach a server on loopback by a name of its own. `full` returns whether no model can take a request.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, hosts: tuple[str, ...], options: Serving, full: Callable[[], bool]
    ) -> None:
        self.app, self.keys, self.hosts, self.full = app, keys, hosts, full
        self.max_body, self.max_buffered = int(options.max_body_mb * 2**20), int(options.max_buffered_mb * 2**20)
        self.max_body_mb, self.seconds = options.max_body_mb, options.upload_seconds
        self.buffered, self.attempts = 0, Attempts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        held, unread = 0, True
        headers = Headers(scope=scope)

        async def send_and_release(message: Message) -> None:
            """What was sent is done with when the answer is there; it may take long to be read."""
            nonlocal held
            self.buffered, held = self.buffered - held, 0
            await send(message)

        try:
            self._check(scope, headers)
            if scope["method"] in ("GET", "HEAD"):
                await self.app(scope, receive, send)
                return
            body = bytearray()
            try:
                async with asyncio.timeout(self.seconds):
                    async for chunk, more in _chunks(receive):
                        unread = more
                        held += len(chunk)
                        self.buffered += len(chunk)
                        body += chunk
                        if len(body) > self.max_body:
                            raise self._too_large()
                        if self.buffered > self.max_buffered:
                            raise busy()
            except TimeoutError:
                raise RefusedError(408, "slow_upload", f"the request was not there after {self.seconds:g} s.") from None
            body = bytes(body)
            await self.app(scope, _replay(body, receive), send_and_release)
        except RefusedError as refusal:
            if unread and ("expect" in headers or not await _discard(receive, self.max_body)):
                refusal.headers.setdefault("Connection", "close")  # what is still being sent is not read
            await refusal.response()(scope, receive, send)
        finally:
            self.buffered -= held

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Everything that the headers show."""
        if scope.get("state", {}).get(CROWDED):
            refusal = busy()
            refusal.headers["Connection"] = "close"
            raise refusal
        host = headers.get("host", "")
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.hosts and name.lower() not in self.hosts:
            raise RefusedError(
                421,
                "bad_host",
                "this server is not called by this name; whoever runs it can add names with --allowed-host.",
            )
        free = scope["path"] in OPEN or scope["path"].startswith(PAGE)
        if not self.keys and not free and _of_another_site(headers, host):
            raise RefusedError(403, "cross_site", "pages of other sites may not ask this server.")
        if self.keys and not free:
            self._check_key(client_of((scope.get("client") or ("",))[0]), headers)
        length = headers.get("content-length", "0")
        if not (length.isascii() and length.isdecimal()) or len(length) > 18 or int(length) > self.max_body:
            raise self._too_large()
        if scope["method"] == "POST" and self.full():
            raise busy()

    def _check_key(self, client: str, headers: Headers) -> None:
        if key := _key_of(headers):
            if wait := math.ceil(self.attempts.wait(client, key)):
                raise RefusedError(
                    429, "wrong_keys", f"too many wrong keys came from this client; try again in {wait} s.",
                    {"Retry-After": str(wait)},
                )  # fmt: skip
            right = self.keys.admit(headers)
            self.attempts.note(client, key, right)
            if right:
                return
        raise RefusedError(
            401, "no_key", "a key is needed: Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"}
        )  # fmt: skip

    def _too_large(self) -> RefusedError:
        return RefusedError(
            413, "too_large", f"the request has more than {self.max_body_mb:g} MiB; make the image smaller."
        )


def _of_another_site(headers: Headers, host: str) -> bool:
    """Whether a browser says that a page of somebody else asks; older ones tell only where the page is from."""
    origin = headers.get("origin")
    return headers.get("sec-fetch-site") == "cross-site" or (
        origin is not None and origin.partition("://")[2].lower() != host.lower()
    )


async def _chunks(receive: Receive) -> AsyncIterator[tuple[bytes, bool]]:
    """What is sent, piece by piece, and whether more follows."""
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise gone()
        more = message.get("more_body", False)
        yield message.get("body", b""), more


async def _discard(receive: Receive, most: int) -> bool:
    """Read on and keep nothing, for a moment: to close before all has come would cut the answer off as well.

    Return whether all has come.
    """
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            async for chunk, _ in _chunks(receive):
                most -= len(chunk)
                if most < 0:
                    return False
    except (TimeoutError, RefusedError):
        return False
    return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever else comes."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return messages.pop() if messages else await receive()

    return replayed
