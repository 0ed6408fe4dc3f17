"""Which patches speak for an answer: methods that ask the gradient, for a class or any other number of the output.

`attribution`: gradients times attention, propagated through the residuals (Chefer et al., 2021, arXiv:2103.15679).
`gradient_rollout`, `attention_rollout`: attention multiplied through the blocks, weighted by the gradient or as it is.
`grad_cam`: patch tokens before the last block, or the last map of what is no ViT, times their gradient (Grad-CAM,
Selvaraju et al., 2017, without its mean over places: Draelos and Carin, 2020, arXiv:2011.08891).
`integrated_gradients`: the gradient along the way from an empty image, on patch tokens (Sundararajan et al., 2017).
`occlusion`: how much the answer falls when a patch is painted over; no gradient, one forward pass for each patch.
`input_gradients`: the plain gradient by the pixels, to compare with.

Each takes images (B, C, H, W) and gives maps (B, G_h, G_w). The model's mode, gradients and hooks stay as they were.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vitral.errors import InputError
from vitral.explanation.attention import Recorder, fuse, pool_row, to_maps
from vitral.explanation.faithfulness import mean_colour, painted
from vitral.explanation.rollout import rollout
from vitral.models.backbone import Backbone
from vitral.models.vit import VisionTransformer
from vitral.nn.patches import pad_to_multiple

Target = int | Tensor | Callable[[Tensor], Tensor] | None
"""A class, one per image, a function from outputs (B, ...) to numbers (B), or None for the likeliest class."""
Track = Callable[[Any], Iterable[Any]]
"""Put around the steps of a slow method: gives them on as they are, and may show how far it is."""


def select(outputs: Tensor, target: Target) -> Tensor:
    """The number (B) that is to be explained."""
    if callable(target) and not isinstance(target, Tensor):
        chosen = target(outputs)
        if chosen.shape != outputs.shape[:1]:
            raise InputError(f"target must give one number for each image, got shape {tuple(chosen.shape)}.")
        return chosen
    if outputs.ndim != 2 or outputs.shape[1] == 0:
        raise InputError(
            f"this model's output has shape {tuple(outputs.shape)}; give a target that makes it one number."
        )
    wanted = (
        outputs.argmax(1) if target is None else torch.as_tensor(target, device=outputs.device).expand(len(outputs))
    )
    classes = outputs.shape[1]
    if not ((wanted >= 0) & (wanted < classes)).all():
        raise InputError(f"target must be a class from 0 to {classes - 1}, got {target}.")
    return outputs.gather(1, wanted[:, None])[:, 0]


@contextmanager
def left_as_it_was(model: Backbone) -> Iterator[None]:
    """Run in eval mode with gradients on and frozen weights, and put everything back."""
    modes = [(module, module.training) for module in model.modules()]
    wants = [(p, p.requires_grad) for p in model.parameters()]
    model.eval()
    for p, _ in wants:
        p.requires_grad_(False)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for p, want in wants:
            p.requires_grad_(want)
        for module, training in modes:
            module.training = training


def recorded(model: VisionTransformer, x: Tensor, target: Target) -> tuple[list[Tensor], Tensor]:
    """How much each weight of attention speaks for the target, (grad A * A)^+ with the mean of heads, (B, N, N) for
    each block; and where pooling reads.
    """
    with left_as_it_was(model):
        # With frozen weights the graph must begin somewhere: at the tokens.
        z = model.embed_tokens(x)[0].detach().requires_grad_()
        with Recorder() as record:
            outputs = from_tokens(model, z)
        grads = torch.autograd.grad(select(outputs, target).sum(), record.rows)
    blocks, start = pool_row(model, record.rows)
    speaks = [(grad * rows.detach()).clamp(min=0).mean(1) for rows, grad in zip(blocks, grads, strict=False)]
    return speaks, start


def from_tokens(model: VisionTransformer, z: Tensor) -> Tensor:
    """The model's output for tokens z_0 (B, R + N, D)."""
    return model.forward_head(model.run_blocks(z))


def attribution(model: VisionTransformer, x: Tensor, target: Target = None) -> Tensor:
    """r <- r + r A_l, A_l = mean over heads of (grad A * A)^+, from the pooled token back to the first block."""
    speaks, share = recorded(model, x, target)
    for A in reversed(speaks):
        share = share + share @ A
    return to_maps(model, share[:, 0], model.grid_of(x))


def gradient_rollout(model: VisionTransformer, x: Tensor, target: Target = None, discard: float = 0.0) -> Tensor:
    """Attention rollout in which each weight counts by how much it speaks for the class."""
    return to_maps(model, rollout(*recorded(model, x, target), discard), model.grid_of(x))


