"""timm's names, which are ours, and the files of DeiT, DINO, DINOv2 and MAE, which use nearly the same.

DINO: Caron et al., 2021; DINOv2: Oquab et al., 2023, registers: Darcet et al., 2023; MAE: He et al., 2021; DeiT:
Touvron et al., 2020, DeiT III: 2022.
"""

import re

from vitral.config import PositionResize
from vitral.weights.layout import Layout, Names, Rule, has, rule, rules, settings

BODY = [
    "cls_token",
    "reg_token",
    "pos_embed",
    "patch_embed.proj.*",
    "norm_pre.*",
    "blocks.{i}.norm1.*",
    "blocks.{i}.attn.qkv.*",
    "blocks.{i}.attn.proj.*",
    "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2.*",
    "blocks.{i}.mlp.fc1.*",
    "blocks.{i}.mlp.fc2.*",
    "blocks.{i}.ls2.gamma",
    "norm.*",
    "fc_norm.*",
    "attn_pool.latent",
    "attn_pool.q.*",
    "attn_pool.kv.*",
    "attn_pool.proj.*",
    "attn_pool.norm.*",
    "attn_pool.mlp.fc1.*",
    "attn_pool.mlp.fc2.*",
]
OURS = [rule(name, name) for name in BODY]
HEAD = [rule("head.*", "head.*")]
DISTILLED = rules(("reg_token", "dist_token"), ("head.cls.*", "head.*"), ("head.dist.*", "head_dist.*"))
DEIT3 = rules(("blocks.{i}.ls1.gamma", "blocks.{i}.gamma_1"), ("blocks.{i}.ls2.gamma", "blocks.{i}.gamma_2"))
DINOV2 = rules(
    ("reg_token", "register_tokens"),
    ("blocks.{i}.mlp.fc1.*", "blocks.{i}.mlp.w12.*"),
    ("blocks.{i}.mlp.fc2.*", "blocks.{i}.mlp.w3.*"),
    ("head.*", "linear_head.*"),
)
WRAPPED = ("backbone.",)
DINO_HEADS = {
    r"(head|dino_head|ibot_head)\.(mlp|last_layer)\..*": "projection head of the pretraining",
    r"center": "centre of the pretraining",
}
MASK = {"mask_token": "stands for hidden patches in the pretraining alone"}
# What timm does with every table, whoever trained it.
TIMM_RESIZE = PositionResize(mode="bicubic", antialias=True)


def _blocks(names: Names) -> bool:
    return any(re.search(r"(^|\.)blocks\.0\.(\d+\.)?attn\.qkv\.weight$", name) for name in names)


def _join_chunks(names: Names) -> Names:
    """Blocks that were trained in chunks, `blocks.2.17.`, are numbered through within: `blocks.17.`."""
    return {re.sub(r"(^|\.)blocks\.\d+\.(\d+)\.", r"\1blocks.\2.", name): tensor for name, tensor in names.items()}


def _layout(name: str, about: str, family: str, matches, extra: list[Rule] | None = None, **options) -> Layout:  # type: ignore[no-untyped-def]
    extra = extra or []
    taken = {theirs for rule in extra for theirs in rule.theirs}
    table = [*extra, *OURS, *(rule for rule in HEAD if rule.theirs[0] not in taken)]
    return Layout(name, about, settings(family), matches, table, prefixes=WRAPPED, **options)


MAE_FULL = _layout(
    "mae",
    "MAE with its decoder",
    "mae",
    lambda n: _blocks(n) and has(n, "decoder_embed.weight"),
    drop={r"decoder_.*": "decoder of the pretraining", **MASK},
)
DEIT_DISTILLED = _layout(
    "deit",
    "DeiT, distilled",
    "deit",
    lambda n: _blocks(n) and has(n, "dist_token"),
    DISTILLED,
    fixed={"pos_registers": True, "global_pool": "cls_dist", "head": "distilled"},
)
DEIT_III = _layout("deit", "DeiT III", "deit3", lambda n: _blocks(n) and has(n, "blocks.0.gamma_1"), DEIT3)
DINOV2_REG = _layout(
    "dinov2",
    "DINOv2 with registers",
    "dinov2_reg",
    lambda n: _blocks(n) and has(n, "register_tokens"),
    DINOV2,
    prepare=_join_chunks,
    drop={**MASK, **DINO_HEADS},
)
DINOV2_PLAIN = _layout(
    "dinov2",
    "DINOv2",
    "dinov2",
    lambda n: _blocks(n) and (has(n, "mask_token") or any(re.search(r"blocks\.\d+\.\d+\.attn", name) for name in n)),
    DINOV2,
    prepare=_join_chunks,
    drop={**MASK, **DINO_HEADS},
)
OPEN_CLIP_TRUNK = Layout(
    "open_clip",
    "open_clip with a tower of timm's (SigLIP and others)",
    settings("siglip", pos_resize=TIMM_RESIZE),
    lambda n: has(n, "visual.trunk.patch_embed.proj.weight"),
    [*OURS, *HEAD],
    drop={
        r"text\..*|logit_(scale|bias)|(token|positional)_embedding.*|transformer\..*|ln_final.*|text_projection": (
            "text tower"
        )
    },
    prefixes=("visual.trunk.",),
)
DINO = _layout("dino", "DINO", "dino", _blocks, drop=DINO_HEADS)
MAE = _layout("mae", "MAE encoder", "mae", _blocks)
MAE_TUNED = _layout("mae", "MAE, fine-tuned", "mae", lambda n: _blocks(n) and has(n, "fc_norm.weight"))
DEIT = _layout("deit", "DeiT", "deit", _blocks)
TIMM = _layout("timm", "timm", "vit", _blocks)
