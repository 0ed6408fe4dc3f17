"""A linear layer whose matrix lies in memory as the processor reads it: faster, for inference on a CPU alone."""

import torch
from torch import Tensor, nn

Act = tuple[str, str]
"""An activation in oneDNN's words: its kind, and which form of it."""
NO_ACT: Act = ("none", "")


class PackedLinear(nn.Linear):
    """act(W x + b) by oneDNN, with a copy of W laid out once for it: (..., in) -> (..., out).

    W and b keep their names, and are the layer's own that it was made from. A change of W is not seen.
    """

    def __init__(self, linear: nn.Linear, act: Act = NO_ACT) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.act = linear.weight, linear.bias, act
        rows = None  # any number of them
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), rows)

    def forward(self, input: Tensor) -> Tensor:
        """act(W x + b)."""
        kind, form = self.act
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self.bias, kind, [], form)

    def added_to(self, skip: Tensor, x: Tensor) -> Tensor:
        """W x + b + skip, the sum taken while the product is in the cache."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, skip, self._packed, self.bias, "add")


def can_pack() -> bool:
    """Whether this torch has oneDNN's layouts."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
