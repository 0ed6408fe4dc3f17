"""From weights to a task: what is frozen stays to the bit, LoRA folds in, presets give what they promise."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitral
from helpers import difference, images, redraw
from vitral.api import resolve_config
from vitral.cli.main import main
from vitral.config import LoRAOptions, SegmenterConfig, Seq2SeqConfig, TextConfig, TrainConfig, ViTConfig
from vitral.data.sources.open import open_data
from vitral.data.sources.scenes_digits import make_rotated_digits
from vitral.errors import ConfigError, UnknownNameError
from vitral.models.lora import add_lora, lora_parameters
from vitral.models.segmenter import Segmenter
from vitral.models.seq2seq import Seq2Seq
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import create_model
from vitral.recipes import read_preset
from vitral.training import loop
from vitral.training.finetune import choose_trained, count_parameters, freeze, freeze_layers
from vitral.training.optim import Muon, make_optimizers
from vitral.training.session import find
from vitral.weights.load import load_backbone
from vitral.weights.rundir import config_document

DEPTH, D, RANK = 12, 20, 3
QUICK = {"epochs": 2, "batch_size": 200, "log_steps": 1, "val_fraction": 0.1, "quiet": True}
LORA = {"lora": {"rank": RANK, "alpha": 7.0}}


def vit(**options):
    sizes = {"img_size": 12, "patch_size": 4, "embed_dim": D, "depth": DEPTH, "num_heads": 5, "num_classes": 7}
    return VisionTransformer(ViTConfig(**sizes | options))


def segmenter(head="linear"):
    return Segmenter(SegmenterConfig(backbone=vit(num_classes=0).config, num_classes=3, head=head, width=8))


def captioner():
    decoder = TextConfig(vocab_size=11, embed_dim=16, depth=2, num_heads=4, mlp_width=8)
    return Seq2Seq(Seq2SeqConfig(vit=vit(num_classes=0).config, decoder=decoder))


def write_run(path, model, **more):
    """A run directory with this model, as a run of any task would leave it."""
    path.mkdir(parents=True)
    architecture = {VisionTransformer: "vit", Segmenter: "segmenter", Seq2Seq: "seq2seq"}[type(model)]
    about = {"task": "classify", "labels": None, "architecture": architecture, "model": model.config.to_dict()}
    about |= {"preprocess": model.preprocess.to_dict(), **more}
    (path / "config.json").write_bytes(config_document(about))
    save_file(model.state_dict(), path / "model.safetensors")
    return str(path)


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights to start from, for the embedded digits."""
    model = redraw(create_model("vit_nano_conv_patch2_8", num_classes=7, seed=3))
    return write_run(tmp_path_factory.mktemp("start") / "run", model)


def weights(run):
    return load_file(run / "model.safetensors")


def same_bits(a, b, name):
    return torch.equal(a[name].view(torch.int32), b[name].view(torch.int32))


def tune(start, out, **options):
    return vitral.train("digits", model=start, out=out, **QUICK | options)


@pytest.fixture(scope="module")
def lora(start, tmp_path_factory):
    return tune(start, tmp_path_factory.mktemp("lora") / "run", **LORA)


# ---- freezing ----


def test_a_part_is_whole_pieces_of_a_name():
    model = vit()
    freeze(model, "blocks.1, head.weight")
    names = {name for name, _ in model.named_parameters() if name.startswith("blocks.1.")}
    assert len(names) == 12
    assert frozen(model) == names | {"head.weight"}
    with pytest.raises(UnknownNameError, match=r"unknown part to freeze 'block'; did you mean blocks"):
        freeze(model, "block")


@pytest.mark.parametrize(
    ("make", "prefix", "learns"),
    [
        (vit, "", ("head.",)),
        (segmenter, "backbone.", ("head.",)),
        (captioner, "encoder.", ("decoder.", "memory_proj.")),
    ],
)
def test_layers_and_backbones_of_every_model(make, prefix, learns):
    model = make()
    freeze_layers(model, 2)
    before = ("patch_embed.", "cls_token", "pos_embed", "blocks.0.", "blocks.1.")
    everything = {name for name, _ in model.named_parameters()}
    assert frozen(model) == {name for name in everything if name.startswith(tuple(prefix + word for word in before))}
    freeze_layers(model, DEPTH)
    assert {f"{prefix}norm.weight", f"{prefix}norm.bias"} <= everything - frozen(model)
    freeze(model, "backbone")
    assert everything - frozen(model) == {name for name in everything if name.startswith(learns)} != set()


