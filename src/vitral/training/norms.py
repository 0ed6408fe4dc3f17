"""Batch norm in training: statistics that belong to the weights they are used with.

A batch norm predicts with means and deviations that it gathered along the way, from weights as they then were. Averaged
weights have other activations, and neither the last running statistics nor an average of them are theirs. So before
weights are evaluated or kept, their statistics are measured anew on training batches, as training itself sees them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

BATCHES = 16
"""Training batches that are measured."""
Statistics = dict[str, Tensor]


def learning(model: nn.Module) -> list[_BatchNorm]:
    """The batch norms that learn; one whose weights are frozen keeps its statistics too."""
    norms = (m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats)
    return [norm for norm in norms if any(p.requires_grad for p in norm.parameters())]


def train(model: nn.Module) -> None:
    """Put a model into training mode, all but the frozen batch norms: these do as they do when predicting."""
    model.train()
    kept = set(learning(model))
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module not in kept:
            module.eval()


@torch.no_grad()
def measure(model: nn.Module, passes: Iterable[object], mean: Callable[[Tensor], Tensor]) -> Statistics:
    """Measure the statistics of the weights as they are, and give back the ones before.

    Each step of `passes` puts one training batch through the model; `mean` is over all processes. The mean is that of
    the batches, the variance their mean variance and the variance of their means. Leaves the model in eval mode.
    """
    norms = learning(model)
    before = statistics(model)
    model.eval()
    if not norms:
        return before
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
        norm.momentum = 1.0  # the statistics are then those of the last batch
    sums = [torch.zeros(2, norm.num_features, dtype=torch.float64) for norm in norms]
    count = 0
    for _ in passes:
        count += 1
        for total, norm in zip(sums, norms, strict=True):
            m, v = norm.running_mean.double().cpu(), norm.running_var.double().cpu()  # type: ignore[union-attr]
            total += torch.stack([m, v + m * m])
    assert count, "there is no batch to measure by"
    for total, norm, momentum in zip(sums, norms, momenta, strict=True):
        m, square = mean(total / count)
        norm.running_mean.copy_(m)  # type: ignore[union-attr]
        norm.running_var.copy_(square - m * m)  # type: ignore[union-attr]
        norm.momentum = momentum
        norm.eval()
    return before


def statistics(model: nn.Module) -> Statistics:
    """What the batch norms that learn have gathered."""
    return {f"{i}.{name}": b.clone() for i, norm in enumerate(learning(model)) for name, b in norm.named_buffers()}


@torch.no_grad()
def restore(model: nn.Module, kept: Statistics) -> None:
    """Put statistics back."""
    for i, norm in enumerate(learning(model)):
        for name, buffer in norm.named_buffers():
            buffer.copy_(kept[f"{i}.{name}"])
