"""The addresses of the server, and what each does. All that a model does is done by `Predictor`."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial, wraps
from importlib.resources import files
from typing import Any, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, TypeAdapter
from starlette.exceptions import HTTPException

from vitral import __version__
from vitral.config import Serving, pair
from vitral.data.ahead import use_cores
from vitral.data.images import ImageLimits
from vitral.data.inputs import ImageInputs
from vitral.errors import InputError, UnknownNameError, VitralError
from vitral.explanation.colours import TABLE
from vitral.explanation.explain import Explanation, blocks_of, looks_from_cls
from vitral.explanation.page import pack_rows, png_base64
from vitral.explanation.placement import DEFAULT_STYLE
from vitral.inference.memory import FreedMemory
from vitral.inference.predictor import Predictor
from vitral.serving import models, schema
from vitral.serving.batching import BusyError
from vitral.serving.forms import A, read_request
from vitral.serving.logs import Metrics, Watch, log
from vitral.serving.models import Served
from vitral.serving.patience import Handler, while_awaited
from vitral.serving.refusals import RefusedError, refusal_of
from vitral.serving.security import Guard, Keys, SafeHeaders
from vitral.serving.thumbnails import Thumbnails
from vitral.tasks.drawing import colour

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
}
MEMORY_SECONDS = 0.25
"""How often the server checks whether it has grown."""
T = TypeVar("T")
PREDICTION: TypeAdapter[Any] = TypeAdapter(schema.Prediction)
EMBEDDED, EXPLAINED, SEARCHED = map(TypeAdapter, (schema.Embedded, schema.Explained, schema.Searched))
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": schema.Error} for status in (400, 401, 403, 404, 408, 413, 415, 421, 422, 429, 500, 503, 504)
}


class Server:
    """What is served, and the threads that read for it."""

    def __init__(self, predictors: Mapping[str, Predictor], index: Any, options: Serving) -> None:
        self.options, self.metrics = options, Metrics()
        self.models = {name: Served(name, each, options, self.metrics) for name, each in predictors.items()}
        self.index = None if index is None else Served(models.INDEX, index, options, self.metrics)
        self.everyone = [*self.models.values(), *([self.index] if self.index else [])]
        self.readers = ThreadPoolExecutor(options.decoders, thread_name_prefix="reader")
        self.thumbnails = Thumbnails(ImageLimits(max_pixels=options.max_pixels))

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """From the start to the end, at which everything that was taken is finished."""
        use_cores(self.readers, self.options.decoders, 1)
        self.thumbnails.start()
        for each in self.everyone:
            each.batcher.start()
        await asyncio.gather(*(each.batcher.do(each.warm_up) for each in self.everyone))
        giving = asyncio.create_task(self._give_memory_back())
        yield
        giving.cancel()
        await asyncio.gather(*(each.batcher.close() for each in self.everyone))
        self.readers.shutdown(wait=False, cancel_futures=True)  # nobody waits for what is still being read
        self.thumbnails.close()
        log("stopped")

    async def _give_memory_back(self) -> None:
        """Return memory to the system after unusually large images, and regularly to avoid fragmentation."""
        freed = FreedMemory()
        while True:
            await asyncio.sleep(MEMORY_SECONDS)
            await self.read(freed.check)

    def full(self) -> bool:
        """Whether nobody can take anything."""
        return all(each.batcher.full for each in self.everyone)

    async def read(self, function: Callable[..., T], *arguments: Any) -> T:
        """Do something outside of the event loop; what nobody waits for any more holds nothing while it is queued."""
        work = [partial(function, *arguments)]
        try:
            return await asyncio.get_running_loop().run_in_executor(self.readers, lambda: work.pop()())
        finally:
            work.clear()

    async def understand(self, request: Request, kind: type[A]) -> tuple[A, bytes | str]:
        """What is asked, and about what."""
        return await self.read(read_request, await request.body(), request.headers.get("content-type", ""), kind)

    @contextlib.asynccontextmanager
    async def asked(
        self, request: Request, served: Served, question: Any, item: bytes | str
    ) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
        """A model's result for a question, and what every answer has; until it is made, it has a place in the queue."""
        request.scope["vitral"] = {"model": served.name}
        reads = served.predictor.inputs.what
        if (reads == "text") != isinstance(item, str):
            raise InputError(f"{served.name} reads {reads}s; send {'a text' if reads == 'text' else 'an image'}.")
        with served.batcher.place():
            began = time.perf_counter()
            ready = await self.read(question.prepare, served.subject, item)
            took = time.perf_counter() - began
            done = await served.batcher.send(question, ready)
            timing = {"read_ms": took, "wait_ms": done.waited, "run_ms": done.ran}
            told = {name: round(1000 * seconds, 2) for name, seconds in timing.items()} | {"batch": done.batch}
            yield done.result, {"model": served.name, "timing": told}

    async def answer(self, kind: TypeAdapter[Any], make: Callable[[], dict[str, Any]]) -> Response:
        """A response of that type; large ones would keep the event loop busy."""

        def dump() -> bytes:
            document = kind.validate_python(make(), strict=False)
            return kind.dump_json(document, by_alias=True, exclude_unset=True)  # what an answer lacks is not null

        return Response(await self.read(dump), media_type="application/json")


