"""DETR of Hugging Face, in every way its weights are kept: the same logits and boxes, padding masks included."""

import json

import pytest
import torch
from safetensors.torch import save_file

import vitral
from helpers import difference, images, redraw
from peers import import_timm, import_transformers
from vitral.config import DetectorConfig, ViTConfig
from vitral.errors import CheckpointError, ConfigError
from vitral.models.detector import Detector
from vitral.weights.detr import adapt_detector

import_timm()
transformers = import_transformers()

K = 5
RESNET18 = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
RESNET50 = {"layer_type": "bottleneck", "depths": [3, 4, 6, 3], "hidden_sizes": [256, 512, 1024, 2048]}
LABELS = dict(enumerate(["N/A", "ant", "bee", "cat", "dog"]))


def make(backbone="resnet18", seed=1, **options):
    """Their model with every weight and statistic redrawn."""
    small = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "num_queries": 7, "id2label": LABELS}
    small |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    small |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
    if backbone.startswith("timm:"):
        source = {"backbone": backbone.removeprefix("timm:"), "use_timm_backbone": True}
    else:
        shape = RESNET50 if backbone == "resnet50" else RESNET18
        source = {"backbone_config": transformers.ResNetConfig(**shape, out_features=["stage4"])}
    config = transformers.DetrConfig(**{**small, **source, **options})
    model = redraw(transformers.DetrForObjectDetection(config), seed=seed)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith((".running_var", ".weight")):
            buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
        elif name.endswith((".running_mean", ".bias")):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def padded():
    """Three images in frames of 96 x 160, two of them smaller, and which pixels are theirs."""
    mask = torch.zeros(3, 96, 160, dtype=torch.bool)
    mask[0], mask[1, :70, :], mask[2, :, :90] = True, True, True
    return images(3, 3, 96, 160).masked_fill(~mask[:, None], 0), mask


@torch.no_grad()
def same(ours, theirs):
    assert isinstance(ours, Detector)
    x, mask = padded()
    want = theirs(x, pixel_mask=mask.long())
    got = ours(x, mask)
    assert got.logits.shape == (3, 7, K + 1)
    assert difference(got.logits, want.logits) < 1e-4
    assert difference(got.boxes, want.pred_boxes) < 1e-4
    want = theirs(x)
    assert difference(ours(x).boxes, want.pred_boxes) < 1e-4
    assert difference(got.boxes, want.pred_boxes) > 1e-3  # the mask matters
    return True


@pytest.fixture(scope="module")
def theirs():
    return make()


def to_disk(model, folder):
    model.save_pretrained(folder)
    return folder


def to_memory_names(model, folder):
    """The state dict as it is, beside config.json."""
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(model.config.to_json_string(use_diff=False))
    return folder


OFFICIAL = [  # theirs in memory: the authors', in order
    ("model.backbone.model.embedder.embedder.convolution.", "backbone.0.body.conv1."),
    ("model.backbone.model.embedder.embedder.normalization.", "backbone.0.body.bn1."),
    *[(f"model.backbone.model.encoder.stages.{i}.layers.", f"backbone.0.body.layer{i + 1}.") for i in range(4)],
    *[(f".layer.{i}.convolution.", f".conv{i + 1}.") for i in range(3)],
    *[(f".layer.{i}.normalization.", f".bn{i + 1}.") for i in range(3)],
    (".shortcut.convolution.", ".downsample.0."),
    (".shortcut.normalization.", ".downsample.1."),
    ("model.input_projection.", "input_proj."),
    ("model.query_position_embeddings.", "query_embed."),
    ("model.decoder.layernorm.", "transformer.decoder.norm."),
    ("model.encoder.", "transformer.encoder."),
    ("model.decoder.", "transformer.decoder."),
    (".encoder_attn.", ".multihead_attn."),
    (".o_proj.", ".out_proj."),
    (".mlp.fc1.", ".linear1."),
    (".mlp.fc2.", ".linear2."),
    (".self_attn_layer_norm.", ".norm1."),
    (".encoder_attn_layer_norm.", ".norm2."),
    ("class_labels_classifier.", "class_embed."),
    ("bbox_predictor.", "bbox_embed."),
]


def official_names(model):
    tensors = {}
    for name, tensor in model.state_dict().items():
        for old, new in OFFICIAL:
            name = name.replace(old, new)
        side = "norm3" if "decoder" in name else "norm2"
        tensors[name.replace("final_layer_norm", side)] = tensor
    for name in [name for name in tensors if ".q_proj." in name]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".in_proj_")] = torch.cat(parts)
    return tensors


