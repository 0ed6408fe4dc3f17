"""Masked autoencoders (He et al., 2021, arXiv:2111.06377): hide most patches, and learn to fill them in.

B batch, C channels, H x W pixels, P patch, N patches of which V are visible, R prefix tokens, D width. What is random
comes in as numbers (B, N), so that the same numbers give the same patches.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitral.config import MAEConfig
from vitral.errors import InputError
from vitral.models import parts
from vitral.models.init import init_weights
from vitral.models.vit import VisionTransformer
from vitral.nn.packing import take
from vitral.nn.patches import check_divisible, patchify, unpatchify
from vitral.nn.positions import Grid, SinusoidalPositions

# ---- which patches are seen ----


class Masking(NamedTuple):
    """Which patches of each image are seen, and the way back to their places."""

    keep: Tensor
    """The V visible patches in shuffled order (B, V)."""
    restore: Tensor
    """Where each patch went in the shuffle (B, N): the inverse permutation."""
    masked: Tensor
    """True on the hidden patches (B, N)."""


def random_masking(noise: Tensor, ratio: float) -> Masking:
    """Hide `ratio` of the patches, those with the largest numbers in `noise` (B, N); at least one, and never all."""
    N = noise.shape[1]
    if N < 2:
        raise InputError(f"masking needs at least 2 patches in an image, got {N}; use a smaller patch_size.")
    V = N - min(max(round(N * ratio), 1), N - 1)
    order = noise.argsort(dim=1, stable=True)  # the shuffle: place -> patch
    restore = order.argsort(dim=1)  # its inverse: patch -> place
    return Masking(keep=order[:, :V], restore=restore, masked=restore >= V)


def over_pixels(patches: Tensor, grid: Grid, patch: tuple[int, int]) -> Tensor:
    """One value for each patch, spread over its pixels: (B, N) -> (B, H, W)."""
    return patches.unflatten(1, grid).repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)


# ---- what is to be predicted ----


def patch_moments(x_p: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of the pixels of each patch: (B, N, P P C) -> (B, N, 1) each."""
    return x_p.mean(dim=2, keepdim=True), (x_p.var(dim=2, keepdim=True) + 1e-6).sqrt()


def mae_targets(x: Tensor, patch: tuple[int, int], norm_pixels: bool) -> Tensor:
    """Images (B, C, H, W) -> the pixels of each patch (B, N, P P C), normalised within the patch if wanted."""
    x_p = patchify(x, patch)
    if not norm_pixels:
        return x_p
    mean, deviation = patch_moments(x_p)
    return (x_p - mean) / deviation


def mae_loss(predicted: Tensor, targets: Tensor, masked: Tensor) -> Tensor:
    """The squared error of the hidden patches, averaged over their pixels: (B, N, P P C) twice, (B, N) -> scalar."""
    error = (predicted - targets).square().mean(dim=2)  # (B, N)
    return (error * masked).sum() / masked.sum()


# ---- the model ----


class MAEDecoder(nn.Module):
    """Visible tokens in their places, one learned token in all the others, a few blocks, then pixels."""

    def __init__(self, c: MAEConfig) -> None:
        super().__init__()
        D, (P_h, P_w) = c.decoder_dim, c.backbone.patch
        self.prefix = c.backbone.prefix_tokens
        self.embed = nn.Linear(c.backbone.embed_dim, D)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, D))
        self.positions = SinusoidalPositions(D, self.prefix, rows=0, two_d=True)
        size = {"embed_dim": D, "depth": c.decoder_depth, "num_heads": c.decoder_heads}
        like_backbone = replace(c.backbone, **size, drop_path_rate=0.0)
        self.blocks = parts.make_blocks(like_backbone)
        self.norm = parts.make_norm(like_backbone, D, wanted=True)
        self.predict = nn.Linear(D, P_h * P_w * c.backbone.in_chans)
        init_weights(self)
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(self, z: Tensor, restore: Tensor, grid: Grid) -> Tensor:
        """(B, R + V, D_encoder), (B, N) -> the pixels of every patch (B, N, P P C)."""
        z = self.embed(z)  # (B, R + V, D)
        B, R, N = z.shape[0], self.prefix, restore.shape[1]
        hidden = self.mask_token.expand(B, R + N - z.shape[1], -1)
        patches = take(torch.cat([z[:, R:], hidden], dim=1), restore)  # back in their places (B, N, D)
        z = torch.cat([z[:, :R], patches], dim=1) + self.positions(grid, None, z)
        for block in self.blocks:
            z = block(z)
        return self.predict(self.norm(z[:, R:]))


