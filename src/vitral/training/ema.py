"""An exponential moving average of the weights, which usually predicts better than the weights themselves."""

import torch
from torch import Tensor, nn


class EMA:
    """Averages of a model's parameters: average <- d * average + (1 - d) * weight, d smaller in the first steps.

    What is not trained is its own average; with a decay of 0 everything is, and nothing is kept.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad and decay}
        self.names, self._weights = list(trained), list(trained.values())
        self._averages = [p.clone() for p in self._weights]

    @torch.no_grad()
    def update(self) -> None:
        """Take the model's weights of this step in."""
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        if self._weights:
            torch._foreach_lerp_(self._averages, self._weights, 1 - decay)  # pyright: ignore

    def state_dict(self) -> dict[str, Tensor]:
        """The averages under the names of the model's parameters."""
        return dict(zip(self.names, self._averages, strict=True))

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor], steps: int) -> None:
        """Restore averages; raises a `KeyError` or `ValueError` if they are of another model."""
        self.steps = steps
        for name, average in self.state_dict().items():
            if state[name].shape != average.shape:
                raise ValueError(f"ema has {name} of shape {tuple(state[name].shape)}, not {tuple(average.shape)}")
            average.copy_(state[name])

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange weights and averages: once to evaluate, once more to go on."""
        for weight, average in zip(self._weights, self._averages, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
