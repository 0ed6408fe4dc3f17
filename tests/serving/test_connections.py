"""Which connection makes room for a new one: by the table itself, and over sockets on loopback."""

import asyncio
import contextlib
import random
import resource
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import uvicorn
from uvicorn.server import ServerState

from vitral.config import Serving
from vitral.errors import ConfigError
from vitral.serving import connections, server
from vitral.serving.connections import SPARE, Connections, Standing, client_of, fit_open_files
from vitral.serving.security import Guard, Keys
from vitral.serving.server import Patient

SILENT, SLOW, WAITING, TRANSFERRING, BUSY = Standing


@dataclass(eq=False)
class Fake:
    """A connection that is doing the same thing all the time."""

    doing: Standing
    peer: str = "127.0.0.1"
    active: float = 0.0
    closed: bool = False

    def standing(self, now):
        return self.doing

    def evict(self):
        self.closed = True


def fill(*fakes, most=None):
    """A full table of these connections."""
    table = Connections(most or len(fakes))
    for fake in fakes:
        assert table.add(fake, 0)
    return table


# ---- the table ----


def test_what_a_connection_does_decides_first():
    fakes = [Fake(doing, active=i) for i, doing in enumerate((TRANSFERRING, SLOW, BUSY, WAITING, SILENT))]
    table = fill(*fakes)
    for expected in (SILENT, SLOW, WAITING, TRANSFERRING):
        assert table.add(Fake(BUSY), 0)
        assert [fake.doing for fake in fakes if fake.closed] == [expected]
        fakes = [fake for fake in fakes if not fake.closed]
    assert len(table) == 5


def test_of_those_that_do_the_same_the_client_with_the_most_loses_its_longest_inactive_one():
    many = [Fake(WAITING, "127.0.0.2", active=9 - i) for i in range(3)]
    few = [Fake(WAITING, "127.0.0.3", active=0), Fake(WAITING, "127.0.0.4", active=1)]
    table = fill(*many, *few)
    assert table.add(Fake(WAITING, "127.0.0.5"), 0)
    assert [fake.active for fake in (*many, *few) if fake.closed] == [7]


def test_a_busy_connection_is_never_closed_and_the_new_one_is_refused():
    busy = [Fake(BUSY) for _ in range(3)]
    table = fill(*busy)
    refused = [Fake(SILENT) for _ in range(SPARE + 2)]
    assert not any(table.add(fake, 0) for fake in refused)
    assert [fake.closed for fake in refused] == [True, True] + [False] * SPARE  # these wait for their answer
    assert not any(fake.closed for fake in busy)
    table.remove(busy[0])
    assert table.add(Fake(WAITING), 0)


def test_a_client_above_its_limit_makes_room_before_idle_clients_and_after_silent_connections():
    crowd = [Fake(TRANSFERRING, "127.0.0.2", active=9) for _ in range(6)]
    others = [
        Fake(WAITING, "127.0.0.3"),
        Fake(WAITING, "127.0.0.4"),
        Fake(SLOW, "127.0.0.5"),
        Fake(SILENT, "127.0.0.6"),
    ]
    table = fill(*crowd, *others)
    assert table.per_client == 5
    for _ in range(3):
        assert table.add(Fake(BUSY, "127.0.0.7"), 0)
    assert [fake.closed for fake in others] == [False, False, True, True]
    assert [fake.closed for fake in crowd].count(True) == 1
    assert table.add(Fake(BUSY, "127.0.0.7"), 0)  # the crowd is at its limit: an idle connection is next
    assert [fake.closed for fake in others].count(True) == 3


def test_the_table_stays_within_its_limit_and_closes_no_busy_connection():
    chance, evicted = random.Random(3), []
    table, admitted = Connections(7, lambda: evicted.append(1)), []
    for now in range(2000):
        fake = Fake(chance.choice(list(Standing)), f"127.0.0.{chance.randrange(4)}", now)
        if table.add(fake, now):
            admitted.append(fake)
        if chance.random() < 0.5:
            table.remove(gone := chance.choice(admitted))
            admitted.remove(gone)
        assert not [each for each in admitted if each.closed and each.doing is BUSY]
        admitted = [each for each in admitted if not each.closed]
        assert len(table) == len(admitted) <= 7
        assert table._held == Counter(each.peer for each in admitted)
    assert len(evicted) > 100