def create_app(
    predictors: Mapping[str, Predictor], *, index: Any = None, options: Serving | None = None, keys: Keys | None = None,
    hosts: tuple[str, ...] = (),
) -> FastAPI:  # fmt: skip
    """An ASGI application that serves the models by their names."""
    server = Server(predictors, index, options or Serving())
    app = FastAPI(
        title="vitral", version=__version__, lifespan=server.lifespan, docs_url=None, redoc_url=None,
        summary="Vision Transformers: predict, embed, explain, search.",
    )  # fmt: skip
    app.state.server = server
    app.add_middleware(Guard, keys=keys or Keys([]), hosts=hosts, options=server.options, full=server.full)
    app.add_middleware(
        Watch, metrics=server.metrics, paths=lambda: {getattr(route, "path", "") for route in app.routes}
    )
    app.add_middleware(SafeHeaders)  # the last added is the first to see a request
    for error in (RefusedError, VitralError, BusyError, HTTPException):
        app.add_exception_handler(error, _refuse)
    _add_questions(app, server)
    _add_facts(app, server)
    _add_page(app)
    _add_head(app)
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    refusal = refusal_of(error)
    if refusal.message != str(error) and isinstance(error, VitralError):  # what is not for clients to know
        request.scope.setdefault("vitral", {})["fault"] = str(error)
    return refusal.response()


def _add_questions(app: FastAPI, server: Server) -> None:
    def post(path: str, asked: type[schema.Asked], answered: Any) -> Callable[[Handler], Handler]:
        body = {"requestBody": schema.body_schema(asked)}
        add = app.post(path, response_model=answered, responses=ERRORS, openapi_extra=body)

        def bounded(handle: Handler) -> Handler:
            @wraps(handle)
            async def handle_in_time(request: Request) -> Response:
                return await while_awaited(handle, request, server.options.deadline)

            return add(handle_in_time)

        return bounded

    def find(name: str) -> Served:
        try:
            return models.find(server.models, name)
        except UnknownNameError as error:
            raise RefusedError(404, "unknown_model", str(error)) from None

    @post("/v1/predict", schema.PredictRequest, schema.Prediction)
    async def predict(request: Request) -> Response:
        """What a model says about an image or a text."""
        asked, item = await server.understand(request, schema.PredictRequest)
        served = find(asked.model)
        async with server.asked(request, served, models.Predict(asked.top_k), item) as (answer, told):
            told |= {"task": served.predictor.task.name, "note": answer.note}
            return await server.answer(PREDICTION, lambda: told | answer.content())

    @post("/v1/embed", schema.EmbedRequest, schema.Embedded)
    async def embed(request: Request) -> Response:
        """The vector that a model's head receives."""
        asked, item = await server.understand(request, schema.EmbedRequest)
        async with server.asked(request, find(asked.model), models.Embed(), item) as (vector, told):
            return await server.answer(EMBEDDED, lambda: told | {"embedding": vector.tolist()})

    @post("/v1/explain", schema.ExplainRequest, schema.Explained)
    async def explain(request: Request) -> Response:
        """What a model looks at."""
        asked, item = await server.understand(request, schema.ExplainRequest)
        patch = None if asked.patch is None else (asked.patch[0], asked.patch[1])
        question = models.Explain(asked.method, asked.layer, asked.head, asked.target, patch, asked.rows)

        def content(made: Explanation, told: dict[str, Any]) -> dict[str, Any]:
            rows = {} if made.rows is None else {"rows": pack_rows(made.rows)}
            image = {"image": png_base64(made.image)} if asked.rows else {}
            return told | made.to_dict() | rows | image

        if (served := find(asked.model)).predictor.inputs.what != "image":
            raise InputError(f"{served.name} reads texts, and only images are explained here; use vitral explain.")
        async with server.asked(request, served, question, item) as answered:
            return await server.answer(EXPLAINED, lambda: content(*answered))

    @post("/v1/search", schema.SearchRequest, schema.Searched)
    async def search(request: Request) -> Response:
        """What the index has that is like an image or a text."""
        asked, item = await server.understand(request, schema.SearchRequest)
        index = server.index
        if index is None:
            raise RefusedError(404, "no_index", "no index is loaded; start the server with --index PATH.")
        pictures = asked.thumbnails and index.predictor.inputs.what == "image"
        async with server.asked(request, index, models.Search(asked.top_k), item) as (matches, told):
            small = await server.thumbnails.of([match.name for match in matches]) if pictures else [None] * len(matches)
            found = [
                {"name": match.item, "score": match.score, "thumbnail": picture}
                for match, picture in zip(matches, small, strict=True)
            ]
            return await server.answer(SEARCHED, lambda: told | {"matches": found})


