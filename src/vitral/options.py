"""Options as types: the keywords of `vitral.train` and others, for type checkers and completion in editors.

Generated from config.py, which documents each option, by scripts/typed_options.py (`make format`); do not edit.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypedDict

from vitral import config


class AugmentationDict(TypedDict, total=False):
    """Fields of `vitral.config.Augmentation`."""

    crop_scale: float
    flip: float
    shift: float
    rotate: float
    zoom: float
    shear: float
    policy: config.AugmentPolicy
    operations: int
    magnitude: float
    color_jitter: float
    grey: float
    blur: float
    solarize: float
    erasing: float
    mixup: float
    cutmix: float
    repeats: int


class RegressOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.RegressOptions`."""

    loss: config.RegressLoss
    delta: float


class MultilabelOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.MultilabelOptions`."""

    loss: config.MultilabelLoss


class SegmentOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.SegmentOptions`."""

    head: config.SegmentHead
    layers: int
    width: int
    dice: float
    class_weights: config.ClassWeights


class DetectOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.DetectOptions`."""

    queries: Literal["anchors", "learned"]
    num_queries: int | None
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    denoise_groups: int
    class_cost: float
    box_cost: float
    giou_cost: float


class TextOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.TextOptions`."""

    tokenizer: config.TokenizerKind
    vocab_size: int
    max_length: int | None
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    mlp_ratio: float
    drop_rate: float


class ProbingDict(TypedDict, total=False):
    """Fields of `vitral.config.Probing`."""

    features: config.ProbeFeatures
    img_size: int | tuple[int, int] | None
    k: int
    knn_temperature: float
    lrs: Sequence[float]
    weight_decays: Sequence[float]
    few_shot: bool
    draws: int
    cache: bool


class IndexingDict(TypedDict, total=False):
    """Fields of `vitral.config.Indexing`."""

    nearest: config.NearestKind | None
    save_seconds: float


class LoopConfigDict(TypedDict, total=False):
    """Fields of `vitral.config.LoopConfig`."""

    model: str | PathLike[str]
    img_size: int | tuple[int, int] | None
    patch_size: int | tuple[int, int] | None
    epochs: int
    max_steps: int | None
    max_minutes: float | None
    batch_size: int
    accumulate: int
    optimizer: config.Optimizer
    lr: float
    muon_lr: float
    weight_decay: float
    layer_decay: float
    warmup_epochs: float
    min_lr: float
    clip_grad: float | None
    ema: float
    drop_path_rate: float
    checkpoint_blocks: bool
    precision: config.Precision
    device: config.Device
    val_fraction: float
    split_seed: int
    eval_every: int
    patience: int | None
    save_minutes: float
    save_steps: int | None
    log_steps: int
    max_bad_steps: int
    workers: int
    strict: bool
    seed: int
    augment: config.Augmentation | AugmentationDict


class LoRAOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.LoRAOptions`."""

    rank: int
    alpha: float
    parts: str


class TrainConfigDict(LoopConfigDict, total=False):
    """Fields of `vitral.config.TrainConfig`."""

    model: str | PathLike[str]
    crop: config.CropMode | None
    pool: config.Pooling | None
    pool_layers: int | None
    probe: config.ProbeUse
    class_weights: config.Balancing
    label_smoothing: float
    patch_drop: float
    freeze: str
    freeze_layers: int
    lora: config.LoRAOptions | LoRAOptionsDict
    label_fraction: float
    test_fraction: float | None
    select: config.Select
    regress: config.RegressOptions | RegressOptionsDict
    multilabel: config.MultilabelOptions | MultilabelOptionsDict
    segment: config.SegmentOptions | SegmentOptionsDict
    detect: config.DetectOptions | DetectOptionsDict
    text: config.TextOptions | TextOptionsDict


class CompareConfigDict(TypedDict, total=False):
    """Fields of `vitral.config.CompareConfig`."""

    fractions: Sequence[float]
    seeds: int
    patch_sizes: Sequence[int]
    max_macs: float | None
    images: int


class DINOOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.DINOOptions`."""

    global_scale: float
    local_scale: float
    global_size: int | tuple[int, int] | None
    local_crops: int
    local_size: int | tuple[int, int] | None
    prototypes: int
    hidden: int
    bottleneck: int
    momentum: float
    centre_momentum: float
    student_temperature: float
    teacher_temperature: float
    teacher_temperature_end: float
    temperature_warmup: float
    freeze_last_epochs: float
    ibot: float
    ibot_hidden: float
    koleo: float


class MAEOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.MAEOptions`."""

    mask_ratio: float
    decoder_dim: int
    decoder_depth: int
    decoder_heads: int
    norm_pixels: bool


class PretrainConfigDict(LoopConfigDict, total=False):
    """Fields of `vitral.config.PretrainConfig`."""

    method: config.MethodName
    ema: float
    val_fraction: float
    weight_decay_end: float | None
    head_warmup_epochs: float
    health_images: int
    neighbours: int
    picture_every: int
    dino: config.DINOOptions | DINOOptionsDict
    mae: config.MAEOptions | MAEOptionsDict


class QuantizeOptionsDict(TypedDict, total=False):
    """Fields of `vitral.config.QuantizeOptions`."""

    max_drop: float
    calibration_images: int


class CompareDict(TrainConfigDict, CompareConfigDict, total=False):
    """Options of `vitral.compare`: what is compared, and how every model is trained."""
