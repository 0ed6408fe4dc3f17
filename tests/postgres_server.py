"""A real PostgreSQL with pgvector for the tests, in a folder of its own, reached by a socket in that folder only."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import psycopg
import pytest

PASSWORD = "geheim-4711"


class Server:
    def __init__(self, folder):
        self.folder = folder
        self.extension = folder / "pgserver" / "pginstall" / "share" / "postgresql" / "extension" / "vector.control"

    def url(self, table="", database="tests", user="postgres", **more):
        query = "&".join(
            f"{name}={value}" for name, value in {"host": self.folder, "table": table, **more}.items() if value
        )
        return f"postgresql://{user}@/{database}?{query}"

    def connect(self, database="tests", user="postgres"):
        return psycopg.connect(host=str(self.folder), dbname=database, user=user, autocommit=True)


@contextmanager
def running():
    """Started and stopped; the role `keeper` has a password, and the schema `own`."""
    spec = find_spec("pgserver")
    if spec is None and sys.platform != "linux":
        pytest.skip("pgserver has no wheel for this platform")
    assert spec is not None, "the tests of the database need pgserver: pip install pgserver"
    assert spec.origin is not None
    package = Path(spec.origin).parent
    folder = Path(tempfile.mkdtemp(prefix="pg-")).resolve()
    try:
        for name in ("pgserver", "pgserver.libs"):  # a copy: another user must be able to read it
            if (package.parent / name).exists():
                shutil.copytree(package.parent / name, folder / name)
        other = {}
        if os.geteuid() == 0:  # as whom a server refuses to run
            nobody = pwd.getpwnam("nobody")
            other = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for path in (folder, *folder.rglob("*")):
                os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
        data, programs = folder / "data", folder / "pgserver" / "pginstall" / "bin"

        def run(program, *args):
            command = [programs / program, "-D", data, *args]
            with (folder / "output").open("w") as output:  # not a pipe: the server would keep it open
                done = subprocess.run(command, stdout=output, stderr=output, cwd=folder, **other)
            assert done.returncode == 0, (folder / "output").read_text()

        run("initdb", "-U", "postgres", "-E", "UTF8", "--locale=C", "--auth=trust", "--no-sync")
        rules = data / "pg_hba.conf"
        rules.write_text(f"local all keeper scram-sha-256\n{rules.read_text()}")
        options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
        run("pg_ctl", "-w", "-l", folder / "log", "-o", options, "start")
        try:
            server = Server(folder)
            with server.connect("postgres") as connection:
                connection.execute("CREATE DATABASE tests")
                connection.execute("CREATE DATABASE bare")
                connection.execute("CREATE DATABASE latin ENCODING 'LATIN1' TEMPLATE template0")
                connection.execute(f"CREATE ROLE keeper LOGIN PASSWORD '{PASSWORD}'")
            with server.connect() as connection:
                connection.execute("CREATE SCHEMA own AUTHORIZATION keeper")
            yield server
        finally:
            run("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder)
