"""What the training loop needs to know of what is learnt, be it a task with labels or a method without."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.data.noise import Noise
from vitral.nn.regularize import PatchDropout, StochasticDepth


class Objective(ABC):
    """A loss, what to say of a batch, and what is to be done around a step."""

    better: ClassVar[str]
    """The metric that tells which of two models is better; more is better."""
    spatial: ClassVar[bool] = False
    """Whether the answer has places in the image: all of it must then be seen, and two cannot be mixed."""

    @abstractmethod
    def forward(self, model: nn.Module, inputs: Any, targets: Tensor, noise: Noise) -> Any:
        """Outputs in training."""

    @abstractmethod
    def loss(self, outputs: Any, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """Mean loss of a batch: `own` (B,) parts of each image are its own, the rest its partner's."""

    @abstractmethod
    def sums(self, outputs: Any, targets: Tensor) -> dict[str, float]:
        """What a training batch adds to the running metrics, with its `count`."""

    def before_step(self, progress: float, epoch: float, optimizers: Sequence[Optimizer]) -> None:  # noqa: B027
        """Set what changes along the run, at `progress` 0..1 of it."""

    def before_update(self, epoch: float) -> None:  # noqa: B027
        """Take gradients away from what is to rest."""

    def after_update(self) -> None:  # noqa: B027
        """Do what follows a change of the weights."""


def place_noise(model: nn.Module, noise: Noise, device: torch.device) -> None:
    """Let each sample's own numbers decide which branches it skips, and which patches it is seen without."""
    layers = [m for m in model.modules() if isinstance(m, StochasticDepth) and m.rate]
    if layers:
        numbers = noise.uniform("depth", len(layers)).float().to(device)
        for i, layer in enumerate(layers):
            layer.noise = numbers[:, i]
    for m in model.modules():
        if isinstance(m, PatchDropout):
            m.draw = partial(noise.uniform, "patches")
