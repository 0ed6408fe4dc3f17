"""A training step: vitral's loop beside the bare step of the same model, and of timm's in a plain loop.

    python benchmarks/train_step.py [--rounds 24] [--patch-drop 0.5]

S/16 at 224, batch 8, AdamW (fused), clipping and EMA on every side. After each step of the loop the rivals take one
step each, so that all three see the same machine at the same time; the figures are medians, the ratios medians of the
ratios within a round. The loop does more than the bare step: it reads and normalises images, logs, and looks for
signals. With --patch-drop a bare step that leaves that share of the patches out takes part too. Writes
benchmarks/results/train_step.json, or with --patch-drop train_step_patch_drop.json.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from measure import write_json
from peers import import_timm
from vitral import create_model
from vitral.config import Augmentation, TrainConfig
from vitral.data.inputs import ImageInputs
from vitral.data.loader import TrainLoader
from vitral.data.sources.base import Data, ImageArray
from vitral.tasks.classify import Classify
from vitral.training.distributed import Processes
from vitral.training.ema import EMA
from vitral.training.loop import Hooks, fit

NAME, BATCH, CLASSES, WARM_UP = "vit_small_patch16_224", 8, 1000, 2
FEWER = "fewer patches"


def run_loop(steps: int, after_step: Callable[[], None]) -> None:
    """Steps of vitral's own loop, with a call after each."""
    model = create_model(NAME, seed=0)
    pixels = torch.randint(0, 256, (BATCH * steps, 3, 224, 224), dtype=torch.uint8)
    labels = [str(i) for i in range(CLASSES)]
    everything = torch.arange(len(pixels))
    data = Data("random", ImageArray(pixels), everything % CLASSES, labels, {"train": everything})
    config = TrainConfig(epochs=1, batch_size=BATCH, log_steps=1)
    preprocess = replace(model.preprocess, crop_mode="squash")  # no resize: the step is measured
    loader = TrainLoader(data, ImageInputs(preprocess), Augmentation(), BATCH, 0, False, 0, 0, 1)
    hooks = Hooks(lambda line: after_step(), None, lambda c: None, lambda: None, print, lambda: False)
    fit(model, Classify(labels), loader, config, hooks, Processes(0, 1), torch.device("cpu"), None)


def bare_steps(model: nn.Module) -> Iterator[None]:
    """Nothing but the step, one each time it is asked for."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    ema, parameters = EMA(model, 0.99), list(model.parameters())
    x, y = torch.randn(BATCH, 3, 224, 224), torch.arange(BATCH)
    model.train()
    while True:
        nn.functional.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ema.update()
        yield


def measure(rounds: int, patch_drop: float) -> dict[str, list[float]]:
    """Seconds of each rival's step, round by round."""
    rivals = {
        "vitral bare": bare_steps(create_model(NAME, seed=0)),
        "timm bare": bare_steps(import_timm().create_model(NAME)),
    }
    if patch_drop:
        rivals[FEWER] = bare_steps(create_model(NAME, seed=0, patch_drop_rate=patch_drop))
    times: dict[str, list[float]] = {name: [] for name in ("vitral loop", *rivals)}
    began = time.perf_counter()

    def after_step() -> None:
        nonlocal began
        times["vitral loop"].append(time.perf_counter() - began)
        turn = len(times["vitral loop"]) % 2
        for name, steps in sorted(rivals.items(), reverse=bool(turn)):
            began = time.perf_counter()
            next(steps)
            times[name].append(time.perf_counter() - began)
        began = time.perf_counter()

    run_loop(rounds + WARM_UP, after_step)
    return {name: values[WARM_UP:] for name, values in times.items()}


def ratio(above: list[float], below: list[float]) -> tuple[float, float]:
    """The median of the ratios within a round, and its standard error."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return statistics.median(ratios), 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--patch-drop", type=float, default=0.0)
    options = parser.parse_args()
    times = measure(options.rounds, options.patch_drop)
    median = {name: statistics.median(values) for name, values in times.items()}
    for name, value in median.items():
        print(f"{name:13} {1000 * value:8.0f} ms a step, {BATCH / value:6.2f} images/s")
    loop, error = ratio(times["vitral loop"], times["vitral bare"])
    timm, timm_error = ratio(times["timm bare"], times["vitral loop"])
    print(
        f"overhead of the loop {loop - 1:+.1%} ± {error:.1%}; {timm:.3f} ± {timm_error:.3f} times as fast as timm bare"
    )
    result: dict[str, Any] = {"seconds": median, "overhead": loop - 1, "overhead_error": error}
    result |= {"against_timm": timm, "against_timm_error": timm_error, "rounds": options.rounds}
    if options.patch_drop:
        fewer, fewer_error = ratio(times["vitral bare"], times[FEWER])
        print(f"without {options.patch_drop:.0%} of the patches {fewer:.2f} ± {fewer_error:.2f} times as fast")
        result |= {"patch_drop": options.patch_drop, "against_all_patches": fewer, "patch_drop_error": fewer_error}
    print(f"wrote {write_json('train_step_patch_drop' if options.patch_drop else 'train_step', result)}")


if __name__ == "__main__":
    main()
