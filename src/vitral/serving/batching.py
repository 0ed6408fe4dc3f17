"""Questions that come at about the same time are answered as one batch. Knows nothing of models or HTTP.

A batch takes half of those that are under way, so that the others are read while it computes, and nothing is idle:
eight clients that ask again and again travel in two groups by turns, and one alone never waits. It leaves when it has
that many, when it is full, or when its first question has waited long enough. Questions of different kinds, which are
the types of their keys, take turns: what takes long keeps others waiting for one batch of it, and no more.
"""

import asyncio
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from vitral.config import Serving
from vitral.data.ahead import use_cores


class BusyError(Exception):
    """More was asked than can wait."""


@dataclass(frozen=True)
class Done:
    """A result, and how it came about."""

    result: Any
    waited: float
    """Seconds until its batch left."""
    ran: float
    """Seconds that the batch took."""
    batch: int
    """How many went together."""


@dataclass(frozen=True, eq=False)
class _Job:
    key: Hashable
    item: Any
    came: float
    done: asyncio.Future[Done]


Run = Callable[[Any, list[Any]], Sequence[Any]]
"""From a key and the items that were sent under it to a result for each, or an exception in its place."""


class Batcher:
    """Gathers items with equal keys, and runs them in one thread; `watch` is told size and seconds of each batch.

    `alone` tells of which keys nothing is gained by a batch: one item of theirs runs at a time.
    """

    def __init__(
        self, run: Run, options: Serving, watch: Callable[[int, float], None] = lambda size, seconds: None,
        alone: Callable[[Any], bool] = lambda key: False,
    ) -> None:  # fmt: skip
        self._run, self._watch, self._alone = run, watch, alone
        self._max_batch, self._wait, self._max_queue = options.max_batch, options.wait_ms / 1000, options.max_queue
        self._waiting: dict[_Job, None] = {}
        self._last: type | None = None
        self._crowd = 1
        self._taken = 0
        self._news, self._idle = asyncio.Event(), asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1)

    @property
    def taken(self) -> int:
        """Questions that are taken and not answered."""
        return self._taken

    @property
    def full(self) -> bool:
        """Whether no more can be taken."""
        return self._closing or self._taken >= self._max_queue

    @property
    def alive(self) -> bool:
        """Whether what is sent will be answered."""
        return self._task is not None and not self._task.done() and not self._closing

    def start(self) -> None:
        """Begin, in the running event loop."""
        use_cores(self._thread, 1, torch.get_num_threads())  # all that there are, whatever others set meanwhile
        self._task = asyncio.create_task(self._work())

    async def do(self, work: Callable[[], None]) -> None:
        """Something else in the thread that runs the batches."""
        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def close(self) -> None:
        """Take nothing more, and finish what was taken."""
        self._closing = True
        self._news.set()
        while self._taken:
            self._idle.clear()
            await self._idle.wait()
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self._thread.shutdown)  # a batch that nobody waits for any more may still run

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one question, from its arrival to its answer; raises at once if there is none."""
        if self.full:
            raise BusyError
        self._taken += 1
        try:
            yield
        finally:
            self._taken -= 1
            self._idle.set()

    async def send(self, key: Hashable, item: Any) -> Done:
        """The result for an item; who is cancelled meanwhile is no longer waiting, and is not computed."""
        loop = asyncio.get_running_loop()
        job = _Job(key, item, loop.time(), loop.create_future())
        self._waiting[job] = None
        self._news.set()
        try:
            return await job.done
        finally:
            self._waiting.pop(job, None)

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            batch = await self._gather()
            began = loop.time()
            items = [job.item for job in batch]
            results = await loop.run_in_executor(self._thread, self._attempt, batch[0].key, items)
            ran = loop.time() - began
            self._crowd = len(batch) + len(self._waiting)
            self._watch(len(batch), ran)
            for job, result in zip(batch, results, strict=True):
                if job.done.done():  # nobody waits for it any more
                    continue
                if isinstance(result, Exception):
                    job.done.set_exception(result)
                else:
                    job.done.set_result(Done(result, began - job.came, ran, len(batch)))

    async def _gather(self) -> list[_Job]:
        """The next batch: the oldest job, of another kind than the last if there is one, and those with its key."""
        loop = asyncio.get_running_loop()
        while True:
            left = next(iter(self._waiting)).came + self._wait - loop.time() if self._waiting else None
            enough = min(self._max_batch, -(-max(self._crowd, len(self._waiting)) // 2))
            if left is not None and (len(self._waiting) >= enough or left <= 0 or self._closing):
                break
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._news.wait()
        first = min(self._waiting, key=lambda job: (type(job.key) is self._last, job.came))
        self._last = type(first.key)
        alike = [first] if self._alone(first.key) else [job for job in self._waiting if job.key == first.key]
        for job in (batch := alike[:enough]):
            del self._waiting[job]
        return batch

    def _attempt(self, key: Any, items: list[Any]) -> list[Any]:
        """Results; where a batch fails, each of it is tried alone, so that only the culprit fails."""
        try:
            results = list(self._run(key, items))
            assert len(results) == len(items), "a result for each item"
            return results
        except BaseException as error:  # whatever a library throws: the thread must go on
            if len(items) == 1:
                fit = isinstance(error, Exception) and not isinstance(error, StopIteration)  # for a future to hold
                return [error if fit else RuntimeError(repr(error))]
            return [self._attempt(key, [item])[0] for item in items]
