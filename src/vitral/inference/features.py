"""Features of whole data sets: what a frozen model makes of the images, or their pixels, kept for the next time.

n images, D features. What features are worth is not known here.
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vitral import __version__
from vitral.config import Preprocess, ProbeFeatures
from vitral.data.inputs import ImageInputs
from vitral.data.loader import eval_batches
from vitral.data.sources.base import Data, ImageArray, ImageFiles, Images
from vitral.data.sources.hf import HubImages
from vitral.errors import CheckpointError, InputError, unknown_name
from vitral.inference.cache import cache_folder, digest, digest_weights, keep_newest, key_of
from vitral.inference.predictor import image_backbone_of
from vitral.models import parts
from vitral.models.backbone import Backbone
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import MODELS, create_model, is_model
from vitral.tasks.neighbours import pixel_preprocess
from vitral.weights.atomic import save_tensors
from vitral.weights.fetch import is_source
from vitral.weights.load import Size, load_model
from vitral.weights.rundir import AnyModel

PIXELS = "pixels"
"""The source whose features are the images themselves."""
BATCH = 64
CACHE_BYTES = 2**31
"""What the cache may hold; beyond it, the features that were not used for longest are removed."""
T = TypeVar("T")
_DAMAGED = (SafetensorError, OSError, KeyError, ValueError)


@dataclass(frozen=True)
class Extractor:
    """What makes features of images: their preprocessing, and a function from batches (B, C, H, W) to (B, D)."""

    preprocess: Preprocess
    look: Callable[[Tensor], Tensor]
    identity: str | None
    """What tells it from others; None where its features are not worth keeping."""


@dataclass(frozen=True)
class Features:
    """Features (n, D) of a data set, and the number (n) of the image that each row is of, rising."""

    x: Tensor
    indices: Tensor
    from_cache: bool

    def of(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of those of these images that could be read, and their numbers."""
        rows = torch.searchsorted(self.indices, indices).clamp(max=len(self.indices) - 1)
        there = self.indices[rows] == indices
        return self.x[rows[there]], indices[there]


# ---- what looks ----


def open_extractor(
    source: str | Path | Backbone, data: Data, features: ProbeFeatures, img_size: Size | None, seed: int
) -> Extractor:
    """A model, a run, a file of weights, hf-hub:owner/name, a name with fresh weights from the seed, or `pixels`."""
    if source == PIXELS:
        if features != "pooled":
            raise InputError(f"pixels have no tokens to take {features} of; leave --features out.")
        return _of_pixels(data, img_size)
    if isinstance(source, Backbone):
        if img_size is not None:
            raise InputError("a model that is given as such has its size; leave img_size out.")
        model = source
    elif is_source(str(source)):
        model = load_model(source, img_size=img_size, quiet=True)
    elif is_model(str(source)):
        options: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
        model = create_model(str(source), seed=seed, in_chans=1 if data.mode == "grey" else 3, **options)
    else:
        raise unknown_name("run, file or model", str(source), [PIXELS, *MODELS], list_with="vitral models")
    return _of_model(model, features)


def _of_pixels(data: Data, img_size: Size | None) -> Extractor:
    return Extractor(pixel_preprocess(data, img_size), lambda x: x.flatten(1), None)


def _of_model(model: AnyModel, features: ProbeFeatures) -> Extractor:
    backbone = image_backbone_of(model.eval())
    assert model.preprocess is not None  # what has a backbone inside sees images
    look = _look(backbone, features)
    device = next(backbone.parameters()).device
    identity = f"{digest_weights(backbone)} {features}"
    return Extractor(model.preprocess, lambda x: look(x.to(device)).float().cpu(), identity)


