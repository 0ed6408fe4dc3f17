"""What is told of a file, what is done to its tensors on the way, and what is refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from helpers import difference, images, redraw
from vitral import create_model, load_model, save_model
from vitral.cli.main import main
from vitral.config import PositionResize
from vitral.data.transforms import resized_size
from vitral.errors import CheckpointError, ConfigError, UnknownNameError
from vitral.nn.patches import patchify
from vitral.weights.adapt import adapt_channels, resize_patches
from vitral.weights.inspect import inspect_weights
from vitral.weights.load import with_stochastic_depth

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "img_size": 64, "num_classes": 7}


def small(name="vit_tiny_patch16_224", **options):
    return redraw(create_model(name, **{**SMALL, **options}), seed=1)


@pytest.fixture
def file(tmp_path):
    """A timm file of a small ViT."""
    model = small()
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    return tmp_path / "vit.safetensors"


def load(path, **options):
    return load_model(path, quiet=True, num_heads=3, **options)


class TestReport:
    def test_it_accounts_for_every_tensor_and_setting(self, file):
        report = load(file).load_report
        assert sorted(report.matched) == sorted(load_file(file))
        assert report.renamed == report.dropped == report.missing == report.unexpected == []
        settings = {option: (value, reason) for option, value, reason in report.settings}
        assert settings["num_heads"] == ("3", "as asked")
        assert settings["act"][0] == "gelu"
        assert settings["pos_resize"][0] == "bicubic, antialiased"
        assert {"mean", "std", "interpolation", "crop_mode", "crop_pct", "norm_eps"} <= settings.keys()
        assert "told by timm's names" in report.summary()
        assert json.loads(json.dumps(report.to_dict()))["matched"] == report.matched

    def test_it_is_said_in_a_line_unless_quiet(self, file, capsys):
        load_model(file, num_heads=3)
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"{len(load_file(file))} matched" in said
        load(file)
        assert capsys.readouterr().err == ""

    def test_as_a_table(self, file):
        text = str(load(file, num_classes=3, img_size=96).load_report)
        assert re.search(r"^resized +pos_embed", text, re.MULTILINE)
        assert "1x17x48 -> 1x37x48, bicubic, antialiased" in text
        assert "3 classes are asked for, the file has 7" in text
        assert "head.weight" in text


class TestAdaptation:
    def test_another_number_of_classes_gets_a_new_head(self, file):
        model = load(file, num_classes=4)
        assert model.head.weight.shape == (4, 48)
        assert model.head.weight.abs().max() < 0.2
        assert [name for name, _ in model.load_report.created] == ["head.weight", "head.bias"]
        x = images(2, 3, 64, 64)
        assert torch.equal(model.embed(x), load(file).embed(x))
        bare = load(file, num_classes=0)
        assert torch.equal(bare(x), load(file).embed(x))

    def test_the_same_number_keeps_the_head(self, file):
        assert torch.equal(load(file, num_classes=7).head.weight, load(file).head.weight)

    def test_another_size_gives_what_the_model_computes_at_that_size(self, file):
        x = images(2, 3, 96, 128)
        resized = load(file, img_size=(96, 128))
        assert resized.config.image == (96, 128)
        assert resized.preprocess.img_size == (96, 128)
        assert difference(resized(x), load(file)(x)) < 1e-6

    @pytest.mark.parametrize("channels", [1, 6, 12])
    def test_other_channels_see_grey_as_before(self, file, channels):
        grey = images(2, 1, 64, 64)
        model = load(file, in_chans=channels)
        expected = load(file)(grey.expand(-1, 3, -1, -1))
        assert difference(model(grey.expand(-1, channels, -1, -1)), expected) < 1e-5
        assert len(model.preprocess.mean) == len(model.preprocess.std) == channels

    def test_channels_as_timm_does_it(self):
        from peers import import_timm

        import_timm()
        from timm.models._manipulate import adapt_input_conv

        weight = images(5, 3, 4, 4)
        for channels in (1, 2, 4, 7):
            assert difference(adapt_channels(weight, channels), adapt_input_conv(channels, weight.clone())) < 1e-6

    def test_another_patch_size(self, file):
        model = load(file, patch_size=32)
        assert model.config.patch == (32, 32)
        assert model.config.grid == (2, 2)
        # an image that was enlarged twice gives nearly the tokens of the small one
        weight = load(file).patch_embed.proj.weight
        small_patch = images(4, 3, 16, 16)
        large = F.interpolate(small_patch, size=(32, 32), mode="bicubic", antialias=True)
        before = torch.einsum("dchw,bchw->bd", weight, small_patch)
        after = torch.einsum("dchw,bchw->bd", model.patch_embed.proj.weight, large)
        assert difference(after, before) < 1e-3

    def test_patches_as_timm_does_it(self):
        from peers import import_timm

        import_timm()
        from timm.layers.patch_embed import resample_patch_embed

        weight = images(5, 3, 16, 16)
        for patch in ((8, 8), (32, 32), (14, 20)):
            assert difference(resize_patches(weight, patch), resample_patch_embed(weight, list(patch))) < 1e-4

    def test_a_size_that_the_patch_does_not_divide(self, file):
        with pytest.raises(ConfigError, match=r"img_size must be a multiple of patch_size \(16\), got 100"):
            load(file, img_size=100)

    def test_a_run_is_adapted_too(self, tmp_path):
        model = small()
        model.labels = list("abcdefg")
        save_model(model, tmp_path / "run", "vitral")
        adapted = load_model(tmp_path / "run", num_classes=3, img_size=96, in_chans=1)
        assert adapted.config.num_classes == 3
        assert adapted(images(1, 1, 96, 96)).shape == (1, 3)
        assert adapted.labels is None

    def test_stochastic_depth_leaves_the_weights(self, file):
        model = load(file)
        again = with_stochastic_depth(model, 0.3)
        x = images(2, 3, 64, 64)
        assert again.config.drop_path_rate == 0.3
        assert torch.equal(again.eval()(x), model(x))


class TestTelling:
    def test_the_family_of_files_with_the_same_names(self, tmp_path):
        headless = small(num_classes=0).state_dict()
        headed = small().state_dict()
        for content, about in (
            (headless, "DINO"),
            ({"model": headless}, "MAE encoder"),
            ({"model": headed}, "DeiT"),
            (headed, "timm"),
        ):
            torch.save(content, tmp_path / "x.pth")
            assert load(tmp_path / "x.pth").load_report.layout.startswith(about), about

    def test_a_family_can_be_asked_for(self, tmp_path):
        torch.save(small().state_dict(), tmp_path / "x.pth")
        model = load(tmp_path / "x.pth", family="dino")
        assert model.config.pos_resize == PositionResize(antialias=False, offset=0.1)
        assert model.preprocess.mean == (0.485, 0.456, 0.406)
        with pytest.raises(UnknownNameError, match=r"unknown family 'dinno'; did you mean dino"):
            load(tmp_path / "x.pth", family="dinno")

    def test_heads_by_the_usual_number(self, tmp_path):
        save_file(create_model("vit_tiny_patch16_224", depth=1).state_dict(), tmp_path / "x.safetensors")
        model = load_model(tmp_path / "x.safetensors", quiet=True)
        assert model.config.num_heads == 3
        assert ("num_heads", "3", "the usual number for a width of 192") in model.load_report.settings

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
    def test_wrappers_are_taken_off(self, tmp_path, prefix):
        model = small()
        save_file({prefix + k: v for k, v in model.state_dict().items()}, tmp_path / "x.safetensors")
        x = images(1, 3, 64, 64)
        assert difference(load(tmp_path / "x.safetensors")(x), model(x)) < 1e-6

    def test_a_grid_that_is_not_square_must_be_said(self, tmp_path):
        model = small(img_size=(32, 96))
        save_file(model.state_dict(), tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match=r"13 positions, which fill no square grid; say .* native_size"):
            load(tmp_path / "x.safetensors")
        x = images(1, 3, 32, 96)
        assert difference(load(tmp_path / "x.safetensors", img_size=(32, 96))(x), model(x)) < 1e-6

    @pytest.mark.parametrize(
        ("name", "what"),
        [
            ("backbone.layers.0.blocks.0.attn.relative_position_bias_table", "a model around Swin, or Swin V2"),
            ("query_embed.weight", "a DETR detector"),
            ("storage_tokens", "a DINOv3 model"),
            ("to_patch_embedding.1.weight", "a model of vit-pytorch"),
            ("encoder.patch_embed.backbone.stem.conv.weight", "a hybrid: a ViT on top of a ResNet stem"),
            ("image_encoder.layers.0.blocks.0.conv1.c.weight", "TinyViT"),
            ("layer1.0.conv1.weight", "a convolutional network"),
        ],
    )
    def test_what_is_not_a_plain_vit(self, tmp_path, name, what):
        save_file({name: torch.zeros(2, 2), "other": torch.zeros(1)}, tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match=f"not a plain ViT: it looks like {what}.*{name}"):
            load_model(tmp_path / "x.safetensors")

    def test_what_nobody_knows(self, tmp_path):
        save_file({"a.b": torch.zeros(2), "c": torch.zeros(2)}, tmp_path / "x.safetensors")
        with pytest.raises(
            CheckpointError, match=r"not a plain ViT of a layout that vitral knows: 2 tensors, the first: a.b, c"
        ):
            load_model(tmp_path / "x.safetensors")


class TestGaps:
    def test_missing_and_left_over_are_errors_unless_named(self, file):
        tensors = load_file(file)
        del tensors["blocks.1.norm2.bias"]
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"lacks blocks.1.norm2.bias; .*allow=\['blocks.1.norm2.bias'\]"):
            load(file)
        assert load(file, allow=["blocks.*.norm2.bias"]).load_report.missing == ["blocks.1.norm2.bias"]
        tensors["blocks.1.norm2.bias"] = tensors["blocks.1.norm1.bias"].clone()
        save_file(tensors | {"blocks.1.adapter.weight": torch.zeros(2)}, file)
        with pytest.raises(CheckpointError, match=r"has, beyond what a ViT needs, blocks.1.adapter.weight"):
            load(file)
        assert load(file, allow=["*adapter*"]).load_report.unexpected == ["blocks.1.adapter.weight"]

    def test_shapes_that_do_not_fit(self, file):
        tensors = load_file(file)
        tensors["blocks.1.mlp.fc1.weight"] = torch.zeros(95, 48)
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"blocks.1.mlp.fc1.weight has shape \(95, 48\), but .* \(96, 48\)"):
            load(file)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_numbers_that_are_none(self, file, bad):
        tensors = load_file(file)
        tensors["blocks.2.attn.proj.bias"][3] = bad
        save_file(tensors, file)
        with pytest.raises(CheckpointError, match=r"blocks.2.attn.proj.bias holds NaN or infinite numbers"):
            load(file)

    def test_whole_numbers_are_no_weights(self, file):
        save_file(load_file(file) | {"norm.weight": torch.ones(48, dtype=torch.int32)}, file)
        with pytest.raises(CheckpointError, match=r"norm.weight is torch.int32, but weights are floating point"):
            load(file)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_other_floating_point_is_converted_and_said(self, file, dtype):
        expected = {k: v.to(dtype).float() for k, v in load_file(file).items()}
        save_file({k: v.to(dtype) for k, v in load_file(file).items()}, file)
        model = load(file)
        assert all(torch.equal(expected[k], v) for k, v in model.state_dict().items())
        assert f"{dtype} converted to float32".replace("torch.", "") in model.load_report.notes


class TestRoundTrips:
    FAMILIES = (
        ("vit_tiny_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_small_patch14_reg4_dinov2", {"img_size": 112, "num_classes": 0}),
        ("vit_base_patch16_clip_quickgelu_224", {}),
        ("vit_base_patch16_siglip_224", {"num_classes": 0}),
        (
            "vit_tiny_patch16_224",
            {"head": "distilled", "global_pool": "cls_dist", "reg_tokens": 1, "pos_registers": True},
        ),
        ("vit_micro_conv_patch8_32", {}),
    )

    @pytest.mark.parametrize(("name", "options"), FAMILIES)
    def test_vitral_keeps_everything(self, tmp_path, name, options):
        model = small(name, **options)
        model.labels = [f"n{i}" for i in range(7)] if model.config.num_classes else None
        save_model(model, tmp_path / "m", "vitral")
        again = load_model(tmp_path / "m")
        assert again.config == model.config
        assert again.preprocess == model.preprocess
        assert again.labels == model.labels
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())

    @pytest.mark.parametrize(("name", "options"), FAMILIES[:6])
    def test_timm(self, tmp_path, name, options):
        model = small(name, **options)
        save_model(model, tmp_path / "m", "timm")
        again = load_model(tmp_path / "m", quiet=True)
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
        x = images(1, 3, *model.config.image)
        assert difference(again.embed(x), model.embed(x)) < 1e-6

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("vit_tiny_patch16_224", {}),
            ("vit_tiny_patch16_224", {"num_classes": 0}),
            ("vit_small_patch14_dinov2", {"img_size": 112, "global_pool": "cls_mean"}),
            ("vit_small_patch14_dinov2", {"img_size": 112, "num_classes": 0}),
            ("vit_small_patch14_reg4_dinov2", {"img_size": 112, "num_classes": 0, "pos_prefix": True}),
            ("vit_base_patch16_siglip_224", {"num_classes": 0}),
            FAMILIES[5],
        ],
    )
    def test_hugging_face(self, tmp_path, name, options):
        model = small(name, **options)
        save_model(model, tmp_path / "m", "huggingface")
        again = load_model(tmp_path / "m", quiet=True)
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
        assert again.config.num_heads == 3
        assert again.config.norm_eps == model.config.norm_eps
        assert again.config.act == model.config.act
        sizes = [resized_size((300, 401), p) for p in (again.preprocess, model.preprocess)]
        assert sizes[0] == sizes[1]
        assert replace(again.preprocess, crop_pct=1) == replace(model.preprocess, crop_pct=1)

    @pytest.mark.parametrize("head", ["linear", "mlp_tanh"])
    def test_google(self, tmp_path, head):
        model = small(head=head)
        notes = save_model(model, tmp_path / "vit.npz", "google")
        assert notes == ["Google's own code would run these weights with GELU by tanh, this model uses gelu"]
        again = load_model(tmp_path / "vit.npz", quiet=True)
        assert again.config.act == "gelu_tanh"
        assert all(torch.equal(v, again.state_dict()[k]) for k, v in model.state_dict().items())
        assert not list(tmp_path.glob(".*"))

    def test_what_cannot_be_folded_back_is_said(self, tmp_path):
        model = small("vit_small_patch14_reg4_dinov2", img_size=112, num_classes=0, pos_prefix=True)
        (note,) = [note for note in save_model(model, tmp_path / "m", "timm") if "cls_token" in note]
        assert "cannot be parted" in note
        x = images(1, 3, 112, 112)
        assert difference(load_model(tmp_path / "m", quiet=True).embed(x), model.embed(x)) < 1e-5

    def test_labels_travel(self, tmp_path):
        model = small()
        model.labels = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
        for layout in ("vitral", "timm", "huggingface"):
            save_model(model, tmp_path / layout, layout)
            assert load_model(tmp_path / layout, quiet=True).labels == model.labels

    def test_what_a_layout_cannot_hold(self, tmp_path):
        conv = small("vit_micro_conv_patch8_32")
        for layout, target in (("timm", "t"), ("huggingface", "h"), ("google", "g.npz")):
            with pytest.raises(ConfigError, match=r"write it as|plain ViTs alone"):
                save_model(conv, tmp_path / target, layout)
            assert not (tmp_path / target).exists()
        with pytest.raises(UnknownNameError, match=r"unknown layout to write 'tim'; did you mean timm"):
            save_model(conv, tmp_path / "x", "tim")
        with pytest.raises(ConfigError, match=r"one file that ends in .npz"):
            save_model(small(), tmp_path / "folder", "google")


class TestVerbs:
    def test_inspect(self, file, capsys):
        assert main(["inspect", str(file), "--tensors"]) == 0
        out = capsys.readouterr().out
        assert "vit.safetensors: timm, told by timm's names" in out
        assert "blocks.2.mlp.fc2.weight" in out
        assert "It can be loaded" in out

    def test_inspect_reads_the_header_alone(self, file, monkeypatch):
        import vitral.weights.files as files

        monkeypatch.setattr(files, "_reader", lambda path, name, read: lambda: pytest.fail(f"{name} was read"))
        found = inspect_weights(str(file))
        assert found.problem == ""
        assert found.params == sum(v.numel() for v in load_file(file).values())

    def test_inspect_json(self, file, capsys):
        assert main(["inspect", str(file), "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert document["loads"] is True
        assert {name: value for name, value, _ in document["settings"]}["embed_dim"] == 48

    def test_inspect_says_why_not(self, file, capsys):
        tensors = load_file(file)
        del tensors["norm.weight"]
        save_file(tensors, file)
        assert main(["inspect", str(file)]) == 0
        assert "It cannot be loaded: norm.weight is missing." in capsys.readouterr().out

    def test_convert_there_and_back(self, tmp_path, capsys):
        model = small()
        save_model(model, tmp_path / "vit.npz", "google")
        assert main(["convert", str(tmp_path / "vit.npz"), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
        out = capsys.readouterr().out
        assert "renamed" in out
        assert "wrote" in out
        assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back.npz"), "--to", "google", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["load"]["layout"].startswith("Hugging Face's ViT")
        with np.load(tmp_path / "vit.npz") as a, np.load(tmp_path / "back.npz") as b:
            assert sorted(a) == sorted(b)
            assert all(np.array_equal(a[name], b[name]) for name in a)

    def test_predict_takes_a_published_file(self, tmp_path, capsys):
        from PIL import Image

        model = small()
        model.labels = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
        save_model(model, tmp_path / "hf", "huggingface")
        Image.new("RGB", (80, 70), "red").save(tmp_path / "x.png")
        assert main(["predict", str(tmp_path / "hf"), str(tmp_path / "x.png"), "--json"]) == 0
        (answer,) = json.loads(capsys.readouterr().out)
        assert answer["predictions"][0]["label"] in model.labels

    def test_train_starts_from_a_file(self, tmp_path, file):
        from vitral import train

        run = train("digits", out=tmp_path / "run", model=str(file), epochs=1, img_size=32, quiet=True, max_minutes=1)
        tuned = load_model(run.path)
        assert tuned.config.in_chans == 1
        assert tuned.config.image == (32, 32)
        before = load(file).blocks[0].attn.qkv.weight
        assert 0 < difference(tuned.blocks[0].attn.qkv.weight, before) < 0.5


def test_patch_weights_are_the_matrix_e(file):
    model = load(file)
    x = images(1, 3, 64, 64)
    expected = patchify(x, 16) @ model.patch_embed.E + model.patch_embed.proj.bias
    assert difference(model.patch_embed(x), expected) < 1e-5
