"""What the server tells of itself: a line of JSON for each request, and numbers for Prometheus. Never what was sent."""

import json
import logging
import time
import traceback
from collections.abc import Callable, Container
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.serving.refusals import refusal_of

LOGGER = logging.getLogger("vitral.serve")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class JSONLines(logging.Formatter):
    """One JSON document a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The fields that were given, or the message."""
        fields = record.args if isinstance(record.args, dict) else {"message": record.getMessage()}
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        told: dict[str, Any] = {"time": f"{when}.{int(record.msecs):03d}Z", "level": record.levelname.lower()}
        if record.exc_info and not isinstance(record.args, dict):
            told["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(told | dict(fields))


def log_to_stderr() -> None:
    """Write the server's own lines, and warnings of everything else, as JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(JSONLines())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    LOGGER.setLevel(logging.INFO)
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # what is wrong with a form is told to who sent it


def log(event: str, **fields: Any) -> None:
    """Write a line."""
    LOGGER.info("%(event)s", {"event": event, **fields})


class Metrics:
    """Numbers of one server."""

    def __init__(self) -> None:
        self.registry = to = CollectorRegistry()
        self.requests = Counter("vitral_requests_total", "Requests.", ["path", "status"], registry=to)
        self.seconds = Histogram("vitral_request_seconds", "Time to answer.", ["path"], buckets=_SECONDS, registry=to)
        self.batch_size = Histogram("vitral_batch_size", "Items a batch.", ["model"], buckets=_SIZES, registry=to)
        self.batch_seconds = Histogram(
            "vitral_batch_seconds", "Time of a batch.", ["model"], buckets=_SECONDS, registry=to
        )
        self.connections = Gauge("vitral_connections", "Open connections.", registry=to)
        self.evicted = Counter("vitral_evicted_connections_total", "Connections closed to make room.", registry=to)
        self.taken = Gauge("vitral_taken", "Requests taken and not answered.", ["model"], registry=to)

    def batches_of(self, model: str) -> Callable[[int, float], None]:
        """What a batcher tells about each batch."""
        size, seconds = self.batch_size.labels(model), self.batch_seconds.labels(model)

        def watch(items: int, took: float) -> None:
            size.observe(items)
            seconds.observe(took)

        return watch


class Watch:
    """Counts, times and logs every request; an error of ours becomes an answer, and its traceback a line of the log."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Callable[[], Container[str]]) -> None:
        self.app, self.metrics, self.paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, sent = time.perf_counter(), 0, 0

        async def watched(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            sent += len(message.get("body", b""))
            await send(message)

        fault = {}
        try:
            await self.app(scope, receive, watched)
        except Exception as error:
            fault = {"traceback": "".join(traceback.format_exception(error))}
            if not status:
                await refusal_of(error).response()(scope, receive, watched)
        took = time.perf_counter() - began
        asked = scope["path"]  # never one that a client made up: each has a time series
        route = getattr(scope.get("route"), "path", asked if asked in self.paths() else "other")
        self.metrics.requests.labels(route, str(status)).inc()
        self.metrics.seconds.labels(route).observe(took)
        log(
            "request", method=scope["method"][:16], path=scope["path"][:200], status=status, ms=round(1000 * took, 2),
            sent=sent, client=(scope.get("client") or ("",))[0], **scope.get("vitral", {}), **fault,
        )  # fmt: skip
