"""`vitral predict`: answers for images or texts, any number of them."""

import csv
import glob
import json as json_module
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from vitral.config import TOP_K, Running, Writing
from vitral.errors import ImageError, InputError

if TYPE_CHECKING:
    from vitral.inference.predictor import Predictor
    from vitral.tasks.base import Answer


@dataclass(frozen=True)
class Options:
    """Predict with a trained model: labels, numbers, masks, boxes or text, whatever it was trained for.

    Examples:
      vitral predict runs/digits photo.png
      vitral predict runs/photos folder/ --csv > answers.csv
      find . -name "*.jpg" | vitral predict runs/photos -
      vitral predict runs/scenes folder/ --out pictures/
      vitral predict runs/photos folder/ --engine auto
      vitral predict photos.onnx photo.png
      vitral predict runs/numbers-en-it "twenty-one" --beam 5 --n-best 3
      vitral predict runs/translator sentences.txt
      vitral predict runs/author --prompt "Once upon a time" --sample --temperature 0.8
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory, file of weights, pretrained name, or exported file (.onnx, .xml)."""
    paths: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="PATH...", help_behavior_hint="")]
    """Images, folders, quoted patterns, or - for a list of paths on standard input. For a model that reads text: texts,
    files with one on each line, or - for lines on standard input."""
    prompt: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """A text to go on with."""
    top_k: Annotated[int, tyro.conf.arg(metavar="K")] = TOP_K
    """Labels for each image or text."""
    json: bool = False
    """Print one JSON document."""
    csv: bool = False
    """Print CSV: image or text, what the task answers with, error."""
    out: Annotated[str, tyro.conf.arg(metavar="DIR", help_behavior_hint="")] = ""
    """Also write each image with its answer on it into this folder; masks too, and boxes as COCO json and YOLO
    labels."""
    slide: bool = False
    """Segmenters: look at large images window by window, at their own resolution."""
    running: Annotated[Running, tyro.conf.arg(name="")] = field(default_factory=Running)
    """How the model is run."""
    writing: Annotated[Writing, tyro.conf.arg(name="")] = field(default_factory=Writing)
    """How text is written."""


def find_images(paths: tuple[str, ...]) -> Iterator[str | Path]:
    """Every image that the paths name, one by one; a folder gives its images, - the lines of standard input."""
    from vitral.data.sources.folder import list_images

    if not paths:
        raise ImageError(
            "no images are named; give files, folders, quoted patterns, or - for a list on standard input."
        )
    for path in paths:
        if path == "-":
            yield from filter(str.strip, _lines_on_stdin("paths of images; give the path of this one"))
        elif Path(path).is_dir():
            found = list_images(Path(path))
            if not found:
                raise ImageError(f"{path} has no images in it.")
            yield from found
        elif any(mark in path for mark in "*?[") and not Path(path).exists():
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                raise ImageError(f"no file matches {path}.")
            yield from matches
        else:
            yield path


def _lines_on_stdin(what: str) -> Iterator[str]:
    """Lines of standard input, which must not be a file of another kind."""
    wrong = InputError(f"what comes on standard input is not text; - takes lines with {what}.")
    raw = getattr(sys.stdin, "buffer", None)
    if raw is not None and b"\0" in raw.peek():  # which every image has among its first bytes
        raise wrong
    try:
        yield from (line.rstrip("\n") for line in sys.stdin)
    except UnicodeDecodeError:
        raise wrong from None


def find_texts(texts: tuple[str, ...], prompt: str | None = None) -> Iterator[str]:
    """Every text that is given: itself, the lines of a file, or with - those of standard input; then the prompt."""
    if not texts and prompt is None:
        raise InputError("no text is given; give texts, files with one on each line, or - for standard input.")
    for text in texts:
        if text == "-":
            yield from _lines_on_stdin("texts")
        elif os.path.isfile(text):  # pathlib would stumble over a long text
            try:
                yield from Path(text).read_text(encoding="utf-8-sig").splitlines()
            except UnicodeDecodeError as error:
                raise InputError(f"{text} cannot be read as UTF-8 text ({error}); this model reads text.") from error
        else:
            yield text
    if prompt is not None:
        yield prompt


