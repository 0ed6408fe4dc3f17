"""The colours of maps: one rule for pictures, pages and reports.

Zero is always dark and the largest value bright: yellow above zero (cividis, safe for colour-blind readers), light
blue below. A nearly constant map therefore appears constant. All maps share only the zero.
"""

from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.colors import Colormap, LinearSegmentedColormap, ListedColormap
from torch import Tensor

SHADES = 256
"""Colours from zero to the brightest, and as many from zero down."""
CLIPPED = 1 / 200
"""Largest share of the patches that may exceed the scale."""


def _shades() -> np.ndarray:
    up = matplotlib.colormaps["cividis"](np.linspace(0, 1, SHADES))[:, :3]
    down = LinearSegmentedColormap.from_list("below", [up[0], "#0f79c4", "#9be4ff"])(np.linspace(1, 0, SHADES))[:, :3]
    return np.concatenate([down, up])


TABLE = (255 * _shades()).round().astype(np.uint8)
"""(2 SHADES, 3): from the most negative value to the most positive."""


def colormap(signed: bool) -> Colormap:
    """The table for matplotlib: from zero up, or with negative values too."""
    return ListedColormap(TABLE / 255 if signed else TABLE[SHADES:] / 255)


@dataclass(frozen=True)
class Scale:
    """The range of a map's values, and the value with the brightest colour."""

    low: float
    high: float
    top: float
    beyond: int
    """Number of patches above `top`; they are drawn in its colour."""

    @property
    def bottom(self) -> float:
        """The lowest value of the colours: zero, unless there are negative values."""
        return -self.top if self.low < 0 else 0.0

    def text(self) -> str:
        """The range in numbers, and how many values exceed the colours."""
        text = f"{number(self.low)} to {number(self.high)}"
        if self.beyond:
            text += f", {self.beyond} cut off at {number(self.top)}"
        return text


def scale_of(map_: Tensor) -> Scale:
    """The scale from zero to the largest value.

    A few outliers (up to one patch in 200, more than twice as large as all others) are cut off so that the others
    remain distinguishable, unless they hold half of the total.
    """
    sizes = map_.detach().double().abs().flatten().sort(descending=True).values
    few = int(CLIPPED * len(sizes) + 0.5)
    largest, top = float(sizes[0]), float(sizes[few])
    cut = largest > 2 * top and float(sizes[:few].sum()) < 0.5 * float(sizes.sum())
    top = top if cut else largest
    return Scale(float(map_.min()), float(map_.max()), top or 1.0, few if cut else 0)


def paint(map_: Tensor, scale: Scale | None = None) -> np.ndarray:
    """(H, W) -> uint8 (H, W, 3), by the scale of these values unless another is given."""
    share = (map_.detach().double() / (scale or scale_of(map_)).top).clamp(-1, 1).numpy()
    steps = np.round((SHADES - 1) * np.abs(share)).astype(int)
    return TABLE[np.where(share < 0, SHADES - 1 - steps, SHADES + steps)]


def number(value: float) -> str:
    """Three significant digits; two with an exponent for very small and very large numbers."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{float(f'{value:.3g}'):g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"
