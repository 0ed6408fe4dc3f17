"""Where maps belong on the original image: the crop that the model was fed, and the pixels that each cell covers.

H, W: size of the picture, G_h, G_w: cells of a map. Coordinates are pixels of the picture; pixel i spans [i, i + 1).
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from vitral.data.targets import View
from vitral.data.transforms import Size, resize
from vitral.errors import unknown_name
from vitral.explanation.colours import paint, scale_of

if TYPE_CHECKING:
    from vitral.explanation.explain import Explanation

Style = Literal["patches", "smooth"]
"""One colour for each patch, or values interpolated between the centres of patches."""
DEFAULT_STYLE: Style = "patches"
DRAWN = 1600
"""Longest side of a drawn picture, in pixels."""
STRENGTH = 0.6
"""Opacity of a map over the picture."""


def check_style(style: str) -> None:
    """Raise for an unknown style."""
    if style not in get_args(Style):
        raise unknown_name("style", style, get_args(Style))


def bounded(size: Size, longest: float) -> Size:
    """A size scaled down, if needed, so that its longer side is at most `longest`."""
    scale = min(1.0, longest / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


@dataclass(frozen=True)
class Placement:
    """A picture of the original image, and the part of it that the maps cover."""

    picture: Tensor
    """uint8 (C, H, W): the original, extended by the padding that the model was fed, if any."""
    crop: tuple[float, float, float, float]
    """Left, top, right and bottom of what the model was fed."""
    cell: tuple[float, float]
    """Height and width of a cell of the maps."""

    @property
    def size(self) -> Size:
        """Height and width of the picture."""
        return self.picture.shape[1], self.picture.shape[2]

    @property
    def cropped(self) -> bool:
        """Whether the model was fed only a part of the picture."""
        left, top, right, bottom = self.crop
        return max(left, top, self.size[1] - right, self.size[0] - bottom) >= 0.5

    def corner(self, row: float, column: float) -> tuple[float, float]:
        """(x, y) of the upper left corner of a cell; a cell that extends beyond the crop ends with it."""
        left, top, right, bottom = self.crop
        return min(left + column * self.cell[1], right), min(top + row * self.cell[0], bottom)

    def inside(self) -> Tensor:
        """bool (H, W): the pixels whose centre is in the crop."""
        left, top, right, bottom = self.crop
        y, x = (torch.arange(length) + 0.5 for length in self.size)
        return ((y >= top) & (y < bottom))[:, None] & (x >= left) & (x < right)

    def spread(self, maps: Tensor, style: Style) -> Tensor:
        """(..., G_h, G_w) -> (..., H, W): the value of each pixel, by its centre; only those inside the crop count."""
        (H, W), (G_h, G_w), (left, top, _, _) = self.size, maps.shape[-2:], self.crop
        rows = _weights(H, top, self.cell[0], G_h, style)
        columns = _weights(W, left, self.cell[1], G_w, style)
        return rows @ maps.double() @ columns.mT

    def blend(self, map_: Tensor, style: Style, strength: float = STRENGTH) -> np.ndarray:
        """The picture with a map (G_h, G_w) over it, by the colours of `colours.py`: uint8 (H, W, 3)."""
        return self.cover(paint(self.spread(map_, style), scale_of(map_)), strength)

    def cover(self, colours: np.ndarray, strength: float = 1.0) -> np.ndarray:
        """The picture with colours uint8 (H, W, 3) over the crop: uint8 (H, W, 3)."""
        photo = as_picture(self.picture)
        mixed = ((1 - strength) * photo + strength * colours).round().astype(np.uint8)
        return np.where(self.inside()[:, :, None].numpy(), mixed, photo)

    def outlined(self, pixels: np.ndarray) -> Image.Image:
        """Pixels of the picture's size with the crop outlined: white next to black, visible on any colour."""
        image = Image.fromarray(pixels)
        if self.cropped:
            left, top, right, bottom = (round(edge) for edge in self.crop)
            line = max(1, round(max(self.size) / 224))
            pen = ImageDraw.Draw(image)
            pen.rectangle((left - line, top - line, right + line - 1, bottom + line - 1), outline="black", width=line)
            pen.rectangle((left, top, right - 1, bottom - 1), outline="white", width=line)
        return image


def _weights(pixels: int, start: float, cell: float, cells: int, style: Style) -> Tensor:
    """(pixels, cells): how much of each cell's value a pixel has along one axis; rows sum to 1."""
    at = (torch.arange(pixels, dtype=torch.float64) + 0.5 - start) / cell  # in cells
    if style == "smooth":
        at = (at - 0.5).clamp(0, cells - 1)
        return (1 - (at[:, None] - torch.arange(cells)).abs()).clamp(min=0)
    return torch.nn.functional.one_hot(at.floor().clamp(0, cells - 1).long(), cells).double()


def place(e: "Explanation", longest: float = DRAWN, least: Size = (1, 1), area: float = math.inf) -> Placement:
    """Place the maps of an explanation on its original image.

    Args:
        e: The explanation; without an original image its maps are placed on the prepared one.
        longest: Longest side of the picture, in pixels.
        least: An original that is smaller in height and width is enlarged by an integer factor.
        area: Largest number of pixels of the picture.
    """
    original, view = (e.image, View.whole()) if e.original is None else (e.original, e.view)
    H, W = original.shape[1:]
    full = max(1.0, view.top + view.height) * H, max(1.0, view.left + view.width) * W  # with padding
    longest = min(longest, math.sqrt(area * max(full) / min(full)))
    h, w = bounded((H, W), longest * max(H, W) / max(full))
    picture = resize(original, (h, w), "bicubic")
    factor = math.ceil(min(least[0] / full[0], least[1] / full[1]))
    if factor > 1 and (h, w) == (H, W):
        picture = picture.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        h, w = h * factor, w * factor
    crop = view.left * w, view.top * h, (view.left + view.width) * w, (view.top + view.height) * h
    canvas = e.image[:, -1:, -1:].expand(-1, max(h, math.ceil(crop[3] - 1e-6)), max(w, math.ceil(crop[2] - 1e-6)))
    canvas = canvas.clone()  # padding is at the right and at the bottom, in the colour of the last pixel
    canvas[:, :h, :w] = picture
    cell = view.height * h * e.patch[0] / e.image.shape[1], view.width * w * e.patch[1] / e.image.shape[2]
    return Placement(canvas, crop, cell)


def as_picture(image: Tensor) -> np.ndarray:
    """uint8 (C, H, W) -> (H, W, 3)."""
    return np.ascontiguousarray(image.expand(3, -1, -1).permute(1, 2, 0).numpy())
