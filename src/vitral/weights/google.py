"""Google's numpy archives: the ViT and AugReg files of vision_transformer (Dosovitskiy et al., 2021; Steiner et al.,
2021), and those of big_vision (Beyer et al., 2022; SigLIP: Zhai et al., 2023).

Kernels are (in, out), attention keeps its heads apart, and the activation of the original code is GELU by tanh.
"""

import re
from dataclasses import replace
from functools import lru_cache, partial

from vitral.config import PositionResize
from vitral.errors import CheckpointError
from vitral.weights import layout as ops
from vitral.weights.hybrid import google_rules, is_google_hybrid
from vitral.weights.layout import MAX_DEPTH, Layout, Lazy, Names, Rule, rule, rules, settings

_BLOCK = "Transformer/encoderblock_{i}"
_JAX = {"act": "gelu_tanh", "pos_resize": PositionResize(mode="bilinear_corners", antialias=False)}
_SQUASH = {"crop_mode": "squash", "crop_pct": 1.0, "interpolation": "bilinear"}


def _norm(ours: str, theirs: str) -> list[Rule]:
    return rules((f"{ours}.weight", f"{theirs}/scale"), (f"{ours}.bias", f"{theirs}/bias"))


def _dense(ours: str, theirs: str) -> list[Rule]:
    kernel = rule(f"{ours}.weight", f"{theirs}/kernel", ops.TRANSPOSE)
    return [kernel, rule(f"{ours}.bias", f"{theirs}/bias")]


def _mlp(ours: str, theirs: str) -> list[Rule]:
    return [*_dense(f"{ours}.fc1", f"{theirs}/Dense_0"), *_dense(f"{ours}.fc2", f"{theirs}/Dense_1")]


def _attention(theirs: str) -> list[Rule]:
    kernels, biases = (
        tuple(f"{theirs}/{part}/{what}" for part in ("query", "key", "value")) for what in ("kernel", "bias")
    )
    return [
        rule("blocks.{i}.attn.qkv.weight", kernels, ops.HEADS_QKV),
        rule("blocks.{i}.attn.qkv.bias", biases, ops.HEADS_QKV_BIAS),
        rule("blocks.{i}.attn.proj.weight", f"{theirs}/out/kernel", ops.HEADS_OUT),
        rule("blocks.{i}.attn.proj.bias", f"{theirs}/out/bias"),
    ]


def _body(attention: str, norm2: str, mlp: str) -> list[Rule]:
    return [
        rule("patch_embed.proj.weight", "embedding/kernel", ops.CONV),
        *rules(("patch_embed.proj.bias", "embedding/bias"), ("cls_token", "cls")),
        *_norm("blocks.{i}.norm1", f"{_BLOCK}/LayerNorm_0"),
        *_attention(f"{_BLOCK}/{attention}"),
        *_norm("blocks.{i}.norm2", f"{_BLOCK}/{norm2}"),
        *_mlp("blocks.{i}.mlp", f"{_BLOCK}/{mlp}"),
        *_norm("norm", "Transformer/encoder_norm"),
    ]