def _look(model: Backbone, features: ProbeFeatures) -> Callable[[Tensor], Tensor]:
    """The model's own pooling, or another of the tokens after the final norm; what is no ViT pools by the mean."""
    vit = model if isinstance(model, VisionTransformer) else None
    if features in ("pooled", vit.config.global_pool if vit else "mean"):
        return model.embed
    if vit is None or (features != "mean" and not vit.config.class_token):
        raise InputError(f"--features {features} needs a [CLS] token, which this model has not; use pooled or mean.")
    pool = parts.POOLS[features](vit.config)
    return lambda x: pool(vit.forward_features(x))


# ---- looking ----


def extract(data: Data, extractor: Extractor, cache: bool) -> Features:
    """Features of every image of every part, computed or from the cache; what cannot be read is left out."""
    inputs = ImageInputs(extractor.preprocess)
    data = replace(data, mode=inputs.mode)
    wanted = torch.cat(list(data.splits.values())).unique()
    file = _place(data, wanted, extractor) if cache else None
    kept = _read(file) if file else None
    if kept is None:
        kept = _compute(data, wanted, inputs, extractor.look)
        if file:
            _keep(file, kept)
    return kept


@torch.inference_mode()
def _compute(data: Data, wanted: Tensor, inputs: ImageInputs, look: Callable[[Tensor], Tensor]) -> Features:
    rows, indices = [], []
    batches = eval_batches(data, wanted, inputs, BATCH, strict=False, workers=0)
    for batch in progress(batches, "features", math.ceil(len(wanted) / BATCH)):
        rows.append(look(inputs.normal(batch.inputs)))
        indices.append(batch.samples)
    order = torch.cat(indices).argsort()
    return Features(torch.cat(rows)[order], torch.cat(indices)[order], from_cache=False)


def progress(steps: Iterable[T], words: str, total: int) -> Iterable[T]:
    """The steps, with a bar on the terminal, if stderr is one."""
    hidden = not sys.stderr.isatty()
    return track(steps, words, total, console=Console(stderr=True), transient=True, disable=hidden)


# ---- the cache ----


def _place(data: Data, wanted: Tensor, extractor: Extractor) -> Path | None:
    """The file for the features of these weights, images and preprocessing; None where none are kept."""
    images = _digest_images(data.images)
    if images is None or extractor.identity is None:
        return None
    preprocess = json.dumps(extractor.preprocess.to_dict())
    versions = f"vitral {__version__}, torch {torch.__version__}"
    what = [extractor.identity, images, digest([wanted]), data.mode, preprocess, versions]
    return cache_folder("features") / f"{key_of(what)}.safetensors"


def _read(file: Path) -> Features | None:
    """What was kept; None where there is nothing, or what there is was damaged."""
    try:
        kept = load_file(file)
        if digest([kept["features"], kept["indices"]]) != bytes(kept["sha256"].tolist()).hex():
            return None
        os.utime(file)
    except _DAMAGED:
        return None
    return Features(kept["features"], kept["indices"], from_cache=True)


def _keep(file: Path, found: Features) -> None:
    """Write features down, and remove the oldest of too many; a disk that is full or read-only keeps nothing."""
    sha = torch.tensor(list(bytes.fromhex(digest([found.x, found.indices]))), dtype=torch.uint8)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(file, {"features": found.x, "indices": found.indices, "sha256": sha})
        keep_newest(file.parent.glob("*.safetensors"), CACHE_BYTES, file)
    except (CheckpointError, OSError):
        return


def _digest_images(images: Images) -> str | None:
    """What tells images from others: their pixels, or their files' names, sizes and times; None where nothing does."""
    if isinstance(images, ImageArray):
        return digest([images.pixels])
    if isinstance(images, HubImages):
        return json.dumps([images.column, *(part._fingerprint for part in images.parts)])
    if isinstance(images, ImageFiles):
        return hashlib.sha256("\n".join(map(_describe_file, images.paths)).encode()).hexdigest()
    return None


def _describe_file(path: Path) -> str:
    try:
        stat = path.stat()
    except OSError:
        return f"{path.absolute()} missing"
    return f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}"
