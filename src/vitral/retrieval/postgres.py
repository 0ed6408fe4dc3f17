"""An index in a PostgreSQL database with pgvector: a table of rows, and one beside it with the manifest.

A change is one transaction, so that a kill leaves the state before it or after it. What people are told never holds a
password: an address is shown by those of its parts that are no secret.
"""

import json
import os
import re
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, LiteralString
from urllib.parse import quote, unquote

import numpy as np
import torch
from torch import Tensor

from vitral.config import NearestKind
from vitral.errors import CheckpointError, ConfigError, UnreachableError
from vitral.retrieval.nearest import BUILD_WIDTH, LINKS, SEARCH_WIDTH, ivf_cells, ivf_probes
from vitral.retrieval.store import Item, Manifest, Rows

if TYPE_CHECKING:
    import psycopg
    from psycopg.sql import Composed, Identifier

SCHEMES = ("postgresql://", "postgres://")
TABLE = "vitral_index"
"""Where no table is named."""
EXAMPLE = "postgresql://user@host/database?table=photos"
NAME = re.compile(r"(?=.{1,48}$)[a-z][a-z0-9]*(_[a-z0-9]+)*")
"""Names that mean the same with and without quotes; those made from them, NAME__facts, are never one of them."""
LOCK_SECONDS = 3.0
"""How long a writer waits for another: a server takes a moment to notice that one was killed."""
CONNECT_SECONDS = "10"
LOST = {"keepalives_idle": "30", "keepalives_interval": "10", "keepalives_count": "3", "tcp_user_timeout": "60000"}
"""Parameters of libpq by which a server that says nothing at all for a minute is gone."""
SEARCH_SECONDS = 60.0
"""How long a server may look for the neighbours of one query."""
MOST_CANDIDATES = 1000
"""HNSW: what pgvector keeps at most while it searches."""
MOST_INDEXED = 2000
"""The longest vector that pgvector has graphs and cells for."""
MOST_INLINE = 1900
"""The longest that fits in a page together with its row: a scan reads it there, and not from a second table."""
COPY_BEGIN, COPY_END = b"PGCOPY\n\xff\r\n\0" + bytes(8), b"\xff\xff"
"""Around the rows of COPY in binary."""

STRUCTURES: dict[NearestKind, LiteralString] = {
    "hnsw": "CREATE INDEX IF NOT EXISTS {hnsw} ON {table} USING hnsw (embedding vector_ip_ops) "
    "WITH (m = {links}, ef_construction = {wide})",
    "ivf": "CREATE INDEX IF NOT EXISTS {ivf} ON {table} USING ivfflat (embedding vector_ip_ops) WITH (lists = {cells})",
}
"""What is searched instead of all vectors. They have length 1, so that the product is the cosine."""

ALL: LiteralString = (
    "SELECT name, size, mtime_ns, -(embedding <#> %(query)s::vector) AS cosine FROM {table} "
    "ORDER BY cosine DESC, id LIMIT %(k)s"
)
"""The nearest of all vectors: <#> is minus the product. No index serves an order of such an expression."""
SOME: LiteralString = (
    "SELECT name, size, mtime_ns, cosine FROM (SELECT *, -(embedding <#> %(query)s::vector) AS cosine FROM {table} "
    "ORDER BY embedding <#> %(query)s::vector LIMIT %(k)s) AS near ORDER BY cosine DESC, id"
)
"""The nearest by a graph or cells, in the order that these can give."""

BOUND: LiteralString = (
    "SELECT set_config('statement_timeout', %s, true) FROM pg_settings "
    "WHERE name = 'statement_timeout' AND source = 'default'"
)
"""For this transaction, unless another is set in the address, for the user, the database or the server."""


def is_address(place: object) -> bool:
    """Whether an index is in a database."""
    return str(place).startswith(SCHEMES)


