"""Learning without labels from end to end, on the embedded digits, and what DINO and MAE do around a step."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral
from helpers import redraw, stop_after
from vitral.cli.main import main
from vitral.config import Augmentation, DINOOptions, PretrainConfig, TrainConfig
from vitral.data.crops import CropInputs, Crops
from vitral.data.loader import TrainLoader
from vitral.data.noise import Noise
from vitral.data.sources.base import Data, ImageArray
from vitral.data.sources.digits import load_digits
from vitral.data.targets import Values
from vitral.errors import CheckpointError, ConfigError, DataError, InputError
from vitral.models import dino
from vitral.models.zoo import create_model
from vitral.recipes import list_recipes, read_recipe
from vitral.tasks.dino import DINO
from vitral.tasks.mae import MAE
from vitral.training import pretrain as session
from vitral.training.checkpoint import load_newest
from vitral.training.distributed import Processes

SMALL = {"prototypes": 32, "hidden": 32, "bottleneck": 16, "local_crops": 2, "freeze_last_epochs": 1.0, "koleo": 0.0}
QUICK = {
    "model": "vit_nano_patch2_8", "epochs": 2, "batch_size": 256, "log_steps": 1, "quiet": True, "save_steps": 3,
    "health_images": 40, "neighbours": 200, "optimizer": "adamw", "lr": 1e-3, "augment": {"flip": 0.0, "solarize": 0.1},
}  # fmt: skip
METHODS = {
    "dino": {"method": "dino", "dino": SMALL},
    "ibot": {"method": "dino", "dino": SMALL | {"ibot": 1.0, "koleo": 0.1}, "drop_path_rate": 0.2},
    "mae": {"method": "mae", "mae": {"decoder_dim": 16, "decoder_depth": 1}},
}


def run(out, method="dino", **options):
    return vitral.pretrain("digits", out=out, **(QUICK | METHODS[method] | options))


def lines(run, split):
    every = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in every if line["split"] == split]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run by each method."""
    return {name: run(tmp_path_factory.mktemp(name) / "run", name) for name in METHODS}


def make_dino(heads_warm_up=False, **options):
    config = PretrainConfig(dino=DINOOptions(**(SMALL | options)), model="vit_nano_patch2_8")
    torch.manual_seed(0)
    made = DINO(redraw(create_model("vit_nano_patch2_8", num_classes=0), seed=3), config, heads_warm_up)
    made.before_step(0.0, 0.0, [])
    return made


def some_crops(method, B=3):
    generator = torch.Generator().manual_seed(1)
    noise = Noise(0, torch.arange(B))
    large, small = torch.rand(B, 2, 1, 8, 8, generator=generator), torch.rand(B, 2, 1, 4, 4, generator=generator)
    return Crops(large, small), noise