@pytest.mark.parametrize("write", [to_disk, to_memory_names])
def test_hugging_face_with_its_own_resnet(theirs, write, tmp_path, capsys):
    ours = vitral.load_model(write(theirs, tmp_path / "detr"))
    assert same(ours, theirs)
    assert ours.labels == list(LABELS.values())
    report = ours.load_report
    assert "Hugging Face's DETR, told by its tensor names; tensors: " in capsys.readouterr().err
    assert len(report.renamed) == len(theirs.state_dict()) - len(report.matched)
    assert report.missing == report.unexpected == []
    assert ("num_heads", "4", "config.json") in report.settings
    assert ours.preprocess.img_size == (800, 1056)
    assert ours.preprocess.crop_mode == "squash"
    assert "short side 800 and long side at most 1333; here images are brought to 800x1056" in str(report)


@pytest.mark.parametrize("dilation", [False, True])
@pytest.mark.parametrize("write", [to_disk, to_memory_names])
def test_hugging_face_with_a_timm_backbone(write, dilation, tmp_path):
    model = make("timm:resnet18", dilation=dilation)
    ours = vitral.load_model(write(model, tmp_path / "detr"), quiet=True)
    assert same(ours, model)
    assert ours.config.backbone.dilation is dilation


def test_hugging_face_with_resnet50(tmp_path):
    model = make("resnet50")
    ours = vitral.load_model(to_disk(model, tmp_path / "detr"), quiet=True)
    assert same(ours, model)
    assert ours.config.backbone.kind == "resnet50"


@pytest.mark.parametrize("prefix", ["", "detr."])
def test_the_files_of_the_authors(theirs, prefix, tmp_path):
    tensors = {f"{prefix}{name}": tensor for name, tensor in official_names(theirs).items()}
    tensors |= {"mask_head.lay1.weight": torch.zeros(2, 2)} if prefix else {}
    torch.save({"model": tensors}, tmp_path / "detr-r18.pth")
    ours = vitral.load_model(tmp_path / "detr-r18.pth", num_heads=4, quiet=True)
    assert same(ours, theirs)
    assert ours.labels is None
    assert ours.load_report.dropped == ([("mask_head.lay1.weight", "head for segmentation")] if prefix else [])
    names = {ours: old for old, ours, _ in ours.load_report.renamed}
    joined = ", ".join(f"decoder.0.cross_attn.{part}.weight" for part in "qkv")
    assert names[joined] == f"{prefix}transformer.decoder.layers.0.multihead_attn.in_proj_weight"


def test_dc5_is_told_by_the_name_of_an_official_file(tmp_path):
    model = make("timm:resnet18", dilation=True)
    tensors = {
        name.replace("model.backbone.model.", "backbone.0.body."): t for name, t in official_names(model).items()
    }
    torch.save({"model": tensors}, tmp_path / "detr-r18-dc5-0123.pth")
    ours = vitral.load_model(tmp_path / "detr-r18-dc5-0123.pth", num_heads=4, quiet=True)
    assert same(ours, model)
    assert ("dilation", "True", "the name of the file") in ours.load_report.settings


def test_other_classes_channels_and_sizes(theirs, tmp_path):
    folder = to_disk(theirs, tmp_path / "detr")
    ours = vitral.load_model(folder, num_classes=3, in_chans=1, img_size=(96, 160), quiet=True)
    out = ours(images(2, 1, 96, 160))
    assert out.logits.shape == (2, 7, 4)
    assert out.logits.isfinite().all()
    assert ours.labels is None
    assert ours.preprocess.img_size == (96, 160)
    assert len(ours.preprocess.mean) == 1
    assert [name for name, _ in ours.load_report.created] == ["class_head.weight", "class_head.bias"]
    grey = images(2, 1, 96, 160)
    with torch.no_grad():
        assert difference(ours(grey).boxes, theirs(grey.expand(-1, 3, -1, -1)).pred_boxes) < 1e-4


