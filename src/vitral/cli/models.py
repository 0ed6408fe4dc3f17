"""`vitral models`: the named models, and the published weights for them."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from vitral.cli.output import human, print_json, print_table
from vitral.config import pair
from vitral.errors import unknown_name
from vitral.models.cost import model_cost
from vitral.models.zoo import FAMILIES, MODELS
from vitral.weights.pretrained import (
    LICENCE_SOURCE,
    TOP1_SOURCE,
    Pretrained,
    list_models,
    pretrained_table,
)


@dataclass(frozen=True)
class Options:
    """List the named models, or the published weights, with their size and cost.

    Examples:
      vitral models "deit_*"
      vitral models "*dinov2*" --pretrained
      vitral models "*dinov2*" --json
    """

    pattern: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[PATTERN]")] = "*"
    """Shell pattern, quoted: "vit_*_patch16_*"."""
    pretrained: bool = False
    """List published weights, NAME.TAG, with their licence and accuracy; every command accepts these names."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Print the models whose name matches."""
    names = list_models(options.pattern, pretrained=options.pretrained)
    if not names:
        known = pretrained_table() if options.pretrained else MODELS
        listed = f"vitral models{' --pretrained' * options.pretrained}"
        raise unknown_name("model or pattern", options.pattern, known, list_with=listed)
    if options.pretrained:
        _print_pretrained([pretrained_table()[name] for name in names], options.json)
        return
    costs = {name: model_cost(MODELS[name].config) for name in names}
    if options.json:
        print_json(
            [
                {
                    "name": name,
                    "family": MODELS[name].family,
                    "params": cost.params,
                    "macs": cost.macs,
                    "tokens": cost.tokens,
                    "config": MODELS[name].config.to_dict(),
                    "preprocess": MODELS[name].preprocess.to_dict(),
                }
                for name, cost in costs.items()
            ]
        )
        return
    rows = []
    for name, cost in costs.items():
        c, family = MODELS[name].config, MODELS[name].family
        image = f"{c.image[0]}x{c.image[1]}x{c.in_chans}"
        rows.append([name, image, str(cost.tokens), human(cost.params), human(cost.macs), family])
    families = sorted({MODELS[name].family for name in names})
    print_table(
        f"{len(names)} models",
        ["name", "image", "tokens", "parameters", "MACs", "family"],
        rows,
        note="\n".join(f"{family}: {FAMILIES[family].about}" for family in families),
    )


def _print_pretrained(weights: list[Pretrained], as_json: bool) -> None:
    """Print published weights; licence and accuracy are empty if no source states them."""
    if as_json:
        print_json([each.to_dict() for each in weights])
        return
    rows = []
    for each in weights:
        height, width = pair(each.preprocess.img_size)
        classes = str(each.num_classes) if each.num_classes else ""
        top1 = "" if each.top1 is None else f"{each.top1:.1f} %"
        size = [f"{height}x{width}", human(each.params), human(each.macs)]
        rows.append([each.name, *size, classes, top1, each.licence])
    print_table(
        f"{len(rows)} published weights",
        ["name", "image", "parameters", "MACs", "classes", "ImageNet-1k", "licence"],
        rows,
        note=f"accuracy: top-1 on the validation set, {TOP1_SOURCE}\nlicence: {LICENCE_SOURCE}",
    )
