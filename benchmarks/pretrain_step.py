"""Pretraining: what a DINO step costs beyond its passes, what MAE saves by hiding patches, what recomputing saves.

    python benchmarks/pretrain_step.py [--seconds 60] [--json]
    python benchmarks/pretrain_step.py --dino vit_micro_conv_patch8_32:64 --mae --memory    (one row, the rest left out)

- DINO: the step as the loop does it, over the plain sum of its passes (teacher forward on the large crops, student
  forward and backward on the large and on the small ones; the same model, heads and crops, the sum of the logits as
  loss). Once with crops that are ready, once read and augmented by vitral, as its recipe says, from images in memory of
  the model's size. Bar: 15 % more without data.
- MAE: loss and backward with 75 % hidden, decoder included, beside the whole encoder's forward and backward on the same
  images (the mean of the tokens as loss). Bar: 2.2 times as fast.
- Memory: what a DINO step of the loop adds to the process at its peak, with and without recomputing the blocks; each in
  processes of its own, after a step on two images that makes the optimiser's state. (Not by ru_maxrss, which a child
  inherits from the process that started it.)

Times are interleaved within one run; a ratio is the median of the ratios within a round, with its quartiles. --json
writes benchmarks/results/pretrain_step.json.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from measure import interleave, write_json
from vitral.config import Augmentation, DINOOptions, PretrainConfig, pair
from vitral.data.augment import Mixed
from vitral.data.crops import CropInputs, Crops
from vitral.data.inputs import Batch
from vitral.data.loader import TrainLoader
from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray
from vitral.models.zoo import model_spec
from vitral.recipes import read_recipe
from vitral.training.distributed import Processes
from vitral.training.loop import Hooks, fit
from vitral.training.pretrain import make_method

OVERHEAD_BAR, MAE_BAR, WARM_UP = 0.15, 2.2, 2
ALONE = Processes(0, 1)
DINO_SIZES = ["vit_micro_conv_patch8_32:64", "vit_small_patch16_224:8"]
MAE_SIZES = [
    "vit_tiny_patch16_224:8", "vit_small_patch16_224:8", "vit_lite_patch4_32:64", "vit_lite_conv_patch4_32:64",
]  # fmt: skip
MEMORY_SIZES = ["vit_small_patch16_224:8"]
Measure = Callable[[str, int], dict[str, Any]]
"""A row of the table, for a model and a batch."""
Tell = Callable[[dict[str, Any]], None]
"""Prints it."""


def sizes(text: str) -> tuple[str, int]:
    """ "name:batch"."""
    name, _, batch = text.partition(":")
    return name, int(batch)


def within(above: list[float], below: list[float]) -> dict[str, float]:
    """The median of the ratios within a round, their quartiles, and how many they are."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {"ratio": median, "low": low, "high": high, "rounds": len(ratios)}


# ---- DINO in the loop ----


class Clocked(CropInputs):
    """Crops that are augmented by the clock; those that are floats already stay as they are."""

    seconds = 0.0

    def augment(self, inputs: Crops, noise: Noise, a: Augmentation, mirror: bool) -> Mixed:
        """Each crop by itself, or none."""
        began = time.perf_counter()
        if inputs.large.is_floating_point():
            mixed = Mixed(inputs, torch.ones(len(inputs.large)))
        else:
            mixed = super().augment(inputs, noise, a, mirror)
        self.seconds = time.perf_counter() - began
        return mixed


class Handed(TrainLoader):
    """Gives the loop what it is handed."""

    source: Iterator[Batch]

    def batches(self, step: int) -> Iterator[Batch]:
        """As long as there are any."""
        return self.source


