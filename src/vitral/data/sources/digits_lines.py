"""Lines of one to eight embedded digits, and what they read: pictures to text whose every truth is known.

Made from a seed, always the same. Training, validation and test pictures show different digits, and the litter round
them is of the same digits as they.
"""

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray, stratified_split
from vitral.data.sources.digits import digit_pixels, load_digits
from vitral.errors import DataError

HIGH, WIDE = 32, 128
"""Sides of a picture."""
MOST = 8
"""Digits in a line, at most."""
SMALLEST, LARGEST = 13, 26
"""Sides of a digit."""
UNEVEN = 0.12
"""Share by which a digit is larger or smaller than its line."""
GAP = 9.0
"""Widest space between two digits."""
DANCE = 3.0
"""Pixels by which a digit stands above or below its line."""
SLOPE = 4.0
"""Pixels by which a line rises or falls from end to end, at most."""
PIECES = 3
"""Pieces of digits, too small to tell, that lie on a picture."""
GLOOM, LITTER, FAINTEST = 40, 160, 170
"""Brightest noise of the background, brightest litter, and ink of the faintest line."""
VAL_SHARE = 0.05
"""Share of the training digits that only validation pictures show."""
_STEPS = np.linspace(0, 1, 2 * WIDE)


def make_digit_lines(train: int = 10_000, test: int = 2_000, val: int = 500, seed: int = 0) -> tuple[Data, Tensor]:
    """Draw the lines: grey pictures of 32 x 128 pixels, every length from one to eight equally often.

    The second is (N, 8): the number of the embedded digit at each place of a line, -1 after its end.

    Without validation pictures (`val=0`) all training digits are trained on.
    """
    if min(train, test, val) < 0 or train + test + val == 0:
        raise DataError(f"{train}, {test} and {val} lines cannot be drawn; ask for one or more in all, none below 0.")
    digits = load_digits()
    rest, kept = digits.splits["train"], digits.splits["train"][:0]
    if val:
        rest, kept = stratified_split(digits.targets, rest, VAL_SHARE, seed)
    shown = {"train": rest, "val": kept, "test": digits.splits["test"]}
    n = train + val + test
    parts = dict(zip(shown, torch.arange(n).split([train, val, test]), strict=True))
    draws = _draws(Noise(seed, torch.arange(n)))
    chosen, litter = np.zeros((n, MOST), np.int64), np.zeros((n, PIECES), np.int64)
    for part, at in parts.items():
        if len(at):
            chosen[at] = _choose(draws["digit"][at], shown[part])
            litter[at] = _choose(draws["litter"][at], shown[part])
    chosen[np.arange(MOST) >= draws["count"]] = -1
    labels = digits.targets.tolist()
    data = Data(
        name="digits-lines",
        inputs=ImageArray(_paint(digit_pixels(digits), chosen, litter, draws, seed)),
        targets=torch.zeros(n, 0),
        classes=[],
        kind="none",
        mode="grey",
        recipe="digits-lines",
        texts=["".join(str(labels[k]) for k in row if k >= 0) for row in chosen.tolist()],
        splits={part: at for part, at in parts.items() if len(at)},
        licence=digits.licence,
    )
    return data, torch.from_numpy(chosen)


def _draws(noise: Noise) -> dict[str, np.ndarray]:
    """All random numbers of all lines."""
    n = len(noise)
    return {
        "count": 1 + noise.choice("count", MOST).numpy(),
        "digit": noise.uniform("digit", MOST).numpy(),
        "litter": noise.uniform("litter", PIECES).numpy(),
        "line": noise.uniform("line", 5).numpy(),
        "place": noise.uniform("place", MOST * 4).view(n, MOST, 4).numpy(),
        "piece": noise.uniform("piece", PIECES * 6).view(n, PIECES, 6).numpy(),
        "stroke": noise.uniform("stroke", 6).numpy(),
        "grain": noise.uniform("grain", 2).numpy(),
    }


def _choose(u: np.ndarray, members: Tensor) -> np.ndarray:
    return members.numpy()[(u * len(members)).astype(int)]


# ---- painting ----


