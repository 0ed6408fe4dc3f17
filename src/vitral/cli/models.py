"""`vitral models`: the named models."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from vitral.cli.output import human, print_json, print_table
from vitral.errors import unknown_name
from vitral.models.cost import model_cost
from vitral.models.zoo import FAMILIES, MODELS, list_models


@dataclass(frozen=True)
class Options:
    """List the named models with their size and cost.

    Examples:
      vitral models "deit_*"
      vitral models "*dinov2*" --json
    """

    pattern: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="[PATTERN]")] = "*"
    """Shell pattern, quoted: "vit_*_patch16_*"."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Print the models whose name matches."""
    names = list_models(options.pattern)
    if not names:
        raise unknown_name("model or pattern", options.pattern, MODELS, list_with="vitral models")
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
