"""Every option of a model and of its preprocessing, with its one default.

Frozen dataclasses that check themselves when made and travel as plain dictionaries. Knows neither torch nor files.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from vitral.errors import ConfigError, UnknownNameError, VitralError, unknown_name
from vitral.schema import conform, shortened

PositionKind = Literal["learned", "sincos1d", "sincos2d", "none"]
PositionResizeMode = Literal["bilinear", "bicubic", "bilinear_corners", "bicubic_corners"]
StemKind = Literal["linear", "conv", "conv_deep", "shifted", "resnet", "custom"]
AttentionKind = Literal["plain", "local"]
SHIFTED_VIEWS = 5
"""Of the image, in a shifted patch: its own, and one towards each corner."""
BlockKind = Literal["pre", "post"]
Activation = Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "swiglu"]
Pooling = Literal["cls", "mean", "max", "map", "cls_mean", "cls_dist"]
HeadKind = Literal["linear", "mlp", "mlp_tanh", "distilled"]
Interpolation = Literal["bilinear", "bicubic"]
Balancing = Literal["auto", "none", "root", "balanced"]
ProbeUse = Literal["none", "first", "only"]
CropMode = Literal["center", "squash", "squash_center", "pad"]
ResNetKind = Literal["resnet8", "resnet18", "resnet34", "resnet50", "resnet101"]
NearestKind = Literal["exact", "hnsw", "ivf"]
QueryKind = Literal["learned", "anchors"]
AugmentPolicy = Literal["none", "rand", "trivial"]
Optimizer = Literal["adamw", "muon"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda", "mps"]
Select = Literal["last", "best"]
TaskName = Literal["classify", "multilabel", "regress", "segment", "detect", "caption", "translate", "complete", "tag"]
RegressLoss = Literal["squared", "l1", "huber", "gaussian"]
MultilabelLoss = Literal["bce", "asymmetric"]
SegmentHead = Literal["linear", "conv", "mask"]
ClassWeights = Literal["none", "balanced"]
TokenizerKind = Literal["characters", "bpe"]
MethodName = Literal["dino", "mae"]
Preset = Literal["linear", "lora", "full", "probe"]
ProbeKind = Literal["knn", "linear"]
ProbeFeatures = Literal["pooled", "cls", "mean", "cls_mean"]
EngineName = Literal["eager", "packed", "compile", "onnxruntime", "openvino"]
EngineChoice = Literal["auto", "eager", "packed", "compile", "onnxruntime", "openvino"]
ExportFormat = Literal["onnx", "openvino", "pt2"]

HUB = "hf-hub:"
"""Before the name of a model or data set of the Hugging Face hub."""
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Limits of a model: far above every published one, and low enough that building it cannot fill the memory.
MOST_BLOCKS, MOST_STAGES, MOST_WIDTH, MOST_RATIO = 1024, 8, 2**16, 1024
MOST_CLASSES, MOST_TOKENS = 2**20, 2**17
MOST_PIXELS = 178_000_000
"""Largest image, width times height: about what Pillow opens before it reports a decompression bomb."""

# What timm calls things, for the error that a timm user would otherwise puzzle over.
_TIMM_WORDS = {"token": "cls", "avg": "mean", "learn": "learned"}
_TIMM_OPTIONS = {
    "pretrained": "create_model gives fresh weights",
    "no_embed_class": "timm's no_embed_class=True is pos_prefix=False here",
    "pos_embed": "timm's pos_embed is positions here",
    "fc_norm": "timm's fc_norm is norm_after_pool here",
    "act_layer": "timm's act_layer is act here, a word such as 'gelu'",
    "dynamic_img_size": "it is not needed: every model takes any size that the patch divides",
}


def pair(value: int | Sequence[int], name: str = "size") -> tuple[int, int]:
    """Return `(height, width)` of a size given as one number or two."""
    both: Any = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value, value)
    if len(both) != 2 or any(not _is_whole(v) or v < 1 for v in both):
        raise ConfigError(f"{name} must be a positive whole number or two of them (height, width), got {value!r}.")
    return int(both[0]), int(both[1])


def check_divides(side: int, patch: int, name: str, error: type[VitralError] = ConfigError, remedy: str = "") -> None:
    """Raise unless `patch` divides `side`, naming the two nearest sides that it does divide."""
    if side % patch:
        low = side // patch * patch
        near = f"the nearest are {low} and {low + patch}" if low else f"the nearest is {patch}"
        raise error(f"{name} must be a multiple of patch_size ({patch}), got {side}; {near}{remedy}.")


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class Options:
    """What every group of options can do: check its choices, and go to and from a plain dictionary."""

    def to_dict(self) -> dict[str, Any]:
        """Return the options as a dictionary of plain values that JSON can hold."""
        return asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """Build from a dictionary; an unknown key is an error that names the nearest valid one."""
        types = get_type_hints(cls)
        if not isinstance(options, Mapping):
            raise ConfigError(f"{cls.__name__} must be an object of options, got {shortened(options)}.")
        for key in options:
            if key not in types:
                if key in _TIMM_OPTIONS:
                    raise UnknownNameError(f"unknown option {key!r}; {_TIMM_OPTIONS[key]}.")
                raise unknown_name("option", key, types)
        for field in fields(cls):  # type: ignore[arg-type]
            if field.default is MISSING and field.name not in options:
                raise ConfigError(f"{field.name} is missing.")
        return cls(**{key: _plain_to_option(types[key], value) for key, value in options.items()})

    def _check_choices(self) -> None:
        """Raise unless every field has a value of its type, every word being one of its choices."""
        for name, kind in get_type_hints(type(self)).items():
            value: Any = getattr(self, name)
            if kind is bool and not isinstance(value, bool):
                raise ConfigError(f"{name} must be True or False, got {value!r}.")
            groups = _options_classes(kind)
            if groups and type(value) not in groups and not (value is None and type(None) in get_args(kind)):
                raise ConfigError(f"{name} must be a {' or '.join(g.__name__ for g in groups)}(...), got {value!r}.")
            words = _words(kind)
            if words and value not in words:
                ours = _TIMM_WORDS.get(str(value))
                hint = f"; timm's {value!r} is {ours!r} here" if ours else ""
                told = ", ".join(word for word in words if word is not None)
                raise ConfigError(f"{name} must be one of {told}, got {value!r}{hint}.")
            if kind not in (int, float, int | None, float | None):  # those are checked with their ranges
                conform(value, kind, name)

    def _check_numbers(
        self, names: Sequence[str], low: float, high: float = math.inf, whole: bool = False, most: int = 2**63
    ) -> None:
        """Raise unless each named field is a number from `low` to below `high`, integers being at most `most`."""
        for name in names:
            value: Any = getattr(self, name)
            right = _is_whole(value) if whole else _is_number(value)
            if not right or not low <= value < high:
                kind = "a whole number" if whole else "a number"
                limit = f"of at least {low:g}" if high == math.inf else f"from {low:g} to below {high:g}"
                raise ConfigError(f"{name} must be {kind} {limit}, got {value!r}.")
            if whole and value > most:
                raise ConfigError(f"{name} must be at most {most:,}, got {shortened(value)}.")
            object.__setattr__(self, name, int(value) if whole else conform(value, float, name))

    def _set_pair(self, name: str) -> None:
        """Replace a size given as one number by `(height, width)`."""
        object.__setattr__(self, name, pair(getattr(self, name), name))


def _words(kind: Any) -> tuple[str | None, ...]:
    """The values that a field of type `Literal[...]`, or that `| None`, may have; none where it is something else."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    parts = get_args(kind)
    literal = next((part for part in parts if get_origin(part) is Literal), None)
    return (*get_args(literal), None) if literal and set(parts) == {literal, type(None)} else ()


def _options_classes(kind: Any) -> list[type[Options]]:
    """The groups of options that a field of type `X`, `X | Y` or `X | None` may hold."""
    kinds = (kind, *get_args(kind))
    return [each for each in kinds if isinstance(each, type) and issubclass(each, Options)]


def _plain_to_option(kind: Any, value: Any) -> Any:
    """Turn what JSON gives back (lists, dictionaries) into what the field holds: the group that knows every key."""
    groups = _options_classes(kind)
    if isinstance(value, Mapping) and groups:
        knows = (group for group in groups if set(value) <= set(get_type_hints(group)))
        return next(knows, groups[0]).from_dict(value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, kw_only=True)