class Distillation:
    """DINO on random images, as `vitral pretrain` sets it up, and one batch of crops that is ready for the model."""

    def __init__(self, name: str, batch: int, recompute: bool = False) -> None:
        side = pair(model_spec(name).config.img_size)
        # The last layer learns from the first step on, as it does in all epochs but the first.
        options = DINOOptions(local_size=96 if side == (224, 224) else None, freeze_last_epochs=0)
        augment = Augmentation.from_dict(read_recipe("pretrain-dino")["augment"])
        self.config = PretrainConfig(
            model=name, batch_size=batch, epochs=10**6, dino=options, augment=augment, checkpoint_blocks=recompute
        )
        self.method: Any = make_method(self.config, 3, ALONE)
        vit = self.method.learner
        self.inputs = Clocked(vit.preprocess, options, vit.config.patch)
        pixels = torch.randint(0, 256, (16 * batch, 3, *side), dtype=torch.uint8)
        nothing, everything = torch.zeros(len(pixels), 0), torch.arange(len(pixels))
        data = Data("random", ImageArray(pixels), nothing, [], {"train": everything}, kind="none")
        self.loader = Handed(data, self.inputs, augment, batch, 0, False, 0, 0, 1)
        first = next(self.from_memory())
        crops = self.inputs.augment(first.inputs, Noise(0, first.samples), augment, mirror=True).inputs
        self.ready = Batch(crops, first.targets, first.samples, [])

    def from_memory(self) -> Iterator[Batch]:
        """Batches as vitral's loader reads them."""
        return TrainLoader.batches(self.loader, 0)

    def run(self, batches: Iterator[Batch]) -> None:
        """A step of the loop for each batch."""
        self.loader.source = batches
        hooks = Hooks(lambda line: None, None, lambda checkpoint: None, lambda: None, print, lambda: False)
        model = self.method.model
        state = fit(model, self.method, self.loader, self.config, hooks, ALONE, torch.device("cpu"), None)
        assert state.skipped == 0

    def plain_passes(self) -> dict[str, float]:
        """Seconds of each pass of a step alone."""
        student, teacher = self.method.model.student, self.method.model.teacher
        large, small = self.ready.inputs.large.flatten(0, 1), self.ready.inputs.small.flatten(0, 1)

        @torch.no_grad()
        def teach() -> None:
            teacher(large)

        def learn(crops: Tensor) -> None:
            student(crops)[1].sum().backward()

        calls = {"teacher": teach, "large": partial(learn, large), "small": partial(learn, small)}
        seconds = {}
        for what, call in calls.items():
            began = time.perf_counter()
            call()
            seconds[what] = time.perf_counter() - began
            drop_gradients(student)
        return seconds


def drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


@dataclass
class Rounds:
    """Seconds, round by round."""

    step: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    augment: list[float] = field(default_factory=list)
    passes: list[dict[str, float]] = field(default_factory=list)

    def clocked(self, run: Distillation, source: Iterator[Batch], seconds: float, least: int) -> Iterator[Batch]:
        """Batches for the loop, the plain passes before each; a step lasts until the loop asks for the next batch."""
        start = time.perf_counter()
        while len(self.step) < least + WARM_UP or time.perf_counter() - start < seconds:
            self.passes.append(run.plain_passes())
            began = time.perf_counter()
            batch = next(source)
            self.read.append(time.perf_counter() - began)
            yield batch
            self.step.append(time.perf_counter() - began)
            self.augment.append(run.inputs.seconds)

    def summary(self) -> dict[str, Any]:
        """Medians, and the step over the sum of the passes."""
        passes = self.passes[WARM_UP:]
        seconds = {what: statistics.median(p[what] for p in passes) for what in passes[0]}
        for what in ("step", "read", "augment"):
            seconds[what] = statistics.median(getattr(self, what)[WARM_UP:])
        return {"seconds": seconds, **within(self.step[WARM_UP:], [sum(p.values()) for p in passes])}


def measure_dino(name: str, batch: int, seconds: float, least: int) -> dict[str, Any]:
    """The step with crops that are ready, and with crops that are made for it."""
    sources: dict[str, Callable[[Distillation], Iterator[Batch]]] = {
        "ready": lambda run: itertools.repeat(run.ready),
        "from memory": Distillation.from_memory,
    }
    row: dict[str, Any] = {"model": name, "batch": batch}
    for what, source in sources.items():
        run, rounds = Distillation(name, batch), Rounds()
        run.run(rounds.clocked(run, source(run), seconds, least))
        row |= {"crops": run.inputs.size, what: rounds.summary()}
    return row


def tell_dino(row: dict[str, Any]) -> None:
    print(f"  {row['model']}, batch {row['batch']}, {row['crops']}")
    for what, words in (("ready", "without data"), ("from memory", "with data")):
        r, ms = row[what], {k: f"{1000 * v:.0f} ms" for k, v in row[what]["seconds"].items()}
        print(
            f"    {words:12}  step {ms['step']} over teacher {ms['teacher']}, large crops {ms['large']}, small "
            f"{ms['small']}: {r['ratio'] - 1:+.1%} (quartiles {r['low'] - 1:+.1%} to {r['high'] - 1:+.1%}, "
            f"{r['rounds']} rounds)"
        )
    ms = {k: f"{1000 * v:.0f} ms" for k, v in row["from memory"]["seconds"].items()}
    print(
        f"    the data: reading and cutting {ms['read']}, augmentation {ms['augment']}; "
        f"without them the step {verdict(row['ready']['ratio'] - 1 <= OVERHEAD_BAR)}"
    )


def verdict(holds: bool) -> str:
    return "is within the bar" if holds else "misses the bar"


# ---- MAE beside its whole encoder ----


def measure_mae(name: str, batch: int, seconds: float) -> dict[str, Any]:
    """How many times as fast an image goes through MAE as through the encoder."""
    method: Any = make_method(PretrainConfig(model=name, method="mae"), 3, ALONE)
    method.model.train()
    x, targets = torch.randn(batch, 3, *pair(method.backbone.config.img_size)), torch.zeros(batch, 0)
    counter = itertools.count()

    def mae() -> None:
        drop_gradients(method.model)
        noise = Noise(0, torch.arange(batch) + batch * next(counter))
        method.loss(method.forward(method.model, x, targets, noise), targets, targets, torch.ones(batch)).backward()

    def encoder() -> None:
        drop_gradients(method.model)
        method.backbone.forward_features(x).mean().backward()

    times = interleave({"encoder": encoder, "mae": mae}, seconds)
    speed = {who: batch / statistics.median(values) for who, values in times.items()}
    result = {"model": name, "batch": batch, "hidden": method.config.mae.mask_ratio, "images_per_second": speed}
    return result | within(times["encoder"], times["mae"])