_VIT = [
    *_body("MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    *rules(("pos_embed", "Transformer/posembed_input/pos_embedding")),
]
_POOL = "MAPHead_0"
_BIG_VISION = [
    *_body("MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0"),
    *rules(("pos_embed", "pos_embedding"), ("attn_pool.latent", f"{_POOL}/probe")),
    *_norm("attn_pool.norm", f"{_POOL}/LayerNorm_0"),
    *_mlp("attn_pool.mlp", f"{_POOL}/MlpBlock_0"),
    rule("attn_pool.q.weight", f"{_POOL}/MultiHeadDotProductAttention_0/query/kernel", ops.HEADS_QKV),
    rule("attn_pool.q.bias", f"{_POOL}/MultiHeadDotProductAttention_0/query/bias", ops.HEADS_QKV_BIAS),
    rule(
        "attn_pool.kv.weight",
        tuple(f"{_POOL}/MultiHeadDotProductAttention_0/{part}/kernel" for part in ("key", "value")),
        ops.HEADS_QKV,
    ),
    rule(
        "attn_pool.kv.bias",
        tuple(f"{_POOL}/MultiHeadDotProductAttention_0/{part}/bias" for part in ("key", "value")),
        ops.HEADS_QKV_BIAS,
    ),
    rule("attn_pool.proj.weight", f"{_POOL}/MultiHeadDotProductAttention_0/out/kernel", ops.HEADS_OUT),
    rule("attn_pool.proj.bias", f"{_POOL}/MultiHeadDotProductAttention_0/out/bias"),
    *_dense("head", "head"),
]


def _heads(names: Names) -> int | None:
    return next((t.shape[-2] for name, t in names.items() if re.search(r"Attention_\d/query/kernel$", name)), None)


def _unstack(names: Names) -> Names:
    """Part the blocks that were run by a scan: `encoderblock/x` (L, ...) -> `encoderblock_i/x` (...)."""
    single: dict[str, Lazy] = {}
    read_stack = lru_cache(maxsize=4)(lambda name: names[name].read())  # a rule reads up to three, block by block
    for name, tensor in names.items():
        if "/encoderblock/" not in name:
            single[name] = tensor
            continue
        if not tensor.shape or tensor.shape[0] > MAX_DEPTH:
            raise CheckpointError(f"{name} should hold one entry for each block, got shape {tensor.shape}.")
        for i in range(tensor.shape[0]):
            read = partial(lambda name, i: read_stack(name)[i], name, i)
            single[name.replace("/encoderblock/", f"/encoderblock_{i}/")] = Lazy(tensor.shape[1:], tensor.dtype, read)
    return single


def _is_google(names: Names) -> bool:
    return any(n.endswith("encoderblock_0/MultiHeadDotProductAttention_1/query/kernel") for n in names)


def _is_big_vision(names: Names) -> bool:
    found = any(re.search(r"encoderblock(_0)?/MultiHeadDotProductAttention_0/query/kernel$", n) for n in names)
    return found and any(n.endswith("embedding/kernel") for n in names)


GOOGLE = Layout(
    "google",
    "Google's ViT and AugReg files, as the original code runs them",
    settings("augreg", _SQUASH, **_JAX),
    lambda n: _is_google(n) and not any(name.endswith("pre_logits/kernel") for name in n),
    [*_VIT, *_dense("head", "head")],
    prefixes=("opt/target/", "params/"),
    drop={r"opt/.*": "state of the optimiser"},
    heads=_heads,
)
GOOGLE_PRE_LOGITS = Layout(
    "google",
    "Google's first ViT files, with a tanh layer before the head",
    settings("augreg", _SQUASH, **_JAX),
    _is_google,
    [*_VIT, *_dense("head.fc1", "pre_logits"), *_dense("head.fc2", "head")],
    prefixes=("opt/target/", "params/"),
    drop={r"opt/.*": "state of the optimiser"},
    fixed={"head": "mlp_tanh"},
    heads=_heads,
)


def _hybrid(base: Layout, stages: bool) -> Layout:
    """The same with a ResNet before the Transformer."""
    return replace(
        base,
        about=f"{base.about}, behind {'a ResNet' if stages else 'the root of a ResNet'}",
        matches=lambda n: is_google_hybrid(n, stages) and base.matches(n),
        rules=[*base.rules, *google_rules(stages)],
    )


HYBRIDS = [_hybrid(base, stages) for base in (GOOGLE, GOOGLE_PRE_LOGITS) for stages in (True, False)]
BIG_VISION = Layout(
    "big_vision",
    "big_vision (SigLIP's image tower, and plain ViTs)",
    settings("siglip", {"interpolation": "bicubic", "crop_mode": "squash"}),
    _is_big_vision,
    _BIG_VISION,
    prefixes=("params/", "img/"),
    prepare=_unstack,
    drop={r"(params/)?(txt/.*|t|b)": "text tower", r"opt/.*": "state of the optimiser"},
    fixed={"pos_prefix": False},
    heads=_heads,
)
