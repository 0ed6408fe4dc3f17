"""Pictures made of the embedded digits whose every truth is known: scenes of several digits, and turned digits.

Both are made from a seed, always the same; training pictures show digits of the training part, test pictures those of
the test part.
"""

import math
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray, stratified_split
from vitral.data.sources.digits import digit_pixels, load_digits
from vitral.data.targets import Boxes, Masks

# ---- scenes ----

MOST = 6
"""Digits on a canvas, at most."""
SMALLEST, LARGEST, SIZES = 12, 28, 17
"""Sides of a digit on a canvas of 64 pixels, and how many different ones there are."""
INK = 64
"""A pixel of a resized digit above this is ink."""
VISIBLE = 0.4
"""Share of its ink that every digit shows."""
TRIES = 8
FRAGMENTS, LINES = 6, 2
GLOOM = 40
"""Brightest noise of the background."""


def make_digit_scenes(train: int = 6000, test: int = 1000, side: int = 64, seed: int = 0) -> Data:
    """Canvases with none to six digits, which may overlap: the digits present, their boxes, and a mask.

    A box is tight around all of a digit's ink, also where a later digit lies over it; the mask shows what is on top.
    """
    digits = load_digits()
    noise = Noise(seed, torch.arange(train + test))
    stamps = _Stamps(digit_pixels(digits), side)
    pixels = np.empty((train + test, 1, side, side), np.uint8)
    masks = np.zeros_like(pixels)
    rows = []
    draws = _draws(noise)
    for i in range(train + test):
        members = digits.splits["train" if i < train else "test"].numpy()
        canvas = _background(i, draws, stamps, members, side)
        placed = _place(i, draws, stamps, members, digits.targets, canvas, masks[i, 0])
        pixels[i, 0] = np.rint(canvas.clip(0, 255)).astype(np.uint8)
        rows.append(torch.tensor(placed, dtype=torch.float64).view(-1, 5) / torch.tensor([1, side, side, side, side]))
    present = torch.zeros(train + test, len(digits.classes))
    for target, found in zip(present, rows, strict=True):
        target[found[:, 0].long()] = 1
    names = ["background", *digits.classes]
    return Data(
        name="digits-scenes",
        inputs=ImageArray(torch.from_numpy(pixels)),
        targets=present,
        classes=digits.classes,
        splits={"train": torch.arange(train), "test": torch.arange(train, train + test)},
        mode="grey",
        recipe="digits-scenes",
        licence=digits.licence,
        kind="labels",
        boxes=Boxes(rows, MOST),
        masks=Masks(ImageArray(torch.from_numpy(masks)), names),
        mask_classes=names,
    )


