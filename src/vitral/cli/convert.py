"""`vitral convert`: weights in the layout of another program."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from vitral.cli.output import print_json


@dataclass(frozen=True)
class Options:
    """Write a model in the layout of vitral, timm, Hugging Face or Google, with the files that go with it.

    Examples:
      vitral convert ViT-B_16.npz vit-b16 --to huggingface
      vitral convert vit-b16 ViT-B_16-again.npz --to google
      vitral convert model.safetensors vit-timm --to timm
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """A file of weights, its folder, a run directory, a pretrained name, or hf-hub:owner/name."""
    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DST")]
    """Folder to write; a file that ends in .npz for google."""
    to: Literal["vitral", "timm", "huggingface", "google"] = "vitral"
    """Layout to write."""
    num_heads: int | None = None
    """Attention heads, where the file does not tell and the usual number is wrong."""
    family: str | None = None
    """Settings to assume where the file leaves them open, such as dino or deit."""
    num_classes: int | None = None
    """Give the model a new, untrained head of this many classes; 0 takes the head off."""
    img_size: int | None = None
    """Resize the positions to images of this side."""
    json: bool = False
    """Print JSON instead of tables."""


def run(options: Options) -> None:
    """Load, write, and say what happened on both ways."""
    from vitral.weights.load import load_model
    from vitral.weights.save import save_model

    model = load_model(
        options.source,
        num_classes=options.num_classes,
        img_size=options.img_size,
        family=options.family,
        num_heads=options.num_heads,
        quiet=True,
    )
    notes = save_model(model, options.target, options.to)
    report = model.load_report
    if options.json:
        loaded = report.to_dict() if report else None
        print_json(
            {"source": options.source, "target": options.target, "to": options.to, "load": loaded, "notes": notes}
        )
        return
    if report:
        print(report)
    for note in notes:
        print(f"note        {note}")
    print(f"wrote {options.target} ({options.to})")
