"""The token-wise network of a block, and its activations.

MLP(x) = W_2 act(W_1 x + b_1) + b_2. SwiGLU splits the first layer in a gate and a value: W_2 (silu(a) * b) + b_2.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class QuickGELU(nn.Module):
    """x sigmoid(1.702 x), the approximation that OpenAI's CLIP was trained with."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply elementwise."""
        return x * torch.sigmoid(1.702 * x)


class SwiGLU(nn.Module):
    """silu(first half) * second half: (..., 2n) -> (..., n)."""

    def forward(self, x: Tensor) -> Tensor:
        """Gate the second half of the last axis with the first."""
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value


class ExactGELU(nn.GELU):
    """x Phi(x), with Phi the normal distribution itself."""

    def __init__(self) -> None:
        super().__init__(approximate="none")


class TanhGELU(nn.GELU):
    """GELU with Phi approximated by tanh, as in the original JAX code."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


ACTIVATIONS: dict[str, type[nn.Module]] = {
    "gelu": ExactGELU,
    "gelu_tanh": TanhGELU,
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "swiglu": SwiGLU,
    "tanh": nn.Tanh,
}


class MLP(nn.Module):
    """W_2 act(W_1 x + b_1) + b_2: (..., dim) -> (..., out).

    `width` is what the first layer gives, `hidden` what the activation leaves of it.
    """

    def __init__(self, dim: int, width: int, hidden: int, out: int, act: str, drop: float) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, width)
        self.act = ACTIVATIONS[act]()
        self.drop = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden, out)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to every token alike."""
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))
