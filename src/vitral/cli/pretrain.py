"""`vitral pretrain`: images without labels in, a backbone that knows something about them out."""

from collections.abc import Set
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitral.cli.output import command_line, given_options, print_json
from vitral.config import PretrainConfig
from vitral.errors import ConfigError

if TYPE_CHECKING:
    from vitral.data.sources.base import Data


@dataclass(frozen=True)
class Options:
    """Let a model learn from images without their labels, to be fine-tuned later with the few that have one.

    DINO learns what different crops of an image have in common: its features can be used as they are. MAE learns to
    fill in hidden patches: it is faster, and wants fine-tuning. While it goes on, signals tell whether it goes well;
    a collapse is said, with what to change.

    Options come from the defaults, under the recipes of the method and of the data, under --config, under flags. A
    resumed run keeps its own; more --epochs, --max-steps or --max-minutes extend it.

    Examples:
      vitral pretrain photos/ --out runs/dino
      vitral pretrain photos/ --method mae --epochs 200
      vitral pretrain unlabelled/ --labelled photos/ --out runs/dino
      vitral pretrain photos/ --model dinov2.safetensors --optimizer adamw --lr 1e-4 --epochs 10
      vitral train photos/ --model runs/dino --preset full
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """A folder with images anywhere in it, or whatever vitral train takes; labels are not learned from."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/NAME-METHOD)")] = ""
    """Run directory to write."""
    labelled: Annotated[str, tyro.conf.arg(metavar="DATA", help_behavior_hint="(default: DATA, if it has labels)")] = ""
    """Data with class labels, on which k-NN accuracy is watched."""
    config: Annotated[str, tyro.conf.arg(metavar="FILE.toml|RECIPE", help_behavior_hint="")] = ""
    """File of options, under the names of the flags; or a recipe."""
    resume: bool = False
    """Continue the run in --out from its newest checkpoint; start one if there is none."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    json: bool = False
    """Print the signals at the end as JSON, and nothing else."""
    pretrain: Annotated[PretrainConfig, tyro.conf.arg(name="")] = field(default_factory=PretrainConfig)
    """How to learn."""


def defaults(options: Options, flags: Set[str]) -> Options:
    """Return the options that flags are put over: the recipes, or the resumed run, under --config."""
    from vitral.api import resolve_pretraining, run_to_resume

    data = _opened(options.data, options.image_column)
    given = given_options(options.config, options.pretrain, flags)
    file = given_options(options.config, options.pretrain, flags=set())
    if "method" in file and file["method"] != given["method"]:
        wrong = f"{options.config} is for --method {file['method']}, not for {given['method']}"
        raise ConfigError(f"{wrong}; omit one of them.")
    resumed = run_to_resume(_place(options, data), options.resume, pretraining=True)
    return Options(data=options.data, pretrain=resolve_pretraining(data, given, resumed))


def _place(options: Options, data: "Data") -> Path:
    return Path(options.out or f"runs/{data.name}-{options.pretrain.method}")


@cache
def _opened(*source: Any) -> "Data":
    from vitral.data.sources.open import open_images

    return open_images(*source)


def run(options: Options) -> None:
    """Learn, and say how it went."""
    from vitral.api import pretrain_and_report
    from vitral.data.sources.open import open_data

    data = _opened(options.data, options.image_column)
    labelled = open_data(options.labelled) if options.labelled else None
    out = _place(options, data)
    made = pretrain_and_report(
        data, labelled, options.pretrain, out, resume=options.resume, quiet=options.json, command=command_line()
    )
    if not made.wrote:
        return
    if options.json:
        print_json({"path": str(made.path), "metrics": made.metrics})
        return
    told = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in made.metrics["val"].items())
    print(f"{told}\n{out}: report.html, model.safetensors, config.json, pictures/")