class PositionResize(Options):
    """How a learned position table reaches another grid. Reference implementations differ, so all of it is explicit."""

    mode: PositionResizeMode = "bicubic"
    """Interpolation; `_corners` keeps the corner positions fixed (align_corners)."""
    antialias: bool = True
    """Low-pass filter when the grid shrinks."""
    offset: float = 0.0
    """Added to the new side before the scale is computed: 0.1 in DINO and in DINOv2 without registers."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["offset"], 0, 1)
        if self.mode.endswith("_corners") and (self.antialias or self.offset):
            raise ConfigError(
                f"position resize mode {self.mode} takes neither antialias nor offset, "
                f"got antialias={self.antialias}, offset={self.offset}; use {self.mode.removesuffix('_corners')}."
            )

    def __str__(self) -> str:
        parts = [self.mode, "antialiased" * self.antialias, f"offset {self.offset:g}" * bool(self.offset)]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True, kw_only=True)
class Preprocess(Options):
    """What is done to an image before the model sees it; saved with the weights, for a wrong mean costs accuracy."""

    img_size: int | tuple[int, int] = 224
    """Height and width the model is fed."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Subtracted per channel, from pixels in 0..1."""
    std: tuple[float, ...] = IMAGENET_STD
    """Divided by, per channel."""
    interpolation: Interpolation = "bicubic"
    """Filter of the resize."""
    crop_mode: CropMode = "center"
    """`center` keeps the aspect ratio and cuts the middle out, `squash` resizes both sides to the target,
    `squash_center` resizes both sides to more than that and cuts the middle out, and `pad` keeps the aspect ratio and
    the whole image, with the mean colour at its right or below."""
    crop_pct: float = 0.9
    """Unless `squash` or `pad`: the side of the crop as a share of the resized short side."""

    def __post_init__(self) -> None:
        self._set_pair("img_size")
        self._check_choices()
        if math.prod(pair(self.img_size)) > MOST_PIXELS:
            raise ConfigError(f"img_size must be at most {MOST_PIXELS:,} pixels in all, got {self.img_size!r}.")
        self._check_numbers(["crop_pct"], 0)
        if not 0 < self.crop_pct <= 1:
            raise ConfigError(f"crop_pct must be above 0 and at most 1, got {self.crop_pct!r}.")
        if self.crop_pct < 0.01:
            raise ConfigError(f"crop_pct must be at least 0.01, got {self.crop_pct!r}; usual values are 0.8 to 1.")
        if len(self.mean) != len(self.std) or not self.mean:
            raise ConfigError(
                f"mean and std need one number per channel each, got {len(self.mean)} and {len(self.std)}."
            )
        if not all(_is_number(value) and math.isfinite(value) for value in (*self.mean, *self.std)):
            raise ConfigError(f"mean and std must be numbers, got {self.mean!r} and {self.std!r}.")
        if any(s <= 0 for s in self.std):
            raise ConfigError(f"std must be above 0 in every channel, got {self.std!r}.")

    def for_channels(self, in_chans: int) -> "Preprocess":
        """Return the same preprocessing for another number of channels: averaged for one, repeated for more."""
        if in_chans == len(self.mean):
            return self
        options = self.to_dict()
        for name in ("mean", "std"):
            values = options[name]
            options[name] = (
                (round(sum(values) / len(values), 6),)
                if in_chans == 1
                else tuple(values[i % len(values)] for i in range(in_chans))
            )
        return Preprocess(**options)


@dataclass(frozen=True, kw_only=True)
class ViTConfig(Options):
    """A Vision Transformer, complete: `VisionTransformer(config)` needs nothing else. Words are timm's."""

    img_size: int | tuple[int, int] = 224
    """Height and width the position table is made for: a default, not a limit."""
    patch_size: int | tuple[int, int] = 16
    """P, or P_h and P_w."""
    in_chans: int = 3
    """C, channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0 leaves the head out."""
    embed_dim: int = 768
    """D, width of every token."""
    depth: int = 12
    """L, number of blocks."""
    num_heads: int = 12
    """h, attention heads; must divide D."""
    mlp_ratio: float = 4.0
    """Width of the MLP's first layer as a multiple of D (a SwiGLU splits that layer in two halves)."""
    stem: StemKind = "linear"
    """Pixels to tokens: `linear` projection of each patch; for small images a `conv` stem, or a `conv_deep` one, or
    `shifted` patches, each with the same patch of the image moved to four sides (Lee et al., 2021); the `resnet` of
    Google's hybrids; or a `custom` one, handed to `VisionTransformer` beside the config."""
    stem_depths: tuple[int, ...] = ()
    """Blocks in each stage of a `resnet` stem; none for its root alone, whose map is a quarter of the image's side."""
    patch_bias: bool = True
    """Bias in the patch projection."""
    class_token: bool = True
    """Prepend a learned [CLS] token."""
    reg_tokens: int = 0
    """Register tokens, which get no position."""
    positions: PositionKind = "learned"
    """Where a patch is: a learned table, a fixed sinusoid over the sequence or over rows and columns, or nothing."""
    pos_prefix: bool = True
    """Give [CLS] a row of its own in a learned table or 1D sinusoid; a 2D sinusoid has no place for it either way."""
    pos_registers: bool = False
    """Give the registers rows in a learned table too (DeiT's distillation token is such a register)."""
    pos_resize: PositionResize = PositionResize()
    """How a learned table reaches another grid."""
    pre_norm: bool = False
    """LayerNorm on the tokens before the first block (CLIP)."""
    block: BlockKind = "pre"
    """LayerNorm before each sub-layer (ViT) or after each residual sum (the first Transformer)."""
    attention: AttentionKind = "plain"
    """`local` learns how sharp each head is, and no token looks at itself: for few images (Lee et al., 2021)."""
    qkv_bias: bool = True
    """Bias in the query, key and value projections."""
    act: Activation = "gelu"
    """Activation of the MLP."""
    init_values: float | None = None
    """LayerScale's starting value; None for no LayerScale."""
    norm_eps: float = 1e-6
    """Epsilon of every LayerNorm."""
    global_pool: Pooling = "cls"
    """What the head reads: [CLS], the mean or max of the patches, attention pooling, [CLS] and mean together, or [CLS]
    and the first register (DeiT's distillation token) together."""
    pool_layers: int = 1
    """Last blocks whose tokens are pooled, side by side: more than one gives a linear head more to choose from."""
    norm_after_pool: bool = False
    """Final LayerNorm on the pooled vector instead of on every token."""
    head: HeadKind = "linear"
    """One linear layer, two with GELU or tanh between them, or the mean of two layers on the two halves (DeiT)."""
    drop_rate: float = 0.0
    """Dropout before the head."""
    pos_drop_rate: float = 0.0
    """Dropout on the tokens after the positions are added."""
    patch_drop_rate: float = 0.0
    """Share of the patches that each image is trained without, chosen at random."""
    proj_drop_rate: float = 0.0
    """Dropout after the attention projection and in the MLP."""
    attn_drop_rate: float = 0.0
    """Dropout on the attention weights."""
    drop_path_rate: float = 0.0
    """Stochastic depth of the last block; earlier blocks rise to it linearly from 0."""

    def __post_init__(self) -> None:
        self._set_pair("img_size")
        self._set_pair("patch_size")
        self._check_choices()
        self._check_numbers(["in_chans", "embed_dim", "num_heads"], 1, whole=True, most=MOST_WIDTH)
        self._check_numbers(["depth", "pool_layers"], 1, whole=True, most=MOST_BLOCKS)
        self._check_numbers(["num_classes", "reg_tokens"], 0, whole=True, most=MOST_CLASSES)
        self._check_numbers([f.name for f in fields(self) if f.name.endswith("_rate")], 0, 1)
        self._check_numbers(["mlp_ratio"], 0, MOST_RATIO)
        self._check_numbers(["norm_eps"] + ["init_values"] * (self.init_values is not None), 0)
        self._check_parts()

    def _check_parts(self) -> None:
        """Raise for combinations of options that cannot be built."""
        D, h = self.embed_dim, self.num_heads
        if D % h:
            divisors = [n for n in range(1, D + 1) if D % n == 0]
            near = [max(n for n in divisors if n < h), *[n for n in divisors if n > h][:1]]
            raise ConfigError(
                f"num_heads must divide embed_dim ({D}), got {h}; the nearest that do: {' and '.join(map(str, near))}."
            )
        (height, width), (P_h, P_w) = self.image, self.patch
        check_divides(height, P_h, "img_size")
        check_divides(width, P_w, "img_size")
        if self.global_pool in ("cls", "cls_mean", "cls_dist") and not self.class_token:
            raise ConfigError(
                f"global_pool {self.global_pool} reads the [CLS] token, but class_token is off; "
                f"use mean, max or map, or turn class_token on."
            )
        if self.global_pool == "cls_dist" and not self.reg_tokens:
            raise ConfigError("global_pool cls_dist reads the first register, but reg_tokens is 0; set it to 1.")
        if self.pool_layers > self.depth:
            raise ConfigError(f"pool_layers must be at most the depth ({self.depth}), got {self.pool_layers}.")
        if self.pool_layers > 1 and (self.global_pool == "map" or self.norm_after_pool or self.head == "distilled"):
            raise ConfigError(
                f"pool_layers {self.pool_layers} needs pooling without weights after the norm: it goes with neither "
                f"global_pool map, norm_after_pool nor a distilled head; set pool_layers to 1."
            )
        if (self.head == "distilled") and self.pooled_dim == self.embed_dim:
            raise ConfigError(f"a distilled head reads two tokens, but global_pool {self.global_pool} gives one.")
        if self.pos_registers and not (self.reg_tokens and self.pos_prefix):
            raise ConfigError("pos_registers needs reg_tokens above 0 and pos_prefix on.")
        divisor = {"sincos1d": 2, "sincos2d": 4}.get(self.positions, 1)
        if D % divisor:
            raise ConfigError(f"positions {self.positions} need embed_dim to be a multiple of {divisor}, got {D}.")
        if self.act == "swiglu" and self.mlp_width % 2:
            raise ConfigError(
                f"swiglu halves the MLP's first layer, so embed_dim * mlp_ratio must be even, got {self.mlp_width}."
            )
        if self.mlp_width < 1:
            raise ConfigError(f"embed_dim * mlp_ratio must be at least 1, got {D} * {self.mlp_ratio:g}.")
        if self.stem in ("conv", "conv_deep") and (P_h & (P_h - 1) or P_w & (P_w - 1)):
            raise ConfigError(
                f"a conv stem halves the image step by step, so patch_size must be a power of 2, got {P_h}x{P_w}."
            )
        if self.stem == "shifted" and min(P_h, P_w) < 2:
            raise ConfigError(
                f"shifted patches move by half a patch, so patch_size must be 2 or more, got {P_h}x{P_w}."
            )
        self._check_resnet_stem()

    def _check_resnet_stem(self) -> None:
        """Raise unless the stages are such as the `resnet` stem can have, and the patch is made of cells of its map."""
        depths: Any = self.stem_depths
        right = isinstance(depths, tuple) and len(depths) <= 4
        if not right or not all(_is_whole(n) and 0 < n <= MOST_BLOCKS for n in depths):
            raise ConfigError(f"stem_depths must be up to four whole numbers above 0, got {depths!r}.")
        if depths and self.stem != "resnet":
            raise ConfigError(f"stem_depths are for the resnet stem, got {depths!r} with stem {self.stem}.")
        if self.stem == "resnet" and any(side % self.stem_stride for side in self.patch):
            raise ConfigError(
                f"a token is one or more cells of the CNN's map, so patch_size must be a multiple of its stride "
                f"({self.stem_stride}), got {self.patch[0]}x{self.patch[1]}."
            )

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the default image."""
        return pair(self.img_size)

    @property
    def patch(self) -> tuple[int, int]:
        """P_h and P_w."""
        return pair(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches of the default image."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def prefix_tokens(self) -> int:
        """Tokens that stand before the patches: [CLS] and the registers."""
        return int(self.class_token) + self.reg_tokens

    @property
    def pos_rows(self) -> int:
        """Rows of the position table that belong to prefix tokens."""
        return int(self.class_token and self.pos_prefix) + (self.reg_tokens if self.pos_registers else 0)

    @property
    def mlp_width(self) -> int:
        """Outputs of the MLP's first layer."""
        return int(self.embed_dim * self.mlp_ratio)

    @property
    def mlp_hidden(self) -> int:
        """Inputs of the MLP's second layer."""
        return self.mlp_width // 2 if self.act == "swiglu" else self.mlp_width

    @property
    def pooled_dim(self) -> int:
        """Width of what the head receives."""
        return self.pool_layers * self.embed_dim * (2 if self.global_pool in ("cls_mean", "cls_dist") else 1)

    @property
    def stem_stride(self) -> int:
        """Pixels from one cell of the `resnet` stem's map to the next: 4 for the root, doubled by stages after one."""
        return 4 << max(len(self.stem_depths) - 1, 0)

    @property
    def stem_cells(self) -> tuple[int, int]:
        """Rows and columns of cells of the `resnet` stem's map in one patch."""
        return self.patch[0] // self.stem_stride, self.patch[1] // self.stem_stride

    @property
    def stem_width(self) -> int:
        """F, channels of the `resnet` stem's map."""
        return 128 << len(self.stem_depths) if self.stem_depths else 64

    @property
    def stem_layers(self) -> list[tuple[int, int, tuple[int, int]]]:
        """The conv stem's 3x3 convolutions as (channels in, channels out, stride), the first to the last.

        Each halves the image until the patch grid is reached; there are at least two, so that a token sees its
        neighbours, and the width doubles towards D. The deep stem is twice as wide until it is as wide as D, and
        follows every layer but the last by one more that keeps the size.
        """
        halvings = [int(math.log2(side)) for side in self.patch]
        count, D, deep = max(2, *halvings), self.embed_dim, self.stem == "conv_deep"
        widths = [max(8, D >> max(count - 1 - i - deep, 0)) for i in range(count)]
        strides = [(1 + (i >= count - halvings[0]), 1 + (i >= count - halvings[1])) for i in range(count)]
        layers = list(zip([self.in_chans, *widths], widths, strides, strict=False))
        again = [[(width, width, (1, 1))] * deep for width in widths[:-1]] + [[]]
        return [layer for pair in zip(layers, again, strict=True) for layer in (pair[0], *pair[1])]

    @property
    def map_dims(self) -> tuple[int, ...]:
        """Channels of each map of `intermediate`: D for every block."""
        return (self.embed_dim,) * self.depth

    @property
    def map_strides(self) -> tuple[tuple[int, int], ...]:
        """Pixels down and across in a cell of each map."""
        return (self.patch,) * self.depth


