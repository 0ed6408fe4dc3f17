"""From a `ViTConfig` to the parts of a ViT: the only place where an option's word leads to code."""

from torch import nn

from vitral.config import ViTConfig
from vitral.errors import ConfigError
from vitral.nn.attention import Attention
from vitral.nn.blocks import PostNormBlock, PreNormBlock
from vitral.nn.locality import LocalityAttention, ShiftedPatchEmbed
from vitral.nn.mlp import MLP
from vitral.nn.patches import ConvStem, HybridEmbed, PatchEmbed
from vitral.nn.pooling import AttentionPool, ClsDistPool, ClsMeanPool, ClsPool, DistilledHead, MaxPool, MeanPool
from vitral.nn.positions import LearnedPositions, NoPositions, SinusoidalPositions
from vitral.nn.regularize import stochastic_depth_rates
from vitral.nn.resnetv2 import resnet_v2

EncoderBlock = PreNormBlock | PostNormBlock

BLOCKS = {"pre": PreNormBlock, "post": PostNormBlock}

ATTENTIONS = {"plain": Attention, "local": LocalityAttention}

STEMS = {
    "linear": lambda c: PatchEmbed(c.in_chans, c.embed_dim, c.patch, c.patch_bias),
    "conv": lambda c: ConvStem(c.stem_layers, c.patch_bias, c.norm_eps),
    "conv_deep": lambda c: ConvStem(c.stem_layers, c.patch_bias, c.norm_eps),
    "shifted": lambda c: ShiftedPatchEmbed(c.in_chans, c.embed_dim, c.patch, c.patch_bias, c.norm_eps),
    "resnet": lambda c: HybridEmbed(
        resnet_v2(c.in_chans, c.stem_depths), c.stem_width, c.embed_dim, c.stem_cells, c.patch_bias, frozen=False
    ),
    "custom": lambda c: _no_stem(),
}

POSITIONS = {
    "none": lambda c: NoPositions(),
    "sincos1d": lambda c: SinusoidalPositions(c.embed_dim, c.prefix_tokens, c.pos_rows, two_d=False),
    "sincos2d": lambda c: SinusoidalPositions(c.embed_dim, c.prefix_tokens, c.pos_rows, two_d=True),
    "learned": lambda c: LearnedPositions(c.grid, c.prefix_tokens, c.pos_rows, c.pos_resize),
}

POOLS = {
    "cls": lambda c: ClsPool(),
    "mean": lambda c: MeanPool(c.prefix_tokens),
    "max": lambda c: MaxPool(c.prefix_tokens),
    "cls_mean": lambda c: ClsMeanPool(c.prefix_tokens),
    "cls_dist": lambda c: ClsDistPool(),
    "map": lambda c: AttentionPool(c.embed_dim, c.num_heads, make_mlp(c), c.prefix_tokens, c.norm_eps),
}

HEADS = {
    "linear": lambda c: nn.Linear(c.pooled_dim, c.num_classes),
    "mlp": lambda c: MLP(c.pooled_dim, c.pooled_dim, c.pooled_dim, c.num_classes, "gelu", drop=0.0),
    "mlp_tanh": lambda c: MLP(c.pooled_dim, c.pooled_dim, c.pooled_dim, c.num_classes, "tanh", drop=0.0),
    "distilled": lambda c: DistilledHead(c.embed_dim, c.num_classes),
}


def _no_stem() -> nn.Module:
    raise ConfigError(
        "a custom stem is a module of your own, which no file holds: pass it, VisionTransformer(config, stem=...), and "
        "load the weights with load_state_dict."
    )


def check_stem(c: ViTConfig, stem: nn.Module) -> nn.Module:
    """A stem that was passed in, if the config leaves room for it."""
    if c.stem != "custom":
        raise ConfigError(f"a stem that is passed in needs stem='custom' in the config, got {c.stem!r}.")
    return stem


def make_mlp(c: ViTConfig) -> MLP:
    """The MLP of a block, and of attention pooling."""
    return MLP(c.embed_dim, c.mlp_width, c.mlp_hidden, c.embed_dim, c.act, c.proj_drop_rate)


def make_blocks(c: ViTConfig) -> nn.ModuleList:
    """The L encoder blocks, with stochastic depth rising from the first to the last."""
    return nn.ModuleList(
        BLOCKS[c.block](
            c.embed_dim,
            ATTENTIONS[c.attention](c.embed_dim, c.num_heads, c.qkv_bias, c.attn_drop_rate, c.proj_drop_rate),
            make_mlp(c),
            c.norm_eps,
            c.init_values,
            rate,
        )
        for rate in stochastic_depth_rates(c.drop_path_rate, c.depth)
    )


def make_norm(c: ViTConfig, dim: int, wanted: bool) -> nn.Module:
    """A LayerNorm, or nothing in its place."""
    return nn.LayerNorm(dim, eps=c.norm_eps) if wanted else nn.Identity()
