"""An index in a real database: the answers of the folder's, whole at every moment, and nothing told of passwords."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_server import as_form, client

import vitral
from helpers import redraw
from postgres_server import PASSWORD, running
from vitral.cli import serve
from vitral.cli.main import main, parse
from vitral.errors import CheckpointError, ConfigError, VitralError
from vitral.inference.predictor import Predictor
from vitral.models.zoo import create_model
from vitral.retrieval import postgres
from vitral.retrieval.index import Index
from vitral.retrieval.nearest import Exact
from vitral.retrieval.postgres import Postgres, read_address
from vitral.retrieval.store import Embedding, Item, Manifest


@pytest.fixture(scope="session")
def server():
    with running() as started:
        yield started


@pytest.fixture
def url(server, request):
    """A table of the test's own."""
    name = "t" + "".join(f"{byte:02x}" for byte in request.node.name.encode())[-40:]
    return server.url(name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    vitral.save_model(redraw(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3), 5), path)
    return path


@pytest.fixture(scope="module")
def predictor(weights):
    return Predictor(weights, batch_size=16)


def draw(path, seed):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (11, 13, 3), np.uint8)).save(path)
    return path


def draw_many(folder, count):
    for i in range(count):
        draw(folder / ("deep" if i % 3 == 0 else ".") / f"{i:02d}.png", i)
    return folder


@pytest.fixture
def photos(tmp_path):
    return draw_many(tmp_path / "photos", 7)


def unit(n, D, seed):
    return F.normalize(torch.randn(n, D, generator=torch.Generator().manual_seed(seed)), dim=1)


def manifest(width, nearest="exact"):
    return Manifest("text", "/somewhere", "", Embedding("a model", "pooled", width), nearest=nearest)


def fill(url, vectors, names=None, nearest="exact"):
    """A table of vectors, without a model."""
    items = [Item(name) for name in names or map(str, range(len(vectors)))]
    store = Postgres(url)
    with store.writing() as there:
        assert there is None
        store.create(manifest(vectors.shape[1]))
        store.add(manifest(vectors.shape[1]), items, list(vectors))
        store.finish(manifest(vectors.shape[1], nearest))
    store = Postgres(url)
    store.open()
    return store


def told(call, *args):
    with pytest.raises(VitralError) as caught:
        call(*args)
    return str(caught.value)


# ---- the same as a folder ----


def test_a_database_answers_as_a_folder(predictor, url, tmp_path):
    photos = draw_many(tmp_path / "photos", 60)
    for name in ("copy-a.png", "copy-b.png"):
        (photos / name).write_bytes((photos / "01.png").read_bytes())
    folder, _ = Index.build(predictor, photos, tmp_path / "i")
    database, change = Index.build(predictor, photos, url)
    assert (change.added, change.kept, change.removed, change.unreadable) == (62, 0, 0, {})
    assert database.manifest == folder.manifest
    assert database.items == folder.items
    assert torch.equal(database.vectors, folder.vectors)
    again = Index(url, source=predictor.source)
    assert len(again) == len(folder) == 62
    queries = [*sorted(photos.rglob("*.png")), draw(tmp_path / "another.png", 999)]
    every = {row: dict(map(pair, some)) for row, some in enumerate(folder.search(queries, 62))}
    for row, (some, others) in enumerate(zip(again.search(queries, 7), folder.search(queries, 7), strict=True)):
        assert [match.score for match in some] == pytest.approx([match.score for match in others], abs=1e-5)
        assert [match.score for match in some] == sorted((match.score for match in some), reverse=True)
        for match, other in zip(some, others, strict=True):  # another one only where both are as near
            assert every[row][match.name] == pytest.approx(other.score, abs=1e-6)
        assert len({match.name for match in some}) == 7
    assert len(again.search(queries[3], top_k=99)[0]) == 62
    assert again.duplicates(0.99999) == folder.duplicates(0.99999) != []


def pair(match):
    return match.name, match.score


