"""Locks, and the temporary files of processes that were killed."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from vitral.errors import CheckpointError
from vitral.weights.atomic import SUFFIX, replacing, workspace, write_atomically
from vitral.weights.lock import BusyError, locked

HOLD = """
import os
import sys
from pathlib import Path
from vitral.weights.lock import locked

with locked(Path(sys.argv[1])):
    if os.fork() == 0:  # the child is like a worker of a DataLoader, which outlives a killed process for some seconds
        print("locked", flush=True)
    sys.stdin.read()
    os._exit(0)
"""


@pytest.fixture
def holder():
    """Starts processes that hold the lock of a folder."""
    started = []

    def start(folder):
        command = [sys.executable, "-c", HOLD, str(folder)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_a_lock_is_held_by_one_process_and_released_when_it_is_killed(tmp_path, holder):
    out = tmp_path / "runs" / "new"
    process = holder(out)
    with pytest.raises(BusyError, match=f"^another process is writing to {out}; wait until it ends, or give another"):
        locked(out).__enter__()
    kill(process)
    with locked(out), pytest.raises(BusyError), locked(out):
        pass
    with locked(out):
        pass


def test_an_index_is_opened_on_a_system_without_fcntl():
    code = "import sys; sys.modules['fcntl'] = None; import vitral.retrieval.folder"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(CheckpointError, match=r"out cannot be locked for writing \(File exists\); give an --out"):
        locked(tmp_path / "out").__enter__()


def test_a_disk_without_locks_is_refused_for_a_lock_but_not_for_a_write(tmp_path, monkeypatch):
    def no_locks(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with pytest.raises(CheckpointError, match=r"cannot be locked for writing \(No locks available\)"):
        locked(tmp_path).__enter__()
    left = tmp_path / f".config.json.abc{SUFFIX}"
    left.mkdir()
    write_atomically(tmp_path / "config.json", b"new")
    assert (tmp_path / "config.json").read_bytes() == b"new"
    assert left.is_dir()  # whether its process has ended cannot be determined


def test_orphans_are_removed_by_the_next_write_and_the_files_of_a_living_process_stay(tmp_path, holder):
    living, dead = (tmp_path / f".model.safetensors.{word}{SUFFIX}" for word in ("living", "dead"))
    process = holder(living)
    kill(holder(dead))
    for place in (living, dead):
        (place / "files").mkdir()
        (place / "files" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".mine.tmp").write_text("of the user")
    with workspace(tmp_path / "other.onnx") as own:
        write_atomically(tmp_path / "config.json", b"{}")
        assert own.is_dir()
        assert living.is_dir()
        assert not dead.exists()
    kill(process)
    write_atomically(tmp_path / "config.json", b"{}")
    assert sorted(os.listdir(tmp_path)) == [".mine.tmp", "config.json"]


def test_nothing_is_left_of_an_interrupted_write(tmp_path):
    def write():
        with replacing(tmp_path / "a.bin") as temporary:
            temporary.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert not os.listdir(tmp_path)


def test_a_long_name_is_written(tmp_path):
    path = tmp_path / ("é" * 120 + ".json")
    write_atomically(path, b"{}")
    assert path.read_bytes() == b"{}"
