"""`vitral train`: data in, run directory out."""

from collections.abc import Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitral.cli.output import command_line, given_options, print_json
from vitral.config import Preset, TaskName, TrainConfig

if TYPE_CHECKING:
    from vitral.data.sources.base import Data
    from vitral.training.session import Run


@dataclass(frozen=True)
class Options:
    """Train a model on a folder of images (or a CSV, Parquet, COCO, YOLO, IDX or CIFAR set, texts, or an embedded one).

    The task is inferred from the data: class folders to classify, numbers to regress, masks to segment, boxes to
    detect, images with texts to caption, pairs of texts to translate, a text file to complete, words with tags to tag.

    Options come from the defaults, under the recipe of the data, under --preset, under --config, under flags. A resumed
    run keeps its own; more --epochs, --max-steps or --max-minutes extend it.

    Examples:
      vitral train digits
      vitral train photos/ --model vit_lite_conv_patch4_32 --epochs 50 --out runs/photos
      vitral train photos/ --out runs/photos --resume
      vitral train photos/ --preset lora --model weights.safetensors
      vitral train photos/ --folds 5
      vitral train digits-scenes --task detect
      vitral train annotations.json --task segment
      vitral train digits-lines
      vitral train pairs.tsv --out runs/translator
      vitral train book.txt --out runs/author
      vitral train reviews.csv --text-column review --label-column stars --task classify
      vitral train sentences.conll --out runs/names
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """digits, digits-lines, digits-rotated, digits-scenes, numbers-en-it, fashion-mnist, mnist, cifar10, a folder with
    a folder for each class or with images/ and masks/, a YOLO folder, a COCO json, a CSV or Parquet file, pairs of
    texts (TSV, JSONL or CSV), texts with a tag for each word (CoNLL, or a table), a text file, tar files of samples
    ("shards-{000..009}.tar"), or hf-hub:owner/name."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/NAME)")] = ""
    """Run directory to write."""
    config: Annotated[str, tyro.conf.arg(metavar="FILE.toml|RECIPE", help_behavior_hint="")] = ""
    """File of options, under the names of the flags; or a recipe: digits, fashion-mnist, cifar10,
    folder-finetune, digits-lines, numbers-en-it, en-it, stamps."""
    preset: Annotated[Preset | None, tyro.conf.arg(help_behavior_hint="")] = None
    """How to fine-tune the weights of --model: only the head, a low-rank change, or everything."""
    task: Annotated[TaskName | None, tyro.conf.arg(help_behavior_hint="(default: inferred from the data)")] = None
    """What to learn."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint; start one if there is none."""
    seeds: int = 1
    """Repeat with this many seeds and report mean and spread."""
    folds: Annotated[int | None, tyro.conf.arg(metavar="K", help_behavior_hint="")] = None
    """Cross-validation: split the images into K folds, train K models that are each tested on another fold, and report
    mean and spread. DIR is then an ensemble of the models, for `vitral predict` and `vitral eval`."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table, of what is to be written, or of the tags of words; several columns of numbers or of
    0 and 1 are separated by commas."""
    text_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of texts to read in a table."""
    json: bool = False
    """Print the metrics as JSON, and nothing else."""
    train: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """How to train."""
    notes: tyro.conf.Suppress[tuple[str, ...]] = ()
    """What `--model auto` has chosen, and why."""


def defaults(options: Options, flags: Set[str]) -> Options:
    """Return the options that flags are put over: the recipe, or the resumed run, under --preset and --config."""
    from vitral.api import resolve_training, run_to_resume

    data = opened(options)
    given = given_options(options.config, options.train, flags)
    resumed = run_to_resume(Path(options.out or f"runs/{data.name}"), options.resume)
    train, notes = resolve_training(data, given, options.task, options.preset, resumed)
    task: Any = resumed.task if resumed else None
    return Options(data=options.data, task=task, train=train, notes=tuple(notes))


def opened(options: Options) -> "Data":
    """The data, which are asked for twice: for their recipe, and to train on."""
    return _opened(options.data, options.image_column, options.label_column, options.task, options.text_column)


@cache
def _opened(*source: Any) -> "Data":
    from vitral.data.sources.open import open_data

    return open_data(*source)


def run(options: Options) -> None:
    """Train, once or several times, and print how well it went."""
    from dataclasses import replace

    from vitral.api import evaluate, train_and_report
    from vitral.errors import ConfigError
    from vitral.training.folds import fold_name, split_folds, write_folds

    if options.folds is not None and options.seeds != 1:
        raise ConfigError(
            f"--folds {options.folds} and --seeds {options.seeds} cannot be combined; leave one of them out."
        )
    data = opened(options)
    data = replace(data, notes=[*data.notes, *options.notes])
    out = Path(options.out or f"runs/{data.name}")
    seeds = [replace(options.train, seed=options.train.seed + i) for i in range(options.seeds)]
    if options.folds is not None:
        folds = split_folds(data, options.folds, options.train.split_seed)
        trials = {fold_name(k): (fold, options.train) for k, fold in enumerate(folds)}
    elif options.seeds > 1:
        trials = {f"seed-{config.seed}": (data, config) for config in seeds}
    else:
        trials = {"": (data, options.train)}
    given: Any = {"task": options.task, "preset": options.preset, "resume": options.resume, "quiet": options.json}
    runs = [
        train_and_report(each, config, out / name, command=command_line(), **given)
        for name, (each, config) in trials.items()
    ]
    if not runs[0].wrote:
        return
    summary, repeated = _summary(runs), "seeds" if options.folds is None else "folds"
    ensemble = None
    if options.folds is not None:
        write_folds(out, list(trials), summary)
        if "test" in data.splits:
            ensemble = evaluate(out, data, split="test")
    if options.json:
        runs_document = [{"path": str(run.path), "metrics": run.metrics} for run in runs]
        parts = {part: {**each, repeated: len(runs)} for part, each in summary.items()}
        print_json({"runs": runs_document, **parts, **({} if ensemble is None else {"ensemble": ensemble})})
        return
    if len(runs) > 1:
        for part, values in summary.items():
            print(f"{part} {_words(values)} over {len(runs)} {repeated}")
    if ensemble is not None:
        print(f"the ensemble on the test split of {data.name}: {ensemble['summary']}")
    if options.folds is not None:
        print(f"{out}: an ensemble of {len(runs)} models; vitral predict {out} IMAGES averages them")
    else:
        print(f"{out}: {'report.html, ' if options.seeds == 1 else ''}model.safetensors, config.json")


def _summary(runs: "list[Run]") -> dict[str, dict[str, float]]:
    """Mean and standard deviation over runs, for each evaluated split."""
    from statistics import mean, stdev

    from vitral.tasks.open import TASKS

    summary = {}
    for part in runs[0].metrics:
        name = next(task.headline for task in TASKS.values() if task.headline in runs[0].metrics[part])
        values = [run.metrics[part][name] for run in runs]
        spread = stdev(values) if len(values) > 1 else 0.0
        summary[part] = {f"{name}_mean": mean(values), f"{name}_stdev": spread}
    return summary


def _words(summary: dict[str, float]) -> str:
    """The name of a metric with its mean and spread; accuracy in percent."""
    (name, mean), (_, spread) = summary.items()
    name = name.removesuffix("_mean")
    if name == "accuracy":
        return f"{name}: {100 * mean:.2f} ± {100 * spread:.2f} %"
    return f"{name}: {mean:.4f} ± {spread:.4f}"
