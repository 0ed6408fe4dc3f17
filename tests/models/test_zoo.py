import pytest
import torch

import vitral
from helpers import difference, images
from vitral.config import Preprocess
from vitral.errors import ConfigError, UnknownNameError
from vitral.models.build import build_backbone
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import FAMILIES, MODELS, SIZES, create_model, is_model, list_models, model_spec


def test_patterns_choose_names():
    assert "vit_tiny_patch16_224" in list_models()
    assert list_models("deit_*") == [
        "deit_base_patch16_224",
        "deit_base_patch16_384",
        "deit_small_patch16_224",
        "deit_tiny_patch16_224",
    ]
    assert list_models("nothing*") == []
    assert vitral.list_models("deit_*") == list_models("deit_*")


def test_every_size_and_family_is_used():
    assert {spec.family for spec in MODELS.values()} == set(FAMILIES)
    for size in SIZES:
        assert list_models(f"*_{size}_*"), size


@pytest.mark.parametrize("name", MODELS)
def test_every_model_can_be_built_and_says_how_to_prepare_its_images(name):
    spec = MODELS[name]
    with torch.device("meta"):
        model = build_backbone(spec.config)
        x = torch.empty(2, spec.config.in_chans, *spec.config.image)
        y = model(x)
    assert y.shape == (2, spec.config.num_classes or spec.config.pooled_dim)
    assert spec.preprocess.img_size == spec.config.image
    assert len(spec.preprocess.mean) == spec.config.in_chans


def test_options_are_put_over_the_named_model():
    model = create_model("vit_small_patch16_224", num_classes=10, img_size=96, in_chans=1, depth=2)
    assert model(images(2, 1, 96, 96)).shape == (2, 10)
    assert model.config.grid == (6, 6)
    assert model.config.embed_dim == 384
    assert model.preprocess == Preprocess(img_size=96, mean=(0.5,), std=(0.5,))
    assert model.labels is None


def test_a_model_of_another_family_keeps_its_settings():
    clip = model_spec("vit_base_patch32_clip_quickgelu_224").config
    assert (clip.pre_norm, clip.patch_bias, clip.act, clip.norm_eps) == (True, False, "quick_gelu", 1e-5)
    siglip = model_spec("vit_base_patch16_siglip_224").config
    assert (siglip.class_token, siglip.global_pool, siglip.act) == (False, "map", "gelu_tanh")
    dinov2, registers = (model_spec(f"vit_small_patch14_{n}dinov2").config for n in ("", "reg4_"))
    assert (dinov2.pos_resize.offset, dinov2.pos_resize.antialias, dinov2.pos_rows) == (0.1, False, 1)
    assert (registers.pos_resize.offset, registers.pos_resize.antialias, registers.pos_rows) == (0.0, True, 0)


IN = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
SETTINGS = {  # eps, activation, mean and std, resize, crop, position resize, rows for [CLS]
    "vit_base_patch16_224": (1e-6, "gelu", HALF, "bicubic", "center", 0.9, ("bicubic", True, 0.0), 1),
    "vit_base_patch16_224.augreg_in21k": (1e-6, "gelu", HALF, "bicubic", "center", 0.9, ("bicubic", True, 0.0), 1),
    "vit_base_patch16_384": (1e-6, "gelu", HALF, "bicubic", "center", 1.0, ("bicubic", True, 0.0), 1),
    "deit_base_patch16_224": (1e-6, "gelu", IN, "bicubic", "center", 0.875, ("bicubic", False, 0.0), 1),
    "deit3_base_patch16_224": (1e-6, "gelu", IN, "bicubic", "center", 0.875, ("bicubic", False, 0.0), 0),
    "vit_small_patch8_224.dino": (1e-6, "gelu", IN, "bicubic", "center", 0.875, ("bicubic", False, 0.1), 1),
    "vit_base_patch16_224.mae": (1e-6, "gelu", IN, "bicubic", "center", 0.875, ("bicubic", False, 0.0), 1),
    "vit_base_patch14_dinov2": (1e-6, "gelu", IN, "bicubic", "center", 0.875, ("bicubic", False, 0.1), 1),
    "vit_giant_patch14_dinov2": (1e-6, "swiglu", IN, "bicubic", "center", 0.875, ("bicubic", False, 0.1), 1),
    "vit_base_patch14_reg4_dinov2": (1e-6, "gelu", IN, "bicubic", "center", 0.875, ("bicubic", True, 0.0), 0),
    "vit_base_patch16_clip_224": (1e-5, "gelu", CLIP, "bicubic", "center", 1.0, ("bicubic", True, 0.0), 1),
    "vit_base_patch16_clip_quickgelu_224": (
        1e-5,
        "quick_gelu",
        CLIP,
        "bicubic",
        "center",
        1.0,
        ("bicubic", True, 0.0),
        1,
    ),
    "vit_base_patch16_siglip_224": (
        1e-6,
        "gelu_tanh",
        HALF,
        "bicubic",
        "squash",
        0.9,
        ("bilinear_corners", False, 0.0),
        0,
    ),
    "vit_lite_patch4_32": (1e-6, "gelu", HALF, "bicubic", "squash", 0.9, ("bicubic", True, 0.0), 1),
}


def test_the_settings_cover_every_family():
    assert {MODELS[name].family for name in SETTINGS} == set(FAMILIES) - {"swin", "resnet"}


@pytest.mark.parametrize(
    ("name", "crop"), [("swin_tiny_patch4_window7_224", 0.9), ("swin_base_patch4_window12_384", 1)]
)
def test_settings_of_swin(name, crop):
    c, p = MODELS[name].config, MODELS[name].preprocess
    assert (c.norm_eps, c.act, c.mlp_ratio) == (1e-5, "gelu", 4)
    assert p == Preprocess(img_size=c.image, crop_pct=crop)