def test_a_large_table_closes_several_silent_connections_at_once_but_one_idle_one():
    fakes = [Fake(doing, active=i) for i, doing in enumerate([SILENT] * 3 + [WAITING] * 125)]
    table = fill(*fakes)
    assert table.add(Fake(BUSY), 0)
    assert [fake.closed for fake in fakes] == [True] * 3 + [False] * 125
    while len(table) < 128:
        assert table.add(Fake(BUSY), 0)
    assert table.add(Fake(BUSY), 0)
    assert [fake.closed for fake in fakes] == [True] * 4 + [False] * 124


def test_a_client_is_an_address_or_a_network_of_ipv6():
    assert client_of("127.0.0.9") == client_of("::ffff:127.0.0.9") == "127.0.0.9"
    assert client_of("2001:db8:1:2::3") == client_of("2001:db8:1:2:9:9:9:9") != client_of("2001:db8:1:3::3")
    assert client_of("") == ""


def test_connections_fit_under_the_limit_of_open_files(monkeypatch):
    def limited(number):
        monkeypatch.setattr(resource, "getrlimit", lambda what: (number, number))
        return fit_open_files(512)

    assert limited(resource.RLIM_INFINITY) == limited(1024) == 512
    assert limited(300) == 300 - connections.RESERVED_FILES
    with pytest.raises(ConfigError, match=r"may open only 64 files.* ulimit -n 1024"):
        limited(64)


# ---- over sockets ----


class Answering:
    """An application that answers a request when it may."""

    def __init__(self):
        self.may, self.asked = asyncio.Event(), 0

    async def __call__(self, scope, receive, send):
        self.asked += 1
        await self.may.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Client:
    """A client with one connection."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer

    def send(self, data=b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"):
        self.writer.write(data)

    async def status(self):
        """The status of an answer, 0 if the connection was closed instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            return 0
        return int(head.split()[1])

    async def close(self):
        self.writer.close()
        with contextlib.suppress(OSError):  # the server was the first
            await self.writer.wait_closed()


def over_sockets(scenario, most):
    """Run a scenario against a server of that many connections; `connect` opens one from a loopback address."""
    clients = []

    async def run():
        app, table, state = Answering(), Connections(most), ServerState()
        config = uvicorn.Config(
            Guard(app, Keys([]), (), Serving(), full=lambda: False), log_config=None, lifespan="off"
        )
        config.load()
        loop = asyncio.get_running_loop()
        async with (
            await loop.create_server(lambda: Patient(config, state, {}, table=table), "127.0.0.1", 0) as listening,
            asyncio.timeout(60),
        ):
            port = listening.sockets[0].getsockname()[1]

            async def connect(address="127.0.0.1"):
                clients.append(Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))))
                return clients[-1]

            try:
                await scenario(connect, app, table)
            finally:
                for each in clients:
                    await each.close()
                while state.connections:
                    await asyncio.sleep(0)

    with ThreadPoolExecutor(1) as apart:
        apart.submit(lambda: asyncio.run(run())).result()


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.3")])
@pytest.mark.parametrize(
    "sent", [b"", b"GET / HTTP/1.1\r\nHo", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n"]
)
def test_silent_and_slow_connections_keep_nobody_out(addresses, sent, monkeypatch):
    crowd, worker = addresses
    monkeypatch.setattr(server, "MIN_BYTES_PER_SECOND", 1e12)  # every request that is not complete is slow
    monkeypatch.setattr(server, "GRACE_SECONDS", -1)

    async def scenario(connect, app, table):
        app.may.set()
        idle = [await connect(crowd) for _ in range(20)]
        for each in idle:
            each.send(sent)
        client = await connect(worker)
        for _ in range(3):
            client.send()
            assert await client.status() == 200
            idle.append(await connect(crowd))
        assert len(table) == 8

    over_sockets(scenario, 8)


def test_a_connection_that_is_being_answered_stays_and_a_new_one_gets_503():
    async def scenario(connect, app, table):
        working = [await connect() for _ in range(4)]
        for each in working:
            each.send()
        while app.asked < 4:
            await asyncio.sleep(0)
        late = await connect("127.0.0.9")
        late.send()
        assert await late.status() == 503
        assert b'"busy"' in await late.reader.read()  # and the connection is closed
        app.may.set()
        assert [await each.status() for each in working] == [200] * 4
        again = await connect("127.0.0.9")  # the others are idle now
        again.send()
        assert await again.status() == 200

    over_sockets(scenario, 4)
