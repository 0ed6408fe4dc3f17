"""Throughput of working clients next to a crowd of idle connections and slow senders, on loopback.

    python benchmarks/crowd.py [--model NAME --img-size N] [--seconds 10] [--rounds 3]

20 clients send one JPEG after another to `vitral serve` with its default options, in turn without and with 500 idle
connections and 380 clients that send a byte a second. A client of the crowd that is disconnected connects again after
a second. In one layout the working clients and the crowd have several addresses of 127.0.0.x, in the other all share
127.0.0.1. The crowd is a process of its own, on the same cores. Prints the ratio of the two throughputs, and the
processor time that the server takes for an answer; writes benchmarks/results/crowd.json.
"""

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from measure import write_json
from serve import as_upload, load, pictures, processor_seconds, quantile, started

PAUSE = 1.0
"""Seconds between two bytes of a slow sender, and until a disconnected client connects again."""
LAYOUTS = {
    "several addresses": (
        [f"127.0.0.{i}" for i in range(10, 30)],
        [f"127.0.0.{i}" for i in range(100, 140)],
    ),
    "one address": (["127.0.0.1"], ["127.0.0.1"]),
}
"""Addresses of the working clients, and of the crowd."""


# ---- the crowd, in a process of its own ----


async def crowd(url: str, idle: int, slow: int, addresses: Sequence[str]) -> None:
    """Keep connections open until killed; print a line as soon as each was open once."""
    to, request = httpx.URL(url), as_upload(url, bytes(100_000))
    opened = asyncio.Semaphore(0)

    async def stay(number: int, sends: bool) -> None:
        local = addresses[number % len(addresses)], 0
        for turn in itertools.count():
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(to.host, to.port, local_addr=local)
                if turn == 0:
                    opened.release()
                try:
                    await (send_slowly(reader, writer) if sends else reader.read())
                finally:
                    writer.close()
            await asyncio.sleep(PAUSE)

    async def send_slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for i in range(len(request)):
            if reader.at_eof():
                return
            writer.write(request[i : i + 1])
            await writer.drain()
            await asyncio.sleep(PAUSE)

    everyone = [asyncio.create_task(stay(i, i < slow)) for i in range(idle + slow)]
    for _ in everyone:
        await opened.acquire()
    print("ready", flush=True)
    await asyncio.gather(*everyone)


@contextmanager
def crowded(url: str, idle: int, slow: int, addresses: Sequence[str]) -> Iterator[None]:
    """A crowd that is connected, and older than the time for which a new connection may be silent."""
    command = [sys.executable, __file__, "--crowd", url, "--idle", str(idle), "--slow", str(slow)]
    process = subprocess.Popen([*command, "--addresses", *addresses], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "the crowd did not connect"
        time.sleep(2 * PAUSE)
        yield
    finally:
        process.kill()
        process.communicate()


# ---- the measurement ----


def evicted(url: str) -> float:
    """Connections that the server has closed to make room."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("vitral_evicted_connections_total "))


def measure(url: str, pid: int, layout: str, o: argparse.Namespace) -> dict[str, Any]:
    """Throughput without and with the crowd, in turn, and what the working clients received."""
    workers, others = LAYOUTS[layout]
    data = pictures(16)

    def work(seconds: float) -> dict[str, Any]:
        spent, gone = processor_seconds(pid), evicted(url)
        made = asyncio.run(load(url, o.clients, seconds, data, workers))
        return {
            "per_second": made.per_second(), "p99": quantile(made.took, 0.99), "statuses": dict(made.statuses),
            "processor_seconds": (processor_seconds(pid) - spent) / max(1, len(made.took)),
            "evicted": evicted(url) - gone,
        }  # fmt: skip

    work(min(3.0, o.seconds))  # warm
    rounds: list[dict[str, Any]] = []
    for _ in range(o.rounds):
        without = work(o.seconds)
        with crowded(url, o.idle, o.slow, others):
            rounds.append({"without": without, "with": work(o.seconds)})
    ratios = [r["with"]["per_second"] / r["without"]["per_second"] for r in rounds]
    return {"ratio": statistics.median(ratios), "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--clients", type=int, default=20, help="working clients")
    parser.add_argument("--idle", type=int, default=500, help="connections that send nothing")
    parser.add_argument("--slow", type=int, default=380, help="clients that send a byte a second")
    parser.add_argument("--seconds", type=float, default=10, help="time of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="crowd", help="name of the result")
    parser.add_argument("--crowd", help=argparse.SUPPRESS)
    parser.add_argument("--addresses", nargs="+", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.crowd:
        asyncio.run(crowd(o.crowd, o.idle, o.slow, o.addresses))
        return

    from vitral import create_model, save_model

    results = {}
    with tempfile.TemporaryDirectory() as folder:
        source = str(Path(folder) / o.model)
        size = {"img_size": o.img_size} if o.img_size else {}
        save_model(create_model(o.model, seed=0, **size), source, layout="vitral")
        print(f"{o.model}: {o.clients} working clients, {o.idle} idle connections, {o.slow} slow senders")
        for layout in LAYOUTS:
            with started("vitral", source, None) as (url, process):
                results[layout] = made = measure(url, process.pid, layout, o)
            print(f"{layout}: throughput with the crowd is {made['ratio']:.2f} of that without (aim: at least 0.80)")
            for each in made["rounds"]:
                for name, r in each.items():
                    print(
                        f"    {name:8} {r['per_second']:6.1f} a second, p99 {1000 * r['p99']:5.0f} ms, processor "
                        f"{1000 * r['processor_seconds']:5.1f} ms an answer, statuses {r['statuses']}, "
                        f"{r['evicted']:.0f} evicted"
                    )
    options = {"model": o.model, "clients": o.clients, "idle": o.idle, "slow": o.slow, "seconds": o.seconds}
    print(f"wrote {write_json(o.out, {**options, 'layouts': results})}")


if __name__ == "__main__":
    main()