def attention_rollout(
    model: VisionTransformer, x: Tensor, target: Target = None, fusion: str = "mean", discard: float = 0.0
) -> Tensor:
    """Attention rollout, heads fused by mean, max or min. It knows no class, and takes a target like its fellows."""
    with left_as_it_was(model), torch.no_grad(), Recorder() as record:
        from_tokens(model, model.embed_tokens(x)[0])
    blocks, start = pool_row(model, record.rows)
    return to_maps(model, rollout([fuse(rows, fusion) for rows in blocks], start, discard), model.grid_of(x))


def grad_cam(model: Backbone, x: Tensor, target: Target = None) -> Tensor:
    """(sum over D of dy / dz_n * z_n)^+ on the patch tokens that the last block receives; of others, on the last map.

    Of a [CLS] the last tokens would tell nothing, for the pooling does not read them; elsewhere it reads them all.
    """
    if not isinstance(model, VisionTransformer):
        with left_as_it_was(model):
            z = model.forward_features(x).detach().requires_grad_()
            (grad,) = torch.autograd.grad(select(model.forward_head(z), target).sum(), z)
        return (grad * z.detach()).sum(-1).clamp(min=0).unflatten(1, model.grid_of(x))
    with left_as_it_was(model):
        z, _ = model.embed_tokens(x)
        *inner, last = model.blocks
        states = []
        for block in inner:
            z = block(z).detach()
            states.append(z)
        z.requires_grad_()
        outputs = model.forward_head(model.side_by_side([*states, last(z)]))
        (grad,) = torch.autograd.grad(select(outputs, target).sum(), z)
    return to_maps(model, (grad * z.detach()).sum(-1).clamp(min=0), model.grid_of(x))


def integrated_gradients(
    model: VisionTransformer, x: Tensor, target: Target = None, steps: int = 32, track: Track = iter
) -> Tensor:
    """sum over D of (z_n - z'_n) times the mean gradient on the way from z', the tokens of an image of mean colour.

    Over all patches the values add up to the change of the answer from that image to this one.
    """
    with left_as_it_was(model):
        z = model.embed_tokens(x)[0].detach()
        base = model.embed_tokens(torch.zeros_like(x))[0].detach()
        chosen = target if target is not None else from_tokens(model, z).argmax(1)
        total = torch.zeros_like(z)
        for k in track(range(steps)):
            point = (base + (k + 0.5) / steps * (z - base)).requires_grad_()
            (grad,) = torch.autograd.grad(select(from_tokens(model, point), chosen).sum(), point)
            total += grad / steps
    return to_maps(model, ((z - base) * total).sum(-1), model.grid_of(x))


def occlusion(model: Backbone, x: Tensor, target: Target = None, batch: int = 16, track: Track = iter) -> Tensor:
    """The fall of the target when each patch in turn takes the image's mean colour; of a class, the fall of log p."""

    def answer(images: Tensor, wanted: Target) -> Tensor:
        outputs = model(images)
        return select(outputs if callable(wanted) else outputs.log_softmax(1), wanted)

    grid, maps = model.grid_of(x), []
    N = grid[0] * grid[1]
    with left_as_it_was(model), torch.no_grad():
        wanted = model(x).argmax(1) if target is None else target
        for i in range(len(x)):
            one, own = x[i : i + 1], wanted[i : i + 1] if isinstance(wanted, Tensor) and wanted.ndim else wanted
            whole, fallen = answer(one, own), []
            for kept in track((~torch.eye(N, dtype=torch.bool, device=x.device)).split(batch)):
                many = one.expand(len(kept), -1, -1, -1)
                each = own.expand(len(kept)) if isinstance(own, Tensor) else own
                fallen.append(whole - answer(painted(model, many, kept, mean_colour(many)), each))
            maps.append(torch.cat(fallen))
    return torch.stack(maps).unflatten(1, grid)


def input_gradients(model: Backbone, x: Tensor, target: Target = None) -> Tensor:
    """|dy / dx| summed over the channels and pixels of each patch, of what is no ViT of each cell of the last map."""
    with left_as_it_was(model):
        pixels = x.detach().clone().requires_grad_()
        (grad,) = torch.autograd.grad(select(model(pixels), target).sum(), pixels)
    P_h, P_w = model.config.map_strides[-1]
    return pad_to_multiple(grad.abs().sum(1), (P_h, P_w)).unflatten(2, (-1, P_w)).unflatten(1, (-1, P_h)).sum((2, 4))
