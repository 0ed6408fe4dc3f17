"""The convolutional half of Google's hybrids: ResNet with weight standardisation and GroupNorm, under timm's names.

BiT (Kolesnikov et al., 2020, arXiv:1912.11370) in the form that the ViT paper puts before its Transformer: the
activation after each residual sum, padding as TensorFlow's SAME. B batch, C channels, H x W pixels.
"""

from collections import OrderedDict
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 32


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad so that ceil(side / stride) steps of the kernel fit; an odd rest goes to the bottom and right."""
    rests = [max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in x.shape[-2:]]
    (top, left), (bottom, right) = [rest // 2 for rest in rests], [rest - rest // 2 for rest in rests]
    return F.pad(x, (left, right, top, bottom), value=value) if any(rests) else x


class StdConv2d(nn.Conv2d):
    """A convolution by (w - mean) / sqrt(var + eps), both over all of an output's weights (Qiao et al., 2019)."""

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__(c_in, c_out, kernel, stride=stride, bias=False)
        self.eps = 1e-8

    def forward(self, input: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, ceil(H / stride), ceil(W / stride))."""
        var, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * (var + self.eps).rsqrt()
        return F.conv2d(pad_same(input, self.kernel_size[0], self.stride[0]), weight, stride=self.stride)


class MaxPoolSame(nn.Module):
    """The largest of each 3 x 3 window, in steps of 2."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, ceil(H / 2), ceil(W / 2))."""
        return F.max_pool2d(pad_same(x, 3, 2, value=float("-inf")), 3, 2)


class Shortcut(nn.Module):
    """What brings x to the shape of F(x): a 1x1 convolution and a norm."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv = StdConv2d(c_in, c_out, 1, stride)
        self.norm = nn.GroupNorm(GROUPS, c_out)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        return self.norm(self.conv(x))


class Bottleneck(nn.Module):
    """relu(F(x) + x), F of 1x1, 3x3 and 1x1 with the stride in the 3x3."""

    def __init__(self, c_in: int, c_out: int, stride: int, first: bool) -> None:
        super().__init__()
        width = c_out // 4
        self.downsample = Shortcut(c_in, c_out, stride) if first else nn.Identity()
        self.conv1 = StdConv2d(c_in, width, 1)
        self.norm1 = nn.GroupNorm(GROUPS, width)
        self.conv2 = StdConv2d(width, width, 3, stride)
        self.norm2 = nn.GroupNorm(GROUPS, width)
        self.conv3 = StdConv2d(width, c_out, 1)
        self.norm3 = nn.GroupNorm(GROUPS, c_out)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.downsample(x))


class ResNetV2(nn.Module):
    """Images to the map of the last stage: a root of stride 4, and stages that each double the channels from 256."""

    def __init__(self, in_chans: int, depths: Sequence[int]) -> None:
        super().__init__()
        self.stem = make_root(in_chans)
        stages, c_in = [], 64
        for i, depth in enumerate(depths):
            c_out, stride = 256 << i, 1 if i == 0 else 2
            blocks = [
                Bottleneck(c_in if j == 0 else c_out, c_out, stride if j == 0 else 1, j == 0) for j in range(depth)
            ]
            stages.append(nn.Sequential(OrderedDict(blocks=nn.Sequential(*blocks))))
            c_in = c_out
        self.stages = nn.Sequential(*stages)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, F, h, w)."""
        return self.stages(self.stem(x))


def make_root(in_chans: int) -> nn.Sequential:
    """What comes before the stages: 7x7 of stride 2, norm, and a pool of stride 2."""
    parts = {"conv": StdConv2d(in_chans, 64, 7, 2), "norm": nn.GroupNorm(GROUPS, 64), "act": nn.ReLU()}
    return nn.Sequential(OrderedDict(**parts, pool=MaxPoolSame()))


def resnet_v2(in_chans: int, depths: Sequence[int]) -> nn.Module:
    """The network with so many blocks in each stage; without stages the root alone, as timm keeps it."""
    return ResNetV2(in_chans, depths) if depths else make_root(in_chans)
