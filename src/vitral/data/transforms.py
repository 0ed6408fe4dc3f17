"""From an image of any size to the size the model is fed: the evaluation way, and the random way of training.

Both work on uint8 tensors (C, H, W) and are built from the `Preprocess` that is saved with the model.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.config import Preprocess, pair
from vitral.data.images import AtLeast
from vitral.data.noise import Noise
from vitral.data.targets import View

Size = tuple[int, int]


def resize(x: Tensor, size: Size, interpolation: str) -> Tensor:
    """Antialiased resize of (C, H, W) uint8, by torch's native 8-bit kernel."""
    if tuple(x.shape[-2:]) == tuple(size):
        return x
    return F.interpolate(x[None], size=size, mode=interpolation, antialias=True, align_corners=False)[0]


def resized_size(size: Size, p: Preprocess) -> Size:
    """The size that an image is resized to before the centre is cut out, or what is missing padded.

    Sides are rounded down, as everybody does: a crop that is off by half a pixel is another image.
    """
    height, width = pair(p.img_size)
    if p.crop_mode == "squash":
        return height, width
    if p.crop_mode == "squash_center":
        return int(height / p.crop_pct + 1e-6), int(width / p.crop_pct + 1e-6)
    H, W = size
    if p.crop_mode == "pad":
        scale = min(height / H, width / W)
        return max(min(round(H * scale), height), 1), max(min(round(W * scale), width), 1)
    if height / H >= width / W:
        short = int(height / p.crop_pct + 1e-6)
        return short, max(width, short * W // H)
    short = int(width / p.crop_pct + 1e-6)
    return max(height, short * H // W), short


def eval_transform(x: Tensor, p: Preprocess) -> Tensor:
    """(C, H, W) -> (C, h, w): resize, then cut the centre out, or pad."""
    height, width = pair(p.img_size)
    x = resize(x, resized_size((x.shape[1], x.shape[2]), p), p.interpolation)
    if p.crop_mode == "pad":
        return _pad(x, (height, width), p)
    top, left = (x.shape[1] - height) // 2, (x.shape[2] - width) // 2
    return x[:, top : top + height, left : left + width]


def eval_view(size: Size, p: Preprocess) -> View:
    """The part of an image of this size that `eval_transform` shows."""
    height, width = pair(p.img_size)
    H, W = resized_size(size, p)
    if p.crop_mode == "pad":
        return View(0.0, 0.0, height / H, width / W)
    return View((H - height) // 2 / H, (W - width) // 2 / W, height / H, width / W)


def _pad(x: Tensor, size: Size, p: Preprocess) -> Tensor:
    """Fill up to the size with the mean colour, at the right and below."""
    colour = x.new_tensor([round(255 * min(max(mean, 0.0), 1.0)) for mean in p.mean])
    canvas = colour[:, None, None].expand(-1, *size).clone()
    canvas[:, : x.shape[1], : x.shape[2]] = x
    return canvas


def random_resized_crop(
    x: Tensor, p: Preprocess, noise: Noise, scale: tuple[float, float], ratio: tuple[float, float]
) -> Tensor:
    """Cut out a random box of a share `scale` of the area and an aspect `ratio`, and resize it to the target."""
    return show(x, random_view((x.shape[1], x.shape[2]), noise, scale, ratio), p)


def show(x: Tensor, view: View, p: Preprocess) -> Tensor:
    """Cut a part out of (C, H, W) and resize it to the target."""
    H, W = x.shape[1], x.shape[2]
    top, left = round(view.top * H), round(view.left * W)
    h, w = round(view.height * H), round(view.width * W)
    return resize(x[:, top : top + h, left : left + w], pair(p.img_size), p.interpolation)


def random_view(size: Size, noise: Noise, scale: tuple[float, float], ratio: tuple[float, float]) -> View:
    """A random box of a share `scale` of the area and an aspect `ratio`, on whole pixels."""
    return random_views([size], noise, scale, ratio)[0]


def random_views(
    sizes: Sequence[Size], noise: Noise, scale: tuple[float, float], ratio: tuple[float, float]
) -> list[View]:
    """A random box for each of the images that the noise belongs to.

    Ten tries, as everybody does; then the largest centred box of a permitted aspect.
    """
    views = []
    draws = noise.uniform("crop", 40).view(len(noise), 10, 4)
    aspects = torch.exp(math.log(ratio[0]) + math.log(ratio[1] / ratio[0]) * draws[:, :, 1])
    areas = scale[0] + (scale[1] - scale[0]) * draws[:, :, 0]
    wide, high = (areas * aspects).sqrt(), (areas / aspects).sqrt()  # of an image of area 1
    tries = torch.stack([wide, high, draws[:, :, 2], draws[:, :, 3]], dim=2).tolist()
    for (H, W), boxes in zip(sizes, tries, strict=True):
        side = math.sqrt(H * W)
        for wide_, high_, down, right in boxes:
            w, h = round(side * wide_), round(side * high_)
            if 0 < w <= W and 0 < h <= H:
                top, left = int(down * (H - h + 1)), int(right * (W - w + 1))
                break
        else:
            w, h = min(W, round(H * ratio[1])), min(H, round(W / ratio[0]))
            top, left = (H - h) // 2, (W - w) // 2
        views.append(View(top / H, left / W, h / H, w / W))
    return views


def normalize(x: Tensor, p: Preprocess) -> Tensor:
    """uint8 (B, C, H, W) or floats in 0..1 -> floats of mean 0 and deviation 1 by the preprocessing's numbers."""
    if not x.is_floating_point():
        x = x.float() / 255
    mean, std = (x.new_tensor(values)[:, None, None] for values in (p.mean, p.std))
    return (x - mean) / std


def denormalize(x: Tensor, p: Preprocess) -> Tensor:
    """Normalised floats (B, C, H, W) -> uint8."""
    mean, std = (x.new_tensor(values)[:, None, None] for values in (p.mean, p.std))
    return (255 * (x * std + mean)).round().clamp(0, 255).to(torch.uint8)


def decode_size(p: Preprocess, smallest_crop: float = 1.0) -> AtLeast:
    """How large an image must at least be decoded, if a crop of that share of its area is to fill the target.

    For evaluation, where there is no random crop, twice that, and only by a factor that divides the sides: a JPEG that
    was made smaller while it was decoded then comes out nearly as from the whole (docs/log.md has the figures).
    """
    height, width = pair(p.img_size)
    factor = 1 / math.sqrt(smallest_crop) / (1.0 if p.crop_mode in ("squash", "pad") else p.crop_pct)
    exact = smallest_crop == 1
    factor *= 2 if exact else 1
    return AtLeast(math.ceil(height * factor), math.ceil(width * factor), even=exact)
