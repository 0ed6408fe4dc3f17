"""Augmentation of a batch: vitral beside kornia, the same operations at the same strength.

    python benchmarks/augment.py

Flip, shift, turn, zoom and shear in one affine map, then brightness, contrast and saturation; batches of 128 x 32 x 32
and of 32 x 224 x 224, interleaved, medians. kornia is no part of vitral: `pip install kornia` first. Writes
benchmarks/results/augment.json.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from measure import write_json
from vitral.config import Augmentation, Preprocess
from vitral.data.augment import augment
from vitral.data.noise import Noise

SETTINGS = Augmentation(flip=0.5, shift=0.1, rotate=10, zoom=0.1, shear=0.1, color_jitter=0.3)


def ours(size: int) -> Callable[[Tensor], Tensor]:
    preprocess = Preprocess(img_size=size)
    return lambda x: augment(x, Noise(0, torch.arange(len(x))), SETTINGS, preprocess).inputs


def kornias(size: int) -> Callable[[Tensor], Tensor]:
    import kornia.augmentation as K  # pyright: ignore

    moved = K.RandomAffine(
        10.0, translate=(0.1, 0.1), scale=(0.9, 1.1), shear=5.7, p=1.0, padding_mode="reflection", align_corners=False
    )
    jitter = K.ColorJitter(0.3, 0.3, 0.3, 0.0, p=1.0)
    mean, std = (torch.tensor(v)[:, None, None] for v in (Preprocess().mean, Preprocess().std))
    steps = torch.nn.Sequential(K.RandomHorizontalFlip(p=0.5), moved, jitter)
    return lambda x: (steps(x.float() / 255) - mean) / std


def main() -> None:
    """Measure and print."""
    results = {}
    for batch, size in ((128, 32), (32, 224)):
        x = torch.randint(0, 256, (batch, 3, size, size), dtype=torch.uint8)
        rivals = {"vitral": ours(size), "kornia": kornias(size)}
        times: dict[str, list[float]] = {name: [] for name in rivals}
        for _ in range(15):
            for name, run in rivals.items():
                began = time.perf_counter()
                run(x)
                times[name].append(time.perf_counter() - began)
        speed = {name: batch / statistics.median(values[2:]) for name, values in times.items()}
        results[f"{batch}x{size}x{size}"] = speed
        told = ", ".join(f"{name} {value:,.0f}" for name, value in speed.items())
        print(
            f"{batch} x {size} x {size}: images/s {told}; vitral {speed['vitral'] / speed['kornia']:.2f} times as fast"
        )
    print(f"wrote {write_json('augment', results)}")


if __name__ == "__main__":
    main()