class MAEOutput(NamedTuple):
    """What a masked autoencoder says of a batch."""

    predicted: Tensor
    """Pixels of every patch (B, N, P P C), in the scale of `mae_targets`."""
    masked: Tensor
    """True on the patches that it did not see (B, N)."""


class Reconstruction(NamedTuple):
    """Pictures of what was seen and what was made of it, (B, C, H, W) each, in the scale of the input."""

    seen: Tensor
    """The images with zero, the mean colour, in the hidden patches."""
    filled: Tensor
    """The images with the prediction in the hidden patches."""


class MaskedAutoencoder(nn.Module):
    """`model(x, noise)` predicts the pixels of images (B, C, H, W) of which it sees a few patches.

    `noise` (B, N) are random numbers that choose them. After pretraining, `backbone` is the ViT to go on with.
    """

    def __init__(self, config: MAEConfig, backbone: VisionTransformer | None = None) -> None:
        super().__init__()
        self.config = config
        self.decoder = MAEDecoder(config)
        self.backbone = backbone or VisionTransformer(config.backbone)

    def forward(self, x: Tensor, noise: Tensor) -> MAEOutput:
        """(B, C, H, W), (B, N) -> the pixels of every patch, and which of them were hidden."""
        masking = self.masking(x, noise)
        z = self.encode(x, masking)  # (B, R + V, D)
        return MAEOutput(self.decoder(z, masking.restore, self.backbone.grid_of(x)), masking.masked)

    def masking(self, x: Tensor, noise: Tensor) -> Masking:
        """The patches of the images that `noise` hides."""
        check_divisible((x.shape[-2], x.shape[-1]), self.config.backbone.patch, remedy="resize the image")
        G_h, G_w = self.backbone.grid_of(x)
        if noise.shape != (x.shape[0], G_h * G_w):
            raise InputError(
                f"noise must have one number for each patch, (B, N) = {(x.shape[0], G_h * G_w)}, "
                f"got {tuple(noise.shape)}."
            )
        return random_masking(noise.to(x.device), self.config.mask_ratio)

    def encode(self, x: Tensor, masking: Masking) -> Tensor:
        """(B, C, H, W) -> (B, R + V, D): the ViT on prefix and visible patches alone.

        Hidden pixels are set to zero first, for the sake of stems that look beyond a patch.
        """
        seen = over_pixels(~masking.masked, self.backbone.grid_of(x), self.config.backbone.patch)
        z, _ = self.backbone.embed_tokens(x, mask=seen)  # positions are added while each patch is in its place
        R = self.backbone.prefix_tokens
        z = torch.cat([z[:, :R], take(z[:, R:], masking.keep)], dim=1)
        for block in self.backbone.blocks:
            z = block(z)
        return self.backbone.norm(z)

    def loss(self, out: MAEOutput, x: Tensor) -> Tensor:
        """The error of `forward`'s answer for images (B, C, H, W), a scalar."""
        targets = mae_targets(x, self.config.backbone.patch, self.config.norm_pixels)
        return mae_loss(out.predicted, targets, out.masked)

    @torch.no_grad()
    def reconstruct(self, x: Tensor, noise: Tensor) -> Reconstruction:
        """Pictures of the images with patches hidden, and filled in.

        Where patches are predicted normalised, each is given the true mean and deviation of its pixels: the picture
        shows structure, not colour, that the model has found.
        """
        patch, grid = self.config.backbone.patch, self.backbone.grid_of(x)
        out = self(x, noise)
        pixels = out.predicted
        if self.config.norm_pixels:
            mean, deviation = patch_moments(patchify(x, patch))
            pixels = pixels * deviation + mean
        hidden = over_pixels(out.masked, grid, patch)[:, None]  # (B, 1, H, W)
        return Reconstruction(x.masked_fill(hidden, 0), torch.where(hidden, unpatchify(pixels, patch, grid), x))
