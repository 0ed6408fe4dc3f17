"""A folder of JPEGs from files to answers: vitral's predictor beside a plain loop of Pillow and timm.

    python benchmarks/predict_folder.py [--images 2000] [--threads 2]

Files of 500 x 400, made here; S/16 with the same weights, batches of 32. The folder is cut into parts, and each part
goes through every rival in turn, the plain loop in a process of its own; the figures are images per second of all
parts, the ratios medians over parts. Writes benchmarks/results/predict_folder.json.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from loader import BICUBIC, centre, make_jpeg, shorter_to
from measure import write_json
from peers import import_timm
from sides import Side
from vitral import Predictor, create_model, load_model, save_model
from vitral.config import Preprocess

NAME, BATCH, PARTS, WARM_UP = "vit_small_patch16_224", 32, 10, 8
PLAIN = "timm and Pillow"
WAYS: dict[str, dict[str, Any]] = {
    "vitral": {}, "vitral, no workers": {"workers": 0}, "vitral, eager": {"engine": "eager"}
}  # fmt: skip
P = Preprocess(img_size=224, crop_pct=0.875)


def plain_loop(model: nn.Module, paths: Sequence[Path]) -> list[float]:
    """The likeliest class's probability for each file, as one would write it in a few lines."""
    mean, std = np.array(P.mean, np.float32), np.array(P.std, np.float32)

    def read(path: Path) -> Tensor:
        image = Image.open(path).convert("RGB")
        pixels = np.asarray(centre(image.resize(shorter_to(image, 256), BICUBIC)), np.float32) / 255
        return torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)

    found = []
    with torch.inference_mode():
        for start in range(0, len(paths), BATCH):
            logits = model(torch.stack([read(path) for path in paths[start : start + BATCH]]))
            found += logits.softmax(1).amax(1).tolist()
    return found


def predict(predictor: Predictor, paths: Sequence[Path]) -> list[float]:
    """The same by vitral."""
    answers: list[Any] = list(predictor.stream(paths, top_k=1))
    return [answer.probabilities[0] for answer in answers]


def make_plain(source: Path, threads: int) -> dict[str, Callable[[Sequence[Path]], list[float]]]:
    """timm's model with our weights."""
    torch.set_num_threads(threads)
    timm_model = import_timm().create_model(NAME).eval()
    timm_model.load_state_dict(load_model(source).state_dict())
    return {PLAIN: partial(plain_loop, timm_model)}


def make_ours(source: Path, threads: int, ways: Sequence[str]) -> dict[str, Callable[[Sequence[Path]], list[float]]]:
    """The predictor as it comes, waiting for every image, and in torch as it is."""
    torch.set_num_threads(threads)
    return {name: partial(predict, Predictor(source, **WAYS[name])) for name in ways}


def measure(paths: list[Path], source: Path, threads: int, ways: Sequence[str]) -> tuple[dict[str, list[float]], float]:
    """Seconds of each rival for each part, and the largest difference of an answer from the plain loop's."""
    sides = [Side(make_plain, source, threads), Side(make_ours, source, threads, ways)]
    rivals = {name: partial(side.call, name) for side in sides for name in side.names}
    names, size = list(rivals), -(-len(paths) // PARTS)
    times: dict[str, list[float]] = {name: [] for name in names}
    difference = 0.0
    for rival in rivals.values():
        rival(paths[:WARM_UP])
    for start in range(0, len(paths), size):
        part, found = paths[start : start + size], {}
        for name in names:
            began = time.perf_counter()
            found[name] = rivals[name](part)
            times[name].append(time.perf_counter() - began)
        names = names[1:] + names[:1]
        difference = max(difference, *(abs(a - b) for a, b in zip(found["vitral"], found[PLAIN], strict=True)))
    for side in sides:
        side.close()
    return times, difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=["vitral"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{i:05}.jpg" for i in range(options.images)]
        for i, path in enumerate(paths):
            path.write_bytes(make_jpeg(500, 400, seed=i))
        model = create_model(NAME, seed=0)
        nn.init.normal_(model.get_parameter("head.weight"), std=0.1)  # tells classes apart
        model.preprocess = P
        save_model(model, Path(folder) / "run", layout="vitral")
        times, difference = measure(paths, Path(folder) / "run", options.threads, options.ways)
    result: dict[str, Any] = {"images": options.images, "largest_difference": difference, "rivals": {}}
    for name, seconds in times.items():
        ratios = [a / b for a, b in zip(times[PLAIN], seconds, strict=True)]
        speed, ratio = options.images / sum(seconds), statistics.median(ratios)
        spread = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else 0.0
        print(f"{name:20} {speed:7.1f} images/s, {ratio:.2f} ± {spread:.2f} times the plain loop")
        result["rivals"][name] = {"images_per_second": speed, "ratio": ratio, "ratio_error": spread}
    print(f"largest difference of a probability {difference:.1e}; wrote {write_json('predict_folder', result)}")


if __name__ == "__main__":
    main()
