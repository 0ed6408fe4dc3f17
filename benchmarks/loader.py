"""Decoding and cropping JPEGs to 224: vitral, plain Pillow, its `draft` and `resize(box=)`, torchvision's v2.

    python benchmarks/loader.py

First images per CPU second of one process, for files of 500 x 400 and 2000 x 1600 made from noise; then training
batches read by two workers: vitral's threads compared with processes of torch's DataLoader. Interleaved, medians.
Writes benchmarks/results/loader.json.
"""

import io
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader

from measure import write_json
from peers import mend_torchvision
from vitral.config import Augmentation, Preprocess
from vitral.data.images import read_image
from vitral.data.inputs import ImageInputs
from vitral.data.loader import TrainLoader
from vitral.data.noise import Noise
from vitral.data.sources.open import open_data
from vitral.data.transforms import decode_size, eval_transform, random_resized_crop

P = Preprocess(img_size=224, crop_pct=0.875, interpolation="bicubic")
BICUBIC = Image.Resampling.BICUBIC


def make_jpeg(width: int, height: int, seed: int = 0) -> bytes:
    """A picture with detail at every scale, as photographs have."""
    generator, x = torch.Generator().manual_seed(seed), torch.zeros(1, 3, height, width)
    for cells in (4, 16, 64, 256):
        noise = torch.rand(1, 3, cells, cells, generator=generator)
        x += torch.nn.functional.interpolate(noise, size=(height, width), mode="bicubic") / cells**0.5
    x = (255 * (x - x.min()) / (x.max() - x.min()))[0].permute(1, 2, 0).to(torch.uint8)
    buffer = io.BytesIO()
    Image.fromarray(x.numpy()).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def centre(image: Image.Image) -> Image.Image:
    left, top = (image.width - 224) // 2, (image.height - 224) // 2
    return image.crop((left, top, left + 224, top + 224))


def shorter_to(image: Image.Image, side: int) -> tuple[int, int]:
    scale = side / min(image.size)
    return round(image.width * scale), round(image.height * scale)


def pillow(data: bytes) -> None:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    centre(image.resize(shorter_to(image, 256), BICUBIC))


def pillow_draft(data: bytes) -> None:
    image = Image.open(io.BytesIO(data))
    image.draft("RGB", (256, 256))
    image = image.convert("RGB")
    centre(image.resize(shorter_to(image, 256), BICUBIC))


def pillow_box(data: bytes) -> None:
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = min(image.size) * 224 / 256
    left, top = (image.width - side) / 2, (image.height - side) / 2
    image.resize((224, 224), BICUBIC, box=(left, top, left + side, top + side))


def vitral_eval(data: bytes) -> None:
    eval_transform(read_image(data, "rgb", decode_size(P)), P)


def vitral_train(data: bytes) -> None:
    noise = Noise(0, torch.tensor([1]))
    random_resized_crop(read_image(data, "rgb", decode_size(P, 0.25)), P, noise, (0.25, 1.0), (3 / 4, 4 / 3))


def torchvision_v2(interpolation: str) -> Callable[[bytes], None]:
    """Pillow's decoder, then torchvision's transforms on the uint8 tensor; it has no decoder in this build."""
    mend_torchvision()
    from torchvision.transforms import v2

    mode = v2.InterpolationMode(interpolation)
    after = v2.Compose([v2.PILToTensor(), v2.Resize(256, mode, antialias=True), v2.CenterCrop(224)])
    return lambda data: after(Image.open(io.BytesIO(data)).convert("RGB"))


RIVALS: dict[str, Callable[[bytes], None]] = {
    "Pillow": pillow,
    "Pillow, box=": pillow_box,
    "Pillow, draft": pillow_draft,
    "torchvision v2": torchvision_v2("bicubic"),
    "vitral, evaluation": vitral_eval,
    "vitral, random crop": vitral_train,
}


def torch_batches(loader: TrainLoader, start: str) -> Iterator[Any]:
    """The same batches by processes of torch's DataLoader, which are started once."""
    plans = list(itertools.islice(loader._plans(0), 1000))
    feed: Any = loader.feed
    yield from DataLoader(
        feed, batch_size=None, sampler=plans, num_workers=loader.workers, prefetch_factor=4, collate_fn=None,
        multiprocessing_context=start,
    )  # fmt: skip


READERS: dict[str, tuple[int, Callable[[TrainLoader], Iterator[Any]]]] = {
    "no workers": (0, lambda loader: loader.batches(0)),
    "2 threads (vitral)": (2, lambda loader: loader.batches(0)),
    "2 processes, fork": (2, lambda loader: torch_batches(loader, "fork")),
    "2 processes, forkserver": (2, lambda loader: torch_batches(loader, "forkserver")),
    "2 processes, spawn": (2, lambda loader: torch_batches(loader, "spawn")),
}


def measure_workers(rounds: int = 5, batches: int = 12, batch_size: int = 32) -> dict[str, dict[str, float]]:
    """Seconds until the first batch, and images per second after it."""
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in READERS}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(512):
            path = Path(folder) / "ab"[i % 2] / f"{i}.jpg"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(
                make_jpeg(500, 400, seed=i) if i < 16 else (Path(folder) / "ab"[i % 2] / f"{i % 16}.jpg").read_bytes()
            )
        data = open_data(folder).with_splits(0.1, 0.1, seed=0)
        for _ in range(rounds):
            for name, (workers, read) in READERS.items():
                loader = TrainLoader(
                    data, ImageInputs(P), Augmentation(crop_scale=0.3), batch_size, 0, False, workers, 0, 1
                )
                began = time.perf_counter()
                with closing(read(loader)) as reader:  # type: ignore[type-var]
                    next(reader)
                    first = time.perf_counter()
                    for _ in range(batches):
                        next(reader)
                    ended = time.perf_counter()
                measured[name].append((first - began, batches * batch_size / (ended - first)))
    middle = rounds // 2
    return {
        name: {
            "first_batch_seconds": sorted(start for start, _ in values)[middle],
            "images_per_second": sorted(speed for _, speed in values)[middle],
        }
        for name, values in measured.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for width, height in ((500, 400), (2000, 1600)):
        data = make_jpeg(width, height)
        times: dict[str, list[float]] = {name: [] for name in RIVALS}
        for _ in range(25):
            for name, decode in RIVALS.items():
                began = time.process_time()
                for _ in range(4):
                    decode(data)
                times[name].append((time.process_time() - began) / 4)
        speed = {name: 1 / sorted(values)[len(values) // 2] for name, values in times.items()}
        results[f"{width}x{height}"] = speed
        print(f"{width} x {height}, {len(data) / 1000:.0f} kB: images per CPU second")
        for name, value in speed.items():
            print(f"  {name:20} {value:8.0f}   {value / speed['Pillow']:.2f} times plain Pillow")
    workers = measure_workers()
    print("training batches of 32 from 500 x 400 JPEGs")
    for name, row in workers.items():
        print(f"  {name:24} {row['images_per_second']:6.0f} images/s, first batch {row['first_batch_seconds']:.2f} s")
    print(f"wrote {write_json('loader', {'images_per_cpu_second': results, 'workers': workers})}")


if __name__ == "__main__":
    main()
