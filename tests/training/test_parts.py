import math

import pytest
import torch

from helpers import difference, images, redraw
from vitral.config import TrainConfig
from vitral.errors import ConfigError, UnknownNameError
from vitral.models.zoo import create_model
from vitral.tasks.classify import Classify, fit_temperature
from vitral.tasks.metrics import calibration_bins, classification_metrics, wilson_interval
from vitral.training.ema import EMA
from vitral.training.finetune import freeze
from vitral.training.loop import recompute_blocks
from vitral.training.optim import Muon, _orthogonal, make_optimizers
from vitral.training.precision import resolve_device, resolve_precision
from vitral.training.schedule import cosine_with_warmup


def nano(**options):
    return create_model("vit_nano_patch2_8", seed=0, **options)


class TestSchedule:
    def test_it_rises_linearly_then_falls_as_a_cosine(self):
        values = [cosine_with_warmup(p, 0.2, 0.1) for p in (0, 0.1, 0.2, 0.6, 1.0)]
        assert values == pytest.approx([0, 0.5, 1, 0.55, 0.1])
        assert cosine_with_warmup(0.0, 0.0, 0.0) == 1
        assert cosine_with_warmup(1.5, 0.2, 0.0) == pytest.approx(0)


class TestOptimisers:
    def test_what_is_decayed_and_what_is_not(self):
        model = create_model("vit_nano_conv_patch2_8", reg_tokens=2, init_values=0.1)
        (adamw,) = make_optimizers(model, TrainConfig())
        names = {id(p): name for name, p in model.named_parameters()}
        decayed = {names[id(p)] for g in adamw.param_groups if g["weight_decay"] for p in g["params"]}
        matrices = {
            f"blocks.{i}.{part}.weight" for i in range(4) for part in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
        }
        assert decayed == matrices | {"patch_embed.convs.0.weight", "patch_embed.proj.weight", "head.weight"}
        assert sum(len(g["params"]) for g in adamw.param_groups) == len(names)

    def test_muon_takes_the_matrices_of_the_blocks(self):
        _, muon = make_optimizers(nano(), TrainConfig(optimizer="muon"))
        assert all(p.ndim == 2 for g in muon.param_groups for p in g["params"])
        assert sum(len(g["params"]) for g in muon.param_groups) == 16
        assert {g["peak_lr"] for g in muon.param_groups} == {0.02}

    def test_muon_takes_the_kernels_of_a_conv_stem_as_matrices(self):
        model = create_model("vit_nano_conv_patch2_8")
        _, muon = make_optimizers(model, TrainConfig(optimizer="muon"))
        kernels = [model.patch_embed.convs[0].weight, model.patch_embed.proj.weight]
        taken = {id(p) for g in muon.param_groups for p in g["params"]}
        assert {id(p) for p in kernels} <= taken
        assert id(create_model("vit_nano_patch2_8").patch_embed.proj.weight) not in taken
        before = kernels[1].detach().clone()
        kernels[1].grad = images(*kernels[1].shape)
        Muon([{"params": [kernels[1]], "lr": 0.1}]).step()
        update = ((before - kernels[1]) / 0.1).flatten(1)
        values = torch.linalg.svdvals(update / max(1.0, update.shape[0] / update.shape[1]) ** 0.5)
        assert 0.5 < values.min() <= values.max() < 1.6

    def test_layer_decay_falls_from_the_head_to_the_patches(self):
        model = nano()
        (adamw,) = make_optimizers(model, TrainConfig(layer_decay=0.5, lr=1.0))
        names = {id(p): name for name, p in model.named_parameters()}
        rate = {names[id(p)]: g["lr"] for g in adamw.param_groups for p in g["params"]}
        assert rate["head.weight"] == rate["norm.bias"] == 1
        assert rate["blocks.3.attn.qkv.weight"] == 0.5
        assert rate["blocks.0.norm1.weight"] == 0.5**4
        assert rate["patch_embed.proj.weight"] == rate["pos_embed"] == rate["cls_token"] == 0.5**5

    @pytest.mark.parametrize("shape", [(3, 7, 7), (2, 5, 11), (1, 11, 5)])
    def test_muons_update_is_nearly_orthogonal_and_points_the_same_way(self, shape):
        g = images(*shape)
        u = _orthogonal(g)
        singular = torch.linalg.svdvals(u)
        assert singular.min() > 0.6
        assert singular.max() < 1.3
        left, _, right = torch.linalg.svd(g, full_matrices=False)
        assert difference(u, left @ right) < 0.45
        assert ((u * g).sum((1, 2)) > 0).all()

    def test_a_qkv_weight_is_three_matrices(self):
        weight = torch.nn.Parameter(torch.zeros(15, 5))
        weight.grad = images(15, 5)
        Muon([{"params": [weight], "lr": 1.0}]).step()
        for part, grad in zip(weight.detach().split(5), weight.grad.split(5), strict=True):
            alone = torch.nn.Parameter(torch.zeros(5, 5))
            alone.grad = grad.clone()
            Muon([{"params": [alone], "lr": 1.0}]).step()
            assert difference(part, alone.detach()) < 1e-5

    @pytest.mark.parametrize("optimizer", ["adamw", "muon"])
    def test_both_learn(self, optimizer):
        model = nano()
        x, y = images(40, 1, 8, 8), torch.arange(40) % 10
        optimizers = make_optimizers(model, TrainConfig(optimizer=optimizer, lr=3e-3))
        losses = []
        while (not losses or losses[-1] >= 0.1) and len(losses) < 200:  # how many it takes depends on the kernels
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            for o in optimizers:
                o.step()
                o.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(math.log(10), abs=0.1)
        assert losses[-1] < 0.1