def test_a_swin_by_its_name():
    assert "swin_tiny_patch4_window7_224" in list_models("swin*")
    a, b = (create_model("swin_micro_patch2_window4_32", seed=3, num_classes=7, img_size=(20, 27)) for _ in range(2))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert a(images(2, 3, 20, 27)).shape == (2, 7)
    assert a.preprocess.img_size == (20, 27)
    with pytest.raises(UnknownNameError, match="unknown option 'depth'; did you mean depths"):
        create_model("swin_micro_patch2_window4_32", depth=3)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_families(name):
    c, p = MODELS[name].config, MODELS[name].preprocess
    resize = (c.pos_resize.mode, c.pos_resize.antialias, c.pos_resize.offset)
    mean_std = (p.mean, p.std)
    found = (c.norm_eps, c.act, mean_std, p.interpolation, p.crop_mode, p.crop_pct, resize, c.pos_rows)
    assert found == SETTINGS[name]


@pytest.mark.parametrize("seed", ["a", 1.5, -1, 2**70])
def test_a_seed_that_is_none_is_an_error(seed):
    with pytest.raises(ConfigError, match="seed must be a whole number from 0"):
        create_model("vit_nano_patch2_8", seed=seed)


def test_unknown_names_and_options_offer_the_nearest():
    with pytest.raises(
        UnknownNameError, match="unknown model 'vit_smal_patch16_224'; did you mean vit_small_patch16_224"
    ):
        create_model("vit_smal_patch16_224")
    with pytest.raises(UnknownNameError, match="unknown option 'num_class'; did you mean num_classes"):
        create_model("vit_tiny_patch16_224", num_class=3)
    with pytest.raises(ConfigError, match="depth must be a whole number of at least 1, got -1"):
        create_model("vit_tiny_patch16_224", depth=-1)


class TestStartingWeights:
    NAME = "vit_nano_patch2_8"

    def test_a_seed_gives_the_same_weights_and_leaves_torch_alone(self):
        state = torch.get_rng_state()
        a, b, c = (create_model(self.NAME, seed=seed) for seed in (1, 1, 2))
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in a.state_dict().items():
            assert torch.equal(value, b.state_dict()[name]), name
        assert not torch.equal(a.head.weight, c.head.weight)

    def test_without_a_seed_torch_decides(self):
        torch.manual_seed(5)
        a = create_model(self.NAME)
        torch.manual_seed(5)
        b = create_model(self.NAME)
        c = create_model(self.NAME)
        assert torch.equal(a.head.weight, b.head.weight)
        assert not torch.equal(b.head.weight, c.head.weight)

    @pytest.mark.parametrize(
        "name", ["vit_micro_conv_patch4_28", "vit_base_patch16_siglip_224", "deit3_small_patch16_224"]
    )
    def test_every_parameter_is_drawn(self, name):
        """Built without memory first: a parameter that were forgotten would hold whatever lay there."""
        import unittest.mock

        options = {"depth": 2, "embed_dim": 64, "num_heads": 4, "seed": 0}
        with unittest.mock.patch.object(VisionTransformer, "to_empty", _to_nan):
            model = create_model(name, **options)
        for key, value in model.state_dict().items():
            assert value.isfinite().all(), key

    def test_the_distributions_are_timms(self):
        model = create_model("vit_small_patch14_reg4_dinov2", depth=2, seed=0)
        qkv, pos = model.blocks[0].attn.qkv, model.pos_embed
        assert qkv.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert pos.std().item() == pytest.approx(0.02, rel=0.02)
        assert not qkv.bias.any()
        assert model.cls_token.std().item() == pytest.approx(1e-6, rel=0.2)
        assert model.reg_token.std().item() == pytest.approx(1e-6, rel=0.2)
        assert torch.equal(model.blocks[1].ls2.gamma, torch.full((384,), 1e-5))
        bound = (3 * 14 * 14) ** -0.5
        assert model.patch_embed.proj.weight.abs().max() <= bound
        assert model.patch_embed.proj.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
        assert 0.5 * bound < model.patch_embed.proj.bias.abs().max() <= bound
        assert difference(model.blocks[0].attn.qkv.weight, model.blocks[1].attn.qkv.weight) > 0.1

    @pytest.mark.parametrize("head", ["linear", "mlp"])
    def test_a_zero_head_gives_even_outputs(self, head):
        model = create_model(self.NAME, head=head, zero_head=True)
        assert not model(images(3, 1, 8, 8)).any()
        assert create_model(self.NAME, head=head)(images(3, 1, 8, 8)).any()


def _to_nan(model, *, device):
    torch.nn.Module.to_empty(model, device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    return model


def test_options_may_stand_behind_a_name():
    spec = model_spec("vit_nano_patch2_8+block=post+positions=sincos2d+reg_tokens=4+mlp_ratio=2.5+class_token=true")
    plain = model_spec(
        "vit_nano_patch2_8", block="post", positions="sincos2d", reg_tokens=4, mlp_ratio=2.5, class_token=True
    )
    assert spec == plain
    assert model_spec("vit_nano_patch2_8+reg_tokens=4", reg_tokens=2).config.reg_tokens == 2
    assert is_model("vit_nano_patch2_8+block=post")
    assert not is_model("vit_nanu_patch2_8+block=post")
    with pytest.raises(ConfigError, match=r"'post' in vit_nano_patch2_8\+post is no option; write them as in"):
        model_spec("vit_nano_patch2_8+post")
    with pytest.raises(UnknownNameError, match="did you mean block"):
        model_spec("vit_nano_patch2_8+blok=post")
    with pytest.raises(UnknownNameError, match="did you mean vit_nano_patch2_8"):
        model_spec("vit_nanu_patch2_8+block=post")
