"""A linear head on frozen features: what is fitted, how it is judged, and which model is kept."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import vitral
from vitral.config import RegressOptions
from vitral.data.sources.base import fold_numbers
from vitral.inference.frozen import FrozenStart, cross_validate, fit_head, standard_error
from vitral.tasks.classify import Classify
from vitral.tasks.regress import Regress


def classes(n=120, noise=0.5, seed=0):
    """Features (n, 6) whose first three values show the class, and the classes."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = noise * torch.randn(n, 6, generator=generator)
    x[torch.arange(n), y] += 2
    return 100 * x + 7, y  # far from standardised


@pytest.mark.parametrize(("n", "folds"), [(30, 5), (31, 4), (3, 3)])
def test_folds_share_every_class(n, folds):
    y = torch.arange(n) % 3
    part = fold_numbers(y, folds, seed=0)
    for label in range(3):
        counts = torch.bincount(part[y == label], minlength=folds)
        assert counts.max() - counts.min() <= 1
    assert sorted(part.unique().tolist()) == list(range(folds))
    assert torch.equal(part, fold_numbers(y, folds, seed=0))


def test_the_head_minimises_the_loss_of_the_task():
    task = Classify(["a", "b", "c"])
    x, y = classes()
    head = fit_head(task, x, y, decay=0.1)
    mean, std = x.mean(0), x.std(0, correction=0)
    W, b = (head.weight * std).requires_grad_(), (head.bias + head.weight @ mean).requires_grad_()
    loss = task.loss((x - mean) / std @ W.mT + b, y, y, torch.ones(len(x))) + 0.05 * W.square().sum()
    gradients = torch.autograd.grad(loss, [W, b])
    assert max(g.abs().max() for g in gradients) < 1e-3


def test_regression_is_ridge_regression():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 5, generator=generator, dtype=torch.float64).float()
    y = (x @ torch.tensor([1.0, -2, 0, 0.5, 3]) + 4)[:, None]
    task = Regress(["count"], [float(y.mean())], [float(y.std(correction=0))], RegressOptions(loss="squared"))
    head = fit_head(task, x, y, decay=0.3)
    mean, std = x.mean(0), x.std(0, correction=0)
    z, t = (x - mean) / std, (y - y.mean()) / y.std(correction=0)
    ridge = torch.linalg.solve(z.mT @ z / 80 + 0.3 * torch.eye(5), z.mT @ t / 80)
    torch.testing.assert_close(head(x), z @ ridge, atol=1e-3, rtol=0)


def test_outputs_of_the_cross_validation_are_for_images_that_were_held_out():
    task = Classify(["a", "b", "c"])
    x, _ = classes()
    noise = torch.randint(3, (len(x),), generator=torch.Generator().manual_seed(2))
    _, outputs = cross_validate(
        task, torch.randn(len(x), 200, generator=torch.Generator().manual_seed(3)), noise, noise
    )
    assert (outputs.argmax(1) == noise).float().mean() < 0.55  # a head fitted on them would be right everywhere
    _, outputs = cross_validate(task, *classes(), classes()[1])
    assert (outputs.argmax(1) == classes()[1]).float().mean() > 0.95


def test_the_standard_error_is_that_of_a_share():
    task = Classify(["a", "b"])
    y = torch.zeros(400, dtype=torch.long)
    logits = torch.eye(2)[(torch.arange(400) % 4 == 0).long()]  # 75 % right
    assert standard_error(task, task.found(logits, y)) == pytest.approx((0.75 * 0.25 / 400) ** 0.5, rel=0.25)
    assert standard_error(task, task.found(logits, y), task.found(logits, y)) == 0


class TestChoice:
    """Fine-tuning replaces the probe if it is better by one standard error."""

    def start(self, right):
        start = FrozenStart()
        start.task, n = Classify(["a", "b"]), 100
        start.indices, start.y = torch.arange(n), torch.zeros(n, dtype=torch.long)
        start.outputs = torch.eye(2)[(torch.arange(n) >= right).long()]
        return start

    def found(self, right, shift=0):
        wrong = (torch.arange(100) >= right).long().roll(shift)
        return {"logits": torch.eye(2)[wrong], "targets": torch.zeros(100).long(), "indices": torch.arange(100)}

    @pytest.mark.parametrize(
        ("before", "after", "shift", "kept"),
        [(70, 90, 0, True), (70, 70, 0, False), (70, 73, 50, False), (70, 95, 50, True), (90, 60, 0, False)],
    )
    def test_it_needs_one_error(self, before, after, shift, kept):
        start, printed = self.start(before), []
        assert start.prefers_training(self.found(after, shift), printed.append) is kept
        assert start.result["kept"] is not kept
        assert f"{after / 100:.3f} fine-tuned, {before / 100:.3f} by the probe" in printed[0]
        assert ("the probe is kept" in printed[0]) is not kept


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Bright and dark images of 40 pixels, which random features separate."""
    root = tmp_path_factory.mktemp("frozen") / "photos"
    for i in range(60):
        folder = root / ("dark", "light")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 120, (40, 40, 3), np.uint8) + 120 * np.uint8(i % 2)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.fixture(scope="module")
def weights(photos, tmp_path_factory):
    """A model to start from."""
    path = tmp_path_factory.mktemp("weights") / "start"
    vitral.save_model(vitral.create_model("vit_nano_conv_patch2_8", in_chans=3, seed=0), path, layout="vitral")
    return path


def test_a_probe_is_a_run_whose_backbone_is_unchanged(photos, weights, tmp_path, capsys):
    run = vitral.train(photos, model=str(weights), preset="probe", pool="cls_mean", crop="squash", out=tmp_path / "run")
    assert run.metrics["test"]["accuracy"] == 1
    assert "linear probe of the frozen features: accuracy 1.000" in capsys.readouterr().err
    before, after = load_file(weights / "model.safetensors"), load_file(run.path / "model.safetensors")
    body = [name for name in before if not name.startswith("head.")]
    assert all(torch.equal(before[name], after[name]) for name in body)
    assert after["head.weight"].shape == (2, 2 * before["norm.weight"].numel())
    document = json.loads((run.path / "config.json").read_text())
    assert document["probe"]["accuracy"] == 1
    assert (document["preprocess"]["crop_mode"], document["model"]["global_pool"]) == ("squash", "cls_mean")
    assert (run.path / "report.html").exists()


def test_fine_tuning_that_is_no_better_keeps_the_probe(photos, weights, tmp_path, capsys):
    options = {"model": str(weights), "probe": "first", "max_steps": 2, "lr": 1e-2, "batch_size": 8}
    run = vitral.train(photos, out=tmp_path / "run", **options)
    assert "the probe is kept" in capsys.readouterr().err  # both are right everywhere
    before, after = load_file(weights / "model.safetensors"), load_file(run.path / "model.safetensors")
    assert torch.equal(before["norm.weight"], after["norm.weight"])
    assert run.metrics["test"]["accuracy"] == 1


def test_a_model_without_a_linear_head_is_refused(photos, tmp_path):
    path = tmp_path / "start"
    vitral.save_model(
        vitral.create_model("vit_nano_patch2_8", in_chans=3, num_classes=2, head="mlp", seed=0), path, layout="vitral"
    )
    with pytest.raises(vitral.errors.ConfigError, match="a probe needs a linear head"):
        vitral.train(photos, model=str(path), probe="first", out=tmp_path / "run")
