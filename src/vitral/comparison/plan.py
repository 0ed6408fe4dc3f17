"""Which runs a comparison is made of, and what each of them may spend. Trains nothing."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitral.config import CompareConfig, TrainConfig, ViTConfig
from vitral.data.sources.base import Data
from vitral.errors import ConfigError, DataError
from vitral.models.cost import Cost, model_cost
from vitral.models.zoo import model_spec

BACKWARD = 2
"""The backward pass costs as much as two forward passes: one for the inputs' gradients, one for the weights'."""
NO_END = 10**9
"""Steps of a run that the clock ends."""


@dataclass(frozen=True)
class Candidate:
    """What is compared: a named model, perhaps with another patch, and what it costs."""

    label: str
    model: str
    patch_size: int | None
    config: Any
    cost: Cost

    @property
    def patch(self) -> int:
        """Height of a patch, of models that have one."""
        return self.config.patch[0]


@dataclass(frozen=True)
class Trial:
    """One run: a candidate that learns from a share of the training images, with a seed."""

    candidate: Candidate
    train: TrainConfig
    images: int
    """Training images that it sees."""
    path: Path

    @property
    def batch(self) -> int:
        """Images of a step."""
        return min(self.train.batch_size, self.images)

    def macs(self, steps: int) -> int:
        """Multiply-adds of so many steps of training."""
        return (1 + BACKWARD) * self.candidate.cost.macs * self.batch * steps

    def describe(self) -> str:
        """Which run this is, in words."""
        share = f"{100 * self.train.label_fraction:g} % of the training images"
        return f"{self.candidate.label}, {share}, seed {self.train.seed}"


@dataclass(frozen=True)
class Plan:
    """All runs, those of one seed after those of another, so that an early stop leaves whole comparisons."""

    candidates: list[Candidate]
    patched: list[Candidate]
    """One ViT with several patch sizes, the smallest first."""
    trials: list[Trial]
    budget: str
    """What each run may spend, in words."""

    @property
    def rivals(self) -> set[str]:
        """Labels of those that are judged: the models, or of a single one its patch sizes."""
        judged = self.candidates if len(self.candidates) > 1 else [*self.candidates, *self.patched]
        return {each.label for each in judged}


def make_plan(data: Data, compare: CompareConfig, train: TrainConfig, out: Path) -> Plan:
    """The runs on data that have all their splits; raises for models and patches that cannot be."""
    if data.kind != "label" or data.what != "images":
        raise DataError(f"models are compared on images with one class each; {data.describe()} are not that.")
    if train.select != "last":
        raise ConfigError(
            f"models are compared by the weights of their last step, got select {train.select}; leave it out."
        )
    limits = {"max_macs": compare.max_macs, "max_minutes": train.max_minutes, "max_steps": train.max_steps}
    given = [f"--{name.replace('_', '-')} {value:g}" for name, value in limits.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"every run has one budget, got {' and '.join(given)}; give one of them.")
    candidates = [candidate(data, train, name) for name in compare.models]
    patched = list(_patched(data, compare, train, candidates))
    trials = []
    for seed in range(train.seed, train.seed + compare.seeds):
        runs = [(each, fraction) for fraction in compare.fractions for each in candidates]
        runs += [(each, compare.fractions[-1]) for each in patched if each not in candidates]
        for each, fraction in runs:
            config = replace(train, model=each.model, patch_size=each.patch_size, seed=seed, label_fraction=fraction)
            images = len(data.with_label_fraction(fraction, seed).splits["train"])
            place = out / "runs" / each.label / f"fraction-{fraction:g}" / f"seed-{seed}"
            trials.append(_with_budget(Trial(each, config, images, place), compare, len(data.splits["train"])))
    return Plan(candidates, patched, trials, _budget_words(compare, train))


def candidate(data: Data, train: TrainConfig, name: str, patch_size: int | None = None) -> Candidate:
    """A named model as it will be built for the data."""
    options: dict[str, Any] = {"in_chans": data.in_chans, "num_classes": len(data.classes)}
    if train.img_size is not None:
        options["img_size"] = train.img_size
    if patch_size is not None:
        options["patch_size"] = patch_size
    config = model_spec(name, **options).config
    label = name if patch_size is None else f"{name}-P{patch_size}"
    return Candidate(label, name, patch_size, config, model_cost(config))


def _patched(
    data: Data, compare: CompareConfig, train: TrainConfig, candidates: list[Candidate]
) -> Iterator[Candidate]:
    """The first ViT with each patch size."""
    if not compare.patch_sizes:
        return
    vit = next((each for each in candidates if isinstance(each.config, ViTConfig)), None)
    if vit is None:
        raise ConfigError(f"--patch-sizes needs a ViT among the models, got {', '.join(compare.models)}.")
    for patch_size in sorted(compare.patch_sizes):
        own = vit.config.patch == (patch_size, patch_size)
        yield vit if own else candidate(data, train, vit.model, patch_size)


def _with_budget(trial: Trial, compare: CompareConfig, all_images: int) -> Trial:
    """The run with its number of steps, validated as often as a run on all images is."""
    train = trial.train
    per_epoch, all_per_epoch = trial.images // trial.batch, all_images // min(train.batch_size, all_images)
    if compare.max_macs is not None:
        steps = max(1, round(compare.max_macs / trial.macs(1)))
    elif train.max_minutes is not None:
        steps = NO_END
    else:
        steps = train.max_steps or train.epochs * all_per_epoch
    every = max(1, round(train.eval_every * all_per_epoch / per_epoch))
    return replace(trial, train=replace(train, max_steps=steps, eval_every=every))


def _budget_words(compare: CompareConfig, train: TrainConfig) -> str:
    if compare.max_macs is not None:
        return f"{compare.max_macs:.3g} multiply-adds of training"
    if train.max_minutes is not None:
        return f"{train.max_minutes:g} minutes of training"
    if train.max_steps is not None:
        return f"{train.max_steps:,} steps"
    return f"as many steps as {train.epochs} epochs over all training images"
