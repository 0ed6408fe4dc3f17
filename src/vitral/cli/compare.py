"""`vitral compare`: models side by side, on growing shares of the same data with the same budget."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import tyro

from vitral.cli.output import command_line, given_options, print_json, print_table
from vitral.config import CompareConfig, TrainConfig
from vitral.errors import ConfigError

if TYPE_CHECKING:
    from vitral.data.sources.base import Data

Hidden = (tyro.conf.Fixed, tyro.conf.Suppress)
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainConfig):
    """How every model is trained; what differs from run to run is not an option."""

    model: Annotated[str, *Hidden] = TrainConfig.model
    patch_size: Annotated[int | tuple[int, int] | None, *Hidden] = None
    label_fraction: Annotated[float, *Hidden] = 1.0


@dataclass(frozen=True)
class Options:
    """Train models on growing shares of the same images with the same budget, and show how they differ.

    Every model learns from 1, 5, 20 and 100 % of the training images (--fractions), with several --seeds. The budget
    of each run is one of --max-minutes, --max-steps, --max-macs, or else the steps of --epochs over all images. All
    use one recipe, that of the data, under flags. The trained models are then measured: receptive field, what a shift
    of the image does, how far attention looks, noise, hidden and shuffled pieces, and cost as images grow.

    A comparison that was stopped goes on when the same command is given again; finished runs are kept, and models,
    fractions and seeds may be added.

    Examples:
      vitral compare digits --models vit_nano_patch2_8,vit_nano_conv_patch2_8 --max-minutes 1
      vitral compare cifar10/ --models vit_micro_patch8_32,vit_pico_deepconv_patch8_32 --fractions 0.05 1 --seeds 2
      vitral compare fashion-mnist --models vit_micro_patch4_28 --patch-sizes 2,4,7 --fractions 1 --max-macs 1e14
    """

    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """What vitral train takes, with one class for each image: a name, a folder of class folders, a CSV file."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="A,B,...")]
    """Names of models (vitral models lists them), separated by commas or spaces."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="(default: runs/compare-NAME)")] = ""
    """Where the comparison is written: report.html, results.json, pictures/, runs/."""
    fractions: Annotated[tuple[str, ...], tyro.conf.arg(metavar="F,...")] = tuple(
        f"{share:g}" for share in CompareConfig.fractions
    )
    """Shares of the training images to learn from."""
    seeds: int = CompareConfig.seeds
    """Runs of each model on each share."""
    patch_sizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="P,...", help_behavior_hint="")] = ()
    """Patch sizes to train the first ViT of the models with, on the largest share."""
    max_macs: Annotated[float | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = CompareConfig.max_macs
    """Multiply-adds that each run may spend on training, instead of minutes or steps."""
    images: int = CompareConfig.images
    """Images that the trained models are measured on; 0 measures nothing."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table."""
    config: Annotated[str, tyro.conf.arg(metavar="FILE.toml|RECIPE", help_behavior_hint="")] = ""
    """File of training options, under the names of the flags; or a recipe."""
    json: bool = False
    """Print the results as JSON, and nothing else."""
    train: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)
    """How every model is trained."""


def defaults(options: Options, flags: Set[str]) -> Options:
    """Return the options that flags are put over: those of the data's recipe and of --config."""
    from vitral.api import resolve_config

    train = resolve_config(_opened(options), given_options(options.config, options.train, flags), "classify")
    chosen = {name: value for name, value in vars(train).items() if name not in ("model", "patch_size")}
    return Options(data=options.data, models=options.models, train=Recipe(**chosen))


def _opened(options: Options) -> "Data":
    from vitral.data.sources.open import open_data

    return open_data(options.data, options.image_column, options.label_column, "classify")


def listed(words: Sequence[str]) -> list[str]:
    """The words of a list that is separated by commas, spaces or both."""
    return [word for part in words for word in part.split(",") if word]


def numbers(words: Sequence[str], kind: Callable[[str], Number], flag: str) -> tuple[Number, ...]:
    """A list of numbers as it is typed."""
    try:
        return tuple(kind(word) for word in listed(words))
    except ValueError:
        raise ConfigError(f"{flag} takes numbers, separated by commas or spaces, got {' '.join(words)}.") from None


def run(options: Options) -> None:
    """Compare, and say which is best."""
    from vitral.api import compare_and_report

    data = _opened(options)
    out = Path(options.out or f"runs/compare-{data.name}")
    compare = CompareConfig(
        models=tuple(listed(options.models)),
        fractions=numbers(options.fractions, float, "--fractions"),
        seeds=options.seeds,
        patch_sizes=numbers(options.patch_sizes, int, "--patch-sizes"),
        max_macs=options.max_macs,
        images=options.images,
    )
    train = TrainConfig(**vars(options.train))
    made = compare_and_report(data, compare, train, out, quiet=options.json, command=command_line())
    if options.json:
        print_json(made.results)
        return
    shares = made.results["compare"]["fractions"]
    found = {(row["label"], row["fraction"]): row for row in made.results["summary"]}
    rows = [
        [label, *(_cell(found[label, share]) if (label, share) in found else "" for share in shares)]
        for label in made.results["models"]
    ]
    heads = [f"{100 * share:g} %" for share in shares]
    note = "\n".join(verdict["sentence"] for verdict in made.results["verdicts"])
    print_table(f"Accuracy on the {made.results['judged_on']} part, %", ["model", *heads], rows, note)
    print(f"{out}: report.html, results.json, pictures/, runs/")


def _cell(row: dict[str, Any]) -> str:
    spread = f" ± {100 * row['spread']:.2f}" if row["spread"] is not None else ""
    return f"{100 * row['accuracy']:.2f}{spread}"
