"""What a model costs, from its config alone: tokens, parameters, multiply-adds, memory. Builds nothing, needs no torch.

T tokens (patches and prefix), D width, L depth, h heads; of a Swin C width of a stage, M side and n tokens of a window.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vitral.config import SHIFTED_VIEWS, BackboneConfig, ResNetConfig, SwinConfig, ViTConfig
from vitral.errors import ConfigError
from vitral.models.convolutions import Window, resnet_windows, stem_windows

BYTES = 4  # fp32


@dataclass(frozen=True)
class Cost:
    """Costs of one image."""

    grid: tuple[int, int]
    """Rows and columns of patches."""
    patches: int
    tokens: int
    """Patches and prefix tokens: the length of the sequence, of a pyramid that of the first stage."""
    params_by_part: dict[str, int]
    macs_by_part: dict[str, int]
    """Multiply-adds of the matrix products and convolutions."""
    attention_entries: int
    """tokens^2, the entries of one head's softmax matrix; with windows those of all, in the first stage."""
    attention_bytes: int
    """The softmax matrices of all heads of one block, were they written out (a fused kernel does not)."""
    activation_bytes: int
    """What training keeps for the backward pass, with fused attention and no dropout."""
    maps: tuple[tuple[int, int], ...]
    """Rows and columns of the map of each stage; a ViT has one."""

    @property
    def params(self) -> int:
        """Parameters of the whole model."""
        return sum(self.params_by_part.values())

    @property
    def macs(self) -> int:
        """Multiply-adds of one forward pass through every token of every block."""
        return sum(self.macs_by_part.values())

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain values, totals included."""
        return asdict(self) | {"params": self.params, "macs": self.macs}


def model_cost(c: BackboneConfig) -> Cost:
    """Count the costs of one image of the config's size."""
    if isinstance(c, SwinConfig):
        return _swin_cost(c)
    return _resnet_cost(c) if isinstance(c, ResNetConfig) else _vit_cost(c)


def _vit_cost(c: ViTConfig) -> Cost:
    patches = c.grid[0] * c.grid[1]
    T = patches + c.prefix_tokens
    return Cost(
        grid=c.grid,
        patches=patches,
        tokens=T,
        params_by_part=_params(c, patches),
        macs_by_part=_macs(c, patches, T),
        attention_entries=T * T,
        attention_bytes=c.num_heads * T * T * BYTES,
        activation_bytes=(_activations(c, T) + _stem_activations(c)) * BYTES,
        maps=(c.grid,),
    )


def receptive_field(layers: Sequence[tuple[int, ...]]) -> int:
    """Pixels along one side that an output of convolutions or pools (kernel, stride, dilation = 1) can see, in theory.

    For L layers of one kernel k and stride 1 it is k + (k - 1)(L - 1). In general each layer adds (k - 1) times its
    dilation, in steps of all the strides before it.
    """
    windows = [Window("", k, s, dilation[0] if dilation else 1) for k, s, *dilation in layers]
    return follow(windows)[-1].size if windows else 1


@dataclass(frozen=True)
class ReceptiveField:
    """What an output of a stage can see: output i the pixels start + i stride to start + i stride + size - 1."""

    stage: str
    size: int
    stride: int
    start: int
    """Below 0 where the first output reaches into the padding."""


