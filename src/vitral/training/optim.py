"""Optimisers: AdamW with the decay where it belongs, and Muon for the matrices.

Muon (Jordan et al., 2024): momentum whose update is made orthogonal by a Newton-Schulz iteration. It runs in fp32 here;
torch's own computes in bf16, which is slower on CPUs without it, and kills the process on some that only claim to have
it.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vitral.config import LoopConfig
from vitral.models.backbone import Backbone
from vitral.models.lora import lora_parameters
from vitral.models.segmenter import ConvHead
from vitral.nn.patches import ConvStem

# Norms, biases, positions, tokens, LayerScale: decay would pull them from where they belong. A and B of LoRA: decay is
# there to bound large matrices, and a change of low rank that starts at 0 is bounded by its rank and its steps.
_NO_DECAY = re.compile(
    r"(\.bias|_token|pos_embed|bias_table|latent|gamma|queries\.(anchors|position|content\.weight)|lora_[AB])$"
)

_IN_BLOCKS = re.compile(
    r"(student\.)?(backbone\.|head\.)?blocks\.|(encoder|decoder)\.(?!token_embed|output|pos_embed|embed|predict)"
)


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and not _NO_DECAY.search(name)


def layers_of(model: nn.Module) -> tuple[dict[str, int], int]:
    """Each parameter's layer: 0 before the blocks, 1..depth for the blocks, depth + 1 for what comes after; and depth.

    A backbone says itself; of an encoder of texts the names tell.
    """
    names = [name for name, _ in model.named_parameters()]
    inside = next(((n, m) for n, m in model.named_modules() if isinstance(m, Backbone)), None)
    if inside is not None:
        prefix, backbone = f"{inside[0]}." if inside[0] else "", inside[1]
        last = backbone.depth + 1
        own = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        return {name: backbone.layer_of(own[name]) if name in own else last for name in names}, backbone.depth
    short = {name: re.sub(r"^encoder\.", "", name) for name in names}
    blocks = {name: int(found[1]) + 1 for name in names if (found := re.match(r"blocks\.(\d+)\.", short[name]))}
    depth = max(blocks.values(), default=0)
    rest = {name: 0 if short[name].startswith(("token_embed", "pos_embed")) else depth + 1 for name in names}
    return rest | blocks, depth


def make_optimizers(model: nn.Module, config: LoopConfig) -> list[Optimizer]:
    """AdamW over everything, or Muon over the matrices of the blocks and the kernels of conv stems and heads.

    A and B of LoRA are AdamW's: made orthogonal, each update would spend as much on directions that do not matter.
    Every parameter group carries its own peak rate as `peak_lr`, which the schedule multiplies.
    """
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    layers, depth = layers_of(model)
    convolutional = (m for m in model.modules() if isinstance(m, ConvStem | ConvHead))
    kernels = {id(p) for m in convolutional for p in m.parameters() if p.ndim == 4}
    lora = {id(p) for p in lora_parameters(model).values()}
    muon, adamw = [], []
    for name, p in named:
        scale = config.layer_decay ** (depth + 1 - layers[name])
        in_blocks = 1 <= layers[name] <= depth or _IN_BLOCKS.match(name) is not None
        matrix = id(p) in kernels or (p.ndim in (2, 4) and in_blocks and _decays(name, p))
        to_muon = config.optimizer == "muon" and matrix and id(p) not in lora
        peak = (config.muon_lr if to_muon else config.lr) * scale
        decay = config.weight_decay if _decays(name, p) else 0.0
        (muon if to_muon else adamw).append((p, {"lr": peak, "peak_lr": peak, "weight_decay": decay}))
    fused = all(p.device.type in ("cpu", "cuda") for _, p in named)
    optimizers: list[Optimizer] = []
    if adamw:
        optimizers.append(torch.optim.AdamW(_grouped(adamw), betas=(0.9, 0.95), fused=fused))
    return optimizers + ([Muon(_grouped(muon))] if muon else [])


def _grouped(items: Iterable[tuple[Tensor, dict[str, float]]]) -> list[dict[str, Any]]:
    """Put parameters of the same settings into one group, which optimisers step through at once."""
    groups: dict[tuple[float, ...], dict[str, Any]] = {}
    for p, settings in items:
        groups.setdefault(tuple(settings.values()), {"params": [], **settings})["params"].append(p)
    return list(groups.values())


class Muon(Optimizer):
    """Momentum, made orthogonal: W <- W - lr * scale * orthogonal(m), for matrices.

    A qkv weight counts as three, the kernel of a convolution as a matrix (out, in * height * width).
    """

    def __init__(self, params: Iterable[dict[str, Any]], momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": 0.02, "weight_decay": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient."""
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for same in _by_shape(params):
                grads: list[Any] = [p.grad for p in same]
                moments = [self._moment(p) for p in same]
                torch._foreach_lerp_(moments, grads, 1 - group["momentum"])  # pyright: ignore
                ahead = torch._foreach_lerp(grads, moments, group["momentum"])  # Nesterov  # pyright: ignore
                updates = _orthogonal(torch.cat([_square_parts(u) for u in ahead]))
                rows, columns = updates.shape[-2:]
                scale = group["lr"] * max(1.0, rows / columns) ** 0.5
                torch._foreach_mul_(same, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore
                parts = updates.split(len(updates) // len(same))
                torch._foreach_add_(same, [u.reshape(p.shape) for u, p in zip(parts, same, strict=True)], alpha=-scale)  # pyright: ignore

    def _moment(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        return state["momentum"]


def _by_shape(params: list[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.Size, list[Tensor]] = {}
    for p in params:
        groups.setdefault(p.shape, []).append(p)
    return list(groups.values())


def _square_parts(u: Tensor) -> Tensor:
    """(3D, D) -> (3, D, D); any other shape -> (1, rows, columns), all axes but the first as one."""
    u = u.flatten(1)
    rows, columns = u.shape
    return u.view(3, columns, columns) if rows == 3 * columns else u[None]


def _orthogonal(g: Tensor, steps: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: all singular values near 1. (n, rows, columns)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = g.shape[-2] <= g.shape[-1]
    x = g if wide else g.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x if wide else x.mT
