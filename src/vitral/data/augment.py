"""Augmentation of a whole batch at once: every sample by numbers of its own (`Noise`), every operation vectorised.

Geometry (flip, shift, turn, zoom, shear) is one affine map per sample and one resampling; colour follows; then erasing,
mixup and cutmix. Partners of a mix are neighbours in the batch, which the loader has shuffled: sample i and i XOR 1.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.config import Augmentation, Preprocess
from vitral.data.noise import Noise
from vitral.data.transforms import normalize


@dataclass(frozen=True)
class Mixed:
    """What is ready for the model, images (B, C, H, W), crops of them or tokens (B, T), the share (B,) of each that is
    its own and not its neighbour's, and the maps (B, 2, 3) that images were moved by.
    """

    inputs: Any
    own: Tensor
    maps: Tensor | None = None


def augment(images: Tensor, noise: Noise, a: Augmentation, p: Preprocess, mirror: bool = True) -> Mixed:
    """uint8 (B, C, H, W) -> augmented, normalised floats, and how they were moved and mixed.

    What a map brings in from outside is the mirrored image, or the mean colour where things in the image are counted.
    """
    x = images.float() / 255
    maps = affine_maps(noise, a, (x.shape[2], x.shape[3]))
    x = warp(x, maps, None if mirror else x.new_tensor(p.mean))
    x = recolor(x, noise, a)
    x = normalize(x, p)
    x = erase(x, noise, a.erasing)
    return replace(mix(x, noise, a.mixup, a.cutmix), maps=maps)


# ---- geometry ----


def affine_maps(noise: Noise, a: Augmentation, size: tuple[int, int]) -> Tensor | None:
    """(B, 2, 3) maps from output to input coordinates in -1..1, None where nothing is to be moved."""
    B = len(noise)
    random_ops = _random_operations(noise, a)
    moves = a.flip or a.shift or a.rotate or a.zoom or a.shear
    if not moves and random_ops is None:
        return None
    one, zero = torch.ones(B, dtype=torch.float64), torch.zeros(B, dtype=torch.float64)
    sign = torch.where(noise.chance("flip", a.flip), -one, one)
    angle = noise.between("rotate", -a.rotate, a.rotate) * (math.pi / 180)
    grow = torch.exp(noise.between("zoom", -1, 1) * math.log1p(a.zoom))
    shear_x, shear_y = noise.between("shear x", -a.shear, a.shear), zero.clone()
    move_x, move_y = (2 * noise.between(s, -a.shift, a.shift) for s in ("shift x", "shift y"))
    if random_ops is not None:
        chosen, strength = random_ops
        for k in range(chosen.shape[1]):
            amount = strength[:, k]
            angle = angle + _if(chosen[:, k], "rotate", amount * math.pi / 6)
            shear_x = shear_x + _if(chosen[:, k], "shear x", amount * 0.3)
            shear_y = shear_y + _if(chosen[:, k], "shear y", amount * 0.3)
            move_x = move_x + _if(chosen[:, k], "shift x", amount * 0.6)
            move_y = move_y + _if(chosen[:, k], "shift y", amount * 0.6)
    # Turned in pixels, not in units of the sides, so that a turn stays a turn in an oblong image.
    aspect = size[1] / size[0]
    cos, sin = angle.cos() / grow, angle.sin() / grow
    row_x = torch.stack([sign * (cos + sin * shear_y), sign * (-sin + cos * shear_x) / aspect, move_x], 1)
    row_y = torch.stack([(sin + cos * shear_y) * aspect, cos + sin * shear_x, move_y], 1)
    return torch.stack([row_x, row_y], 1).float()


def warp(x: Tensor, maps: Tensor | None, fill: Tensor | None = None) -> Tensor:
    """Resample (B, C, H, W) through one affine map per sample; outside is a colour (C,), or mirrored at the border."""
    if maps is None:
        return x
    grid = F.affine_grid(maps.to(x), list(x.shape), align_corners=False)
    if fill is None:
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
    colour = fill[:, None, None]
    return F.grid_sample(x - colour, grid, mode="bilinear", padding_mode="zeros", align_corners=False) + colour


# ---- RandAugment and TrivialAugment ----

_GEOMETRIC = ("rotate", "shear x", "shear y", "shift x", "shift y")
_COLOUR = ("brightness", "contrast", "saturation", "sharpness", "posterize", "solarize", "autocontrast", "equalize")
OPERATIONS = ("identity", *_GEOMETRIC, *_COLOUR)


def _if(chosen: Tensor, operation: str, amount: Tensor) -> Tensor:
    return torch.where(chosen == OPERATIONS.index(operation), amount, torch.zeros_like(amount))


def _random_operations(noise: Noise, a: Augmentation) -> tuple[Tensor, Tensor] | None:
    """Which operations (B, n) each sample gets, and their signed strengths in -1..1.

    RandAugment: n of a fixed magnitude. TrivialAugment: one of a random magnitude.
    """
    if a.policy == "none":
        return None
    count = a.operations if a.policy == "rand" else 1
    chosen = noise.choice("op", len(OPERATIONS), count)
    sign = torch.where(noise.uniform("op sign", count) < 0.5, -1.0, 1.0)
    strength = torch.full(sign.shape, a.magnitude) if a.policy == "rand" else noise.uniform("op size", count)
    return chosen, sign.double() * strength.double()


def recolor(x: Tensor, noise: Noise, a: Augmentation) -> Tensor:
    """Colour jitter, then the colour operations of the policy, on floats in 0..1."""
    if a.color_jitter:
        for name in ("brightness", "contrast", "saturation"):
            x = _colour(name, x, noise.between(f"{name[:6]}*", -a.color_jitter, a.color_jitter))
    random_ops = _random_operations(noise, a)
    if random_ops is not None:
        chosen, strength = random_ops
        for k in range(chosen.shape[1]):
            for name in _COLOUR:
                at = (chosen[:, k] == OPERATIONS.index(name)).nonzero()[:, 0]
                if len(at):
                    x = x.index_copy(0, at, _colour(name, x[at], 0.9 * strength[at, k]))
    for stream, probability, change in (("grey ?", a.grey, _grey), ("solar ?", a.solarize, _solarize)):
        if probability:
            hit = noise.chance(stream, probability)[:, None, None, None].to(x.device)
            x = torch.where(hit, change(x), x)
    return blur(x, noise, a.blur)


def blur(x: Tensor, noise: Noise, probability: float) -> Tensor:
    """Blur some images (B, C, H, W) by a Gaussian, each by one of its own width: 0.05 to 1 % of the larger side."""
    if not probability:
        return x
    C, side = x.shape[1], max(x.shape[2:])
    sigma = noise.between("blur", 0.0005, 0.01).to(x) * side
    radius = min(math.ceil(0.03 * side), min(x.shape[2:]) - 1)
    offsets = torch.arange(-radius, radius + 1, device=x.device)
    kernel = torch.exp(-0.5 * (offsets / sigma[:, None]).square())
    kernel = (kernel / kernel.sum(1, keepdim=True)).repeat_interleave(C, 0)[:, None]  # (B C, 1, 2 radius + 1)
    y = F.pad(x, (radius,) * 4, mode="reflect").flatten(0, 1)[None]
    y = F.conv2d(y, kernel[:, :, None], groups=len(kernel))
    y = F.conv2d(y, kernel[..., None], groups=len(kernel)).view_as(x)
    hit = noise.chance("blur ?", probability)[:, None, None, None].to(x.device)
    return torch.where(hit, y, x)


def _solarize(x: Tensor) -> Tensor:
    return torch.where(x >= 0.5, 1 - x, x)


def _grey(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x.mean(1, keepdim=True)
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def _colour(name: str, x: Tensor, amount: Tensor) -> Tensor:
    """One colour operation with a strength in -1..1 per sample; 0 leaves the image as it is, but for the last two."""
    f = amount.to(x)[:, None, None, None]
    if name == "brightness":
        y = x * (1 + f)
    elif name == "contrast":
        mean = _grey(x).mean((2, 3), keepdim=True)
        y = mean + (x - mean) * (1 + f)
    elif name == "saturation":
        grey = _grey(x)
        y = grey + (x - grey) * (1 + f)
    elif name == "sharpness":
        soft = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
        y = soft + (x - soft) * (1 + f)
    elif name == "posterize":
        levels = 2 ** (8 - (6 * f.abs()).round())
        y = (x * levels).floor().clamp(max=levels - 1) / (levels - 1).clamp(min=1)
        y = torch.where(f == 0, x, y)
    elif name == "solarize":
        y = torch.where(x >= 1 - f.abs() + 1e-6, 1 - x, x)
    elif name == "autocontrast":
        low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        y = torch.where(high > low, (x - low) / (high - low).clamp(min=1e-6), x)
    else:
        y = _equalize(x)
    return y.clamp(0, 1)


def _equalize(x: Tensor) -> Tensor:
    """Spread each channel's values evenly over 0..1: a pixel becomes the share of pixels below it."""
    levels = (x * 255).round().long().flatten(2)  # (B, C, HW)
    counts = x.new_zeros(*levels.shape[:2], 256).scatter_add_(2, levels, torch.ones_like(levels, dtype=x.dtype))
    below = counts.cumsum(2) - counts
    brightest = counts.gather(2, levels.amax(2, keepdim=True))
    spread = below / (levels.shape[2] - brightest).clamp(min=1)
    even = (brightest == levels.shape[2])[..., None]
    return torch.where(even, x, spread.gather(2, levels).view_as(x))


