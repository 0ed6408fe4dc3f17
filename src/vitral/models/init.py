"""Starting weights: timm's defaults, from a seed."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from vitral.nn.locality import LocalityAttention
from vitral.nn.pooling import AttentionPool
from vitral.nn.regularize import LayerScale

M = TypeVar("M", bound=nn.Module)


def init_weights(
    model: nn.Module, seed: int | None = None, zero_head: bool = False, keep: nn.Module | None = None
) -> None:
    """Fill every parameter of a ViT anew, from `seed` or else from torch's own generator; those of `keep` stay.

    Linear layers and the position table: truncated normal of 0.02, biases 0. Convolutions: torch's default. Tokens:
    normal of 1e-6. `zero_head` starts the classifier at 0, which fine-tuning likes: the first outputs are then even.
    """
    device = next(model.parameters()).device
    if device.type == "meta":  # shapes without numbers
        return
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    kept = set() if keep is None else set(keep.modules())
    for module in (module for module in model.modules() if module not in kept):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02, generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Conv2d):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
            if module.bias is not None:
                bound = module.weight[0].numel() ** -0.5
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.LayerNorm | nn.GroupNorm):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LayerScale):
            nn.init.constant_(module.gamma, module.init_value)
        elif isinstance(module, LocalityAttention):
            module.reset_temperature()
        elif isinstance(module, AttentionPool):
            nn.init.trunc_normal_(module.latent, std=module.latent.shape[-1] ** -0.5, generator=generator)
    for name, std in (("cls_token", 1e-6), ("reg_token", 1e-6), ("pos_embed", 0.02)):
        if (parameter := getattr(model, name, None)) is not None:
            nn.init.trunc_normal_(parameter, std=std, generator=generator)
    if zero_head:
        last = [module for module in model.head.modules() if isinstance(module, nn.Linear)]  # type: ignore[union-attr]
        for layer in last[-1:]:
            nn.init.zeros_(layer.weight)


class _NoNumbers(TorchFunctionMode):
    """Leave tensors as they are where `torch.nn.init` would fill them."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def blank(build: Callable[[], M]) -> M:
    """A module of shapes without numbers (torch's meta device), to be filled from a file or by `init_weights`."""
    with torch.device("meta"), _NoNumbers():
        return build()