def test_more_layers_than_there_are():
    with pytest.raises(ConfigError, match=r"at most the number of blocks or stages, 12, got 13\."):
        freeze_layers(vit(), DEPTH + 1)


def test_nothing_left_to_train():
    with pytest.raises(ConfigError, match=r"--freeze backbone,head leaves nothing to train.* --freeze backbone\."):
        choose_trained(vit(), TrainConfig(freeze="backbone,head"))


@pytest.mark.parametrize(
    ("options", "rests"),
    [
        ({"freeze": "blocks.1,pos_embed"}, ("blocks.1.", "pos_embed")),
        ({"freeze_layers": 2}, ("patch_embed.", "cls_token", "pos_embed", "blocks.0.", "blocks.1.")),
        ({"freeze": "backbone"}, ("patch_embed.", "cls_token", "pos_embed", "blocks.", "norm.")),
    ],
)
def test_frozen_parameters_stay_to_the_bit(start, tmp_path, options, rests):
    run = tune(start, tmp_path / "run", **options)
    before, after = load_file(f"{start}/model.safetensors"), weights(run.path)
    assert {name for name in after if before[name].shape == after[name].shape and same_bits(before, after, name)} == {
        name for name in before if name.startswith(rests)
    }


def test_the_rate_of_a_layer_does_not_depend_on_what_is_frozen():
    def rates(model):
        (adamw,) = make_optimizers(model, TrainConfig(layer_decay=0.5))
        names = {id(p): name for name, p in model.named_parameters()}
        return {names[id(p)]: group["lr"] for group in adamw.param_groups for p in group["params"]}

    whole, part = vit(), vit()
    freeze(part, "blocks.11,head")
    assert rates(part).items() < rates(whole).items()


# ---- LoRA ----


def test_under_lora_every_weight_but_the_head_stays_to_the_bit(start, lora):
    """In the checkpoint, which holds W, A and B apart; the averages are of what learns alone."""
    before = load_file(f"{start}/model.safetensors")
    (newest,) = [path for path in (lora.path / "checkpoints").iterdir() if path.name == "step-000000012"]
    after, averages = load_file(newest / "model.safetensors"), load_file(newest / "ema.safetensors")
    changed = {"head.weight", "head.bias"}
    assert {name for name in before if name not in changed and not same_bits(before, after, name)} == set()
    new = {name for name in after if name.endswith(("lora_A", "lora_B"))}
    assert after.keys() - before.keys() == new
    assert averages.keys() == new | changed
    assert all(averages[name].abs().max() > 1e-4 for name in new)


@torch.no_grad()
def test_what_is_written_is_the_plain_model_with_lora_folded_in(start, lora):
    (newest,) = [path for path in (lora.path / "checkpoints").iterdir() if path.name == "step-000000012"]
    unmerged = add_lora(load_backbone(start, num_classes=10), RANK, 7.0).eval()
    unmerged.load_state_dict(load_file(newest / "model.safetensors") | load_file(newest / "ema.safetensors"))
    assert all(p.abs().max() > 1e-4 for name, p in lora_parameters(unmerged).items() if name.endswith("lora_B"))
    written = vitral.load_model(lora.path)
    assert type(written.blocks[0].attn.qkv) is torch.nn.Linear
    x = images(5, 1, 8, 8)
    assert difference(written(x), unmerged(x)) < 1e-5
    assert difference(load_backbone(start, num_classes=10)(x), unmerged(x)) > 1e-2


def test_the_merged_model_is_the_one_that_is_evaluated(start, tmp_path, monkeypatch):
    looked = []

    def noted(model, task, data, indices, *more):
        looked.append((len(indices), bool(lora_parameters(model))))
        return find(model, task, data, indices, *more)

    monkeypatch.setattr("vitral.training.session.find", noted)
    run = tune(start, tmp_path / "run", epochs=1, **LORA)
    assert looked == [(142, True), (142, False), (360, False)]
    assert vitral.evaluate(run.path, "digits")["loss"] == pytest.approx(run.metrics["test"]["loss"], rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"ema": 0.0, "accumulate": 2, "checkpoint_blocks": True}])
def test_a_lora_run_goes_on_from_a_checkpoint_to_the_same_bits(start, tmp_path, options):
    options = LORA | {"save_steps": 5} | options
    run = tune(start, tmp_path / "run", **options)
    whole = weights(run.path)
    (run.path / "model.safetensors").unlink()
    shutil.rmtree(run.path / "checkpoints" / "step-000000012")
    assert [path.name for path in (run.path / "checkpoints").iterdir()] == ["step-000000010"]
    again = weights(tune(start, tmp_path / "run", resume=True, **options).path)
    assert again.keys() == whole.keys()
    assert all(same_bits(again, whole, name) for name in whole)


