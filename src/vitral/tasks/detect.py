"""Detection: boxes with classes, by queries that are matched one to one with the objects (DETR).

B images, Q queries, K classes, M objects at most. Targets (B, M, 5) are class, cx, cy, w, h; class -1 is padding.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self, TypedDict

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from vitral.config import DetectOptions, DetectorConfig, Preprocess, TrainConfig
from vitral.data.noise import Noise
from vitral.data.sources.base import Data
from vitral.data.sources.coco import write_predictions
from vitral.data.sources.yolo import write_yolo
from vitral.data.targets import Boxes, Targets, box_cxcywh_to_xyxy, boxes_to_image, generalized_iou
from vitral.errors import DataError, VitralError
from vitral.models.backbone import Backbone
from vitral.models.detector import Detector, DetectorOutput
from vitral.schema import Count
from vitral.tasks.base import ENOUGH, Answer, Found, Frame, Task, Trivial, rest_pooling
from vitral.tasks.detection_metrics import detection_metrics, flagged
from vitral.tasks.drawing import boxed
from vitral.tasks.metrics import Table, best_threshold
from vitral.weights.rundir import Described

NO_OBJECT_WEIGHT = 0.1  # of queries without an object in DETR's softmax, for there are many
ALPHA, GAMMA = 0.25, 2.0  # of the focal loss (Lin et al., 2017)
DENOISE_WEIGHT = 1 / 3  # of mending spoilt boxes, beside matching
SHIFT, RELABEL = 0.4, 0.2  # how much denoising spoils boxes, in their sides, and how many labels
KEPT = 100
"""Boxes kept of an image for the metrics, as COCO's evaluation does."""


@dataclass(frozen=True, repr=False)
class Objects(Answer):
    """The objects of an image: labels, scores and boxes x0, y0, x1, y1 in its pixels, the surest first."""

    labels: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    boxes: list[list[float]] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    """Class numbers."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the image."""

    columns: ClassVar[tuple[str, ...]] = ("label", "score", "x0", "y0", "x1", "y1")
    formats: ClassVar[tuple[str, ...]] = ("", ".6f", ".2f", ".2f", ".2f", ".2f")

    def content(self) -> dict[str, Any]:
        """The image's size, and each object."""
        parts = zip(self.labels, self.scores, self.boxes, strict=True)
        objects = [{"label": k, "score": round(s, 6), "box": [round(v, 2) for v in box]} for k, s, box in parts]
        return {"size": list(self.size), "objects": objects}

    def text(self) -> str:
        """Labels with percentages."""
        return "  ".join(f"{k} {100 * s:.0f} %" for k, s in zip(self.labels, self.scores, strict=True)) or "no object"

    def records(self) -> list[list[Any]]:
        """One row per object."""
        return [[k, s, *box] for k, s, box in zip(self.labels, self.scores, self.boxes, strict=True)]

    def draw(self, image: Image.Image) -> Image.Image:
        """The image with its boxes."""
        texts = [f"{k} {100 * s:.0f}" for k, s in zip(self.labels, self.scores, strict=True)]
        return boxed(image, self.boxes, texts, self.numbers)


def _maps(backbone: Backbone) -> int:
    """Maps to read: the last of a ViT; of a pyramid also the one before, where small objects are not lost."""
    return 2 if len(set(backbone.config.map_strides)) > 1 else 1


class Measures(TypedDict):
    """What is read of the metrics."""

    images: Count
    ap: float
    ap50: float
    ap75: float
    by_class: Table


