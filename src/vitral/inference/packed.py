"""The model itself with the matrices of its linear layers laid out for the processor: exact, in no time, for any batch.

What follows a product, an activation or the sum of a residual, is done while the product is still in the cache.
"""

import torch
from torch import Tensor, nn

from vitral.errors import ConfigError, VitralError
from vitral.inference.graph import twin_of
from vitral.inference.native import Attend, native_attention
from vitral.nn.attention import Attention
from vitral.nn.blocks import PreNormBlock
from vitral.nn.mlp import MLP, ExactGELU, TanhGELU
from vitral.nn.packed import NO_ACT, Act, PackedLinear, can_pack
from vitral.nn.regularize import LayerScale

FUSED: dict[type[nn.Module], Act] = {
    ExactGELU: ("gelu", "none"),
    TanhGELU: ("gelu", "tanh"),
    nn.ReLU: ("relu", ""),
    nn.Tanh: ("tanh", ""),
}
"""Activations that oneDNN applies to a product."""


class PackedAttention(Attention):
    """Attention of all tokens to all by our own kernel."""

    def __init__(self, attention: Attention, attend: Attend) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        self.attend = attend

    def mix(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """What the heads find, side by side: (B, N, D) -> (B, N, D), or only for the tokens in `keep`, a few."""
        if mask is not None or keep is not None:
            return super().mix(z, mask, keep)
        return self.attend(self.qkv(z), self.num_heads)


class PackedBlock(PreNormBlock):
    """Equations 2 and 3 on packed layers, each sum taken with the product before it."""

    def __init__(self, block: PreNormBlock) -> None:
        nn.Module.__init__(self)
        self._modules.update(block._modules)

    def forward(self, z: Tensor, mask: Tensor | None = None, keep: slice | None = None) -> Tensor:
        """(B, N, D) -> (B, N, D), or only the tokens in `keep`."""
        skip = z if keep is None else z[:, keep].contiguous()
        z = _packed(self.attn.proj).added_to(skip, self.attn.mix(self.norm1(z), mask, keep))  # Eq. 2
        hidden = self.mlp.act(self.mlp.fc1(self.norm2(z)))
        return _packed(self.mlp.fc2).added_to(z, hidden)  # Eq. 3


def packed(model: nn.Module) -> nn.Module:
    """A copy of a model for inference; it has packed copies of the matrices, and shares all the rest."""
    if not can_pack():
        raise VitralError("the packed engine needs a torch that was built with oneDNN; take another --engine.")
    if (dtype := next(model.parameters()).dtype) != torch.float32:
        raise ConfigError(f"the packed engine takes models in float32, got {dtype}; take another --engine.")
    twin = twin_of(model)
    for part in list(twin.modules()):
        if isinstance(part, PreNormBlock):
            _fold(part)
    for part in list(twin.modules()):
        if type(part) is MLP and type(part.act) in FUSED and type(part.fc1) is nn.Linear:
            part.fc1, part.act = PackedLinear(part.fc1, FUSED[type(part.act)]), nn.Identity()
        for name, child in part.named_children():
            if type(child) is nn.Linear:
                setattr(part, name, PackedLinear(child, NO_ACT))
    if (attend := native_attention()) is not None:
        for part in list(twin.modules()):
            for name, child in part.named_children():
                if type(child) is Attention:
                    setattr(part, name, PackedAttention(child, attend))
    for part in list(twin.modules()):
        for name, child in part.named_children():
            if type(child) is PreNormBlock and type(child.mlp) is MLP:
                setattr(part, name, PackedBlock(child))
    return twin


def _fold(block: PreNormBlock) -> None:
    """Take the factors of LayerScale into the layers before them: gamma (W x + b) = (gamma W) x + gamma b."""
    for scale, parent, name in (("ls1", block.attn, "proj"), ("ls2", block.mlp, "fc2")):
        factor, linear = getattr(block, scale), getattr(parent, name)
        if type(factor) is LayerScale and type(linear) is nn.Linear:
            folded = nn.Linear(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
            folded.weight = nn.Parameter(linear.weight.detach() * factor.gamma.detach()[:, None], requires_grad=False)
            if linear.bias is not None:
                folded.bias = nn.Parameter(linear.bias.detach() * factor.gamma.detach(), requires_grad=False)
            setattr(parent, name, folded)
            setattr(block, scale, nn.Identity())


def _packed(layer: nn.Module) -> PackedLinear:
    assert isinstance(layer, PackedLinear)
    return layer