# ---- erasing and mixing ----


def boxes(noise: Noise, stream: str, share: Tensor, aspect: Tensor, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Boolean boxes (B, 1, H, W) of about a `share` of the area, and the share (B,) they really cover."""
    H, W = size
    h = ((share * aspect).sqrt().clamp(max=1) * H).round()
    w = ((share / aspect).sqrt().clamp(max=1) * W).round()
    place = noise.uniform(stream, 2)
    top, left = (place[:, 0] * (H - h + 1)).floor(), (place[:, 1] * (W - w + 1)).floor()
    rows, columns = torch.arange(H)[None], torch.arange(W)[None]
    inside_h = (rows >= top[:, None]) & (rows < (top + h)[:, None])
    inside_w = (columns >= left[:, None]) & (columns < (left + w)[:, None])
    box = inside_h[:, None, :, None] & inside_w[:, None, None, :]
    return box, box.double().mean((1, 2, 3))


def erase(x: Tensor, noise: Noise, probability: float) -> Tensor:
    """Set a random box of 2 to 33 % of the area to the mean colour, which is 0 after normalisation."""
    if not probability:
        return x
    share = noise.between("erase", 0.02, 0.33)
    aspect = torch.exp(noise.between("erase a", math.log(0.3), math.log(1 / 0.3)))
    box, _ = boxes(noise, "erase xy", share, aspect, (x.shape[2], x.shape[3]))
    hit = noise.chance("erase ?", probability)[:, None, None, None]
    return x.masked_fill((box & hit).to(x.device), 0)


def neighbours(batch: int) -> Tensor:
    """The partner of each sample: the other of its pair, itself if it is left over."""
    partner = torch.arange(batch) ^ 1
    return torch.where(partner < batch, partner, torch.arange(batch))


def mix(x: Tensor, noise: Noise, mixup: float, cutmix: float) -> Mixed:
    """Blend each image with its neighbour (mixup), or paste a box of the neighbour into it (cutmix), or neither.

    Both given: half of the samples each. `mixup` and `cutmix` are the alpha of the Beta that the share is drawn from.
    """
    B = len(noise)
    own = torch.ones(B, dtype=torch.float64)
    if not mixup and not cutmix:
        return Mixed(x, own.to(x))
    partner = x[neighbours(B).to(x.device)]
    cut = noise.chance("mix ?", 0.5 if mixup and cutmix else float(bool(cutmix)))
    if mixup:
        share = noise.beta("mixup", mixup)
        own = torch.where(cut, own, torch.maximum(share, 1 - share))
    blend = own.to(x)[:, None, None, None]
    y = x * blend + partner * (1 - blend)
    if cutmix:
        box, covered = boxes(noise, "cut xy", noise.beta("cutmix", cutmix), torch.ones(B), (x.shape[2], x.shape[3]))
        box = box & cut[:, None, None, None]
        y = torch.where(box.to(x.device), partner, y)
        own = torch.where(cut, 1 - covered, own)
    return Mixed(y, own.to(x))