def tell_mae(row: dict[str, Any]) -> None:
    speed = row["images_per_second"]
    print(
        f"  {row['model']}, batch {row['batch']}: {speed['mae']:.1f} images/s, whole encoder {speed['encoder']:.1f}; "
        f"{row['ratio']:.2f} times as fast (quartiles {row['low']:.2f} to {row['high']:.2f}, {row['rounds']} rounds); "
        f"{verdict(row['ratio'] >= MAE_BAR)}"
    )


# ---- memory ----


def status(key: str) -> int:
    """A line of this process's status, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))


def step_memory(name: str, batch: int, recompute: bool) -> int:
    """Bytes that a step adds to this process at its peak."""
    run, found = Distillation(name, batch, recompute), []

    def batches() -> Iterator[Batch]:
        ready = run.ready
        yield Batch(ready.inputs[:2], ready.targets[:2], ready.samples[:2], [])
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = status("VmRSS")
        yield ready
        found.append(status("VmHWM") - before)

    run.run(batches())
    return found[0]


def in_child(name: str, batch: int, recompute: bool) -> int:
    """`step_memory` in a process of its own."""
    here = str(Path(__file__).parent)
    code = f"import sys; sys.path.insert(0, {here!r}); import pretrain_step as p; "
    code += f"print(p.step_memory({name!r}, {batch}, {recompute}))"
    # Freed tensors go back to the system at once, so that what is measured is what is in use, not what the heap keeps.
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=exact)
    return json.loads(done.stdout.splitlines()[-1])


def measure_memory(name: str, batch: int, children: int) -> dict[str, Any]:
    """Peaks of a step in several processes each, taken in turn."""
    peaks: dict[str, list[float]] = {"kept": [], "recomputed": []}
    for _ in range(children):
        peaks["kept"].append(in_child(name, batch, False))
        peaks["recomputed"].append(in_child(name, batch, True))
    middle = {how: statistics.median(values) for how, values in peaks.items()}
    share = middle["recomputed"] / middle["kept"]
    return {"model": name, "batch": batch, "peak_bytes": middle, "all_peak_bytes": peaks, "ratio": share}


def tell_memory(row: dict[str, Any]) -> None:
    kept, recomputed = (
        f"{row['peak_bytes'][how] / 1e6:.0f} MB ({min(values) / 1e6:.0f} to {max(values) / 1e6:.0f})"
        for how, values in row["all_peak_bytes"].items()
    )
    print(f"  {row['model']}, batch {row['batch']}: {kept}, blocks recomputed {recomputed}: {row['ratio']:.2f} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="time for each row; twice that for DINO's")
    parser.add_argument("--least", type=int, default=7, help="rounds of DINO's rows, however long they take")
    parser.add_argument("--children", type=int, default=3, help="processes for each figure of memory")
    parser.add_argument("--dino", nargs="*", type=sizes, default=[sizes(s) for s in DINO_SIZES], metavar="MODEL:BATCH")
    parser.add_argument("--mae", nargs="*", type=sizes, default=[sizes(s) for s in MAE_SIZES], metavar="MODEL:BATCH")
    memory = [sizes(s) for s in MEMORY_SIZES]
    parser.add_argument("--memory", nargs="*", type=sizes, default=memory, metavar="MODEL:BATCH")
    parser.add_argument("--json", action="store_true", help="write benchmarks/results/pretrain_step.json")
    o = parser.parse_args()

    result: dict[str, Any] = {}
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}")
    parts: list[tuple[str, str, Measure, Tell]] = [
        (
            "dino",
            f"a DINO step over the plain sum of its passes (bar: {OVERHEAD_BAR:.0%} more, without data)",
            partial(measure_dino, seconds=o.seconds, least=o.least),
            tell_dino,
        ),
        (
            "mae",
            f"MAE beside the whole encoder, forward and backward (bar: {MAE_BAR} times as fast)",
            partial(measure_mae, seconds=o.seconds),
            tell_mae,
        ),
        (
            "memory",
            "memory that a DINO step adds at its peak",
            partial(measure_memory, children=o.children),
            tell_memory,
        ),
    ]
    for key, title, measure, tell in parts:
        asked = getattr(o, key)
        if asked:
            print(title)
        for name, batch in asked:
            row = measure(name, batch)
            tell(row)
            result.setdefault(key, []).append(row)
    if o.json:
        print(f"wrote {write_json('pretrain_step', result)}")


if __name__ == "__main__":
    main()
