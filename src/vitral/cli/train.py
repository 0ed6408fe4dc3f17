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


@dataclass(frozen=True)
class Options:
    """Train a model on a folder of images (or a CSV, Parquet, COCO, YOLO, IDX or CIFAR set, texts, or an embedded one).

    The task is told by the data: class folders to classify, numbers to regress, masks to segment, boxes to detect,
    images with texts to caption, pairs of texts to translate, a text file to complete, words with tags to tag.

    Options come from the defaults, under the recipe of the data, under --preset, under --config, under flags. A resumed
    run keeps its own; more --epochs, --max-steps or --max-minutes extend it.

    Examples:
      vitral train digits
      vitral train photos/ --model vit_lite_conv_patch4_32 --epochs 50 --out runs/photos
      vitral train photos/ --out runs/photos --resume
      vitral train photos/ --preset lora --model weights.safetensors
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
    task: Annotated[TaskName | None, tyro.conf.arg(help_behavior_hint="(default: told by the data)")] = None
    """What to learn."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint; start one if there is none."""
    seeds: int = 1
    """Repeat with this many seeds and report mean and spread."""
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
    """Train, once or with several seeds, and say how well it went."""
    from dataclasses import replace
    from statistics import mean, stdev

    from vitral.api import train_and_report
    from vitral.tasks.open import TASKS

    data = opened(options)
    data = replace(data, notes=[*data.notes, *options.notes])
    out = Path(options.out or f"runs/{data.name}")
    runs = []
    for i in range(options.seeds):
        config = replace(options.train, seed=options.train.seed + i)
        place = out if options.seeds == 1 else out / f"seed-{config.seed}"
        told = {"task": options.task, "preset": options.preset, "resume": options.resume, "quiet": options.json}
        runs.append(train_and_report(data, config, place, command=command_line(), **told))
    if not runs[0].wrote:
        return
    metrics: dict[str, Any] = {"runs": [{"path": str(run.path), "metrics": run.metrics} for run in runs]}
    for part in runs[0].metrics:
        name = next(task.headline for task in TASKS.values() if task.headline in runs[0].metrics[part])
        values = [run.metrics[part][name] for run in runs]
        spread = stdev(values) if len(values) > 1 else 0.0
        metrics[part] = {f"{name}_mean": mean(values), f"{name}_stdev": spread, "seeds": len(values)}
        if options.seeds > 1 and not options.json:
            told = (
                f"{100 * mean(values):.2f} ± {100 * spread:.2f} %"
                if name == "accuracy"
                else f"{mean(values):.4f} ± {spread:.4f}"
            )
            print(f"{part} {name}: {told} over {len(values)} seeds")
    if options.json:
        print_json(metrics)
    else:
        print(f"{out}: {'report.html, ' if options.seeds == 1 else ''}model.safetensors, config.json")
