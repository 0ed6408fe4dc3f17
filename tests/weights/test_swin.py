"""Swin's files: whose they are, what becomes of each tensor, what is asked of them and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import vitral
from helpers import difference, images, redraw
from vitral.config import SwinConfig
from vitral.errors import CheckpointError, ConfigError
from vitral.models.swin import SwinTransformer
from vitral.weights.detect import is_swin
from vitral.weights.files import open_weights
from vitral.weights.inspect import inspect_weights
from vitral.weights.save import save_model
from vitral.weights.swin import adapt_swin, layout_of, load_swin, read_names, resize_bias, write_names

CONFIG = SwinConfig(
    img_size=24, patch_size=2, num_classes=7, embed_dim=10, depths=(2, 1, 3), num_heads=(2, 5, 4), window_size=3,
    mlp_ratio=2.3,
)  # fmt: skip

# One name of each kind in every layout: ours and timm's, the authors', Hugging Face's on disk, and in its memory.
NAMES = [
    (
        "patch_embed.proj.weight",
        "patch_embed.proj.weight",
        "swin.embeddings.patch_embeddings.projection.weight",
        "swin.embeddings.patch_embeddings.projection.weight",
    ),
    ("patch_embed.norm.bias", "patch_embed.norm.bias", "swin.embeddings.norm.bias", "swin.embeddings.norm.bias"),
    (
        "layers.2.downsample.reduction.weight",
        "layers.1.downsample.reduction.weight",
        "swin.encoder.layers.1.downsample.reduction.weight",
        "swin.encoder.layers.1.downsample.reduction.weight",
    ),
    (
        "layers.1.downsample.norm.weight",
        "layers.0.downsample.norm.weight",
        "swin.encoder.layers.0.downsample.norm.weight",
        "swin.encoder.layers.0.downsample.norm.weight",
    ),
    (
        "layers.2.blocks.1.norm1.weight",
        "layers.2.blocks.1.norm1.weight",
        "swin.encoder.layers.2.blocks.1.layernorm_before.weight",
        "swin.encoder.layers.2.blocks.1.layernorm_before.weight",
    ),
    (
        "layers.2.blocks.1.norm2.bias",
        "layers.2.blocks.1.norm2.bias",
        "swin.encoder.layers.2.blocks.1.layernorm_after.bias",
        "swin.encoder.layers.2.blocks.1.layernorm_after.bias",
    ),
    (
        "layers.0.blocks.1.attn.relative_position_bias_table",
        "layers.0.blocks.1.attn.relative_position_bias_table",
        "swin.encoder.layers.0.blocks.1.attention.self.relative_position_bias_table",
        "swin.encoder.layers.0.blocks.1.attention.relative_position_bias.relative_position_bias_table",
    ),
    (
        "layers.0.blocks.1.attn.proj.weight",
        "layers.0.blocks.1.attn.proj.weight",
        "swin.encoder.layers.0.blocks.1.attention.output.dense.weight",
        "swin.encoder.layers.0.blocks.1.attention.o_proj.weight",
    ),
    (
        "layers.0.blocks.1.mlp.fc1.weight",
        "layers.0.blocks.1.mlp.fc1.weight",
        "swin.encoder.layers.0.blocks.1.intermediate.dense.weight",
        "swin.encoder.layers.0.blocks.1.mlp.fc1.weight",
    ),
    (
        "layers.0.blocks.1.mlp.fc2.bias",
        "layers.0.blocks.1.mlp.fc2.bias",
        "swin.encoder.layers.0.blocks.1.output.dense.bias",
        "swin.encoder.layers.0.blocks.1.mlp.fc2.bias",
    ),
    ("norm.weight", "norm.weight", "swin.layernorm.weight", "swin.layernorm.weight"),
    ("head.fc.bias", "head.bias", "classifier.bias", "classifier.bias"),
]
LAYOUTS = ["timm", "official", "huggingface"]


@pytest.fixture(scope="module")
def model():
    return redraw(SwinTransformer(CONFIG))


MEMORY = [  # on disk: in memory, in order
    ("attention.self.query", "attention.q_proj"),
    ("attention.self.key", "attention.k_proj"),
    ("attention.self.value", "attention.v_proj"),
    ("attention.self.relative", "attention.relative_position_bias.relative"),
    ("attention.output.dense", "attention.o_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
]


def in_memory(tensors):
    """Hugging Face's names on disk, as its newer versions have them in memory."""
    for old, new in MEMORY:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return tensors


