"""Draw the sample pictures of the server's page, src/vitral/serving/page/samples: `python scripts/make_samples.py`.

A window and hills are drawn from formulas; the digits are those that vitral has inside (UCI, CC BY 4.0).
"""

from pathlib import Path

import numpy as np
from PIL import Image

from vitral.data.sources.digits import load_digits
from vitral.data.sources.scenes_digits import make_digit_scenes

FOLDER = Path(__file__).parents[1] / "src" / "vitral" / "serving" / "page" / "samples"
GLASS = [(11, 98, 164), (86, 180, 233), (230, 159, 0), (240, 228, 66), (213, 94, 0), (0, 158, 115), (204, 121, 167)]


def window(size: int = 224) -> Image.Image:
    """A rose of coloured glass: sectors and rings, with lead between them."""
    y, x = (np.mgrid[0:size, 0:size] + 0.5) / size * 2 - 1
    r, angle = np.hypot(x, y), np.arctan2(y, x)
    ring = np.digitize(r, [0.22, 0.5, 0.76, 0.96])
    turn = (angle / (2 * np.pi) * 12 + 0.5 * (ring % 2)) % 12
    colours = np.array(GLASS)[(turn.astype(int) * 3 + ring * 2) % len(GLASS)].astype(float)
    light = 0.72 + 0.28 * np.cos(3 * r) + 0.08 * np.sin(9 * angle)
    lead = (np.abs(turn - np.round(turn)) * r < 0.05) & (r > 0.22)
    for edge in (0.22, 0.5, 0.76, 0.96):
        lead |= np.abs(r - edge) < 0.016
    pixels = np.where((lead | (r > 0.96))[..., None], 28, colours * light[..., None])
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).quantize(48)


def hills(size: tuple[int, int] = (192, 256)) -> Image.Image:
    """A sun over hills."""
    H, W = size
    y, x = np.mgrid[0:H, 0:W]
    sky = np.array([86, 150, 214]) + (y / H)[..., None] * np.array([150, 60, -90])
    sun = np.hypot(x - 0.68 * W, y - 0.36 * H) < 0.11 * H
    pixels = np.where(sun[..., None], [255, 236, 150], sky)
    for height, wave, colour in ((0.55, 31, (92, 122, 110)), (0.68, 47, (58, 104, 72)), (0.82, 67, (34, 76, 48))):
        top = H * (height + 0.06 * np.sin(x / wave + height * 9) + 0.03 * np.sin(x / (wave / 2.7)))
        pixels = np.where((y > top)[..., None], colour, pixels)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).quantize(64)


def main() -> None:
    """Write all of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    made = {"window": window(), "hills": hills()}
    for name, data, place in (("digit", load_digits(), 7), ("scene", make_digit_scenes(train=8, test=2), 1)):
        pixels = data.images.read(place, "rgb", None).permute(1, 2, 0).numpy()
        made[name] = Image.fromarray(np.ascontiguousarray(pixels)).quantize(32)
    for name, picture in made.items():
        picture.save(FOLDER / f"{name}.png", optimize=True)
        print(f"{name}.png: {picture.size}, {(FOLDER / f'{name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
