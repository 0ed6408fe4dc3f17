import copy

import pytest
import torch
from torch import nn

from helpers import difference, images, redraw
from vitral.config import DetectorConfig, ViTConfig
from vitral.errors import ConfigError, UnknownNameError
from vitral.models.detector import Detector
from vitral.models.lora import LoRALinear, add_lora, count_trainable, lora_parameters, merge_lora
from vitral.models.vit import VisionTransformer

D, DEPTH, CLASSES, RANK = 20, 3, 7, 2


def vit(**options):
    config = {"img_size": 12, "patch_size": 4, "embed_dim": D, "depth": DEPTH, "num_heads": 5, "num_classes": CLASSES}
    return redraw(VisionTransformer(ViTConfig(**config | options)))


def draw_lora(model, seed=1):
    """Give every A and B numbers of the size of A's, so that no zero hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lora_parameters(model).values():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


def lora_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, LoRALinear)]


def test_the_layer_is_its_formula():
    linear, alpha = nn.Linear(5, 3), 7.0
    layer = draw_lora(LoRALinear(linear, RANK, alpha))
    x = images(11, 5)
    y = torch.zeros(11, 3)
    for n in range(11):
        for i in range(3):
            y[n, i] = linear.bias[i]
            for j in range(5):
                y[n, i] += linear.weight[i, j] * x[n, j]
                for r in range(RANK):
                    y[n, i] += alpha / RANK * layer.lora_B[i, r] * layer.lora_A[r, j] * x[n, j]
    assert difference(layer(x), y) < 1e-6
    assert difference(layer.merged()(x), y) < 1e-6
    assert difference(linear(x), y) > 0.1


def test_a_starts_with_variance_one_over_inputs_and_b_at_zero():
    layer = LoRALinear(nn.Linear(400, 30), rank=50, alpha=1.0)
    assert torch.equal(layer.lora_B, torch.zeros(30, 50))
    assert layer.lora_A.var().item() == pytest.approx(1 / 400, rel=0.05)


@torch.no_grad()
def test_the_model_starts_as_it_was():
    x = images(2, 3, 12, 12)
    model = vit()
    before = model(x)
    assert difference(add_lora(model, RANK, 4.0)(x), before) < 1e-6


@pytest.mark.parametrize("parts", ["attn.qkv,attn.proj", "mlp", "attn.qkv, mlp.fc2", "blocks.1", "head,blocks"])
@pytest.mark.parametrize("options", [{}, {"qkv_bias": False, "act": "swiglu"}, {"global_pool": "map", "block": "post"}])
@torch.no_grad()
def test_merged_equals_unmerged(parts, options):
    plain = vit(**options)
    model = draw_lora(add_lora(copy.deepcopy(plain), RANK, 4.0, parts))
    x = images(2, 3, 12, 12)
    before, rows = model(x), model.attention(x, "all", "all")
    assert difference(plain(x), before) > 1e-3
    merged = merge_lora(model)
    assert difference(merged(x), before) < 1e-5
    assert difference(merged.attention(x, "all", "all")[1], rows[1]) < 1e-5
    shapes = {name: (p.shape, p.dtype) for name, p in plain.state_dict().items()}
    assert {name: (p.shape, p.dtype) for name, p in merged.state_dict().items()} == shapes
    assert [type(m) for m in merged.modules()] == [type(m) for m in plain.modules()]
    assert not lora_parameters(merged)
    plain.load_state_dict(merged.state_dict())
    assert difference(plain(x), merged(x)) < 1e-6


@torch.no_grad()
def test_a_fused_rank_of_3r_holds_three_of_rank_r():
    """Separate changes of W_Q, W_K and W_V, written as one A and one B."""
    linear = nn.Linear(D, 3 * D)
    A, B = images(3, RANK, D, seed=2), images(3, D, RANK, seed=3)
    layer = LoRALinear(linear, 3 * RANK, alpha=3.0 * RANK)
    layer.lora_A.copy_(A.flatten(0, 1))
    layer.lora_B.copy_(torch.block_diag(*B))
    separate = torch.cat([linear.weight[i * D : (i + 1) * D] + B[i] @ A[i] for i in range(3)])
    assert difference(layer.merged().weight, separate) < 1e-6


def test_only_lora_and_the_named_parts_learn():
    model = draw_lora(add_lora(vit(), RANK, 4.0))
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(images(4, 3, 12, 12)).square().sum().backward()
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"head.weight", "head.bias", *lora_parameters(model)}
    assert len(lora_parameters(model)) == 2 * 2 * DEPTH


def test_the_number_that_learns():
    model = add_lora(vit(), RANK, 4.0)
    qkv, proj, head = RANK * (D + 3 * D), RANK * (D + D), (D + 1) * CLASSES
    assert count_trainable(model) == DEPTH * (qkv + proj) + head
    assert count_trainable(add_lora(vit(), RANK, 4.0, trained="")) == DEPTH * (qkv + proj)
    assert count_trainable(vit()) == sum(p.numel() for p in vit().parameters())


def test_a_layer_with_lora_is_frozen_even_where_it_is_named():
    model = add_lora(vit(), RANK, 4.0, parts="head", trained="head,norm")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {"head.lora_A", "head.lora_B", "norm.weight", "norm.bias"}


@pytest.mark.parametrize(
    ("parts", "chosen"),
    [
        ("blocks.1", [f"blocks.1.{name}" for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]),
        ("attn.proj", [f"blocks.{i}.attn.proj" for i in range(12)]),
        ("proj", ["attn_pool.proj", *[f"blocks.{i}.attn.proj" for i in range(12)]]),
        ("attn_pool", [f"attn_pool.{name}" for name in ("q", "kv", "proj", "mlp.fc1", "mlp.fc2")]),
    ],
)
def test_words_are_whole_pieces_of_names(parts, chosen):
    model = add_lora(vit(depth=12, global_pool="map"), RANK, 4.0, parts)
    assert sorted(lora_layers(model)) == sorted(chosen)


@torch.no_grad()
def test_any_model_takes_it():
    backbone = ViTConfig(img_size=12, patch_size=4, embed_dim=D, depth=1, num_heads=5, num_classes=0)
    small = {"embed_dim": D, "num_heads": 5, "mlp_width": 7, "encoder_layers": 0, "decoder_layers": 2}
    model = redraw(Detector(DetectorConfig(backbone=backbone, num_classes=3, num_queries=5, **small)))
    draw_lora(add_lora(model, RANK, 4.0, parts="cross_attn.q,cross_attn.v", trained="class_head,box_head"))
    assert len(lora_layers(model)) == 4
    x = images(2, 3, 12, 12)
    before = model(x).boxes
    assert difference(merge_lora(model)(x).boxes, before) < 1e-5


def test_lora_has_the_dtype_of_its_layer():
    model = draw_lora(add_lora(vit().double(), RANK, 4.0))
    assert {p.dtype for p in lora_parameters(model).values()} == {torch.float64}
    assert merge_lora(model).blocks[0].attn.qkv.weight.dtype == torch.float64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parts": "attn.qvk"}, "unknown linear layer for LoRA 'attn.qvk'; did you mean attn.qkv"),
        ({"parts": "attn.qkv,mlp.fc3"}, r"'mlp.fc3'; did you mean mlp.fc\d or mlp.fc\d"),
        ({"parts": "norm1"}, "unknown linear layer for LoRA 'norm1'"),
        ({"trained": "haed"}, "unknown part to train beside LoRA 'haed'; did you mean head"),
    ],
)
def test_an_unknown_part_names_the_nearest(arguments, message):
    model = vit()
    with pytest.raises(UnknownNameError, match=message):
        add_lora(model, RANK, 4.0, **arguments)
    assert all(p.requires_grad for p in model.parameters())
    assert not lora_layers(model)


@pytest.mark.parametrize(
    ("rank", "alpha", "message"),
    [
        (0, 1.0, "rank of LoRA must be a whole number of at least 1, got 0"),
        (2.5, 1.0, "rank of LoRA must be a whole number of at least 1, got 2.5"),
        (4, 0.0, "alpha of LoRA must be above 0, got 0.0"),
        (4, float("nan"), "alpha of LoRA must be above 0, got nan"),
    ],
)
def test_numbers_that_cannot_be(rank, alpha, message):
    with pytest.raises(ConfigError, match=message):
        add_lora(vit(), rank, alpha)


def test_lora_is_not_put_on_twice():
    model = add_lora(vit(), RANK, 4.0)
    with pytest.raises(ConfigError, match="has LoRA already; fold it in with merge_lora"):
        add_lora(model, RANK, 4.0)
    assert len(lora_layers(add_lora(merge_lora(model), RANK, 4.0))) == 2 * DEPTH
