"""Residual networks (He et al., 2016, arXiv:1512.03385), under the parameter names of torchvision and timm.

B batch, C channels, H x W pixels, h x w the last map: H / 32 x W / 32, or twice that side with dilation, and H / 8 x W
/ 8 in the networks for small images. Where a side does not divide, its rest makes one more cell.
"""

import math
import re
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import ResNetConfig
from vitral.models.backbone import Backbone, resolve_layers
from vitral.nn.patches import check_finite, check_images
from vitral.nn.regularize import StochasticDepth, stochastic_depth_rates

FROZEN = {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}


class FrozenBatchNorm2d(nn.Module):
    """weight (x - running_mean) / sqrt(running_var + eps) + bias, all four fixed: nothing here is trained."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.eps = 1e-5
        self.weight: Tensor
        self.bias: Tensor
        self.running_mean: Tensor
        self.running_var: Tensor
        for name, start in FROZEN.items():
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

    def __init__(
        self, c_in: int, width: int, stride: int, dilations: tuple[int, int], norm: type[nn.Module], drop_path: float
    ) -> None:
        super().__init__()
        self.conv1 = conv(c_in, width, 3, stride, dilations[0])
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, 1, dilations[1])
        self.bn2 = norm(width)
        self.drop_path = StochasticDepth(drop_path)
        self.downsample = shortcut(c_in, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.drop_path(self.bn2(self.conv2(y))) + self.downsample(x))


class Bottleneck(nn.Module):
    """relu(F(x) + x), F of 1x1, 3x3 and 1x1; the stride is in the 3x3, which has the first of the `dilations`."""

    def __init__(
        self, c_in: int, width: int, stride: int, dilations: tuple[int, int], norm: type[nn.Module], drop_path: float
    ) -> None:
        super().__init__()
        self.conv1 = conv(c_in, width, 1)
        self.bn1 = norm(width)
        self.conv2 = conv(width, width, 3, stride, dilations[0])
        self.bn2 = norm(width)
        self.conv3 = conv(width, 4 * width, 1)
        self.bn3 = norm(4 * width)
        self.drop_path = StochasticDepth(drop_path)
        self.downsample = shortcut(c_in, 4 * width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, H, W) -> (B, C_out, H / stride, W / stride)."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.drop_path(self.bn3(self.conv3(y))) + self.downsample(x))


class ResNet(Backbone):
    """`model(x)` gives logits (B, classes) for images (B, C, H, W) of any size, `model.features(x)` the last map."""

    config: ResNetConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        c = config
        self.describe(c)
        norm = FrozenBatchNorm2d if c.frozen_norm else nn.BatchNorm2d
        self.conv1 = conv(c.in_chans, c.width, *((3, 1) if c.small else (7, 2)))
        self.bn1 = norm(c.width)
        self.maxpool = nn.Identity() if c.small else nn.MaxPool2d(3, stride=2, padding=1)
        c_in, rates = c.width, stochastic_depth_rates(c.drop_path_rate, sum(depth for _, _, depth in c.stages))
        self.stage_names = [f"layer{i + 1}" for i in range(len(c.stages))]
        for i, (width, stride, depth) in enumerate(c.stages):
            own, rates = rates[:depth], rates[depth:]
            self.add_module(self.stage_names[i], make_stage(c, c_in, width, own, stride, c.dilated(i), norm))
            c_in = c.map_dims[i]
        self.fc = nn.Linear(c_in, c.num_classes) if c.num_classes else nn.Identity()
        self.init_weights()

    @property
    def head(self) -> nn.Module:  # type: ignore[override]
        """The classifier, `fc` in published files."""
        return self.fc

    def maps(self, x: Tensor) -> list[Tensor]:
        """(B, C, H, W) -> the map of each stage, the finest first."""
        check_images(x, self.config.in_chans, self.conv1.weight.dtype)
        check_finite(x)
        x = x.contiguous(memory_format=torch.channels_last)  # the order in which CPUs convolve and normalise fastest
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        found = []
        for name in self.stage_names:
            x = self.get_submodule(name)(x)
            found.append(x)
        return found

    def features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D, h, w): the map of the last stage."""
        return self.maps(x)[-1]

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, h w, D): the cells of the last map, row by row."""
        return self.features(x).flatten(2).mT

    def forward_head(self, z: Tensor) -> Tensor:
        """Cells of the last map (B, h w, D) -> logits (B, classes)."""
        return self.fc(z.mean(1))

    def embed(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, D): the mean of the last map."""
        return self.features(x).mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> logits (B, classes), or the mean of the last map where there is no head."""
        return self.fc(self.embed(x))

    def grid_of(self, x: Tensor) -> tuple[int, int]:
        """Rows and columns of the last map for images (B, C, H, W)."""
        down, across = self.config.map_strides[-1]
        return -(-x.shape[-2] // down), -(-x.shape[-1] // across)

    def intermediate(
        self, x: Tensor, layers: Sequence[int] | Literal["all"], as_grid: bool = True, norm: bool = True
    ) -> list[Tensor]:
        """Maps (B, map_dims[i], h_i, w_i) of chosen stages, or with `as_grid=False` their cells; none has a norm."""
        wanted = resolve_layers(layers, len(self.stage_names), "stage")
        maps = self.maps(x)
        return [maps[i] if as_grid else maps[i].flatten(2).mT for i in wanted]

    @property
    def depth(self) -> int:
        """The stages."""
        return len(self.stage_names)

    def layer_of(self, name: str) -> int:
        """Of a parameter: 0 before the stages, 1..depth in them, depth + 1 after."""
        if stage := re.match(r"layer(\d)\.", name):
            return int(stage[1])
        return self.depth + 1 if name.startswith("fc.") else 0

    def init_weights(self, seed: int | None = None, zero_head: bool = False) -> None:
        """Starting weights of He et al., 2015: normal, with the variance that ReLU layers keep; norms 1 and 0."""
        device = self.conv1.weight.device
        if device.type == "meta":  # shapes without numbers
            return
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()
            elif isinstance(module, FrozenBatchNorm2d):
                for name, start in FROZEN.items():
                    module.get_buffer(name).fill_(start)
            elif isinstance(module, nn.Linear):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
                bound = module.in_features**-0.5
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        if zero_head and isinstance(self.fc, nn.Linear):
            nn.init.zeros_(self.fc.weight)
            nn.init.zeros_(self.fc.bias)


def make_stage(
    c: ResNetConfig, c_in: int, width: int, rates: Sequence[float], stride: int, dilated: bool, norm: type[nn.Module]
) -> nn.Sequential:
    """The blocks of one stage, one for each rate of stochastic depth.

    The first has the stride, or, dilated, hands it to the blocks after it as dilation.
    """
    kind = Bottleneck if c.bottleneck else BasicBlock
    c_out = 4 * width if c.bottleneck else width
    dilation, stride = (stride, 1) if dilated else (1, stride)
    first = kind(c_in, width, stride, (1, dilation), norm, rates[0])
    return nn.Sequential(first, *(kind(c_out, width, 1, (dilation, dilation), norm, rate) for rate in rates[1:]))
