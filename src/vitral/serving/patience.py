"""An answer is worked on as long as somebody waits for it: until its deadline, or until the client has gone."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from vitral.serving.refusals import gone, late

Handler = Callable[[Request], Awaitable[Response]]


async def while_awaited(handle: Handler, request: Request, seconds: float) -> Response:
    """What a handler answers; it is cancelled, wherever it is, when nobody waits any more."""
    await request.body()  # all that comes after it is that the client leaves
    working = asyncio.ensure_future(handle(request))
    leaving = asyncio.ensure_future(_departure(request))
    try:
        await asyncio.wait((working, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise gone() if leaving.done() else late()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