class TestCrops:
    def feed(self, pixels, **options):
        inputs = CropInputs(
            replace(load_preprocess(), img_size=16), DINOOptions(**({"local_crops": 3} | options)), patch=(4, 4)
        )
        images = ImageArray(pixels)
        data = Data("made", images, torch.zeros(len(pixels), 0), [], {"train": torch.arange(len(pixels))}, mode="grey")
        return inputs, TrainLoader(data, inputs, Augmentation(), 4, 0, False, 0, 0, 1, Values(data.targets))

    def test_sizes_and_numbers(self):
        pixels = torch.randint(0, 256, (8, 1, 40, 30), dtype=torch.uint8)
        inputs, loader = self.feed(pixels)
        crops = next(loader.batches(0)).inputs
        assert crops.large.shape == (4, 2, 1, 16, 16)
        assert crops.small.shape == (4, 3, 1, 8, 8)  # half, in whole patches
        assert inputs.size == "2 crops of 16x16 and 3 of 8x8"
        ready = inputs.augment(crops, Noise(0, torch.arange(4)), Augmentation(), mirror=True).inputs
        assert ready.large.shape == crops.large.shape
        assert ready.small.dtype == torch.float32

    def test_none_of_the_small_ones(self):
        _, loader = self.feed(torch.zeros(4, 1, 20, 20, dtype=torch.uint8), local_crops=0)
        assert next(loader.batches(0)).inputs.small.shape == (4, 0, 1, 8, 8)

    def test_every_crop_is_another_and_the_place_in_the_run_decides(self):
        pixels = torch.randint(0, 256, (8, 1, 40, 30), dtype=torch.uint8)
        _, loader = self.feed(pixels)
        first, again = next(loader.batches(0)), next(loader.batches(0))
        assert torch.equal(first.inputs.large, again.inputs.large)
        flat = first.inputs.large.flatten(0, 1)
        assert all(not torch.equal(flat[i], flat[j]) for i in range(8) for j in range(i))
        batches = loader.batches(0)
        second = (next(batches), next(batches))[1]
        alone = next(loader.batches(1))
        assert torch.equal(second.inputs.small, alone.inputs.small)

    def test_large_ones_show_more_than_small_ones(self):
        """Each pixel of the image is its own column number, so that a crop tells how wide a part it shows."""
        ramp = torch.arange(200, dtype=torch.uint8).expand(64, 1, 200, 200)
        _, loader = self.feed(ramp.contiguous(), global_scale=0.4, local_scale=0.05)
        crops = next(loader.batches(0)).inputs
        wide = [(c.amax((3, 4)).float() - c.amin((3, 4)).float()) / 200 for c in (crops.large, crops.small)]
        assert wide[0].min() > math.sqrt(0.4 * 3 / 4) - 0.1
        assert wide[1].max() < math.sqrt(0.4 * 4 / 3) + 0.1
        assert wide[0].mean() > wide[1].mean() + 0.2

    def test_options(self):
        with pytest.raises(ConfigError, match=r"dino\.local_size must be a multiple of patch_size \(4\), got 13"):
            CropInputs(load_preprocess(), DINOOptions(local_size=13), (4, 4))
        with pytest.raises(ConfigError, match=r"0 < local_scale <= global_scale <= 1, got 0\.5 and 0\.3"):
            DINOOptions(local_scale=0.5, global_scale=0.3)


def load_preprocess():
    preprocess = create_model("vit_nano_patch2_8").preprocess
    assert preprocess is not None
    return preprocess