class TestEMA:
    def test_it_is_its_formula(self):
        model = torch.nn.Linear(2, 1, bias=False)
        model.weight.data.zero_()
        ema = EMA(model, 0.9)
        expected = 0.0
        for step, value in enumerate((1.0, 2.0, 5.0), start=1):
            model.weight.data.fill_(value)
            ema.update()
            decay = min(0.9, (1 + step) / (10 + step))
            expected = decay * expected + (1 - decay) * value
        assert ema.state_dict()["weight"].tolist() == [pytest.approx([expected] * 2)]
        ema.swap()
        assert model.weight.tolist() == [pytest.approx([expected] * 2)]
        ema.swap()
        assert model.weight.tolist() == [[5.0, 5.0]]


def test_frozen_parts_do_not_train():
    model = nano()
    freeze(model, "patch_embed, blocks.0")
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert all(name.startswith(("patch_embed", "blocks.0")) for name in frozen)
    assert len(frozen) == 2 + 12
    with pytest.raises(UnknownNameError, match=r"unknown part to freeze 'block\.0'; did you mean blocks\.0"):
        freeze(model, "block.0")


def test_recomputed_blocks_give_the_same_gradients():
    plain, again = (redraw(nano(), seed=1) for _ in range(2))
    recompute_blocks(again)
    x = images(3, 1, 8, 8)
    for model in (plain, again):
        model.train()
        model(x).square().sum().backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert difference(b.grad, a.grad) < 1e-6, name