@dataclass(frozen=True, kw_only=True)
class SwinConfig(Options):
    """A Swin Transformer (Liu et al., 2021): attention within windows, stages that halve the map. Words are timm's."""

    img_size: int | tuple[int, int] = 224
    """Height and width of the images: a default, not a limit."""
    patch_size: int | tuple[int, int] = 4
    """P, or P_h and P_w."""
    in_chans: int = 3
    """Channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0 leaves the head out."""
    embed_dim: int = 96
    """C, width of a token in the first stage; it doubles from stage to stage."""
    depths: tuple[int, ...] = (2, 2, 6, 2)
    """Blocks of each stage."""
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    """h of each stage; must divide its width."""
    window_size: int | tuple[int, ...] = 7
    """M, side of a window in tokens: one number, or one for each stage. On a smaller map the window is the map."""
    mlp_ratio: float = 4.0
    """Width of the MLP's first layer as a multiple of the stage's width."""
    qkv_bias: bool = True
    """Bias in the query, key and value projections."""
    act: Literal["gelu", "gelu_tanh", "quick_gelu", "relu"] = "gelu"
    """Activation of the MLP."""
    norm_eps: float = 1e-5
    """Epsilon of every LayerNorm."""
    drop_rate: float = 0.0
    """Dropout before the head."""
    proj_drop_rate: float = 0.0
    """Dropout after the attention projection and in the MLP."""
    attn_drop_rate: float = 0.0
    """Dropout on the attention weights."""
    drop_path_rate: float = 0.0
    """Stochastic depth of the last block; earlier blocks rise to it linearly from 0."""

    def __post_init__(self) -> None:
        self._set_pair("img_size")
        self._set_pair("patch_size")
        self._check_choices()
        self._check_numbers(["in_chans", "embed_dim"], 1, whole=True, most=MOST_WIDTH)
        self._check_numbers(["num_classes"], 0, whole=True, most=MOST_CLASSES)
        self._check_numbers(["drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"], 0, 1)
        self._check_numbers(["mlp_ratio"], 0, MOST_RATIO)
        self._check_numbers(["norm_eps"], 0)
        for name in ("depths", "num_heads", "window_size"):
            self._set_stages(name)
        for stage, (C, h) in enumerate(zip(self.dims, self.num_heads, strict=True)):
            if C % h:
                raise ConfigError(f"num_heads must divide the width of each stage, got {h} for {C} in stage {stage}.")
        if int(self.embed_dim * self.mlp_ratio) < 1:
            raise ConfigError(f"embed_dim * mlp_ratio must be at least 1, got {self.embed_dim} * {self.mlp_ratio:g}.")

    def _set_stages(self, name: str) -> None:
        """Raise unless an option is one positive whole number for each stage (or, for the windows, one for all)."""
        value: Any = getattr(self, name)
        if name == "window_size" and _is_whole(value) and 1 <= value <= MOST_BLOCKS:
            object.__setattr__(self, name, int(value))
            return
        numbers = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
        if not numbers or any(not _is_whole(number) or not 1 <= number <= MOST_BLOCKS for number in numbers):
            raise ConfigError(f"{name} must be positive whole numbers, one for each stage, got {value!r}.")
        if len(numbers) > MOST_STAGES:
            raise ConfigError(f"{name} must be for at most {MOST_STAGES} stages, got {len(numbers)}.")
        if len(numbers) != len(self.depths):
            raise ConfigError(f"{name} must be as many as depths ({len(self.depths)}), got {value!r}.")
        object.__setattr__(self, name, tuple(int(number) for number in numbers))

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the default image."""
        return pair(self.img_size)

    @property
    def patch(self) -> tuple[int, int]:
        """P_h and P_w."""
        return pair(self.patch_size)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.depths)

    @property
    def depth(self) -> int:
        """Blocks of all stages."""
        return sum(self.depths)

    @property
    def dims(self) -> tuple[int, ...]:
        """Width of each stage."""
        return tuple(self.embed_dim << i for i in range(self.stages))

    @property
    def windows(self) -> tuple[int, ...]:
        """M of each stage."""
        return (self.window_size,) * self.stages if isinstance(self.window_size, int) else self.window_size

    @property
    def pooled_dim(self) -> int:
        """Width of what the head receives: of the last stage."""
        return self.dims[-1]

    @property
    def map_dims(self) -> tuple[int, ...]:
        """Channels of each map of `intermediate`: those of the stages."""
        return self.dims

    @property
    def map_strides(self) -> tuple[tuple[int, int], ...]:
        """Pixels down and across in a cell of each map."""
        return tuple((self.patch[0] << i, self.patch[1] << i) for i in range(self.stages))


@dataclass(frozen=True, kw_only=True)
class ResNetConfig(Options):
    """A residual network (He et al., 2016), as a classifier or as the backbone of another model."""

    kind: ResNetKind = "resnet50"
    """Which one, by its number of layers with weights."""
    img_size: int | tuple[int, int] = 224
    """Height and width of the images it is meant for: a default, not a limit."""
    in_chans: int = 3
    """Channels of the image."""
    num_classes: int = 1000
    """Outputs of the head; 0 leaves the head out."""
    frozen_norm: bool = False
    """Batch norm with fixed numbers, as detectors use it: their batches are too small to measure anything."""
    dilation: bool = False
    """Dilation instead of stride in the last stage (DC5): a map of twice the side."""
    drop_path_rate: float = 0.0
    """Stochastic depth of the last block; earlier blocks rise to it linearly from 0."""

    def __post_init__(self) -> None:
        self._set_pair("img_size")
        self._check_choices()
        self._check_numbers(["in_chans"], 1, whole=True, most=MOST_WIDTH)
        self._check_numbers(["num_classes"], 0, whole=True, most=MOST_CLASSES)
        self._check_numbers(["drop_path_rate"], 0, 1)

    @property
    def small(self) -> bool:
        """Made for small images: 3x3 before the stages, which keeps the size, instead of 7x7 and a pool."""
        return self.kind == "resnet8"

    @property
    def bottleneck(self) -> bool:
        """Three convolutions in a block, the middle one narrow, instead of two."""
        return self.kind in ("resnet50", "resnet101")

    @property
    def width(self) -> int:
        """Channels before the stages."""
        return 32 if self.small else 64

    @property
    def stages(self) -> list[tuple[int, int, int]]:
        """Channels of the 3x3 convolutions, stride and number of blocks of each stage."""
        depths = {
            "resnet8": (1, 1, 1),
            "resnet18": (2, 2, 2, 2),
            "resnet34": (3, 4, 6, 3),
            "resnet50": (3, 4, 6, 3),
            "resnet101": (3, 4, 23, 3),
        }[self.kind]
        return [(64 << i, 2 if i or self.small else 1, depth) for i, depth in enumerate(depths)]

    def dilated(self, stage: int) -> bool:
        """Whether a stage has dilation for its stride."""
        return self.dilation and stage == len(self.stages) - 1

    @property
    def feature_dim(self) -> int:
        """Channels of the last feature map."""
        return self.map_dims[-1]

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the default image."""
        return pair(self.img_size)

    @property
    def pooled_dim(self) -> int:
        """Width of what the head receives."""
        return self.feature_dim

    @property
    def map_dims(self) -> tuple[int, ...]:
        """Channels of the map of each stage."""
        return tuple(width * (4 if self.bottleneck else 1) for width, _, _ in self.stages)

    @property
    def map_strides(self) -> tuple[tuple[int, int], ...]:
        """Pixels down and across from one cell to the next in the map of each stage."""
        strides = [1 if self.dilated(i) else stride for i, (_, stride, _) in enumerate(self.stages)]
        steps = ((1 if self.small else 4) * math.prod(strides[: i + 1]) for i in range(len(strides)))
        return tuple((step, step) for step in steps)


