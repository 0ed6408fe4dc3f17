"""What to train when nobody says so: model, image size, batch size, epochs and warm-up, chosen from the data.

Every rule is a function of a few facts about the data, the task and the machine; `choose` is where they meet.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from vitral.config import TrainConfig
from vitral.data.sources.base import Data
from vitral.errors import ImageError, VitralError
from vitral.models.cost import model_cost
from vitral.models.zoo import model_spec

AUTO = "auto"
PRETRAINED = ("vit_small_patch14_dinov2.lvd142m", "vit_small_patch14_focus")
"""Published weights that are tried, the best first."""
SMALL = 32
"""Shorter side, in pixels, up to which images are too small for pretrained weights to help."""
SAMPLE = 48
"""Images whose size is measured."""
ENLARGED = 1.2
"""How far small images are enlarged: more and smaller patches help even if the pixels are few."""
MEMORY_SHARE = 0.6
"""Share of the machine's memory that a step may take."""


@dataclass(frozen=True)
class Facts:
    """What is known about the data."""

    images: int
    """Training images."""
    side: int
    """Median of the shorter sides, in pixels."""
    channels: int
    task: str

    @property
    def small(self) -> bool:
        """Whether the images are grey or tiny, so that a small model from scratch is the better choice."""
        return self.channels == 1 or self.side <= SMALL


@dataclass(frozen=True)
class Choice:
    """Options of `TrainConfig`, and why they were chosen."""

    options: Mapping[str, Any]
    reason: str
    override: str

    @property
    def lines(self) -> list[str]:
        """What to print: the choice with its reason, and how to override it."""
        return [f"chosen: {self.reason}", f"override: {self.override}"]


