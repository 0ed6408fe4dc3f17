import math

import pytest
import torch

from helpers import difference, images, redraw
from vitral.nn.mlp import ACTIVATIONS, MLP

FORMULAS = {
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "tanh": math.tanh,
}


def test_every_activation_but_the_gate_has_its_formula_here():
    assert {*FORMULAS, "swiglu"} == set(ACTIVATIONS)


@pytest.mark.parametrize("act", FORMULAS)
def test_activations_are_their_formulas(act):
    x = torch.linspace(-5, 5, 41)
    torch.testing.assert_close(ACTIVATIONS[act]()(x), torch.tensor([FORMULAS[act](float(v)) for v in x]))


@pytest.mark.parametrize("act", FORMULAS)
@torch.no_grad()
def test_mlp_is_its_formula(act):
    mlp = redraw(MLP(dim=5, width=11, hidden=11, out=3, act=act, drop=0.0))
    x = images(2, 7, 5)
    hidden = x @ mlp.fc1.weight.T + mlp.fc1.bias
    hidden = torch.tensor([FORMULAS[act](v) for v in hidden.flatten().tolist()]).view(2, 7, 11)
    assert difference(mlp(x), hidden @ mlp.fc2.weight.T + mlp.fc2.bias) < 1e-5


@torch.no_grad()
def test_swiglu_gates_the_second_half_with_the_first():
    mlp = redraw(MLP(dim=5, width=14, hidden=7, out=3, act="swiglu", drop=0.0))
    x = images(2, 11, 5)
    a, b = (x @ mlp.fc1.weight.T + mlp.fc1.bias).split(7, dim=-1)
    gated = a / (1 + torch.exp(-a)) * b
    assert difference(mlp(x), gated @ mlp.fc2.weight.T + mlp.fc2.bias) < 1e-5