def test_the_documents_beside_the_weights(theirs, tmp_path):
    folder = to_disk(theirs, tmp_path / "detr")
    document = {"size": {"shortest_edge": 480, "longest_edge": 600}, "image_mean": [0.1, 0.2, 0.3]}
    (folder / "preprocessor_config.json").write_text(json.dumps({**document, "image_std": [0.4, 0.5, 0.6]}))
    preprocess = vitral.load_model(folder, quiet=True).preprocess
    assert preprocess.mean == (0.1, 0.2, 0.3)
    assert preprocess.std == (0.4, 0.5, 0.6)
    assert preprocess.img_size == (480, 576)
    assert preprocess.interpolation == "bilinear"
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"shortest_edge": "many"}}))
    with pytest.raises(CheckpointError, match=r"a document beside .* does not say what it should"):
        vitral.load_model(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"longest_edge": "many"}}))
    with pytest.raises(CheckpointError, match=r"the preprocessing beside .* cannot be used"):
        vitral.load_model(folder)
    for change, message in (
        ({"decoder_attention_heads": 8}, "has 4 heads in the encoder and 8 in the decoder"),
        ({"position_embedding_type": "learned"}, "has learned positions"),
        ({"model_type": "conditional_detr"}, "is a conditional_detr, not a DETR"),
        ({"backbone_config": ["a"]}, "does not fit together"),
        ({"activation_function": "silu"}, "act must be one of relu, gelu, got 'silu'"),
    ):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(CheckpointError, match=message):
            vitral.load_model(folder)
        (folder / "config.json").write_text(json.dumps(config))


def test_gaps_and_what_cannot_be_asked(theirs, tmp_path):
    tensors = official_names(theirs)
    path = tmp_path / "x.pth"
    left = {name: t for name, t in tensors.items() if name != "transformer.decoder.norm.bias"}
    torch.save({"model": left | {"transformer.level_embed": torch.zeros(2, 2)}}, path)
    with pytest.raises(CheckpointError, match=r"lacks norm.bias; if that is meant, name it: allow=\['norm.bias'\]"):
        vitral.load_model(path, num_heads=4)
    with pytest.raises(CheckpointError, match=r"has, beyond what a DETR needs, transformer\.level_embed"):
        vitral.load_model(path, num_heads=4, allow=["norm.bias"])
    ours = vitral.load_model(path, num_heads=4, allow=["norm.bias", "transformer.*"], quiet=True)
    assert torch.equal(ours.norm.bias, torch.zeros(32))
    torch.save({"model": {**tensors, "input_proj.weight": torch.zeros(32, 511, 1, 1)}}, path)
    with pytest.raises(CheckpointError, match=r"input_proj.weight has shape \(32, 511, 1, 1\)"):
        vitral.load_model(path, num_heads=4)
    short = {"transformer.encoder.layers.0.self_attn.in_proj_bias": torch.zeros(2)}
    torch.save({"model": tensors | short}, path)
    with pytest.raises(CheckpointError, match="looks like DETR, but does not fit together"):
        vitral.load_model(path, num_heads=4)
    torch.save({"model": {k: v for k, v in tensors.items() if "backbone" not in k}}, path)
    with pytest.raises(CheckpointError, match="must be a ResNet-18, 34, 50 or 101, got none with the names of one"):
        vitral.load_model(path, num_heads=4)
    torch.save({"model": {k: v for k, v in tensors.items() if k != "class_embed.weight"}}, path)
    with pytest.raises(CheckpointError, match=r"looks like DETR, but has no class_head.weight"):
        vitral.load_model(path, num_heads=4)
    with pytest.raises(ConfigError, match="takes no family, patch_size or native_size"):
        vitral.load_model(path, family="dino")


@pytest.mark.parametrize("queries", ["learned", "anchors"])
@pytest.mark.parametrize("stem", ["linear", "conv"])
@torch.no_grad()
def test_a_detector_of_our_own_for_other_classes_and_channels(queries, stem, tmp_path):
    vit = ViTConfig(img_size=32, patch_size=8, embed_dim=24, depth=1, num_heads=3, num_classes=0, stem=stem)
    config = DetectorConfig(
        backbone=vit, num_classes=K, embed_dim=20, num_heads=5, encoder_layers=0, decoder_layers=2, num_queries=7,
        queries=queries, mlp_width=37,
    )  # fmt: skip
    model = redraw(Detector(config))
    model.labels = list(LABELS.values())
    grey = images(2, 1, 32, 48)
    other = adapt_detector(model, tmp_path, num_classes=3, img_size=(32, 48), in_chans=1)
    assert other.preprocess.img_size == (32, 48)
    assert other.labels is None
    out = other(grey)
    assert out.logits.shape == (2, 7, 4 if queries == "learned" else 3)
    assert difference(out.boxes, model(grey.expand(-1, 3, -1, -1)).boxes) < 1e-4
    assert [name for name, _ in other.load_report.created] == ["class_head.weight", "class_head.bias"]
    same = adapt_detector(model, tmp_path, num_classes=K)
    assert torch.equal(same(images(2, 3, 32, 48)).logits, model(images(2, 3, 32, 48)).logits)
    assert same.labels == model.labels