def test_only_new_and_changed_files_are_looked_at(predictor, photos, url):
    totals = []

    def watch(steps, total):
        totals.append(total)
        return steps

    (photos / "bad.png").write_bytes(b"no picture")
    index, change = Index.build(predictor, photos, url, watch=watch)
    assert (change.added, list(change.unreadable)) == (7, ["bad.png"])
    before = dict(zip(index.items, index.vectors, strict=True))
    (photos / "01.png").unlink()
    draw(photos / "02.png", 102)
    draw(photos / "new.png", 103)
    index, change = Index.build(predictor, photos, url, watch=watch)
    assert (change.added, change.kept, change.removed, list(change.unreadable)) == (2, 5, 2, ["bad.png"])
    assert totals == [8, 2]
    wanted = {p.relative_to(photos).as_posix() for p in photos.rglob("*.png")} - {"bad.png"}
    assert {item.name for item in index.items} == wanted
    for item, vector in zip(index.items, index.vectors, strict=True):
        assert item.name in ("02.png", "new.png") or torch.equal(vector, before[item])
    draw(photos / "bad.png", 7)
    index, change = Index.build(predictor, photos, url, watch=watch)
    assert (change.added, change.unreadable, len(index), totals[-1]) == (1, {}, 8, 1)


def test_an_index_of_nothing_that_can_be_read(predictor, url, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "bad.png").write_bytes(b"no picture")
    index, change = Index.build(predictor, tmp_path / "photos", url, nearest="hnsw")
    assert (change.added, list(change.unreadable), len(index), index.items) == (0, ["bad.png"], 0, [])
    assert index.vectors.shape == (0, 64)
    assert index.search_vectors(unit(2, 64, 0)) == [[], []]
    assert index.duplicates(0.9) == []


def test_what_does_not_belong_is_refused_as_a_folder_refuses_it(predictor, photos, url, tmp_path):
    other = tmp_path / "other.safetensors"
    vitral.save_model(redraw(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3), 6), other)
    draw(tmp_path / "elsewhere" / "a.png", 1)
    said = []
    for out in (url, tmp_path / "i"):
        index, _ = Index.build(predictor, photos, out)
        assert index.manifest.embedding.width == 64
        refusals = [
            told(Index.build, other, photos, out),
            told(Index.build, predictor, tmp_path / "elsewhere", out),
            told(Index(out, source=other).search, photos / "01.png"),
            told(index.search_vectors, torch.zeros(2, 7)),
        ]
        said.append([sentence.replace(index.place, "PLACE") for sentence in refusals])
    assert said[0] == said[1]
    assert "another model" in said[0][0]
    assert "is an index of" in said[0][1]
    assert "other weights" in said[0][2]


# ---- whole at every moment ----

