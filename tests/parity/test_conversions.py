"""What we write is read by the other programs themselves and gives the same numbers; images are prepared alike."""

from pathlib import Path

import pytest
import sklearn
import torch
from PIL import Image

from helpers import difference, images, redraw
from peers import import_timm, import_transformers
from vitral import Predictor, create_model, load_model, save_model
from vitral.data.transforms import normalize

transformers = import_transformers()
timm = import_timm()

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "img_size": 64, "num_classes": 7}
DISTILLED = {"head": "distilled", "global_pool": "cls_dist", "reg_tokens": 1, "pos_registers": True}


def small(name="vit_tiny_patch16_224", **options):
    return redraw(create_model(name, **{**SMALL, **options}), seed=1)


@torch.no_grad()
def test_timm_to_ours_to_hugging_face(tmp_path):
    theirs = timm.create_model("vit_tiny_patch16_224", **SMALL)
    redraw(theirs, seed=1)
    timm.models.save_for_hf(theirs, tmp_path / "timm")
    model = load_model(tmp_path / "timm", quiet=True, num_heads=3)
    notes = save_model(model, tmp_path / "hf", "huggingface")
    assert notes == ["Hugging Face resizes positions for other image sizes in its own way"]
    back = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hf").eval()
    x = images(2, 3, 64, 64)
    assert type(back).__name__ == "ViTForImageClassification"
    assert difference(back(x).logits, theirs(x)) <= 1e-5


HF = [
    ("vit_tiny_patch16_224", {}, "AutoModelForImageClassification", "logits"),
    ("vit_tiny_patch16_224", DISTILLED, "DeiTForImageClassificationWithTeacher", "logits"),
    (
        "vit_small_patch14_dinov2",
        {"img_size": 112, "global_pool": "cls_mean"},
        "AutoModelForImageClassification",
        "logits",
    ),
    ("vit_small_patch14_dinov2", {"img_size": 112, "num_classes": 0}, "AutoModel", "pooler_output"),
    (
        "vit_giant_patch14_dinov2",
        {"img_size": 112, "num_classes": 0, "mlp_ratio": 16 / 3, "depth": 2},
        "AutoModel",
        "pooler_output",
    ),
    (
        "vit_small_patch14_reg4_dinov2",
        {"img_size": 112, "num_classes": 0, "pos_prefix": True},
        "AutoModel",
        "pooler_output",
    ),
    ("vit_base_patch16_siglip_224", {"num_classes": 0}, "SiglipVisionModel", "pooler_output"),
]


@pytest.mark.parametrize(("name", "options", "loader", "answer"), HF)
@torch.no_grad()
def test_transformers_reads_what_we_write(tmp_path, name, options, loader, answer):
    model = small(name, **options)
    save_model(model, tmp_path, "huggingface")
    theirs, info = getattr(transformers, loader).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    x = images(2, 3, *model.config.image)
    assert difference(model(x), theirs.eval()(x)[answer]) <= 1e-5


@torch.no_grad()
def test_transformers_reads_our_clip(tmp_path):
    model = small("vit_base_patch16_clip_quickgelu_224")
    model.head.bias.data.zero_()
    save_model(model, tmp_path, "huggingface")
    theirs = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path).eval()
    x = images(2, 3, 64, 64)
    assert difference(model(x), theirs(x).image_embeds) <= 1e-5


TIMM = [
    ("vit_tiny_patch16_224", {}),
    ("vit_tiny_patch16_224", {"global_pool": "mean", "norm_after_pool": True}),
    ("vit_tiny_patch16_224", DISTILLED),
    ("deit3_small_patch16_224", {}),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 112, "pos_prefix": True}),
    ("vit_giant_patch14_reg4_dinov2", {"img_size": 112, "mlp_ratio": 4.0}),
    ("vit_base_patch16_clip_quickgelu_224", {}),
    ("vit_base_patch16_siglip_224", {}),
]


@pytest.mark.parametrize(("name", "options"), TIMM)
@torch.no_grad()
def test_timm_reads_what_we_write(tmp_path, name, options):
    model = small(name, **options)
    save_model(model, tmp_path, "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images(2, 3, *model.config.image)
    assert difference(model(x), theirs(x)) <= 1e-5
    data = timm.data.resolve_model_data_config(theirs)
    assert tuple(data["mean"]) == model.preprocess.mean
    # timm crops after it squashed, and vitral's squash does not crop.
    assert data["crop_pct"] == (1.0 if model.preprocess.crop_mode == "squash" else model.preprocess.crop_pct)


@torch.no_grad()
def test_timms_own_npz_loader_reads_what_we_write(tmp_path):
    model = small()
    notes = save_model(model, tmp_path / "vit.npz", "google")
    assert any("GELU by tanh" in note for note in notes)
    theirs = timm.create_model("vit_tiny_patch16_224", **SMALL)
    theirs.load_pretrained(str(tmp_path / "vit.npz"))
    x = images(2, 3, 64, 64)
    assert difference(model(x), theirs.eval()(x)) <= 1e-5


# ---- preprocessing ----


PHOTOS = sorted((Path(sklearn.__file__).parent / "datasets" / "images").glob("*.jpg"))


PROCESSORS = [
    ("ViTImageProcessorPil", {}, "vit_tiny_patch16_224", {}),
    ("BitImageProcessorPil", {"size": {"shortest_edge": 256}}, "vit_small_patch14_dinov2", {"num_classes": 0}),
    ("DeiTImageProcessorPil", {}, "vit_tiny_patch16_224", {}),
    ("ViTImageProcessorPil", {"do_normalize": False}, "vit_tiny_patch16_224", {}),
    ("CLIPImageProcessorPil", {}, "vit_base_patch16_clip_quickgelu_224", {}),
    ("SiglipImageProcessorPil", {}, "vit_base_patch16_siglip_224", {"num_classes": 0}),
]


@pytest.mark.parametrize("photo", PHOTOS, ids=lambda path: path.stem)
@pytest.mark.parametrize(("kind", "settings", "name", "options"), PROCESSORS)
def test_images_are_prepared_as_the_reference_prepares_them(tmp_path, photo, kind, settings, name, options):
    processor = getattr(transformers, kind)(**settings)
    model = small(name, **{"img_size": 224, **options})
    if "clip" in name:
        model.head.bias.data.zero_()
    save_model(model, tmp_path, "huggingface")
    processor.save_pretrained(tmp_path)
    predictor = Predictor(load_model(tmp_path, quiet=True))
    ours = normalize(predictor.prepare(photo)[None], predictor.preprocess)
    theirs = processor(Image.open(photo), return_tensors="pt")["pixel_values"]
    std = torch.tensor(predictor.preprocess.std)[:, None, None]
    assert ours.shape == theirs.shape
    assert ((ours - theirs) * std).abs().mean() <= 1 / 255
