"""Residual networks (He et al., 2016, arXiv:1512.03385), under the parameter names of torchvision and timm.

B batch, C channels, H x W pixels, h x w the last map: H / 32 x W / 32, or twice that side with dilation.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import Preprocess, ResNetConfig
from vitral.nn.patches import check_finite, check_images

STAGES = ("layer1", "layer2", "layer3", "layer4")


class FrozenBatchNorm2d(nn.Module):
    """weight (x - running_mean) / sqrt(running_var + eps) + bias, all four fixed: nothing here is trained."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight: Tensor
        self.bias: Tensor
        self.running_mean: Tensor
        self.running_var: Tensor
        for name, start in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((dim,), start))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


def conv(c_in: int, c_out: int, kernel: int, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    """A convolution without bias that keeps the size where its stride is 1."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(c_in, c_out, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)


def shortcut(c_in: int, c_out: int, stride: int, norm: type[nn.Module]) -> nn.Module:
    """What brings x to the shape of F(x); nothing where it has it already."""
    if stride == 1 and c_in == c_out:
        return nn.Identity()
    return nn.Sequential(conv(c_in, c_out, 1, stride), norm(c_out))


class BasicBlock(nn.Module):
    """relu(F(x) + x), F two 3x3 convolutions. `dilations` are those of the first and of the second."""

    def __init__(self, c_in: int, width: int, stride: int, dilations: tuple[int, int], norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = conv(c_in, width, 3, stride, dilations[0])
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, 1, dilations[1])
        self.bn2 = norm(width)
        self.downsample = shortcut(c_in, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class Bottleneck(nn.Module):
    """relu(F(x) + x), F of 1x1, 3x3 and 1x1; the stride is in the 3x3, which has the first of the `dilations`."""

    def __init__(self, c_in: int, width: int, stride: int, dilations: tuple[int, int], norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1 = conv(c_in, width, 1)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, stride, dilations[0])
        self.bn2 = norm(width)
        self.conv3 = conv(width, 4 * width, 1)
        self.bn3 = norm(4 * width)
        self.downsample = shortcut(c_in, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.downsample(x))


class ResNet(nn.Module):
    """`model(x)` gives logits (B, classes), `model.features(x)` the last map (B, C, h, w)."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.preprocess = Preprocess().for_channels(config.in_chans)
        norm = FrozenBatchNorm2d if config.frozen_norm else nn.BatchNorm2d
        self.conv1 = nn.Conv2d(config.in_chans, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = norm(64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        c_in = 64
        for i, (name, depth) in enumerate(zip(STAGES, config.depths, strict=True)):
            stage = make_stage(config, c_in, 64 << i, depth, stride=1 if i == 0 else 2, last=i == 3, norm=norm)
            self.add_module(name, stage)
            c_in = (64 << i) * (4 if config.bottleneck else 1)
        self.fc = nn.Linear(c_in, config.num_classes) if config.num_classes else nn.Identity()
        init_resnet(self)

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, h, w): the map of the last stage."""
        check_images(x, self.config.in_chans, self.conv1.weight.dtype)
        check_finite(x)
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))  # (B, 64, H / 4, W / 4)
        for name in STAGES:
            x = self.get_submodule(name)(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, classes), or the mean of the last map where there is no head."""
        return self.fc(self.features(x).mean(dim=(2, 3)))


def make_stage(
    c: ResNetConfig, c_in: int, width: int, depth: int, stride: int, last: bool, norm: type[nn.Module]
) -> nn.Sequential:
    """The blocks of one stage; the first has the stride, or, dilated, hands it to the blocks after it as dilation."""
    kind = Bottleneck if c.bottleneck else BasicBlock
    c_out = 4 * width if c.bottleneck else width
    dilation = stride if c.dilation and last else 1
    stride = 1 if c.dilation and last else stride
    first = kind(c_in, width, stride, (1, dilation), norm)
    return nn.Sequential(first, *(kind(c_out, width, 1, (dilation, dilation), norm) for _ in range(depth - 1)))


def init_resnet(model: ResNet) -> None:
    """Starting weights of He et al., 2015: normal, with the variance that ReLU layers keep; norms 1 and 0."""
    if model.conv1.weight.device.type == "meta":  # shapes without numbers
        return
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
