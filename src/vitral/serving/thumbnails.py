"""Small pictures of the files of an index: made one after the other, remembered, and only while there is time."""

import asyncio
import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from vitral.data.ahead import use_cores
from vitral.data.images import ImageLimits, small_picture
from vitral.errors import ImageError

SIDE = 160
"""Longer side of a small picture."""
MOST = 50
"""Files of an answer that have one."""
SECONDS = 5.0
"""After which the rest of an answer has none."""
KEPT = 2000
"""That are remembered, of some kilobytes each."""


class Thumbnails:
    """Makes them in a thread of its own, so that nobody who asks a model waits for it."""

    def __init__(self, limits: ImageLimits) -> None:
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="thumbnails")
        self._remembered = lru_cache(KEPT)(self._make)

    def start(self) -> None:
        """Begin."""
        use_cores(self._thread, 1, 1)

    def close(self) -> None:
        """Make no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def of(self, paths: Sequence[str]) -> list[str | None]:
        """JPEGs in base64; None for files that have gone, and for those that there is no time for."""
        loop = asyncio.get_running_loop()
        end = loop.time() + SECONDS
        made = [
            await loop.run_in_executor(self._thread, self._one, p) if loop.time() < end else None for p in paths[:MOST]
        ]
        return made + [None] * (len(paths) - len(made))

    def _one(self, path: str) -> str | None:
        try:
            stat = Path(path).stat()
            return self._remembered(path, stat.st_mtime_ns, stat.st_size)
        except (OSError, ImageError):
            return None

    def _make(self, path: str, mtime_ns: int, size: int) -> str:
        """What is remembered holds for a file that has not changed since."""
        buffer = io.BytesIO()
        small_picture(path, SIDE, self._limits).save(buffer, "JPEG", quality=80)
        return base64.b64encode(buffer.getvalue()).decode()
