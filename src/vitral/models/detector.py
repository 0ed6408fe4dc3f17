"""Detection with a Transformer (DETR: Carion et al., 2020, arXiv:2005.12872): one box and class for each query.

B batch, H x W pixels, h x w the backbone's map, N = h w, D width, Q queries, G extra queries, K classes. A box is
(cx, cy, width, height) in shares of the image. Knows nothing of losses, nor of which query answers for which object.
"""

import math
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import DetectorConfig, Preprocess
from vitral.errors import ConfigError, InputError
from vitral.models.backbone import Backbone, sum_at_finest
from vitral.models.build import build_backbone
from vitral.models.vit import VisionTransformer
from vitral.nn.attention import CrossAttention, key_mask
from vitral.nn.blocks import RESIDUALS, DecoderBlock, PositionedBlock
from vitral.nn.mlp import MLP

Answer = tuple[Tensor, Tensor]
Extra = tuple[Tensor, Tensor]
START_PROBABILITY = 0.01
"""Of every class, where each has its own sigmoid: most queries find nothing, and the loss should start out small."""


@dataclass
class DetectorOutput:
    """What a detector finds: a class and a box for each query.

    `logits` has K + 1 columns for a softmax, the last one for "no object", if the queries are `learned`; and K columns,
    each for a sigmoid of its own, if they are `anchors`.
    """

    logits: Tensor
    """(B, Q, K + 1) or (B, Q, K)."""
    boxes: Tensor
    """(B, Q, 4), cx, cy, width, height in 0..1."""
    aux: list[Answer] = field(default_factory=list)
    """Logits and boxes of the earlier decoder blocks, the first one first."""
    denoise: list[Answer] = field(default_factory=list)
    """Logits and boxes (B, G, ...) of the extra queries, of every decoder block; empty where there were none."""


# ---- positions ----


def sine(x: Tensor, dim: int, temperature: float) -> Tensor:
    """Numbers in 0..1 as waves: (...) -> (..., dim), sin and cos of 2 pi x / T^(2i / dim) in turn."""
    i = torch.arange(dim // 2, device=x.device, dtype=x.dtype)
    angles = 2 * math.pi * x[..., None] / temperature ** (2 * i / dim)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)


