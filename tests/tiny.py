"""A tiny predictor for each task of images, with weights that hide nothing."""

from dataclasses import replace

import numpy as np

from helpers import redraw
from vitral.config import (
    DetectorConfig,
    MultilabelOptions,
    RegressOptions,
    ResNetConfig,
    SegmenterConfig,
    SwinConfig,
    ViTConfig,
)
from vitral.inference.predictor import Predictor
from vitral.models.cnn import ResNet
from vitral.models.detector import Detector
from vitral.models.segmenter import Segmenter
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer
from vitral.tasks.multilabel import Multilabel
from vitral.tasks.regress import Regress

LABELS = ["ant", "bee", "cow", "dog", "emu"]
VIT = ViTConfig(img_size=16, patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=3, reg_tokens=1)
BACKBONE = replace(VIT, num_classes=0)
SWIN = SwinConfig(
    img_size=16, patch_size=2, num_classes=5, embed_dim=8, depths=(2, 2), num_heads=(2, 4), window_size=3
)  # fmt: skip
DETECTOR = DetectorConfig(
    backbone=BACKBONE, num_classes=4, embed_dim=32, num_heads=4, mlp_width=40, num_queries=7, encoder_layers=1,
    decoder_layers=2,
)  # fmt: skip
MODELS = {
    "classify": lambda: VisionTransformer(VIT),
    "sinusoids": lambda: VisionTransformer(replace(VIT, positions="sincos2d", global_pool="mean", act="swiglu")),
    "multilabel": lambda: VisionTransformer(VIT),
    "regress": lambda: VisionTransformer(replace(VIT, num_classes=6, global_pool="map")),
    "embed": lambda: VisionTransformer(BACKBONE),
    "segment": lambda: Segmenter(SegmenterConfig(backbone=BACKBONE, num_classes=3, head="conv", width=16)),
    "segment mask": lambda: Segmenter(SegmenterConfig(backbone=BACKBONE, num_classes=3, head="mask")),
    "swin": lambda: SwinTransformer(SWIN),
    "cnn": lambda: ResNet(ResNetConfig(kind="resnet8", img_size=16, num_classes=5)),
    "detect": lambda: Detector(replace(DETECTOR, queries="anchors")),
    "detect learned": lambda: Detector(replace(DETECTOR, backbone=ResNetConfig(kind="resnet18", num_classes=0))),
}


def tiny_predictor(what: str, size: tuple[int, int] = (20, 24)) -> Predictor:
    """A model for another size than its positions were made for, and its task."""
    model = redraw(MODELS[what]())
    model.preprocess = replace(model.preprocess, img_size=size)
    model.labels = LABELS if what == "classify" else None
    predictor = Predictor(model, batch_size=2)
    if what == "multilabel":
        predictor.task = Multilabel(LABELS, MultilabelOptions(), [0.2, 0.4, 0.5, 0.6, 0.7])
    if what == "regress":
        predictor.task = Regress(["x", "y", "z"], [1.0, 2, 3], [4.0, 5, 6], RegressOptions(loss="gaussian"))
    if what == "classify":
        predictor.task.temperature = 1.7
    predictor.labels = predictor.task.labels
    return predictor


def pictures(n: int = 3) -> list[np.ndarray]:
    """Images of different sizes."""
    return [np.random.default_rng(i).integers(0, 256, (30 + 7 * i, 41, 3), np.uint8) for i in range(n)]
