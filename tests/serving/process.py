"""`vitral serve` as a process of its own, on loopback, on a free port or the one that is asked for."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(*args, environment=None, port=0):
    """Yield the address, the process, and what it has logged once it has ended."""
    command = [sys.executable, "-m", "vitral", "serve", *map(str, args), "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"} | (
        environment or {}
    )
    logged = []
    with tempfile.TemporaryFile("w+") as told:  # not a pipe: nobody would empty it, and a full one stops the server
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True, env=env)
        try:
            line = process.stdout.readline()
            assert "http://" in line, read(told)
            yield line.rsplit(": ", 1)[1].strip(), process, logged
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            logged.extend(read(told).splitlines())


def read(file):
    """All that is in a file by now."""
    file.seek(0)
    return file.read()
