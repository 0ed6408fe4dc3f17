"""Scenes with a planted truth: one digit at a random place on a cluttered canvas, and the box it lies in.

Made from the embedded digits and a seed, always the same. Whoever explains a model trained on them can be checked:
what counts lies in the box, and nowhere else.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.sources.base import Data, ImageArray
from vitral.data.sources.digits import load_digits

SIDE, SMALLEST, LARGEST = 32, 11, 15
CLUTTER = 7
"""Fragments of other digits on each canvas."""


def make_scenes(train: int = 8000, test: int = 1000, seed: int = 0) -> tuple[Data, Tensor]:
    """Scenes of 32 x 32 grey pixels, and the box of the digit in each, (N, 4) as x, y, width, height in pixels.

    Training scenes show digits of the training part, test scenes digits of the test part.
    """
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    pixels, targets, boxes = [], [], []
    for part, count in (("train", train), ("test", test)):
        members = digits.splits[part]
        for _ in range(count):
            index = int(members[_below(len(members), generator)])
            canvas, box = _scene(digits, index, members, generator)
            pixels.append(canvas)
            boxes.append(box)
            targets.append(int(digits.targets[index]))
    splits = {"train": torch.arange(train), "test": torch.arange(train, train + test)}
    images = ImageArray(torch.stack(pixels)[:, None])
    data = Data("scenes", images, torch.tensor(targets), digits.classes, splits, mode="grey", licence=digits.licence)
    return data, torch.tensor(boxes)


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (1,), generator=generator))


def _scene(digits: Data, index: int, members: Tensor, generator: torch.Generator) -> tuple[Tensor, list[int]]:
    canvas = 40 * torch.rand(SIDE, SIDE, generator=generator)
    for _ in range(CLUTTER):
        other = _digit(digits, int(members[_below(len(members), generator)]), 12)
        h, w = 3 + _below(4, generator), 3 + _below(4, generator)
        y, x = _below(12 - h, generator), _below(12 - w, generator)
        top, left = _below(SIDE - h, generator), _below(SIDE - w, generator)
        place = canvas[top : top + h, left : left + w]
        place.copy_(torch.maximum(place, other[y : y + h, x : x + w]))
    side = SMALLEST + _below(LARGEST - SMALLEST + 1, generator)
    top, left = _below(SIDE - side + 1, generator), _below(SIDE - side + 1, generator)
    place = canvas[top : top + side, left : left + side]
    place.copy_(torch.maximum(place * 0.3, _digit(digits, index, side)))
    return canvas.round().clamp(0, 255).to(torch.uint8), [left, top, side, side]


def _digit(digits: Data, index: int, side: int) -> Tensor:
    small = digits.images.read(index, "grey").float()[None]
    return F.interpolate(small, size=(side, side), mode="bicubic", antialias=True)[0, 0].clamp(0, 255)
