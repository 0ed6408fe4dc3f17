"""Many requests to one server, 40 % of them with damaged images: its memory must not grow."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import Any

import httpx
from process import serving

from attack.damage import mutate_image
from attack.images import intact
from attack.server import as_form, as_json, resident, save_small_model
from attack.stage import Stage

CLIENTS = 4
BROKEN = 0.4
"""Share of the requests that have a damaged image."""
FROM, GROWTH = 0.2, 0.02
"""The memory at the end may be larger by this share than after this share of the requests."""
WINDOW = 0.02
"""Share of the requests over which the memory is averaged."""
PATHS = ("/v1/predict", "/v1/predict", "/v1/embed", "/v1/explain")


class Soak:
    """10,000 requests."""

    name = "soak"
    size = 10_000
    failure = (
        "a good image not answered with 200 or 503, a damaged one not with 200, 400, 422 or 503, RSS growth above 2 %"
    )

    def run(self, stage: Stage) -> None:
        """Send all requests from a few clients, and compare the memory early and late."""
        images = list(intact().values())
        numbers = iter(stage.numbers)
        memory: list[int] = []
        with serving(save_small_model(stage.work)) as (url, process, _), ThreadPoolExecutor(CLIENTS) as threads:
            for client in [threads.submit(_send, stage, url, images, numbers, process, memory) for _ in range(CLIENTS)]:
                client.result()
        if stage.number is None:
            self._compare(stage, memory)

    def _compare(self, stage: Stage, memory: list[int]) -> None:
        """Record a failure if the memory has grown."""
        window = max(1, round(WINDOW * len(memory)))
        first = round(FROM * len(memory))
        early, late = median(memory[first : first + window]), median(memory[-window:])
        print(f"soak: {early / 2**20:.1f} MiB after {first:,} requests, {late / 2**20:.1f} MiB at the end", flush=True)
        if late > (1 + GROWTH) * early:
            reason = f"memory grew by {100 * (late / early - 1):.1f} %, from {early / 2**20:.1f} MiB"
            stage.fail(len(memory), reason, facts={"resident_bytes": memory[:: max(1, len(memory) // 200)]})


def _send(stage: Stage, url: str, images: list[bytes], numbers: Iterator[int], process: Any, memory: list[int]) -> None:
    """One client."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for number in numbers:
            chance = stage.chance(number)
            broken = chance.random() < BROKEN
            image = chance.choice(images)
            image = mutate_image(image, chance) if broken else image
            body, kind = chance.choice([as_json, as_form])(image)
            path = chance.choice(PATHS)
            response = client.post(path, content=body, headers={"Content-Type": kind})
            if response.status_code not in ((200, 400, 422, 503) if broken else (200, 503)):
                files = {"image.bin": image, "answer.txt": response.content}
                stage.fail(number, f"{path} was answered with {response.status_code}", files=files)
            memory.append(resident(process.pid))
            stage.step()