def test_the_best_lora_is_the_one_that_is_folded_in(start, tmp_path, monkeypatch):
    """Where the second half of the run, at a rate of 10, spoils what the first half learned."""
    monkeypatch.setattr(loop, "cosine_with_warmup", lambda progress, *_: 1.0 if progress < 0.5 else 2000.0)
    run = tune(start, tmp_path / "run", select="best", lr=5e-3, epochs=4, ema=0.0, eval_every=1, **LORA)
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    values = [line["accuracy"] for line in lines if line["split"] == "val"]
    assert values[-1] < max(values)
    assert run.metrics["val"]["accuracy"] == pytest.approx(max(values))


def test_the_numbers_are_said_and_written(start, tmp_path, capsys):
    run = tune(start, tmp_path / "run", **LORA | {"epochs": 1, "quiet": False})
    plain = create_model("vit_nano_conv_patch2_8", num_classes=10)
    width, depth = plain.config.embed_dim, plain.config.depth
    learns = depth * RANK * (width + 3 * width + width + width) + (width + 1) * 10
    document = json.loads((run.path / "config.json").read_text())
    whole = sum(p.numel() for p in plain.parameters())
    assert (document["parameters"], document["trained_parameters"]) == (whole, learns)
    words = f"{whole:,} parameters, of which {learns:,} are trained"
    assert words in capsys.readouterr().err.replace("\n", " ")
    card = (run.path / "README.md").read_text()
    assert f"Of {whole:,} parameters {learns:,} were trained. LoRA of rank 3 on attn.qkv,attn.proj is folded" in card


@pytest.mark.parametrize(("make", "head"), [(segmenter, "head."), (captioner, ("decoder.", "memory_proj."))])
def test_lora_is_for_the_backbone_and_new_heads_learn_whole(start, make, head):
    model = make("mask") if make is segmenter else make()
    choose_trained(model, TrainConfig(model=start, lora=LoRAOptions(rank=RANK, parts="attn.qkv")))
    learns = {name for name, p in model.named_parameters() if p.requires_grad}
    changes = set(lora_parameters(model))
    assert len(changes) == 2 * DEPTH
    assert learns == changes | {name for name, _ in model.named_parameters() if name.startswith(head)}


def test_lora_learns_by_adamw_without_decay():
    model = add_lora(vit(), RANK, 4.0, trained="head,blocks.0.mlp")
    adamw, muon = make_optimizers(model, TrainConfig(optimizer="muon", lr=0.5))
    assert isinstance(muon, Muon)
    changes = {id(p) for p in lora_parameters(model).values()}
    groups = [group for group in adamw.param_groups if {id(p) for p in group["params"]} & changes]
    assert {(group["peak_lr"], group["weight_decay"]) for group in groups} == {(0.5, 0.0)}
    assert changes <= {id(p) for group in groups for p in group["params"]}
    assert len(muon.param_groups[0]["params"]) == 2


def test_muon_may_be_alone():
    model = vit()
    freeze(model, "patch_embed,cls_token,pos_embed,head,norm")
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name.endswith("qkv.weight"))
    (muon,) = make_optimizers(model, TrainConfig(optimizer="muon"))
    assert isinstance(muon, Muon)


# ---- presets ----


@pytest.mark.parametrize(
    ("preset", "promised"),
    [
        ("linear", {"freeze": "backbone", "drop_path_rate": 0.0, "weight_decay": 0.0, "layer_decay": 1.0}),
        ("lora", {"lora": {"rank": 8, "alpha": 16.0, "parts": LoRAOptions.parts}, "freeze": "", "layer_decay": 1.0}),
        ("full", {"freeze": "", "layer_decay": 0.75, "drop_path_rate": 0.1}),
    ],
)
def test_presets_give_what_they_promise(preset, promised):
    """Over the recipe of the data, which trains from nothing by Muon, mixes images and says how many epochs."""
    config = resolve_config(open_data("digits"), {}, preset=preset).to_dict()
    assert config["optimizer"] == "adamw"
    assert config["epochs"] == resolve_config(open_data("digits"), {}).epochs
    assert {key: config[key] for key in promised} == promised
    own = read_preset(preset)
    assert {key: config[key] for key in own if not isinstance(own[key], dict)}.items() <= own.items()


def test_rates_fall_from_head_to_everything():
    rates = [resolve_config(open_data("digits"), {}, preset=name).lr for name in ("linear", "lora", "full")]
    assert rates == sorted(set(rates), reverse=True)