def receptive_fields(config: ResNetConfig | ViTConfig) -> list[ReceptiveField]:
    """The theoretical receptive field of each stage of a CNN, or of a ViT's stem (after it, all patches see all).

    (Images whose side is no multiple of the stride may start elsewhere behind padding that depends on the size.)
    """
    if isinstance(config, ResNetConfig):
        return follow(resnet_windows(config))
    P = config.patch[0]
    if config.stem == "resnet":
        cells = config.stem_cells[0]
        return follow([*stem_windows(config), Window("tokens", cells, cells)])
    if config.stem == "linear":
        return follow([Window("tokens", P, P)])
    if config.stem == "shifted":
        return follow([Window("tokens", P + 2 * (P // 2), P, before=P // 2)])
    if config.stem == "custom":
        raise ConfigError("what a custom stem sees is not in its config; measure it by the gradient.")
    return follow(Window("tokens", 3, strides[0], before=1) for _, _, strides in config.stem_layers)


def follow(windows: Iterable[Window]) -> list[ReceptiveField]:
    """The field at the end of each stage; shortcuts see no more than what they go around."""
    found: dict[str, ReceptiveField] = {}
    size, step, start = 1, 1, 0
    for w in windows:
        if not w.aside:
            size += (w.kernel - 1) * w.dilation * step
            start -= w.before * step
            step *= w.stride
        found[w.stage] = ReceptiveField(w.stage, size, step, start)
    return list(found.values())


def _params(c: ViTConfig, patches: int) -> dict[str, int]:
    D, L, norm = c.embed_dim, c.depth, 2 * c.embed_dim
    mlp = _linear(D, c.mlp_width) + _linear(c.mlp_hidden, D)
    counts = {
        "patch embedding": _stem_params(c),
        "prefix tokens": c.prefix_tokens * D,
        "positions": (c.pos_rows + patches) * D if c.positions == "learned" else 0,
        "query, key, value": L * (_linear(D, 3 * D, c.qkv_bias) + c.num_heads * (c.attention == "local")),
        "projection": L * _linear(D, D),
        "mlp": L * mlp,
        "norms": (2 * L + c.pre_norm) * norm + 2 * (c.pooled_dim if c.norm_after_pool else D),
        "layer scale": L * 2 * D if c.init_values is not None else 0,
        "pooling": D + _linear(D, D) + _linear(D, 2 * D) + _linear(D, D) + norm + mlp if c.global_pool == "map" else 0,
        "head": _head(c, _linear),
    }
    return {part: count for part, count in counts.items() if count}


def _macs(c: ViTConfig, patches: int, T: int) -> dict[str, int]:
    D, L = c.embed_dim, c.depth
    mlp = D * c.mlp_width + c.mlp_hidden * D
    counts = {
        "patch embedding": _stem_macs(c),
        "query, key, value": L * T * D * 3 * D,
        "attention": L * 2 * T * T * D,  # Q K^T, and its product with V
        "projection": L * T * D * D,
        "mlp": L * T * mlp,
        "pooling": D * D + patches * 2 * D * D + 2 * patches * D + D * D + mlp if c.global_pool == "map" else 0,
        "head": _head(c, lambda n_in, n_out: n_in * n_out),
    }
    return {part: count for part, count in counts.items() if count}


def _linear(n_in: int, n_out: int, bias: bool = True) -> int:
    return n_in * n_out + n_out * bias


def _head(c: ViTConfig, layer: Any) -> int:
    if not c.num_classes:
        return 0
    return layer(c.pooled_dim, c.num_classes) + (c.head != "linear") * layer(c.pooled_dim, c.pooled_dim)


def _stem_params(c: ViTConfig) -> int:
    D, bias = c.embed_dim, c.embed_dim * c.patch_bias
    if c.stem == "linear":
        return c.patch[0] * c.patch[1] * c.in_chans * D + bias
    if c.stem == "shifted":
        return c.patch[0] * c.patch[1] * SHIFTED_VIEWS * c.in_chans * (D + 2) + bias
    if c.stem == "resnet":
        return sum(w.params for w in stem_windows(c)) + c.stem_cells[0] * c.stem_cells[1] * c.stem_width * D + bias
    if c.stem == "custom":
        raise ConfigError("what a custom stem costs is not in its config; count the built model.")
    convolutions = sum(9 * c_in * c_out for c_in, c_out, _ in c.stem_layers)
    return convolutions + sum(2 * c_out for _, c_out, _ in c.stem_layers[:-1]) + bias


def _stem_macs(c: ViTConfig) -> int:
    H, W = c.image
    if c.stem == "linear":
        return H * W * c.in_chans * c.embed_dim
    if c.stem == "shifted":
        return H * W * SHIFTED_VIEWS * c.in_chans * c.embed_dim
    if c.stem == "resnet":
        maps = (H // c.stem_stride) * (W // c.stem_stride)
        return sum(count_macs(stem_windows(c), c.image).values()) + maps * c.stem_width * c.embed_dim
    macs = 0
    for c_in, c_out, (down, across) in c.stem_layers:
        H, W = H // down, W // across
        macs += 9 * c_in * c_out * H * W
    return macs


def count_macs(windows: Iterable[Window], image: tuple[int, int]) -> dict[str, int]:
    """Multiply-adds of each stage for one image."""
    counts: dict[str, int] = {}
    for w in windows:
        image = w.after(image)
        counts[w.stage] = counts.get(w.stage, 0) + w.kernel**2 * w.c_in * w.c_out * image[0] * image[1]
    return counts


def count_params(windows: Iterable[Window]) -> dict[str, int]:
    """Parameters of each stage."""
    counts: dict[str, int] = {}
    for w in windows:
        counts[w.stage] = counts.get(w.stage, 0) + w.params
    return counts


def _activations(c: ViTConfig, T: int) -> int:
    """Numbers that the blocks keep for the backward pass, which is nearly all there is.

    Per token: the inputs of both norms and of the four linear layers, Q K V, and what the activation keeps; per norm a
    mean and a deviation; per head the softmax's normaliser. LayerScale keeps its two inputs.
    """
    D = c.embed_dim
    inputs = 2 * D + (D + D) + 3 * D + D  # norm1, norm2; qkv, fc1; Q K V; proj
    before = {"relu": 0, "quick_gelu": 2 * c.mlp_width, "swiglu": c.mlp_width + c.mlp_hidden}.get(c.act, c.mlp_width)
    mlp = before + c.mlp_hidden  # what the activation keeps, and the input of the second layer
    scaled = 2 * D if c.init_values is not None else 0
    return c.depth * T * (inputs + mlp + scaled + 4 + c.num_heads)


def _stem_activations(c: ViTConfig) -> int:
    """What a stem keeps: a convolutional one the image, and what norm, GELU and the next layer receive of each."""
    if c.stem == "resnet":
        return count_kept(stem_windows(c), c.image)
    if c.stem == "shifted":  # what norm and projection receive
        return 2 * SHIFTED_VIEWS * c.in_chans * c.image[0] * c.image[1]
    if c.stem not in ("conv", "conv_deep"):
        return 0
    (H, W), kept = c.image, c.in_chans * c.image[0] * c.image[1]
    for _, c_out, (down, across) in c.stem_layers[:-1]:
        H, W = H // down, W // across
        kept += (3 * c_out + 2) * H * W
    return kept


# ---- CNNs ----


def _resnet_cost(c: ResNetConfig) -> Cost:
    head = {"head": _linear(c.pooled_dim, c.num_classes)} if c.num_classes else {}
    maps = tuple((-(-c.image[0] // down), -(-c.image[1] // across)) for down, across in c.map_strides)
    cells = maps[-1][0] * maps[-1][1]
    return Cost(
        grid=maps[-1],
        patches=cells,
        tokens=cells,
        params_by_part=count_params(resnet_windows(c)) | head,
        macs_by_part=count_macs(resnet_windows(c), c.image) | ({"head": c.pooled_dim * c.num_classes} if head else {}),
        attention_entries=0,
        attention_bytes=0,
        activation_bytes=count_kept(resnet_windows(c), c.image) * BYTES,
        maps=maps,
    )


def count_kept(windows: Iterable[Window], image: tuple[int, int]) -> int:
    """Numbers that training keeps for the backward pass of an image.

    The image, what each norm receives, what the activation after it gives on, and of a pool its output and where each
    number came from.
    """
    windows = list(windows)
    kept, c_out = windows[0].c_in * image[0] * image[1], 0
    for w in windows:
        image, c_out = w.after(image), w.c_out or c_out
        cells = c_out * image[0] * image[1]
        kept += cells if w.aside else 2 * cells if w.c_out else 3 * cells  # places are whole numbers of 8 bytes
    return kept


# ---- Swin ----


@dataclass(frozen=True)
class _Stage:
    """One stage: L blocks of width C and h heads on T tokens, in windows of n; padding makes T of them `padded`."""

    C: int
    L: int
    h: int
    M: int
    T: int
    padded: int
    n: int
    grid: tuple[int, int]


def _stages(c: SwinConfig) -> list[_Stage]:
    H, W = (-(-side // P) for side, P in zip(c.image, c.patch, strict=True))
    stages = []
    for C, L, h, M in zip(c.dims, c.depths, c.num_heads, c.windows, strict=True):
        M_h, M_w = min(M, H), min(M, W)
        padded = -(-H // M_h) * M_h * -(-W // M_w) * M_w
        stages.append(_Stage(C, L, h, M, H * W, padded, M_h * M_w, (H, W)))
        H, W = -(-H // 2), -(-W // 2)
    return stages


def _swin_cost(c: SwinConfig) -> Cost:
    stages = _stages(c)
    first = stages[0]
    return Cost(
        grid=first.grid,
        patches=first.T,
        tokens=first.T,
        params_by_part=_swin_params(c, stages),
        macs_by_part=_swin_macs(c, stages),
        attention_entries=first.padded * first.n,
        attention_bytes=max(s.h * s.padded * s.n for s in stages) * BYTES,
        activation_bytes=sum(_swin_activations(c, s) for s in stages) * BYTES,
        maps=tuple(s.grid for s in stages),
    )


def _swin_params(c: SwinConfig, stages: list[_Stage]) -> dict[str, int]:
    counts = {
        "patch embedding": c.patch[0] * c.patch[1] * c.in_chans * c.embed_dim + 3 * c.embed_dim,  # bias and norm
        "query, key, value": sum(s.L * _linear(s.C, 3 * s.C, c.qkv_bias) for s in stages),
        "position biases": sum(s.L * (2 * s.M - 1) ** 2 * s.h for s in stages),
        "projection": sum(s.L * _linear(s.C, s.C) for s in stages),
        "mlp": sum(s.L * (_linear(s.C, _width(c, s)) + _linear(_width(c, s), s.C)) for s in stages),
        "merging": sum(4 * s.C + 2 * s.C * s.C for s in stages[1:]),  # a norm and a matrix, from C / 2 four times to C
        "norms": sum(s.L * 4 * s.C for s in stages) + 2 * c.pooled_dim,
        "head": _linear(c.pooled_dim, c.num_classes) if c.num_classes else 0,
    }
    return {part: count for part, count in counts.items() if count}


def _swin_macs(c: SwinConfig, stages: list[_Stage]) -> dict[str, int]:
    counts = {
        "patch embedding": stages[0].T * c.patch[0] * c.patch[1] * c.in_chans * c.embed_dim,
        "query, key, value": sum(s.L * s.padded * s.C * 3 * s.C for s in stages),
        "attention": sum(s.L * 2 * s.padded * s.n * s.C for s in stages),  # in each window Q K^T, and times V
        "projection": sum(s.L * s.T * s.C * s.C for s in stages),
        "mlp": sum(s.L * s.T * 2 * s.C * _width(c, s) for s in stages),
        "merging": sum(s.T * 2 * s.C * s.C for s in stages[1:]),
        "head": c.pooled_dim * c.num_classes,
    }
    return {part: count for part, count in counts.items() if count}


def _width(c: SwinConfig, s: _Stage) -> int:
    return int(s.C * c.mlp_ratio)


def _swin_activations(c: SwinConfig, s: _Stage) -> int:
    """As `_activations` of a ViT, block by block; qkv and attention see the padding too."""
    w = _width(c, s)
    before = {"relu": 0, "quick_gelu": 2 * w}.get(c.act, w)
    return s.L * (s.T * (2 * s.C + s.C + s.C + before + w + 4) + s.padded * (s.C + 3 * s.C + s.h))
