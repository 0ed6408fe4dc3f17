"""Closed-loop load on loopback: vitral serve beside plain handlers and litserve, each a process of its own, in one run.

    python benchmarks/serve.py [--clients 1 8 32] [--seconds 20] [--soak 30] [--engine NAME] [--int8]

Clients send one JPEG after another and wait for each answer. The rivals take turns: vitral serve; the same `Predictor`
in a plain FastAPI handler, without batching; the same in litserve, with its batching; timm, eager, in a plain handler.
All have the same weights and must give the same labels. Last comes the engine alone, on prepared images in batches as
large as can be: no server of it can be faster. Prints images per second, ratios, latencies, and the processor time that
a server took for an answer; then, for --soak seconds, how long answers take with twice the clients that the queue
holds, where the excess gets 503, and what that does to memory. Writes benchmarks/results/serve.json (--out). --int8
gives all but timm the same int8 file of OpenVINO, calibrated with noise: for the speed alone; timm's labels are not
compared then.
"""

import argparse
import asyncio
import io
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from measure import write_json
from vitral.config import pair

HERE = Path(__file__).resolve()
TOP_K = 5
CUT_OFF = 0
"""Stands for the status of a request that no answer came to."""
PATIENCE = 120.0
"""Seconds that a client waits for an answer."""


# ---- the rivals, each in a process of its own ----


def plain_handler(answer: Any) -> Any:
    """A FastAPI application as one writes it first: read the form, run the model in a worker thread."""
    from fastapi import FastAPI, File

    app = FastAPI()

    @app.post("/v1/predict")
    def predict(image: bytes = File()) -> dict[str, Any]:
        return {"predictions": answer(image)}

    @app.get("/healthz")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    return app


def predict_with_vitral(source: str, engine: str | None) -> Any:
    from vitral import Predictor

    predictor = Predictor(source, engine=engine)  # pyright: ignore[reportArgumentType]
    return lambda image: predictor.predict(image, TOP_K)[0].content()["predictions"]


def run_engine_alone(source: str, engine: str | None, batch: int, seconds: float) -> None:
    """Print how many prepared images a second the engine looks at."""
    import torch

    from vitral import Predictor

    predictor = Predictor(source, engine=engine, batch_size=batch)  # pyright: ignore[reportArgumentType]
    x = torch.randn(batch, 3, *pair(predictor.preprocess.img_size))
    for _ in range(3):
        predictor.logits(x)
    began, done = time.perf_counter(), 0
    while (took := time.perf_counter() - began) < seconds:
        predictor.logits(x)
        done += batch
    print(done / took)


def predict_with_timm(source: str, engine: str | None) -> Any:
    """timm's model and transform, with the weights of the source."""
    import torch

    from peers import import_timm
    from vitral import load_model

    timm = import_timm()
    ours = load_model(source)
    model = timm.create_model(Path(source).name, num_classes=ours.config.num_classes, img_size=ours.config.image)
    model.load_state_dict(ours.state_dict())
    model.eval()
    p = ours.preprocess
    transform = timm.data.create_transform(
        input_size=(3, *ours.config.image), mean=p.mean, std=p.std, interpolation=p.interpolation, crop_pct=p.crop_pct
    )

    @torch.inference_mode()
    def answer(data: bytes) -> list[dict[str, Any]]:
        x = transform(Image.open(io.BytesIO(data)).convert("RGB"))
        values, order = model(x[None])[0].softmax(0).topk(TOP_K)
        labels = ours.labels or [str(i) for i in range(ours.config.num_classes)]
        return [{"label": labels[i], "probability": v} for v, i in zip(values.tolist(), order.tolist(), strict=True)]

    return answer


def run_rival(name: str, source: str, engine: str | None, port: int) -> None:
    """Serve until killed."""
    import uvicorn

    if name == "litserve":
        from litserve_rival import serve_litserve

        serve_litserve(source, engine, port, TOP_K)
        return
    answer = {"plain": predict_with_vitral, "timm": predict_with_timm}[name](source, engine)
    uvicorn.run(plain_handler(answer), host="127.0.0.1", port=port, log_level="error")


