import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vitral.config import Augmentation
from vitral.data.augment import affine_maps, warp
from vitral.data.noise import Noise
from vitral.data.sources.base import ImageArray
from vitral.data.targets import (
    IGNORE,
    SMALLEST_REST,
    Boxes,
    Masks,
    Values,
    View,
    box_area,
    box_cxcywh_to_xyxy,
    box_iou,
    box_xyxy_to_cxcywh,
    boxes_to_image,
    generalized_iou,
)

H, W = 48, 80


def rectangle(x0, y0, x1, y1, value=1.0):
    picture = torch.zeros(1, 1, H, W)
    picture[..., y0:y1, x0:x1] = value
    return picture


def fractions(x0, y0, x1, y1, label=3):
    return torch.tensor([[label, x0 / W, y0 / H, x1 / W, y1 / H]], dtype=torch.float64)


def extent(picture):
    """x0, y0, x1, y1 in pixels of what is painted."""
    rows, columns = (picture > 0.5).any(1).nonzero()[:, 0], (picture > 0.5).any(0).nonzero()[:, 0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def pixels(row, height, width):
    x0, y0, x1, y1 = box_cxcywh_to_xyxy(row[1:].double()).tolist()
    return [x0 * width, y0 * height, x1 * width, y1 * height]


class TestViews:
    @pytest.mark.parametrize(
        ("view", "size"),
        [
            (View.whole(), (H, W)),
            (View.whole(), (2 * H, 3 * W)),
            (View(8 / H, 10 / W, 32 / H, 60 / W), (32, 60)),
            (View(8 / H, 10 / W, 32 / H, 60 / W), (64, 180)),
            (View(-12 / H, -20 / W, 72 / H, 120 / W), (72, 120)),  # padded all round
        ],
    )
    def test_boxes_follow_what_is_painted(self, view, size):
        picture, row = rectangle(20, 11, 43, 31), fractions(20, 11, 43, 31)
        top, left = round(view.top * H), round(view.left * W)
        high, wide = round(view.height * H), round(view.width * W)
        padded = F.pad(picture, (W, W, H, H))
        part = padded[..., H + top : H + top + high, W + left : W + left + wide]
        shown = F.interpolate(part, size=size, mode="nearest")[0, 0]
        target = Boxes([row], 2).take(0, view, size)
        assert target[0, 0] == 3
        assert pixels(target[0], *size) == pytest.approx(extent(shown), abs=1e-3)
        assert target[1].tolist() == [-1, 0, 0, 0, 0]
        mask = Masks(ImageArray((picture[0] * 7).byte()[None]), ["x"] * 8).take(0, view, size)
        assert mask.shape == size
        assert torch.equal(mask == 7, shown > 0.5)

    def test_masks_outside_the_image_are_ignored(self):
        masks = Masks(ImageArray(torch.zeros(1, 1, 6, 10, dtype=torch.uint8)), ["x"])
        target = masks.take(0, View(-0.5, -0.2, 2.0, 1.5), (12, 15))
        inside = torch.zeros(12, 15, dtype=torch.bool)
        inside[3:9, 2:12] = True
        assert torch.equal(target == 0, inside)
        assert torch.equal(target == IGNORE, ~inside)

    def test_a_mask_is_cut_and_resized_by_its_nearest_pixels(self):
        small = torch.arange(35, dtype=torch.uint8).view(1, 1, 5, 7)
        masks = Masks(ImageArray(small), [str(i) for i in range(35)])
        assert torch.equal(masks.take(0, View.whole(), (5, 7)), small[0, 0])
        assert torch.equal(masks.take(0, View(1 / 5, 2 / 7, 3 / 5, 4 / 7), (3, 4)), small[0, 0, 1:4, 2:6])
        tripled = masks.take(0, View.whole(), (15, 21))
        assert torch.equal(tripled, small[0, 0].repeat_interleave(3, 0).repeat_interleave(3, 1))
        assert torch.equal(tripled[1::3, 1::3], small[0, 0])

    def test_a_box_with_too_little_left_is_dropped(self):
        boxes = Boxes([fractions(0, 0, 40, 20)], 1)
        for shown, stays in ((SMALLEST_REST - 0.01, False), (SMALLEST_REST + 0.01, True)):
            view = View(0.0, (1 - shown) * 40 / W, 1.0, 1.0)
            assert (boxes.take(0, view, (H, W))[0, 0] >= 0) == stays

    def test_an_image_without_objects(self):
        boxes = Boxes([torch.zeros(0, 5, dtype=torch.float64)], 3)
        batch = boxes.stack([boxes.take(0, View.whole(), (9, 9))] * 2)
        assert batch.dtype == torch.float32
        assert batch.shape == (2, 3, 5)
        maps = torch.tensor([[[0.5, 0.3, 0.1], [-0.3, 0.5, 0.2]]]).repeat(2, 1, 1)
        for found in (batch, boxes.warp(batch, maps)):
            assert found[..., 0].eq(-1).all()
            assert found[..., 1:].eq(0).all()

    def test_of_too_many_the_largest_are_taken(self):
        rows = torch.cat([fractions(0, 0, n, n, label=n) for n in (5, 30, 1, 40)])
        assert Boxes([rows], 2).take(0, View.whole(), (H, W))[:, 0].tolist() == [30, 40]


AUGMENTATIONS = {
    "flip": Augmentation(flip=1.0),
    "shift": Augmentation(shift=0.15),
    "zoom": Augmentation(zoom=0.3),
    "all but turns": Augmentation(flip=0.5, shift=0.1, zoom=0.3),
}


class TestWarps:
    @pytest.mark.parametrize("name", AUGMENTATIONS)
    def test_boxes_and_masks_move_as_the_picture_does(self, name):
        B = 16
        maps = affine_maps(Noise(5, torch.arange(B)), AUGMENTATIONS[name], (H, W))
        assert maps is not None
        picture = rectangle(30, 15, 53, 34).repeat(B, 1, 1, 1)
        moved = warp(picture, maps)
        boxes = Boxes([fractions(30, 15, 53, 34)], 2)
        target = boxes.warp(boxes.stack([boxes.take(0, View.whole(), (H, W))] * B), maps)
        masks = Masks(ImageArray(picture.byte() * 4), ["x"] * 5)
        mask = masks.warp(masks.stack([masks.take(0, View.whole(), (H, W))] * B), maps)
        slack = 0.0 if name == "flip" else 0.51  # a painted edge lies on whole pixels
        for i in range(B):
            assert pixels(target[i, 0], H, W) == pytest.approx(extent(moved[i, 0]), abs=slack + 1e-4)
            assert pixels(target[i, 0], H, W) == pytest.approx(extent((mask[i] == 4).float()), abs=slack + 1e-4)
        assert target[:, 1, 0].eq(-1).all()
        assert set(mask.unique().tolist()) <= {0, 4, IGNORE}

    def test_shift_and_zoom_are_exact(self):
        box = torch.tensor([[[2.0, 0.5, 0.4, 0.2, 0.3]]])
        maps = torch.tensor([[[0.8, 0.0, 0.1], [0.0, 0.8, -0.2]]])
        moved = Boxes([], 1).warp(box, maps)[0, 0].double()
        expected = [2, (2 * 0.5 - 1 - 0.1) / 0.8 / 2 + 0.5, (2 * 0.4 - 1 + 0.2) / 0.8 / 2 + 0.5, 0.25, 0.375]
        assert moved.tolist() == pytest.approx(expected, abs=1e-6)

    def test_a_turned_box_holds_the_turned_picture(self):
        maps = affine_maps(Noise(3, torch.arange(9)), Augmentation(rotate=40, shear=0.1), (H, W))
        moved = warp(rectangle(30, 15, 53, 34).repeat(9, 1, 1, 1), maps)
        boxes = Boxes([fractions(30, 15, 53, 34)], 1)
        target = boxes.warp(boxes.stack([boxes.take(0, View.whole(), (H, W))] * 9), maps)
        for i in range(9):
            x0, y0, x1, y1 = pixels(target[i, 0], H, W)
            a0, b0, a1, b1 = extent(moved[i, 0])
            assert x0 <= a0 + 0.6
            assert y0 <= b0 + 0.6
            assert x1 >= a1 - 0.6
            assert y1 >= b1 - 0.6
            assert abs(x1 - x0 - (a1 - a0)) < 3  # and no more than it

    def test_there_and_back(self):
        forth = torch.tensor([[[-0.9, 0.0, 0.05], [0.0, 1.1, -0.04]]], dtype=torch.float64)
        A, t = forth[:, :, :2], forth[:, :, 2:]
        back = torch.cat([torch.linalg.inv(A), -torch.linalg.inv(A) @ t], 2)
        batch = torch.tensor([[[1.0, 0.5, 0.45, 0.3, 0.2], [-1, 0, 0, 0, 0]]])
        boxes = Boxes([], 2)
        assert torch.allclose(boxes.warp(boxes.warp(batch, forth), back), batch, atol=1e-6)
        masks = Masks(ImageArray(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)), ["x"])
        label_map = torch.randint(0, 5, (2, 13, 17), dtype=torch.uint8)
        flip = torch.tensor([[[-1.0, 0, 0], [0, 1, 0]]]).repeat(2, 1, 1)
        assert torch.equal(masks.warp(label_map, flip), label_map.flip(2))
        assert torch.equal(masks.warp(masks.warp(label_map, flip), flip), label_map)
        shift = torch.tensor([[[1.0, 0, 2 * 3 / 17], [0, 1, -2 * 2 / 13]]]).repeat(2, 1, 1)
        moved = masks.warp(label_map, shift)
        assert torch.equal(moved[:, 2:, :14], label_map[:, :11, 3:])
        assert moved[:, :2].eq(IGNORE).all()
        assert moved[:, :, 14:].eq(IGNORE).all()

    def test_what_leaves_the_picture_is_dropped(self):
        batch = torch.tensor([[[1.0, 0.1, 0.5, 0.2, 0.2], [0.0, 0.8, 0.5, 0.2, 0.2]]])
        maps = torch.tensor([[[1.0, 0.0, 0.36], [0.0, 1.0, 0.0]]])  # 0.18 of the width to the left
        found = Boxes([], 2).warp(batch, maps)
        assert found[0, 0].tolist() == [-1, 0, 0, 0, 0]
        assert found[0, 1].tolist() == pytest.approx([0, 0.62, 0.5, 0.2, 0.2])

    def test_none_moves_nothing(self):
        boxes, masks = torch.rand(2, 3, 5), torch.randint(0, 9, (2, 4, 6), dtype=torch.uint8)
        assert torch.equal(Boxes([], 3).warp(boxes, None), boxes)
        assert torch.equal(Masks(ImageArray(masks[:, None]), []).warp(masks, None), masks)

    def test_values_do_not_move(self):
        values = Values(torch.rand(5, 2))
        batch = values.stack([values.take(i, View(0.1, 0.2, 0.3, 0.4), (7, 9)) for i in range(3)])
        assert torch.equal(values.warp(batch, torch.rand(3, 2, 3)), values.tensor[:3])
        assert values.take(1, View.whole(), (7, 9)).shape == (2,)


