"""Files at the edge: sizes that the patch does not divide, names nobody lists, documents that say odd things."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import difference, images, redraw
from peers import import_timm, import_transformers
from vitral import create_model, load_model, save_model
from vitral.errors import CheckpointError, ConfigError

timm, transformers = import_timm(), import_transformers()
SMALL = {"embed_dim": 48, "depth": 2, "num_heads": 3, "mlp_ratio": 2.0, "img_size": 64, "num_classes": 7}
SHAPE = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}


def small(name="vit_tiny_patch16_224", **options):
    return redraw(create_model(name, **{**SMALL, **options}), seed=1)


@torch.no_grad()
def test_a_size_that_the_patch_does_not_divide(tmp_path):
    """google/siglip-so400m-patch14-384 has 27 patches on a side, and 6 pixels to spare."""
    config = transformers.SiglipVisionConfig(**SHAPE, image_size=64, patch_size=14)
    theirs = redraw(transformers.SiglipVisionModel(config), seed=1)
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path, quiet=True)
    assert model.config.image == (56, 56)
    x = images(1, 3, 64, 64)
    assert difference(model.embed(x[..., :56, :56]), theirs(x).pooler_output) <= 1e-4


@pytest.mark.parametrize(
    ("architecture", "act", "eps"),
    [
        ("vit_huge_patch14_clip_quickgelu_378", "quick_gelu", 1e-5),
        ("vit_base_patch16_clip_384", "gelu", 1e-5),
        ("vit_base_patch32_siglip_256", "gelu_tanh", 1e-6),
        ("vit_base_patch16_siglip_256", "gelu", 1e-6),
        ("vit_medium_patch16_rope_reg1", "gelu", 1e-6),
    ],
)
def test_architectures_of_timms_that_are_in_no_table_of_ours(tmp_path, architecture, act, eps):
    family = "clip" if "clip" in architecture else "siglip" if "siglip" in architecture else ""
    name = {"clip": "vit_base_patch16_clip_224", "siglip": "vit_base_patch16_siglip_224"}.get(
        family, "vit_tiny_patch16_224"
    )
    width = {"embed_dim": 768, "num_heads": 12} if "siglip" in architecture else {}
    patch = 32 if "patch32" in architecture else 16
    model = create_model(name, **{**SMALL, **width, "depth": 1, "patch_size": patch, "num_classes": 0})
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"architecture": architecture}))
    found = load_model(tmp_path, quiet=True, num_heads=model.config.num_heads).config
    assert (found.act, found.norm_eps) == (act, eps)


def open_clip_tensors():
    model = small("vit_base_patch16_clip_224")
    weights = model.state_dict()
    renamed = {
        "visual.class_embedding": weights["cls_token"][0, 0],
        "visual.positional_embedding": weights["pos_embed"][0],
        "visual.conv1.weight": weights["patch_embed.proj.weight"],
        "visual.proj": weights["head.weight"].T.contiguous(),
    }
    for kind in ("weight", "bias"):
        renamed |= {
            f"visual.ln_pre.{kind}": weights[f"norm_pre.{kind}"],
            f"visual.ln_post.{kind}": weights[f"norm.{kind}"],
        }
        for i in range(2):
            ours, theirs = f"blocks.{i}", f"visual.transformer.resblocks.{i}"
            renamed[f"{theirs}.attn.in_proj_{kind}"] = weights[f"{ours}.attn.qkv.{kind}"]
            pairs = {
                "attn.out_proj": "attn.proj",
                "ln_1": "norm1",
                "ln_2": "norm2",
                "mlp.c_fc": "mlp.fc1",
                "mlp.c_proj": "mlp.fc2",
            }
            renamed |= {f"{theirs}.{a}.{kind}": weights[f"{ours}.{b}.{kind}"] for a, b in pairs.items()}
    return {name: tensor.clone() for name, tensor in renamed.items()}


def test_openais_state_dicts_run_with_quickgelu(tmp_path):
    torch.save(open_clip_tensors(), tmp_path / "laion.pt")
    numbers = {
        "input_resolution": torch.tensor(64),
        "context_length": torch.tensor(77),
        "vocab_size": torch.tensor(49408),
    }
    half = {name: tensor.half() for name, tensor in open_clip_tensors().items()}
    torch.save(half | numbers, tmp_path / "openai.pt")
    laion, openai = (load_model(tmp_path / f"{n}.pt", quiet=True, num_heads=3) for n in ("laion", "openai"))
    assert (laion.config.act, openai.config.act) == ("gelu", "quick_gelu")
    assert "float16 converted to float32" in openai.load_report.notes
    assert laion.config.pos_resize.antialias


def test_open_clip_config_is_heeded(tmp_path):
    save_file(open_clip_tensors(), tmp_path / "open_clip_model.safetensors")
    vision = {"width": 48, "head_width": 16, "image_size": 64, "patch_size": 16, "layers": 2}
    images_ = {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "interpolation": "bicubic", "resize_mode": "squash"}
    document = {"model_cfg": {"quick_gelu": True, "vision_cfg": vision}, "preprocess_cfg": images_}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(document))
    model = load_model(tmp_path, quiet=True)
    assert (model.config.act, model.config.num_heads) == ("quick_gelu", 3)
    assert (model.preprocess.mean, model.preprocess.crop_mode) == ((0.5, 0.5, 0.5), "squash")


@torch.no_grad()
def test_towers_of_timms_in_open_clip(tmp_path):
    theirs = redraw(timm.create_model("vit_base_patch16_siglip_224", **{**SMALL, "num_classes": 0}), seed=1)
    content = {f"visual.trunk.{k}": v for k, v in theirs.state_dict().items()} | {
        "text.x": torch.zeros(2),
        "logit_scale": torch.zeros(1),
    }
    save_file({k: v.contiguous() for k, v in content.items()}, tmp_path / "open_clip_model.safetensors")
    x = images(1, 3, 64, 64)
    assert difference(load_model(tmp_path, quiet=True, num_heads=3).embed(x), theirs(x)) <= 1e-4


def test_a_pooling_that_is_not_here_is_refused(tmp_path):
    save_file(small().state_dict(), tmp_path / "model.safetensors")
    document = {"architecture": "vit_tiny_patch16_224", "model_args": {"global_pool": "avgmax"}}
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="timm's pooling 'avgmax' has no like here"):
        load_model(tmp_path)


@torch.no_grad()
def test_a_grid_of_a_square_number_of_patches_that_is_none(tmp_path):
    model = small(img_size=(32, 128))
    save_file(model.state_dict(), tmp_path / "x.safetensors")
    x = images(1, 3, 32, 128)
    loaded = load_model(tmp_path / "x.safetensors", quiet=True, num_heads=3, native_size=(32, 128))
    assert difference(loaded(x), model(x)) < 1e-6
    wider = load_model(tmp_path / "x.safetensors", quiet=True, num_heads=3, native_size=(32, 128), img_size=(64, 128))
    assert difference(wider(images(1, 3, 64, 128)), model(images(1, 3, 64, 128))) < 1e-5


@torch.no_grad()
def test_timms_folder_of_a_distilled_deit_is_resized_as_timm_does(tmp_path):
    made = {**SMALL, "dynamic_img_size": True, "img_size": 96}
    theirs = redraw(timm.create_model("deit_tiny_distilled_patch16_224", **made), seed=1)
    timm.models.save_for_hf(theirs, tmp_path)
    x = images(1, 3, 64, 64)
    assert difference(load_model(tmp_path, quiet=True, num_heads=3)(x), theirs(x)) <= 1e-4


@torch.no_grad()
def test_official_swiglu_and_linear_head_of_dinov2(tmp_path):
    model = small("vit_giant_patch14_dinov2", img_size=56, mlp_ratio=4.0, global_pool="cls_mean")
    names = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3", "head.": "linear_head."}
    content = {"mask_token": torch.zeros(1, 48)}
    for name, tensor in model.state_dict().items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        content[name] = tensor
    torch.save(content, tmp_path / "g14.pth")
    x = images(1, 3, 56, 56)
    loaded = load_model(tmp_path / "g14.pth", quiet=True, num_heads=3)
    assert (loaded.config.act, loaded.config.global_pool) == ("swiglu", "cls_mean")
    assert difference(loaded(x), model(x)) < 1e-5


@torch.no_grad()
def test_big_vision_in_bfloat16(tmp_path):
    model = small()
    save_model(model, tmp_path / "x.npz", "google")
    with np.load(tmp_path / "x.npz") as arrays:
        halved = {n: torch.from_numpy(arrays[n]).bfloat16().view(torch.int16).numpy().view("V2") for n in arrays}
    np.savez(tmp_path / "bf16.npz", **halved)
    loaded = load_model(tmp_path / "bf16.npz", quiet=True)
    assert all(torch.equal(v.bfloat16().float(), loaded.state_dict()[k]) for k, v in model.state_dict().items())


def test_a_wrapper_before_hugging_faces_names(tmp_path):
    model = small()
    save_model(model, tmp_path / "hf", "huggingface")
    tensors = {f"module.{k}": v for k, v in load_file(tmp_path / "hf" / "model.safetensors").items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    loaded = load_model(tmp_path / "hf" / "model.safetensors", quiet=True)  # the documents beside it are read too
    assert loaded.config.num_heads == 3
    assert "prefix 'module.' taken off" in loaded.load_report.notes


def test_names_that_become_one_are_an_error(tmp_path):
    tensors = small().state_dict()
    both = tensors | {f"backbone.{k}": torch.zeros_like(v) for k, v in tensors.items()}
    save_file(both, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"holds backbone\.\S+ and \S+ too; it is not clear which"):
        load_model(tmp_path / "x.safetensors")


def test_half_a_distilled_head_is_missing_not_random(tmp_path):
    model = small(head="distilled", global_pool="cls_dist", reg_tokens=1, pos_registers=True)
    save_model(model, tmp_path / "m", "timm")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if "head_dist" not in k}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks head\.dist\.weight"):
        load_model(tmp_path / "m")


ODD = [
    ("config.json", "5"),
    ("config.json", "null"),
    ("config.json", "[" * 50_000),
    ("config.json", '{"vision_config": "x", "num_attention_heads": 3}'),
    ("config.json", '{"hidden_act": []}'),
    ("config.json", '{"id2label": {"a": "b"}}'),
    ("config.json", '{"num_attention_heads": 0}'),
    ("config.json", '{"layer_norm_eps": "small"}'),
    ("preprocessor_config.json", '{"do_center_crop": true, "crop_size": {"height": 3}}'),
    ("preprocessor_config.json", '{"size": {"shortest_edge": "a"}, "do_center_crop": true, "crop_size": 3}'),
    ("preprocessor_config.json", '{"resample": []}'),
    ("preprocessor_config.json", '{"image_std": ["a", "b", "c"]}'),
    ("preprocessor_config.json", '{"image_mean": [0.5], "image_std": [0.5, 1]}'),
]


@pytest.mark.parametrize(("name", "content"), ODD)
def test_odd_documents_are_one_sentence_or_passed_over(tmp_path, name, content):
    save_model(small(), tmp_path, "huggingface")
    (tmp_path / name).write_text(content)
    try:
        load_model(tmp_path, quiet=True, num_heads=3)
    except (CheckpointError, ConfigError) as error:
        message = str(error)
    else:
        message = "loaded"
    assert "\n" not in message


@pytest.mark.parametrize(
    "content",
    ['{"architecture": "vit_tiny_patch16_224", "pretrained_cfg": "x"}', '{"architecture": "v", "model_args": [1]}'],
)
def test_odd_documents_of_timm(tmp_path, content):
    save_model(small(), tmp_path, "timm")
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="does not say what it should"):
        load_model(tmp_path)


def test_a_run_without_its_parts(tmp_path):
    save_model(small(), tmp_path, "vitral")
    for content in ('{"format_version": 1}', '{"format_version": 1, "model": 3}', '{"format_version": 7}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises((CheckpointError, ConfigError)):
            load_model(tmp_path)


def test_settings_that_a_run_tells_itself(tmp_path):
    save_model(small(), tmp_path, "vitral")
    with pytest.raises(ConfigError, match="tells its family, heads and size itself"):
        load_model(tmp_path, family="dino")
    assert len(load_model(tmp_path).load_report.matched) == len(small().state_dict())


def test_shapes_that_cannot_be_joined(tmp_path):
    save_model(small(), tmp_path / "x.npz", "google")
    with np.load(tmp_path / "x.npz") as arrays:
        whole = {name: arrays[name] for name in arrays}
    block = "Transformer/encoderblock_0/MultiHeadDotProductAttention_1"
    for name in ("embedding/kernel", f"{block}/query/kernel", f"{block}/out/kernel"):
        np.savez(tmp_path / "y.npz", **(whole | {name: whole[name].reshape(-1)}))
        with pytest.raises(CheckpointError, match=r"do(es)? not fit together"):
            load_model(tmp_path / "y.npz")
    np.savez(tmp_path / "y.npz", **(whole | {f"{block}/key/kernel": whole[f"{block}/key/kernel"][1:]}))
    with pytest.raises(CheckpointError, match="not fit together"):
        load_model(tmp_path / "y.npz")


def test_stacks_of_nothing_take_no_time(tmp_path):
    block = "params/Transformer/encoderblock/MultiHeadDotProductAttention_0/query/kernel"
    np.savez(
        tmp_path / "x.npz",
        **{
            block: np.zeros((2_000_000_000, 0, 1, 1), np.float32),
            "params/embedding/kernel": np.zeros((1, 1, 1, 1), np.float32),
        },
    )
    with pytest.raises(CheckpointError, match="is empty"):
        load_model(tmp_path / "x.npz")
    np.savez(
        tmp_path / "x.npz",
        **{block: np.zeros((5000, 1, 1, 1), np.float32), "params/embedding/kernel": np.zeros((1, 1, 1, 1), np.float32)},
    )
    with pytest.raises(CheckpointError, match="one entry for each block"):
        load_model(tmp_path / "x.npz")


@pytest.mark.parametrize("zipped", [True, False])
def test_bytearrays_are_refused(tmp_path, zipped):
    content = {"a": torch.zeros(2), "b": bytearray(10)}
    torch.save(content, tmp_path / "x.pth", _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="asks for a bytearray"):
        load_model(tmp_path / "x.pth")


def test_tensors_that_are_not_ordinary(tmp_path):
    weights = small().state_dict()
    torch.save({k: v.to("meta") for k, v in weights.items()}, tmp_path / "x.pth")
    with pytest.raises(CheckpointError, match=r"not an ordinary one|cannot be read"):
        load_model(tmp_path / "x.pth")


def test_the_file_may_be_written_over_while_the_model_lives(tmp_path):
    torch.save(small().state_dict(), tmp_path / "x.pth")
    model = load_model(tmp_path / "x.pth", quiet=True, num_heads=3)
    torch.save({"a": torch.zeros(1)}, tmp_path / "x.pth")
    assert model(images(1, 3, 64, 64)).isfinite().all()


class TestWriters:
    @pytest.mark.parametrize(
        ("layout", "name", "options"),
        [
            ("timm", "vit_small_patch14_dinov2", {"img_size": 56, "global_pool": "cls_mean"}),
            ("timm", "vit_tiny_patch16_224", {"patch_bias": False}),
            ("huggingface", "vit_tiny_patch16_224", {"act": "swiglu"}),
            (
                "huggingface",
                "vit_tiny_patch16_224",
                {"global_pool": "cls_dist", "reg_tokens": 1, "pos_registers": True},
            ),
            ("huggingface", "vit_base_patch16_clip_224", {"qkv_bias": False}),
        ],
    )
    def test_what_the_other_program_could_not_load_is_refused_whole(self, tmp_path, layout, name, options):
        with pytest.raises(ConfigError):
            save_model(small(name, **options), tmp_path / "m", layout)
        assert not (tmp_path / "m").exists()

    def test_what_a_container_has_no_place_for_is_said(self, tmp_path):
        model = small("deit_tiny_patch16_224")
        model.labels = list("abcdefg")
        said = " ".join(save_model(model, tmp_path / "x.npz", "google"))
        assert "no place for labels" in said
        assert "no place for preprocessing" in said
        assert "neither the number of heads" in " ".join(save_model(model, tmp_path / "x.safetensors", "timm"))
