"""`vitral serve` as a process of its own, on loopback, on a free port or the one that is asked for."""

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serving(*args, environment=None, port=0):
    """Yield the address, the process, and what it has logged once it has ended."""
    command = [sys.executable, "-m", "vitral", "serve", *map(str, args), "--port", str(port)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "OMP_NUM_THREADS": "1"} | (
        environment or {}
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    logged = []
    try:
        line = process.stdout.readline()
        assert "http://" in line, process.stderr.read()
        yield line.rsplit(": ", 1)[1].strip(), process, logged
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            _, told = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        logged.extend(told.splitlines())
