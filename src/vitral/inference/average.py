"""Mean of several outputs for the same images: of an image and its mirror image, and of several models."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

Network = Callable[[Tensor], Tensor]


class Averaged:
    """Calls several networks, each on the images and with `mirror` on their mirror images too, and averages.

    The mean of logits is, after a softmax, the normalised geometric mean of the probabilities.
    """

    def __init__(self, networks: Sequence[Any], mirror: bool) -> None:
        self.networks, self.mirror = networks, mirror

    def __call__(self, x: Tensor) -> Tensor:
        """Pixels (B, C, H, W) -> (B, K)."""
        views = (x, x.flip(-1)) if self.mirror else (x,)
        return torch.stack([network(view) for network in self.networks for view in views]).mean(0)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of those networks that have any: their device is that of the images."""
        return chain.from_iterable(each.parameters() for each in self.networks if isinstance(each, nn.Module))