BackboneConfig = ViTConfig | SwinConfig | ResNetConfig
"""A model of images upon which others can be built."""


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig(Options):
    """A backbone with a head that gives every pixel a class: `Segmenter(config)` needs nothing else."""

    backbone: BackboneConfig
    """What reads the image, without a head of its own."""
    num_classes: int
    """K, classes of pixels."""
    head: SegmentHead = "conv"
    """One linear layer on each patch, a convolutional head over several layers, or class tokens (Segmenter)."""
    layers: int = 3
    """Blocks of a ViT, or stages of a pyramid, that the convolutional head reads."""
    width: int = 64
    """Channels of the convolutional head."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["num_classes"], 1, whole=True, most=MOST_CLASSES)
        self._check_numbers(["layers"], 1, whole=True, most=MOST_BLOCKS)
        self._check_numbers(["width"], 1, whole=True, most=MOST_WIDTH)
        if self.backbone.num_classes:
            raise ConfigError(f"the backbone must have num_classes=0, got {self.backbone.num_classes}.")
        if self.head == "mask" and not isinstance(self.backbone, ViTConfig):
            raise ConfigError(
                f"the mask head needs a ViT, got a {type(self.backbone).__name__}; use the head conv or linear."
            )


@dataclass(frozen=True, kw_only=True)
class Augmentation(Options):
    """What is done to training images at random. Everything off by default: a recipe turns on what its data likes."""

    crop_scale: float = 1.0
    """Random resized crop of at least this share of the area; 1 for none."""
    flip: float = 0.0
    """Probability of a mirror image, left to right."""
    shift: float = 0.0
    """Largest shift, as a share of the side."""
    rotate: float = 0.0
    """Largest turn, in degrees."""
    zoom: float = 0.0
    """Largest magnification or reduction: 0.1 for up to 10 %."""
    shear: float = 0.0
    """Largest shear."""
    policy: AugmentPolicy = "none"
    """`rand`: RandAugment, several operations of one strength; `trivial`: TrivialAugment, one of random strength."""
    operations: int = 2
    """Operations of RandAugment."""
    magnitude: float = 0.5
    """Strength of RandAugment, 0 to 1."""
    color_jitter: float = 0.0
    """Largest change of brightness, contrast and saturation."""
    grey: float = 0.0
    """Probability of an image without its colours."""
    blur: float = 0.0
    """Probability of a blur, by up to 1 % of the side."""
    solarize: float = 0.0
    """Probability of the bright half of the values turned around."""
    erasing: float = 0.0
    """Probability of a random box set to the mean colour."""
    mixup: float = 0.0
    """Alpha of mixup; 0 for none."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0 for none. With mixup too, each takes half of the images."""
    repeats: int = 1
    """Repeated augmentation: views of an image in one epoch, which then has as many fewer images."""

    def __post_init__(self) -> None:
        self._check_choices()
        names = ["flip", "shift", "zoom", "shear", "magnitude", "color_jitter", "grey", "blur", "solarize", "erasing"]
        self._check_numbers(names, 0, 1 + 1e-9)
        self._check_numbers(["rotate", "mixup", "cutmix"], 0)
        self._check_numbers(["operations", "repeats"], 1, whole=True)
        self._check_numbers(["crop_scale"], 0)
        if not 0 < self.crop_scale <= 1:
            raise ConfigError(f"crop_scale must be above 0 and at most 1, got {self.crop_scale!r}.")


@dataclass(frozen=True, kw_only=True)
class RegressOptions(Options):
    """What `--task regress` can do."""

    loss: RegressLoss = "squared"
    """Half the squared error, the absolute error, Huber's, or `gaussian`: the model also tells its variance."""
    delta: float = 1.0
    """Where Huber's loss turns from square to straight, in deviations of the target."""

    @property
    def outputs(self) -> int:
        """Outputs of the model for each number: the number, and with `gaussian` its variance."""
        return 2 if self.loss == "gaussian" else 1

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["delta"], 1e-9)


@dataclass(frozen=True, kw_only=True)
class MultilabelOptions(Options):
    """What `--task multilabel` can do."""

    loss: MultilabelLoss = "bce"
    """Binary cross-entropy, or the asymmetric loss that cares less for the many easy absent labels."""

    def __post_init__(self) -> None:
        self._check_choices()


