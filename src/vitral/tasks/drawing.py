"""Pictures of answers: captions, boxes and masks on images, in colours that colour-blind people tell apart."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Okabe and Ito's palette, then hues in even steps, in turn dark, light and between: no two of the first twenty alike.
_PALETTE = [(230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167)]
_SHADES = [(1.0, 0.45), (0.35, 1.0), (0.75, 0.75)]  # saturation and value
SMALLEST = 320
"""Images with a shorter long side are enlarged by a whole factor, so that words fit on them."""


def colour(number: int) -> tuple[int, int, int]:
    """The colour of a class, always the same."""
    if number < len(_PALETTE):
        return _PALETTE[number]
    r, g, b = colorsys.hsv_to_rgb((0.45 + number * 0.61803) % 1, *_SHADES[number % len(_SHADES)])
    return round(255 * r), round(255 * g), round(255 * b)


def enlarged(image: Image.Image) -> tuple[Image.Image, int]:
    """The image in RGB, large enough to draw on, and the factor it was enlarged by."""
    factor = max(1, -(-SMALLEST // max(image.size)))
    return image.convert("RGB").resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST), factor


def _font(height: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(max(12, height // 28))


def captioned(image: Image.Image, text: str) -> Image.Image:
    """The image with a line of text below it."""
    image, _ = enlarged(image)
    font = _font(image.height)
    box = font.getbbox(text)
    canvas = Image.new("RGB", (max(image.width, int(box[2]) + 12), image.height + int(box[3]) + 12), "white")
    canvas.paste(image)
    ImageDraw.Draw(canvas).text((6, image.height + 5), text, fill="black", font=font)
    return canvas


def boxed(
    image: Image.Image, boxes: Sequence[Sequence[float]], texts: Sequence[str], numbers: Sequence[int]
) -> Image.Image:
    """The image with boxes (x0, y0, x1, y1 in its pixels), each with a text, in the colour of its class number."""
    image, factor = enlarged(image)
    draw, font = ImageDraw.Draw(image), _font(image.height)
    width = max(2, max(image.size) // 320)
    for box, text, number in zip(boxes, texts, numbers, strict=True):
        x0, y0, x1, y1 = (factor * value for value in box)
        ink = colour(number)
        draw.rectangle((x0, y0, max(x1 - 1, x0), max(y1 - 1, y0)), outline=ink, width=width)
        if not text:
            continue
        left, top, right, bottom = font.getbbox(text)
        w, h = right - left + 6, bottom - top + 6
        tx, ty = min(max(x0, 0), image.width - w), y0 - h if y0 >= h else min(y1, image.height - h)
        draw.rectangle((tx, ty, tx + w, ty + h), fill=ink)
        draw.text((tx + 3 - left, ty + 3 - top), text, fill="black" if sum(ink) > 330 else "white", font=font)
    return image


def overlaid(image: Image.Image, mask: np.ndarray, labels: Sequence[str], strength: float = 0.5) -> Image.Image:
    """The image under a mask (H, W) of class numbers: class 0 clear, the others coloured, with clean boundaries."""
    image, factor = enlarged(image)
    mask = np.asarray(mask).repeat(factor, 0).repeat(factor, 1)
    pixels = np.asarray(image).astype(np.float32)
    painted = pixels.copy()
    for number in np.unique(mask).tolist():
        if 0 < number < len(labels):
            painted[mask == number] = colour(number - 1)
    pixels = pixels * (1 - strength) + painted * strength
    edge = np.zeros(mask.shape, bool)
    edge[:, 1:] |= mask[:, 1:] != mask[:, :-1]
    edge[1:] |= mask[1:] != mask[:-1]
    pixels[edge] = 255
    return Image.fromarray(pixels.round().astype(np.uint8))