class TestDINO:
    def test_the_loss_is_that_of_each_pass_by_itself(self):
        """Crop by crop, image by image, with the formulas of vitral.models.dino."""
        method = make_dino()
        crops, noise = some_crops(method)
        method.model.centre = torch.linspace(-0.2, 0.2, 32)
        redraw(method.model.student.head, seed=5)
        out = method.forward(method.model, crops, torch.zeros(3, 0), noise)
        loss = method.loss(out, torch.zeros(3, 0), torch.zeros(3, 0), torch.ones(3))
        total, pairs = 0.0, 0
        for b in range(3):
            views = [*crops.large[b], *crops.small[b]]
            for i in range(2):
                _, g_t = method.model.teacher(views[i][None])
                P_t = ((g_t - method.model.centre) / method.temperature).softmax(-1)
                for j, view in enumerate(views):
                    if i != j:
                        _, g_s = method.model.student(view[None])
                        total = total - (P_t * (g_s / 0.1).log_softmax(-1)).sum()
                        pairs += 1
        torch.testing.assert_close(loss, total / pairs, rtol=1e-5, atol=1e-5)

    def test_teacher_and_centre_follow_a_step(self):
        method = make_dino()
        crops, noise = some_crops(method)
        method.before_step(0.25, 1.0, [])
        out = method.forward(method.model, crops, torch.zeros(3, 0), noise)
        before = {k: t.clone() for k, t in method.model.teacher.state_dict().items()}
        centre = method.model.centre.clone()
        redraw(method.model.student, seed=9)
        method.after_update()
        m = 1 - (1 - 0.99) * (math.cos(math.pi * 0.25) + 1) / 2
        for name, theta_t in method.model.teacher.state_dict().items():
            theta_s = method.model.student.state_dict()[name]
            torch.testing.assert_close(theta_t, m * before[name] + (1 - m) * theta_s)
        torch.testing.assert_close(method.model.centre, 0.9 * centre + 0.1 * out.teacher.flatten(0, 1).mean(0))
        assert method.momentum == pytest.approx(m)

    def test_the_temperature_of_the_teacher_rises(self):
        method = make_dino(teacher_temperature=0.02, teacher_temperature_end=0.06, temperature_warmup=0.5)
        for progress, expected in ((0.0, 0.02), (0.25, 0.04), (0.5, 0.06), (0.9, 0.06)):
            method.before_step(progress, 0.0, [])
            assert method.temperature == pytest.approx(expected)

    def test_decay_follows_its_schedule_but_not_where_there_is_none(self):
        method = make_dino()
        method.config = replace(method.config, weight_decay=0.04, weight_decay_end=0.4)
        some = torch.nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.AdamW(
            [{"params": [some], "weight_decay": 0.04}, {"params": [torch.nn.Parameter(some)], "weight_decay": 0.0}]
        )
        method.before_step(0.5, 0.0, [optimizer])
        assert [group["weight_decay"] for group in optimizer.param_groups] == [pytest.approx(0.22), 0.0]

    def test_the_teacher_leaves_nothing_to_chance(self):
        method = make_dino()
        method.model.train()
        assert method.model.student.training
        assert not method.model.teacher.training

    def test_what_is_hidden_is_not_seen(self):
        """The student's answer does not change with the pixels of hidden patches; the teacher's does."""
        method = make_dino(ibot=1.0)
        masked = torch.zeros(1, 16, dtype=torch.bool)
        masked[0, [0, 5]] = True
        x = torch.rand(1, 1, 8, 8)
        other = x.clone()
        other[..., :2, :2] += 1.0  # patch 0
        student, teacher = method.model.student, method.model.teacher
        seen = [student.with_patches(image, masked, hide=True) for image in (x, other)]
        assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
        assert seen[0][2].shape == (2, 32)
        shown = [teacher.with_patches(image, masked, hide=False) for image in (x, other)]
        assert not torch.equal(shown[0][2], shown[1][2])
        torch.testing.assert_close(shown[0][1], teacher(x)[1])

    def test_half_of_the_large_crops_hide_their_share(self):
        method = make_dino(ibot=1.0, ibot_hidden=0.25)
        noise = Noise(0, torch.arange(400))
        masked = method._masked(torch.zeros(400, 1, 8, 8), noise)
        hidden = masked.sum(1)
        assert set(hidden.tolist()) == {0, 4}
        assert abs((hidden > 0).float().mean().item() - 0.5) < 0.08

    def test_the_other_terms_have_their_weights(self):
        crops, noise = some_crops(make_dino())

        def loss(**options):
            method = make_dino(**options)
            out = method.forward(method.model, crops, torch.zeros(3, 0), noise)
            return method, out, method.loss(out, torch.zeros(3, 0), torch.zeros(3, 0), torch.ones(3))

        _, out, plain = loss()
        _, _, spread = loss(koleo=0.5)
        expected = 0.5 * torch.stack([dino.koleo_loss(y) for y in out.features]).mean()
        torch.testing.assert_close(spread - plain, expected, rtol=1e-4, atol=1e-5)
        (_, _, one), (method, out, two) = loss(ibot=1.0), loss(ibot=2.0)
        answers = dino.teacher_probabilities(out.hidden_teacher, method.model.patch_centre, method.temperature)
        assert method.masked is not None
        assert method.masked.any()
        expected = dino.ibot_loss(out.hidden_student, answers, method.masked, 0.1)
        torch.testing.assert_close(two - one, expected, rtol=1e-4, atol=1e-5)

    def test_the_centre_is_a_mean_over_processes(self):
        """A process that is told the mean of both halves has the centre of the whole batch."""
        whole, (crops, noise) = make_dino(), some_crops(make_dino(), B=4)
        halves = [make_dino() for _ in range(2)]
        means = []
        for half, at in zip(halves, (slice(0, 2), slice(2, 4)), strict=True):
            out = half.forward(half.model, crops[at], torch.zeros(2, 0), Noise(0, torch.arange(4)[at]))
            means.append(torch.cat([out.teacher.flatten(0, 1).sum(0), torch.tensor([4.0])]))
        halves[0].mean = lambda x: torch.stack(means).mean(0)
        halves[0].after_update()
        whole.forward(whole.model, crops, torch.zeros(4, 0), noise)
        whole.after_update()
        torch.testing.assert_close(halves[0].model.centre, whole.model.centre)

    def test_parts_of_a_step_count_alike_for_the_centre(self):
        whole, parts, (crops, noise) = make_dino(), make_dino(), some_crops(make_dino(), B=4)
        whole.forward(whole.model, crops, torch.zeros(4, 0), noise)
        for at in (slice(0, 2), slice(2, 4)):
            parts.forward(parts.model, crops[at], torch.zeros(2, 0), Noise(0, torch.arange(4)[at]))
        whole.after_update()
        parts.after_update()
        torch.testing.assert_close(parts.model.centre, whole.model.centre)