class TestClassify:
    task = Classify(["a", "b", "c"], label_smoothing=0.1)
    logits = images(4, 3)
    targets = torch.tensor([0, 2, 1, 1])

    def literal(self, logits, targets):
        p = logits.log_softmax(1)
        smooth = torch.full_like(p, 0.1 / 3)
        smooth[range(4), targets] += 0.9
        return -(smooth * p).sum(1)

    def test_loss(self):
        loss = self.task.loss(self.logits, self.targets, self.targets, torch.ones(4))
        torch.testing.assert_close(loss, self.literal(self.logits, self.targets).mean())

    def test_mixed_targets(self):
        own, partners = torch.tensor([0.7, 1.0, 0.5, 0.9]), torch.tensor([2, 2, 0, 0])
        expected = own * self.literal(self.logits, self.targets) + (1 - own) * self.literal(self.logits, partners)
        torch.testing.assert_close(self.task.loss(self.logits, self.targets, partners, own), expected.mean())

    def test_sums(self):
        sums = self.task.sums(torch.eye(3)[[0, 2, 0]] * 5, torch.tensor([0, 2, 1]))
        assert sums["count"] == 3
        assert sums["accuracy"] == 2

    def test_temperature_is_found(self):
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn(20000, 5, generator=generator) * 2
        targets = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
        assert fit_temperature(logits * 3, targets) == pytest.approx(3, rel=0.05)
        assert fit_temperature(logits / 2, targets) == pytest.approx(0.5, rel=0.05)

    @pytest.mark.parametrize("n", [10, 70, 500])
    def test_without_a_mistake_a_model_is_as_sure_as_so_many_images_allow(self, n):
        targets = torch.arange(n) % 5
        noise = torch.randn(n, 5, generator=torch.Generator().manual_seed(1))
        logits = 3 * torch.eye(5)[targets] + 0.1 * noise
        sure = (logits / fit_temperature(logits, targets)).softmax(1).gather(1, targets[:, None])
        assert float(sure.mean()) == pytest.approx((n + 1) / (n + 2), abs=0.2 / n)


class TestMetrics:
    def test_wilson_interval(self):
        assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
        assert wilson_interval(10, 10)[1] == pytest.approx(1)
        assert wilson_interval(0, 0) == (0, 1)

    def test_against_scikit_learn(self):
        from sklearn import metrics

        logits, targets = images(200, 4) * 2, torch.randint(0, 4, (200,), generator=torch.Generator().manual_seed(0))
        ours = classification_metrics(logits, targets, list("abcd"), temperature=1.0)
        said = logits.argmax(1)
        assert ours["accuracy"] == pytest.approx(metrics.accuracy_score(targets, said))
        assert ours["confusion"] == metrics.confusion_matrix(targets, said).tolist()
        assert ours["loss"] == pytest.approx(metrics.log_loss(targets, logits.double().softmax(1)))
        precision, recall, f1, count = metrics.precision_recall_fscore_support(targets, said)
        for i, row in enumerate(ours["by_class"].values()):
            expected = (recall[i], precision[i], f1[i], count[i])
            assert (row["recall"], row["precision"], row["f1"], row["images"]) == pytest.approx(expected)

    def test_calibration_bins(self):
        bins = calibration_bins(torch.tensor([0.05, 0.95, 0.99, 1.0]), torch.tensor([False, True, True, False]))
        assert [b["count"] for b in bins] == [1, 3]
        assert bins[1]["accuracy"] == pytest.approx(2 / 3)
        assert bins[1]["confidence"] == pytest.approx(0.98)


class TestPrecision:
    def test_auto_is_fp32_on_a_cpu(self):
        assert resolve_precision("auto", torch.device("cpu")) == (None, "")

    def test_bf16_is_tried_in_a_child_process(self, monkeypatch):
        monkeypatch.setattr("vitral.training.precision._PROBE", "import os; os.kill(os.getpid(), 4)")
        dtype, notice = resolve_precision("bf16", torch.device("cpu"))
        assert dtype is None
        assert "bf16 kills the process on this CPU" in notice
        monkeypatch.setattr("vitral.training.precision._PROBE", "pass")
        assert resolve_precision("bf16", torch.device("cpu")) == (torch.bfloat16, "")

    def test_a_device_that_is_not_there(self):
        if not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="device cuda is not available here; use --device cpu or auto"):
                resolve_device("cuda")
        assert resolve_device("cpu") == torch.device("cpu")
