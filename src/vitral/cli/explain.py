"""`vitral explain`: what a model uses of an image or a text."""

import json as json_module
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from vitral.cli.output import print_table
from vitral.cli.predict import find_images, find_texts
from vitral.config import Device
from vitral.errors import ImageError, InputError

if TYPE_CHECKING:
    from vitral.explanation.explain import Explanation
    from vitral.inference.predictor import Predictor


@dataclass(frozen=True)
class Options:
    """Explain predictions: draw attention and relevance maps over images, or write interactive pages.

    Examples:
      vitral explain runs/digits seven.png
      vitral explain runs/digits seven.png --out seven.html
      vitral explain model.safetensors cat.jpg --method relevance --class tabby --score
      vitral explain model.safetensors cat.jpg --layer 5 --head 2 --patch 120,64
      vitral explain runs/photos folder/ --out pages/{}.html
      vitral explain runs/digits-lines line.png --method writing
      vitral explain runs/numbers-en-it "twenty-one"
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A run directory, a file of weights, its folder, a pretrained name, or hf-hub:owner/name."""
    images: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE...", help_behavior_hint="")]
    """Images, folders, quoted patterns, or - for a list of paths on standard input; for a text model, texts, files with
    one text per line, or - for lines on standard input."""
    method: Literal[
        "attention", "rollout", "relevance", "gradcam", "occlusion", "positions", "tokens", "writing", "merging"
    ] = "attention"  # fmt: skip
    """What to show. writing: the attention of a decoder on the image for each token of its text; merging: which patches
    become one token. Models that turn text into text always show their attention on the tokens of the source."""
    layer: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Attention, tokens, writing and merging: block, from 0, or negative from the end; the last by default, for
    merging four of them."""
    head: Annotated[int | None, tyro.conf.arg(metavar="N", help_behavior_hint="")] = None
    """Attention and writing: show only this head."""
    patch: Annotated[str | None, tyro.conf.arg(metavar="X,Y", help_behavior_hint="")] = None
    """Attention: of the patch at this pixel of the prepared image, instead of [CLS] or the mean."""
    target: Annotated[str | None, tyro.conf.arg(name="class", metavar="CLASS", help_behavior_hint="")] = None
    """Relevance, gradcam and occlusion: class to explain, by name or number; the most likely by default."""
    style: Annotated[
        Literal["patches", "smooth"] | None, tyro.conf.arg(help_behavior_hint="(default: patches)")
    ] = None  # fmt: skip
    """How to draw maps: one colour for each patch, or interpolated between the centres of patches."""
    merge: Annotated[float | None, tyro.conf.arg(metavar="R", help_behavior_hint="(default: half of all)")] = None
    """Merging: number of patches that each block merges, or below 1 the share of all that is merged at the end."""
    out: Annotated[str, tyro.conf.arg(metavar="PATH", help_behavior_hint="")] = ""
    """Picture (.png, .svg, .pdf, .jpg), interactive page (.html), or folder; {} in a name is replaced by each image's
    name. By default IMAGE-METHOD.png in the working directory. For several images give a folder, or a name with {}."""
    score: bool = False
    """Measure how faithful the first map is: deletion and insertion curves, next to input gradients and chance."""
    device: Device = "cpu"
    """Device that runs the model."""
    json: bool = False
    """Print JSON: the maps as numbers, scores and files."""


FLAGS = {
    "layer": "--layer", "head": "--head", "patch": "--patch", "target": "--class", "score": "--score",
    "merge": "--merge", "style": "--style",
}  # fmt: skip


def run(options: Options) -> None:
    """Explain each image and write the requested files."""
    from rich.console import Console
    from rich.progress import track

    from vitral.explanation.explain import check_takes, explain
    from vitral.explanation.placement import DEFAULT_STYLE
    from vitral.inference.predictor import Predictor
    from vitral.weights.rundir import is_run, read_run_config

    check_takes(options.method, {name: getattr(options, name) for name in FLAGS}, FLAGS)
    patch = _patch(options.patch)
    if is_run(Path(options.source)) and read_run_config(Path(options.source)).preprocess is None:
        run_texts(options, Predictor(options.source, device=options.device))
        return
    images = [str(image) for image in find_images(options.images)]
    for image in images:
        if not Path(image).is_file():
            raise ImageError(f"{image} does not exist." if not Path(image).exists() else f"{image} is not a file.")
    paths = file_names(options, images)
    predictor = Predictor(options.source, device=options.device)
    bar = partial(
        track, description=options.method, console=Console(stderr=True), transient=True,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip
    documents = []
    for image, path in zip(images, paths, strict=True):
        made = explain(
            predictor, image, options.method, layer=options.layer, head=options.head, target=options.target,
            patch=patch, score=options.score, interactive=path.suffix.lower() == ".html", track=bar,
            merge=options.merge,
        )  # fmt: skip
        made = replace(made, source=options.source)
        made.save(path, options.style or DEFAULT_STYLE)
        if made.rows is not None and made.rows.note:
            print(f"vitral: {path}: {made.rows.note}", file=sys.stderr)
        if options.json:
            documents.append(as_json(made, path))
        else:
            report(made, path)
    if options.json:
        print("[\n" + ",\n".join(documents) + "\n]")


def run_texts(options: Options, predictor: "Predictor") -> None:
    """Write and print the attention on the source for each token of the output."""
    from vitral.explanation.figures import PICTURES, check_suffix
    from vitral.explanation.writing import align

    if options.method not in ("attention", "writing"):
        raise InputError(f"{options.method} is for images; omit --method for a text model.")
    texts = list(find_texts(options.images))
    out = Path(options.out or "alignment.png")
    if out.is_dir() or not out.suffix:
        out = out / "alignment-{}.png"
    elif check_suffix(out) == ".html":
        raise InputError(f"an alignment cannot be a page; write {', '.join(PICTURES)} instead.")
    elif len(texts) > 1 and "{}" not in out.name:
        out = out.with_name(f"{out.stem}-{{}}{out.suffix}")
    documents = []
    for i, text in enumerate(texts, 1):
        try:
            made = align(predictor, text, options.layer, options.head)
        except InputError as error:
            if len(texts) == 1:
                raise
            print(f"vitral: {text}: {error}", file=sys.stderr)
            continue
        path = out.with_name(out.name.replace("{}", str(i)))
        path.parent.mkdir(parents=True, exist_ok=True)
        made.save(path)
        if options.json:
            rows = [[float(f"{w:.5g}") for w in row] for row in made.rows.tolist()]
            documents.append(
                {"text": text, "file": str(path), "read": made.source, "written": made.written, "rows": rows}
            )
        else:
            print_table(made.about, ["output", "largest attention"], made.table(), note=f"-> {path}")
    if options.json:
        print(json_module.dumps(documents, ensure_ascii=False, indent=1))


def report(made: "Explanation", path: Path) -> None:
    """Print what was written, and how faithful it is."""
    cut = f" ({made.part})" if made.part.startswith("the") or "," in made.part else ""
    print(f"{made.name}{cut}: {made.caption} -> {path}")
    if made.scores:
        names = list(dict.fromkeys(key.partition(":")[0] for key in made.scores))
        rows = [[n, *(f"{made.scores[f'{n}: {kind}']:.3f}" for kind in ("deletion", "insertion"))] for n in names]
        print_table("area under the curve", ["", "deletion (less is better)", "insertion (more is better)"], rows)


def as_json(made: "Explanation", path: Path) -> str:
    """The explanation of one image, one line for each field and each map."""
    document = {"image": made.name, "source": made.source, "file": str(path), **made.to_dict()}
    maps = document.pop("maps")
    fields = [f"    {json_module.dumps(k)}: {json_module.dumps(v)}" for k, v in document.items()]
    fields.append('    "maps": [\n      ' + ",\n      ".join(json_module.dumps(map_) for map_ in maps) + "\n    ]")
    return "  {\n" + ",\n".join(fields) + "\n  }"


def _patch(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        x, y = (int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--patch must be two integers X,Y, got {text!r}.") from None
    return x, y


def file_names(options: Options, images: Sequence[str]) -> list[Path]:
    """The file to write for each image; numbers make equal names unique."""
    from vitral.explanation.explain import TAKES
    from vitral.explanation.figures import PICTURES, check_suffix

    out = Path(options.out)
    name = "{}-" + options.method + ".png"
    if options.out and (out.is_dir() or not out.suffix):
        pattern = out / name
    elif options.out:
        suffix = check_suffix(out)
        if suffix == ".html" and "interactive" not in TAKES[options.method]:
            raise InputError(f"{options.method} cannot be a page; write {', '.join(PICTURES)} instead.")
        if len(images) > 1 and "{}" not in out.name:
            each = f"{{}}{out.suffix}"
            raise InputError(
                f"--out {out} is one file for {len(images)} images; give a folder, or a name with {{}} such as {each}."
            )
        pattern = out
    else:
        pattern = Path(name)
    paths, taken = [], set()
    for image in images:
        stem = base = Path(image).stem
        number = 1
        while stem in taken:
            number += 1
            stem = f"{base}-{number}"
        taken.add(stem)
        paths.append(pattern.with_name(pattern.name.replace("{}", stem)))
    own = {Path(image).resolve() for image in images}
    for path in paths:
        if path.resolve() in own:
            raise InputError(f"--out {path} is one of the images; give another name.")
    return paths
