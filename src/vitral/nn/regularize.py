"""What keeps a deep or small-data Transformer trainable: LayerScale and stochastic depth. (Dropout is torch's own.)"""

import torch
from torch import Tensor, nn


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


def stochastic_depth_rates(last: float, depth: int) -> list[float]:
    """Rates rising linearly from 0 in the first block to `last` in the last."""
    return [last * i / max(depth - 1, 1) for i in range(depth)]