def survey(data: Data, task: str) -> Facts:
    """Measure the data: a sample of its images, evenly spread over the training part."""
    train = data.splits["train"]
    sides = []
    for index in train[:: max(1, len(train) // SAMPLE)].tolist():
        try:
            sides.append(min(data.images.read(index, data.mode).shape[1:]))
        except ImageError:
            continue
    return Facts(len(train), int(median(sides)) if sides else 0, data.in_chans, task)


def choose(
    facts: Facts,
    find_weights: Callable[[str], bool],
    given: Mapping[str, Any] | None = None,
    memory: int | None = None,
) -> Choice:
    """Choose for these facts.

    Args:
        facts: What is known about the data.
        find_weights: Whether published weights of a name are on this machine or can be downloaded.
        given: Options that the user gives: other options follow from them, such as the warm-up from the epochs.
        memory: Bytes of memory; by default those of this machine.
    """
    given = given or {}
    if facts.small:
        return _fitted(_small(facts, given), facts, memory)
    weights = next(filter(find_weights, PRETRAINED), None) if facts.task != "caption" else None
    choice = _pretrained(facts, given, weights) if weights else _scratch(facts, given)
    return _fitted(choice, facts, memory)


# ---- three ways to train ----


def _pretrained(facts: Facts, given: Mapping[str, Any], weights: str) -> Choice:
    """Fine-tune published weights, after a linear probe of their features."""
    size = given.get("img_size") or image_size(facts)
    batch = given.get("batch_size") or (16 if facts.images < 1000 else 32)
    steps = 260 if facts.task == "regress" else 320  # a number needs less than classes
    epochs = given.get("epochs") or epochs_for(steps, facts.images, batch, low=4, high=40)
    options = {
        "model": weights, "img_size": size, "batch_size": batch, "epochs": epochs, "warmup_epochs": epochs / 10,
        "optimizer": "adamw", "lr": 2e-4, "layer_decay": 0.75, "weight_decay": 0.05, "ema": 0.98,
        "freeze_layers": 0 if given.get("lora") else 4, "drop_path_rate": 0.1, "augment": _augmentation(facts.task),
    }  # fmt: skip
    if facts.task in PROBED:
        options |= {"probe": "first", "crop": "squash", "pool": "cls_mean", "pool_layers": 6}
    if facts.task == "classify":
        options["label_smoothing"] = 0.1
    reason = f"{weights} at {size} pixels, fine-tuned for {epochs} epochs of batches of {batch}, because the "
    reason += f"{facts.images:,} training images are in colour and about {facts.side} pixels high or wide"
    return Choice(options, reason, "--model vit_lite_conv_patch4_32 trains from scratch; --preset probe stops early")


PROBED = ("classify", "multilabel", "regress")
"""Tasks whose head is one linear layer on the pooled features."""


def _scratch(facts: Facts, given: Mapping[str, Any]) -> Choice:
    """Train a small model from scratch at a moderate size: nothing pretrained can be had."""
    batch = given.get("batch_size") or (32 if facts.images < 2000 else 64)
    epochs = given.get("epochs") or epochs_for(3000, facts.images, batch, low=20, high=300)
    options = {
        "model": "vit_micro_conv_patch8_64", "batch_size": batch, "epochs": epochs, "warmup_epochs": epochs / 20,
        "optimizer": "muon", "lr": 2e-3, "muon_lr": 0.01, "weight_decay": 0.05, "ema": 0.995,
        "eval_every": max(1, epochs // 30), "crop": "squash" if facts.task in PROBED else None,
        "augment": _augmentation(facts.task),
    }  # fmt: skip
    if facts.task == "classify":
        options |= {"label_smoothing": 0.1, "augment": STRONG}
    reason = f"vit_micro_conv_patch8_64 from scratch for {epochs} epochs, because no pretrained weights are cached and "
    reason += "the hub cannot be reached"
    return Choice(options, reason, f"vitral fetch {PRETRAINED[-1]} gets weights that usually double the accuracy")


def _small(facts: Facts, given: Mapping[str, Any]) -> Choice:
    """Train a small model from scratch: the images are grey or tiny."""
    usual = 32 if facts.images < 2000 else 64 if facts.images < 10_000 else TrainConfig().batch_size
    batch = given.get("batch_size") or usual
    epochs = given.get("epochs") or epochs_for(2000, facts.images, batch, low=TrainConfig().epochs, high=200)
    options = {
        "model": "vit_lite_conv_patch4_32", "batch_size": batch, "epochs": epochs, "warmup_epochs": epochs / 20,
        "eval_every": max(1, epochs // 30),
    }  # fmt: skip
    kind = "grey" if facts.channels == 1 else f"only about {facts.side} pixels high or wide"
    reason = f"vit_lite_conv_patch4_32 from scratch for {epochs} epochs, because the images are {kind}"
    return Choice(options, reason, "--model NAME; vitral models --pretrained lists published weights")


STRONG = {
    "crop_scale": 0.3, "flip": 0.5, "color_jitter": 0.2, "policy": "trivial", "erasing": 0.2,
    "mixup": 0.8, "cutmix": 1.0,
}  # fmt: skip
"""Augmentation without which a model from scratch memorises a few hundred images."""


def _augmentation(task: str) -> dict[str, Any]:
    if task in ("classify", "multilabel"):
        return {"crop_scale": 0.6, "flip": 0.5, "color_jitter": 0.2}
    return {"flip": 0.5} if task != "regress" else {"shift": 0.05}


# ---- rules ----


def image_size(facts: Facts) -> int:
    """Side of the model's input in whole patches of 14: finer for maps and boxes, and small images are enlarged."""
    wanted = 168 if facts.task in ("segment", "detect") else 140
    return min(wanted, max(56, 14 * math.ceil(ENLARGED * facts.side / 14)))


def epochs_for(steps: int, images: int, batch: int, low: int, high: int) -> int:
    """Epochs that make about so many steps, within limits."""
    return min(max(math.ceil(steps * batch / max(images, 1)), low), high)


def _fitted(choice: Choice, facts: Facts, memory: int | None) -> Choice:
    """The same with the batch computed in parts, if a step would not fit into memory."""
    parts = accumulation(choice.options, facts.channels, memory or physical_memory())
    if parts == 1:
        return choice
    reason = f"{choice.reason}; each batch is computed in {parts} parts to fit into memory"
    return replace(choice, options={**choice.options, "accumulate": parts}, reason=reason)


def accumulation(options: Mapping[str, Any], channels: int, memory: int) -> int:
    """Parts that a batch has to be computed in, by the cost model: a power of two that divides the batch."""
    try:
        config = model_spec(options["model"].partition(".")[0]).config
    except VitralError:  # weights that have no name in the zoo: as a ViT-S
        config = model_spec("vit_small_patch14_dinov2").config
    size = options.get("img_size") or config.img_size
    cost = model_cost(replace(config, img_size=size, in_chans=channels))
    fixed = 5 * 4 * cost.params  # weights, gradients, two moments and the average
    parts = 1
    while options["batch_size"] % (2 * parts) == 0 and (
        fixed + cost.activation_bytes * options["batch_size"] / parts > MEMORY_SHARE * memory
    ):
        parts *= 2
    return parts


def physical_memory() -> int:
    """Bytes of memory of this machine; a modest guess if the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30
