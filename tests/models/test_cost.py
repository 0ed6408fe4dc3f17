from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import images
from vitral.config import Activation, ViTConfig
from vitral.models.cost import model_cost, receptive_field
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import MODELS, model_spec

GOLDEN = {  # parameters, multiply-adds in 10^9
    "vit_tiny_patch16_224": (5_717_416, 1.254),
    "vit_small_patch16_224": (22_050_664, 4.599),
    "vit_base_patch16_224": (86_567_656, 17.564),
    "vit_base_patch16_384": (86_859_496, 55.484),
    "vit_base_patch32_224": (88_224_232, None),
    "vit_large_patch16_224": (304_326_632, 61.555),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_parameters_and_multiply_adds(name):
    params, gmacs = GOLDEN[name]
    cost = model_cost(MODELS[name].config)
    assert cost.params == params
    if gmacs is not None:
        assert round(cost.macs / 1e9, 3) == gmacs


def test_golden_tokens():
    assert model_cost(MODELS["vit_base_patch16_224"].config).tokens == 197
    cost = model_cost(MODELS["vit_small_patch8_224.dino"].config)
    assert (cost.grid, cost.patches, cost.tokens, cost.attention_entries) == ((28, 28), 784, 785, 616_225)
    assert model_cost(model_spec("vit_small_patch8_224", img_size=448).config).patches == 3136
    assert cost.attention_bytes == 6 * 616_225 * 4


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_built_model(name):
    config = MODELS[name].config
    with torch.device("meta"):
        model = VisionTransformer(config)
    assert model_cost(config).params == sum(p.numel() for p in model.parameters())


def test_golden_receptive_field():
    assert receptive_field([(3, 1)] * 5) == 11
    for k, L in ((3, 7), (5, 2), (7, 4)):
        assert receptive_field([(k, 1)] * L) == k + (k - 1) * (L - 1)


@pytest.mark.parametrize("layers", [[(3, 1)] * 5, [(3, 2), (3, 2)], [(5, 1), (3, 2), (7, 1)], [(7, 3), (3, 2), (1, 1)]])
def test_the_receptive_field_is_what_gradients_reach(layers):
    x = torch.ones(1, 1, 199, requires_grad=True)
    y = x
    for kernel, stride in layers:
        y = torch.nn.functional.conv1d(y, torch.ones(1, 1, kernel), stride=stride)
    y[0, 0, y.shape[2] // 2].backward()
    assert int((x.grad != 0).sum()) == receptive_field(layers)


VARIANTS = [
    {},
    {"reg_tokens": 3, "init_values": 0.1, "head": "mlp"},
    {"class_token": False, "global_pool": "map", "positions": "sincos2d"},
    {"stem": "conv", "patch_size": (2, 4), "img_size": (12, 20), "pre_norm": True},
    {"act": "swiglu", "mlp_ratio": 2, "qkv_bias": False, "patch_bias": False, "positions": "none"},
    {"global_pool": "cls_mean", "norm_after_pool": True, "block": "post", "num_classes": 0},
]
SHAPE = {"img_size": (6, 20), "patch_size": (2, 5), "embed_dim": 24, "num_heads": 3, "depth": 2, "num_classes": 7}


@pytest.mark.parametrize("options", VARIANTS)
def test_counts_are_those_of_the_built_variant(options):
    config = ViTConfig(**(SHAPE | options))
    model = VisionTransformer(config).eval()
    cost = model_cost(config)
    assert cost.params == sum(p.numel() for p in model.parameters())
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model.forward_head(model.forward_features(images(1, 3, *config.image)))
    assert 2 * cost.macs == counter.get_total_flops()


@pytest.mark.parametrize(
    "options",
    [
        *[{"act": act, "mlp_ratio": 2} for act in get_args(Activation)],
        *[{"init_values": 0.1}, {"block": "post"}, {"reg_tokens": 5}],
    ],
)
def test_activations_are_what_training_keeps_in_the_blocks(options):
    """Counted by autograd itself: every tensor saved for the backward pass, parameters apart, each storage once."""
    config = ViTConfig(**(SHAPE | options))
    model = VisionTransformer(config).train()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept, held = {}, []

    def keep(t):
        held.append(t)  # so that no storage is freed and its address used again
        if t.untyped_storage().data_ptr() not in weights:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    z, _ = model.embed_tokens(images(1, 3, *config.image))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        for block in model.blocks:
            z = block(z)
    small_print = 64 * config.depth * 4  # seeds and offsets of the attention kernel
    assert abs(sum(kept.values()) - model_cost(config).activation_bytes) <= small_print
