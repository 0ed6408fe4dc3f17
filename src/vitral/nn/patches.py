"""Images to tokens: splitting into patches, and the projection E.

B batch, C channels, H x W pixels, P_h x P_w patch, G_h x G_w grid, N = G_h G_w patches, D width.
Knows nothing of positions or of prefix tokens.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import check_divides, pair
from vitral.errors import InputError


def patchify(x: Tensor, patch_size: int | tuple[int, int]) -> Tensor:
    """(B, C, H, W) -> x_p (B, N, P_h P_w C): patches row by row, each one's pixels row by row, channels last."""
    P_h, P_w = pair(patch_size, "patch_size")
    if x.ndim != 4:
        raise InputError(f"images must have 4 axes (B, C, H, W), got {x.ndim} in shape {tuple(x.shape)}.")
    B, C, H, W = x.shape
    check_divisible((H, W), (P_h, P_w), remedy="resize or pad the image")
    x = x.reshape(B, C, H // P_h, P_h, W // P_w, P_w)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(B, -1, P_h * P_w * C)  # B G_h G_w P_h P_w C


def unpatchify(x_p: Tensor, patch_size: int | tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """x_p (B, N, P_h P_w C) -> (B, C, H, W), the inverse of `patchify`."""
    P_h, P_w = pair(patch_size, "patch_size")
    G_h, G_w = grid
    B, N, length = x_p.shape
    if G_h * G_w != N or length % (P_h * P_w):
        raise InputError(
            f"patches of shape {tuple(x_p.shape)} do not fill a {G_h}x{G_w} grid of {P_h}x{P_w} patches: "
            f"expected (B, {G_h * G_w}, a multiple of {P_h * P_w})."
        )
    x = x_p.reshape(B, G_h, G_w, P_h, P_w, -1).permute(0, 5, 1, 3, 2, 4)  # B C G_h P_h G_w P_w
    return x.reshape(B, -1, G_h * P_h, G_w * P_w)


def check_divisible(size: tuple[int, int], patch: tuple[int, int], remedy: str) -> None:
    """Raise unless the patch divides the image, naming the two nearest sizes that fit."""
    check_divides(size[0], patch[0], "image height", InputError, f"; {remedy}")
    check_divides(size[1], patch[1], "image width", InputError, f"; {remedy}")


def check_images(x: Tensor, in_chans: int, dtype: torch.dtype) -> None:
    """Raise unless `x` is a floating-point batch (B, in_chans, H, W) of the model's dtype."""
    if not isinstance(x, Tensor):
        raise InputError(
            f"images must be a torch tensor (B, C, H, W), got {type(x).__name__}; "
            f"scale pixels to 0..1 and normalise them by model.preprocess.mean and .std first."
        )
    shape = tuple(x.shape)
    if x.ndim != 4:
        remedy = "add a batch axis with x[None]" if x.ndim == 3 else "give a batch of images"
        raise InputError(f"images must have 4 axes (B, C, H, W), got {x.ndim} in shape {shape}; {remedy}.")
    if shape[1] != in_chans:
        remedy = (
            "move the channels first with x.permute(0, 3, 1, 2)"
            if shape[3] == in_chans
            else f"pass in_chans={shape[1]} when the model is made"
        )
        raise InputError(f"images must have {in_chans} channels, got {shape[1]} in shape {shape}; {remedy}.")
    if 0 in shape:
        raise InputError(f"images must not be empty, got shape {shape}.")
    if not x.is_floating_point():
        raise InputError(
            f"images must be floating point, got {x.dtype}; scale with x.float() / 255, "
            f"then normalise by model.preprocess.mean and .std."
        )
    if x.dtype != dtype and not torch.is_autocast_enabled(x.device.type):
        raise InputError(f"images must be {dtype} like the model, got {x.dtype}; convert one of them with .to().")


def check_finite(x: Tensor) -> None:
    """Raise if a pixel is NaN or infinite."""
    # On other devices, and while tracing, reading a value back would cost more than it saves, or cannot be done.
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return
    if torch._C._functorch.is_functorch_wrapped_tensor(x):  # pyright: ignore
        return
    if x.detach().sum().isfinite():  # NaN and Inf pass through a sum: one quick look, every pixel only if it fails
        return
    if bad := int((~x.isfinite()).sum()):
        raise InputError(
            f"images must be finite, got {bad} NaN or infinite values in shape {tuple(x.shape)}; "
            f"check the division by std and the source files."
        )


def pad_to_multiple(x: Tensor, patch: tuple[int, int]) -> Tensor:
    """Pad (..., H, W) with zeros at the bottom and right up to the next multiple of the patch."""
    H, W = x.shape[-2:]
    return F.pad(x, (0, -W % patch[1], 0, -H % patch[0]))


class PatchEmbed(nn.Module):
    """The linear projection of flattened patches, x_p E + b.

    E is stored as the weight (D, C, P_h, P_w) of a convolution whose stride is its kernel size: the same numbers and
    the same result, and the name under which published files keep it.
    """

    def __init__(self, in_chans: int, embed_dim: int, patch_size: tuple[int, int], bias: bool) -> None:
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size, bias=bias)

    @property
    def E(self) -> Tensor:
        """The matrix of Eq. 1, (P_h P_w C, D), in the pixel order of `patchify`."""
        return self.proj.weight.permute(2, 3, 1, 0).flatten(0, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        return self.proj(x).flatten(2).transpose(1, 2)  # x_p E + b


class ConvStem(nn.Module):
    """A light stem of 3x3 convolutions in the place of `PatchEmbed`: same input, same output, overlapping views.

    Each layer but the last is followed by a LayerNorm over its channels and GELU. It gives a small model on small
    images the locality that it would otherwise have to learn (Xiao et al., 2021, arXiv:2106.14881).
    """

    def __init__(self, layers: list[tuple[int, int, tuple[int, int]]], bias: bool, eps: float) -> None:
        super().__init__()
        *inner, (width, embed_dim, stride) = layers
        self.convs = nn.ModuleList(
            nn.Conv2d(c_in, c_out, kernel_size=3, stride=s, padding=1, bias=False) for c_in, c_out, s in inner
        )
        self.norms = nn.ModuleList(nn.LayerNorm(c_out, eps=eps) for _, c_out, _ in inner)
        self.proj = nn.Conv2d(width, embed_dim, kernel_size=3, stride=stride, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        x = x.contiguous(memory_format=torch.channels_last)  # as the norms want it: no copies on the way
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.gelu(norm(conv(x).movedim(1, -1))).movedim(-1, 1)
        return self.proj(x).flatten(2).transpose(1, 2)


class HybridEmbed(nn.Module):
    """The map of a CNN as tokens: (B, C, H, W) -> (B, F, h, w) -> patches of the map -> (B, N, D).

    `backbone` is any module from images to one map of `feature_dim` channels; `patch_size` counts cells of that map.
    `frozen` keeps it as it is: no gradient, and eval mode whatever the mode of the model around it.
    """

    def __init__(
        self,
        backbone: nn.Module,
        feature_dim: int,
        embed_dim: int,
        patch_size: tuple[int, int],
        bias: bool,
        frozen: bool,
    ) -> None:
        super().__init__()
        self.backbone, self.frozen = backbone, frozen
        self.proj = nn.Conv2d(feature_dim, embed_dim, kernel_size=patch_size, stride=patch_size, bias=bias)
        if frozen:
            self.backbone.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "HybridEmbed":
        """Set the mode, but not that of a frozen CNN."""
        super().train(mode)
        if self.frozen:
            self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, D)."""
        return self.proj(self.backbone(x)).flatten(2).transpose(1, 2)