@dataclass(frozen=True, kw_only=True)
class SegmentOptions(Options):
    """What `--task segment` can do."""

    head: SegmentHead = "conv"
    """One linear layer on each patch, a convolutional head over several layers, or class tokens (Segmenter)."""
    layers: int = 3
    """Blocks whose outputs the convolutional head reads, the last and others evenly before it."""
    width: int = 64
    """Channels of the convolutional head."""
    dice: float = 1.0
    """Weight of the dice loss beside cross-entropy."""
    class_weights: ClassWeights = "none"
    """`balanced` weighs each class by the inverse square root of its share of the pixels."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["layers", "width"], 1, whole=True)
        self._check_numbers(["dice"], 0)


@dataclass(frozen=True, kw_only=True)
class DetectOptions(Options):
    """What `--task detect` can do."""

    queries: Literal["anchors", "learned"] = "anchors"
    """Queries that are boxes, refined layer by layer, which learn from little data; or DETR's, which need much."""
    num_queries: int | None = None
    """How many; by default twice the most objects in a training image, and at least 10."""
    width: int = 128
    """D of the decoder."""
    heads: int = 4
    """Attention heads of the decoder."""
    encoder_layers: int = 0
    """Transformer layers between backbone and decoder; a ViT needs none."""
    decoder_layers: int = 3
    """Layers of the decoder."""
    denoise_groups: int = 4
    """Copies of the true boxes, spoilt by noise, that anchors learn to mend; 0 for none."""
    class_cost: float = 2.0
    """Weight of the class in matching and loss."""
    box_cost: float = 5.0
    """Weight of the boxes' L1 distance."""
    giou_cost: float = 2.0
    """Weight of their generalised IoU."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["width", "heads", "decoder_layers"], 1, whole=True)
        self._check_numbers(["encoder_layers", "denoise_groups"], 0, whole=True)
        self._check_numbers(["class_cost", "box_cost", "giou_cost"], 0)
        if self.num_queries is not None:
            self._check_numbers(["num_queries"], 1, whole=True)


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """What a model that reads or writes text is made of."""

    tokenizer: TokenizerKind = "bpe"
    """Tokens are characters, or the pieces of words that occur most often (byte-pair encoding)."""
    vocab_size: int = 4000
    """Tokens of byte-pair encoding, at most."""
    max_length: int | None = None
    """Tokens of the longest text that is read or written; longer ones are left out. By default a quarter more than the
    longest text to train on, and at most 256."""
    width: int = 256
    """D of the text encoder and of the decoder."""
    heads: int = 4
    """Attention heads."""
    encoder_layers: int = 4
    """Blocks that read text."""
    decoder_layers: int = 4
    """Blocks that write it."""
    mlp_ratio: float = 4.0
    """Width of the MLP's first layer as a multiple of D."""
    drop_rate: float = 0.1
    """Dropout."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["vocab_size", "width", "heads", "encoder_layers", "decoder_layers"], 1, whole=True)
        self._check_numbers(["mlp_ratio"], 0.01, MOST_RATIO)
        self._check_numbers(["drop_rate"], 0, 1)
        if self.max_length is not None:
            self._check_numbers(["max_length"], 3, whole=True)

    def config(self, vocab_size: int, max_length: int, depth: int, **more: Any) -> "TextConfig":
        """The options of an encoder or decoder of this size."""
        return TextConfig(
            vocab_size=vocab_size, max_length=max_length, embed_dim=self.width, depth=depth, num_heads=self.heads,
            mlp_width=round(self.width * self.mlp_ratio), drop_rate=self.drop_rate, **more,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Writing(Options):
    """How text is written: the likeliest token each time, by beam search, or by chance."""

    beam: int = 1
    """Texts that are followed at once; 1 takes the likeliest token each time."""
    n_best: int = 1
    """Texts to answer with, the best first."""
    length_penalty: float = 1.0
    """Beam search: scores are divided by the length to this power; more favours longer texts."""
    sample: bool = False
    """Draw each token by its probability."""
    temperature: float = 1.0
    """Sampling: below 1 favours the likely tokens."""
    sample_top_k: int | None = None
    """Sampling: choose among this many tokens only."""
    sample_top_p: float = 1.0
    """Sampling: choose among the likeliest tokens that together have this probability."""
    max_tokens: int | None = None
    """Stop after this many tokens; by default the longest that the model was made for."""
    seed: int = 0
    """Decides what is drawn."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["beam", "n_best"], 1, whole=True)
        self._check_numbers(["seed"], 0, whole=True)
        self._check_numbers(["temperature"], 1e-6)
        self._check_numbers(["length_penalty"], -math.inf)
        self._check_numbers(["sample_top_p"], 1e-9, 1 + 1e-9)
        given = [name for name in ("sample_top_k", "max_tokens") if getattr(self, name) is not None]
        self._check_numbers(given, 1, whole=True)
        of_chance = self.temperature != 1 or self.sample_top_k is not None or self.sample_top_p != 1
        if of_chance and not self.sample:
            raise ConfigError("temperature, sample_top_k and sample_top_p are for sampling; ask for sample too.")
        if self.sample and self.beam > 1:
            raise ConfigError("a beam and sample exclude each other; give one of them.")
        if not self.sample and self.n_best > self.beam:
            raise ConfigError(f"the {self.n_best} best texts need a beam of at least {self.n_best}, got {self.beam}.")


TOP_K = 5
"""Labels of an answer, where classes are told apart: for library, command line and server."""
BATCH_SIZE = 32
"""Images or texts at once, where nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Running(Options):
    """How a trained model is run."""

    batch_size: int | None = None
    """Images or texts at once: 32 unless told otherwise, or what `--engine auto` finds to be the fastest."""
    workers: int = 2
    """Threads that read and decode images while the model computes; 0 reads each batch before it is looked at."""
    merge: float = 0.0
    """Token merging, for speed: patches that each block merges into others, or below 1 the share of all that is gone at
    the end; 0 is exact."""
    engine: EngineChoice | None = None
    """What computes: torch (eager), torch with its matrices laid out for this processor (packed), torch compiled,
    another engine, or the fastest here (auto). By default packed, or what an exported file was made for."""
    device: Device = "cpu"
    """Where torch computes; other engines are for the CPU."""
    tta: bool = False
    """Test-time augmentation: average the predictions for an image and its mirror image, at twice the cost."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["batch_size"] * (self.batch_size is not None), 1, whole=True)
        self._check_numbers(["workers"], 0, whole=True)
        self._check_numbers(["merge"], 0)
        if self.merge >= 1 and self.merge != int(self.merge):
            raise ConfigError(f"merge must be a whole number from 1 on, or a share of all below 1, got {self.merge:g}.")


@dataclass(frozen=True, kw_only=True)
class Probing(Options):
    """How frozen features are probed: by their nearest neighbours, or by a linear layer."""

    features: ProbeFeatures = "pooled"
    """What is probed: `pooled` is what the model's head reads, `cls` the [CLS] token, `mean` the mean of the patch
    tokens, `cls_mean` both side by side."""
    img_size: int | tuple[int, int] | None = None
    """Height and width the images are brought to; by default the model's. Pixels: their own, or 32 for files."""
    k: int = 20
    """knn: neighbours that vote."""
    knn_temperature: float = 0.07
    """knn: a vote has the weight exp(cosine / this)."""
    lrs: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0)
    """linear: rates that are tried at once, as shares of one that is surely stable."""
    weight_decays: tuple[float, ...] = (1e-4, 1e-3, 1e-2, 1e-1)
    """linear: decays that are tried with each rate."""
    few_shot: bool = False
    """Also with 1, 5 and 10 % of the labels."""
    draws: int = 3
    """few_shot: how often each share is drawn anew."""
    cache: bool = True
    """Keep the features of a model for the next time, and use those kept before; without, compute them anew."""

    def __post_init__(self) -> None:
        self._check_choices()
        if self.img_size is not None:
            self._set_pair("img_size")
        self._check_numbers(["k", "draws"], 1, whole=True)
        self._check_numbers(["knn_temperature"], 1e-6)
        for name, low in (("lrs", 1e-6), ("weight_decays", 0)):
            values: Any = getattr(self, name)
            if not isinstance(values, Sequence) or not values or not all(_is_number(v) and v >= low for v in values):
                raise ConfigError(f"{name} must be one or more numbers of at least {low:g}, got {values!r}.")


