"""`vitral doctor`: what it reports, what it hides, and that nothing missing makes it fail."""

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata
from itertools import count
from pathlib import Path

import pytest
from huggingface_hub import constants

import vitral
from vitral.cli.doctor import LABEL, lines
from vitral.cli.main import main
from vitral.inference import environment, timing
from vitral.inference.environment import EXTRAS, describe_environment, without_identity
from vitral.inference.predictor import Predictor

ROOT = Path(__file__).parents[2]


@contextmanager
def server(status=200):
    """A hub on loopback that answers every request with one status; yields its address and the requests."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            requests.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{made.server_port}", requests
        finally:
            made.shutdown()
            thread.join()


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """A report without a speed check, with a cache folder of its own and offline."""
    monkeypatch.setattr(environment, "_speed", lambda seconds: {"error": "not measured"})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_purposes_are_given_for_exactly_the_extras_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(EXTRAS) == set(project["optional-dependencies"]) - {"dev"}


def test_the_whole_report_is_one_screen(monkeypatch):
    monkeypatch.setattr(environment, "SPEED_MODEL", "vit_nano_patch2_8")
    with server() as (address, _):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        report = describe_environment(speed_seconds=0.01)
    assert not any("error" in part for part in report.values())
    assert report["versions"]["vitral"] == vitral.__version__
    assert report["versions"]["torch"] == metadata.version("torch")
    assert report["machine"]["usable_cores"] <= report["machine"]["cores"]
    assert report["machine"]["memory_available"] < report["machine"]["memory"]
    assert report["speed"]["forward_images_per_second"] > 0
    assert report["speed"]["decode_images_per_second"] > 0
    rows = lines(report)
    assert len(rows) <= 40
    text = "\n".join(f"{label:<{LABEL}} {line}" for label, line in rows)
    for value in (vitral.__version__, "images/s", f"{address}: reachable", *EXTRAS, *EXTRAS.values()):
        assert value in text


@pytest.mark.slow
def test_the_command_respects_the_variables_of_the_hub():
    with server() as (address, requests):
        for offline in (True, False):
            env = os.environ | {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": str(int(offline)), "no_proxy": "127.0.0.1"}
            command = [sys.executable, "-m", "vitral", "doctor", "--json"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
            assert (done.returncode, done.stderr) == (0, "")
            hub = json.loads(done.stdout)["hub"]
            assert hub == {"endpoint": address, "offline": offline, "reachable": not offline}
            assert bool(requests) is not offline


def test_sizes_of_the_cache_are_listed_by_kind(quick, capsys):
    for kind, sizes in {"features": (2000, 500), "weights": (7,)}.items():
        for i, size in enumerate(sizes):
            file = quick / "cache" / "vitral" / kind / f"folder-{i}" / "file"
            file.parent.mkdir(parents=True)
            file.write_bytes(bytes(size))
    blob = quick / "hub" / "blob"
    blob.parent.mkdir()
    blob.write_bytes(bytes(3000))
    blob.with_name("link").symlink_to(blob)
    cache = describe_environment()["cache"]
    assert cache["kinds"] == {"features": {"files": 2, "bytes": 2500}, "weights": {"files": 1, "bytes": 7}}
    assert (cache["hub"]["files"], cache["hub"]["bytes"]) == (1, 3000)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "  features  2.5 kB in 2 files\n" in out
    assert "  weights   7 B in 1 file\n" in out


@pytest.mark.parametrize(("status", "reachable"), [(200, True), (404, True), (503, False)])
def test_the_hub_is_reachable_if_it_answers(quick, monkeypatch, status, reachable):
    with server(status) as (address, requests):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert describe_environment()["hub"]["reachable"] is reachable
        assert requests


def test_offline_mode_sends_no_request(quick, monkeypatch, capsys):
    with server() as (address, requests):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        assert main(["doctor"]) == 0
        assert requests == []
    assert f"{address}: not tried, offline mode is on (HF_HUB_OFFLINE)" in capsys.readouterr().out


def test_a_missing_package_is_listed_with_the_command_that_installs_it(quick, monkeypatch, capsys):
    version = metadata.version

    def without_faiss(name):
        if name == "faiss-cpu":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(metadata, "version", without_faiss)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "missing faiss-cpu: pip install 'vitral[search]'" in out
    report = describe_environment()["extras"]
    assert not report["search"]["installed"]
    assert report["search"]["packages"] == {"faiss-cpu": None}
    assert report["serve"]["installed"]


def test_nothing_that_is_missing_makes_it_fail(quick, capsys, monkeypatch):
    def missing(*args, **kwargs):
        raise metadata.PackageNotFoundError("vitral")

    monkeypatch.setattr(metadata, "requires", missing)
    for package in ("torch", "huggingface_hub"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it raises ImportError
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: (_ for _ in ()).throw(OSError("no /proc")))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in ("torch", "extras", "cache", "hub", "speed"):
        assert re.search(rf"^{part} +unknown \(", out, re.MULTILINE), part
    assert f"vitral      {vitral.__version__}, Python" in out
    assert main(["doctor", "--json"]) == 0
    assert "error" in json.loads(capsys.readouterr().out)["torch"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/alice", "~"),
        ("/home/alice/.cache/vitral", "~/.cache/vitral"),
        ("cannot open '/home/alice/x'", "cannot open '~/x'"),
        ("/home/alice2/x", "/home/alice2/x"),  # another folder, whose name only begins alike
        ("/scratch/alice/x", "/scratch/USER/x"),
        ("/scratch/malice/x", "/scratch/malice/x"),
        ("https://alice:secret@mirror.example/hub", "https://mirror.example/hub"),
        ("https://mirror.example/hub?token=secret&b=secret", "https://mirror.example/hub?"),
        ("refused hf_abcdefghijk for you", "refused hf_... for you"),
        (3, 3),
    ],
)
def test_identity_is_removed(monkeypatch, text, shown):
    monkeypatch.setenv("HOME", "/home/alice")
    monkeypatch.setenv("LOGNAME", "alice")
    assert without_identity({"a": [text]}) == {"a": [shown]}
    assert without_identity({str(text): 1}) == {str(shown): 1}


def test_a_report_names_neither_the_user_nor_secrets(quick, monkeypatch, capsys):
    home = quick / "home" / "alice"
    (home / ".cache" / "vitral" / "features").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LOGNAME", "alice")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / ".cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_topsecret123")
    monkeypatch.setenv("HF_ENDPOINT", "https://alice:topsecret@mirror.example")
    monkeypatch.setattr(constants, "ENDPOINT", "https://alice:topsecret@mirror.example")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/scratch/alice/hub")
    for flags in ([], ["--json"]):
        assert main(["doctor", *flags]) == 0
        out = capsys.readouterr().out
        assert "alice" not in out
        assert "topsecret" not in out
        assert "~/.cache/vitral" in out
        assert "https://mirror.example" in out


def test_a_slow_machine_is_measured_in_one_round(monkeypatch):
    """Every reading of the clock is a minute later: after one round the time is over."""
    minutes = count()
    calls = []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: 60.0 * next(minutes))
    monkeypatch.setattr(environment, "SPEED_MODEL", "vit_nano_patch2_8")
    monkeypatch.setattr(Predictor, "outputs", lambda self, x: calls.append(len(x)))
    speed = environment._speed(environment.SPEED_SECONDS)
    assert calls == [environment.SPEED_BATCH] * 2  # the warm-up, and one round
    assert speed["forward_images_per_second"] == environment.SPEED_BATCH / 60
    assert environment.SPEED_SECONDS <= 5  # with the warm-up and the last round at most 10
