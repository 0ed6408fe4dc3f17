"""A training step: vitral's loop beside the bare step of the same model, and of timm's in a plain loop.

    python benchmarks/train_step.py [--rounds 4] [--steps 4]

S/16 at 224, batch 8, AdamW (fused), clipping and EMA on every side; blocks of steps interleaved, medians. The loop does
more than the bare step: it reads and normalises images, logs, and looks for signals. Writes
benchmarks/results/train_step.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from measure import write_json
from peers import import_timm
from vitral import create_model
from vitral.config import Augmentation, TrainConfig
from vitral.data.loader import TrainLoader
from vitral.data.sources.base import Data, ImageArray
from vitral.tasks.classify import Classify
from vitral.training.distributed import Processes
from vitral.training.ema import EMA
from vitral.training.loop import Hooks, fit

NAME, BATCH, CLASSES = "vit_small_patch16_224", 8, 1000


def loop_steps(model: nn.Module, steps: int) -> list[float]:
    """Seconds of each step of vitral's own loop."""
    pixels = torch.randint(0, 256, (BATCH * steps, 3, 224, 224), dtype=torch.uint8)
    labels = [str(i) for i in range(CLASSES)]
    data = Data("random", ImageArray(pixels), torch.arange(len(pixels)), labels, {"train": torch.arange(len(pixels))})
    config = TrainConfig(epochs=1, batch_size=BATCH, log_steps=1)
    preprocess = replace(model.preprocess, crop_mode="squash")  # type: ignore[type-var]  # no resize: the step is measured
    loader = TrainLoader(data, preprocess, Augmentation(), BATCH, 0, False, 0, 0, 1)  # type: ignore[arg-type]
    times = [time.perf_counter()]
    hooks = Hooks(
        lambda line: times.append(time.perf_counter()), None, lambda c: None, lambda: None, print, lambda: False
    )
    fit(model, Classify(labels), loader, preprocess, config, hooks, Processes(0, 1), torch.device("cpu"), None)  # type: ignore[arg-type]
    return [b - a for a, b in pairwise(times)][1:]  # the first has the set-up in it


def bare_steps(model: nn.Module, steps: int) -> list[float]:
    """Seconds of each step with nothing but the step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ema, parameters = EMA(model, 0.99), list(model.parameters())
    x, y = torch.randn(BATCH, 3, 224, 224), torch.arange(BATCH)
    model.train()
    times = []
    for _ in range(steps):
        began = time.perf_counter()
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update()
        times.append(time.perf_counter() - began)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    timm_model = import_timm().create_model(NAME)
    rivals: dict[str, Callable[[], list[float]]] = {
        "vitral loop": lambda: loop_steps(create_model(NAME, seed=0), options.steps + 1),
        "vitral bare": lambda: bare_steps(create_model(NAME, seed=0), options.steps + 1),
        "timm bare": lambda: bare_steps(timm_model, options.steps + 1),
    }
    times: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    for _ in range(options.rounds):
        for name in names:
            times[name] += rivals[name]()
        names = names[1:] + names[:1]
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        spread = statistics.stdev(times[name]) / len(times[name]) ** 0.5
        print(f"{name:12} {1000 * value:8.0f} ± {1000 * spread:.0f} ms a step, {BATCH / value:6.2f} images/s")
    overhead = median["vitral loop"] / median["vitral bare"] - 1
    against_timm = median["timm bare"] / median["vitral loop"]
    print(f"overhead of the loop {overhead:+.1%}; {against_timm:.3f} times as fast as timm's model in a bare loop")
    result = {"seconds": median, "overhead": overhead, "against_timm": against_timm, "steps": len(times["timm bare"])}
    print(f"wrote {write_json('train_step', result)}")


if __name__ == "__main__":
    main()
