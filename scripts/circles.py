"""Write pictures of circles and a table of how many each shows: a small set for regression.

    python scripts/circles.py DIR
    vitral train DIR/circles.csv --label-column count

300 training and 200 test images of 128 x 128 pixels, drawn with seed 0: one to nine discs of different sizes and
colours that do not touch, on a plain background. DIR/circles.csv has the columns image, count and split.
"""

import argparse
import csv
from pathlib import Path
from random import Random

from PIL import Image, ImageDraw

SIZE, MOST, RADII, GAP, SEED = 128, 9, (6, 14), 2, 0
PARTS = {"train": 300, "test": 200}


def place(count: int, chance: Random) -> list[tuple[int, int, int]]:
    """Centres and radii of discs that do not touch."""
    discs: list[tuple[int, int, int]] = []
    while len(discs) < count:
        r = chance.randint(*RADII)
        x, y = (chance.randint(r, SIZE - 1 - r) for _ in range(2))
        if all((x - a) ** 2 + (y - b) ** 2 > (r + c + GAP) ** 2 for a, b, c in discs):
            discs.append((x, y, r))
    return discs


def draw(count: int, chance: Random) -> Image.Image:
    """A picture with so many discs."""
    light = chance.random() < 0.5
    colour = lambda low, high: tuple(chance.randint(low, high) for _ in range(3))  # noqa: E731
    image = Image.new("RGB", (SIZE, SIZE), colour(180, 255) if light else colour(0, 75))
    pen = ImageDraw.Draw(image)
    for x, y, r in place(count, chance):
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour(0, 140) if light else colour(115, 255))
    return image


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args().folder
    (folder / "images").mkdir(parents=True, exist_ok=True)
    chance = Random(SEED)  # noqa: S311
    with open(folder / "circles.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "count", "split"])
        for part, images in PARTS.items():
            for i in range(images):
                count, path = chance.randint(1, MOST), f"images/{part}-{i:03}.png"
                draw(count, chance).save(folder / path)
                table.writerow([path, count, part])
    print(f"{folder / 'circles.csv'}: {sum(PARTS.values())} images")


if __name__ == "__main__":
    main()
