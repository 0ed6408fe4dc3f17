"""`vitral inspect`: what a file of weights is, without building the model."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import tyro

from vitral.cli.output import human, print_json, print_table
from vitral.config import HUB, PositionResize


@dataclass(frozen=True)
class Options:
    """Say what a file of weights is: whose, what model, what preprocessing, and whether it can be loaded.

    Nothing in the file is run; of a safetensors file only the header is read.

    Examples:
      vitral inspect model.safetensors
      vitral inspect ViT-B_16.npz --tensors
      vitral inspect runs/digits --json
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A file of weights, its folder, a pretrained name, or hf-hub:owner/name."""
    num_heads: int | None = None
    """Attention heads, where the file does not tell and the usual number is wrong."""
    family: str | None = None
    """Settings to assume where the file leaves them open, such as dino or deit; vitral models lists families."""
    tensors: bool = False
    """List every tensor with its shape."""
    json: bool = False
    """Print JSON instead of tables."""


def run(options: Options) -> None:
    """Print what the file is."""
    from vitral.weights.inspect import inspect_weights

    found = inspect_weights(options.source, options.family, options.num_heads)
    if options.json:
        print_json(found.to_dict())
        return
    name = Path(options.source).name if not options.source.startswith(HUB) else options.source
    size = f"{len(found.tensors)} tensors, {human(found.params)} parameters, {human(found.bytes, 'B')}"
    rows = [[option, _plain(value), reason] for option, value, reason in found.settings]
    print_table(f"{name}: {found.layout} ({size})", ["option", "value", "from"], rows)
    for line in found.notes:
        print(line)
    if options.tensors:
        listed = [[n, "x".join(map(str, shape)), dtype] for n, (shape, dtype) in found.tensors.items()]
        print_table("tensors", ["name", "shape", "type"], listed)
    print(
        f"It cannot be loaded: {found.problem}"
        if found.problem
        else "It can be loaded (vitral.load_model, vitral predict)."
    )


def _plain(value: object) -> str:
    if isinstance(value, dict):
        if set(value) == {f.name for f in fields(PositionResize)}:
            return str(PositionResize(**value))
        return ", ".join(f"{name} {_plain(each)}" for name, each in value.items())
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