def test_options_go_over_a_preset():
    config = resolve_config(open_data("digits"), {"lr": 0.5, "lora": {"rank": 2}}, preset="lora")
    assert (config.lr, config.lora.rank, config.lora.alpha, config.optimizer) == (0.5, 2, 16.0, "adamw")
    with pytest.raises(UnknownNameError, match="unknown preset 'lara'; did you mean lora"):
        resolve_config(open_data("digits"), {}, preset="lara")


def test_the_command_line(start, tmp_path, capsys):
    (tmp_path / "c.toml").write_text("lr = 0.004\nepochs = 1\n[lora]\nrank = 4\n")
    out = str(tmp_path / "run")
    args = ["train", "digits", "--preset", "lora", "--model", start, "--config", str(tmp_path / "c.toml"), "--out", out]
    assert main([*args, "--lora.alpha", "5", "--label-fraction", "0.5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"]["seeds"] == 1
    document = json.loads((tmp_path / "run" / "config.json").read_text())
    assert document["train"]["lora"] == {"rank": 4, "alpha": 5.0, "parts": LoRAOptions.parts}
    assert (document["train"]["lr"], document["train"]["optimizer"]) == (0.004, "adamw")
    assert main(["train", "digits", "--out", out, "--resume", "--json"]) == 0
    assert main(["eval", out, "digits", "--json"]) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--preset", "lora"],
            "--preset lora needs weights to start from, and --model vit_nano_conv_patch2_8 is",
        ),
        (
            ["--preset", "full", "--model", "nowhere"],
            "--model nowhere is not there; give a run, a file, NAME.TAG of",
        ),
        (
            ["--lora.rank", "2"],
            "LoRA (--lora.rank 2) needs weights to start from, and --model vit_nano",
        ),
        (["--lora.rank", "2", "--freeze", "norm"], "freezes the backbone itself: leave freeze and freeze_layers out"),
        (["--lora.rank", "2", "--lora.parts", ""], "parts to change, got alpha 16 and parts ''"),
        (["--label-fraction", "0"], "label_fraction must be above 0 and at most 1, got 0"),
        (["--freeze-layers", "5"], "--freeze-layers must be at most the number of blocks or stages, 4, got 5"),
        (["--freeze-layers", "-1"], "freeze_layers must be a whole number of at least 0, got -1"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, args, message):
    assert main(["train", "digits", "--out", str(tmp_path / "run"), *args]) == 2
    err = capsys.readouterr().err
    assert message in err.replace("\n", " ")
    assert not (tmp_path / "run" / "config.json").exists()


# ---- few labels ----


def test_a_share_of_each_class():
    data = open_data("digits").with_splits(0.1, 0.0, seed=0)
    few, more, other = (data.with_label_fraction(*how) for how in ((0.03, 1), (0.1, 1), (0.03, 2)))
    before = data.targets[data.splits["train"]].bincount()
    assert torch.equal(few.targets[few.splits["train"]].bincount(), (before * 0.03).round().long())
    assert set(few.splits["train"].tolist()) < set(more.splits["train"].tolist()) < set(data.splits["train"].tolist())
    assert not torch.equal(few.splits["train"], other.splits["train"])
    for part in ("val", "test"):
        assert torch.equal(few.splits[part], data.splits[part])
    assert few.notes[-1] == f"{len(few.splits['train'])} of {len(data.splits['train']):,} training images are used " + (
        "(--label-fraction 0.03)"
    )
    assert data.with_label_fraction(1.0, 0) is data


def test_every_class_keeps_one():
    data = open_data("digits")
    rare = torch.cat([(data.targets == 0).nonzero()[:40, 0], *((data.targets == k).nonzero()[:1, 0] for k in (1, 2))])
    few = replace(data, splits={"train": rare}).with_label_fraction(0.05, 0)
    assert few.targets[few.splits["train"]].bincount().tolist() == [2, 1, 1]


def test_without_classes_a_share_at_random():
    data = make_rotated_digits(1, 1)
    before = len(data.splits["train"])
    assert len(data.with_label_fraction(0.1, 0).splits["train"]) == round(before * 0.1)


def test_a_run_on_few_labels(start, tmp_path):
    run = tune(start, tmp_path / "run", preset="linear", label_fraction=0.01, epochs=1)
    document = json.loads((run.path / "config.json").read_text())
    assert document["data"]["splits"] == {"train": 10, "val": 142, "test": 360}
    assert "10 of 1,295 training images are used (--label-fraction 0.01)" in document["data"]["notes"]


