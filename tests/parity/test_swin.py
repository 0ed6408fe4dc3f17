"""The same numbers as timm's and Hugging Face's Swin, with every tensor redrawn, from each of the files it is kept in.

At sizes that the windows divide: elsewhere both let real tokens look at padding, which ours do not.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from helpers import difference, images, redraw
from peers import import_timm, import_transformers
from vitral.config import SwinConfig
from vitral.models.init import blank
from vitral.models.swin import PatchMerging, SwinTransformer
from vitral.models.zoo import MODELS, list_models
from vitral.weights.files import open_weights
from vitral.weights.load import load_model
from vitral.weights.save import save_model
from vitral.weights.swin import load_swin, resize_bias, write_names

timm = import_timm()
transformers = import_transformers()

SWINS = {name: MODELS[name].config for name in list_models("swin_*") if MODELS[name].family == "swin"}
LABELS = dict(enumerate(["ant", "bee", "cat", "dog", "elk"]))
SMALL = {"embed_dim": 12, "depths": (2, 3, 2), "num_heads": (2, 3, 6), "window_size": 3, "mlp_ratio": 2.5}


def make_timm(seed=1, **options):
    options = {"img_size": 48, "num_classes": 5, "drop_path_rate": 0.0} | SMALL | options
    return redraw(timm.models.swin_transformer.SwinTransformer(**options), seed)


def make_hf(seed=1, kind="SwinForImageClassification", **options):
    config = transformers.SwinConfig(image_size=48, id2label=LABELS, **(SMALL | options))
    return redraw(getattr(transformers, kind)._from_config(config, attn_implementation="eager"), seed)


def with_weights(theirs, **options):
    """Ours, from timm's state dict as it is."""
    ours = SwinTransformer(SwinConfig(**({"img_size": 48, "num_classes": 5} | SMALL | options))).eval()
    ours.load_state_dict(theirs.state_dict())
    return ours


@torch.no_grad()
def same(ours, theirs, x):
    """Logits, and for Hugging Face the last map, the pooled vector, the pyramid and the attention of each stage."""
    if not hasattr(theirs, "swin"):
        worst = [difference(ours(x), theirs(x))]
        worst.append(difference(ours.forward_features(x), theirs.forward_features(x).flatten(1, 2)))
        pyramid = theirs.forward_intermediates(x, norm=True, intermediates_only=True)
        worst += [difference(a, b) for a, b in zip(ours.intermediate(x), pyramid, strict=True)]
        worst.append(difference(ours.embed(x), theirs.forward_head(theirs.forward_features(x), pre_logits=True)))
    else:
        out = theirs.swin(x, output_attentions=True)
        worst = [difference(ours(x), theirs(x).logits), difference(ours.forward_features(x), out.last_hidden_state)]
        worst.append(difference(ours.embed(x), out.pooler_output))
        deep = theirs.swin(x, output_hidden_states=True, output_hidden_states_before_downsampling=True)
        pyramid = deep.reshaped_hidden_states[1:]
        worst += [difference(a, b) for a, b in zip(ours.intermediate(x, norm=False), pyramid, strict=True)]
        ends = [sum(ours.config.depths[: i + 1]) - 1 for i in range(ours.config.stages)]
        for a, b in zip(ours.attention(x, ends), out.attentions, strict=True):  # that of the last block of each
            worst.append(difference(a.flatten(0, 1), b))
    assert max(worst) < 1e-5, worst
    return True


# ---- timm ----


@pytest.mark.parametrize("name", SWINS)
def test_every_name_means_the_same_in_timm(name):
    with torch.device("meta"):
        theirs = timm.create_model(name)
    ours = blank(lambda: SwinTransformer(SWINS[name]))
    shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
    assert {key: tuple(value.shape) for key, value in ours.state_dict().items()} == shapes
    assert theirs.layers[0].blocks[0].norm1.eps == SWINS[name].norm_eps
    assert theirs.pretrained_cfg["input_size"][1:] == SWINS[name].image


def test_swin_tiny_of_timm():
    theirs = redraw(timm.create_model("swin_tiny_patch4_window7_224"), seed=1)
    ours = SwinTransformer(SWINS["swin_tiny_patch4_window7_224"]).eval()
    ours.load_state_dict(theirs.state_dict())
    assert same(ours, theirs, images(1, 3, 224, 224))