class _Stamps:
    """The digits, all resized to a side at once when it is first asked for."""

    def __init__(self, small: Tensor, side: int) -> None:
        self.small = small.float()
        self.sides = sorted({max(round(s * side / 64), 4) for s in np.linspace(SMALLEST, LARGEST, SIZES)})
        self.at = cache(self._at)

    def _at(self, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(N, side, side): the shade 0..1 of each digit, the same a pixel wider all round, and its ink."""
        grey = F.interpolate(self.small, size=(side, side), mode="bicubic", antialias=True).clamp(0, 255)
        wide = F.max_pool2d(grey, 3, stride=1, padding=1)
        return (grey[:, 0] / 255).numpy(), (wide[:, 0] / 255).numpy(), (grey[:, 0] > INK).numpy()


def _draws(noise: Noise) -> dict[str, np.ndarray]:
    """All random numbers of all scenes: how many digits, what each try at each digit takes, fragments and lines."""
    n = len(noise)
    return {
        "count": noise.choice("count", MOST + 1)[:, 0].numpy(),
        "digit": noise.uniform("digit", MOST * TRIES * 5).view(n, MOST, TRIES, 5).numpy(),
        "piece": noise.uniform("piece", FRAGMENTS * 7).view(n, FRAGMENTS, 7).numpy(),
        "line": noise.uniform("line", LINES * 6).view(n, LINES, 6).numpy(),
    }


def _background(i: int, draws: dict[str, np.ndarray], stamps: _Stamps, members: np.ndarray, side: int) -> np.ndarray:
    """Noise, pieces of digits too small to tell, and thin lines."""
    generator = np.random.Generator(np.random.PCG64(int(draws["line"][i, 0, 0] * 2**53)))
    canvas = GLOOM * generator.random((side, side), dtype=np.float32)
    shades = stamps.at(stamps.sides[0])[0]
    whole = shades.shape[1]
    for u in draws["piece"][i]:
        h, w = (max(2, int(whole * (0.25 + 0.25 * v))) for v in u[:2])
        y, x = int(u[2] * (whole - h + 1)), int(u[3] * (whole - w + 1))
        top, left = int(u[4] * (side - h + 1)), int(u[5] * (side - w + 1))
        piece = 255 * shades[members[int(u[6] * len(members))], y : y + h, x : x + w]
        place = canvas[top : top + h, left : left + w]
        np.maximum(place, piece, out=place)
    for u in draws["line"][i]:
        if u[5] < 0.5:
            continue
        steps = np.linspace(0, 1, 2 * side)
        length, angle = side * (0.1 + 0.3 * u[1]), math.pi * u[2]
        rows = (u[3] * side + length * steps * math.sin(angle)).astype(int)
        columns = (u[4] * side + length * steps * math.cos(angle)).astype(int)
        on = (rows >= 0) & (rows < side) & (columns >= 0) & (columns < side)
        canvas[rows[on], columns[on]] = 60 + 280 * (u[5] - 0.5)
    return canvas


def _place(
    i: int, draws: dict[str, np.ndarray], stamps: _Stamps, members: np.ndarray, labels: Tensor,
    canvas: np.ndarray, mask: np.ndarray,
) -> list[list[int]]:  # fmt: skip
    """Paint the digits of a scene on the canvas and the mask; return class, x0, y0, x1, y1 of each in pixels."""
    side = len(canvas)
    owner = np.full((side, side), -1, np.int8)
    ink_of: list[int] = []
    boxes = []
    for tries in draws["digit"][i, : draws["count"][i]]:
        for u in tries:
            size = stamps.sides[int(u[0] * len(stamps.sides))]
            index = members[int(u[1] * len(members))]
            top, left = int(u[2] * (side - size + 1)), int(u[3] * (side - size + 1))
            shade, wide, ink = (kind[index] for kind in stamps.at(size))
            part = np.s_[top : top + size, left : left + size]
            if _hides_too_much(owner, part, ink, ink_of):
                continue
            label = int(labels[index])
            canvas[part] = canvas[part] * (1 - wide) + (190 + 65 * u[4]) * shade
            mask[part][ink] = label + 1
            owner[part][ink] = len(ink_of)
            ink_of.append(int(ink.sum()))
            rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
            boxes.append([label, left + columns[0], top + rows[0], left + columns[-1] + 1, top + rows[-1] + 1])
            break
    return boxes


def _hides_too_much(owner: np.ndarray, part: tuple[slice, slice], ink: np.ndarray, ink_of: list[int]) -> bool:
    """Whether a digit painted here would leave too little of an earlier one to see."""
    under = owner[part][ink]
    for k in np.unique(under[under >= 0]):
        left = np.count_nonzero(owner == k) - np.count_nonzero(under == k)
        if left < VISIBLE * ink_of[k]:
            return True
    return False


# ---- turned digits ----

TURN = 60.0
"""Largest angle, in degrees, to either side."""
OUT = 32
FINE = 6
"""Fine pixels for each of the digit's own, which are turned before they are made coarse again."""
MARGIN = 2
"""Empty pixels of the digit's own round it, so that a turned corner stays on the canvas."""
SOFT = 0.5
"""Width of the blur, in the digit's own pixels, that wipes out their lattice."""
SHIFT = 1.5


def make_rotated_digits(train: int = 12, test: int = 2, seed: int = 0) -> Data:
    """Each digit upright but for a known angle in -60..60 degrees, counter-clockwise; training ones `train` times.

    A tenth of the training digits is kept for validation: cut at random, it would show the same digits at other angles.
    Digits are made large and soft before they are turned and small again after, and lie in an empty round field:
    neither the lattice of their pixels nor a frame tells the angle.
    """
    digits = load_digits()
    rest, val = stratified_split(digits.targets, digits.splits["train"], 0.1, seed)
    members = {"train": rest.repeat_interleave(train), "val": val.repeat_interleave(test)}
    members["test"] = digits.splits["test"].repeat_interleave(test)
    index = torch.cat(list(members.values()))
    noise = Noise(seed, torch.arange(len(index)))
    angles = noise.between("angle", -TURN, TURN)
    shifts = torch.stack([noise.between(s, -SHIFT, SHIFT) for s in ("shift x", "shift y")], 1)
    large = soften(digit_pixels(digits))
    parts = zip(index.split(512), angles.split(512), shifts.split(512), strict=True)
    pixels = torch.cat([turn_digits(large[at], angle, shift) for at, angle, shift in parts])
    starts = [0, *np.cumsum([len(v) for v in members.values()]).tolist()]
    return Data(
        name="digits-rotated",
        inputs=ImageArray(pixels),
        targets=angles.float()[:, None],
        classes=[],
        splits={part: torch.arange(a, b) for part, a, b in zip(members, starts, starts[1:], strict=False)},
        mode="grey",
        recipe="digits-rotated",
        licence=digits.licence,
        kind="numbers",
        target_names=["angle"],
    )


def soften(small: Tensor) -> Tensor:
    """(N, 1, 8, 8) uint8 -> (N, 1, S, S) floats 0..255, with the margin, smooth."""
    x = F.pad(small.float(), (MARGIN,) * 4)
    x = F.interpolate(x, scale_factor=FINE, mode="bicubic", align_corners=False)
    reach = round(3 * SOFT * FINE)
    bell = torch.exp(-0.5 * (torch.arange(-reach, reach + 1) / (SOFT * FINE)) ** 2)
    bell = bell / bell.sum()
    x = F.conv2d(x, bell.view(1, 1, 1, -1), padding=(0, reach))
    return F.conv2d(x, bell.view(1, 1, -1, 1), padding=(reach, 0))


def turn_digits(x: Tensor, angles: Tensor, shifts: Tensor) -> Tensor:
    """Turn (B, 1, S, S) counter-clockwise by degrees, shift it by pixels of the small picture, make it small, round."""
    cos, sin = angles.deg2rad().cos(), angles.deg2rad().sin()
    turn = torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)  # output to input, y points down
    maps = torch.cat([turn, turn @ (-2 / OUT * shifts[:, :, None])], 2).float()
    x = F.grid_sample(x, F.affine_grid(maps, list(x.shape), align_corners=False), align_corners=False)
    x = F.interpolate(x, size=(OUT, OUT), mode="bilinear", antialias=True, align_corners=False)
    centres = torch.arange(OUT) + 0.5 - OUT / 2
    inside = (centres[:, None] ** 2 + centres**2).sqrt() <= OUT / 2
    return (x * inside).round().clamp(0, 255).to(torch.uint8)