@dataclass(frozen=True)
class Address:
    """Which database, and which table of it."""

    parameters: dict[str, str] = field(repr=False)
    """As libpq takes them: with the password, if there is one in the address."""
    table: tuple[str, ...]
    """Its name, with that of a schema before it if one is given."""

    @property
    def place(self) -> str:
        """What may be shown of it."""
        known = {name: quote(value, safe="/:,") for name, value in self.parameters.items()}
        user, host = known.get("user", ""), known.get("host", "")
        socket = host.startswith("/")
        host = f"[{host}]" if ":" in host else host
        port = f":{known['port']}" if "port" in known else ""
        where = f"{user}{'@' * bool(user)}{'' if socket else host}{port}/{known.get('dbname', '')}"
        return f"postgresql://{where}?{f'host={host}&' * socket}table={'.'.join(self.table)}"


def read_address(url: str) -> Address:
    """`postgresql://...` as libpq reads it, with `table=NAME` or `table=SCHEMA.NAME` among what follows the `?`."""
    psycopg = import_psycopg()
    base, _, query = url.partition("?")
    named = [pair for pair in query.split("&") if pair.startswith("table=")]
    others = [pair for pair in query.split("&") if pair and pair not in named]
    table = tuple(unquote(named[-1].removeprefix("table=")).split(".")) if named else (TABLE,)
    if len(table) > 2 or not all(map(NAME.fullmatch, table)):
        raise ConfigError(
            "a table is named with at most 48 small letters and digits, with single underscores between words, as "
            f"table=my_photos or table=schema.my_photos; got {'.'.join(table)!r}."
        )
    wrong = ConfigError(
        f"the address of the database cannot be read; it is like {EXAMPLE}, and what is special in a password is "
        "written with percent signs, such as %40 for @ and %2F for /."
    )  # without the address: nobody can tell which part of it is the password
    try:
        found = psycopg.conninfo.conninfo_to_dict("?".join([base, "&".join(others)] if others else [base]))
    except psycopg.ProgrammingError:
        raise wrong from None
    parameters = {name: str(value) for name, value in found.items() if value is not None}
    if "@" in parameters.get("host", "") + parameters.get("dbname", ""):
        raise wrong
    if not re.fullmatch(r"[\d,]*", parameters.get("port", "")):
        raise wrong
    return Address(parameters, table)