def _add_facts(app: FastAPI, server: Server) -> None:
    @app.get("/v1/models", response_model=schema.Models, responses=ERRORS)
    async def list_models() -> Response:
        """What is served."""
        known = [_describe(each) for each in server.models.values()]
        index = server.index
        count, reads = (None, None) if index is None else (len(index.subject), _reads(index))
        return _respond(schema.Models(version=__version__, models=known, index=count, index_reads=reads))

    @app.get("/healthz", response_model=schema.Status, responses=ERRORS)
    async def health() -> Response:
        """Whether the server lives."""
        return _respond(schema.Status(status="ok"))

    @app.get("/readyz", response_model=schema.Status, responses=ERRORS | {503: {"model": schema.Status}})
    async def readiness() -> Response:
        """Whether the server can answer."""
        ready = all(each.batcher.alive for each in server.everyone)
        return _respond(schema.Status(status="ready" if ready else "not ready"), 200 if ready else 503)

    @app.get("/metrics", responses=ERRORS | {200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        for each in server.everyone:
            server.metrics.taken.labels(each.name).set(each.batcher.taken)
        return Response(generate_latest(server.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _respond(document: BaseModel, status: int = 200) -> Response:
    return Response(document.model_dump_json(by_alias=True), status, media_type="application/json")


def _reads(served: Served) -> Literal["image", "text"]:
    return "image" if isinstance(served.predictor.inputs, ImageInputs) else "text"


def _describe(served: Served) -> schema.Model:
    predictor = served.predictor
    images = isinstance(predictor.inputs, ImageInputs)
    return schema.Model(
        name=served.name,
        task=predictor.task.name,  # pyright: ignore[reportArgumentType]
        reads=_reads(served),
        labels=list(predictor.labels),
        size=list(pair(predictor.preprocess.img_size)) if images else None,
        explains=served.methods(),
        blocks=blocks_of(predictor),
        cls=looks_from_cls(predictor),
    )


def _add_page(app: FastAPI) -> None:
    """The page's files are read once; a name that is not among them leads nowhere."""
    held = [
        *_walk(files("vitral.serving").joinpath("page")),
        ("maps.js", files("vitral.explanation").joinpath("maps.js")),
    ]
    pages = {name: (file.read_bytes(), TYPES["." + name.rsplit(".", 1)[1]]) for name, file in held}
    colours = {"maps": TABLE.tolist(), "classes": [colour(i) for i in range(256)], "style": DEFAULT_STYLE}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(pages["index.html"][0])

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(pages["docs.html"][0])

    @app.get("/page/colours.json", include_in_schema=False)
    async def page_colours() -> Response:
        return JSONResponse(colours)

    @app.get("/page/{name:path}", include_in_schema=False)
    async def page_file(name: str) -> Response:
        if name not in pages:
            raise HTTPException(404)
        return Response(pages[name][0], media_type=pages[name][1])


def _add_head(app: FastAPI) -> None:
    """Answer HEAD like GET; the HTTP server omits the body. FastAPI's own pages answer it already."""
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _walk(folder: Any, under: str = "") -> list[tuple[str, Any]]:
    found = []
    for entry in folder.iterdir():
        name = f"{under}{entry.name}"
        found += _walk(entry, f"{name}/") if entry.is_dir() else [(name, entry)]
    return found