def _paint(small: Tensor, chosen: np.ndarray, litter: np.ndarray, draws: dict[str, np.ndarray], seed: int) -> Tensor:
    """(N, 1, 32, 128): noise, pieces of digits, a thin stroke, and the digits over all of them."""
    shades = cache(lambda side: _resize(small, side))
    grain = GLOOM * np.random.Generator(np.random.PCG64(seed)).random((8 * HIGH, 8 * WIDE), dtype=np.float32)
    sides, tops, lefts, inks = _lay_out(draws)
    pixels = np.empty((len(chosen), 1, HIGH, WIDE), np.uint8)
    for i, picture in enumerate(pixels[:, 0]):
        y, x = (int(u * 7 * side) for u, side in zip(draws["grain"][i], (HIGH, WIDE), strict=True))
        canvas = grain[y : y + HIGH, x : x + WIDE].copy()
        _scatter(canvas, shades(SMALLEST)[litter[i]], draws["piece"][i].tolist())
        _strike(canvas, *draws["stroke"][i])
        for k in range(int(draws["count"][i, 0])):
            side, top, left = sides[i, k], tops[i, k], lefts[i, k]
            shade, place = shades(side)[chosen[i, k]], canvas[top : top + side, left : left + side]
            np.maximum(place * (1 - shade), inks[i, k] * shade, out=place)
        np.rint(canvas, out=picture, casting="unsafe")
    return torch.from_numpy(pixels)


def _resize(small: Tensor, side: int) -> np.ndarray:
    """Shades 0..1 (N, side, side) of all digits."""
    grey = F.interpolate(small.float() / 255, size=(side, side), mode="bicubic", antialias=True)
    return grey.clamp(0, 1)[:, 0].numpy()


def _lay_out(draws: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Side, top, left and ink of each digit, (N, 8); what stands after the end of a line has no side."""
    count, line, place = draws["count"], draws["line"][:, :, None], draws["place"]
    shown = np.arange(MOST) < count
    widest = np.clip(WIDE / (count * (1 + UNEVEN)), SMALLEST, LARGEST)
    line_side = SMALLEST + (widest - SMALLEST) * line[:, 0]
    sides = (line_side * (1 + UNEVEN * (2 * place[..., 0] - 1))).astype(int) * shown  # down, or they might not fit
    free = WIDE - sides.sum(1, keepdims=True)
    gaps = GAP * place[..., 1] * shown
    gaps[:, 0] = 0
    gaps *= np.minimum(1, free / np.maximum(gaps.sum(1, keepdims=True), 1))
    start = line[:, 1] * (free - gaps.sum(1, keepdims=True))
    lefts = (start + gaps.cumsum(1) + sides.cumsum(1) - sides).astype(int)
    feet = (HIGH + line_side) / 2 + (HIGH - line_side) * (line[:, 2] - 0.5)
    feet = feet + SLOPE * (2 * line[:, 3] - 1) * (lefts / WIDE - 0.5) + DANCE * (2 * place[..., 2] - 1)
    tops = np.rint(feet - sides).astype(int).clip(0, HIGH - sides)
    inks = (FAINTEST + (255 - FAINTEST) * line[:, 4] + 25 * (place[..., 3] - 0.5)).clip(max=255)
    return sides, tops, lefts, inks.astype(np.float32)


def _scatter(canvas: np.ndarray, shades: np.ndarray, pieces: list[list[float]]) -> None:
    """Litter the canvas with a corner of each digit."""
    for shade, (tall, broad, y, x, top, left) in zip(shades, pieces, strict=True):
        h, w = int(SMALLEST * (0.2 + 0.15 * tall)), int(SMALLEST * (0.2 + 0.15 * broad))
        y, x = int(y * (SMALLEST - h + 1)), int(x * (SMALLEST - w + 1))
        top, left = int(top * (HIGH - h + 1)), int(left * (WIDE - w + 1))
        place = canvas[top : top + h, left : left + w]
        np.maximum(place, LITTER * shade[y : y + h, x : x + w], out=place)


def _strike(canvas: np.ndarray, chance: float, y: float, rise: float, x: float, length: float, ink: float) -> None:
    """Draw a thin, faint stroke on every other canvas."""
    if chance < 0.5:
        return
    rows = (HIGH * (y + 0.4 * (rise - 0.5) * _STEPS)).astype(int)
    columns = (WIDE * (x + (0.1 + 0.4 * length) * _STEPS)).astype(int)
    on = (rows >= 0) & (rows < HIGH) & (columns < WIDE)
    canvas[rows[on], columns[on]] = 50 + 60 * ink
