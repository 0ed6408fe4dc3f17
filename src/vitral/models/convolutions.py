"""The convolutions and pools of a CNN, from its config alone: what `cost` counts and `receptive_fields` follows.

Builds no model, needs no torch; tests hold the lists to the built models.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vitral.config import ResNetConfig, ViTConfig


@dataclass(frozen=True)
class Window:
    """A convolution, or a pool where there are no channels to mix."""

    stage: str
    """The part of the network that it belongs to."""
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    """Padding at the top and left."""
    c_in: int = 0
    c_out: int = 0
    norm: bool = True
    """Whether a norm with a weight and a bias for each channel follows."""
    aside: bool = False
    """On a shortcut: it sees what a main window beside it sees, and its output has the size reached so far."""

    @property
    def params(self) -> int:
        """Weights of the convolution and its norm."""
        return self.kernel**2 * self.c_in * self.c_out + 2 * self.c_out * self.norm

    def after(self, size: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the output; every window here keeps ceil(side / stride)."""
        return size if self.aside else (-(-size[0] // self.stride), -(-size[1] // self.stride))


def resnet_windows(c: ResNetConfig) -> Iterator[Window]:
    """A residual network's, in the order in which an image meets them."""
    if c.small:
        yield Window("stem", 3, 1, before=1, c_in=c.in_chans, c_out=c.width)
    else:
        yield Window("stem", 7, 2, before=3, c_in=c.in_chans, c_out=c.width)
        yield Window("stem", 3, 2, before=1, norm=False)
    c_in = c.width
    for i, (width, stride, depth) in enumerate(c.stages):
        stage, out = f"layer{i + 1}", width * (4 if c.bottleneck else 1)
        dilated = c.dilated(i)
        for j in range(depth):
            step = stride if j == 0 and not dilated else 1
            first, second = (stride if dilated and j else 1), (stride if dilated else 1)
            beside = [Window(stage, 1, step, c_in=c_in, c_out=out, aside=True)] * (step > 1 or c_in != out)
            if c.bottleneck:
                yield Window(stage, 1, c_in=c_in, c_out=width)
                yield Window(stage, 3, step, first, before=first, c_in=width, c_out=width)
                yield from beside
                yield Window(stage, 1, c_in=width, c_out=out)
            else:
                yield Window(stage, 3, step, first, before=first, c_in=c_in, c_out=width)
                yield from beside
                yield Window(stage, 3, 1, second, before=second, c_in=width, c_out=out)
            c_in = out


def stem_windows(c: ViTConfig) -> Iterator[Window]:
    """Those of the ResNet before a hybrid's Transformer; images are a multiple of its stride."""
    yield Window("stem", 7, 2, before=2, c_in=c.in_chans, c_out=64)
    yield Window("stem", 3, 2, before=0, norm=False)
    c_in = 64
    for i, depth in enumerate(c.stem_depths):
        stage, out = f"stages.{i}", 256 << i
        for j in range(depth):
            stride = 2 if i and j == 0 else 1
            yield Window(stage, 1, c_in=c_in, c_out=out // 4)
            yield Window(stage, 3, stride, before=2 - stride, c_in=out // 4, c_out=out // 4)
            if j == 0:
                yield Window(stage, 1, stride, c_in=c_in, c_out=out, aside=True)
            yield Window(stage, 1, c_in=out // 4, c_out=out)
            c_in = out