class Postgres:
    """A `Store` in a database; what is searched is what is there at that moment."""

    def __init__(self, url: str) -> None:
        self._address = read_address(url)
        self.place, self.title = self._address.place, self._address.table[-1]
        self._connection: psycopg.Connection[Any] | None = None
        self._count = self._width = 0
        self._kind: NearestKind = "exact"
        self._ids: dict[Item, int] = {}
        self._changed = False

    # ---- reading ----

    def open(self) -> Manifest:
        """Read the manifest, and count."""
        with self._asking() as connection:
            if not self._exists(connection):
                raise CheckpointError(
                    f"{self.place} is not an index: the database has none of that name; make one with vitral index."
                )
            document, self._count = self._one(
                connection, "SELECT (SELECT document FROM {facts}), (SELECT count(*) FROM {table})"
            )
        manifest = Manifest.from_dict(document, self.place)
        self._kind, self._width = manifest.nearest, manifest.embedding.width
        return manifest

    def __len__(self) -> int:
        return self._count

    def items(self) -> list[Item]:
        """What the rows are of, the oldest first."""
        with self._asking() as connection:
            rows = connection.execute(self._sql("SELECT id, name, size, mtime_ns FROM {table} ORDER BY id"))
            self._ids = {Item(name, size, time): number for number, name, size, time in rows}
        return list(self._ids)

    def rows(self) -> Rows:
        """All of them, the oldest first."""
        ask = self._sql("SELECT name, size, mtime_ns, vector_send(embedding) FROM {table} ORDER BY id")
        items, sent = [], []
        with self._asking() as connection, connection.transaction(), connection.cursor("rows", binary=True) as cursor:
            cursor.itersize = 1000
            for name, size, time, vector in cursor.execute(ask):
                items.append(Item(name, size, time))
                sent.append(vector[4:])  # after its width, as numbers of 4 bytes, the highest first
        numbers = np.frombuffer(b"".join(sent), ">f4").astype(np.float32)
        return Rows(torch.from_numpy(numbers).reshape(len(items), self._width), items)

    def search(self, queries: Tensor, k: int) -> list[list[tuple[float, Item]]]:
        """The k nearest of each, with their cosines."""
        asked = [_literal(query) for query in queries]
        before = self._connection
        try:
            return self._search(asked, k)
        except UnreachableError:
            if before is None or not before.closed:
                raise
            return self._search(asked, k)  # by a new connection: the server may have been started anew since

    def _search(self, asked: list[str], k: int) -> list[list[tuple[float, Item]]]:
        with self._asking() as connection, connection.transaction():
            connection.execute(BOUND, (f"{SEARCH_SECONDS * 1000:.0f}",))
            if self._kind == "exact":
                return [self._ask(connection, ALL, query, k) for query in asked]
            candidates = min(max(SEARCH_WIDTH, 2 * k), MOST_CANDIDATES)
            wide = {"hnsw.ef_search": candidates, "ivfflat.probes": ivf_probes(ivf_cells(self._count))}
            for name, number in wide.items():
                connection.execute("SELECT set_config(%s, %s, true)", (name, str(number)))
            found = [self._ask(connection, SOME, query, k) for query in asked]
            return [  # it skips what was removed, and has no more than its candidates
                some if len(some) == k else self._ask(connection, ALL, query, k)
                for query, some in zip(asked, found, strict=True)
            ]

    def _ask(
        self, connection: "psycopg.Connection[Any]", statement: LiteralString, query: str, k: int
    ) -> list[tuple[float, Item]]:
        rows = connection.execute(self._sql(statement), {"query": query, "k": k})
        return [(cosine, Item(name, size, time)) for name, size, time, cosine in rows]

    # ---- writing ----

    def require(self, nearest: NearestKind, width: int) -> None:
        """Raise for vectors that are too long."""
        if nearest != "exact" and width > MOST_INDEXED:
            raise ConfigError(
                f"pgvector has graphs and cells for vectors of at most {MOST_INDEXED:,} numbers, these have {width:,}; "
                "give --nearest exact."
            )

    def refuses(self, item: Item) -> str:
        """A database keeps text: no other bytes, and no zeros."""
        try:
            item.name.encode()
        except UnicodeEncodeError:
            return "its name is not UTF-8, and a database keeps no other; rename it"
        return "it has a zero byte in it, which a database does not keep" if "\0" in item.name else ""

    @contextmanager
    def writing(self) -> Iterator[Manifest | None]:
        """Nobody else writes meanwhile; the lock of a process that was killed is gone with its connection."""
        psycopg = import_psycopg()
        try:
            with self._asking() as connection:
                try:
                    with connection.transaction():
                        wait = f"{LOCK_SECONDS:g}s"
                        connection.execute("SELECT set_config('lock_timeout', %s, true)", (wait,))
                        connection.execute(
                            "SELECT pg_advisory_lock(hashtextextended(%s, 0))", (f"vitral {self.title}",)
                        )
                except psycopg.errors.LockNotAvailable:
                    raise CheckpointError(
                        f"another process writes to {self.place}; wait for it, or give another --out."
                    ) from None
                there = self._exists(connection)
            yield self.open() if there else None
        finally:
            self._close()

    def create(self, manifest: Manifest) -> None:
        """Make the two tables, and pgvector's type if the database has not got it."""
        psycopg = import_psycopg()
        with self._asking() as connection:
            encoding = connection.info.parameter_status("server_encoding")
            if encoding != "UTF8":
                raise CheckpointError(f"{self.place} is a database in {encoding}; create one with ENCODING 'UTF8'.")
            try:
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            except (psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile):
                raise CheckpointError(
                    f"the server of {self.place} has no pgvector; install it there (on Debian the package "
                    "postgresql-NN-pgvector, NN being the version of the server)."
                ) from None
            except psycopg.errors.InsufficientPrivilege:
                raise CheckpointError(
                    f"{self.place} has no pgvector yet, and this user may not add it; let one who may say "
                    "CREATE EXTENSION vector in that database, once."
                ) from None
            try:
                with connection.transaction():
                    connection.execute(
                        self._sql(
                            "CREATE TABLE {table} (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "
                            "name text NOT NULL, size bigint NOT NULL, mtime_ns bigint NOT NULL, "
                            "embedding vector({width}) NOT NULL)",
                            width=manifest.embedding.width,
                        )
                    )
                    if manifest.embedding.width <= MOST_INLINE:
                        connection.execute(self._sql("ALTER TABLE {table} ALTER embedding SET STORAGE PLAIN"))
                    connection.execute(self._sql("CREATE TABLE {facts} (document json NOT NULL)"))
                    connection.execute(self._sql("INSERT INTO {facts} VALUES (%s)"), (_document(manifest),))
            except psycopg.errors.DuplicateTable:
                raise CheckpointError(f"{self.place} is a table and not an index; name another table.") from None

    def add(self, manifest: Manifest, items: Sequence[Item], vectors: Sequence[Tensor]) -> None:
        """More rows, in one transaction with the manifest."""
        with self._asking() as connection, connection.transaction():
            if items:
                into = self._sql("COPY {table} (name, size, mtime_ns, embedding) FROM STDIN WITH (FORMAT binary)")
                with connection.cursor() as cursor, cursor.copy(into) as copy:
                    copy.write(COPY_BEGIN)
                    for item, vector in zip(items, vectors, strict=True):
                        copy.write(_packed(item, vector))
                    copy.write(COPY_END)
                self._count, self._changed = self._count + len(items), True
            self._write_manifest(connection, manifest)

    def remove(self, manifest: Manifest, items: Sequence[Item]) -> None:
        """Fewer rows, in one transaction with the manifest."""
        ids = [self._ids[item] for item in items]
        with self._asking() as connection, connection.transaction():
            connection.execute(self._sql("DELETE FROM {table} WHERE id = ANY(%s)"), (ids,))
            self._count, self._changed = self._count - len(ids), True
            self._write_manifest(connection, manifest)

    def finish(self, manifest: Manifest) -> None:
        """The graph or cells that are asked for, and no others."""
        kind = manifest.nearest
        with self._asking() as connection:
            with connection.transaction():
                for each, create in STRUCTURES.items():
                    if each != kind or (each == "ivf" and self._changed):  # cells are means of the vectors there are
                        connection.execute(self._sql("DROP INDEX IF EXISTS {index}", index=self._beside(each)))
                    if each == kind:
                        connection.execute(
                            self._sql(create, links=LINKS, wide=BUILD_WIDTH, cells=ivf_cells(self._count))
                        )
                self._write_manifest(connection, manifest)
            if self._changed:
                connection.execute(self._sql("VACUUM ANALYZE {table}"))
                self._changed = False

    def _write_manifest(self, connection: "psycopg.Connection[Any]", manifest: Manifest) -> None:
        connection.execute(self._sql("UPDATE {facts} SET document = %s"), (_document(manifest),))

    # ---- the database ----

    @contextmanager
    def _asking(self) -> Iterator["psycopg.Connection[Any]"]:
        """The connection, made where there is none; what goes wrong is told in a sentence."""
        psycopg = import_psycopg()
        try:
            if self._connection is None or self._connection.closed:
                self._close()
                self._connection = self._connect()
            yield self._connection
        except psycopg.Error as error:
            raise self._told(error) from None

    def _connect(self) -> "psycopg.Connection[Any]":
        psycopg = import_psycopg()
        own = {"client_encoding": "utf8", "fallback_application_name": "vitral", **LOST}
        own["connect_timeout"] = os.environ.get("PGCONNECT_TIMEOUT", CONNECT_SECONDS)
        connection = psycopg.connect("", autocommit=True, **(own | self._address.parameters))
        weakref.finalize(self, connection.close)
        return connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _told(self, error: "psycopg.Error") -> CheckpointError | UnreachableError:
        """What the server said, where, and what to do about it."""
        psycopg = import_psycopg()
        said = error.diag.message_primary or str(error).strip().partition("\n")[0].rpartition("failed: ")[2]
        said = said.removeprefix("FATAL:").strip()
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            remedy = "ask for the right to, or name a schema of your own: table=SCHEMA.NAME."
            return CheckpointError(f"{self.place}: {said}; {remedy}")
        if isinstance(error, psycopg.errors.UndefinedTable):
            return CheckpointError(f"{self.place}: {said}; drop {self.title}__facts too, and make the index anew.")
        if not isinstance(error, psycopg.OperationalError):
            return CheckpointError(f"{self.place}: {said}.")
        if isinstance(error, psycopg.errors.QueryCanceled):
            remedy = "to wait longer, add options=-c%20statement_timeout%3D10min to the address."
        elif error.sqlstate:  # said by a server that answers
            remedy = "try again, or ask who runs the server."
        elif "password" in said:
            remedy = "give the right one in PGPASSWORD, in ~/.pgpass or in the address."
        elif "does not exist" in said:
            remedy = "create it, or name another."
        else:
            remedy = "see that the server is up, and that host and port are right."
        return UnreachableError(f"{self.place} cannot be used now ({said}); {remedy}")

    def _beside(self, what: str) -> "Identifier":
        """The name of something that belongs to the table."""
        *schema, table = self._address.table
        return import_psycopg().sql.Identifier(*schema, f"{table}__{what}")

    def _sql(self, text: LiteralString, **more: "Identifier | int") -> "Composed":
        """A statement with names and numbers in their places, each name quoted."""
        sql = import_psycopg().sql
        names = {"table": sql.Identifier(*self._address.table), "facts": self._beside("facts")}
        names |= {each: sql.Identifier(f"{self.title}__{each}") for each in STRUCTURES}  # these go where the table is
        values = {name: sql.Literal(value) if isinstance(value, int) else value for name, value in more.items()}
        return sql.SQL(text).format(**names, **values)

    def _one(self, connection: "psycopg.Connection[Any]", text: LiteralString) -> tuple[Any, ...]:
        row = connection.execute(self._sql(text)).fetchone()
        assert row is not None
        return row

    def _exists(self, connection: "psycopg.Connection[Any]") -> bool:
        return self._has(connection, self._beside("facts"))

    def _has(self, connection: "psycopg.Connection[Any]", name: "Identifier") -> bool:
        row = connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name.as_string(connection),)).fetchone()
        return bool(row and row[0])


def _document(manifest: Manifest) -> str:
    return json.dumps(manifest.to_dict())


def _packed(item: Item, vector: Tensor) -> bytes:
    """A row for COPY: the number of its fields, and of each the bytes and their number."""
    name, D = item.name.encode(), len(vector)
    fields = (4, len(name), name, 8, item.size, 8, item.mtime_ns, 2 + 2 + 4 * D, D, 0)
    return struct.pack(f">hi{len(name)}siqiqihh", *fields) + vector.numpy().astype(">f4").tobytes()


def _literal(vector: Tensor) -> str:
    """A vector as pgvector reads it; every number comes back as it was."""
    return json.dumps(vector.tolist())


def import_psycopg() -> Any:
    """psycopg, or how to install it."""
    try:
        import psycopg
        import psycopg.conninfo
        import psycopg.sql
    except ImportError as error:
        raise ConfigError("an index in a database needs psycopg: pip install 'vitral[postgres]'.") from error
    return psycopg
