"""Who may ask and how much: in this process where that is enough, over a real socket where it is not."""

import asyncio
import base64
import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import pytest
from process import serving
from small_server import KEY, URL, as_form, as_json, client, differences, picture
from test_app import error

from vitral.cli.main import main
from vitral.config import Serving
from vitral.errors import ConfigError
from vitral.inference.predictor import Predictor
from vitral.serving import models, security
from vitral.serving.app import create_app
from vitral.serving.security import LOOPBACK, Guard, Keys, is_loopback, read_keys, require_protection
from vitral.serving.server import Patient, bind

CLIENTS = 6

# ---- keys ----


def test_keys_come_from_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"\ufeff{KEY}\n  # keys of the whole team\n\n another-key-0123456789 \n", encoding="utf-8")
    keys = read_keys(str(file), {"VITRAL_API_KEYS": "third-key-0123456789,fourth-key-0123456789"})
    for key in (KEY, "another-key-0123456789", "third-key-0123456789", "fourth-key-0123456789"):
        assert keys.admit(security.Headers({"x-api-key": key}))
    assert not keys.admit(security.Headers({"x-api-key": "# keys of the whole team"}))
    assert not read_keys("", {})
    assert KEY not in repr(vars(keys))


def test_bad_keys_are_said_without_being_shown(tmp_path):
    short = tmp_path / "short"
    short.write_text("hunter2\n")
    with pytest.raises(ConfigError, match="at least 16 characters") as raised:
        read_keys(str(short), {})
    assert "hunter2" not in str(raised.value)
    for odd in ("schlüssel-0123456789", "a-key\x000123456789abc"):
        with pytest.raises(ConfigError, match="ASCII") as raised:
            read_keys("", {"VITRAL_API_KEYS": odd})
        assert odd not in str(raised.value)
    (tmp_path / "none").write_text("# nothing\n")
    with pytest.raises(ConfigError, match="has no key in it"):
        read_keys(str(tmp_path / "none"), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "missing"), {})


def test_comparing_looks_at_every_key(monkeypatch):
    seen = []
    monkeypatch.setattr(security.hmac, "compare_digest", lambda a, b: seen.append(b) or a == b)
    keys = security.Keys(["first-key-0123456789", "second-key-0123456789", "third-key-0123456789"])
    assert keys.admit(security.Headers({"x-api-key": "first-key-0123456789"}))
    assert len(seen) == 3


def test_wrong_keys_slow_down_the_client_that_sends_them_and_no_other(runs, monkeypatch):
    monkeypatch.setattr(security, "WRONG_KEY_SECONDS", 1e6)  # whoever has to wait still waits at the end
    used, fresh, wrong = KEY, "another-key-0123456789", "a-wrong-key-0123456789"
    with client({"m": runs["classify"]}, keys=[used, fresh]) as c:

        def ask(key, address="127.0.0.2"):
            c._transport.client = (address, 5)
            return c.get("/v1/models", headers={"x-api-key": key} if key else {})

        assert ask(used).status_code == 200
        for i in range(security.WRONG_KEYS):
            error(ask("" if i % 2 else None), 401, "no_key")  # no guess, and so not counted
            error(ask(f"{wrong}{i}"), 401, "no_key")
        slowed = ask(wrong)
        assert "too many wrong keys" in error(slowed, 429, "wrong_keys")
        assert int(slowed.headers["retry-after"]) > 1000
        error(ask(fresh), 429, "wrong_keys")  # unchecked, or one could go on guessing
        assert ask(used).status_code == 200
        assert ask(fresh, "127.0.0.3").status_code == 200
        error(ask(wrong, "127.0.0.3"), 401, "no_key")
        assert c.get("/healthz").status_code == 200


def test_wrong_keys_are_checked_once_a_second_and_then_forgotten():
    now = 1000.0
    attempts = security.Attempts(lambda: now)
    for _ in range(security.WRONG_KEYS):
        assert attempts.wait("a", "x") == 0
        attempts.note("a", "x", right=False)
    assert attempts.wait("a", "x") == pytest.approx(security.WRONG_KEY_SECONDS)
    now += security.WRONG_KEY_SECONDS
    assert attempts.wait("a", "x") == 0
    attempts.note("a", "x", right=False)
    assert attempts.wait("a", "x") == pytest.approx(security.WRONG_KEY_SECONDS)
    now += security.WRONG_KEYS * security.WRONG_KEY_SECONDS
    for _ in range(security.WRONG_KEYS - 1):
        attempts.note("a", "x", right=False)
    assert attempts.wait("a", "x") == 0


