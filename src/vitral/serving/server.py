"""uvicorn with limits: small headers, no waiting for clients that do not ask, an end that finishes what was begun."""

import socket
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.config import Serving
from vitral.errors import ConfigError
from vitral.serving.connections import (
    ACCEPT_AT_ONCE,
    GRACE_SECONDS,
    MIN_BYTES_PER_SECOND,
    RESERVED_FILES,
    Connections,
    Standing,
    client_of,
    fit_open_files,
)
from vitral.serving.logs import log, log_to_stderr
from vitral.serving.security import CROWDED

MAX_HEADERS = 16 * 1024
HEADER_SECONDS = 10.0
BACKLOG = 1024
"""Connections that the system keeps until the server accepts them."""


class Patient(H11Protocol):
    """HTTP/1.1 that hangs up on a client whose headers do not come, or that does not read what it asked for.

    It has a place among the server's connections (`vitral.serving.connections`); without one, it is answered with 503.
    """

    def __init__(self, *args: Any, table: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.table = table

    def connection_made(self, transport: Any) -> None:
        """Start the clock, and take a place."""
        super().connection_made(transport)
        self.unread = 0
        self.timeout_first = self.loop.call_later(HEADER_SECONDS, self._hang_up)
        self.peer = client_of(self.client[0] if self.client else "")
        self.heard, self.received = False, 0
        self.began = self.active = self.loop.time()
        if not self.table.add(self, self.began):
            self.app_state = {**self.app_state, CROWDED: True}

    def data_received(self, data: bytes) -> None:
        """Count what is sent of a request."""
        self.active = self.loop.time()
        if not self.received:
            self.began = self.active
        self.heard = True
        self.received += len(data)
        super().data_received(data)

    def standing(self, now: float) -> Standing:
        """What the connection is doing."""
        if self.transport.get_write_buffer_size():
            return Standing.TRANSFERRING
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering and not self.cycle.more_body:
            return Standing.BUSY
        if answering or self.received:
            slow = self.received < MIN_BYTES_PER_SECOND * (now - self.began)
            return Standing.SLOW if slow else Standing.TRANSFERRING
        silent = not self.heard and now - self.began > GRACE_SECONDS
        return Standing.SILENT if silent else Standing.WAITING

    def evict(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _hang_up(self) -> None:
        unread, self.unread = self.unread, self.transport.get_write_buffer_size()
        if self.unread and self.unread == unread:
            self.transport.abort()
        elif self.unread:  # some of it has been read since, or this is the first look
            self.timeout_first = self.loop.call_later(HEADER_SECONDS, self._hang_up)
        elif (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
            self.transport.close()

    def on_response_complete(self) -> None:
        """Start the clock for the next request."""
        self.received = 0
        self.began = self.active = self.loop.time()
        self.timeout_first.cancel()
        self.timeout_first = self.loop.call_later(self.timeout_keep_alive + HEADER_SECONDS, self._hang_up)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock, and give the place back."""
        self.table.remove(self)
        self.timeout_first.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)  # the loop has set it to the number that it accepts at once
        if self.started:
            self._when_started()


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens."""
    made = None
    if not 0 <= port <= 65535:  # of which some systems would take what is left after division
        raise ConfigError(f"a port is a number from 0 to 65535, got {port}; give another --port.")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen()  # two may be bound to one port, as long as none listens
    except (OSError, OverflowError) as error:
        if made is not None:
            made.close()
        raise ConfigError(f"cannot listen on {host}, port {port} ({error}); give another --port or --host.") from error
    return made


def serve(app: FastAPI, listening: socket.socket, options: Serving, say: Callable[[str], None]) -> None:
    """Serve until a signal comes; `say` is called with the address."""
    log_to_stderr()
    most = fit_open_files(options.max_connections)
    if most < options.max_connections:
        fix = f"the limit of open files allows no more; raise it: ulimit -n {options.max_connections + RESERVED_FILES}"
        log("max_connections_reduced", asked=options.max_connections, max_connections=most, note=fix)
    table = Connections(most, app.state.server.metrics.evicted.inc)
    app.state.server.metrics.connections.set_function(lambda: len(table))
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def started() -> None:
        log("listening", url=url)
        say(url)

    config = uvicorn.Config(
        app, http=cast(Any, partial(Patient, table=table)), ws="none", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, backlog=ACCEPT_AT_ONCE, h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=int(options.upload_seconds + options.deadline) + 1,
    )  # fmt: skip
    server = _Server(config, started)
    server.run(sockets=[listening])
    if not server.started:
        raise RuntimeError("the server could not be started; why is in the log above.")