# Starts once; then for each number on its input a child builds the index, and is killed within that transaction.
BUILDER = """
import os, signal, sys
import torch
from vitral.inference.predictor import Predictor
from vitral.retrieval.index import Index
from vitral.retrieval.postgres import Postgres
torch.set_num_threads(1)
weights, folder, out = sys.argv[1:]
predictor = Predictor(weights, batch_size=3)
write = Postgres._write_manifest
left = 0

def dies(*args):
    global left
    left -= 1
    write(*args)
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

Postgres._write_manifest = dies
for line in sys.stdin:
    child = os.fork()
    if not child:
        left = int(line)
        Index.build(predictor, folder, out, save_seconds=0)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


def test_kills_within_a_transaction_leave_the_state_before_it(weights, url, tmp_path):
    photos = draw_many(tmp_path / "photos", 20)
    chance, expected = random.Random(0), 0
    command = [sys.executable, "-c", BUILDER, str(weights), str(photos), url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdin
        assert builder.stdout
        for _ in range(4):
            at = chance.randint(1, 5)
            builder.stdin.write(f"{at}\n")
            builder.stdin.flush()
            assert builder.stdout.readline().strip() == "9"
            expected += at - 1
            index = Index(url)
            assert len(index.items) == len({item.name for item in index.items}) == expected
            torch.testing.assert_close(index.vectors.norm(dim=1), torch.ones(expected))
        builder.stdin.close()
    assert 0 < expected < 20
    _, change = Index.build(weights, photos, url)
    assert (change.kept, change.added) == (expected, 20 - expected)
    whole, _ = Index.build(weights, photos, tmp_path / "whole")
    at = dict(zip(whole.items, whole.vectors, strict=True))
    index = Index(url)
    assert set(index.items) == set(at)
    for item, vector in zip(index.items, index.vectors, strict=True):
        torch.testing.assert_close(vector, at[item], atol=1e-6, rtol=0)


def test_two_writers_do_not_meet(predictor, photos, url, monkeypatch):
    monkeypatch.setattr(postgres, "LOCK_SECONDS", 0.05)
    with Postgres(url).writing(), pytest.raises(CheckpointError, match=r"another process writes to postgresql://"):
        Index.build(predictor, photos, url)
    index, _ = Index.build(predictor, photos, url)
    assert len(index) == 7


def test_a_search_goes_on_after_the_server_was_started_anew(url, server):
    store = fill(url, unit(9, 5, 0))
    before = store.search(unit(2, 5, 1), 3)
    end_sessions(server)
    assert store.search(unit(2, 5, 1), 3) == before


def end_sessions(server, user="postgres"):
    with server.connect() as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'vitral' AND usename = %s AND pid <> pg_backend_pid()",
            (user,),
        )


# ---- a server that does not answer ----


def test_a_search_that_takes_too_long_is_given_up(url, server, monkeypatch):
    store = fill(url, unit(9, 5, 0))
    wanted, connection = store.search(unit(2, 5, 1), 3), store._connection
    tries, real = [], Postgres._search
    monkeypatch.setattr(Postgres, "_search", lambda *args: tries.append(args) or real(*args))
    monkeypatch.setattr(postgres, "SEARCH_SECONDS", 0.05)
    with server.connect() as other, other.transaction():
        other.execute(f"LOCK TABLE {store.title} IN ACCESS EXCLUSIVE MODE")
        said = told(store.search, unit(2, 5, 1), 3)
    assert "canceling statement due to statement timeout" in said
    assert "add options=-c%20statement_timeout%3D10min to the address" in said
    assert len(tries) == 1
    monkeypatch.undo()
    assert store.search(unit(2, 5, 1), 3) == wanted
    assert store._connection is connection


def patience(store):
    """How long the server lets a search and another statement of the store take."""
    seen, real = [], Postgres._ask

    def ask(self, connection, *args):
        seen.extend(connection.execute("SHOW statement_timeout").fetchone())
        return real(self, connection, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Postgres, "_ask", ask)
        store.search(unit(1, 5, 1), 3)
    with store._asking() as connection:
        return *seen, *connection.execute("SHOW statement_timeout").fetchone()


def test_only_searches_have_a_limit_and_others_can_set_it(url, server):
    store = fill(url, unit(9, 5, 0))
    assert patience(store) == ("1min", "0")
    with store.writing():
        assert patience(store) == ("1min", "0")
    for limit in ("7s", "2min", "0"):
        assert patience(Postgres(f"{url}&options=-c%20statement_timeout%3D{limit}")) == (limit, limit)
    with server.connect() as connection:
        connection.execute("CREATE ROLE hasty LOGIN SUPERUSER")
        connection.execute("ALTER ROLE hasty SET statement_timeout = '3s'")
    assert patience(Postgres(url.replace("postgres@", "hasty@"))) == ("3s", "3s")


def test_a_line_that_is_dead_is_noticed(url):
    fill(url, unit(9, 5, 0))
    for more, changed in (
        ("", {}),
        ("&tcp_user_timeout=5000&keepalives_idle=7", {"tcp_user_timeout": "5000", "keepalives_idle": "7"}),
    ):
        store = Postgres(url + more)
        store.open()
        parameters = store._connection.info.get_parameters()
        assert {name: parameters[name] for name in postgres.LOST} == postgres.LOST | changed


# ---- among many ----


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_graph_or_cells_find_nearly_all(url, server, kind):
    own = url.replace("?", "?options=-c%20enable_seqscan%3Doff&")  # else a small table is read as a whole
    centres = unit(20, 17, 0)
    vectors = F.normalize(centres[torch.arange(1501) % 20] + 0.5 * unit(1501, 17, 1), dim=1)
    queries = F.normalize(vectors[:40] + 0.2 * unit(40, 17, 2), dim=1)
    store = fill(own, vectors, nearest=kind)
    values, rows = Exact(vectors).search(queries, 10)
    found = store.search(queries, 10)
    recall = np.mean(
        [len({int(item.name) for _, item in a} & set(b)) / 10 for a, b in zip(found, rows.tolist(), strict=True)]
    )
    assert recall >= 0.95
    assert reads_an_index(store, postgres.SOME)
    assert not reads_an_index(store, postgres.ALL)
    assert found[0][0][0] == pytest.approx(float(values[0, 0]), abs=1e-5)
    for k in (1200, 1501, 9999):  # more than it keeps candidates, all there are, more than that
        assert len(store.search(queries[:1], k)[0]) == min(k, 1501)
    with store.writing() as there:  # most are taken away, and more than nothing is found still
        gone = [item for item in store.items() if int(item.name) % 20]
        store.remove(there, gone)
    left = store.search(queries[:3], 10)
    assert all(len(some) == 10 and not any(int(item.name) % 20 for _, item in some) for some in left)
    with store.writing() as there:
        store.finish(manifest(17, "exact"))
    with server.connect() as connection:
        kept = connection.execute("SELECT indexname FROM pg_indexes WHERE tablename = %s", (store.title,)).fetchall()
    assert kept == [(f"{store.title}_pkey",)]


def reads_an_index(store, statement):
    """By the plan that the database makes."""
    asked = {"query": postgres._literal(unit(1, 17, 3)[0]), "k": 3}
    with store._asking() as connection:
        plan = connection.execute(store._sql(f"EXPLAIN {statement}"), asked).fetchall()
    return "Index Scan using" in str(plan)


def test_indexing_with_a_graph(predictor, photos, url, tmp_path):
    index, _ = Index.build(predictor, photos, url, nearest="hnsw")
    assert index.manifest.nearest == Index(url).manifest.nearest == "hnsw"
    for i, file in enumerate(sorted(photos.rglob("*.png"))):
        draw(file, 500 + i)
    index, change = Index.build(predictor, photos, url)
    assert (change.added, change.removed) == (7, 7)
    assert index.manifest.nearest == "hnsw"
    for file in sorted(photos.rglob("*.png")):
        assert index.search(file, top_k=1)[0][0].name == str(file.resolve())


def test_vectors_too_long_for_a_graph(predictor, photos, url, monkeypatch):
    with pytest.raises(ConfigError, match=r"at most 2,000 numbers, these have 2,003; give --nearest exact"):
        Postgres(url).require("hnsw", 2003)
    store = fill(url, unit(3, 2003, 0))
    assert [item.name for _, item in store.search(unit(3, 2003, 0)[1:2], 1)[0]] == ["1"]
    monkeypatch.setattr(postgres, "MOST_INDEXED", 63)
    with pytest.raises(ConfigError, match="these have 64"):
        Index.build(predictor, photos, f"{url}_2", nearest="ivf", watch=lambda steps, total: 1 // 0)
    assert "make one with vitral index" in told(Index, f"{url}_2")


# ---- names ----


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://h/d", "postgresql://h/d?table=vitral_index"),
        ("postgres://u:p@h:55/d?sslmode=require&table=a_1", "postgresql://u@h:55/d?table=a_1"),
        ("postgresql://u:p%40%2F@[::1]:5/d?table=s.t", "postgresql://u@[::1]:5/d?table=s.t"),
        ("postgresql:///d?host=/run/x&password=p&table=t", "postgresql:///d?host=/run/x&table=t"),
        ("postgresql://", "postgresql:///?table=vitral_index"),
    ],
)
def test_what_is_shown_of_an_address(url, place):
    assert read_address(url).place == place
    assert read_address(place).place == place
    assert not set(read_address(url).parameters) - {"host", "port", "user", "dbname", "password", "sslmode"}


@pytest.mark.parametrize(
    "table",
    ["photos; DROP TABLE x", 'photos"', "photos'--", "Photos", "a.b.c", "a..b", ".a", "with space", "ünder", "x" * 49,
     "a__facts", "_a", "a_", "1a", "a\n", "a%00"],
)  # fmt: skip
def test_hostile_names_of_tables(server, table):
    with pytest.raises(ConfigError, match="a table is named with"):
        Index(server.url().replace("?", f"?table={table}&"))


def test_a_table_may_have_the_name_of_a_word_of_sql(server):
    store = fill(server.url("select"), unit(5, 3, 0))
    assert len(store.search(unit(1, 3, 1), 4)[0]) == 4


def test_hostile_names_of_items(url):
    names = ["'; DROP TABLE photos; --", 'a"b', "tab\tline\nend\r", "\\N", "\\.", "back\\slash", "%s %(x)s {table}",
             "ü漢", "x" * 9000]  # fmt: skip
    vectors = unit(len(names), 7, 0)
    store = fill(url, vectors, names)
    assert [item.name for item in store.items()] == [item.name for item in store.rows().items] == names
    assert torch.equal(store.rows().vectors, vectors)
    assert [some[0][1].name for some in store.search(vectors, 1)] == names


def test_files_whose_names_a_database_cannot_keep(predictor, photos, url):
    odd = photos / "\udcff.png"  # a byte that is no UTF-8
    (photos / "01.png").rename(odd)
    for _ in range(2):
        index, change = Index.build(predictor, photos, url)
        assert change.unreadable == {"\udcff.png": "its name is not UTF-8, and a database keeps no other; rename it"}
        assert len(index) == 6
    assert "zero byte" in Postgres(url).refuses(Item("a\0b"))


# ---- what goes wrong, and what is not told ----


def test_the_password_is_never_told(server, weights, photos, tmp_path, capfd, caplog):
    own = server.url("own.secrets", user=f"keeper:{PASSWORD}")
    with server.connect() as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    page = tmp_path / "found.html"
    wrong = own.replace(PASSWORD, f"no-{PASSWORD}")
    assert main(["index", str(weights), str(photos), "--out", own, "--duplicates", "--page", str(page), "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["index"] == f"postgresql://keeper@/tests?host={server.folder}&table=own.secrets"
    assert main(["index", str(weights), str(photos), "--out", own]) == 0
    assert main(["search", own, str(photos / "01.png"), "--out", str(tmp_path / "also.html")]) == 0
    said = capfd.readouterr()
    assert "1.0000" in said.out
    for command in (
        ["search", wrong, "x.png"],
        ["search", own.replace("own.secrets", "own.none"), "x.png"],
        ["search", own.replace("own.secrets", "secrets"), "x.png"],
        ["index", str(weights), str(photos), "--out", own.replace("own.", "")],  # a schema that is not his
        ["search", own.replace("/tests", "/nowhere"), "x.png"],
        ["search", own.replace("geheim", "geh%eim"), "x.png"],
        ["search", own.replace("geheim", "geh/eim"), "x.png"],
        ["search", own.replace("geheim", "1/geheim"), "x.png"],
        ["search", own.replace("geheim", "geh?eim"), "x.png"],
        ["search", own.replace("geheim", "geh@eim"), "x.png"],
        ["search", f"{server.url('secrets', user='keeper')}&password={PASSWORD}&nonsense=1", "x.png"],
        ["index", str(weights), str(photos), own],
    ):
        assert main(command) == 2
        told = capfd.readouterr()
        assert told.out == ""
        assert [line.startswith("vitral: ") for line in told.err.splitlines() if "matched" not in line] == [True]
        said = (said[0] + told.out, said[1] + told.err)
    told = "".join(said) + caplog.text + page.read_text() + (tmp_path / "also.html").read_text()
    with server.connect() as connection:
        told += str(connection.execute("SELECT * FROM own.secrets__facts").fetchall())
    told += repr(read_address(own)) + json.dumps(document)
    assert "password authentication failed" in told
    assert "PGPASSWORD" in told
    for part in (PASSWORD, "geh", "4711"):
        assert part not in told


def test_an_error_of_ours_keeps_the_address_to_itself(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(postgres, "read_address", lambda url: 1 // 0)
    assert main(["search", f"postgresql://u:{PASSWORD}@h/db", "x.png"]) == 1
    (details,) = tmp_path.glob("vitral-*.txt")
    assert "ZeroDivisionError" in details.read_text()
    assert PASSWORD not in details.read_text() + capsys.readouterr().err


def test_what_is_wrong_with_a_database_is_said_in_a_line(server, predictor, photos, url, monkeypatch):
    assert "see that the server is up" in told(Index, f"{url}&port=5999")
    assert "see that the server is up" in told(Index, "postgresql://u@127.0.0.1:1/x")
    assert "create it, or name another" in told(Index, server.url(database="nowhere"))
    assert "create it, or name another" in told(Index, server.url(user="nobody"))
    assert "make one with vitral index" in told(Index, url)
    assert "ENCODING 'UTF8'" in told(Index.build, predictor, photos, server.url(database="latin"))
    with server.connect() as connection:
        connection.execute("CREATE TABLE theirs (name text)")
        connection.execute("INSERT INTO theirs VALUES ('kept')")
    said = told(Index.build, predictor, photos, server.url("theirs"))
    assert "is a table and not an index; name another table" in said
    with server.connect() as connection:
        assert connection.execute("SELECT * FROM theirs").fetchall() == [("kept",)]
        assert connection.execute("SELECT to_regclass('theirs__facts')").fetchone() == (None,)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert told(Index, url) == "an index in a database needs psycopg: pip install 'vitral[postgres]'."


def test_a_database_without_pgvector(server, predictor, photos):
    keeper = server.url("own.x", database="bare", user=f"keeper:{PASSWORD}")
    assert "CREATE EXTENSION vector in that database" in told(Index.build, predictor, photos, keeper)
    away = server.extension.with_suffix(".away")
    server.extension.rename(away)
    try:
        said = told(Index.build, predictor, photos, server.url(database="bare"))
    finally:
        away.rename(server.extension)
    assert "has no pgvector; install it there" in said


def test_a_table_that_was_dropped_without_its_facts(server, url):
    store = fill(url, unit(3, 5, 0))
    with server.connect() as connection:
        connection.execute(f"DROP TABLE {store.title}")
    assert f"does not exist; drop {store.title}__facts too" in told(Index, url)


def test_a_damaged_manifest_is_told_in_a_sentence(server, url):
    store = fill(url, unit(3, 5, 0))
    for harm in ({"format_version": 99}, {}, [], {"format_version": 1, "embedding": 3}):
        with server.connect() as connection:
            connection.execute(f"UPDATE {store.title}__facts SET document = %s", (json.dumps(harm),))
        with pytest.raises(CheckpointError, match=r"damaged|format 99"):
            Index(url)


def test_who_may_only_read_searches(server, predictor, photos, url):
    index, _ = Index.build(predictor, photos, url, nearest="hnsw")
    reader = url.replace("postgres@", f"keeper:{PASSWORD}@")
    assert "permission denied" in told(Index, reader)
    with server.connect() as connection:
        connection.execute(f"GRANT SELECT ON {index.store.title}, {index.store.title}__facts TO keeper")
    assert Index(reader).search_vectors(index.vectors, 3) == index.search_vectors(index.vectors, 3)
    draw(photos / "new.png", 99)
    assert "permission denied" in told(Index.build, predictor, photos, reader)


def test_the_commands_of_the_page_work(server, weights, photos, capsys):
    page = (Path(__file__).parents[2] / "docs" / "search.md").read_text()
    commands = [shlex.split(line) for line in re.findall(r"^vitral (.*postgresql://.*)$", page, re.MULTILINE)]
    assert [command[0] for command in commands] == ["index", "search", "serve"]
    here = {"runs/dino": str(weights), "photos/": str(photos), "photo.jpg": str(photos / "01.png")}
    for command in commands:
        (address,) = [word for word in command if word.startswith("postgresql://")]
        here[address] = server.url(table="page_photos")
        assert read_address(address).place == address
        if command[0] == "serve":
            options = parse(serve.Options, [here.get(word, word) for word in command[1:]], "vitral serve")
            assert len(serve.open_index(options, "cpu", [])) == 7
        else:
            assert main([here.get(word, word) for word in command]) == 0
            assert {"index": "7 images: 7 new", "search": "1.0000"}[command[0]] in capsys.readouterr().out


def test_a_server_of_models_searches_in_a_database(server, weights, predictor, photos):
    own = server.url("own.served", user=f"keeper:{PASSWORD}")
    with server.connect() as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
    index, _ = Index.build(predictor, photos, own)
    asked = (photos / "01.png").read_bytes()
    with client({"m": Predictor(weights)}, index=Index(own)) as c:
        told = c.post("/v1/search", **as_form(asked, top_k=3)).json()
        assert [m["name"] for m in told["matches"]] == [match.item for match in index.search(photos / "01.png", 3)[0]]
        with server.connect() as connection:
            connection.execute("ALTER ROLE keeper NOLOGIN")
        try:
            end_sessions(server, "keeper")
            answer = c.post("/v1/search", **as_form(asked, top_k=3))
        finally:
            with server.connect() as connection:
                connection.execute("ALTER ROLE keeper LOGIN")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unreachable")
        assert "keeper" not in answer.text
        assert c.post("/v1/search", **as_form(asked, top_k=3)).json()["matches"] == told["matches"]
