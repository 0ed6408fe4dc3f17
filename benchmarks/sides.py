"""Rivals in processes of their own, so that what one sets up there does not help or hinder another."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class Side:
    """A process with some rivals: `make(*what)`, called there, gives them by name; each takes one argument."""

    def __init__(self, make: Callable[..., dict[str, Callable[[Any], Any]]], *what: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, make, *what), daemon=True)
        self._process.start()
        self._names: list[str] | None = None

    @property
    def names(self) -> list[str]:
        """Of its rivals, when they are made."""
        if self._names is None:
            self._names = self._pipe.recv()
        assert self._names
        return self._names

    def call(self, name: str, argument: Any) -> Any:
        """What a rival gives for an argument; nothing else of that process runs."""
        assert name in self.names
        self._pipe.send((name, argument))
        return self._pipe.recv()

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, make: Callable[..., Any], *what: Any) -> None:
    rivals = make(*what)
    pipe.send(list(rivals))
    while (asked := pipe.recv()) is not None:
        name, argument = asked
        pipe.send(rivals[name](argument))