@dataclass(frozen=True, kw_only=True)
class Indexing(Options):
    """How an index for search is made."""

    nearest: NearestKind | None = None
    """How neighbours are found: `exact` compares with all, `hnsw` (a graph) and `ivf` (cells) with some, by faiss, or
    by pgvector in a database. By default as the index was made; one that was never told is exact, and from
    500,000 vectors on hnsw."""
    save_seconds: float = 20.0
    """What a kill can lose at most: so often, what was computed is written down."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["save_seconds"], 0)


@dataclass(frozen=True, kw_only=True)
class Serving(Options):
    """What the server takes, and how long it waits."""

    max_batch: int = 16
    """Images or texts that a model looks at at once."""
    wait_ms: float = 4.0
    """How long the first of a batch waits for others, if there have been others lately."""
    max_queue: int = 64
    """Requests that a model has taken and not answered; beyond, 503 at once."""
    deadline: float = 30.0
    """Seconds from the end of an upload to its answer; later, 504."""
    max_body_mb: float = 16.0
    """Largest request, in MiB."""
    max_pixels: int = 50_000_000
    """Largest image, width times height."""
    max_buffered_mb: float = 512.0
    """All requests together that wait to be read, in MiB; beyond, 503."""
    upload_seconds: float = 20.0
    """How long a client may take to send a request."""
    decoders: int = 2
    """Threads that read images."""
    max_connections: int = 512
    """Connections at once; beyond, silent, slow and idle ones are closed, and 503 is sent if all are busy."""

    def __post_init__(self) -> None:
        self._check_numbers(["max_batch", "max_queue", "decoders"], 1, whole=True)
        self._check_numbers(["max_pixels"], 1, MOST_PIXELS, whole=True)
        self._check_numbers(["max_connections"], 2, whole=True)
        self._check_numbers(["wait_ms"], 0)
        self._check_numbers(["deadline", "max_body_mb", "max_buffered_mb", "upload_seconds"], 1e-3)


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Options):
    """What every run of the training loop has, whether it learns from labels or without.

    The budget is `epochs`, `max_steps` and `max_minutes`. Steps or epochs that you give remove the minutes of a recipe,
    and epochs its steps, so that the result does not depend on the speed of the machine. Minutes that you give keep the
    epochs of the recipe as an upper limit, and its share of warm-up.

    A resumed run keeps its own options. Only the budget may change: `--resume --epochs 20` extends a run of 10 epochs,
    finished or not, and records the new budget in `config.json`. The schedule is computed over the new budget: after 10
    of 20 epochs, training continues with the learning rate of the middle of the run. A budget smaller than what has
    been trained is an error, and so is a training option that was edited in `config.json`.
    """

    model: str = "vit_lite_conv_patch4_32"
    """Name of a model (`vitral models` lists them), with options behind it if need be (NAME+block=post+reg_tokens=4),
    or weights to start from: a run, a file, NAME.TAG of vitral models --pretrained, hf-hub:owner/name."""
    img_size: int | tuple[int, int] | None = None
    """Height and width the images are brought to; by default the model's."""
    patch_size: int | tuple[int, int] | None = None
    """Height and width of a patch; by default the model's."""
    epochs: int = 30
    """Passes over the training images."""
    max_steps: int | None = None
    """Train for this many steps instead of the epochs; the warm-up keeps its share of the run."""
    max_minutes: float | None = None
    """Stop after this many minutes, if the epochs or steps are not over before; the schedule ends on time."""
    batch_size: int = 128
    """Images in a step, over all processes."""
    accumulate: int = 1
    """Parts that a step is computed in, to save memory."""
    optimizer: Optimizer = "adamw"
    """AdamW, or Muon for the matrices of the blocks and the kernels of a conv stem, and AdamW for the rest."""
    lr: float = 1e-3
    """Peak learning rate of AdamW."""
    muon_lr: float = 0.02
    """Peak learning rate of Muon's matrices."""
    weight_decay: float = 0.05
    """Decay of weights; norms, biases, positions and tokens are left out."""
    layer_decay: float = 1.0
    """Factor on the learning rate from each block to the one before it."""
    warmup_epochs: float = 1.0
    """Epochs over which the learning rate rises from 0."""
    min_lr: float = 0.0
    """Where the learning rate ends, as a share of its peak."""
    clip_grad: float | None = 1.0
    """Largest norm of the gradient; None for no clipping."""
    ema: float = 0.99
    """Decay of the averaged weights, which are the ones kept; 0 for none."""
    drop_path_rate: float = 0.0
    """Stochastic depth."""
    checkpoint_blocks: bool = False
    """Recompute each block in the backward pass: slower, with far less memory."""
    precision: Precision = "auto"
    """Numbers to compute in; auto is fp32 on a CPU."""
    device: Device = "auto"
    """Where to compute."""
    val_fraction: float = 0.1
    """Share of the training images used for validation if the data have no validation split."""
    split_seed: int = 0
    """Decides which images become the validation and test splits of data without them; `seed` does not."""
    eval_every: int = 1
    """Epochs between evaluations on the validation part."""
    patience: int | None = None
    """Stop after this many evaluations on the validation part without an improvement; None trains to the end."""
    save_minutes: float = 5.0
    """Minutes between checkpoints; there is also one at the end of the run."""
    save_steps: int | None = None
    """Steps between checkpoints, instead of minutes."""
    log_steps: int = 10
    """Steps between lines of metrics.jsonl."""
    max_bad_steps: int = 10
    """Steps in a row with a loss that is not finite, after which training stops."""
    workers: int = 0
    """Threads that read and decode images ahead of training; 0 reads each batch when it is needed."""
    strict: bool = False
    """Stop at the first image that cannot be read or row that cannot be used, instead of dropping it."""
    seed: int = 0
    """Decides the starting weights, the order and the augmentation."""
    augment: Augmentation = Augmentation()
    """What is done to training images at random."""

    def __post_init__(self) -> None:
        if isinstance(self.model, os.PathLike):  # a path, or a run
            object.__setattr__(self, "model", os.fspath(self.model))
        if not isinstance(self.model, str):
            raise ConfigError(
                f"model must be a name or where weights lie, got a {type(self.model).__name__}; keep yours with "
                'vitral.save_model(model, path, layout="vitral"), and give that path.'
            )
        self._check_choices()
        whole = ["epochs", "batch_size", "accumulate", "eval_every", "log_steps", "max_bad_steps"]
        self._check_numbers(whole + ["max_steps"] * (self.max_steps is not None), 1, whole=True)
        self._check_numbers(["workers", "split_seed"], 0, whole=True)
        if self.patience is not None:
            self._check_numbers(["patience"], 1, whole=True)
        self._check_numbers(["lr", "muon_lr", "weight_decay", "warmup_epochs", "save_minutes"], 0)
        self._check_numbers(["seed"], -(2**63), whole=True)
        self._check_numbers(["save_steps"] * (self.save_steps is not None), 1, whole=True)
        limits = [name for name in ("clip_grad", "max_minutes") if getattr(self, name) is not None]
        self._check_numbers(limits, 0)
        self._check_numbers(["ema", "drop_path_rate", "val_fraction"], 0, 1)
        self._check_numbers(["min_lr", "layer_decay"], 0, 1 + 1e-9)
        if self.batch_size % self.accumulate:
            raise ConfigError(f"accumulate must divide batch_size ({self.batch_size}), got {self.accumulate}.")


