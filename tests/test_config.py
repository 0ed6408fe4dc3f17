import dataclasses
import json

import numpy as np
import pytest

from vitral.config import PositionResize, Preprocess, ViTConfig, pair
from vitral.errors import ConfigError, UnknownNameError, VitralError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"embed_dim": 100, "num_heads": 7},
            r"num_heads must divide embed_dim \(100\), got 7; the nearest that do: 5 and 10",
        ),
        (
            {"embed_dim": 8, "num_heads": 9},
            r"num_heads must divide embed_dim \(8\), got 9; the nearest that do: 8\.",
        ),
        ({"depth": -1}, "depth must be a whole number of at least 1, got -1"),
        ({"depth": 2.5}, "depth must be a whole number of at least 1, got 2.5"),
        ({"in_chans": 0}, "in_chans must be a whole number of at least 1, got 0"),
        ({"num_classes": -3}, "num_classes must be a whole number of at least 0, got -3"),
        ({"img_size": 225}, r"img_size must be a multiple of patch_size \(16\), got 225; the nearest are 224 and 240"),
        ({"img_size": (224, 7)}, r"img_size must be a multiple of patch_size \(16\), got 7; the nearest is 16"),
        ({"img_size": (1, 2, 3)}, r"img_size must be a positive whole number or two of them .*, got \(1, 2, 3\)"),
        ({"patch_size": 0}, "patch_size must be a positive whole number or two of them .*, got 0"),
        ({"patch_size": "16"}, "patch_size must be a positive whole number or two of them .*, got '16'"),
        ({"drop_rate": 1.0}, "drop_rate must be a number from 0 to below 1, got 1.0"),
        ({"drop_path_rate": -0.1}, "drop_path_rate must be a number from 0 to below 1, got -0.1"),
        ({"global_pool": "avg"}, "global_pool must be one of cls, mean, .*, got 'avg'; timm's 'avg' is 'mean' here"),
        ({"positions": "rope"}, "positions must be one of learned, .*, got 'rope'"),
        ({"class_token": False}, r"global_pool cls reads the \[CLS\] token, but class_token is off; use mean"),
        (
            {"embed_dim": 6, "num_heads": 1, "positions": "sincos2d"},
            "sincos2d need embed_dim to be a multiple of 4, got 6",
        ),
        ({"embed_dim": 5, "num_heads": 1, "act": "swiglu", "mlp_ratio": 1}, "must be even, got 5"),
        ({"embed_dim": 5, "num_heads": 1, "mlp_ratio": 0}, r"embed_dim \* mlp_ratio must be at least 1, got 5 \* 0"),
        ({"qkv_bias": "no"}, "qkv_bias must be True or False, got 'no'"),
        ({"class_token": 1}, "class_token must be True or False, got 1"),
        ({"init_values": "x"}, "init_values must be a number of at least 0, got 'x'"),
        ({"init_values": float("nan")}, "init_values must be a number of at least 0, got nan"),
        ({"pos_resize": "bilinear"}, r"pos_resize must be a PositionResize\(\.\.\.\), got 'bilinear'"),
        ({"stem": "conv", "patch_size": 14}, "patch_size must be a power of 2, got 14x14"),
    ],
)
def test_what_cannot_be_is_one_clear_sentence(options, message):
    with pytest.raises(ConfigError, match=message) as error:
        ViTConfig(**options)
    assert "\n" not in str(error.value)
    assert isinstance(error.value, VitralError)
    assert isinstance(error.value, ValueError)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(UnknownNameError, match="unknown option 'embed_dims'; did you mean embed_dim"):
        ViTConfig.from_dict({"embed_dims": 3})


@pytest.mark.parametrize(
    ("option", "hint"),
    [("pretrained", "create_model gives fresh weights"), ("no_embed_class", "is pos_prefix=False here")],
)
def test_a_word_of_timms_is_translated(option, hint):
    with pytest.raises(UnknownNameError, match=hint):
        ViTConfig.from_dict({option: True})


def test_numbers_of_numpy_are_numbers():
    config = ViTConfig(depth=np.int64(3), img_size=np.int32(32), init_values=np.float32(0.5))
    assert json.loads(json.dumps(config.to_dict()))["depth"] == 3


def test_a_config_survives_json():
    config = ViTConfig(img_size=(32, 48), pos_resize=PositionResize(mode="bilinear", offset=0.1), init_values=1e-5)
    assert ViTConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    preprocess = Preprocess(img_size=(32, 48), crop_mode="squash")
    assert Preprocess.from_dict(json.loads(json.dumps(preprocess.to_dict()))) == preprocess


def test_a_config_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ViTConfig().depth = 3


def test_sizes_are_height_and_width():
    assert ViTConfig(img_size=32, patch_size=(8, 16)).grid == (4, 2)
    assert pair((3, 5)) == (3, 5)
    assert pair(3) == (3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "one number per channel each, got 1 and 3"),
        ({"std": (0.5, 0.0, 0.5)}, r"std must be above 0 in every channel, got \(0.5, 0.0, 0.5\)"),
        ({"crop_pct": 1.5}, "crop_pct must be above 0 and at most 1, got 1.5"),
        ({"interpolation": "nearest"}, "interpolation must be one of bilinear, bicubic, got 'nearest'"),
    ],
)
def test_preprocessing_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        Preprocess(**options)


def test_preprocessing_follows_the_number_of_channels():
    rgb = Preprocess(mean=(0.1, 0.2, 0.6), std=(0.2, 0.3, 0.4))
    assert rgb.for_channels(3) is rgb
    assert rgb.for_channels(1).mean == pytest.approx((0.3,))
    assert rgb.for_channels(5).mean == (0.1, 0.2, 0.6, 0.1, 0.2)
    assert rgb.for_channels(5).std == (0.2, 0.3, 0.4, 0.2, 0.3)


def test_every_option_says_what_it_is():
    """The line under each field becomes the help of its flag."""
    import ast
    import inspect

    from vitral import config

    for node in ast.parse(inspect.getsource(config)).body:
        if isinstance(node, ast.ClassDef) and node.name != "Options":
            fields = [i for i, item in enumerate(node.body) if isinstance(item, ast.AnnAssign)]
            for i in fields:
                after = node.body[i + 1]
                said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                assert said, f"{node.name}.{ast.unparse(node.body[i])} has no description"
