"""The one rule by which every map gets its colours, in pictures, pages and reports alike.

Zero is always dark and the largest value bright: yellow above zero by cividis, which reads the same to colour-blind
eyes, light blue below. So a map that is nearly the same everywhere looks it, and only the zero is common to all maps.
"""

from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap
from torch import Tensor

SHADES = 256
"""Colours from zero to the brightest, and as many from zero down."""
CLIPPED = 1 / 200
"""Share of the patches that may be brighter than the scale reaches."""


def _shades() -> np.ndarray:
    up = matplotlib.colormaps["cividis"](np.linspace(0, 1, SHADES))[:, :3]
    down = LinearSegmentedColormap.from_list("below", [up[0], "#0f79c4", "#9be4ff"])(np.linspace(1, 0, SHADES))[:, :3]
    return np.concatenate([down, up])


TABLE = (255 * _shades()).round().astype(np.uint8)
"""(2 SHADES, 3): from the most below zero to the most above."""


def colormap(signed: bool) -> Colormap:
    """The table for matplotlib: from 0 up, or with what lies below zero too."""
    return ListedColormap(TABLE / 255 if signed else TABLE[SHADES:] / 255)


@dataclass(frozen=True)
class Scale:
    """From which number to which the values of a map go, and which of them has the brightest colour."""

    low: float
    high: float
    top: float
    beyond: int
    """Patches above `top`, that have its colour too."""

    @property
    def bottom(self) -> float:
        """Where the colours begin: at zero, unless something lies below it."""
        return -self.top if self.low < 0 else 0.0

    def text(self) -> str:
        """The range in numbers, and what the colours leave out."""
        text = f"{number(self.low)} to {number(self.high)}"
        if self.beyond:
            text += f", {self.beyond} cut off at {number(self.top)}"
        return text


def scale_of(map_: Tensor) -> Scale:
    """The scale from zero to the largest value.

    A few outliers, up to a patch in 200 and more than twice all others, are cut off so that the others can be told
    apart; unless they hold half of everything, for then they are what is to be seen.
    """
    sizes = map_.detach().double().abs().flatten().sort(descending=True).values
    few = int(CLIPPED * len(sizes) + 0.5)
    largest, top = float(sizes[0]), float(sizes[few])
    cut = largest > 2 * top and float(sizes[:few].sum()) < 0.5 * float(sizes.sum())
    top = top if cut else largest
    return Scale(float(map_.min()), float(map_.max()), top or 1.0, few if cut else 0)


def paint(map_: Tensor) -> np.ndarray:
    """(G_h, G_w) -> uint8 (G_h, G_w, 3)."""
    share = (map_.detach().double() / scale_of(map_).top).clamp(-1, 1).numpy()
    steps = np.round((SHADES - 1) * np.abs(share)).astype(int)
    return TABLE[np.where(share < 0, SHADES - 1 - steps, SHADES + steps)]


def number(value: float) -> str:
    """Three digits; two with an exponent where it could not be read otherwise."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"
