"""`vitral index`: a folder of images, or a file of texts, as vectors to search in."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from vitral.cli.output import check_page, print_json
from vitral.config import Device, Indexing
from vitral.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Embed every image of a folder with a model, and keep the vectors for vitral search.

    Called again, it looks only at files that are new or changed, and forgets those that are gone; a run that was
    stopped goes on where it was.

    Examples:
      vitral index runs/dino photos/ --out photos.index
      vitral search photos.index photo.jpg
      vitral index vit_small_patch14_dinov2.lvd142m photos/ --out photos.index --duplicates --page copies.html
      vitral index runs/text-classifier sentences.txt --out sentences.index
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A run, a file of weights, a pretrained name (vitral models --pretrained), or hf-hub:owner/name. A run of vitral
    pretrain is also suitable."""
    folder: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """Folder with images anywhere in it; for a model that reads texts, a file with one on each line."""
    out: Annotated[str, tyro.conf.arg(metavar="INDEX", help_behavior_hint="(default: DIR.index)")] = ""
    """Folder of the index; or a table of a database with pgvector, postgresql://user@host/database?table=NAME."""
    duplicates: bool = False
    """Also list groups of near copies."""
    least: Annotated[float, tyro.conf.arg(metavar="COSINE")] = 0.98
    """duplicates: how alike two must be; what is right depends on the model."""
    page: Annotated[str, tyro.conf.arg(metavar="FILE.html", help_behavior_hint="")] = ""
    """duplicates: write them as a page with pictures."""
    device: Device = "cpu"
    """Where the model runs."""
    json: bool = False
    """Print JSON instead of lines."""
    indexing: Annotated[Indexing, tyro.conf.arg(name="")] = field(default_factory=Indexing)
    """How the index is made."""


def run(options: Options) -> None:
    """Make the index or bring it up to date, and say what was done."""
    if options.page and not options.duplicates:
        raise ConfigError("--page shows near copies; give --duplicates too.")
    check_page("--page", options.page)
    from vitral.inference.predictor import Predictor
    from vitral.retrieval.index import Index, check_least

    check_least(options.least)

    folder = Path(options.folder)
    out = options.out or _beside(folder)
    predictor = Predictor(options.source, device=options.device)
    index, change = Index.build(predictor, folder, out, watch=_progress, **options.indexing.to_dict())
    what = index.manifest.what
    for name, why in () if options.json else change.unreadable.items():
        print(f"warning: {why if name in why else f'{name}: {why}'}", file=sys.stderr)
    groups = index.duplicates(options.least) if options.duplicates else []
    doubt = index.doubt(options.least) if options.duplicates else ""
    if doubt and not options.json:
        print(f"warning: {doubt}", file=sys.stderr)
    if options.page:
        from vitral.reporting.search import write_duplicates

        write_duplicates(Path(options.page), index, groups, options.least)
    if options.json:
        done = {"added": change.added, "kept": change.kept, "removed": change.removed, "unreadable": change.unreadable}
        document: dict[str, Any] = {"index": index.place, f"{what}s": len(index), **done, "seconds": change.seconds}
        print_json(document | ({"duplicates": groups, "warning": doubt} if options.duplicates else {}))
        return
    rate = f" ({change.added / change.seconds:,.0f} a second)" if change.added and change.seconds else ""
    failed = f", {len(change.unreadable):,} cannot be read" if change.unreadable else ""
    print(
        f"{index.place}: {len(index):,} {what}s: {change.added:,} new{rate}, {change.kept:,} as they were, "
        f"{change.removed:,} gone or changed{failed}; {index.manifest.nearest} search"
    )
    if options.duplicates:
        print(f"{len(groups):,} group{'s' * (len(groups) != 1)} of near copies (cosine at least {options.least:g})")
        for number, group in enumerate(groups, 1):
            print("\n".join([f"group {number}:", *(f"  {name}" for name in group)]))
    if options.page:
        print(f"page: {options.page}")


def _beside(folder: Path) -> Path:
    """Where the index of a folder is kept unless another place is named."""
    whole = folder.resolve()
    if not whole.name:
        raise ConfigError(f"beside {whole} there is no place for an index; give --out.")
    named = whole if folder.name in ("", "..") else folder
    return named.with_name(f"{whole.name}.index")


def _progress(steps: Iterable[Any], total: int) -> Iterable[Any]:
    from vitral.inference.features import progress

    return progress(steps, "embedding", total)