# ---- where it starts ----


@pytest.mark.parametrize(
    ("stem", "options"),
    [
        ("linear", {"img_size": 12}),
        ("linear", {"patch_size": 4}),
        ("conv", {"img_size": 12}),
        ("conv", {"patch_size": 4, "img_size": 16}),
    ],
)
def test_another_size_patch_and_number_of_channels(tmp_path, stem, options):
    """Weights for colour images of 8 x 8, for the grey digits."""
    model = redraw(create_model("vit_nano_patch2_8", in_chans=3, stem=stem, num_classes=0))
    model.preprocess = replace(model.preprocess, mean=(0.2, 0.3, 0.7), std=(0.5, 0.2, 0.2), interpolation="bilinear")
    path = write_run(tmp_path / "start", model, task="pretrain", labels=[])
    run = tune(path, tmp_path / "run", **options | {"epochs": 1, "preset": "linear"})
    tuned = vitral.load_model(run.path)
    side = options.get("img_size", 8)
    assert (tuned.config.in_chans, tuned.config.num_classes, tuned.config.image) == (1, 10, (side, side))
    assert tuned.config.patch == (options.get("patch_size", 2),) * 2
    p = tuned.preprocess
    assert (p.img_size, p.mean, p.std, p.interpolation) == ((side, side), (0.4,), (0.3,), "bilinear")
    assert torch.equal(tuned.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight)
    if stem == "linear" and "patch_size" not in options:
        E = model.patch_embed.proj.weight.sum(1, keepdim=True)
        assert torch.equal(tuned.patch_embed.proj.weight, E)
    if stem == "conv":
        assert torch.equal(tuned.patch_embed.convs[0].weight, model.patch_embed.convs[0].weight.sum(1, keepdim=True))
        assert torch.equal(tuned.patch_embed.proj.weight, model.patch_embed.proj.weight)


def test_a_conv_stem_with_other_layers_is_refused(start):
    with pytest.raises(ConfigError, match=r"conv stem has 2 layers for patches of \(2, 2\), but 3 for \(8, 8\)"):
        load_backbone(start, patch_size=8, img_size=16)


@pytest.mark.parametrize("make", [segmenter, captioner])
def test_the_vit_inside_another_task_is_a_start(tmp_path, make):
    model = redraw(make())
    path = write_run(tmp_path / "run", model)
    (tmp_path / "run" / "tokenizer.json").write_text('{"target": {}}')
    backbone = load_backbone(path, num_classes=5, in_chans=3, img_size=20)
    assert backbone(images(2, 3, 20, 20)).shape == (2, 5)
    assert torch.equal(backbone.blocks[3].attn.qkv.weight, model.backbone.blocks[3].attn.qkv.weight)
    assert backbone.preprocess.img_size == (20, 20)


def test_a_head_for_as_many_other_classes_starts_anew(tmp_path):
    model = redraw(create_model("vit_nano_patch2_8", num_classes=10))
    labels = open_data("digits").classes
    paths = {
        name: write_run(tmp_path / name, model, labels=of) for name, of in (("same", labels), ("other", labels[::-1]))
    }
    heads = {}
    for name, path in paths.items():
        run = tune(path, tmp_path / f"{name}-run", epochs=1, freeze="head.weight")
        heads[name] = vitral.load_model(run.path).head.weight
    assert torch.equal(heads["same"], model.head.weight)
    assert heads["other"].std().item() == pytest.approx(0.02, rel=0.1)


def test_counts_of_a_plain_model():
    model = vit()
    everything = sum(p.numel() for p in model.parameters())
    assert count_parameters(model) == (everything, everything)
    freeze(model, "backbone")
    assert count_parameters(model) == (everything, (D + 1) * 7)


def test_options_behind_a_models_name_are_trained_and_a_model_itself_is_not(tmp_path):
    options = {"max_steps": 1, "quiet": True}
    name = "vit_nano_patch2_8+block=post+positions=sincos2d+reg_tokens=2"
    run = vitral.train("digits", model=name, out=tmp_path / "post", **options)
    config = vitral.load_model(run).config
    assert (config.block, config.positions, config.reg_tokens) == ("post", "sincos2d", 2)
    again = vitral.train("digits", model=run, out=tmp_path / "again", **options)  # a run is what it begins with
    assert vitral.load_model(again).config == config
    with pytest.raises(ConfigError, match=r"got a VisionTransformer; keep yours with vitral\.save_model"):
        vitral.train("digits", model=vitral.create_model("vit_nano_patch2_8"), out=tmp_path / "no", **options)
