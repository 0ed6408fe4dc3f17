from typing import get_args

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from helpers import bytes_kept, images
from vitral.config import Activation, SwinConfig, ViTConfig
from vitral.models.build import build_backbone
from vitral.models.cost import model_cost, receptive_field, receptive_fields
from vitral.models.init import blank
from vitral.models.swin import SwinStage, SwinTransformer
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import MODELS, create_model, model_spec
from vitral.nn.resnetv2 import pad_same

GOLDEN = {  # parameters, multiply-adds in 10^9
    "vit_tiny_patch16_224": (5_717_416, 1.254),
    "vit_small_patch16_224": (22_050_664, 4.599),
    "vit_base_patch16_224": (86_567_656, 17.564),
    "vit_base_patch16_384": (86_859_496, 55.484),
    "vit_base_patch32_224": (88_224_232, None),
    "vit_large_patch16_224": (304_326_632, 61.555),
    "swin_tiny_patch4_window7_224": (28_288_354, None),
    "swin_base_patch4_window12_384": (87_903_584, None),
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
    model = blank(lambda: build_backbone(config))
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


def test_dilation_and_pooling_widen_the_receptive_field():
    assert receptive_field([(3, 1, 2)]) == 5
    assert receptive_field([(3, 1), (2, 2), (3, 1, 4)]) == 3 + 1 + 2 * 4 * 2
    assert receptive_field([]) == 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stem": "conv", "patch_size": 8},
        {"stem": "conv_deep", "patch_size": 4},
        {"stem": "resnet"},
        {"stem": "resnet", "stem_depths": (2, 1), "patch_size": 16},
    ],
)
def test_a_token_sees_what_the_field_of_its_stem_says(options):
    """By the gradient of one token: the pixels between the first and the last that matter."""
    config = ViTConfig(**({"patch_size": 32, "img_size": 192, "embed_dim": 8, "num_heads": 2, "depth": 1} | options))
    stem = VisionTransformer(config).eval().double().patch_embed
    for module in stem.modules():  # GroupNorm and max look everywhere or at one: replaced by what keeps places
        for name, child in module.named_children():
            if isinstance(child, torch.nn.GroupNorm):
                setattr(module, name, torch.nn.Identity())
            elif type(child).__name__ == "MaxPoolSame":
                setattr(module, name, MeanPoolSame())
            elif isinstance(child, torch.nn.ReLU):
                setattr(module, name, torch.nn.Softplus())
    x = images(1, 3, 192, 192, dtype=torch.float64).requires_grad_()
    (G_h, _), (field) = config.grid, receptive_fields(config)[-1]
    i = G_h // 2
    stem(x).unflatten(1, config.grid)[0, i, i].sum().backward()
    seen = x.grad[0].abs().sum(0).nonzero()
    assert field.stride == config.patch[0]
    first, last = field.start + i * field.stride, field.start + i * field.stride + field.size - 1
    assert seen.amin(0).tolist() == [max(first, 0)] * 2
    assert seen.amax(0).tolist() == [min(last, 191)] * 2


class MeanPoolSame(torch.nn.Module):
    """As the max pool of the hybrids sees, but with the mean, whose gradient reaches every pixel."""

    def forward(self, x):
        return torch.nn.functional.avg_pool2d(pad_same(x, 3, 2), 3, 2)


VARIANTS = [
    {},
    {"stem": "resnet", "patch_size": 32, "img_size": (32, 96)},
    {"stem": "resnet", "patch_size": (16, 8), "img_size": (32, 56), "stem_depths": (1, 2), "patch_bias": False},
    {"reg_tokens": 3, "init_values": 0.1, "head": "mlp"},
    {"class_token": False, "global_pool": "map", "positions": "sincos2d"},
    {"stem": "conv", "patch_size": (2, 4), "img_size": (12, 20), "pre_norm": True},
    {"act": "swiglu", "mlp_ratio": 2, "qkv_bias": False, "patch_bias": False, "positions": "none"},
    {"global_pool": "cls_mean", "pool_layers": 2},
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


# ---- Swin ----

SWIN = {"patch_size": 2, "embed_dim": 12, "depths": (2, 1, 3), "num_heads": (2, 3, 6), "num_classes": 5}


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ((24, 36), {"window_size": 3}),
        ((25, 31), {"window_size": 3, "patch_size": (2, 4), "in_chans": 1}),  # padded to patches, windows and pairs
        ((10, 62), {"window_size": (7, 4, 2), "mlp_ratio": 2.3, "qkv_bias": False}),  # windows larger than the map
        ((1, 1), {"num_classes": 0}),
    ],
)
def test_counts_are_those_of_the_built_swin(size, options):
    config = SwinConfig(img_size=size, **(SWIN | options))
    model, cost = SwinTransformer(config).eval(), model_cost(config)
    assert cost.params == sum(p.numel() for p in model.parameters())
    x = images(1, config.in_chans, *size)
    with (
        FlopCounterMode(display=False) as counter,
        torch.no_grad(),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        maps = model.intermediate(x)
        model.forward_head(maps[-1].flatten(2).mT)
    assert 2 * cost.macs == counter.get_total_flops()
    assert cost.maps == tuple(tuple(m.shape[2:]) for m in maps)
    assert cost.tokens == maps[0][0, 0].numel()
    rows = model.attention(x, [0])[0]  # (1, w, h, n, n)
    assert cost.attention_entries == rows[0, :, 0].numel()


def test_swin_grows_with_the_tokens_and_a_vit_with_their_square():
    def growth(name):
        small, large = (model_cost(model_spec(name, img_size=side).config) for side in (224, 896))
        return large.macs_by_part["attention"] / small.macs_by_part["attention"], large.tokens / small.tokens

    attention, tokens = growth("swin_tiny_patch4_window7_224")
    assert attention == tokens == 16
    attention, tokens = growth("vit_small_patch16_224")
    assert attention == pytest.approx(tokens**2)


@pytest.mark.parametrize("name", ["vit_pico_deepconv_patch8_32", "vit_micro_conv_patch8_32"])
def test_a_convolutional_stem_keeps_what_it_computes(name):
    model = create_model(name, seed=0).train()
    kept = bytes_kept(model, lambda: model(images(1, 3, 32, 32)))
    assert 0.9 < kept / model_cost(model.config).activation_bytes < 1.1


def test_swin_activations_are_about_what_training_keeps():
    """A little more is kept: the maps that were rolled, and the biases."""
    config = SwinConfig(img_size=32, **(SWIN | {"embed_dim": 24, "window_size": 4}))
    model = SwinTransformer(config).train()
    z = model.embed_patches(images(4, 3, 32, 32))

    def run():
        x = z
        for stage in model.layers:
            assert isinstance(stage, SwinStage)
            x = stage(x)

    kept = bytes_kept(model, run)
    assert 0.95 < kept / (4 * model_cost(config).activation_bytes) < 1.25
