"""The connections of a server: how many there may be, and which one is closed to make room for a new one."""

import heapq
import ipaddress
from collections import Counter
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from vitral.errors import ConfigError

GRACE_SECONDS = 1.0
"""How long a new connection may be silent before it counts least."""
MIN_BYTES_PER_SECOND = 1024
"""A client that sends a request more slowly than this is a slow sender."""
SPARE = 32
"""Connections above the limit that wait to be answered with 503."""
ACCEPT_AT_ONCE = 32
"""Connections that are accepted before the ones they replace are closed."""
RESERVED_FILES = 192
"""Open files that are no admitted connections: models, the index, the log, and connections above the limit."""


class Standing(IntEnum):
    """What a connection is doing; the smallest is closed first."""

    SILENT = 0
    """It has sent nothing since it was accepted."""
    SLOW = 1
    """It sends a request too slowly."""
    WAITING = 2
    """It is new, or idle between two requests."""
    TRANSFERRING = 3
    """It sends a request or reads an answer."""
    BUSY = 4
    """Its request is complete and being answered: it is never closed."""


class Connection(Protocol):
    """What the table needs to know about a connection."""

    peer: str
    """The client, as `client_of` names it."""
    active: float
    """When it was accepted, last sent something or was last answered."""

    def standing(self, now: float) -> Standing:
        """What it is doing."""
        ...

    def evict(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """A table of at most `most` connections; `evicted` is called for each that is closed to make room.

    The connection that counts least makes room: silent ones, then slow ones, then those of a client that exceeds
    `per_client`; of these by what each is doing, by how many its client has, and by how long it has been inactive. So
    neither one client nor many silent connections keep others out, and a client that shares its address with a crowd,
    behind a proxy, is not refused for that.
    """

    def __init__(self, most: int, evicted: Callable[[], object] = lambda: None) -> None:
        self._most, self._evicted = most, evicted
        self.per_client = max(1, most // 2)
        self._admitted: set[Connection] = set()
        self._refused: dict[Connection, None] = {}
        self._held: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._admitted)

    def add(self, new: Connection, now: float) -> bool:
        """Admit a connection, and close another if there is no room; return False if all others are busy."""
        if len(self._admitted) >= self._most and not self._make_room(now):
            self._refuse(new)
            return False
        self._admitted.add(new)
        self._held[new.peer] += 1
        return True

    def remove(self, connection: Connection) -> None:
        """Forget a connection; one that is not there is no error."""
        self._refused.pop(connection, None)
        if connection in self._admitted:
            self._admitted.remove(connection)
            self._held[connection.peer] -= 1
            if not self._held[connection.peer]:
                del self._held[connection.peer]

    def _make_room(self, now: float) -> bool:
        """Close the connection that counts least, and a few more silent or slow ones: to rank all of them is costly."""

        def rank(each: Connection) -> tuple[float, ...]:
            standing, held = standings[each], self._held[each.peer]
            return min(standing, Standing.WAITING), held <= self.per_client, standing, -held, each.active

        standings = {each: each.standing(now) for each in self._admitted}
        idle = [each for each in standings if standings[each] is not Standing.BUSY]
        least = heapq.nsmallest(max(1, self._most // 32), idle, key=rank)
        for i, each in enumerate(least):
            if i == 0 or standings[each] <= Standing.SLOW:
                self.remove(each)
                self._evicted()
                each.evict()
        return bool(least)

    def _refuse(self, new: Connection) -> None:
        self._refused[new] = None
        if len(self._refused) > SPARE:
            oldest = next(iter(self._refused))
            self.remove(oldest)
            oldest.evict()


def client_of(address: str) -> str:
    """The client behind an address: itself, or of IPv6 its /64 network, all of which a single client usually has."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:  # a socket without addresses
        return address
    if ip.version == 4:
        return str(ip)
    mapped = ip.ipv4_mapped
    return str(ipaddress.ip_network((ip, 64), strict=False)) if mapped is None else str(mapped)


def fit_open_files(asked: int) -> int:
    """So many connections as were asked for, or as the system's limit of open files allows."""
    try:
        import resource
    except ImportError:  # a system without such limits
        return asked
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return asked
    if limit < RESERVED_FILES + 2:
        raise ConfigError(
            f"the server may open only {limit} files, and needs at least {RESERVED_FILES + 2}; raise the limit: "
            "ulimit -n 1024."
        )
    return min(asked, limit - RESERVED_FILES)
