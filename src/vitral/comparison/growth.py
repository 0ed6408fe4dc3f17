"""How cost grows with the side of the image, from the config alone, and by which power of the number of tokens."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vitral.config import pair
from vitral.errors import ConfigError
from vitral.models.cost import model_cost

FACTORS = (1, 2, 4, 8)
"""Sides of the images, as multiples of the model's own."""


def fitted_exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The b of y = a x^b that fits best: the slope of least squares through the logarithms."""
    u, v = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_u, mean_v = sum(u) / len(u), sum(v) / len(v)
    return sum((a - mean_u) * (b - mean_v) for a, b in zip(u, v, strict=True)) / sum((a - mean_u) ** 2 for a in u)


def growth(config: Any, factors: Sequence[int] = FACTORS) -> dict[str, Any]:
    """Multiply-adds of a model at growing sides, in all and of attention's products, with exponents in pixels.

    The number of tokens is the number of pixels over that of a patch, so an exponent in one is an exponent in the
    other, and a CNN, which has no tokens, has it too.
    """
    height, width = pair(config.img_size)
    rows = []
    for factor in factors:
        try:
            cost = model_cost(replace(config, img_size=(factor * height, factor * width)))
        except ConfigError:
            continue  # a side that this model cannot take
        attention = cost.macs_by_part.get("attention", 0)
        side = factor * height
        rows.append({"side": side, "pixels": factor**2 * height * width, "macs": cost.macs, "attention": attention})
    pixels = [row["pixels"] for row in rows]
    exponents = {
        part: fitted_exponent(pixels, [row[part] for row in rows])
        for part in ("macs", "attention")
        if len(rows) > 1 and all(row[part] for row in rows)
    }
    return {"rows": rows, "exponents": exponents}