def write(tensors, path, config=None):
    """A file of tensors, or a folder with a config.json."""
    if config is not None:
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(config))
        path = path / "model.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def load(path, **options):
    return load_swin(open_weights(path), str(path), **options)


class TestNames:
    @pytest.mark.parametrize("names", NAMES, ids=[names[0] for names in NAMES])
    def test_each_kind_of_name_in_each_layout_and_back(self, names, model, tmp_path):
        for layout, name in zip(LAYOUTS, names[:3], strict=True):
            written = write_names(model.state_dict(), layout)
            assert torch.equal(written[name], model.state_dict()[names[0]])
        memory = in_memory(write_names(model.state_dict(), "huggingface"))
        assert torch.equal(memory[names[3]], model.state_dict()[names[0]])

    def test_queries_keys_and_values_are_parted_for_hugging_face(self, model):
        written = write_names(model.state_dict(), "huggingface")
        qkv = model.layers[1].blocks[0].attn.qkv
        for i, part in enumerate(("query", "key", "value")):
            name = f"swin.encoder.layers.1.blocks.0.attention.self.{part}"
            assert torch.equal(written[f"{name}.weight"], qkv.weight[20 * i : 20 * i + 20])
            assert torch.equal(written[f"{name}.bias"], qkv.bias[20 * i : 20 * i + 20])

    @pytest.mark.parametrize("layout", [*LAYOUTS, "memory"])
    @torch.no_grad()
    def test_every_layout_comes_back_whole(self, layout, model, tmp_path):
        tensors = write_names(model.state_dict(), "huggingface" if layout == "memory" else layout)
        path = write(in_memory(tensors) if layout == "memory" else tensors, tmp_path / "swin.safetensors")
        ours = load(path)
        assert ours.state_dict().keys() == model.state_dict().keys()
        for name, tensor in model.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name
        assert ours.config == SwinConfig(**(CONFIG.to_dict() | {"mlp_ratio": ours.config.mlp_ratio}))
        assert not ours.training
        report = ours.load_report
        told = len(report.matched) + sum(len(theirs.split(", ")) for theirs, _, _ in report.renamed)
        assert told == len(tensors)
        assert report.dropped == report.missing == report.unexpected == report.created == []

    def test_whose_file_it_is(self, model, tmp_path):
        for layout, about in zip(LAYOUTS, ["timm's Swin", "Swin of its authors", "Hugging Face's Swin"], strict=True):
            names = write_names(model.state_dict(), layout)
            assert is_swin(names)
            assert layout_of(names) == layout
            path = write(names, tmp_path / "x.safetensors")
            assert load(path).load_report.layout == f"{about}, told by its tensor names"
        headless = {name: t for name, t in model.state_dict().items() if not name.startswith("head")}
        assert layout_of(write_names(headless, "official")) == "official"
        assert layout_of(headless) == "timm"
        assert not is_swin({"backbone." + name: t for name, t in names.items()})
        v2 = {name.replace("relative_position_bias_table", "logit_scale"): t for name, t in headless.items()}
        assert not is_swin(v2)

    @torch.no_grad()
    def test_files_with_buffers_and_of_the_pretraining(self, model, tmp_path):
        tensors = write_names(model.state_dict(), "official")
        counted = {
            "layers.0.blocks.1.attn_mask": torch.zeros(4, 9, 9),
            "layers.0.blocks.1.attn.relative_position_index": torch.zeros(9, 9, dtype=torch.int64),
        }
        torch.save({"model": tensors | counted}, tmp_path / "swin_tiny.pth")
        ours = load(tmp_path / "swin_tiny.pth")
        assert dict(ours.load_report.dropped) == dict.fromkeys(counted, "numbers that are counted, not learned")
        body = {f"encoder.{name}": t for name, t in tensors.items() if not name.startswith("head")}
        more = {"encoder.mask_token": torch.zeros(1, 1, 10), "decoder.0.weight": torch.zeros(3, 40, 1, 1)}
        torch.save({"model": body | more}, tmp_path / "simmim.pth")
        ours = load(tmp_path / "simmim.pth")
        assert ours.config.num_classes == 0
        assert {why for _, why in ours.load_report.dropped} == {"of the pretraining alone"}
        x = images(2, 3, 24, 24)
        assert torch.equal(ours(x), model.embed(x))


