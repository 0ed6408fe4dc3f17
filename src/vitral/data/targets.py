"""What a picture's target is, and how it moves with the picture: values, boxes, masks.

A target is taken in two steps, like its image: `take` follows the cut and the resize of one image, `warp` the affine
map of each sample of a batch. Boxes count in fractions of what they lie in, so no size is needed to move them.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.sources.base import Rasters

IGNORE = 255
"""Mask value of a pixel that counts for nothing."""
SMALLEST_REST = 0.25
"""A box of which a smaller share of the area is left after a cut is dropped."""
_TINY = 1e-12
"""What an area is taken to be at least where it is divided by."""
_TIE = 1e-6
"""A pixel centre that falls on the edge of two pixels takes the latter, whatever the rounding."""


@dataclass(frozen=True)
class View:
    """The part of an image that the model is fed, in fractions of the image's sides; beyond 0..1 lies padding."""

    top: float
    left: float
    height: float
    width: float

    @staticmethod
    def whole() -> "View":
        """All of the image."""
        return View(0.0, 0.0, 1.0, 1.0)


class Targets(Protocol):
    """The targets of a data set, one for each image."""

    def __len__(self) -> int: ...

    def take(self, index: int, view: View, size: tuple[int, int]) -> Tensor:
        """One image's target, as the model is fed it: the view, resized to (height, width)."""
        ...

    def stack(self, targets: list[Tensor]) -> Tensor:
        """Several of them as a batch."""
        ...

    def warp(self, batch: Tensor, maps: Tensor | None) -> Tensor:
        """Move a batch by the maps (B, 2, 3) of `data/augment.affine_maps`, from output to input; None: it stays."""
        ...


@dataclass(frozen=True)
class Values:
    """Labels or numbers, (N, ...): they stay what they are wherever the picture goes."""

    tensor: Tensor

    def __len__(self) -> int:
        return len(self.tensor)

    def take(self, index: int, view: View, size: tuple[int, int]) -> Tensor:
        """The values of one image."""
        return self.tensor[index]

    def stack(self, targets: list[Tensor]) -> Tensor:
        """(B, ...)."""
        return torch.stack(targets)

    def warp(self, batch: Tensor, maps: Tensor | None) -> Tensor:
        """Nothing moves."""
        return batch


# ---- boxes ----


@dataclass(frozen=True)
class Boxes:
    """Objects of each image, rows[i] (n, 5) float64: class, x0, y0, x1, y1 in fractions; a target has `most` rows."""

    rows: list[Tensor]
    most: int

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, index: int, view: View, size: tuple[int, int]) -> Tensor:
        """(most, 5) float32: class, cx, cy, w, h in fractions of the view; empty rows have class -1.

        Of more than `most` boxes, the largest are taken.
        """
        rows = self.rows[index]
        start = rows.new_tensor([view.left, view.top, view.left, view.top])
        span = rows.new_tensor([view.width, view.height, view.width, view.height])
        xyxy, kept = _clip((rows[:, 1:] - start) / span)
        found = torch.cat([rows[kept, :1], box_xyxy_to_cxcywh(xyxy[kept])], 1)
        if len(found) > self.most:
            largest = (found[:, 3] * found[:, 4]).argsort(descending=True, stable=True)[: self.most]
            found = found[largest.sort().values]
        target = _no_boxes(self.most)
        target[: len(found)] = found.float()
        return target

    def stack(self, targets: list[Tensor]) -> Tensor:
        """(B, most, 5)."""
        return torch.stack(targets)

    def warp(self, batch: Tensor, maps: Tensor | None) -> Tensor:
        """Each box becomes the one around its four moved corners, cut to the picture."""
        if maps is None:
            return batch
        A, t = maps.to(batch.device).double().split([2, 1], 2)  # input = A output + t
        x0, y0, x1, y1 = (2 * box_cxcywh_to_xyxy(batch[..., 1:].double()) - 1).unbind(-1)  # (B, most)
        corners = torch.stack([torch.stack([x0, x1, x0, x1], -1), torch.stack([y0, y0, y1, y1], -1)], 1)
        moved = torch.linalg.solve(A, corners.flatten(2) - t).view_as(corners)  # (B, 2, most, 4)
        low, high = moved.amin(-1), moved.amax(-1)
        xyxy, kept = _clip((torch.stack([low[:, 0], low[:, 1], high[:, 0], high[:, 1]], -1) + 1) / 2)
        rows = torch.cat([batch[..., :1], box_xyxy_to_cxcywh(xyxy).to(batch)], -1)
        kept = kept & (batch[..., 0] >= 0)
        return torch.where(kept[..., None], rows, _no_boxes(1).to(batch))


def _no_boxes(count: int) -> Tensor:
    return torch.tensor([[-1.0, 0, 0, 0, 0]]).repeat(count, 1)