@pytest.mark.parametrize("size", [(48, 48), (96, 48), (48, 144), (96, 144)])
def test_timm_at_sizes_that_windows_divide(size):
    """Where an axis of the last map is one window, and where it is not."""
    theirs = make_timm(img_size=size)
    assert same(with_weights(theirs), theirs, images(2, 3, *size))


@pytest.mark.parametrize(("window", "side"), [(2, 32), (4, 128), ((4, 2, 3), 96)])
def test_timm_with_windows_of_even_side_and_of_different_sides(window, side):
    theirs = make_timm(img_size=side, window_size=window)
    assert same(with_weights(theirs, window_size=window), theirs, images(1, 3, side, side))


def test_a_map_smaller_than_the_window_is_timms_smaller_window_with_the_middle_of_the_table():
    """timm makes smaller tables for smaller maps; ours are of one size, and use of it what occurs."""
    theirs = make_timm(img_size=32, window_size=4)  # maps of 8, 4 and 2
    assert same(with_weights(theirs, window_size=(4, 4, 2)), theirs, images(2, 3, 32, 32))
    ours = redraw(SwinTransformer(SwinConfig(img_size=32, num_classes=5, **(SMALL | {"window_size": 4}))), seed=2)
    tensors = dict(ours.state_dict())
    for name in [name for name in tensors if name.startswith("layers.2.") and name.endswith("bias_table")]:
        tensors[name] = tensors[name].view(7, 7, 6)[2:5, 2:5].reshape(9, 6)
    theirs.load_state_dict(tensors)
    assert same(ours, theirs, images(2, 3, 32, 32))


def test_timm_reads_what_is_written_as_the_authors_write_it(tmp_path):
    """timm converts their files with names and order of its own."""
    ours = redraw(SwinTransformer(SwinConfig(img_size=48, num_classes=5, **SMALL)), seed=2)
    theirs = make_timm()
    official = write_names(ours.state_dict(), "official")
    theirs.load_state_dict(timm.models.swin_transformer.checkpoint_filter_fn({"model": official}, theirs))
    x = images(2, 3, 48, 48)
    assert same(ours, theirs, x)
    torch.save({"model": official}, tmp_path / "swin.pth")
    assert same(load_swin(open_weights(tmp_path / "swin.pth"), "x"), theirs, x)


# ---- Hugging Face ----


@pytest.mark.parametrize(("window", "size"), [(3, (48, 48)), (3, (96, 144)), (4, (64, 64)), (2, (64, 96))])
def test_hugging_face_on_disk_and_in_memory(window, size, tmp_path):
    theirs = make_hf(window_size=window)
    theirs.save_pretrained(tmp_path / "disk")
    x = images(2, 3, *size)
    ours = load_swin(open_weights(tmp_path / "disk"), "disk")
    assert same(ours, theirs, x)
    assert ours.labels == list(LABELS.values())
    assert "Hugging Face's Swin" in ours.load_report.summary()
    (tmp_path / "memory").mkdir()
    save_file(theirs.state_dict(), tmp_path / "memory" / "model.safetensors")
    (tmp_path / "memory" / "config.json").write_text(theirs.config.to_json_string(use_diff=False))
    assert same(load_swin(open_weights(tmp_path / "memory"), "memory"), theirs, x)


@pytest.mark.parametrize("size", [(46, 47), (93, 141)])
def test_an_image_that_the_patch_does_not_divide(size, tmp_path):
    theirs = make_hf()
    theirs.save_pretrained(tmp_path)
    assert same(load_swin(open_weights(tmp_path), "x"), theirs, images(2, 3, *size))


def test_hugging_face_shifts_neither_axis_where_one_is_a_single_window(tmp_path):
    """The one place where its sizes divide and ours differs: timm and we still shift the other axis."""
    theirs = make_hf()
    theirs.save_pretrained(tmp_path)
    ours, x = load_swin(open_weights(tmp_path), "x"), images(2, 3, 48, 96)  # the last map is 3 x 6
    with torch.no_grad():
        assert difference(ours(x), theirs(x).logits) > 1e-4
    for block in ours.layers[2].blocks:
        block.attn.shifted = False
    assert same(ours, theirs, x)