def random_boxes(count, seed):
    corners = torch.rand(count, 2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.cat([corners.amin(1), corners.amax(1)], 1)


def test_iou_and_generalised_iou_are_the_literal_loops():
    a, b = random_boxes(7, 0), random_boxes(11, 1)
    iou, giou = box_iou(a, b), generalized_iou(a[:, None], b[None])
    assert iou.shape == giou.shape == (7, 11)
    for i, (ax0, ay0, ax1, ay1) in enumerate(a.tolist()):
        for j, (bx0, by0, bx1, by1) in enumerate(b.tolist()):
            shared = max(0, min(ax1, bx1) - max(ax0, bx0)) * max(0, min(ay1, by1) - max(ay0, by0))
            union = (ax1 - ax0) * (ay1 - ay0) + (bx1 - bx0) * (by1 - by0) - shared
            around = (max(ax1, bx1) - min(ax0, bx0)) * (max(ay1, by1) - min(ay0, by0))
            assert iou[i, j].item() == pytest.approx(shared / union)
            assert giou[i, j].item() == pytest.approx(shared / union - (around - union) / around)
    assert torch.allclose(box_iou(a, a).diagonal(), torch.ones(7, dtype=torch.float64))
    assert torch.allclose(generalized_iou(a, a), torch.ones(7, dtype=torch.float64))


def test_boxes_without_area_overlap_nothing():
    dot = torch.tensor([[0.5, 0.5, 0.5, 0.5]])
    assert box_iou(dot, dot).item() == 0
    assert math.isfinite(generalized_iou(dot, dot).item())


def test_conversions_go_both_ways():
    boxes = random_boxes(13, 2)
    assert torch.allclose(box_cxcywh_to_xyxy(box_xyxy_to_cxcywh(boxes)), boxes)
    sides = box_xyxy_to_cxcywh(boxes)[:, 2:]
    assert torch.allclose(box_area(boxes), sides.prod(1))
    assert box_xyxy_to_cxcywh(torch.tensor([1.0, 2, 4, 8])).tolist() == [2.5, 5, 3, 6]


def test_predictions_go_back_to_the_image():
    rows = torch.cat([torch.zeros(9, 1, dtype=torch.float64), 0.3 + 0.4 * random_boxes(9, 3)], 1)
    view = View(-0.1, 0.2, 1.3, 0.6)
    target = Boxes([rows], 9).take(0, view, (5, 5)).double()
    assert torch.allclose(boxes_to_image(target[:, 1:], view), rows[:, 1:], atol=1e-6)
    beyond = boxes_to_image(torch.tensor([[0.5, 0.5, 2.0, 2.0]]), View.whole())
    assert beyond.tolist() == [[0, 0, 1, 1]]
    assert np.isfinite(target.numpy()).all()
