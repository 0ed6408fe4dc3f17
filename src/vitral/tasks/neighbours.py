"""Classification by the nearest neighbours, of features or of raw pixels.

n samples, D features, K classes.
"""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.config import Preprocess, Probing
from vitral.data.images import AtLeast
from vitral.data.inputs import ImageInputs
from vitral.data.loader import eval_batches
from vitral.data.sources.base import Data, ImageArray
from vitral.errors import ImageError

CELLS = 2**24
"""Numbers in a table of similarities or scores that are held at once, for any number of samples."""
PIXEL_SIDE = 32
"""Side that images of many sizes are resized to if their pixels are the features."""
MOST_IMAGES, MOST_BYTES, MOST_PIXELS = 5000, 48 * 2**20, 100_000_000
"""Images of a split, bytes of their files and decoded pixels up to which images are compared: about three seconds."""
SAMPLE = 16
"""Images that are decoded to estimate the number of pixels."""


def vote(
    keys: Tensor, labels: Tensor, queries: Tensor, K: int, k: int = Probing.k,
    temperature: float = Probing.knn_temperature,
) -> Tensor:  # fmt: skip
    """(n, K): votes of the k nearest of the keys (m, D) by cosine for each query (n, D), each exp(cosine / tau)."""
    k, keys = min(k, len(keys)), F.normalize(keys, dim=1)
    votes = queries.new_zeros(len(queries), K)
    for some, rows in zip(chunks(queries, max(len(keys), K)), chunks(votes, max(len(keys), K)), strict=True):
        cosine, nearest = (F.normalize(some, dim=1) @ keys.mT).topk(k, dim=1)  # (n, k)
        rows.scatter_add_(1, labels[nearest], (cosine / temperature).exp())
    return votes


def chunks(x: Tensor, width: int) -> tuple[Tensor, ...]:
    """Rows of x, so many at a time that a table of `width` columns for them stays within `CELLS`."""
    return x.split(max(CELLS // width, 1))


def pixel_preprocess(data: Data, img_size: Any = None, most: int | None = None) -> Preprocess:
    """Images at their own size, if they all have the same, or at `PIXEL_SIDE`; no side above `most`."""
    images = data.images
    H, W = images.pixels.shape[-2:] if isinstance(images, ImageArray) else (PIXEL_SIDE, PIXEL_SIDE)
    size = img_size or (min(H, most or H), min(W, most or W))
    return Preprocess(img_size=size, mean=(0.0,) * data.in_chans, std=(1.0,) * data.in_chans, crop_mode="squash")


@torch.no_grad()
def small_pixels(data: Data, indices: Tensor) -> tuple[Tensor, Tensor] | None:
    """Pixels (n, D) and numbers (n) of the chosen images that can be read, at most 32 x 32; None if they are many."""
    if data.what != "images" or not 0 < len(indices) <= MOST_IMAGES or not _light(data, indices):
        return None
    inputs = ImageInputs(pixel_preprocess(data, most=PIXEL_SIDE))
    batches = list(eval_batches(replace(data, mode=inputs.mode), indices, inputs, 256, strict=False, workers=0))
    pixels = torch.cat([inputs.normal(batch.inputs).flatten(1) for batch in batches])
    return pixels, torch.cat([batch.samples for batch in batches])


def _light(data: Data, indices: Tensor) -> bool:
    """Whether all images together are small enough to be decoded in seconds."""
    pixels, total = [], 0
    for index in indices[:: -(-len(indices) // SAMPLE)].tolist():
        with suppress(ImageError):
            pixels.append(data.images.read(index, data.mode, AtLeast(PIXEL_SIDE, PIXEL_SIDE))[0].numel())
    if not pixels or sum(pixels) / len(pixels) * len(indices) > MOST_PIXELS:
        return False
    for index in indices.tolist():
        with suppress(OSError, ImageError):
            total += len(data.images.content(index))
        if total > MOST_BYTES:
            return False
    return True