def test_only_the_most_recent_clients_are_remembered(monkeypatch):
    monkeypatch.setattr(security, "REMEMBERED_CLIENTS", 3)
    attempts = security.Attempts(lambda: 5.0)
    for client_number in range(9):
        for right in (False, True):
            attempts.note(f"client {client_number}", KEY, right)
    assert len(attempts._used) == len(attempts._forgotten) == 3
    assert "client 8" in attempts._forgotten
    assert KEY not in repr(vars(attempts))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_other_machines_need_a_key(host, runs, capsys):
    assert not is_loopback(host)
    require_protection(host, security.Keys([KEY]), insecure=False)
    require_protection(host, security.Keys([]), insecure=True)
    assert main(["serve", str(runs["classify"]), "--host", host]) == 2
    assert "--api-key-file FILE or VITRAL_API_KEYS, or --insecure" in capsys.readouterr().err


def test_loopback_needs_none():
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        require_protection(host, security.Keys([]), insecure=False)


# ---- names and sites ----


def test_without_keys_a_strange_name_or_another_site_is_refused(runs):
    with client({"m": runs["classify"]}, hosts=(*LOOPBACK, "models.example")) as c:
        for host in ("127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "[::1]", "models.example"):
            assert c.get("/v1/models", headers={"host": host}).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example:8000", ""):
            error(c.get("/v1/models", headers={"host": host}), 421, "bad_host")
        site = {"sec-fetch-site": "cross-site"}
        error(c.post("/v1/predict", headers=site, **as_form(picture())), 403, "cross_site")
        error(c.get("/v1/models", headers=site), 403, "cross_site")
        for origin in ("http://evil.example", "http://127.0.0.1:9", "null"):
            error(c.get("/v1/models", headers={"origin": origin, "host": "127.0.0.1:8000"}), 403, "cross_site")
        own = {"origin": "http://LOCALHOST:8000", "host": "localhost:8000"}
        assert c.post("/v1/predict", headers=own, **as_form(picture())).status_code == 200
        for page in ("/", "/docs", "/page/main.js"):  # a link in a letter leads here
            assert c.get(page, headers=site | {"sec-fetch-mode": "navigate"}).status_code == 200
        assert c.get("/v1/models", headers={"sec-fetch-site": "same-origin"}).status_code == 200


# ---- how much ----


def test_large_bodies_are_refused_with_and_without_a_length(runs):
    def chunks():
        for _ in range(40):
            yield bytes(100_000)

    with client({"m": runs["classify"]}, max_body_mb=1) as c:
        assert "more than 1 MiB" in error(c.post("/v1/predict", **as_form(bytes(2**20))), 413, "too_large")
        error(c.post("/v1/predict", content=chunks(), headers={"content-type": "application/json"}), 413, "too_large")
        for strange in ("-1", "²", "1" * 5000):
            error(c.get("/healthz", headers={"content-length": strange.encode("latin-1")}), 413, "too_large")
        assert c.post("/v1/predict", **as_form(picture())).status_code == 200


def test_all_bodies_together_are_bounded(runs):
    with client({"m": runs["classify"]}, max_buffered_mb=0.05) as c:
        refused = c.post("/v1/predict", **as_form(bytes(60_000)))
        error(refused, 503, "busy")
        assert refused.headers["retry-after"] == "1"
        assert c.post("/v1/predict", **as_form(picture())).status_code == 200  # what was refused is forgotten


def test_a_full_queue_is_refused_before_the_body_is_read(runs):
    with client({"m": runs["classify"]}, max_queue=1) as c:
        batcher = c.app.state.server.models["m"].batcher
        with batcher.place():
            refused = c.post("/v1/predict", content=b"nobody reads this", headers={"content-type": "text/plain"})
            error(refused, 503, "busy")  # not 415
            assert refused.headers["retry-after"] == "1"
        assert c.post("/v1/predict", **as_form(picture())).status_code == 200
        assert 'vitral_requests_total{path="/v1/predict",status="503"} 1.0' in c.get("/metrics").text


def test_a_connection_without_a_place_is_refused_like_anything_else(runs):
    with client({"m": runs["classify"]}) as c:
        c.app_state[security.CROWDED] = True
        refused = c.get("/")
        error(refused, 503, "busy")
        assert refused.headers["connection"] == "close"
        assert refused.headers["x-content-type-options"] == "nosniff"
        del c.app_state[security.CROWDED]
        assert c.get("/").status_code == 200
        assert 'vitral_requests_total{path="/",status="503"} 1.0' in c.get("/metrics").text


@pytest.mark.parametrize("slow", ["ready", "outputs"])
def test_a_deadline_is_kept_whatever_takes_long(runs, monkeypatch, slow):
    """Reading, or the model, does not end before the test lets it; others are answered by the reader that is left."""
    predictor, end = Predictor(runs["classify"]), threading.Event()
    with client({"m": predictor}, deadline=0.2) as c:
        real = getattr(predictor, slow)
        monkeypatch.setattr(predictor, slow, lambda *args: real(*args) if end.wait(60) else None)
        assert "--deadline" in error(c.post("/v1/predict", **as_form(picture())), 504, "late")
        assert c.get("/healthz").status_code == 200
        assert c.app.state.server.models["m"].batcher.taken == 0
        end.set()


def test_who_has_left_is_no_longer_worked_for(runs):
    app, seen = create_app({"m": Predictor(runs["classify"])}), []
    sent = httpx.Request("POST", f"{URL}/v1/predict", **as_form(picture()))

    async def scenario():
        batcher, busy = app.state.server.models["m"].batcher, threading.Event()
        messages: asyncio.Queue = asyncio.Queue()
        await messages.put({"type": "http.request", "body": sent.read()})
        scope = {"type": "http", "method": "POST", "path": "/v1/predict", "raw_path": b"/v1/predict",
                 "query_string": b"", "headers": [(k.lower(), v) for k, v in sent.headers.raw], "http_version": "1.1",
                 "scheme": "http", "server": ("127.0.0.1", 8000), "client": ("127.0.0.1", 1)}  # fmt: skip

        async def send(message):
            seen.append(message)

        async with app.router.lifespan_context(app):
            busy_model = asyncio.create_task(batcher.do(lambda: busy.wait(60)))
            request = asyncio.create_task(app(scope, messages.get, send))
            while not batcher.taken:
                await asyncio.sleep(0)
            assert not request.done()
            await messages.put({"type": "http.disconnect"})
            await request
            assert batcher.taken == len(batcher._waiting) == 0
            busy.set()
            await busy_model
        assert b"the client has left" in seen[-1]["body"]

    with ThreadPoolExecutor(1) as apart:
        apart.submit(lambda: asyncio.run(asyncio.wait_for(scenario(), 60))).result()


class Line:
    """A connection whose client has read all but so many bytes, each time one looks."""

    def __init__(self, *unread):
        self.unread, self.did, self.closing = list(unread), [], False

    def get_write_buffer_size(self):
        return self.unread.pop(0)

    def is_closing(self):
        return self.closing

    def close(self):
        self.did.append("close")

    def abort(self):
        self.did.append("abort")

    def call_later(self, seconds, look):
        self.did.append("wait")
        look()


@pytest.mark.parametrize(
    ("unread", "did"),
    [([9, 7, 7], ["wait", "wait", "abort"]), ([9, 7, 0], ["wait", "wait", "close"]), ([0], ["close"])],
)
def test_who_does_not_read_an_answer_is_hung_up_on(unread, did):
    protocol = object.__new__(Patient)
    protocol.transport = protocol.loop = line = Line(*unread)
    protocol.unread, protocol.cycle = 0, None
    protocol._hang_up()
    assert line.did == did


def test_what_was_sent_counts_until_the_answer_is_there_not_until_it_is_read():
    """By hand, because a client of the tests has always read everything."""
    counted = []

    async def app(scope, receive, send):
        counted.append(guard.buffered)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        counted.append(guard.buffered)

    guard = Guard(app, Keys([]), (), Serving(), full=lambda: False)
    messages = [{"type": "http.request", "body": b"abc", "more_body": True}, {"type": "http.request", "body": b"de"}]

    async def receive():
        return messages.pop(0)

    async def send(message):
        pass

    scope = {"type": "http", "method": "POST", "path": "/v1/predict", "headers": []}
    with ThreadPoolExecutor(1) as apart:
        apart.submit(lambda: asyncio.run(guard(scope, receive, send))).result()
    assert counted == [5, 0]
    assert guard.buffered == 0


def bomb(side):
    """A PNG of that many white pixels, in a few kilobytes."""

    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    header = side.to_bytes(4, "big") * 2 + bytes([1, 0, 0, 0, 0])
    pixels = zlib.compress(bytes((side + 7) // 8 + 1) * side, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_bombs_are_refused_by_their_header(served, runs):
    data = bomb(20_000)
    assert len(data) < 200_000
    for path in ("/v1/predict", "/v1/embed", "/v1/explain"):
        assert "more pixels than any limit allows (50,000,000)" in error(
            served.post(path, **as_form(data)), 422, "bad_image"
        )
    assert "8000 x 8000 pixels, more than the limit of 50,000,000" in error(
        served.post("/v1/predict", **as_form(bomb(8000))), 422, "bad_image"
    )
    with client({"m": runs["classify"]}, max_pixels=1000) as c:
        assert "more than the limit of 1,000" in error(c.post("/v1/predict", **as_form(picture())), 422, "bad_image")


def test_what_is_also_something_else_is_read_as_a_picture_alone(served):
    data = picture()
    plain = served.post("/v1/predict", **as_form(data)).json()["predictions"]
    for more in (b"<script>alert(1)</script>", b"PK\x03\x04" + bytes(200), b"%PDF-1.7\n"):
        assert served.post("/v1/predict", **as_form(data + more)).json()["predictions"] == plain
    for other in (b"%PDF-1.7\n" + data, b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"MZ" + data):
        error(served.post("/v1/predict", **as_form(other)), 422, "bad_image")


def test_no_file_is_written_or_opened_by_a_request(served, monkeypatch):
    opened, watching = [], False
    sys.addaudithook(lambda event, args: opened.append(args[0]) if watching and event == "open" else None)
    large = picture(0, (900, 900), "BMP")  # above what form parsers like to keep in memory
    assert len(large) > 2**21

    def ask():
        for send in (as_form(large), as_json(large)):
            for path in ("/v1/predict", "/v1/embed", "/v1/explain"):
                assert served.post(path, **send).status_code == 200

    ask()  # what the first request of a kind imports does not count
    watching = True
    ask()
    watching = False
    assert set(opened) <= {"/proc/self/statm"}  # the server's own size, which it checks regularly


# ---- names of models ----


def test_models_are_named_by_folder_file_or_hand(tmp_path):
    (tmp_path / "runs" / "cats").mkdir(parents=True)
    file = tmp_path / "a=b.v2.safetensors"
    file.touch()
    named = models.name_sources([f"{tmp_path}/runs/cats/", f"mine={file}", "hf-hub:owner/dogs", "other=hf-hub:o/n"])
    assert list(named) == ["cats", "mine", "dogs", "other"]
    assert named["mine"] == str(file)
    with pytest.raises(ConfigError.__mro__[1], match="two models are called cats"):
        models.name_sources([f"{tmp_path}/runs/cats", f"cats={file}"])
    with pytest.raises(ConfigError.__mro__[1], match="index is what the index is called"):
        models.name_sources([f"index={file}"], taken=["index"])
    assert models.name_sources([f"index={file}"]) == {"index": str(file)}
    with pytest.raises(ConfigError.__mro__[1], match="cannot be the name"):
        models.name_sources(["a b=runs/x"])


def test_what_is_missing_is_said(capsys, monkeypatch):
    assert main(["serve"]) == 2
    assert "no model is named" in capsys.readouterr().err
    monkeypatch.setattr("vitral.cli.serve.find_spec", lambda name: None if name == "uvicorn" else 1)
    assert main(["serve", "runs/x"]) == 2
    assert "uvicorn is needed: pip install 'vitral[serve]'" in capsys.readouterr().err


def test_help_imports_no_server():
    code = "import sys; from vitral.cli.main import main; main(['serve', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for module in ("fastapi", "uvicorn", "torch", "prometheus_client"):
        assert module not in done.stdout.split("\n")[-2].split()


# ---- over a socket ----


@pytest.fixture(scope="module")
def process(runs):
    options = ("--upload-seconds", "0.5", "--max-body-mb", "1")
    with serving(runs["classify"], *options) as (url, _, _):
        yield urlsplit(url)


def raw(address, data, end=b""):
    """What comes back for bytes, until the server hangs up or ten seconds have passed."""
    with socket.create_connection((address.hostname, address.port), timeout=10) as s:
        s.sendall(data)
        received = b""
        while chunk := s.recv(65536):
            received += chunk
            if end and end in received:
                break
    return received


@pytest.mark.slow
def test_it_listens_on_loopback_and_answers(process):
    c = http.client.HTTPConnection(process.hostname, process.port, timeout=30)
    body = json.dumps({"image": base64.b64encode(picture()).decode()})
    c.request("POST", "/v1/predict", body, {"Content-Type": "application/json"})
    response = c.getresponse()
    assert response.status == 200
    assert len(json.loads(response.read())["predictions"]) == 5
    assert "server" not in {k.lower() for k, _ in response.getheaders()}
    assert process.hostname == "127.0.0.1"
    c.close()
    head = raw(process, b"HEAD /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert head.endswith(b"\r\n\r\n")  # headers only


@pytest.mark.slow
def test_silent_slow_and_idle_connections_make_room(runs):
    ask = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with serving(runs["classify"], "--max-connections", "6") as (url, _, _), contextlib.ExitStack() as crowd:
        address = urlsplit(url)

        def connect():
            return crowd.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))

        silent, slow = [connect() for _ in range(6)], [connect() for _ in range(6)]
        for s in slow:
            s.sendall(ask[:20])
        for _ in silent:
            s = connect()  # one at a time: a connection that has not been answered may make room for the next
            s.sendall(ask.replace(b"Connection: close\r\n", b""))
            assert s.recv(4096).startswith(b"HTTP/1.1 200")
        for _ in range(12):
            assert raw(address, ask).startswith(b"HTTP/1.1 200")
        evicted = re.search(
            rb"vitral_evicted_connections_total (\d+)", raw(address, ask.replace(b"healthz", b"metrics"))
        )
        assert int(evicted[1]) >= 12


@pytest.mark.slow
def test_slow_uploads_huge_headers_and_nonsense_are_hung_up_on(process):
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    slow = raw(process, head + b"Content-Length: 100\r\n\r\n{")
    assert slow.startswith(b"HTTP/1.1 408")
    assert b"slow_upload" in slow
    huge = raw(process, head + b"X-A: " + b"a" * 40_000 + b"\r\n\r\n")
    assert huge.startswith(b"HTTP/1.1 400")
    assert raw(process, b"\x16\x03\x01 hello\r\n\r\n").startswith(b"HTTP/1.1 400")
    large = raw(process, head + b"Content-Length: 99999999\r\n\r\n")
    assert large.startswith(b"HTTP/1.1 413")
    chunk = b"10000\r\n" + bytes(65536) + b"\r\n"
    chunked = raw(process, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunk * 18, end=b"too_large")
    assert chunked.startswith(b"HTTP/1.1 413")
    alive = raw(process, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert alive.startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_logs_are_json_without_keys_images_or_names(runs, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    data = picture()
    with serving(runs["classify"], "--api-key-file", keys) as (url, _, logged):
        address = urlsplit(url)
        c = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        secret = base64.b64encode(data).decode()
        body = json.dumps({"image": secret})
        for key in (KEY, "wrong-wrong-wrong-wrong"):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            c.request("POST", "/v1/predict?token=query-secret", body, headers)
            response = c.getresponse()
            response.read()
            if response.getheader("connection") == "close":
                c.close()
        boundary = b'--b\r\nContent-Disposition: form-data; name="image"; filename="my-secret-name.png"\r\n\r\n'
        form = boundary + data + b"\r\n--b--\r\n"
        c.request("POST", "/v1/predict", form, {"Content-Type": "multipart/form-data; boundary=b", "X-Api-Key": KEY})
        assert c.getresponse().status == 200
        c.close()
    lines = [json.loads(line) for line in logged]
    requests = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in requests] == [200, 401, 200]
    assert requests[0]["path"] == "/v1/predict"
    assert requests[0]["model"] == "classify"
    for hidden in (KEY, "wrong-wrong", secret[:40], "my-secret-name", "query-secret"):
        assert hidden not in "\n".join(logged)


@pytest.mark.slow
def test_who_is_refused_hears_so_whatever_was_sent_and_may_ask_again(runs, tmp_path):
    """A connection that is closed while something is still being sent takes the answer with it."""
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    body = json.dumps({"image": base64.b64encode(picture()).decode(), "padding": "x" * 3_000_000})
    with serving(runs["classify"], "--api-key-file", keys) as (url, _, _):
        address = urlsplit(url)
        c = http.client.HTTPConnection(address.hostname, address.port, timeout=30)
        for key, status in ((KEY[::-1], 401), (KEY[::-1], 401), (KEY, 422)):  # the last for the padding
            c.request(
                "POST", "/v1/predict", body, {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            )
            connection, response = c.sock, c.getresponse()
            assert response.status == status
            assert response.getheader("connection") != "close"
            assert json.loads(response.read())["error"]["code"]
            assert c.sock is connection
        c.close()


@pytest.mark.slow
def test_a_port_and_a_device_that_are_not_there_are_said(runs, capsys, monkeypatch):
    assert main(["serve", str(runs["classify"]), "--port", "99999"]) == 2
    assert "a port is a number from 0 to 65535, got 99999; give another --port." in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["serve", str(runs["classify"]), "--device", "cuda"]) == 2
    assert "device cuda is not available here; use --device cpu or auto." in capsys.readouterr().err


def test_a_port_that_is_taken_is_said_at_once(process, runs, capsys):
    assert main(["serve", str(runs["classify"]), "--port", str(process.port)]) == 2
    assert f"cannot listen on 127.0.0.1, port {process.port}" in capsys.readouterr().err


def test_a_port_that_is_bound_is_taken_before_its_server_is_there():
    with bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot listen on"):
        bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize(
    ("options", "hosts"),
    [
        ([], (*LOOPBACK, "127.0.0.1")),
        (["--allowed-host", "Models.example"], (*LOOPBACK, "127.0.0.1", "models.example")),
        (["--host", "0.0.0.0", "--insecure"], ()),
        (["--host", "0.0.0.0", "--insecure", "--allowed-host", "a.b"], (*LOOPBACK, "0.0.0.0", "a.b")),
    ],
)
def test_names_that_are_given_hold_whatever_is_listened_on(runs, monkeypatch, options, hosts):
    made = []
    monkeypatch.setattr("vitral.serving.app.create_app", lambda *_, **given: made.append(given["hosts"]))
    monkeypatch.setattr("vitral.serving.server.serve", lambda app, listening, *_: listening.close())
    monkeypatch.setattr("vitral.serving.server.bind", lambda host, port: socket.socket())  # nothing is opened here
    assert main(["serve", str(runs["classify"]), "--port", "0", *options]) == 0
    assert made == [hosts]


def ask(address, body):
    """The server's prediction for a request's body, over a connection of its own."""
    c = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    try:
        c.request("POST", "/v1/predict", body, {"Content-Type": "application/json"})
        response = c.getresponse()
        told = json.loads(response.read())
        assert response.status == 200, told
        return told["predictions"]
    finally:
        c.close()


def ask_until_cut_off(address, body, expected, warm):
    """Ask until the server is gone; how many answers came, every one of them right."""
    answered = 0
    with contextlib.suppress(OSError, http.client.HTTPException, ValueError):  # no connection, no answer, half of one
        while True:
            told = ask(address, body)
            assert differences(told, expected) == []
            answered += 1
            if answered == 3:
                warm.wait()
    return answered


@pytest.mark.slow
def test_killed_under_load_it_is_ready_again_on_its_port_with_the_same_answers(runs):
    bodies = [json.dumps({"image": base64.b64encode(picture(i, (300, 400))).decode()}) for i in range(CLIENTS)]
    with serving(runs["classify"]) as (url, process, _):
        address = urlsplit(url)
        before = [ask(address, body) for body in bodies]
        warm = threading.Barrier(CLIENTS + 1, timeout=60)  # every client has had answers, and goes on
        with ThreadPoolExecutor(CLIENTS) as clients:
            work = [
                clients.submit(ask_until_cut_off, address, *pair, warm) for pair in zip(bodies, before, strict=True)
            ]
            warm.wait()
            process.kill()
            assert all(client.result() >= 3 for client in work)
        assert process.wait(30) == -signal.SIGKILL
    with serving(runs["classify"], port=address.port) as (again, _, _):
        assert again == url
        ready = raw(address, b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert ready.startswith(b"HTTP/1.1 200")
        assert ready.endswith(b'{"status":"ready"}')
        assert differences([ask(address, body) for body in bodies], before) == []


@pytest.mark.slow
def test_told_to_stop_it_finishes_what_it_took_and_takes_no_more(runs):
    body = json.dumps({"image": base64.b64encode(picture()).decode()}).encode()
    head = b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    with serving(runs["classify"]) as (url, process, logged):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=30) as s:
            s.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body))
            assert s.recv(1000).startswith(b"HTTP/1.1 100")  # it has begun to read
            process.terminate()
            for _ in range(10_000):  # until it has heard
                try:
                    socket.create_connection((address.hostname, address.port), timeout=30).close()
                except OSError:
                    break
            s.sendall(body)
            received = b""
            while chunk := s.recv(65536):
                received += chunk
        assert received.startswith(b"HTTP/1.1 200")
        assert b'"predictions"' in received
        process.wait(30)
    assert [json.loads(line)["event"] for line in logged] == ["listening", "request", "stopped"]