@contextmanager
def started(name: str, source: str, engine: str | None):
    """A rival that answers, as its address and process."""
    options = ["--engine", engine] if engine else []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    if name == "vitral":
        command = [sys.executable, "-m", "vitral", "serve", source, "--port", str(port), *options]
    else:
        command = [sys.executable, str(HERE), "--rival", name, "--source", source, "--port", str(port), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            try:
                if httpx.get(f"{url}/healthz", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                assert process.poll() is None, f"{name} did not start"
            time.sleep(0.2)
        yield url, process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # workers that it left behind


def write_int8(source: str, path: Path) -> None:
    """The model of a source as a file in int8."""
    from vitral import Predictor
    from vitral.inference.export import convert_openvino, describe, graph_document, quiet, save_openvino
    from vitral.inference.graph import graph_of
    from vitral.inference.packages import import_openvino
    from vitral.inference.quantize import int8_openvino

    predictor = Predictor(source, engine="eager")
    model, preprocess = predictor.model, predictor.preprocess
    graph = graph_of(model, preprocess)
    about = describe(model, predictor.task, predictor.inputs, source)
    document = {"format": "openvino", **graph_document(graph, preprocess, about)}
    with quiet():
        made = int8_openvino(convert_openvino(graph), graph.example(20).numpy(), [])
    save_openvino(made, document, path, import_openvino())


# ---- the load ----


def pictures(count: int, size: tuple[int, int] = (400, 500)) -> list[bytes]:
    """JPEGs of smooth noise."""
    made = []
    for seed in range(count):
        small = np.random.default_rng(seed).integers(0, 256, (size[0] // 16, size[1] // 16, 3), np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        made.append(buffer.getvalue())
    return made


@dataclass
class Load:
    """What came of asking for a while."""

    took: list[float]
    """Seconds that each answer took."""
    came: list[float]
    """When those came that came while all clients still asked, in seconds."""
    statuses: Counter[int]

    def per_second(self) -> float:
        """The slope of a line through all arrivals: answers come in bursts, and the first and last are of chance."""
        return float(np.polyfit(sorted(self.came), np.arange(len(self.came)), 1)[0]) if len(self.came) > 2 else 0.0


def as_upload(url: str, image: bytes, path: str = "/v1/predict") -> bytes:
    """A complete request, built in advance: the clients share the processor with the server that is measured."""
    made = httpx.Request("POST", f"{url}{path}", files={"image": ("a.jpg", image, "image/jpeg")})
    body = made.read()
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in made.headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    """A client's connection from one of this machine's addresses; opened when it is needed, and kept."""

    def __init__(self, url: str, local: str) -> None:
        address = httpx.URL(url)
        self.address, self.local = (address.host, address.port or 80), local
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, httpx.Headers]:
        """Status and headers of the answer, which is read whole."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(*self.address, local_addr=(self.local, 0))
        reader, writer = self.streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = httpx.Headers(dict(line.split(": ", 1) for line in head[1:] if line))
        await reader.readexactly(int(headers["content-length"]))
        if headers.get("connection") == "close":
            self.close()
        return int(head[0].split()[1]), headers

    def close(self) -> None:
        """Hang up."""
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def load(
    url: str, clients: int, seconds: float, data: list[bytes], addresses: Sequence[str] = ("127.0.0.1",)
) -> Load:
    """Send requests for so long from these addresses, each client as soon as it has its answer."""
    made = Load([], [], Counter())
    requests = [as_upload(url, image) for image in data]
    start = time.perf_counter()
    end = start + seconds

    async def one(number: int) -> None:
        i, connection = number, Connection(url, addresses[number % len(addresses)])
        while time.perf_counter() < end:
            began = time.perf_counter()
            try:
                async with asyncio.timeout(PATIENCE):
                    status, headers = await connection.ask(requests[i % len(requests)])
            except (OSError, EOFError, TimeoutError):
                connection.close()
                made.statuses[CUT_OFF] += 1
                await asyncio.sleep(0.1)
                continue
            made.statuses[status] += 1
            if status == 200:
                now = time.perf_counter()
                made.took.append(now - began)
                made.came += [now - start] if now < end else []
            else:
                await asyncio.sleep(float(headers.get("retry-after", 1)) / 10)
            i += clients
        connection.close()

    await asyncio.gather(*(one(i) for i in range(clients)))
    return made


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def check_same(urls: dict[str, str], data: bytes) -> None:
    """All rivals answer with the same labels; timm decodes with Pillow, and so with slightly other pixels."""
    answers = {}
    for name, url in urls.items():
        response = httpx.post(f"{url}/v1/predict", files={"image": ("a.jpg", data, "image/jpeg")}, timeout=120)
        response.raise_for_status()
        answers[name] = response.json()["predictions"]
    for name, told in answers.items():
        best = {p["label"]: p["probability"] for p in answers["vitral"]}
        assert told[0]["label"] in best, f"{name} answers {told[0]}, vitral {answers['vitral'][0]}"
        assert abs(told[0]["probability"] - best[told[0]["label"]]) < 0.02


def overload(url: str, process: subprocess.Popen[bytes], clients: int, seconds: float, data: list[bytes]) -> dict:
    """What twice as many as can wait get, and what it does to memory, at both ends and at the most in each minute."""
    minutes: list[int] = []

    async def watched() -> Load:
        working = asyncio.ensure_future(load(url, clients, seconds, data))
        began = time.perf_counter()
        while not working.done():
            minute = int((time.perf_counter() - began) / 60)
            minutes.extend([0] * (minute + 1 - len(minutes)))
            minutes[minute] = max(minutes[minute], resident(process.pid))
            await asyncio.wait([working], timeout=1)
        return working.result()

    asyncio.run(load(url, clients, min(10, seconds), data))
    before = resident(process.pid)
    made = asyncio.run(watched())
    after = resident(process.pid)
    return {
        "clients": clients, "seconds": seconds, "statuses": dict(made.statuses), "per_second": made.per_second(),
        "p50": quantile(made.took, 0.5), "p99": quantile(made.took, 0.99), "rss_growth": after / before - 1,
        "rss_by_minute": minutes,
    }  # fmt: skip


def processor_seconds(session: int) -> float:
    """Processor time that the processes of a session have taken so far."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12]) if int(fields[3]) == session else 0
    return total / os.sysconf("SC_CLK_TCK")


def measure_engine(source: str, engine: str | None, batch: int, seconds: float) -> float:
    """Images a second of the engine alone, in a process of its own."""
    command = [sys.executable, str(HERE), "--rival", "engine", "--source", source, "--batch", str(batch)]
    command += ["--seconds", str(seconds), *(["--engine", engine] if engine else [])]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def resident(pid: int) -> int:
    """Resident memory of a process, in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rivals", nargs="+", default=["vitral", "plain", "litserve", "timm"])
    parser.add_argument("--seconds", type=float, default=20, help="time of each load")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--soak", type=float, default=30, help="seconds at twice what can wait")
    parser.add_argument("--int8", action="store_true", help="serve an int8 file of the model")
    parser.add_argument("--engine", help="what computes, in all but timm; by default what vitral chooses itself")
    parser.add_argument("--out", help="name of the result; serve or serve-int8 if none is given")
    parser.add_argument("--rival", help=argparse.SUPPRESS)
    parser.add_argument("--source", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.rival == "engine":
        run_engine_alone(o.source, o.engine, o.batch, o.seconds)
        return
    if o.rival:
        run_rival(o.rival, o.source, o.engine, o.port)
        return

    from vitral import create_model, save_model
    from vitral.config import Serving

    data = pictures(16)
    with tempfile.TemporaryDirectory() as folder:
        source = str(Path(folder) / o.model)
        save_model(create_model(o.model, img_size=o.img_size, seed=0) if o.img_size else create_model(o.model, seed=0),
                   source, layout="vitral")  # fmt: skip
        sources = dict.fromkeys(o.rivals, source)
        if o.int8:
            write_int8(source, Path(folder) / "int8.xml")
            sources |= {name: str(Path(folder) / "int8.xml") for name in o.rivals if name != "timm"}
        speeds: dict[tuple[str, int], list[float]] = {}
        latencies: dict[tuple[str, int], list[float]] = {}
        processor: dict[tuple[str, int], list[float]] = {}
        checked = False
        for turn in range(o.rounds):
            for name in o.rivals[turn % len(o.rivals) :] + o.rivals[: turn % len(o.rivals)]:
                with started(name, sources[name], o.engine) as (url, process):
                    if not checked and name != "vitral" and sources[name] == sources["vitral"]:
                        with started("vitral", sources["vitral"], o.engine) as (ours, _):
                            check_same({"vitral": ours, name: url}, data[0])
                    asyncio.run(load(url, max(o.clients), min(3.0, o.seconds), data))  # warm
                    for clients in o.clients:
                        before = processor_seconds(process.pid)
                        made = asyncio.run(load(url, clients, o.seconds, data))
                        assert set(made.statuses) == {200}, made.statuses
                        spent = processor_seconds(process.pid) - before
                        processor.setdefault((name, clients), []).append(spent / len(made.took))
                        speeds.setdefault((name, clients), []).append(made.per_second())
                        latencies.setdefault((name, clients), []).extend(made.took)
            for clients in o.clients:
                batch = min(clients, Serving().max_batch)
                speed = measure_engine(sources["vitral"], o.engine, batch, o.seconds)
                speeds.setdefault(("engine", clients), []).append(speed)
            checked = True
        rows = table(o, speeds, latencies, processor)
        queue = Serving().max_queue
        with started("vitral", sources["vitral"], o.engine) as (url, process):
            over = overload(url, process, 2 * queue, o.soak, data)
    print(
        f"{over['clients']} clients on a queue of {queue} for {o.soak:g} s: {over['per_second']:.1f} a second, p99 "
        f"{1000 * over['p99']:.0f} ms, statuses {over['statuses']}, memory {over['rss_growth']:+.1%}, at the most in "
        f"each minute {', '.join(f'{most / 2**20:.0f}' for most in over['rss_by_minute'])} MiB"
    )
    print(
        write_json(o.out or ("serve-int8" if o.int8 else "serve"), {"model": o.model, "rows": rows, "overload": over})
    )


Measured = dict[tuple[str, int], list[float]]
"""Of a rival, with so many clients."""


def table(o: argparse.Namespace, speeds: Measured, latencies: Measured, processor: Measured) -> list[dict[str, Any]]:
    """Print what was measured of each rival, and return it."""
    rows: list[dict[str, Any]] = []
    print(f"{o.model}: images per second, median of {o.rounds} rounds of {o.seconds:g} s")
    print(" clients      rival   per second   vitral is    p50 ms    p99 ms   cpu ms")
    for clients in o.clients:
        for name in [*o.rivals, "engine"]:
            mine = statistics.median(speeds[name, clients])
            ratios = [a / b for a, b in zip(speeds["vitral", clients], speeds[name, clients], strict=True)]
            row = {"clients": clients, "rival": name, "per_second": mine, "ratio": statistics.median(ratios)}
            row["rounds"] = speeds[name, clients]
            times: dict[str, float] = {}
            if took := latencies.get((name, clients)):
                spent = statistics.median(processor[name, clients])
                times = {"p50": quantile(took, 0.5), "p99": quantile(took, 0.99), "processor_seconds": spent}
            rows.append(row | times)
            columns = "".join(f"{1000 * seconds:9.1f} " for seconds in times.values())
            print(f"{clients:8} {name:>10} {mine:12.1f} {row['ratio']:10.2f}x {columns}")
    return rows


if __name__ == "__main__":
    main()