class TestWhatIsTold:
    def test_the_model_by_shapes_alone(self, tmp_path):
        config = SwinConfig(
            img_size=(24, 72), patch_size=(2, 6), in_chans=5, num_classes=0, embed_dim=12, depths=(1, 2, 1),
            num_heads=(3, 1, 4), window_size=(4, 2, 3), mlp_ratio=1.75, qkv_bias=False,
        )  # fmt: skip
        path = write(SwinTransformer(config).state_dict(), tmp_path / "x.safetensors")
        assert load(path).config == config

    def test_an_mlp_of_any_width(self, tmp_path):
        for C, width in ((11, 15), (13, 15), (22, 15), (23, 99)):
            ratio = (width + 0.5) / C
            model = SwinTransformer(SwinConfig(embed_dim=C, depths=(1,), num_heads=(1,), mlp_ratio=ratio))
            ours = load(write(model.state_dict(), tmp_path / "x.safetensors"))
            assert ours.layers[0].blocks[0].mlp.fc1.out_features == width

    @pytest.mark.parametrize(
        ("layout", "side", "expected"),
        [
            ("official", 24, ("center", 0.875)),
            ("official", 384, ("squash", 1.0)),
            ("timm", 24, ("center", 0.9)),
            ("timm", 384, ("center", 1.0)),
            ("huggingface", 24, ("squash", 1.0)),
        ],
    )
    def test_preprocessing_as_each_program_evaluates(self, layout, side, expected, tmp_path):
        stages = 3 if side == 24 else 6
        config = SwinConfig(
            img_size=side, patch_size=2 if side == 24 else 4, embed_dim=1, depths=(1,) * stages,
            num_heads=(1,) * stages, window_size=3,
        )  # fmt: skip
        tensors = write_names(SwinTransformer(config).state_dict(), layout)
        ours = load(write(tensors, tmp_path / "x.safetensors"))
        assert ours.preprocess.img_size == (side, side)
        assert (ours.preprocess.crop_mode, ours.preprocess.crop_pct) == expected
        settings = {name: (value, why) for name, value, why in ours.load_report.settings}
        assert settings["crop_pct"] == (str(expected[1]), ours.load_report.layout.partition(",")[0])
        assert settings["img_size"][1] == "the last map is one window"
        assert settings["num_heads"] == (str((1,) * stages), "the shapes")

    def test_an_epsilon_that_hugging_face_does_not_use_everywhere(self, model, tmp_path):
        theirs = write_names(model.state_dict(), "huggingface")
        ours = load_swin(open_weights(write(theirs, tmp_path / "hf", {"layer_norm_eps": 1e-3}).parent), "x")
        assert ours.config.norm_eps == 1e-3
        assert "Hugging Face keeps an epsilon of 1e-5" in ours.load_report.notes[-1]
        assert ("norm_eps", "0.001", "config.json") in ours.load_report.settings

    def test_timms_config_json(self, model, tmp_path):
        cfg = {"input_size": [3, 48, 32], "mean": [0.1, 0.2, 0.3], "std": [0.5, 0.5, 0.5], "crop_pct": 0.8}
        document = {
            "architecture": "swin_tiny_patch4_window7_224",
            "global_pool": "avg",
            "pretrained_cfg": cfg,
            "label_names": list("abcdefg"),
        }
        write(model.state_dict(), tmp_path / "swin", document)
        ours = load(tmp_path / "swin")
        assert ours.config.image == ours.preprocess.img_size == (48, 32)
        assert ours.preprocess.mean == (0.1, 0.2, 0.3)
        assert ours.preprocess.crop_pct == 0.8
        assert ours.labels == list("abcdefg")
        write(model.state_dict(), tmp_path / "swin", document | {"label_names": ["a"]})
        ours = load(tmp_path / "swin")
        assert ours.labels is None
        assert "1 labels for 7 classes: they are left out" in ours.load_report.notes


