"""What a ViT costs, from its config alone: tokens, parameters, multiply-adds, memory. Builds no model, needs no torch.

T tokens (patches and prefix), D width, L depth, h heads.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vitral.config import ViTConfig

BYTES = 4  # fp32


@dataclass(frozen=True)
class Cost:
    """Costs of one image."""

    grid: tuple[int, int]
    """Rows and columns of patches."""
    patches: int
    tokens: int
    """Patches and prefix tokens: the length of the sequence."""
    params_by_part: dict[str, int]
    macs_by_part: dict[str, int]
    """Multiply-adds of the matrix products and convolutions."""
    attention_entries: int
    """tokens^2, the entries of one head's softmax matrix."""
    attention_bytes: int
    """The softmax matrices of all heads of one block, were they written out (a fused kernel does not)."""
    activation_bytes: int
    """What training keeps for the backward pass, with fused attention and no dropout."""

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


def model_cost(c: ViTConfig) -> Cost:
    """Count the costs of one image of the config's size."""
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
        activation_bytes=_activations(c, T) * BYTES,
    )


def receptive_field(layers: Sequence[tuple[int, int]]) -> int:
    """Pixels along one side that an output of convolutions (kernel, stride) can see, in theory.

    For L layers of one kernel k and stride 1 it is k + (k - 1)(L - 1); each stride widens what comes after it.
    """
    field, step = 1, 1
    for kernel, stride in layers:
        field += (kernel - 1) * step
        step *= stride
    return field


def _params(c: ViTConfig, patches: int) -> dict[str, int]:
    D, L, norm = c.embed_dim, c.depth, 2 * c.embed_dim
    mlp = _linear(D, c.mlp_width) + _linear(c.mlp_hidden, D)
    counts = {
        "patch embedding": _stem_params(c),
        "prefix tokens": c.prefix_tokens * D,
        "positions": (c.pos_rows + patches) * D if c.positions == "learned" else 0,
        "query, key, value": L * _linear(D, 3 * D, c.qkv_bias),
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
    convolutions = sum(9 * c_in * c_out for c_in, c_out, _ in c.stem_layers)
    return convolutions + sum(2 * c_out for _, c_out, _ in c.stem_layers[:-1]) + bias


def _stem_macs(c: ViTConfig) -> int:
    H, W = c.image
    if c.stem == "linear":
        return H * W * c.in_chans * c.embed_dim
    macs = 0
    for c_in, c_out, (down, across) in c.stem_layers:
        H, W = H // down, W // across
        macs += 9 * c_in * c_out * H * W
    return macs


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
