"""What a method without labels is: an objective whose model holds the ViT to keep, and that can be watched."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from PIL import Image
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.config import PretrainConfig
from vitral.models.dino import feature_std, weight_decay
from vitral.models.vit import VisionTransformer
from vitral.tasks.objective import Objective

Kept = dict[str, Tensor]
"""What is kept of the images that a method is watched on, an entry for each: the first axis counts images."""


SAME = 0.01
"""Deviation of features, of 1 if they are spread evenly, below which all images look the same to a model."""


LONGEST_REST = 0.25
"""Share of a run that is ended by the clock, after which everything learns."""


class Method(Objective):
    """One way to learn without labels."""

    name: ClassVar[str]
    what: ClassVar[str]
    """What a model learns to do, after "A Vision Transformer that learned to"."""
    better = "feature_rank"
    model: Any
    """All that is trained, heads included."""
    inputs: Any
    """How images are fed to it."""

    def __init__(self, backbone: VisionTransformer, config: PretrainConfig, heads_warm_up: bool) -> None:
        self.config, self.heads_warm_up = config, heads_warm_up
        self.progress = 0.0

    @property
    @abstractmethod
    def backbone(self) -> VisionTransformer:
        """The ViT that is kept in the end."""

    @property
    @abstractmethod
    def learner(self) -> VisionTransformer:
        """The ViT that gradients reach."""

    @abstractmethod
    def watch(self, x: Tensor, samples: Tensor) -> Kept:
        """What to keep of images (B, C, H, W) that are not trained on."""

    @abstractmethod
    def signals(self, kept: Kept) -> dict[str, float]:
        """Whether it goes well, in numbers."""

    def trouble(self, kept: Kept) -> str:
        """What is wrong, and what to do about it; nothing if all is well."""
        if feature_std(kept["features"]) > SAME:
            return ""
        return "one-point collapse: all images get nearly the same features; lower --lr and --muon-lr, or warm up more."

    def pictures(self, x: Tensor) -> Sequence[Image.Image]:
        """What the method makes of images (B, C, H, W), a picture for each, if it makes any."""
        return []

    def before_step(self, progress: float, epoch: float, optimizers: Sequence[Optimizer]) -> None:
        """Let the decay of weights follow its schedule."""
        self.progress = progress
        end = self.config.weight_decay_end
        if end is not None:
            now = weight_decay(progress, self.config.weight_decay, end)
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["weight_decay"] = now if group["weight_decay"] else 0.0

    def before_update(self, epoch: float) -> None:
        """Let the backbone rest while new heads learn beside it."""
        if self.heads_warm_up and self.rests(epoch, self.config.head_warmup_epochs):
            drop_gradients(self.learner)

    def rests(self, epoch: float, epochs: float) -> bool:
        """Whether it is the time of what waits for the first epochs; the clock may end a run before they are over."""
        return epoch < epochs and (self.config.max_minutes is None or self.progress < LONGEST_REST)


def drop_gradients(module: nn.Module) -> None:
    """Let a module rest for a step."""
    for parameter in module.parameters():
        parameter.grad = None


def counted(targets: Tensor, **means: Any) -> dict[str, float]:
    """Means over a batch as the sums that a task gives."""
    return {"count": len(targets), **{name: float(value) * len(targets) for name, value in means.items()}}
