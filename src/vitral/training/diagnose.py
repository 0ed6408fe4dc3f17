"""What went wrong in a finished run, with the numbers that show it and the next command to try.

What only the predictions show is the task's (`Task.diagnose`); this module reads the log of the training. A metric
that is better when it is larger is called the score.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.config import TrainConfig
from vitral.tasks.base import Task, longer
from vitral.weights.rundir import Baselines, Finding, Spent

FEW_STEPS, ENOUGH_STEPS = 100, 1000
"""Steps below which a run is too short to judge, and those of the longer run that is proposed."""
MOST_SKIPPED = 0.01
"""Share of skipped steps above which a run has diverged."""
RISE = 1.1
"""Factor between the first and the last training loss above which a run has diverged."""
LAST, GAIN = 0.2, 0.1
"""A run is still improving if the last fifth of it brought more than a tenth of the improvement of the validation."""
FEWEST_EVALUATIONS = 5
"""Evaluations on the validation split from which on an improvement can be judged."""
GAP, RATIO = 0.15, 2.0
"""A run overfits if the share of right training predictions is larger by so much, or the validation error so many
times as large."""
STANDARD_ERRORS = 3.0
"""Differences of shares that are smaller than so many standard errors are chance."""
SHARES = ("accuracy", "pixel_accuracy")
ERRORS = ("mae",)
"""Metrics that are logged for training and validation batches alike: shares of right predictions, and errors."""

Lines = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl."""


def diagnose(
    out: Path, task: Task, config: TrainConfig, command: str, lines: Lines, spent: Spent,
    metrics: Mapping[str, dict[str, Any]], baselines: Mapping[str, Baselines],
) -> list[Finding]:  # fmt: skip
    """All findings about a run, the most serious first; none for a run that went well.

    Predictions are judged on the test split, or else on the validation split.
    """
    train, val = ([line for line in lines if line["split"] == split] for split in ("train", "val"))
    split = next((split for split in ("test", "val") if split in metrics), None)
    images = metrics["val"]["images"] if "val" in metrics else 0
    own = [] if split is None else task.diagnose(metrics[split], baselines.get(split, {}), config)
    if config.probe == "only":
        trained = []
    elif (few := few_steps(spent, config)) is not None:  # then a longer run comes before every other remedy
        own = [replace(each, remedy=few.remedy) for each in own]
        trained = [diverged(train, spent, config), few]
    else:
        trained = [
            diverged(train, spent, config),
            overfits(train, val, images, config),
            still_improving(val, task.better, images, config),
        ]
    findings = [*own, *filter(None, trained)]
    return [replace(each, remedy=next_command(command, out, each.remedy)) for each in findings]


def diverged(train: Lines, spent: Spent, config: TrainConfig) -> Finding | None:
    """Steps were skipped because their loss was not finite, or the training loss ended above its start."""
    slower = f"--lr {config.lr / 3:.2g}" + f" --muon-lr {config.muon_lr / 3:.2g}" * (config.optimizer == "muon")
    problem = "training diverged"
    if spent.skipped > MOST_SKIPPED * spent.steps:
        evidence = f"{spent.skipped:,} of {spent.steps:,} steps were skipped because their loss was not finite"
        return Finding(problem=problem, evidence=evidence, remedy=slower)
    losses = [line["loss"] for line in train if "loss" in line]
    if len(losses) > 1 and not losses[-1] <= losses[0] + (RISE - 1) * abs(losses[0]):
        evidence = f"the training loss rose from {losses[0]:.4g} to {losses[-1]:.4g}"
        return Finding(problem=problem, evidence=evidence, remedy=slower)
    return None


def few_steps(spent: Spent, config: TrainConfig) -> Finding | None:
    """The run was too short to judge the model by."""
    if spent.steps >= FEW_STEPS:
        return None
    return Finding(
        problem="too few steps",
        evidence=f"the run ended after {spent.steps:,} steps; fewer than {FEW_STEPS} rarely suffice",
        remedy=longer(config, math.ceil(ENOUGH_STEPS / max(spent.steps, 1))),
    )


def overfits(train: Lines, val: Lines, images: int, config: TrainConfig) -> Finding | None:
    """The model is much better on the images that it is trained on than on the validation split."""
    if not train or not val or not images:
        return None
    ended = {name: value for line in train[-3:] for name, value in line.items()}  # a short line may lack a metric
    for name in (name for name in (*SHARES, *ERRORS) if name in ended and name in val[-1]):
        own, other = ended[name], val[-1][name]
        chance = STANDARD_ERRORS * math.sqrt(max(other * (1 - other), 0.0) / images) if name in SHARES else 0.0
        if (own - other > max(GAP, chance)) if name in SHARES else (other > RATIO * own):
            words = name.replace("_", " ")
            return Finding(
                problem="overfitting",
                evidence=f"{words} {own:.4g} on the training split, {other:.4g} on the validation split",
                remedy=_regularisation(config),
            )
    return None


def _regularisation(config: TrainConfig) -> str:
    """More augmentation, if there is room for more, and the weights that are best on validation."""
    scale, flip, patience = config.augment.crop_scale, config.augment.flip, config.patience or 5
    stronger = f"--augment.crop-scale {max(scale / 2, 0.2):g}" + " --augment.flip 0.5" * (not flip)
    return f"{stronger} --select best --patience {patience}"


def still_improving(val: Lines, score: str, images: int, config: TrainConfig) -> Finding | None:
    """The score on the validation split was rising, by more than chance, when the budget was used up."""
    scores = [(line["step"], line[score]) for line in val if score in line]
    if len(scores) < FEWEST_EVALUATIONS or not images:
        return None
    last, final = scores[-1]
    before = max(value for step, value in scores if step <= (1 - LAST) * last)
    first = scores[0][1]
    chance = 0.5 / math.sqrt(images)  # the largest standard error of a share
    if final < max(value for _, value in scores) or final - before <= max(GAIN * (final - first), chance):
        return None
    return Finding(
        problem="still improving when training ended",
        evidence=f"validation {score.replace('_', ' ')} rose from {before:.4g} to {final:.4g} in the last "
        f"fifth of the steps",
        remedy=f"--resume {longer(config)}",
    )


def next_command(command: str, out: Path, options: str) -> str:
    """The command of a run with other options; one that does not resume the run writes to another directory."""
    words = shlex.split(command) if command.startswith("vitral train ") else ["vitral", "train", "DATA"]
    changed = shlex.split(options)
    resumes = "--resume" in changed
    changed += ["--out", str(out if resumes else out.with_name(f"{out.name}-2"))]
    replaced = {word for word in changed if word.startswith("--")}
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word.partition("=")[0].replace("_", "-") in replaced | {"--resume"}
            if skipping and ("=" in word or word == "--resume"):
                skipping = False
                continue
        if not skipping:
            kept.append(word)
        elif not word.startswith("--"):
            skipping = False
    return shlex.join([*kept, *changed])
