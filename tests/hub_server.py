"""A model hub on loopback: the URL scheme, headers and errors of the Hugging Face hub, with faults on request."""

import hashlib
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub(ThreadingHTTPServer):
    """Repositories as {(repository, revision): {file: content}}, and what is wrong with the server."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        """Repository -> status and the hub's error code."""
        self.cut_at: int | None = None
        """The next download ends after so many bytes."""
        self.damaged = False
        """Downloads differ from the stated hash in one bit."""
        self.states_hashes = True
        self.requests: list[tuple[str, str, str]] = []
        """Method, path and the Range header of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def publish(self, repository: str, file: str, content: bytes, revision: str = "main") -> str:
        """Add a file, and return the commit that it is in."""
        self.files.setdefault((repository, revision), {})[file] = content
        self.blobs[hashlib.sha256(content).hexdigest()] = content
        commit = commit_of(repository, revision)
        self.files[repository, commit] = self.files[repository, revision]
        return commit

    def downloads(self) -> list[str]:
        """The Range headers of the downloads so far, empty for those from the beginning."""
        return [span for method, path, span in self.requests if method == "GET" and path.startswith("/cdn/")]


def commit_of(repository: str, revision: str) -> str:
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return hashlib.sha1(f"{repository} {revision}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.server.requests.append((self.command, self.path, self.headers.get("Range", "")))
        if self.path == "/":
            return self._reply(200, b"a hub")
        if self.path.startswith("/cdn/"):
            return self._send_blob(self.path.removeprefix("/cdn/"))
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
        if found is None:
            return self._plain_file()
        repository, revision, file = found.groups()
        if repository in self.server.refused:
            status, code = self.server.refused[repository]
            return self._reply(status, headers={"X-Error-Code": code} if code else {})
        if not any(name == repository for name, _ in self.server.files):
            return self._reply(404, headers={"X-Error-Code": "RepoNotFound"})
        if (repository, revision) not in self.server.files:
            return self._reply(404, headers={"X-Error-Code": "RevisionNotFound"})
        commit = {"X-Repo-Commit": commit_of(repository, revision)}
        content = self.server.files[repository, revision].get(file)
        if content is None:
            return self._reply(404, headers={"X-Error-Code": "EntryNotFound", **commit})
        if file.endswith(".json"):  # small files are not on the other host, and have git's hash
            etag = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            return self._reply(200, content, {"ETag": f'"{etag}"', **commit})
        sha256 = hashlib.sha256(content).hexdigest()
        linked = {"X-Linked-ETag": f'"{sha256}"' if self.server.states_hashes else '"3-md5"'}
        linked |= {
            "X-Linked-Size": str(len(content)),
            "Location": f"http://localhost:{self.server.server_port}/cdn/{sha256}",
        }
        return self._reply(302, headers=linked | commit)

    def _plain_file(self) -> None:
        """A mirror without the hub's scheme: /OWNER/NAME/FILE."""
        repository, _, file = self.path.removeprefix("/").rpartition("/")
        content = self.server.files.get((repository, "main"), {}).get(file)
        if content is None:
            return self._reply(404)
        linked = {"X-Linked-ETag": f'"{hashlib.sha256(content).hexdigest()}"'} if self.server.states_hashes else {}
        return self._send(content, linked)

    def _send_blob(self, sha256: str) -> None:
        content = self.server.blobs.get(sha256)
        return self._reply(404) if content is None else self._send(content, {})

    def _send(self, content: bytes, headers: dict[str, str]) -> None:
        if self.server.damaged:
            content = content[:-1] + bytes([content[-1] ^ 1])
        start = int(found[1]) if (found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        if start:
            headers = headers | {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"}
        cut, self.server.cut_at = (self.server.cut_at, None) if self.command == "GET" else (None, self.server.cut_at)
        self._reply(206 if start else 200, content[start:], headers, cut)

    def _reply(
        self, status: int, content: bytes = b"", headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[:cut])
            if cut is not None:
                self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A hub that runs as long as the block."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