@dataclass(frozen=True, kw_only=True)
class LoRAOptions(Options):
    """LoRA (Hu et al., 2021): a low-rank change of chosen layers learns in place of the weights to start from.

    Heads learn whole, and everything else rests. What a finished run holds has the change folded in.
    """

    rank: int = 0
    """r, rank of the change; 0 for no LoRA."""
    alpha: float = 16.0
    """The change is B A times alpha / rank."""
    parts: str = "attn.qkv,attn.proj"
    """Linear layers of the backbone that get one, as whole pieces of their names, separated by commas."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["rank"], 0, whole=True)
        self._check_numbers(["alpha"], 0)
        if self.rank and not (self.alpha and self.parts.strip(" ,")):
            raise ConfigError(
                f"LoRA needs an alpha above 0 and parts to change, got alpha {self.alpha:g} and parts {self.parts!r}."
            )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Everything that decides how a model is trained."""

    model: str = "auto"
    """`auto` chooses a model, its image size and the budget from the data. Otherwise the name of a model
    (`vitral models`), with options behind it if need be (NAME+block=post+reg_tokens=4), or weights to start from: a
    name of `vitral models --pretrained`, a run, a file, hf-hub:owner/name."""
    crop: CropMode | None = None
    """How images are brought to the model's size: its centre, the whole image squeezed, or padded; by default as the
    model was trained."""
    pool: Pooling | None = None
    """What the head of a ViT reads; by default as the model was trained."""
    pool_layers: int | None = None
    """Last blocks of a ViT whose tokens the head reads, side by side; by default as the model was trained."""
    probe: ProbeUse = "none"
    """Fit a linear head on frozen features: not at all, first, as the start of fine-tuning, or only. After fine-tuning,
    the better of the two is kept."""
    class_weights: Balancing = "auto"
    """Weights of the classes in the loss of `--task classify`: `balanced` gives every class the same total, `root` is
    halfway there (the square root of those weights); `auto` is `root` if the largest class has more than 10 times the
    images of the smallest."""
    label_smoothing: float = 0.0
    """Share of a target that is spread over all classes."""
    patch_drop: float = 0.0
    """Share of the patches that each image is trained without, chosen anew each time: steps cost less."""
    freeze: str = ""
    """Parts that are not trained, by the first whole pieces of their parameter names (`blocks.1`), separated by commas;
    `backbone` is everything but the head."""
    freeze_layers: int = 0
    """First blocks that are not trained, with the patches, tokens and positions before them; 0 for none."""
    lora: LoRAOptions = LoRAOptions()
    """A low-rank change learns instead of the weights."""
    label_fraction: float = 1.0
    """Share of the labelled training images to use, class by class, at least one of each; for learning curves. Which
    ones, the seed decides, and a smaller share is a part of a larger one."""
    test_fraction: float | None = None
    """Share of the training images used for testing if the data have no test split; by default 0.15 for your own data
    of at least 50 images, and 0 for texts and embedded data."""
    select: Select = "last"
    """Keep the last averaged weights, or the ones that were best on the validation part."""
    regress: RegressOptions = RegressOptions()
    """Of `--task regress`."""
    multilabel: MultilabelOptions = MultilabelOptions()
    """Of `--task multilabel`."""
    segment: SegmentOptions = SegmentOptions()
    """Of `--task segment`."""
    detect: DetectOptions = DetectOptions()
    """Of `--task detect`."""
    text: TextOptions = TextOptions()
    """Of models that read or write text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = ["label_smoothing", "patch_drop", *(["test_fraction"] if self.test_fraction is not None else [])]
        self._check_numbers(shares, 0, 1)
        self._check_numbers(["freeze_layers"], 0, whole=True)
        self._check_numbers(["pool_layers"] * (self.pool_layers is not None), 1, whole=True, most=MOST_BLOCKS)
        if self.patience is not None and self.select == "last":
            object.__setattr__(self, "select", "best")
        if not _is_number(self.label_fraction) or not 0 < self.label_fraction <= 1:
            raise ConfigError(f"label_fraction must be above 0 and at most 1, got {self.label_fraction!r}.")
        if self.lora.rank and (self.freeze or self.freeze_layers):
            raise ConfigError(
                f"LoRA (lora.rank {self.lora.rank}) freezes the backbone itself: leave freeze and freeze_layers out; "
                f"lora.parts chooses the layers that it changes (blocks.11 for those of one block)."
            )


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Options):
    """What is compared: every model learns from growing shares of the data, each run with the same budget.

    The budget is `max_macs`, or one of `TrainConfig`: `max_minutes`, `max_steps`, or the `epochs` over all training
    images. A run on a share of them has as many steps as one on all.
    """

    models: tuple[str, ...]
    """Names of models (`vitral models` lists them)."""
    fractions: tuple[float, ...] = (0.01, 0.05, 0.2, 1.0)
    """Shares of the training images to learn from, class by class; a smaller one is a part of a larger one."""
    seeds: int = 3
    """Runs of each model on each share; the seeds count up from `seed`."""
    patch_sizes: tuple[int, ...] = ()
    """Patch sizes to train the first ViT of the models with, on the largest share."""
    max_macs: float | None = None
    """Multiply-adds that each run may spend on training (forward and twice that back), instead of minutes or steps."""
    images: int = 256
    """Images that the trained models are measured on, of the part that judges; 0 measures nothing."""

    def __post_init__(self) -> None:
        for name in ("models", "fractions", "patch_sizes"):
            values: Any = getattr(self, name)
            single = isinstance(values, str) or not isinstance(values, Sequence)
            object.__setattr__(self, name, (values,) if single else tuple(values))
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ConfigError(f"{name} must differ from each other, got {', '.join(map(str, values))}.")
        if not self.models or any(not isinstance(model, str) or not model for model in self.models):
            raise ConfigError(f"models must be the names of one or more models, got {self.models!r}.")
        if not self.fractions or any(not _is_number(share) or not 0 < share <= 1 for share in self.fractions):
            raise ConfigError(f"fractions must be above 0 and at most 1, got {self.fractions!r}.")
        if any(not _is_whole(side) or side < 1 for side in self.patch_sizes):
            raise ConfigError(f"patch_sizes must be positive whole numbers, got {self.patch_sizes!r}.")
        object.__setattr__(self, "fractions", tuple(sorted(map(float, self.fractions))))
        self._check_numbers(["seeds"], 1, whole=True)
        self._check_numbers(["images"], 0, whole=True)
        if self.images == 1:
            raise ConfigError("images must be 0, or at least 2 to compare with each other, got 1.")
        if self.max_macs is not None:
            self._check_numbers(["max_macs"], 1)


@dataclass(frozen=True, kw_only=True)
class DINOOptions(Options):
    """What `--method dino` can do. The defaults are for a small model and a small machine, not those of the paper."""

    global_scale: float = 0.3
    """Large crops show at least this share of an image's area, small ones at most this."""
    local_scale: float = 0.1
    """Small crops show at least this share of the area."""
    global_size: int | tuple[int, int] | None = None
    """Height and width of large crops; by default the model's. Smaller ones are faster."""
    local_crops: int = 6
    """Small crops of each image, besides the two large ones; 0 for none."""
    local_size: int | tuple[int, int] | None = None
    """Height and width of small crops; by default half of the large ones', in whole patches."""
    prototypes: int = 2048
    """K, outputs of the head (the paper: 65,536)."""
    hidden: int = 512
    """Width of the head's hidden layers (the paper: 2,048)."""
    bottleneck: int = 128
    """Width of the head's last layer but one (the paper: 256)."""
    momentum: float = 0.99
    """Momentum of the teacher's weights at the start; it rises to 1. Longer runs take more (the paper: 0.996)."""
    centre_momentum: float = 0.9
    """Momentum of the centre that is taken from the teacher's answers."""
    student_temperature: float = 0.1
    """Softness of the student's answers."""
    teacher_temperature: float = 0.04
    """Softness of the teacher's answers, at the start."""
    teacher_temperature_end: float = 0.06
    """Softness of the teacher's answers, after their warm-up."""
    temperature_warmup: float = 0.3
    """Share of the run over which the teacher's answers grow softer."""
    freeze_last_epochs: float = 1.0
    """Epochs before the last layer of the head begins to learn."""
    ibot: float = 0.0
    """Weight of the loss on hidden patches (iBOT); 0 for none."""
    ibot_hidden: float = 0.3
    """Share of the patches that is hidden, in half of the large crops."""
    koleo: float = 0.0
    """Weight of the term that spreads features (KoLeo); 0 for none."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["local_crops"], 0, whole=True)
        self._check_numbers(["prototypes"], 2, whole=True)
        self._check_numbers(["hidden", "bottleneck"], 1, whole=True)
        self._check_numbers(["momentum", "centre_momentum"], 0, 1 + 1e-9)
        temperatures = ["student_temperature", "teacher_temperature", "teacher_temperature_end"]
        self._check_numbers(temperatures, 1e-4)
        self._check_numbers(["temperature_warmup"], 0, 1 + 1e-9)
        self._check_numbers(["freeze_last_epochs", "ibot", "koleo"], 0)
        self._check_numbers(["ibot_hidden"], 0.01, 1)
        self._check_numbers(["local_scale", "global_scale"], 0)
        if not 0 < self.local_scale <= self.global_scale <= 1:
            raise ConfigError(
                f"crops need 0 < local_scale <= global_scale <= 1, got {self.local_scale:g} and {self.global_scale:g}."
            )
        for name in ("global_size", "local_size"):
            if getattr(self, name) is not None:
                self._set_pair(name)


@dataclass(frozen=True, kw_only=True)
class MAEOptions(Options):
    """What `--method mae` can do."""

    mask_ratio: float = 0.75
    """Share of the patches that are hidden."""
    decoder_dim: int = 128
    """Width of the decoder's tokens; a multiple of 4, for its sinusoidal positions."""
    decoder_depth: int = 2
    """Blocks of the decoder."""
    decoder_heads: int = 4
    """Attention heads of the decoder; must divide its width."""
    norm_pixels: bool = True
    """Predict each patch's pixels less their mean and over their deviation, instead of the pixels themselves."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["decoder_dim", "decoder_depth", "decoder_heads"], 1, whole=True)
        self._check_numbers(["mask_ratio"], 0, 1)
        if self.decoder_dim % 4 or self.decoder_dim % self.decoder_heads:
            raise ConfigError(
                f"decoder_dim must be a multiple of 4 and of decoder_heads ({self.decoder_heads}), "
                f"got {self.decoder_dim}."
            )


@dataclass(frozen=True, kw_only=True)
class PretrainConfig(LoopConfig):
    """Everything that decides how a model learns without labels."""

    method: MethodName = "dino"
    """DINO: say of one crop what the average of oneself says of another. MAE: fill in hidden patches."""
    ema: float = 0.0
    """Decay of averaged weights; DINO's teacher is such an average by itself."""
    val_fraction: float = 0.05
    """Part of the training images kept apart, for the health signals."""
    weight_decay_end: float | None = None
    """Where the decay of weights ends, along half a cosine; by default it stays."""
    head_warmup_epochs: float = 1.0
    """Epochs in which new heads learn alone, where the run starts from weights that come without them."""
    health_images: int = 1000
    """Images of the part kept apart that health signals are taken from."""
    neighbours: int = 10000
    """Labelled training images among which the nearest are looked for, in the k-NN signal."""
    picture_every: int = 5
    """Epochs between pictures of what the model looks at, or fills in."""
    dino: DINOOptions = DINOOptions()
    """Of `--method dino`."""
    mae: MAEOptions = MAEOptions()
    """Of `--method mae`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_numbers(["health_images"], 2, whole=True)
        self._check_numbers(["neighbours", "picture_every"], 1, whole=True)
        self._check_numbers(["head_warmup_epochs"], 0)
        if self.weight_decay_end is not None:
            self._check_numbers(["weight_decay_end"], 0)


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(Options):
    """How a model is exported in int8."""

    max_drop: float = 0.5
    """The most that may be lost of the task's metric on validation images, in points (hundredths)."""
    calibration_images: int = 300
    """Training images from which the ranges of activations are found."""

    def __post_init__(self) -> None:
        self._check_numbers(["max_drop"], 0)
        self._check_numbers(["calibration_images"], 1, whole=True)


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(Options):
    """A detector after DETR (Carion et al., 2020): a backbone, a Transformer, and one box and class for each query."""

    backbone: BackboneConfig
    """What reads the image, without a head of its own (num_classes=0)."""
    maps: int = 1
    """The backbone's last maps that are read; of several, all are summed at the finest."""
    num_classes: int = 91
    """K, kinds of objects (91 are COCO's ids)."""
    embed_dim: int = 256
    """D, width of the Transformer."""
    encoder_layers: int = 6
    """Encoder blocks after the backbone; a ViT needs none."""
    decoder_layers: int = 6
    """Decoder blocks, each of which answers with boxes."""
    num_heads: int = 8
    """Attention heads; must divide D."""
    mlp_width: int = 2048
    """Width of the MLP's first layer."""
    act: Literal["relu", "gelu"] = "relu"
    """Activation of the MLP."""
    block: BlockKind = "post"
    """LayerNorm after each residual sum (DETR) or before each sub-layer."""
    norm_eps: float = 1e-5
    """Epsilon of every LayerNorm of the Transformer."""
    drop_rate: float = 0.1
    """Dropout in the Transformer."""
    num_queries: int = 100
    """Q, the most objects that can be found in an image."""
    queries: QueryKind = "learned"
    """`learned`: DETR's free vectors, softmax over K classes and no-object. `anchors`: boxes that every layer refines
    (DAB-DETR, Liu et al., 2022), one sigmoid per class; these learn from far fewer images."""
    pos_temperature: float = 10000.0
    """Ratio of the longest to the shortest wave in the sine positions; lower is sharper (DAB-DETR: 20)."""
    denoise_groups: int = 1
    """Groups of noised true boxes given as extra queries in training; the groups do not see each other."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["num_classes", "num_queries"], 1, whole=True, most=MOST_CLASSES)
        self._check_numbers(["embed_dim", "num_heads", "mlp_width"], 1, whole=True, most=MOST_WIDTH)
        self._check_numbers(["decoder_layers", "maps", "denoise_groups"], 1, whole=True, most=MOST_BLOCKS)
        self._check_numbers(["encoder_layers"], 0, whole=True, most=MOST_BLOCKS)
        self._check_numbers(["norm_eps"], 0)
        self._check_numbers(["pos_temperature"], 1)
        self._check_numbers(["drop_rate"], 0, 1)
        if self.backbone.num_classes:
            raise ConfigError(
                f"the backbone of a detector has no head of its own: set its num_classes to 0, "
                f"got {self.backbone.num_classes}."
            )
        if self.embed_dim % 4 or self.embed_dim % self.num_heads:
            raise ConfigError(
                f"embed_dim must be a multiple of 4 and of num_heads ({self.num_heads}), got {self.embed_dim}."
            )

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> Self:
        """As of all options; runs of earlier versions call the backbone `vit` or `cnn`."""
        if not isinstance(options, Mapping):
            return super().from_dict(options)
        old = [options[kind] for kind in ("vit", "cnn") if options.get(kind) is not None]
        rest = {key: value for key, value in options.items() if key not in ("vit", "cnn")}
        return super().from_dict({"backbone": old[0]} | rest if old else rest)

    @property
    def in_chans(self) -> int:
        """Channels of the image."""
        return self.backbone.in_chans

    @property
    def image(self) -> tuple[int, int]:
        """Height and width of the default image."""
        return self.backbone.image


TextPositions = Literal["learned", "sincos1d"]
TextPool = Literal["cls", "mean", "tokens"]
TextActivation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu"]


@dataclass(frozen=True, kw_only=True)
class TextConfig(Options):
    """A Transformer over tokens: an encoder, a decoder, or the whole of a language model."""

    vocab_size: int = 256
    """V, tokens of the vocabulary."""
    max_length: int = 256
    """The longest sequence, in tokens; a longer one is refused."""
    embed_dim: int = 256
    """D, width of every token."""
    depth: int = 4
    """L, number of blocks."""
    num_heads: int = 4
    """h, attention heads; must divide D."""
    mlp_width: int = 1024
    """Width of the MLP's first layer."""
    act: TextActivation = "relu"
    """Activation of the MLP."""
    block: BlockKind = "pre"
    """LayerNorm before each sub-layer and once at the end, or after each residual sum (the first Transformer)."""
    norm_eps: float = 1e-5
    """Epsilon of every LayerNorm."""
    positions: TextPositions = "sincos1d"
    """Where a token is: a fixed sinusoid, or a learned table."""
    scale_embedding: bool = True
    """Token embeddings times the square root of D, so that positions do not drown them."""
    norm_embedding: bool = False
    """LayerNorm on the sum of embedding and position (BART)."""
    tied_output: bool = True
    """A decoder's output layer is its table of embeddings, instead of a matrix of its own."""
    output_bias: bool = False
    """A bias on a decoder's logits (Marian)."""
    pad_token: int | None = None
    """Token that fills a batch up: where no mask is given, it is what the mask hides."""
    pool: TextPool = "cls"
    """What an encoder's head reads: the first token, which the tokenizer makes [CLS]; the mean of all; or each token,
    which then has a label of its own."""
    num_classes: int = 0
    """Outputs of an encoder's head; 0 leaves the head out."""
    drop_rate: float = 0.0
    """Dropout on embeddings, after each attention projection and in the MLP."""
    attn_drop_rate: float = 0.0
    """Dropout on the attention weights."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers(["vocab_size"], 1, whole=True, most=MOST_CLASSES)
        if self.pad_token is not None and not 0 <= self.pad_token < self.vocab_size:
            raise ConfigError(f"pad_token must be a token below vocab_size ({self.vocab_size}), got {self.pad_token}.")
        self._check_numbers(["max_length"], 1, whole=True, most=MOST_TOKENS)
        self._check_numbers(["embed_dim", "num_heads", "mlp_width"], 1, whole=True, most=MOST_WIDTH)
        self._check_numbers(["depth"], 1, whole=True, most=MOST_BLOCKS)
        self._check_numbers(["num_classes"], 0, whole=True, most=MOST_CLASSES)
        self._check_numbers(["norm_eps"], 0)
        self._check_numbers(["drop_rate", "attn_drop_rate"], 0, 1)
        if self.embed_dim % self.num_heads:
            raise ConfigError(f"num_heads must divide embed_dim ({self.embed_dim}), got {self.num_heads}.")
        if self.positions == "sincos1d" and self.embed_dim % 2:
            raise ConfigError(f"positions sincos1d need an even embed_dim, got {self.embed_dim}.")

    @property
    def pooled_dim(self) -> int:
        """Width of what an encoder's head receives."""
        return self.embed_dim