def sine_positions(visible: Tensor, dim: int, temperature: float, shift: float, dtype: torch.dtype) -> Tensor:
    """Where each cell stands within the visible part of its image: (B, h, w) -> (B, h w, dim), row before column.

    The cells are counted from 1 to n and divided by n; a `shift` of 0.5 places each at its middle.
    """
    half = []
    for axis in (1, 2):
        count = visible.cumsum(axis).to(dtype)
        total = count.narrow(axis, -1, 1)
        half.append(sine((count - shift) / (total + 1e-6), dim // 2, temperature))
    return torch.cat(half, dim=-1).flatten(1, 2)


def inverse_sigmoid(x: Tensor, eps: float = 1e-3) -> Tensor:
    """log(x / (1 - x)), with x kept `eps` away from 0 and 1."""
    return x.clamp(eps, 1 - eps).logit()


# ---- the two kinds of queries ----


class LearnedQueries(nn.Module):
    """DETR's: Q learned positions, tokens that start at zero, and boxes that owe nothing to the block before."""

    def __init__(self, c: DetectorConfig) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(c.num_queries, c.embed_dim))

    def start(self, B: int, extra: Extra | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """z (B, Q, D), boxes before the sigmoid (B, Q, 4), and the mask of self-attention."""
        if extra is not None:
            raise InputError('extra queries need boxes to start from; make the detector with queries="anchors".')
        z = torch.zeros_like(self.position).expand(B, -1, -1)
        return z, z.new_zeros(B, len(self.position), 4), None

    def positions(self, u: Tensor) -> Tensor:
        """(1, Q, D), wherever the boxes are."""
        return self.position[None]

    def refine(self, u: Tensor, delta: Tensor) -> Tensor:
        """The new boxes, before the sigmoid."""
        return delta


class AnchorQueries(nn.Module):
    """Each query is a box: its position comes from the box, and every block moves it (DAB-DETR, arXiv:2201.12329).

    All queries start with the same content. Extra queries, noised true boxes with their labels, may be put after them
    (DN-DETR, arXiv:2203.01305): these begin with an embedding of the label.
    """

    def __init__(self, c: DetectorConfig) -> None:
        super().__init__()
        self.dim, self.temperature, self.groups = c.embed_dim, c.pos_temperature, c.denoise_groups
        self.anchors = nn.Parameter(anchor_grid(c.num_queries))  # before the sigmoid
        self.content = nn.Embedding(c.num_classes + 1, c.embed_dim)  # the last row is that of the real queries
        D = c.embed_dim
        self.place = nn.Sequential(nn.Linear(2 * D, D), nn.ReLU(), nn.Linear(D, D))

    def start(self, B: int, extra: Extra | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """z (B, Q + G, D), boxes before the sigmoid (B, Q + G, 4), and the mask of self-attention."""
        Q = len(self.anchors)
        z = self.content.weight[-1].expand(B, Q, -1)
        u = self.anchors.expand(B, -1, -1)
        if extra is None:
            return z, u, None
        boxes, labels = self._checked(B, extra)
        z = torch.cat([z, self.content(labels.clamp(min=0))], dim=1)
        u = torch.cat([u, inverse_sigmoid(boxes)], dim=1)
        return z, u, denoising_mask(Q, labels >= 0, self.groups)

    def positions(self, u: Tensor) -> Tensor:
        """(B, Q, 4) -> (B, Q, D): that of the box's centre, as the image's cells have it, and what is learned."""
        cx, cy, width, height = u.sigmoid().unbind(-1)
        waves = sine(torch.stack([cy, cx, height, width], dim=-1), self.dim // 2, self.temperature)  # (B, Q, 4, D / 2)
        waves = waves.flatten(2)
        return waves[..., : self.dim] + self.place(waves)

    def refine(self, u: Tensor, delta: Tensor) -> Tensor:
        """The new boxes, before the sigmoid."""
        return u + delta

    def _checked(self, B: int, extra: Extra) -> Extra:
        boxes, labels = extra
        G, K = boxes.shape[1], self.content.num_embeddings - 1
        if boxes.shape != (B, G, 4) or labels.shape != (B, G) or G % self.groups:
            raise InputError(
                f"extra must be boxes (B, G, 4) and labels (B, G) with B = {B} and G a multiple of denoise_groups "
                f"({self.groups}), got {tuple(boxes.shape)} and {tuple(labels.shape)}."
            )
        if labels.numel() and (int(labels.min()) < -1 or int(labels.max()) >= K):
            raise InputError(
                f"extra labels must be from -1 to {K - 1}, got {int(labels.min())} to {int(labels.max())}."
            )
        return boxes.to(self.anchors.dtype), labels


def anchor_grid(Q: int) -> Tensor:
    """Q boxes spread evenly over the image, overlapping by about half, before the sigmoid: (Q, 4)."""
    rows = math.isqrt(Q)
    boxes = []
    for row in range(rows):
        columns = Q // rows + (row < Q % rows)
        for column in range(columns):
            boxes.append([(column + 0.5) / columns, (row + 0.5) / rows, 2 / (columns + 1), 2 / (rows + 1)])
    return inverse_sigmoid(torch.tensor(boxes))


def denoising_mask(Q: int, real: Tensor, groups: int) -> Tensor:
    """Who may look at whom: (B, 1, Q + G, Q + G), from which extra queries are no padding (B, G).

    Everyone looks at the Q queries; they look at no extra one; an extra one looks at its own group.
    """
    B, G = real.shape
    group = torch.arange(G, device=real.device) // max(G // groups, 1)
    within = (group[:, None] == group) & real[:, None, :]  # (B, G, G)
    within = within | torch.eye(G, dtype=torch.bool, device=real.device)
    mask = torch.ones(B, Q + G, Q + G, dtype=torch.bool, device=real.device)
    mask[:, :Q, Q:] = False
    mask[:, Q:, Q:] = within
    return mask[:, None]


QUERIES = {"learned": LearnedQueries, "anchors": AnchorQueries}


# ---- the model ----


class Detector(nn.Module):
    """`model(x)` gives a `DetectorOutput` for images (B, C, H, W).

    `mask` (B, H, W) is True on the pixels of the image; those of the padding are set to zero and hidden from attention.
    Boxes are shares of the visible part, as in DETR.
    """

    def __init__(self, config: DetectorConfig, backbone: Backbone | None = None) -> None:
        super().__init__()
        c, D = config, config.embed_dim
        self.config = config
        self.preprocess = Preprocess(
            img_size=c.image, interpolation="bilinear", crop_mode="squash", crop_pct=1.0
        ).for_channels(c.in_chans)
        self.labels: list[str] | None = None
        self.load_report: Any = None

        self.input_proj = nn.Conv2d(map_dims(c)[-1], D, 1)
        self.lateral = nn.ModuleList(nn.Conv2d(dim, D, 1) for dim in map_dims(c)[:-1])  # of the finer maps
        self.encoder = nn.ModuleList(
            PositionedBlock(D, make_attention(c), make_mlp(c), c.norm_eps, RESIDUALS[c.block])
            for _ in range(c.encoder_layers)
        )
        encoder_norm = c.block == "pre" and c.encoder_layers > 0
        self.encoder_norm = nn.LayerNorm(D, eps=c.norm_eps) if encoder_norm else nn.Identity()
        self.queries = QUERIES[c.queries](c)
        self.decoder = nn.ModuleList(
            DecoderBlock(D, make_attention(c), make_attention(c), make_mlp(c), c.norm_eps, RESIDUALS[c.block])
            for _ in range(c.decoder_layers)
        )
        self.norm = nn.LayerNorm(D, eps=c.norm_eps)
        # One of each for all blocks: every block is trained to answer.
        self.class_head = nn.Linear(D, c.num_classes + (c.queries == "learned"))
        self.box_head = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 4))
        init_detector(self)
        self.backbone = backbone or build_backbone(c.backbone)  # last: its weights are its own affair

    def forward(self, x: Tensor, mask: Tensor | None = None, extra: Extra | None = None) -> DetectorOutput:
        """(B, C, H, W) -> logits and boxes.

        `extra`, for anchors alone, are boxes (B, G, 4) and labels (B, G), -1 for padding: G more queries, in
        `denoise_groups` groups one after the other, which change nothing in what the others answer.
        """
        m, p_m, visible = self.encode(x, mask)
        answers = self.decode(m, p_m, visible, extra)
        Q = self.config.num_queries
        *aux, (logits, boxes) = [(logits[:, :Q], boxes[:, :Q]) for logits, boxes in answers]
        denoise = [(logits[:, Q:], boxes[:, Q:]) for logits, boxes in answers] if extra is not None else []
        return DetectorOutput(logits, boxes, aux, denoise)

    def encode(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(B, C, H, W) -> memory m (B, N, D), its positions (B, N, D), which cells are visible (B, N), None for all."""
        maps, cells = self.features(x, mask)
        shift = 0.5 if self.config.queries == "anchors" else 0.0
        p_m = sine_positions(cells, self.config.embed_dim, self.config.pos_temperature, shift, maps[0].dtype)
        visible = None if mask is None else cells.flatten(1)
        layers = [*self.lateral, self.input_proj]
        m = sum_at_finest([layer(map_) for layer, map_ in zip(layers, maps, strict=True)]).flatten(2).mT  # (B, N, D)
        for block in self.encoder:
            m = block(m, key_mask(visible), p_m)
        return self.encoder_norm(m), p_m, visible

    def decode(self, m: Tensor, p_m: Tensor, visible: Tensor | None, extra: Extra | None = None) -> list[Answer]:
        """Logits (B, Q + G, ...) and boxes (B, Q + G, 4) of every decoder block."""
        z, u, mask = self.queries.start(m.shape[0], extra)
        answers = []
        for block in self.decoder:
            z = block(z, m, mask, key_mask(visible), self.queries.positions(u), p_m)
            y = self.norm(z)
            u = self.queries.refine(u, self.box_head(y))
            answers.append((self.class_head(y), u.sigmoid()))
            u = u.detach()  # each block learns from its own step alone
        return answers

    def features(self, x: Tensor, mask: Tensor | None = None) -> tuple[list[Tensor], Tensor]:
        """(B, C, H, W) -> the backbone's last maps (B, C, h, w), and which cells of the finest are visible."""
        layers = range(-self.config.maps, 0)
        if isinstance(self.backbone, VisionTransformer):
            maps = self.backbone.intermediate(x, layers, pad=True, mask=mask)
            tokens = None if mask is None else self.backbone.visible_tokens(x, pad=True, mask=mask)
            cells = None if tokens is None else tokens[:, self.backbone.prefix_tokens :].view(-1, *maps[0].shape[2:])
        else:
            check_mask(x, mask)
            shown = x if mask is None else x.masked_fill(~mask[:, None], 0)
            maps = self.backbone.intermediate(shown, layers)
            # As in DETR: the pixel at the top left of each cell speaks for it.
            cells = None if mask is None else F.interpolate(mask[:, None].float(), maps[0].shape[2:])[:, 0] > 0
        if cells is None:
            return maps, torch.ones_like(maps[0][:, 0], dtype=torch.bool)
        if not torch.compiler.is_compiling() and not cells.flatten(1).any(dim=1).all():
            raise InputError("mask hides a whole image; leave some of each, from the top left corner on.")
        return maps, cells


def check_mask(x: Tensor, mask: Tensor | None) -> None:
    """Raise unless the mask is one for these images."""
    if not isinstance(x, Tensor) or x.ndim != 4 or mask is None:
        return
    want = (x.shape[0], *x.shape[2:])
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != want:
        got = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(f"mask must be boolean (B, H, W) = {want}, got {got}.")


def map_dims(c: DetectorConfig) -> tuple[int, ...]:
    """Channels of the maps that are read, the finest first."""
    dims = c.backbone.map_dims
    if c.maps > len(dims):
        raise ConfigError(f"maps must be at most {len(dims)}, as many as the backbone has, got {c.maps}.")
    return dims[-c.maps :]


def make_attention(c: DetectorConfig) -> CrossAttention:
    """One attention of the Transformer."""
    return CrossAttention(c.embed_dim, c.num_heads, bias=True, attn_drop=c.drop_rate, proj_drop=c.drop_rate)


def make_mlp(c: DetectorConfig) -> MLP:
    """The MLP of a block of the Transformer."""
    return MLP(c.embed_dim, c.mlp_width, c.mlp_width, c.embed_dim, c.act, c.drop_rate)


def init_detector(model: Detector) -> None:
    """Starting weights: matrices of the Transformer xavier uniform, biases 0; the backbone as it starts by itself.

    Anchors begin at the identity: the last layers of the box head and of `place` are 0, so boxes start as anchors, and
    the query and key matrices of cross-attention are equal, so a query looks first near its own centre.
    """
    if model.input_proj.weight.device.type == "meta":  # shapes without numbers
        return
    for name, parameter in model.named_parameters():
        if name.startswith(("backbone.", "queries.anchors")) or "norm" in name:
            continue
        if parameter.ndim > 1:
            nn.init.xavier_uniform_(parameter)
        else:
            nn.init.zeros_(parameter)
    if isinstance(model.queries, LearnedQueries):
        nn.init.normal_(model.queries.position)
        return
    nn.init.normal_(model.queries.content.weight)
    for part in (model.box_head, model.queries.place):
        nn.init.zeros_(cast(nn.Linear, part[-1]).weight)
    nn.init.constant_(model.class_head.bias, -math.log((1 - START_PROBABILITY) / START_PROBABILITY))
    for block in model.decoder:
        attn = cast(DecoderBlock, block).cross_attn
        attn.k.load_state_dict(attn.q.state_dict())