class TestWhatIsAsked:
    @torch.no_grad()
    def test_other_classes_channels_and_sizes(self, model, tmp_path):
        path = write(model.state_dict(), tmp_path / "x.safetensors")
        ours = load(path, num_classes=3, in_chans=1, img_size=(20, 30))
        grey = images(2, 1, 20, 30)
        assert ours(grey).shape == (2, 3)
        assert difference(ours.embed(grey), model.embed(grey.expand(-1, 3, -1, -1))) < 1e-5
        assert ours.preprocess.img_size == ours.config.image == (20, 30)
        assert len(ours.preprocess.mean) == 1
        report = ours.load_report
        assert [name for name, _ in report.created] == ["head.fc.weight", "head.fc.bias"]
        assert ("head.fc.bias", "3 classes are asked for, the file has 7") in report.dropped
        assert [row[0] for row in report.resized] == ["patch_embed.proj.weight"]
        assert load(path, num_classes=0).load_report.created == []

    @torch.no_grad()
    def test_other_windows_and_patches(self, model, tmp_path):
        path = write(model.state_dict(), tmp_path / "x.safetensors")
        ours = load(path, window_size=5, patch_size=4)
        assert ours.config.windows == (5, 5, 5)
        assert ours(images(2, 3, 40, 40)).shape == (2, 7)
        assert len(ours.load_report.resized) == 1 + 6
        table = "layers.2.blocks.1.attn.relative_position_bias_table"
        resized = F.interpolate(
            model.state_dict()[table][:, 3].view(1, 1, 5, 5), size=(9, 9), mode="bicubic", align_corners=False
        )
        torch.testing.assert_close(ours.state_dict()[table][:, 3], resized.flatten())
        assert (table, (25, 4), (81, 4), "bicubic") in ours.load_report.resized

    def test_a_resized_table_keeps_a_slope(self):
        y, x = torch.meshgrid(torch.arange(-4.0, 5), torch.arange(-4.0, 5), indexing="ij")
        table = torch.stack([y, x], -1).view(81, 2)
        made = resize_bias(table, 8).view(15, 15, 2)
        assert (made[1:, :, 0] > made[:-1, :, 0]).all()
        assert (made[:, 1:, 1] > made[:, :-1, 1]).all()
        torch.testing.assert_close(made[7, 7], torch.zeros(2))

    @torch.no_grad()
    def test_a_run_of_our_own(self, model, tmp_path):
        model.labels = list("abcdefg")
        model.preprocess = replace(model.preprocess, crop_pct=12 / 13)  # Hugging Face counts the short side in pixels
        same = adapt_swin(model, tmp_path, img_size=(32, 48))
        x = images(2, 3, 32, 48)
        assert torch.equal(same(x), model(x))
        assert same.labels == model.labels
        assert same.preprocess.img_size == (32, 48)
        assert len(same.load_report.matched) == len(model.state_dict())
        other = adapt_swin(model, tmp_path, num_classes=2, in_chans=1, window_size=4)
        assert other(images(2, 1, 32, 48)).shape == (2, 2)
        assert other.labels is None
        assert "head.fc.weight" not in other.load_report.matched
        with pytest.raises(ConfigError, match="window_size must be positive"):
            adapt_swin(model, tmp_path, window_size=-1)
        model.labels = None


