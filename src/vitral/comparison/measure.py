"""What a trained model does that accuracy does not tell: every measure of this package, taken on the same images."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.comparison.distance import attention_distances
from vitral.comparison.field import effective_field, field_reach, field_side, theoretical_fields
from vitral.comparison.growth import growth
from vitral.comparison.robustness import robustness
from vitral.comparison.translation import layer_errors, shift_effects
from vitral.data.inputs import ImageInputs
from vitral.data.loader import eval_batches
from vitral.data.sources.base import Data
from vitral.data.transforms import normalize
from vitral.models.cost import model_cost
from vitral.weights.rundir import load_run

FEWER, FEWEST = 64, 8
"""Images of the measures that keep whole maps or gradients, of small models and of large ones."""
FEW_MACS = 4e9
"""Multiply-adds of one forward pass of those images, unless that are too few images."""
SHIFTS = (0, 1, 2, 3, 4, 6, 8)
"""Pixels that images of 32 are moved by; larger and smaller ones in proportion."""
BATCH = 64


@dataclass(frozen=True)
class Measured:
    """What was found, as plain values, and the map of the effective receptive field."""

    found: dict[str, Any]
    field: Tensor


def measure_run(run: Path, data: Data, indices: Tensor) -> Measured:
    """Measure the model of a run on chosen images of the data that it was trained on."""
    model: Any = load_run(run)
    inputs = ImageInputs(model.preprocess)
    batches = list(eval_batches(data, indices, inputs, BATCH, False, 0))
    pixels = torch.cat([batch.inputs for batch in batches]).float() / 255
    return measure(model, pixels, torch.cat([batch.targets for batch in batches]))


def measure(model: Any, pixels: Tensor, targets: Tensor) -> Measured:
    """Measure a model in eval mode on pixels (B, C, H, W) in 0..1 of known classes."""
    p, side = model.preprocess, min(pixels.shape[-2:])
    x = normalize(pixels, p)
    few = x[: int(max(FEWEST, min(FEWER, FEW_MACS // model_cost(model.config).macs)))]

    def maps(z: Tensor) -> Sequence[Tensor]:
        return model.intermediate(z, "all", as_grid=True)

    def last(z: Tensor) -> Tensor:
        return model.intermediate(z, [-1], as_grid=True)[0]

    def look(z: Tensor) -> tuple[Tensor, Tensor]:
        return in_batches(model, z), in_batches(model.embed, z)

    field = effective_field(last, few)
    with torch.no_grad():
        cells = last(few[:1]).shape
    shifts = sorted({round(by * side / 32) for by in SHIFTS})
    found = {
        "images": len(x),
        "field": {
            "theoretical": theoretical_fields(model.config, (cells[2] // 2, cells[3] // 2)),
            "reach": field_reach(field),
            "effective": field_side(field),
            "cells": [cells[2], cells[3]],
        },
        "equivariance": [asdict(error) for error in layer_errors(maps, few)],
        "shifts": [asdict(effect) for effect in shift_effects(look, x, targets, shifts)],
        "attention_distance": attention_distances(model, few),
        "robustness": robustness(lambda z: in_batches(model, normalize(z, p)), pixels, targets, p.mean),
        "growth": growth(model.config),
    }
    return Measured(found, field)


@torch.inference_mode()
def in_batches(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function of a batch, a part of it at a time."""
    return torch.cat([function(part) for part in x.split(BATCH)])