def _clip(xyxy: Tensor) -> tuple[Tensor, Tensor]:
    """Cut boxes to 0..1, and say of which enough is left."""
    cut = xyxy.clamp(0, 1)
    left, whole = box_area(cut), box_area(xyxy)
    return cut, (left > 0) & (left >= SMALLEST_REST * whole)


def usable_box(xyxy: list[float], written: str, slack: float = 1e-4) -> tuple[list[float] | None, str, str]:
    """Clip an annotated box in fractions to its image: the box or None, the kind of its problem, and the error message.

    `written` is the box in the units of the annotation file, for the message. Up to `slack` beyond the border counts as
    rounding and is not reported.
    """
    x0, y0, x1, y1 = xyxy
    if not all(map(math.isfinite, xyxy)) or x1 < x0 or y1 < y0:
        return None, "box_invalid", f"the box {written} has invalid coordinates"
    if x1 == x0 or y1 == y0:
        return None, "box_empty", f"the box {written} has no area"
    if x1 <= 0 or y1 <= 0 or x0 >= 1 or y0 >= 1:
        return None, "box_outside", f"the box {written} is outside the image"
    cut = [min(max(v, 0.0), 1.0) for v in xyxy]
    if min(xyxy) < -slack or max(xyxy) > 1 + slack:
        return cut, "box_clipped", f"the box {written} extends beyond the image"
    return cut, "", ""


def box_cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """(..., 4): centre and sides -> left, top, right, bottom."""
    centre, sides = boxes.split(2, -1)
    return torch.cat([centre - sides / 2, centre + sides / 2], -1)


def box_xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """(..., 4): left, top, right, bottom -> centre and sides."""
    low, high = boxes.split(2, -1)
    return torch.cat([(low + high) / 2, high - low], -1)


def box_area(boxes: Tensor) -> Tensor:
    """Area (...) of xyxy boxes (..., 4)."""
    return (boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1])


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """(N, 4) and (M, 4) as xyxy -> (N, M): shared area over the area of both together; 0 where neither has any."""
    shared, union = _shared_and_union(a[:, None], b[None])
    return shared / union.clamp(min=_TINY)


def generalized_iou(a: Tensor, b: Tensor) -> Tensor:
    """IoU less the empty share of the box around both, -1..1 (Rezatofighi et al., 2019), of boxes side by side.

    (..., 4) and (..., 4) -> (...), broadcast: `generalized_iou(a[:, None], b[None])` compares each with each.
    """
    shared, union = _shared_and_union(a, b)
    low, high = torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])
    around = (high - low).prod(-1)
    return shared / union.clamp(min=_TINY) - (around - union) / around.clamp(min=_TINY)


def _shared_and_union(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    low, high = torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    return shared, box_area(a) + box_area(b) - shared


def boxes_to_image(boxes: Tensor, view: View) -> Tensor:
    """Boxes (n, 4) as cxcywh in fractions of the view -> xyxy in fractions of the image, cut to it."""
    start = boxes.new_tensor([view.left, view.top, view.left, view.top])
    span = boxes.new_tensor([view.width, view.height, view.width, view.height])
    return (box_cxcywh_to_xyxy(boxes) * span + start).clamp(0, 1)


# ---- masks ----


@dataclass(frozen=True)
class Masks:
    """A class number for each pixel: `images` reads uint8 (1, H, W), `classes` names the numbers, 255 is ignored."""

    images: Rasters
    classes: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: int, view: View, size: tuple[int, int]) -> Tensor:
        """(h, w) uint8: the nearest pixel of the view; what lies outside the image is ignored."""
        mask = self.images.read(index, "grey")[0]
        rows, row_in = _nearest(view.top, view.height, size[0], mask.shape[0])
        columns, column_in = _nearest(view.left, view.width, size[1], mask.shape[1])
        return mask[rows][:, columns].masked_fill(~(row_in[:, None] & column_in), IGNORE)

    def stack(self, targets: list[Tensor]) -> Tensor:
        """(B, h, w)."""
        return torch.stack(targets)

    def warp(self, batch: Tensor, maps: Tensor | None) -> Tensor:
        """Nearest pixel through the maps; what comes from outside is ignored, though the image is mirrored there."""
        if maps is None:
            return batch
        x = batch[:, None].float() - IGNORE  # outside is 0 to grid_sample
        grid = F.affine_grid(maps.to(x), list(x.shape), align_corners=False)
        moved = F.grid_sample(x, grid, mode="nearest", padding_mode="zeros", align_corners=False)
        return (moved[:, 0] + IGNORE).to(batch.dtype)


def _nearest(start: float, span: float, count: int, side: int) -> tuple[Tensor, Tensor]:
    """The pixels of a side on which `count` centres of a view fall, and which of them fall on the image at all."""
    centres = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    pixels = ((start + span * centres) * side + _TIE).floor().long()
    return pixels.clamp(0, side - 1), (pixels >= 0) & (pixels < side)