class Detect(Task):
    """Hungarian matching, then classes, L1 and generalised IoU on the matched; average precision as COCO's."""

    name = "detect"
    better = "ap"
    headline = "ap"
    headline_words = "average precision"
    what = "finds objects of {n} classes"
    answer = Objects
    measures = Measures
    compared: ClassVar[Mapping[str, str]] = {"ap": "AP {:.4f}"}
    missing_words = "classes that are never found"
    least_gain = 0.01  # a few lucky boxes are no detector
    spatial = True

    def __init__(self, labels: list[str], options: DetectOptions, num_queries: int = 1, threshold: float = 0.5) -> None:
        self.labels, self.options, self.num_queries, self.threshold = labels, options, num_queries, threshold
        self.notes = []

    @classmethod
    def from_data(cls, data: Data, config: TrainConfig) -> Self:
        """The classes of the boxes, and how many queries they need."""
        if data.boxes is None:
            raise DataError(f"{data.name} has no boxes; detection needs a COCO json or a YOLO folder.")
        missing = [name for name in ("scipy", "faster_coco_eval") if find_spec(name) is None]
        if missing:
            raise VitralError(f"to train a detector {missing[0]} is needed: pip install 'vitral[train]'.")
        most = max((len(data.boxes.rows[i]) for i in data.splits["train"].tolist()), default=0)
        task = cls(data.classes, config.detect, config.detect.num_queries or max(10, 2 * most))
        if config.detect.num_queries is None:
            task.notes = [f"at most {most} objects in a training image: {task.num_queries} queries"]
        return task

    @classmethod
    def from_run(cls, about: Described) -> Self:
        """Classes and threshold."""
        return cls(about.names, about.train.detect, threshold=about.threshold)

    def fits(self, about: Described) -> bool:
        """Whether the model is a detector of as many classes, with queries of the same kind."""
        c = about.model
        return isinstance(c, DetectorConfig) and c.num_classes == len(self.labels) and c.queries == self.options.queries

    @property
    def outputs(self) -> int:
        """The heads are the detector's."""
        return 0

    def targets(self, data: Data) -> Targets:
        """The boxes; classes are told by their names."""
        if data.boxes is None:
            raise DataError(f"{data.name} has no boxes to compare with.")
        unknown = [name for name in data.classes if name not in self.labels]
        if unknown:
            raise DataError(f"{data.name} has classes that the model does not know: {', '.join(unknown[:5])}.")
        if data.classes == self.labels:
            return data.boxes
        numbers = torch.tensor([self.labels.index(name) for name in data.classes], dtype=torch.float64)
        rows = [torch.cat([numbers[row[:, :1].long()], row[:, 1:]], 1) for row in data.boxes.rows]
        return Boxes(rows, data.boxes.most)

    def build(self, backbone: Backbone) -> nn.Module:
        """The backbone with a decoder of queries."""
        o = self.options
        config = DetectorConfig(
            backbone=backbone.config,
            maps=_maps(backbone),
            num_classes=len(self.labels),
            num_queries=self.num_queries,
            queries=o.queries,
            embed_dim=o.width,
            num_heads=o.heads,
            mlp_width=4 * o.width,
            act="gelu",
            block="pre",
            drop_rate=0.0,
            pos_temperature=20.0,
            encoder_layers=o.encoder_layers,
            decoder_layers=o.decoder_layers,
            denoise_groups=max(o.denoise_groups, 1),
        )
        if isinstance(backbone, Backbone):
            rest_pooling(backbone)
        return Detector(config, backbone)

    def preprocess(self, p: Preprocess) -> Preprocess:
        """The whole image, its aspect kept."""
        return replace(p, crop_mode="pad")

    # ---- training ----

    def forward(self, model: nn.Module, inputs: Tensor, targets: Tensor, noise: Noise) -> DetectorOutput:
        """With spoilt copies of the true boxes beside the queries, for the decoder to mend."""
        if self.options.queries != "anchors" or not self.options.denoise_groups or not targets.shape[1]:
            return model(inputs)
        return model(inputs, extra=spoil(targets, noise, self.options.denoise_groups, len(self.labels)))

    def loss(self, outputs: DetectorOutput, targets: Tensor, partners: Tensor, own: Tensor) -> Tensor:
        """The losses of every layer of the decoder, and of the mended boxes."""
        layers = [(outputs.logits, outputs.boxes), *outputs.aux]
        total = sum((self._layer_loss(logits, boxes, targets) for logits, boxes in layers), outputs.boxes.sum() * 0)
        if outputs.denoise:
            again = targets.repeat(1, self.options.denoise_groups, 1)
            there = again[:, :, 0] >= 0
            for logits, boxes in outputs.denoise:
                total = total + DENOISE_WEIGHT * self._pair_loss(logits, boxes, again, there)
        return total / len(layers)

    def _layer_loss(self, logits: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
        """Match, lay the targets beside the queries they fell to, and compare."""
        with torch.no_grad():
            pairs = match(self._cost(logits, boxes, targets), targets[:, :, 0] >= 0)
        laid = torch.full((*boxes.shape[:2], 5), -1.0, device=boxes.device, dtype=boxes.dtype)
        for b, (queries, objects) in enumerate(pairs):
            laid[b, queries] = targets[b, objects].to(laid)
        return self._pair_loss(logits, boxes, laid, torch.ones_like(laid[:, :, 0], dtype=torch.bool))

    def _cost(self, logits: Tensor, boxes: Tensor, targets: Tensor) -> Tensor:
        """What it would cost to give each query each object, (B, Q, M)."""
        o = self.options
        classes = targets[:, :, 0].long().clamp(min=0)
        if o.queries == "learned":
            each = -logits.softmax(-1)
        else:
            p = logits.sigmoid()
            present = ALPHA * (1 - p) ** GAMMA * -F.logsigmoid(logits)
            absent = (1 - ALPHA) * p**GAMMA * -F.logsigmoid(-logits)
            each = present - absent
        told = each.gather(2, classes[:, None].expand(-1, logits.shape[1], -1))
        distance = torch.cdist(boxes.float(), targets[:, :, 1:].float(), p=1)
        corners, truth = box_cxcywh_to_xyxy(boxes), box_cxcywh_to_xyxy(targets[:, :, 1:].to(boxes))
        giou = generalized_iou(corners[:, :, None], truth[:, None])
        return o.class_cost * told + o.box_cost * distance - o.giou_cost * giou

    def _pair_loss(self, logits: Tensor, boxes: Tensor, laid: Tensor, counts: Tensor) -> Tensor:
        """Loss of queries (B, Q) whose targets (B, Q, 5) lie beside them; class -1: no object; not all need count."""
        o, K = self.options, len(self.labels)
        has = laid[:, :, 0] >= 0
        number = has.sum().clamp(min=1)
        if o.queries == "learned":
            classes = torch.where(has, laid[:, :, 0].long(), K)
            weights = torch.cat([logits.new_ones(K), logits.new_tensor([NO_OBJECT_WEIGHT])])
            class_loss = F.cross_entropy(logits[counts], classes[counts], weight=weights)
        else:
            truth = F.one_hot(laid[:, :, 0].long().clamp(min=0), K).to(logits) * has[:, :, None]
            class_loss = focal_loss(logits[counts], truth[counts]).sum() / number
        ours, theirs = boxes[has], laid[has][:, 1:].to(boxes)
        distance = (ours - theirs).abs().sum() / number
        giou = (1 - generalized_iou(box_cxcywh_to_xyxy(ours), box_cxcywh_to_xyxy(theirs))).sum() / number
        return o.class_cost * class_loss + o.box_cost * distance + o.giou_cost * giou

    def sums(self, outputs: DetectorOutput, targets: Tensor) -> dict[str, float]:
        """Nothing but the count: average precision is not a sum over images."""
        return {"count": float(len(targets))}

    # ---- answers ----

    def ranked(self, outputs: DetectorOutput) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (B, T), class numbers (B, T) and boxes (B, T, 4), the surest first."""
        logits = outputs.logits.float()
        p = logits.softmax(-1)[:, :, :-1] if self.options.queries == "learned" else logits.sigmoid()
        T = min(KEPT, p[0].numel())
        scores, order = p.flatten(1).topk(T)
        boxes = outputs.boxes.float().gather(1, (order // p.shape[2])[:, :, None].expand(-1, -1, 4))
        return scores, order % p.shape[2], boxes

    def found(self, outputs: DetectorOutput, targets: Tensor) -> Found:
        """The surest boxes of each image."""
        scores, numbers, boxes = self.ranked(outputs)
        return {"scores": scores, "labels": numbers, "boxes": boxes, "targets": targets}

    def calibrate(self, found: Found) -> None:
        """Choose the score from which on a box is shown, by the best F1."""
        self.threshold = best_threshold(*flagged(found))

    def metrics(self, found: Found) -> dict[str, Any]:
        """COCO's average precisions, in all and by class; precision and recall at the threshold."""
        return detection_metrics(found, self.labels, self.threshold)

    def settings(self) -> dict[str, Any]:
        """The threshold."""
        return {"threshold": self.threshold}

    def summary(self, metrics: dict[str, Any]) -> str:
        """Average precision."""
        return f"AP {metrics['ap']:.4f}, AP50 {metrics['ap50']:.4f}, AP75 {metrics['ap75']:.4f}"

    def baseline(self, data: Data) -> dict[str, Trivial]:
        """An answer without a box for every image."""
        return {"no box": lambda found: found | {name: found[name][:, :0] for name in ("scores", "labels", "boxes")}}

    def never_predicted(self, metrics: dict[str, Any]) -> list[str]:
        """Classes of which no object is found at an IoU of 0.5."""
        return [name for name, row in metrics["by_class"].items() if row["objects"] >= ENOUGH and not row["ap50"]]

    def write(self, folder: Path, answers: list[Answer]) -> None:
        """A COCO json; and a YOLO label file for each image, if each has a name of its own."""
        found = [answer for answer in answers if isinstance(answer, Objects) and not answer.error]
        write_predictions(folder / "predictions.json", found, self.labels)
        if len({Path(answer.name).stem for answer in found}) == len(found):
            write_yolo(folder / "labels", found)

    def decode(self, outputs: DetectorOutput, frames: Sequence[Frame], top_k: int) -> Iterator[Objects]:
        """Objects above the threshold, in pixels of each image."""
        scores, numbers, boxes = self.ranked(outputs)
        for i, frame in enumerate(frames):
            H, W = frame.size
            shown = (scores[i] >= self.threshold).nonzero()[:, 0]
            placed = boxes_to_image(boxes[i, shown], frame.view) * boxes.new_tensor([W, H, W, H])
            ids = numbers[i, shown].tolist()
            yield Objects(
                frame.name,
                labels=[self.labels[k] for k in ids],
                scores=scores[i, shown].tolist(),
                boxes=placed.tolist(),
                numbers=ids,
                size=frame.size,
            )


def match(cost: Tensor, there: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The cheapest one-to-one pairs of queries and objects of each image: (B, Q, M), (B, M) -> indices of both."""
    from scipy.optimize import linear_sum_assignment

    pairs = []
    for c, t in zip(cost.cpu(), there.cpu(), strict=True):
        objects = t.nonzero()[:, 0]
        finite = torch.nan_to_num(c[:, objects], nan=1e6, posinf=1e6, neginf=-1e6)
        rows, columns = (torch.as_tensor(side) for side in linear_sum_assignment(finite.numpy()))
        pairs.append((rows, objects[columns]))
    return pairs


def focal_loss(logits: Tensor, truth: Tensor) -> Tensor:
    """-a (1 - p_t)^g log p_t, elementwise, p_t the probability of what is true."""
    p = logits.sigmoid()
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    p_t = p * truth + (1 - p) * (1 - truth)
    return (ALPHA * truth + (1 - ALPHA) * (1 - truth)) * (1 - p_t) ** GAMMA * entropy


def spoil(targets: Tensor, noise: Noise, groups: int, K: int) -> tuple[Tensor, Tensor]:
    """Spoilt copies of the objects: boxes (B, groups * M, 4), and labels (B, groups * M), -1 for padding."""
    B, M, _ = targets.shape
    n = groups * M
    boxes, labels = targets[:, :, 1:].repeat(1, groups, 1), targets[:, :, 0].long().repeat(1, groups)
    u = noise.uniform("dn box", 4 * n).view(B, n, 4).to(boxes) * 2 - 1
    sides = boxes[:, :, 2:]
    centre = boxes[:, :, :2] + u[:, :, :2] * SHIFT * sides / 2
    sides = sides * (1 + u[:, :, 2:] * SHIFT)
    other = noise.choice("dn label", K, n).to(labels)
    wrong = noise.uniform("dn flip", n).to(boxes) < RELABEL
    labels = torch.where((labels >= 0) & wrong, other, labels)
    return torch.cat([centre, sides], 2).clamp(1e-4, 1 - 1e-4), labels
