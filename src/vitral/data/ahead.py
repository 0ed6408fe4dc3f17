"""Work done ahead of time by threads, in order. Decoders and torch release the interpreter lock while they work."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from threading import Barrier
from typing import TypeVar

import torch

X = TypeVar("X")
Y = TypeVar("Y")


def ahead(function: Callable[[X], Y], items: Iterable[X], workers: int, depth: int) -> Generator[Y]:
    """`map(function, items)`, with threads up to `depth` items ahead of the reader.

    Results are in order; an error is raised in place of its result. When the reader stops, by `break` or Ctrl-C, items
    that have not been started are dropped and no thread remains.
    """
    items = iter(items)
    first = list(islice(items, 2 if workers else 0))
    if len(first) < 2:  # no use of threads for one
        yield from map(function, chain(first, items))
        return
    pool = ThreadPoolExecutor(workers, "vitral-ahead")
    try:
        use_cores(pool, workers, 1)
        pending: deque[Future[Y]] = deque()
        for item in chain(first, items):
            pending.append(pool.submit(function, item))
            if len(pending) > depth:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def use_cores(pool: ThreadPoolExecutor, workers: int, cores: int) -> None:
    """Let torch compute in so many threads of its own in each thread of a pool: one where the model needs the others.

    torch keeps this number for each thread, and also as what new threads begin with: that is put back.
    """
    threads, together = torch.get_num_threads(), Barrier(workers)

    def begin() -> None:
        torch.get_num_threads()  # a thread that has not asked would later begin with the common number
        torch.set_num_threads(cores)
        together.wait()  # so that each thread of the pool runs this once

    for begun in [pool.submit(begin) for _ in range(workers)]:
        begun.result()
    torch.set_num_threads(threads)
