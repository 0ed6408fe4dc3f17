"""A soak of `vitral serve`: many requests, a part of them with broken images; statuses and memory.

    python benchmarks/soak.py [--requests 10000] [--broken 0.4] [--clients 8] [--model NAME --img-size N]

Clients on loopback send images of several formats and sizes to /v1/predict, /v1/embed and /v1/explain. In the broken
ones bytes are changed, removed, inserted or cut off, or the file is random. Memory is the resident size of the server,
as the median over 10 % of the requests before a mark; growth is from the mark at one fifth of the requests to the end.
Exits with 1 if a status of 500 or more other than 503 came, if a connection was cut off, or if memory grew by more than
2 %. Writes benchmarks/results/soak.json.
"""

import argparse
import asyncio
import io
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from PIL import Image

from measure import write_json
from serve import CUT_OFF, PATIENCE, Connection, as_upload, resident, started

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")
SIZES = ((40, 52), (300, 200), (500, 400), (900, 700))
PATHS = ("/v1/predict", "/v1/embed", "/v1/predict", "/v1/explain")
MOST_GROWTH = 0.02
START = 0.2
"""The share of the requests after which growth counts."""
WINDOW = 0.1
"""The share of the requests before a mark whose memory counts: freed memory is returned only once a minute."""


def picture(kind: str, size: tuple[int, int], rng: np.random.Generator) -> bytes:
    """Smooth noise as a file."""
    small = rng.integers(0, 256, (5, 6, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize(size, Image.Resampling.BICUBIC).save(buffer, kind)
    return buffer.getvalue()


def damage(data: bytes, rng: np.random.Generator) -> bytes:
    """The file with bytes changed, removed or inserted, its end cut off, or random bytes instead."""
    place, length = int(rng.integers(len(data))), int(rng.integers(1, 64))
    match rng.integers(5):
        case 0:
            changed = bytearray(data)
            for i in rng.integers(0, min(len(data), 600), 20):  # most of what is read before the pixels
                changed[i] = rng.integers(256)
            return bytes(changed)
        case 1:
            return data[:place] + data[place + length :]
        case 2:
            return data[:place] + rng.bytes(length) + data[place:]
        case 3:
            return data[:place]
        case _:
            return rng.bytes(length)


async def soak(url: str, pid: int, o: argparse.Namespace) -> tuple[Counter[tuple[bool, int]], list[int]]:
    """How often which status came, of broken images and of others, and the server's memory after each request."""
    rng = np.random.default_rng(0)
    files = [picture(kind, size, rng) for kind in FORMATS for size in SIZES]
    statuses: Counter[tuple[bool, int]] = Counter()
    memory: list[int] = []
    numbers = itertools.count()

    async def one() -> None:
        connection = Connection(url, "127.0.0.1")
        while (number := next(numbers)) < o.requests:
            broken = bool(rng.random() < o.broken)
            file = files[int(rng.integers(len(files)))]
            request = as_upload(url, damage(file, rng) if broken else file, PATHS[number % len(PATHS)])
            try:
                async with asyncio.timeout(PATIENCE):
                    status, _ = await connection.ask(request)
            except (OSError, EOFError, TimeoutError):
                connection.close()
                status = CUT_OFF
            statuses[broken, status] += 1
            memory.append(resident(pid))
        connection.close()

    await asyncio.gather(*(one() for _ in range(o.clients)))
    return statuses, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--broken", type=float, default=0.4, help="share of broken images")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", default="soak", help="name of the result")
    o = parser.parse_args()

    from vitral import create_model, save_model

    with tempfile.TemporaryDirectory() as folder:
        source = str(Path(folder) / o.model)
        size = {"img_size": o.img_size} if o.img_size else {}
        save_model(create_model(o.model, seed=0, **size), source, layout="vitral")
        with started("vitral", source, None) as (url, process):
            began = time.perf_counter()
            statuses, memory = asyncio.run(soak(url, process.pid, o))
            took = time.perf_counter() - began

    def median_before(mark: float) -> float:
        return statistics.median(memory[int((mark - WINDOW) * len(memory)) : max(1, int(mark * len(memory)))])

    growth = median_before(1) / median_before(START) - 1
    bad = {s: n for (_, s), n in statuses.items() if s == CUT_OFF or (s >= 500 and s != 503)}
    rows = [{"broken": b, "status": s, "requests": n} for (b, s), n in sorted(statuses.items())]
    print(
        f"{o.model}: {len(memory)} requests of {o.clients} clients in {took:.0f} s, {o.broken:.0%} of the images broken"
    )
    for row in rows:
        print(f"    {'broken' if row['broken'] else 'intact'} images, status {row['status']}: {row['requests']}")
    tenths = [(int(min(part)), int(max(part))) for part in np.array_split(memory, min(10, len(memory)))]
    print(f"memory by tenths: {', '.join(f'{a / 2**20:.0f}-{b / 2**20:.0f}' for a, b in tenths)} MiB")
    print(f"growth between requests {int(START * len(memory))} and {len(memory)}: {growth:+.2%} (aim: at most 2 %)")
    result = {
        "model": o.model, "requests": o.requests, "clients": o.clients, "broken": o.broken, "seconds": took,
        "statuses": rows, "rss_growth": growth, "rss_start": median_before(START), "rss_end": median_before(1),
        "rss_range_by_tenths": tenths,
    }  # fmt: skip
    print(f"wrote {write_json(o.out, result)}")
    if bad or growth > MOST_GROWTH:
        sys.exit(f"failed: {bad or f'memory grew by {growth:.2%}'}")


if __name__ == "__main__":
    main()
