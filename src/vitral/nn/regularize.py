"""What keeps a deep or small-data Transformer trainable: LayerScale, stochastic depth and patch dropout.

(Dropout is torch's own.)
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from vitral.nn.packing import take


class LayerScale(nn.Module):
    """gamma * x, one learned factor per channel, so that a deep network can start near the identity."""

    def __init__(self, dim: int, init_value: float) -> None:
        super().__init__()
        self.init_value = init_value
        self.gamma = nn.Parameter(torch.full((dim,), init_value))

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        return x * self.gamma


class StochasticDepth(nn.Module):
    """Drop the whole residual branch of a sample with probability `rate` in training, and scale up what stays.

    `noise` (B,), if somebody has set it, decides instead of torch's generator: a sample is dropped where it is below
    `rate`.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.noise: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D), with zeros for the dropped samples."""
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        noise = torch.rand(x.shape[0], device=x.device) if self.noise is None else self.noise
        kept = (noise >= self.rate).to(x).view(-1, *[1] * (x.ndim - 1))
        return x * (kept / keep)


class PatchDropout(nn.Module):
    """Leave a share of the patches of each image out in training, so that a step costs less (Liu et al., 2022).

    `draw`, if somebody has set it, gives the numbers (B, N) instead of torch's generator: the patches with the largest
    go. The first `prefix` tokens always stay. (PatchDropout: arXiv:2208.07220.)
    """

    def __init__(self, rate: float, prefix: int) -> None:
        super().__init__()
        self.rate, self.prefix = rate, prefix
        self.draw: Callable[[int], Tensor] | None = None

    def kept(self, patches: int) -> int:
        """How many of the patches stay, at least one."""
        return max(patches - round(patches * self.rate), 1)

    def forward(self, z: Tensor, visible: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Tokens (B, R + N, D) and which of them are visible (B, R + N), None for all -> those that stay, in order."""
        (B, T, _), R = z.shape, self.prefix
        if not self.training or self.rate == 0:
            return z, visible
        noise = torch.rand(B, T - R, device=z.device) if self.draw is None else self.draw(T - R).to(z.device)
        if visible is not None:  # hidden patches go first
            noise = noise + (~visible[:, R:]).to(noise)
        stay = noise.argsort(dim=1, stable=True)[:, : self.kept(T - R)].sort(dim=1).values + R  # (B, V)
        stay = torch.cat([torch.arange(R, device=z.device).expand(B, -1), stay], dim=1)
        return take(z, stay), None if visible is None else visible.gather(1, stay)


def stochastic_depth_rates(last: float, depth: int) -> list[float]:
    """Rates rising linearly from 0 in the first block to `last` in the last."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]
