"""LoRA (Hu et al., 2021, arXiv:2106.09685): fine-tuning by a low-rank change of chosen matrices.

Works on the linear layers of any model, chosen by their names, and folds back into the plain model. Knows nothing of
training: what is frozen has `requires_grad` off.
"""

import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import LoRAOptions
from vitral.errors import ConfigError, unknown_name


class LoRALinear(nn.Module):
    """y = W x + b + (alpha / r) B A x, with A (r, in) and B (out, r) to learn; W and b are frozen.

    A starts normal, with entries of variance 1 / in, and B at zero, so that the model starts as it was. The weight and
    the bias keep their names in the state dict.

    A fused [W_Q; W_K; W_V] is one matrix like any other: its three parts share A, and each has its own rows of B. So a
    rank of 3r can express whatever three changes of rank r can, and costs 12 r D parameters against their 6 r D.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = alpha / rank
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
        self.lora_B = nn.Parameter(linear.weight.new_zeros(linear.out_features, rank))
        nn.init.normal_(self.lora_A, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        change = F.linear(F.linear(x, self.lora_A), self.lora_B)  # B A x
        return F.linear(x, self.weight, self.bias) + self.scale * change

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The plain layer W' = W + (alpha / r) B A, rounded once."""
        linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None, device="meta")
        change = self.scale * self.lora_B.double() @ self.lora_A.double()
        linear.weight = nn.Parameter((self.weight.double() + change).to(self.weight.dtype), requires_grad=False)
        linear.bias = self.bias
        return linear.train(self.training)


def add_lora(
    model: nn.Module, rank: int, alpha: float, parts: str = LoRAOptions.parts, trained: str = "head"
) -> nn.Module:
    """Put LoRA on chosen linear layers, in place, and freeze everything else but the parts named in `trained`.

    Both are words separated by commas, each one or more whole pieces of a dotted name: `attn.qkv` is that layer in
    every block, `blocks.3` every layer of one block, `mlp` both layers of each MLP. A layer that gets LoRA is itself
    frozen even where `trained` names it.
    """
    if not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"the rank of LoRA must be a whole number of at least 1, got {rank!r}.")
    if not alpha > 0:
        raise ConfigError(f"alpha of LoRA must be above 0, got {alpha!r}.")
    if lora_parameters(model):
        raise ConfigError("the model has LoRA already; fold it in with merge_lora before adding another.")
    layers = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    parameters = [name for name, _ in model.named_parameters()]
    chosen = _named(parts, layers, "linear layer for LoRA")
    learning = _named(trained, parameters, "part to train beside LoRA")

    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learning)
    for name in chosen:
        linear = model.get_submodule(name).requires_grad_(False)
        assert isinstance(linear, nn.Linear)
        model.set_submodule(name, LoRALinear(linear, rank, alpha))
    return model


def merge_lora(model: nn.Module) -> nn.Module:
    """Fold every LoRA into its layer, in place: model and state dict are plain again. What is frozen stays so."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, layer in layers.items():
        model.set_submodule(name, layer.merged())
    return model


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every A and B, by name."""
    return {name: p for name, p in model.named_parameters() if name.endswith(("lora_A", "lora_B"))}


def count_trainable(model: nn.Module) -> int:
    """Number of parameters that training changes."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _named(words: str, names: list[str], what: str) -> list[str]:
    """The names that hold one of the words; a word that none holds is an error with the nearest ones."""
    found: list[str] = []
    for word in filter(None, (word.strip() for word in words.split(","))):
        matches = [name for name in names if f".{word}." in f".{name}."]
        if not matches:
            tails = {re.sub(r"^.*\.\d+\.", "", name) for name in names}  # as in every block
            raise unknown_name(what, word, tails | {tail.rpartition(".")[0] for tail in tails if "." in tail})
        found += [name for name in matches if name not in found]
    return found