@dataclass(frozen=True, kw_only=True)
class Seq2SeqConfig(Options):
    """An encoder, of an image or of text, and a decoder that writes text while it looks at what was encoded."""

    vit: ViTConfig | None = None
    """Encoder of images: a ViT without a head (num_classes=0)."""
    encoder: TextConfig | None = None
    """Encoder of text, with a vocabulary of its own. Exactly one of the two is given."""
    decoder: TextConfig = TextConfig()
    """The decoder; where its width is another than the encoder's, a linear layer leads from one to the other."""

    def __post_init__(self) -> None:
        self._check_choices()
        if (self.vit is None) == (self.encoder is None):
            raise ConfigError(
                f"a seq2seq model needs one encoder, vit or encoder, got {'neither' if self.vit is None else 'both'}."
            )
        for part in ("vit", "encoder", "decoder"):
            options = getattr(self, part)
            if options is not None and options.num_classes:
                raise ConfigError(
                    f"the {part} of a seq2seq model has no head for classes: set its num_classes to 0, "
                    f"got {options.num_classes}."
                )


@dataclass(frozen=True, kw_only=True)
class MAEConfig(MAEOptions):
    """A masked autoencoder (He et al., 2021): a ViT that sees few patches, and a light decoder that fills in others."""

    backbone: ViTConfig
    """The encoder: a ViT without a head (num_classes=0)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone.num_classes:
            raise ConfigError(f"the backbone must have num_classes=0, got {self.backbone.num_classes}.")
