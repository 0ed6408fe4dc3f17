"""Is a map true to the model? Deletion and insertion curves (Petsiuk et al., 2018, arXiv:1806.07421).

Patches are taken in the order of the map. Deletion paints them over with the image's mean colour, the most relevant
first: the probability of the class should fall fast (a small area under the curve). Insertion uncovers them on a
blurred image: it should rise fast (a large area). A map at random is the measure of both.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import InputError
from vitral.models.backbone import Backbone


@dataclass(frozen=True)
class Curves:
    """Probabilities of the class (B, steps + 1) as patches go and come, and the areas (B) under them."""

    deletion: Tensor
    insertion: Tensor

    @property
    def deletion_auc(self) -> Tensor:
        """Mean height of the deletion curve, one number an image; less is better."""
        return torch.trapezoid(self.deletion, dx=1 / (self.deletion.shape[1] - 1), dim=1)

    @property
    def insertion_auc(self) -> Tensor:
        """Mean height of the insertion curve, one number an image; more is better."""
        return torch.trapezoid(self.insertion, dx=1 / (self.insertion.shape[1] - 1), dim=1)


@torch.no_grad()
def curves(model: Backbone, x: Tensor, maps: Tensor, target: Tensor, steps: int = 16) -> Curves:
    """Curves of maps (B, G_h, G_w) for classes `target` (B) of images (B, C, H, W)."""
    grid = model.grid_of(x)
    if tuple(maps.shape) != (len(x), *grid):
        raise InputError(f"maps must be {(len(x), *grid)} for these images, got {tuple(maps.shape)}.")
    N = grid[0] * grid[1]
    rank = maps.flatten(1).argsort(1, descending=True).argsort(1)  # 0 for the most relevant patch
    counts = [round(k * N / steps) for k in range(steps + 1)]
    flat, soft = mean_colour(x), blurred(x)
    was = model.training
    model.eval()
    try:
        deleted = [_probability(model, painted(model, x, rank >= n, flat), target) for n in counts]
        inserted = [_probability(model, painted(model, x, rank < n, soft), target) for n in counts]
    finally:
        model.train(was)
    return Curves(torch.stack(deleted, 1), torch.stack(inserted, 1))


def mean_colour(x: Tensor) -> Tensor:
    """Each image's mean colour, everywhere."""
    return x.mean((2, 3), keepdim=True).expand_as(x)


def blurred(x: Tensor) -> Tensor:
    """Each image without its detail: a box of a quarter of the shorter side, three times, nearly a Gaussian."""
    width = max(3, min(x.shape[2:]) // 4 | 1)
    for _ in range(3):
        x = F.avg_pool2d(F.pad(x, [width // 2] * 4, mode="replicate"), width, stride=1)
    return x


def painted(model: Backbone, x: Tensor, kept: Tensor, paint: Tensor) -> Tensor:
    """Images with all patches painted over but those that are kept (B, N)."""
    cover = _cover(kept, model.grid_of(x), model)[:, :, : x.shape[2], : x.shape[3]]
    return x * cover + paint * (1 - cover)


def _cover(kept: Tensor, grid: tuple[int, int], model: Backbone) -> Tensor:
    """(B, N) -> (B, 1, H, W): 1 on the pixels of the patches that are kept, what pads them included."""
    P_h, P_w = model.config.map_strides[-1]
    cells = kept.unflatten(1, grid).float()
    return cells.repeat_interleave(P_h, 1).repeat_interleave(P_w, 2)[:, None]


def _probability(model: Backbone, x: Tensor, target: Tensor) -> Tensor:
    return model(x).softmax(1).gather(1, target[:, None])[:, 0]
