"""A model as a graph from one batch of pixels to named tensors: what is exported, and what is compiled.

The size of the images is fixed, so what depends on it alone, such as resized positions, becomes a constant; or it is
free, and positions are resized in the graph. `vitral.inference.text` has the graphs of models that read or write text.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitral.config import Preprocess, pair
from vitral.errors import InputError
from vitral.models.backbone import backbone_of
from vitral.models.cnn import ResNet
from vitral.models.detector import Detector, DetectorOutput
from vitral.models.merge import MergingViT
from vitral.models.seq2seq import DecoderModel, TokenEmbedding
from vitral.models.vit import VisionTransformer
from vitral.nn.positions import FreePositions, LearnedPositions, SinusoidalPositions

INPUT = "pixels"
"""Name of the input (B, C, H, W): pixels, scaled to 0..1 and normalised."""
FREE_SIDES = ("height", "width")
"""Words for the sides of images that may have any size."""
EXAMPLE_BATCH = 2
"""Images in the batch that a graph is traced with: 0 and 1 would be taken for constants."""
WHOLE, ENCODER, DECODER = "whole", "encoder", "decoder"
"""Words for parts of a graph."""
Parts = dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
"""Parts that are run one by one: the names of what each takes and gives."""


class Graph(nn.Module):
    """(B, C, H, W) -> a tuple of tensors, in the order of `outputs`.

    `shape` is (C, H, W) of the images; with `multiple`, H and W may be any multiples of those two numbers.
    """

    inputs = (INPUT,)

    def __init__(
        self, model: nn.Module, outputs: tuple[str, ...], shape: tuple[int, int, int],
        multiple: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.outputs, self.shape, self.multiple = model, outputs, shape, multiple
        self.parts: Parts = {WHOLE: (self.inputs, outputs)}

    @property
    def sizes(self) -> tuple[dict[int, str]]:
        """The axes of the input that have any size, and the words for them."""
        return ({0: "batch"} if self.multiple is None else {0: "batch", **dict(enumerate(FREE_SIDES, start=2))},)

    def forward(self, pixels: Tensor) -> tuple[Tensor, ...]:
        """The tensors of the model's answer."""
        found = self.model(pixels)
        return (found,) if isinstance(found, Tensor) else tuple(getattr(found, name) for name in self.outputs)

    def example(self, batch: int = EXAMPLE_BATCH, seed: int = 0, steps: tuple[int, int] = (0, 0)) -> Tensor:
        """Random pixels to run it with; where the size is free, so many steps larger or smaller."""
        C, *size = self.shape
        size = [n + step * m for n, step, m in zip(size, steps, self.multiple or (0, 0), strict=True)]
        return torch.randn(batch, C, *size, generator=torch.Generator().manual_seed(seed))

    def examples(
        self, batch: int = EXAMPLE_BATCH, seed: int = 0, steps: tuple[int, int] = (0, 0)
    ) -> tuple[Tensor, ...]:
        """One for each input."""
        return (self.example(batch, seed, steps),)


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


def graph_of(model: nn.Module, preprocess: Preprocess, free_size: bool = False) -> Graph:
    """The graph of a model for images as it is fed, or of any size; its weights are the model's own, not copies."""
    multiple = _steps_of(model) if free_size else None
    shape = (len(preprocess.mean), *pair(preprocess.img_size))
    graph = Graph(twin_of(model), output_names(model), shape, multiple)
    if free_size:
        _free_positions(graph)
    else:
        fix_positions(graph)
    return graph


def twin_of(model: nn.Module) -> nn.Module:
    """A copy of a model that shares its weights."""
    tensors = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, tensors).eval()


def _steps_of(model: nn.Module) -> tuple[int, int]:
    """What the sides of images must be multiples of."""
    backbone = backbone_of(model)
    if isinstance(backbone, VisionTransformer) and not isinstance(backbone, MergingViT):
        return backbone.config.patch
    if isinstance(backbone, ResNet):
        return 1, 1
    raise InputError(
        f"this {type(backbone).__name__} cannot be exported for images of any size: what it does with its tokens is "
        f"fixed in the file. Plain ViTs, ResNets, and segmenters and detectors on them can; leave --dynamic-size out."
    )


def _free_positions(graph: Graph) -> None:
    """Let learned positions be resized in the graph."""
    for parent in list(graph.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LearnedPositions):
                setattr(parent, name, FreePositions(child))


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