class TestWhatIsRefused:
    @pytest.fixture
    def tensors(self, model):
        return dict(model.state_dict())

    def test_gaps(self, tensors, tmp_path):
        path = tmp_path / "x.safetensors"
        bias = tensors.pop("layers.1.blocks.0.norm1.bias")
        write(tensors, path)
        with pytest.raises(CheckpointError, match=r"lacks layers.1.blocks.0.norm1.bias; if that is meant, name it"):
            load(path)
        assert torch.equal(load(path, allow=["*.norm1.bias"]).layers[1].blocks[0].norm1.bias, torch.zeros_like(bias))
        more = {"layers.1.blocks.0.norm1.bias": bias, "absolute_pos_embed": torch.zeros(1, 144, 10)}
        write(tensors | more, path)
        with pytest.raises(CheckpointError, match=r"has, beyond what a Swin needs, absolute_pos_embed"):
            load(path)
        assert load(path, allow=["absolute_pos_embed"]).load_report.unexpected == ["absolute_pos_embed"]

    def test_half_a_head_and_a_part_of_qkv(self, model, tensors, tmp_path):
        path = tmp_path / "x.safetensors"
        del tensors["head.fc.bias"]
        write(tensors, path)
        with pytest.raises(CheckpointError, match=r"lacks head.fc.bias"):
            load(path)
        theirs = write_names(model.state_dict(), "huggingface")
        del theirs["swin.encoder.layers.2.blocks.1.attention.self.key.weight"]
        write(theirs, path)
        with pytest.raises(CheckpointError, match=r"lacks layers.2.blocks.1.attn.qkv.weight"):
            load(path)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"layers.0.blocks.0.attn.relative_position_bias_table": (24, 2)}, "with 24 rows is of no square window"),
            ({"layers.0.blocks.0.attn.relative_position_bias_table": (16, 2)}, "with 16 rows is of no square window"),
            ({"layers.0.blocks.0.attn.relative_position_bias_table": (25, 3)}, "must divide the width of each stage"),
            ({"layers.0.blocks.1.attn.relative_position_bias_table": (9, 2)}, r"has shape \(9, 2\), but the other"),
            ({"patch_embed.proj.weight": (10,)}, "looks like Swin, but does not fit together"),
            ({"patch_embed.proj.weight": None}, "looks like Swin, but has no patch_embed.proj.weight"),
            ({"layers.7.blocks.0.norm1.weight": (10,)}, "has no layers.3.blocks.0.attn.relative_position_bias_table"),
            ({"layers.0.blocks.99999999999.norm1.weight": (10,)}, "lacks layers.0.blocks.2.norm1.weight"),
            ({f"layers.{'9' * 5000}.downsample.norm.weight": (1,)}, "has no layers.3.blocks.0"),
            ({"norm.weight": "nan"}, "norm.weight holds NaN or infinite numbers"),
            ({"norm.weight": "int"}, r"norm.weight is torch.int64, but weights are floating point"),
        ],
    )
    def test_what_does_not_fit_together(self, change, message, tensors, tmp_path):
        for name, shape in change.items():
            if shape is None:
                del tensors[name]
            elif shape == "nan":
                tensors[name] = torch.full((40,), torch.nan)
            else:
                tensors[name] = torch.ones(40, dtype=torch.int64) if shape == "int" else torch.zeros(shape)
        torch.save(tensors, tmp_path / "x.pth")
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "x.pth")

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({"model_type": "donut-swin"}, "is a donut-swin, not a Swin"),
            ({"use_absolute_embeddings": True}, "has a table of positions besides the biases"),
            ({"hidden_act": "silu"}, "asks for the activation 'silu'"),
            ({"layer_norm_eps": "small"}, None),
            ({"layer_norm_eps": -1}, "does not fit together: norm_eps must be a number of at least 0, got -1"),
            ({"image_size": [1, 2, 3]}, "does not fit together: img_size must be a positive whole number"),
            ({"id2label": {"a": "b"}}, "id2label whose keys are not numbers"),
        ],
    )
    def test_documents_that_ask_for_something_else(self, document, message, model, tmp_path):
        write(write_names(model.state_dict(), "huggingface"), tmp_path / "hf", {"model_type": "swin"} | document)
        if message is None:
            assert load(tmp_path / "hf").config.norm_eps == 1e-5
            return
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path / "hf")

    def test_other_broken_documents(self, model, tmp_path):
        timm = {"architecture": "swin_tiny_patch4_window7_224"}
        write(model.state_dict(), tmp_path / "t", timm | {"global_pool": "max"})
        with pytest.raises(CheckpointError, match="pools by max"):
            load(tmp_path / "t")
        for broken in ({"pretrained_cfg": {"input_size": 3}}, {"global_pool": "avgmax"}, {"model_args": [1]}):
            write(model.state_dict(), tmp_path / "t", timm | broken)
            with pytest.raises(CheckpointError, match="does not say what it should"):
                load(tmp_path / "t")
        write(model.state_dict(), tmp_path / "t", timm | {"pretrained_cfg": {"crop_pct": 7}})
        with pytest.raises(CheckpointError, match=r"the preprocessing beside .* cannot be used: crop_pct"):
            load(tmp_path / "t")

    def test_one_tensor_under_two_names(self, model, tmp_path):
        theirs = write_names(model.state_dict(), "huggingface")
        twice = {"layernorm.weight": theirs["swin.layernorm.weight"].clone()}
        write(theirs | twice, tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match=r"holds norm.weight under two names"):
            load(tmp_path / "x.safetensors")

    def test_the_plan_reads_nothing(self, model, tmp_path):
        file = open_weights(write(write_names(model.state_dict(), "huggingface"), tmp_path / "x.safetensors"))
        plan, layout = read_names(file)
        assert layout == "huggingface"
        assert plan.shapes() == {name: tuple(t.shape) for name, t in model.state_dict().items()}


