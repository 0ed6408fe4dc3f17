"""A model as a graph from one batch of pixels to named tensors: what is exported, and what is compiled.

The size of the images is fixed, so what depends on it alone, such as resized positions, becomes a constant.
`vitral.inference.text` has the graphs of models that read or write text.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitral.config import Preprocess, pair
from vitral.models.detector import Detector, DetectorOutput
from vitral.models.seq2seq import DecoderModel, TokenEmbedding
from vitral.nn.positions import LearnedPositions, SinusoidalPositions

INPUT = "pixels"
"""Name of the input (B, C, H, W): pixels, scaled to 0..1 and normalised."""
EXAMPLE_BATCH = 2
"""Images in the batch that a graph is traced with: 0 and 1 would be taken for constants."""
WHOLE, ENCODER, DECODER = "whole", "encoder", "decoder"
"""Words for parts of a graph."""
Parts = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Parts that are run one by one: the names of what each takes and gives."""


class Graph(nn.Module):
    """(B, C, H, W) -> a tuple of tensors, in the order of `outputs`."""

    inputs = (INPUT,)
    sizes = ({0: "batch"},)
    """The axes of each input that have any size, and the words for them."""

    def __init__(self, model: nn.Module, outputs: tuple[str, ...], shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.model, self.outputs, self.shape = model, outputs, shape
        self.parts: Parts = {WHOLE: (self.inputs, outputs)}

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the model's answer."""
        found = self.model(pixels)
        return (found,) if isinstance(found, Tensor) else tuple(getattr(found, name) for name in self.outputs)

    def example(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> Tensor:
        """Random pixels to run it with."""
        return torch.randn(batch, *self.shape, generator=torch.Generator().manual_seed(seed))

    def examples(self, batch: int = EXAMPLE_BATCH, seed: int = 0) -> tuple[Tensor, ...]:
        """One for each input."""
        return (self.example(batch, seed),)


def output_names(model: nn.Module) -> tuple[str, ...]:
    """What a model answers with: logits, boxes beside them, or without a head the embedding that one would read."""
    if isinstance(model, DecoderModel):
        return ("logits",)
    if isinstance(model, Detector):
        return ("logits", "boxes")
    return ("logits",) if model.config.num_classes else ("embedding",)  # type: ignore[union-attr]


def assemble(tensors: Mapping[str, Tensor]) -> Any:
    """Named tensors in the form that the model itself answers in."""
    if "boxes" in tensors:
        return DetectorOutput(tensors["logits"], tensors["boxes"])
    (only,) = tensors.values()
    return only


def graph_of(model: nn.Module, preprocess: Preprocess) -> Graph:
    """The graph of a model for the images that it is fed; its weights are the model's own, not copies."""
    graph = Graph(twin_of(model), output_names(model), (len(preprocess.mean), *pair(preprocess.img_size)))
    fix_positions(graph)
    return graph


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of a model that shares its weights."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, tensors).eval()


class FixedPositions(nn.Module):
    """E_pos of one grid, as it was computed once."""

    def __init__(self, E_pos: Tensor) -> None:
        super().__init__()
        self.register_buffer("E_pos", E_pos)

    def forward(self, grid: Any, table: Any, like: Tensor) -> Tensor:
        """(1, R + N, D), whatever is asked."""
        return self.get_buffer("E_pos")


def fix_positions(graph: Any) -> None:
    """Put constants in the place of positions that would be resized or computed: not every format has the filters."""
    for part in graph.modules():
        if isinstance(part, TokenEmbedding) and part.pos_embed is None:
            part.pos_embed = nn.Parameter(part.table().detach(), requires_grad=False)
    found: dict[nn.Module, Tensor] = {}

    def note(module: nn.Module, arguments: Any, E_pos: Tensor) -> None:
        found[module] = E_pos.detach().clone()

    kinds = (LearnedPositions, SinusoidalPositions)
    hooks = [part.register_forward_hook(note) for part in graph.modules() if isinstance(part, kinds)]
    with torch.no_grad():
        graph(*graph.examples(1))
    for hook in hooks:
        hook.remove()
    for parent in list(graph.modules()):
        for name, child in list(parent.named_children()):
            if child in found:
                setattr(parent, name, FixedPositions(found[child]))
