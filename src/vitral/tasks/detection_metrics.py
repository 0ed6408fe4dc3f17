"""Average precision of boxes, by COCO's rules and its evaluation in C++ (faster-coco-eval)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.targets import box_cxcywh_to_xyxy, box_iou
from vitral.errors import VitralError

SIDE = 1000.0  # boxes are in fractions; COCO's evaluation wants something like pixels


def detection_metrics(found: dict[str, Tensor], labels: list[str], threshold: float) -> dict[str, Any]:
    """AP over IoU 0.50 to 0.95, at 0.50 and at 0.75, by class; precision, recall and F1 at the threshold."""
    precision = coco_precision(found, len(labels))  # (IoU thresholds, recalls, K), -1 where there is nothing to find
    by_class = {}
    counts = torch.bincount(found["targets"][:, :, 0][found["targets"][:, :, 0] >= 0].long(), minlength=len(labels))
    for k, name in enumerate(labels):
        if counts[k]:
            by_class[name] = {
                "objects": int(counts[k]),
                "ap": float(precision[:, :, k].mean()),
                "ap50": float(precision[0, :, k].mean()),
            }
    right, told, there = hits(found, threshold)
    values = precision[:, :, [k for k in range(len(labels)) if counts[k]]]
    mean = (lambda part: float(part.mean())) if values.size else (lambda part: 0.0)
    return {
        "images": len(found["targets"]),
        "objects": there,
        "ap": mean(values),
        "ap50": mean(values[0:1]),
        "ap75": mean(values[5:6]),
        "precision": right / told if told else 0.0,
        "recall": right / there if there else 0.0,
        "f1": 2 * right / (told + there) if told + there else 0.0,
        "threshold": threshold,
        "by_class": by_class,
    }


def coco_precision(found: dict[str, Tensor], K: int) -> np.ndarray:
    """COCO's table of precisions (10 IoU thresholds, 101 recalls, K classes), all areas, at most 100 boxes an image."""
    try:
        from faster_coco_eval import COCO, COCOeval_faster  # pyright: ignore
    except ImportError:
        raise VitralError("average precision needs faster-coco-eval: pip install 'vitral[train]'.") from None
    truth, told = coco_documents(found, K)
    if not truth["annotations"]:
        return np.full((10, 101, K), -1.0)
    if not told:
        return np.zeros((10, 101, K))
    ground = COCO(truth)
    judge = COCOeval_faster(ground, ground.loadRes(told), iouType="bbox")
    judge.evaluate()
    judge.accumulate()
    return np.asarray(judge.eval["precision"])[:, :, :, 0, -1]


def coco_documents(found: dict[str, Tensor], K: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Truth and answers as COCO's json holds them."""
    images = [{"id": i, "width": int(SIDE), "height": int(SIDE)} for i in range(len(found["targets"]))]
    annotations, told = [], []
    for i, rows in enumerate(found["targets"].double()):
        for row in rows[rows[:, 0] >= 0]:
            x0, y0, x1, y1 = (SIDE * box_cxcywh_to_xyxy(row[1:])).tolist()
            box = {"bbox": [x0, y0, x1 - x0, y1 - y0], "area": (x1 - x0) * (y1 - y0), "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, "image_id": i, "category_id": int(row[0]), **box})
    corners = SIDE * box_cxcywh_to_xyxy(found["boxes"].double())
    for i in range(len(images)):
        for (x0, y0, x1, y1), score, k in zip(
            corners[i].tolist(), found["scores"][i].tolist(), found["labels"][i].tolist(), strict=True
        ):
            told.append({"image_id": i, "category_id": k, "bbox": [x0, y0, x1 - x0, y1 - y0], "score": score})
    categories = [{"id": k, "name": str(k)} for k in range(K)]
    return {"images": images, "annotations": annotations, "categories": categories, "info": {}}, told


def hits(found: dict[str, Tensor], threshold: float) -> tuple[int, int, int]:
    """Boxes above the threshold that are right (class, and IoU of at least a half), all above it, and objects."""
    scores, right, there = flagged(found)
    shown = scores >= threshold
    return int((right & shown).sum()), int(shown.sum()), there


def flagged(found: dict[str, Tensor]) -> tuple[Tensor, Tensor, int]:
    """Scores; whether each box, the surest first, takes an object that no surer one took; how many objects there are.

    Leaving the less sure ones out takes no object from the surer: the flags hold for every threshold.
    """
    right = torch.zeros_like(found["scores"], dtype=torch.bool)
    there = 0
    for i, rows in enumerate(found["targets"]):
        rows = rows[rows[:, 0] >= 0]
        there += len(rows)
        if not len(rows):
            continue
        iou = box_iou(box_cxcywh_to_xyxy(found["boxes"][i]), box_cxcywh_to_xyxy(rows[:, 1:].to(found["boxes"])))
        iou = iou * (found["labels"][i][:, None] == rows[None, :, 0])
        for t in found["scores"][i].argsort(descending=True).tolist():
            value, which = iou[t].max(0)
            if value >= 0.5:
                right[i, t] = True
                iou[:, which] = 0
    return found["scores"].flatten(), right.flatten(), there