def made_of(run):
    return json.loads((run.path / "config.json").read_text())


def state_of(run):
    checkpoint, _ = load_newest(run.path / "checkpoints")
    assert checkpoint is not None
    return checkpoint.tensors["model"]


class TestRest:
    """Parts that wait for their turn do not change by a bit."""

    @pytest.mark.slow
    def test_the_last_layer_waits(self, tmp_path):
        options = {"dino": SMALL | {"freeze_last_epochs": 2.0}, "epochs": 2}
        waited, learned = run(tmp_path / "a", **options), run(tmp_path / "b", dino=SMALL | {"freeze_last_epochs": 0.0})
        fresh = session.make_method(
            PretrainConfig(dino=DINOOptions(**SMALL), model="vit_nano_patch2_8"), 1, Processes(0, 1)
        )
        start = fresh.model.state_dict()["student.head.last_layer.weight"]
        assert torch.equal(state_of(waited)["student.head.last_layer.weight"], start)
        assert not torch.equal(state_of(learned)["student.head.last_layer.weight"], start)
        assert not torch.equal(state_of(waited)["student.head.mlp.0.weight"], fresh.model.student.head.mlp[0].weight)

    def test_nothing_waits_for_longer_than_a_quarter_of_the_clock(self):
        method = make_dino(heads_warm_up=True)
        for minutes, progress, waits in ((None, 0.9, True), (5.0, 0.2, True), (5.0, 0.3, False)):
            method.config = replace(method.config, max_minutes=minutes)
            method.before_step(progress, 0.1, [])
            assert method.rests(0.1, 1.0) == waits
        assert not method.rests(1.0, 1.0)

    @pytest.mark.parametrize("method", [pytest.param("dino", marks=pytest.mark.slow), "mae"])
    def test_a_given_backbone_waits_for_new_heads(self, finished, tmp_path, capsys, method):
        start = str(finished[method].path)
        given = load_file(finished[method].path / "model.safetensors")
        waited = run(tmp_path / "a", method, model=start, epochs=1, head_warmup_epochs=1.0, quiet=False)
        said = capsys.readouterr().err
        assert re.search(r"comes without heads: new ones learn alone for 1\s+epochs", said)
        now = load_file(waited.path / "model.safetensors")
        assert all(torch.equal(now[name], given[name]) for name in given)
        moved = run(tmp_path / "b", method, model=start, epochs=2, head_warmup_epochs=1.0)
        later = load_file(moved.path / "model.safetensors")
        assert not torch.equal(later["blocks.0.attn.qkv.weight"], given["blocks.0.attn.qkv.weight"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("steps", [3, 6])
def test_a_stopped_run_goes_on_to_the_same_bits(finished, tmp_path, monkeypatch, method, steps):
    with stop_after(monkeypatch, session, steps), pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", method)
    again = run(tmp_path / "run", method, resume=True)
    whole, parts = state_of(finished[method]), state_of(again)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert [line["loss"] for line in lines(again, "train")] == [
        line["loss"] for line in lines(finished[method], "train")
    ]


class TestHealth:
    def test_signals_are_in_the_log_and_in_the_run(self, finished):
        for name, made in finished.items():
            own = {"loss"} if name == "mae" else {"teacher_entropy", "teacher_information"}
            expected = {"feature_rank", "feature_std", "knn", "collapsed"} | own
            assert set(made.metrics["val"]) == expected
            assert len(lines(made, "val")) == 2
            assert expected <= set(lines(made, "val")[-1])
            assert json.loads((made.path / "config.json").read_text())["metrics"] == made.metrics
        assert all("teacher_entropy" in line for line in lines(finished["dino"], "train"))

    def test_they_are_those_of_the_kept_model(self, finished):
        """k-NN accuracy of the weights that were written, by the probe itself on the same images."""
        from vitral.inference.health import Health
        from vitral.inference.probe import knn_probe

        made = finished["dino"]
        config = PretrainConfig.from_dict(json.loads((made.path / "config.json").read_text())["train"])
        health = Health(made.data, None, config)
        model = vitral.load_model(made.path, quiet=True)
        data, pixels = made.data, made.data.inputs.pixels
        order = torch.randperm(len(data.splits["train"]), generator=torch.Generator().manual_seed(0))
        keys, queries = data.splits["train"][order[:200]], health.watched
        x = (pixels.float() / 255 - torch.tensor(model.preprocess.mean)) / torch.tensor(model.preprocess.std)
        with torch.no_grad():
            found = knn_probe(
                (model.embed(x[keys]), data.targets[keys]), (model.embed(x[queries]), data.targets[queries])
            )
        assert made.metrics["val"]["knn"] == pytest.approx(found["accuracy"])

    def test_without_labels_there_is_no_k_nn_and_with_others_there_is(self, tmp_path):
        bare = replace(load_digits(), targets=torch.zeros(1797, 0), classes=[], kind="none")
        options = QUICK | METHODS["mae"] | {"epochs": 1}
        made = vitral.pretrain(bare, out=tmp_path / "a", **options)
        assert "knn" not in made.metrics["val"]
        made = vitral.pretrain(bare, out=tmp_path / "b", labelled="digits", **options)
        assert made.metrics["val"]["knn"] > 0.15  # chance is 0.1
        colour = replace(load_digits(), mode="rgb")  # labelled images of other channels
        made = vitral.pretrain(bare, out=tmp_path / "d", labelled=colour, **options)
        assert made.metrics["val"]["knn"] > 0.15
        with pytest.raises(DataError, match="has no class labels for the k-NN signal"):
            vitral.pretrain(bare, out=tmp_path / "c", labelled=bare, **options)

    def test_labels_are_not_learned_from(self, finished, tmp_path):
        data = load_digits()
        mixed = replace(data, targets=data.targets[torch.randperm(1797, generator=torch.Generator().manual_seed(3))])
        splits = finished["dino"].data.splits  # with other labels another part would be kept apart
        made = vitral.pretrain(replace(mixed, splits=splits), out=tmp_path / "run", **(QUICK | METHODS["dino"]))
        assert all(torch.equal(state_of(made)[name], t) for name, t in state_of(finished["dino"]).items())

    def test_uniform_collapse_is_provoked_and_said(self, tmp_path, capsys):
        """A teacher that is not sharp at all gives every image the same even answer."""
        soft = SMALL | {"teacher_temperature": 5.0, "teacher_temperature_end": 5.0}
        made = run(tmp_path / "run", dino=soft, quiet=False)
        said = " ".join(capsys.readouterr().err.split())
        assert "warning: uniform collapse: the teacher gives every image the same even answer: sharpen it" in said
        assert made.metrics["val"]["collapsed"] == 1
        assert "uniform collapse" in (made.path / "report.html").read_text()

    @pytest.mark.slow
    def test_one_point_collapse_is_provoked_and_said(self, tmp_path, capsys):
        """Sharp, and with a centre that never moves, the teacher settles on one prototype for every image."""
        still = SMALL | {"centre_momentum": 1.0, "teacher_temperature": 0.02, "teacher_temperature_end": 0.02}
        still |= {"freeze_last_epochs": 0.0, "momentum": 0.5}
        made = run(tmp_path / "run", dino=still, quiet=False, epochs=12, lr=1e-2, warmup_epochs=0.5)
        said = " ".join(capsys.readouterr().err.split())
        assert "warning: one-point collapse: the teacher gives every image the same few prototypes" in said
        assert made.metrics["val"]["collapsed"] == 1

    def test_a_healthy_run_says_nothing(self, finished):
        assert finished["mae"].metrics["val"]["collapsed"] == 0
        assert "No sign of collapse" in (finished["mae"].path / "report.html").read_text()


LONG = {
    "optimizer": "muon", "lr": 2e-3, "muon_lr": 0.02, "batch_size": 64, "epochs": 10,
    "health_images": 360, "val_fraction": 0.25, "neighbours": 1000,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("mae", {"mae": {"decoder_dim": 32, "decoder_depth": 1, "norm_pixels": False, "mask_ratio": 0.5}}),
        ("dino", {"dino": SMALL | {"freeze_last_epochs": 0.0, "prototypes": 128, "koleo": 0.1, "momentum": 0.98}}),
    ],
)
def test_what_is_learned_tells_digits_apart(tmp_path, method, options):
    """k-NN by the features of a model that has seen no label beats k-NN by those of a fresh one."""
    made = run(tmp_path / "run", method, **(LONG | options))
    fresh = run(tmp_path / "fresh", method, **(LONG | options | {"lr": 0.0, "muon_lr": 0.0, "epochs": 1}))
    assert made.metrics["val"]["knn"] > fresh.metrics["val"]["knn"] + 0.1
    if method == "mae":
        assert made.metrics["val"]["loss"] < 0.6 * fresh.metrics["val"]["loss"]


class TestRun:
    def test_what_is_there(self, finished):
        for name, made in finished.items():
            files = {path.name for path in made.path.iterdir()}
            assert files >= {"README.md", "checkpoints", "config.json", "metrics.jsonl", "model.safetensors"}
            document = json.loads((made.path / "config.json").read_text())
            assert (document["task"], document["labels"], document["model"]["num_classes"]) == ("pretrain", None, 0)
            page = (made.path / "report.html").read_text()
            assert page.count("<svg") == (4 if name == "mae" else 6)
            assert "without labels" in page
            assert "vitral train DATA --model" in page
            kinds = {"attention", "mae"} if name == "mae" else {"attention"}
            assert {path.name for path in (made.path / "pictures").iterdir()} == kinds
            for kind in kinds:
                assert {p.name for p in (made.path / "pictures" / kind).iterdir()} == {"epoch-0001.png", "last.png"}

    def test_dino_keeps_the_teacher(self, finished):
        kept, state = load_file(finished["dino"].path / "model.safetensors"), state_of(finished["dino"])
        assert all(torch.equal(kept[name], state[f"teacher.backbone.{name}"]) for name in kept)

    def test_it_is_a_start_for_training(self, finished, tmp_path):
        quick = {"epochs": 1, "quiet": True}
        made = vitral.train(
            "digits", out=tmp_path / "run", model=str(finished["dino"].path), lr=0.0, muon_lr=0.0, **quick
        )
        kept = load_file(finished["dino"].path / "model.safetensors")
        tuned = load_file(made.path / "model.safetensors")
        assert set(tuned) - set(kept) == {"head.weight", "head.bias"}
        assert all(torch.equal(tuned[name], kept[name]) for name in kept)

    def test_it_explains_and_embeds_but_tells_no_class(self, finished, tmp_path):
        image = np.zeros((8, 8), np.uint8)
        predictor = vitral.Predictor(finished["dino"].path)
        assert predictor.embed(image).shape == (1, 64)
        assert vitral.explain(predictor, image).maps.shape[1:] == (4, 4)
        with pytest.raises(InputError, match=r"no classes to answer with: .*vitral train DATA --model"):
            predictor.predict(image)

    def test_it_is_not_evaluated_without_a_probe(self, finished, capsys):
        assert main(["eval", str(finished["dino"].path), "digits"]) == 2
        assert "vitral eval RUN DATA --probe knn" in capsys.readouterr().err
        assert main(["eval", str(finished["dino"].path), "digits", "--probe", "knn", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["accuracy"] > 0.15

    def test_reconstructions_show_what_was_seen(self, finished):
        sheet = np.asarray(Image.open(finished["mae"].path / "pictures" / "mae" / "last.png"))
        assert sheet.shape[2] == 3
        assert sheet.std() > 10

    def test_a_folder_without_classes(self, tmp_path):
        for i in range(24):
            place = tmp_path / "photos" / (".", "2025", "2026/may")[i % 3]
            place.mkdir(parents=True, exist_ok=True)
            noise = np.random.default_rng(i).integers(0, 255, (20 + i, 30, 3), dtype=np.uint8)
            Image.fromarray(noise).save(place / f"{i}.png")
        (tmp_path / "photos" / "0broken.png").write_bytes(b"no image")
        made = vitral.pretrain(
            tmp_path / "photos", out=tmp_path / "run", **(QUICK | METHODS["dino"] | {"epochs": 1, "batch_size": 8})
        )
        assert made.data.kind == "none"
        assert (len(made.data.splits["train"]), len(made.data.splits["val"])) == (24, 1)  # too few to show anything
        assert "knn" not in made.metrics["val"]
        assert 1 < made.metrics["val"]["feature_rank"] <= 25

    def test_words_instead_of_images(self, tmp_path):
        with pytest.raises(DataError, match="pretraining is for images"):
            vitral.pretrain("numbers-en-it", out=tmp_path / "run", **QUICK)

    def test_a_run_of_another_kind_is_not_gone_on_with(self, finished, tmp_path):
        with pytest.raises(CheckpointError, match="is a run to pretrain, not to classify"):
            vitral.train("digits", out=finished["dino"].path, resume=True, task="classify", quiet=True)
        with pytest.raises(CheckpointError, match="already holds a run"):
            run(finished["dino"].path)
        with pytest.raises(CheckpointError, match=r"lr: 0\.001 in the run, 0\.5 now"):
            run(finished["mae"].path, "mae", resume=True, lr=0.5)

    def test_from_the_command_line(self, tmp_path, capsys):
        flags = ["--method", "mae", "--epochs", "1", "--model", "vit_nano_patch2_8", "--mae.decoder-dim", "16"]
        flags += ["--health-images", "40", "--neighbours", "100", "--batch-size", "256"]
        out = str(tmp_path / "run")
        assert main(["pretrain", "digits", "--out", out, "--json", *flags]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["path"] == out
        assert 0 < said["metrics"]["val"]["knn"] <= 1
        document = json.loads((tmp_path / "run" / "config.json").read_text())
        assert document["train"]["augment"]["crop_scale"] == 0.5  # the recipe of the method
        assert document["train"]["mae"]["decoder_dim"] == 16
        assert main(["pretrain", "digits", "--out", out, "--resume"]) == 0
        assert main(["pretrain", "digits", "--method", "byol", "--out", out]) == 2
        (tmp_path / "dino.toml").write_text('method = "dino"')
        assert main(["pretrain", "digits", "--config", str(tmp_path / "dino.toml"), "--method", "mae"]) == 2
        assert "is for --method dino, not for mae; omit one of them" in capsys.readouterr().err

    def test_mae_options_reach_the_model(self):
        config = PretrainConfig.from_dict({"method": "mae", "mae": {"mask_ratio": 0.5, "decoder_dim": 24}})
        made = MAE(create_model("vit_nano_patch2_8", num_classes=0), config, heads_warm_up=False)
        assert (made.model.config.mask_ratio, made.model.config.decoder_dim) == (0.5, 24)

    def test_mae_reads_patches_and_dino_what_the_model_reads(self, finished):
        pools = {name: made_of(run)["model"]["global_pool"] for name, run in finished.items()}
        assert pools == {"dino": "cls", "ibot": "cls", "mae": "mean"}


def test_every_recipe_can_be_used():
    for name in list_recipes():
        kind = PretrainConfig if name.endswith(("-dino", "-mae")) else TrainConfig
        assert kind.from_dict(read_recipe(name)).epochs > 0
