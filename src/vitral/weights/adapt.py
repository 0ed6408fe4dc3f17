"""Weights for another number of channels, another patch size, another image: what is done to a tensor for it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def adapt_channels(weight: Tensor, in_chans: int) -> Tensor:
    """Patch weights (D, C, P_h, P_w) for other channels, as timm adapts them.

    One channel: the sum over the old ones, so that grey gives the tokens it gave before. More: the old ones in turn,
    scaled by C / in_chans.
    """
    C = weight.shape[1]
    if in_chans == 1:
        return weight.sum(1, keepdim=True)
    turns = -(-in_chans // C)
    return weight.repeat(1, turns, 1, 1)[:, :in_chans] * (C / in_chans)


def resize_patches(weight: Tensor, patch: tuple[int, int]) -> Tensor:
    """Patch weights (D, C, P_h, P_w) for another patch size (FlexiViT, Beyer et al., 2023).

    The new weights give a resized patch the token that the old ones give the patch itself, as nearly as they can: with
    the resize as a matrix B, the least-squares answer to <B x, w'> = <x, w> for all x is w' = pinv(B^T) w.
    """
    old = (weight.shape[2], weight.shape[3])
    count = old[0] * old[1]
    basis = torch.eye(count, dtype=torch.float64).view(count, 1, *old)
    resized = F.interpolate(basis, size=patch, mode="bicubic", antialias=True)
    B = resized.view(count, -1).T  # (new, old)
    turn = torch.linalg.pinv(B.T, rtol=1e-5)  # (new, old)
    return (weight.flatten(2).double() @ turn.T).unflatten(2, patch).to(weight.dtype)
