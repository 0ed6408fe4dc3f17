"""What patch tokens hold: principal components as colours, norms layer by layer, and which patches look alike."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import InputError
from vitral.models.vit import VisionTransformer


def principal_colours(features: Tensor) -> Tensor:
    """Features (B, D, G_h, G_w) -> colours (B, 3, G_h, G_w) in 0..1: three principal components over all images.

    Each component is turned so that its largest weight is positive, and stretched from its 1st to 99th percentile.
    """
    B, D, G_h, G_w = features.shape
    if D < 3 or B * G_h * G_w < 3:
        raise InputError(f"three components need three features and three patches, got shape {tuple(features.shape)}.")
    flat = features.permute(0, 2, 3, 1).reshape(-1, D).double()
    flat = flat - flat.mean(0)
    _, _, directions = torch.linalg.svd(flat, full_matrices=False)
    top = directions[:3]
    if len(top) < 3:
        top = F.pad(top, (0, 0, 0, 3 - len(top)))
    strongest = top.gather(1, top.abs().argmax(1, keepdim=True))
    parts = flat @ (top * strongest.sign()).T  # (patches, 3)
    low, high = torch.quantile(parts, 0.01, dim=0), torch.quantile(parts, 0.99, dim=0)
    parts = ((parts - low) / (high - low).clamp(min=1e-12)).clamp(0, 1)
    return parts.float().view(B, G_h, G_w, 3).permute(0, 3, 1, 2)


@torch.no_grad()
def token_norms(model: VisionTransformer, x: Tensor) -> Tensor:
    """Length of each patch token after each block: (B, L, G_h, G_w). Large outliers are what registers mend."""
    maps = model.intermediate(x, "all", norm=False)
    return torch.stack([z.norm(dim=1) for z in maps], 1)


@torch.no_grad()
def nearest_patches(model: VisionTransformer, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """For each patch of image a (1, C, H, W) the most similar of b: its row and column (N_a, 2), and the cosine."""
    first, second = (F.normalize(model.intermediate(x, [-1])[0][0].flatten(1).T, dim=1) for x in (a, b))
    cosine, best = (first @ second.T).max(1)
    columns = model.grid_of(b)[1]
    return torch.stack([best // columns, best % columns], 1), cosine
