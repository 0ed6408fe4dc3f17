"""uvicorn, told to be careful: small headers, no waiting for who does not ask, an end that finishes what was begun."""

import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.config import Serving
from vitral.errors import ConfigError
from vitral.serving.logs import log, log_to_stderr

MAX_HEADERS = 16 * 1024
HEADER_SECONDS = 10.0


class Patient(H11Protocol):
    """HTTP/1.1 that hangs up on a client whose headers do not come, or that does not read what it asked for."""

    def connection_made(self, transport: Any) -> None:
        """Start the clock."""
        super().connection_made(transport)
        self.unread = 0
        self.timeout_first = self.loop.call_later(HEADER_SECONDS, self._hang_up)

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
        self.timeout_first.cancel()
        self.timeout_first = self.loop.call_later(self.timeout_keep_alive + HEADER_SECONDS, self._hang_up)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clock."""
        self.timeout_first.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
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
    """Serve until a signal comes; `say` is told the address."""
    log_to_stderr()
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def started() -> None:
        log("listening", url=url)
        say(url)

    config = uvicorn.Config(
        app, http=Patient, ws="none", log_config=None, access_log=False, server_header=False, proxy_headers=False,
        h11_max_incomplete_event_size=MAX_HEADERS,
        timeout_graceful_shutdown=int(options.upload_seconds + options.deadline) + 1,
    )  # fmt: skip
    server = _Server(config, started)
    app.state.server.connections = lambda: len(server.server_state.connections)
    server.run(sockets=[listening])
    if not server.started:
        raise RuntimeError("the server could not be started; why is in the log above.")