def write_pictures(answers: "Iterator[Answer]", folder: Path, predictor: "Predictor") -> "Iterator[Answer]":
    """Write each answer's pictures as it passes by, and at the end what the task writes of all of them.

    A name that is taken gets a number, and no image is written over.
    """
    from PIL import Image

    from vitral.data.images import read_image

    folder.mkdir(parents=True, exist_ok=True)
    taken: set[Path] = set()
    seen = []
    for answer in answers:
        seen.append(answer)
        if not answer.error:
            pixels = read_image(answer.name, predictor.mode)
            pictures = answer.pictures(Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy().copy()))
            stem, number = Path(answer.name).stem, 1
            while taken & (paths := {folder / f"{stem}{end}" for end in pictures}):
                number += 1
                stem = f"{Path(answer.name).stem}-{number}"
            taken |= paths
            for end, picture in pictures.items():
                path = folder / f"{stem}{end}"
                if path.exists() and path.samefile(answer.name):
                    raise ImageError(f"{path} would be written over; give another folder than that of the images.")
                picture.save(path)
        yield answer
    predictor.task.write(folder, seen)


def _is_one_file(paths: tuple[str, ...]) -> bool:
    return len(paths) == 1 and os.path.isfile(paths[0])


def run(options: Options) -> None:
    """Print the answers as they come."""
    from rich.console import Console
    from rich.progress import track

    from vitral.inference.predictor import Predictor

    writing = options.writing if options.writing != Writing() else None
    running = options.running
    if running.engine == "auto" and running.batch_size is None and _is_one_file(options.paths):
        running = replace(running, batch_size=1)  # there is no more to fill a batch with
    predictor = Predictor(options.source, slide=options.slide, writing=writing, **running.to_dict())
    what = predictor.inputs.what
    if what == "image" and options.prompt is not None:
        raise InputError("this model reads images; --prompt is for those that read text.")
    given = find_images(options.paths) if what == "image" else find_texts(options.paths, options.prompt)
    answers = predictor.stream(given, options.top_k)
    if options.out:
        if what != "image":
            raise InputError("--out writes pictures, and this model reads text; leave it out, or use --csv or --json.")
        answers = write_pictures(answers, Path(options.out), predictor)
    bar = Console(stderr=True)
    answers = track(answers, "predicting", console=bar, transient=True, disable=not sys.stderr.isatty())
    count, errors = 0, []

    def watched() -> "Iterator[Answer]":
        nonlocal count
        for answer in answers:
            count += 1
            if answer.error:
                errors.append(answer.error)
            yield answer

    _print(watched(), options, what, predictor.task.answer.columns)
    if count and len(errors) == count:
        raise InputError(f"there is no answer for {f'the {what}' if count == 1 else f'any of the {count:,} {what}s'}.")


def _print(answers: "Iterator[Answer]", options: Options, what: str, columns: tuple[str, ...]) -> None:
    if options.csv:
        writer = csv.writer(sys.stdout)
        writer.writerow([what, *columns, "error"])
        for answer in answers:
            rows = [] if answer.error else [[answer.name, *row, ""] for row in answer.rows()]
            writer.writerows(rows or [[answer.name, *[""] * len(columns), answer.error]])
    elif options.json:
        print("[", end="")
        for i, answer in enumerate(answers):
            print("," * (i > 0) + f"\n  {json_module.dumps(answer.to_dict(what), ensure_ascii=False)}", end="")
        print("\n]")
    else:
        for answer in answers:
            if answer.error:
                named = answer.name in answer.error
                print(f"warning: {'' if named else f'{answer.name}: '}{answer.error}", file=sys.stderr)
                continue
            told = f"{answer.name}: {answer.text()}".replace(": \n", ":\n")
            print(told + f"  ({answer.note})" * bool(answer.note))