def test_hugging_face_without_a_head_and_with_the_decoder_of_its_pretraining(tmp_path):
    x = images(2, 3, 48, 48)
    for kind in ("SwinModel", "SwinForMaskedImageModeling"):
        theirs = make_hf(kind=kind, encoder_stride=16)
        theirs.save_pretrained(tmp_path / kind)
        ours = load_swin(open_weights(tmp_path / kind), kind)
        assert ours.config.num_classes == 0
        with torch.no_grad():
            out = getattr(theirs, "swin", theirs)(x)
            assert difference(ours.forward_features(x), out.last_hidden_state) < 1e-5
    dropped = {"swin.embeddings.mask_token", "decoder.0.weight", "decoder.0.bias"}
    assert dict(ours.load_report.dropped) == dict.fromkeys(dropped, "of the pretraining alone")


def test_settings_of_config_json(tmp_path):
    theirs = make_hf(hidden_act="gelu_new", qkv_bias=False)
    theirs.save_pretrained(tmp_path)
    document = {"size": 48, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
    ours = load_swin(open_weights(tmp_path), "x")
    assert same(ours, theirs, images(2, 3, 48, 48))
    assert ours.config.act == "gelu_tanh"
    assert not ours.config.qkv_bias
    assert ours.preprocess.mean == (0.1, 0.2, 0.3)
    assert ours.preprocess.interpolation == "bilinear"
    assert ours.preprocess.crop_mode == "squash"
    assert ours.preprocess.img_size == (48, 48)


def test_hugging_face_reads_what_is_written_for_it(tmp_path):
    theirs = make_hf(seed=1)
    theirs.config.save_pretrained(tmp_path)
    ours = redraw(SwinTransformer(SwinConfig(img_size=48, num_classes=5, **SMALL)), seed=2)
    save_file(write_names(ours.state_dict(), "huggingface"), tmp_path / "model.safetensors")
    again = transformers.SwinForImageClassification.from_pretrained(tmp_path, attn_implementation="eager")
    assert same(ours, again.eval(), images(2, 3, 48, 48))


# ---- what save_model writes ----


@pytest.mark.parametrize(("side", "window"), [(48, 3), (48, (4, 2, 3)), (32, 4)])
def test_timm_makes_the_model_from_what_is_written(side, window, tmp_path):
    """At 32 the last map is smaller than the window, and the tables are cut to it."""
    options = SMALL | {"img_size": side, "window_size": window, "num_classes": 5}
    ours = redraw(SwinTransformer(SwinConfig(**options)), seed=2)
    notes = save_model(ours, tmp_path, "timm")
    assert bool(notes) == (side == 32)
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert same(ours, theirs, images(2, 3, side, side))
    again = load_model(tmp_path, quiet=True)
    assert again.config.image == (side, side)
    assert same(again, theirs, images(2, 3, side, side))


@pytest.mark.parametrize("classes", [5, 0])
def test_hugging_face_makes_the_model_from_what_is_written(classes, tmp_path):
    options = SMALL | {"img_size": 48, "num_classes": classes, "act": "gelu_tanh", "norm_eps": 1e-5}
    ours = redraw(SwinTransformer(SwinConfig(**options)), seed=2)
    assert save_model(ours, tmp_path, "huggingface") == []
    kind = transformers.SwinForImageClassification if classes else transformers.SwinModel
    theirs = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    x = images(2, 3, 48, 48)
    with torch.no_grad():
        if classes:
            assert same(ours, theirs, x)
        else:
            assert difference(ours.forward_features(x), theirs(x).last_hidden_state) < 1e-5


# ---- parts ----


@pytest.mark.parametrize("size", [(4, 6), (5, 6), (4, 7), (3, 5), (1, 1)])
@torch.no_grad()
def test_merging_of_odd_maps_too(size):
    from transformers.models.swin.modeling_swin import SwinPatchMerging

    z = images(2, *size, 7)
    ours = redraw(PatchMerging(7, 1e-5))
    for theirs in (timm.models.swin_transformer.PatchMerging(7), SwinPatchMerging(7)):
        theirs.load_state_dict(ours.state_dict())
        their_map = theirs(z) if not isinstance(theirs, SwinPatchMerging) else theirs(z.flatten(1, 2), size)
        assert difference(ours(z).flatten(1, 2), their_map.reshape(2, -1, 14)) < 1e-5


def test_a_table_resized_as_timm_resizes_plain_ones():
    table = images(13 * 13, 3)
    theirs = timm.layers.resize_rel_pos_bias_table_simple(table, (12, 12), (23 * 23, 3))
    assert difference(resize_bias(table, 12), theirs) < 1e-6
    assert torch.equal(resize_bias(table, 7), table)
