"""Random numbers that belong to a sample, not to a moment.

Each number is a hash of (seed, stream, sample, index): the same whichever process draws it, in whatever order and
however often, so that one process and several, an unbroken run and a resumed one, see the same augmentation.
The hash is splitmix64 (Steele et al., 2014).
"""

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64, elementwise on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Noise:
    """Uniform numbers for a batch of samples, each told by a whole number that never comes twice in a run."""

    def __init__(self, seed: int, samples: Tensor) -> None:
        self.seed, self.samples = seed, samples
        self._keys = _mix(
            samples.cpu().numpy().astype(np.uint64) * _GOLDEN + _mix(np.array([seed], np.uint64) + _GOLDEN)
        )

    def __len__(self) -> int:
        return len(self._keys)

    def parts(self, of: int, start: int, stop: int) -> "Noise":
        """Numbers for the parts `start` to `stop` of `of` that each sample has, sample by sample."""
        return Noise(self.seed, (self.samples[:, None] * of + torch.arange(start, stop)).flatten())

    def uniform(self, stream: str, n: int = 1) -> Tensor:
        """(B, n) numbers in [0, 1), others for each stream."""
        tag = _mix(np.array([int.from_bytes(stream.encode()[:8].ljust(8), "little")], np.uint64))
        index = np.arange(1, n + 1, dtype=np.uint64) * _GOLDEN
        bits = _mix(_mix(self._keys ^ tag)[:, None] + index)
        return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def between(self, stream: str, low: float, high: float) -> Tensor:
        """(B,) numbers in [low, high)."""
        return low + (high - low) * self.uniform(stream)[:, 0]

    def chance(self, stream: str, probability: float) -> Tensor:
        """(B,) True with the given probability: never at 0, always at 1."""
        return self.uniform(stream)[:, 0] < probability

    def choice(self, stream: str, n: int, count: int = 1) -> Tensor:
        """(B, count) whole numbers from 0 to n - 1."""
        return (self.uniform(stream, count) * n).long().clamp(max=n - 1)

    def beta(self, stream: str, alpha: float) -> Tensor:
        """(B,) numbers from Beta(alpha, alpha), by the inverse of its distribution.

        The lower half is tabulated in v = x^alpha, in which the density has no pole; the upper is its mirror image.
        """
        v = np.linspace(0, 0.5**alpha, 2049)
        density = (1 - v ** (1 / alpha)) ** (alpha - 1)
        cdf = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
        u = self.uniform(stream)[:, 0].numpy()
        lower = np.interp(2 * np.minimum(u, 1 - u), cdf / cdf[-1], v) ** (1 / alpha)
        return torch.from_numpy(np.where(u < 0.5, lower, 1 - lower))
