"""`vitral explain`: what a model looks at."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitral.cli.output import print_json, print_table
from vitral.errors import InputError


@dataclass(frozen=True)
class Options:
    """Show what a model looks at in images: as pictures, or as pages to play with.

    Examples: vitral explain runs/digits seven.png; vitral explain runs/digits seven.png --out seven.html;
    vitral explain model.safetensors cat.jpg --method relevance --class tabby --score;
    vitral explain model.safetensors cat.jpg --layer 5 --head 2 --patch 120,64
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A run directory, a file of weights, its folder, or hf-hub:owner/name."""
    images: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE...")]
    """Images to explain."""
    method: Literal["attention", "rollout", "relevance", "gradcam", "occlusion", "positions", "tokens"] = "attention"
    """What to show."""
    layer: int | None = None
    """Block, from 0, or from the end below 0; the last by default."""
    head: int | None = None
    """One head alone."""
    target: Annotated[str | None, tyro.conf.arg(name="class")] = None
    """Class to explain, by name or number; the likeliest by default."""
    patch: Annotated[str | None, tyro.conf.arg(metavar="X,Y")] = None
    """Show where the patch at this pixel of the prepared image looks, instead of [CLS]."""
    out: str = ""
    """Picture (.png, .svg, .pdf), page (.html), or folder to write; by default IMAGE-METHOD.png here."""
    score: bool = False
    """Measure how faithful the first map is: deletion and insertion curves beside input gradients and chance."""
    json: bool = False
    """Print JSON: the maps as numbers, scores and files."""


def run(options: Options) -> None:
    """Explain each image and write what was asked for."""
    from vitral.explanation.explain import explain
    from vitral.inference.predictor import Predictor

    if not options.images:
        raise InputError("no image was given; name at least one.")
    patch = _patch(options.patch)
    predictor = Predictor(options.source)
    found = []
    for image in options.images:
        path = _target(options, image)
        interactive = path.suffix == ".html"
        made = explain(
            predictor, image, options.method, layer=options.layer, head=options.head, target=options.target,
            patch=patch, score=options.score, interactive=interactive,
        )  # fmt: skip
        made.save(path)
        found.append((image, path, made))
    if options.json:
        print_json(
            [
                {
                    "image": image,
                    "file": str(path),
                    "method": made.method,
                    "about": made.about,
                    "grid": list(made.grid),
                    "titles": made.titles,
                    "maps": [[[round(float(v), 6) for v in row] for row in map_] for map_ in made.maps[:32]],
                    "scores": made.scores,
                }
                for image, path, made in found
            ]
        )
        return
    for image, path, made in found:
        print(f"{image}: {made.about or made.method} -> {path}")
        if made.scores:
            names = list(dict.fromkeys(key.partition(":")[0] for key in made.scores))
            rows = [[n, *(f"{made.scores[f'{n}: {kind}']:.3f}" for kind in ("deletion", "insertion"))] for n in names]
            print_table("area under the curve", ["", "deletion (less is better)", "insertion (more is better)"], rows)


def _patch(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        x, y = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--patch must be two whole numbers X,Y, got {text!r}.") from None
    return x, y


def _target(options: Options, image: str) -> Path:
    """The file to write for an image."""
    out = Path(options.out)
    if options.out and out.suffix and len(options.images) == 1:
        return out
    name = f"{Path(image).stem}-{options.method}{out.suffix or '.png'}"
    folder = out.parent if out.suffix else out
    return folder / name if options.out else Path(name)
