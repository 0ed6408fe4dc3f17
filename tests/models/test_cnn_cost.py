"""Costs and receptive fields of CNNs, from their config alone, against the built models."""

from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import bytes_kept, images
from vitral.config import ResNetConfig, ResNetKind
from vitral.models.cnn import ResNet
from vitral.models.cost import model_cost, receptive_fields

CNNS = [
    *[{"kind": kind, "img_size": 64} for kind in get_args(ResNetKind)],
    {"kind": "resnet8", "img_size": (27, 8), "in_chans": 1, "num_classes": 0},
    {"kind": "resnet18", "img_size": (70, 97), "dilation": True, "num_classes": 7},
    {"kind": "resnet50", "img_size": (33, 64), "dilation": True, "num_classes": 7},
]


@pytest.mark.parametrize("options", CNNS)
def test_counts_are_those_of_the_built_cnn(options):
    config = ResNetConfig(**options)
    model = ResNet(config).eval()
    cost = model_cost(config)
    assert cost.params == sum(p.numel() for p in model.parameters())
    x = images(1, config.in_chans, *config.image)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(x)
    assert 2 * cost.macs == counter.get_total_flops()
    with torch.no_grad():
        assert cost.maps == tuple(tuple(m.shape[2:]) for m in model.intermediate(x, "all"))
    assert cost.maps[-1] == cost.grid == model.grid_of(x)


@pytest.mark.parametrize("kind", ["resnet8", "resnet18", "resnet50"])
def test_activations_are_what_training_keeps_in_a_cnn(kind):
    config = ResNetConfig(kind=kind, img_size=64, num_classes=5)
    model = ResNet(config).train()
    kept = bytes_kept(model, lambda: model(images(2, 3, 64, 64)))
    assert kept == pytest.approx(2 * model_cost(config).activation_bytes, rel=0.03)


@pytest.mark.parametrize("options", [{"kind": "resnet8"}, {"kind": "resnet18"}, {"kind": "resnet18", "dilation": True}])
def test_a_cell_of_each_stage_sees_what_its_field_says(options):
    """By the gradient of a cell, with positive weights and means for maxima, so that no pixel is shut out."""
    side = 128 if options["kind"] == "resnet8" else 896
    config = ResNetConfig(img_size=side, in_chans=1, num_classes=0, **options)
    model = ResNet(config).eval().double()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.weight.fill_(module.weight[0].numel() ** -1)
    if not config.small:
        model.maxpool = torch.nn.AvgPool2d(3, 2, 1)
    fields = [f for f in receptive_fields(config) if f.stage != "stem"]
    assert [f.stage for f in fields] == model.stage_names
    x = torch.ones(1, 1, side, 1, dtype=torch.float64, requires_grad=True)
    for field, (down, _), m in zip(fields, config.map_strides, model.intermediate(x, "all"), strict=True):
        assert field.stride == down
        i = m.shape[2] // 2
        (grad,) = torch.autograd.grad(m[0, :, i, 0].sum(), x, retain_graph=True)
        seen = grad.flatten().nonzero()
        first = field.start + i * field.stride
        assert int(seen.min()) == max(first, 0)
        assert int(seen.max()) == min(first + field.size - 1, side - 1)
        assert field.size < side