# ---- by the public functions ----


class TestPublic:
    @pytest.mark.parametrize("layout", ["vitral", "timm", "huggingface"])
    def test_a_model_comes_back_from_every_layout(self, layout, model, tmp_path):
        model.labels = list("abcdefg")
        model.preprocess = replace(model.preprocess, crop_pct=12 / 13)  # Hugging Face counts the short side in pixels
        assert save_model(model, tmp_path / "x", layout) == []
        again = vitral.load_model(tmp_path / "x", quiet=True)
        assert isinstance(again, SwinTransformer)
        assert again.config == model.config
        assert again.labels == model.labels
        assert again.preprocess == model.preprocess
        x = images(2, 3, 21, 30)
        with torch.no_grad():
            assert torch.equal(again(x), model(x))
        found = inspect_weights(str(tmp_path / "x"))
        assert not found.problem
        assert {name: value for name, value, _ in found.settings}["depths"] == (2, 1, 3)
        assert found.params == sum(p.numel() for p in model.parameters())

    @pytest.mark.parametrize("layout", ["vitral", "timm"])
    def test_what_is_asked_for(self, layout, model, tmp_path, capsys):
        save_model(model, tmp_path / "x", layout)
        again = vitral.load_model(tmp_path / "x", num_classes=3, img_size=(30, 41), in_chans=1)
        assert again(images(2, 1, 30, 41)).shape == (2, 3)
        assert again.preprocess.img_size == (30, 41)
        assert len(again.preprocess.mean) == 1
        assert ("Swin" in capsys.readouterr().err) == (layout == "timm")
        kept = vitral.load_model(tmp_path / "x", img_size=(30, 41), quiet=True)
        x = images(2, 3, 30, 41)
        with torch.no_grad():
            assert torch.equal(kept(x), model(x))  # no weight depends on the size

    def test_a_file_of_the_authors(self, model, tmp_path):
        torch.save({"model": write_names(model.state_dict(), "official")}, tmp_path / "swin.pth")
        again = vitral.load_model(tmp_path / "swin.pth", quiet=True)
        with torch.no_grad():
            assert torch.equal(again(images(2, 3, 24, 24)), model(images(2, 3, 24, 24)))
        found = inspect_weights(str(tmp_path / "swin.pth"))
        assert found.layout == "Swin of its authors, told by its tensor names"
        assert not found.problem

    def test_what_is_refused(self, model, tmp_path):
        with pytest.raises(
            ConfigError, match="SwinTransformer cannot be written in the layout google; it can as vitral"
        ):
            save_model(model, tmp_path / "x.npz", "google")
        save_model(model, tmp_path / "x", "timm")
        with pytest.raises(ConfigError, match="is a Swin, whose shapes tell all: it takes no family"):
            vitral.load_model(tmp_path / "x", family="dino")
        odd = SwinTransformer(SwinConfig(**(CONFIG.to_dict() | {"window_size": (3, 2, 2), "act": "relu"})))
        with pytest.raises(ConfigError, match="exact GELU, this model relu"):
            save_model(odd, tmp_path / "y", "timm")
        with pytest.raises(ConfigError, match=r"one window for all stages .* windows of \(3, 2, 2\)"):
            save_model(odd, tmp_path / "y", "huggingface")
        v2 = {
            "layers.0.blocks.0.attn.logit_scale": torch.zeros(2),
            "layers.0.blocks.0.attn.qkv.weight": torch.zeros(6, 2),
        }
        save_file(v2, tmp_path / "v2.safetensors")
        with pytest.raises(CheckpointError, match="a model around Swin, or Swin V2"):
            vitral.load_model(tmp_path / "v2.safetensors")
