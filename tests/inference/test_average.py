"""Test-time augmentation and ensembles of folds."""

import json

import pytest
import torch
from torch.testing import assert_close

import vitral
from vitral import Predictor, create_model
from vitral.cli.main import main
from vitral.config import SegmenterConfig
from vitral.data.sources.open import open_data
from vitral.errors import CheckpointError, InputError
from vitral.inference.average import Averaged
from vitral.models.segmenter import Segmenter
from vitral.training.folds import split_folds

TINY = ["--model", "vit_nano_conv_patch2_8", "--max-steps", "2", "--batch-size", "8"]


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory):
    """The directory of a cross-validation, and what it printed."""
    out = tmp_path_factory.mktemp("folds") / "run"
    assert main(["train", "digits", "--folds", "3", "--out", str(out), "--label-fraction", "0.05", *TINY]) == 0
    return out


@pytest.fixture
def images():
    return torch.randint(256, (3, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_the_mean_is_over_all_networks_and_views():
    x = torch.arange(12.0).reshape(1, 1, 3, 4)
    first, second = (lambda x: x[:, 0, 0, :1]), (lambda x: 10 * x[:, 0, 0, :1])
    assert Averaged([first], mirror=True)(x).item() == (0 + 3) / 2
    assert Averaged([first, second], mirror=True)(x).item() == (0 + 3 + 0 + 30) / 4
    assert Averaged([first, second], mirror=False)(x).item() == 0


@pytest.mark.parametrize("engine", ["eager", "packed"])
def test_a_mirrored_image_has_the_same_prediction(tmp_path, engine, images):
    model = create_model("vit_nano_conv_patch2_8", num_classes=10, seed=0)
    model.labels = list("0123456789")
    vitral.save_model(model, tmp_path / "run", layout="vitral")
    plain, tta = (Predictor(tmp_path / "run", engine=engine, tta=tta) for tta in (False, True))
    assert tta.engine == engine
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(plain.logits(x), plain.logits(x.flip(-1)), atol=1e-3)
    assert_close(tta.logits(x), tta.logits(x.flip(-1)))
    assert_close(tta.logits(x), (plain.logits(x) + plain.logits(x.flip(-1))) / 2)
    assert_close(tta.embed(list(images)), plain.embed(list(images)))


def test_every_image_is_tested_once_and_never_in_its_own_training():
    data = open_data("digits")
    folds = split_folds(data, 5, seed=0)
    together = torch.cat([fold.splits["test"] for fold in folds]).sort().values
    assert_close(together, torch.cat([data.splits[p] for p in ("train", "val") if p in data.splits]).sort().values)
    for fold in folds:
        assert not torch.isin(fold.splits["train"], fold.splits["test"]).any()
        counts = data.targets[fold.splits["test"]].bincount()
        assert counts.max() - counts.min() <= 8  # the digits are nearly even, and so is every fold
        assert not torch.isin(data.splits["test"], torch.cat(list(fold.splits.values()))).any()


def test_an_ensemble_averages_the_logits_of_its_folds(ensemble, images):
    members = [Predictor(ensemble / f"fold-{k}") for k in (1, 2, 3)]
    together = Predictor(ensemble)
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert_close(together.logits(x), torch.stack([member.logits(x) for member in members]).mean(0))
    assert "mean of 3 models" in repr(together)
    assert len(together.predict(list(images))) == 3
    with pytest.raises(InputError, match="ensemble"):
        together.embed(list(images))


def test_mean_and_spread_of_the_folds_are_recorded(ensemble):
    document = json.loads((ensemble / "folds.json").read_text())
    assert document["folds"] == ["fold-1", "fold-2", "fold-3"]
    scores = torch.tensor(
        [
            json.loads((ensemble / f / "config.json").read_text())["metrics"]["test"]["accuracy"]
            for f in document["folds"]
        ]
    ).double()
    assert document["metrics"]["test"]["accuracy_mean"] == pytest.approx(float(scores.mean()))
    assert document["metrics"]["test"]["accuracy_stdev"] == pytest.approx(float(scores.std()))


def test_the_commands_use_an_ensemble(ensemble, capsys):
    assert main(["eval", str(ensemble), "digits", "--tta", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["split"] == "test"
    assert main(["eval", str(ensemble), "digits", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] != measured["loss"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"folds": ["../run/fold-1"], "metrics": {}}, "names '../run/fold-1', which is no run directory"),
        ({"folds": ["nothing"], "metrics": {}}, "names 'nothing', which is no run directory"),
        ({"folds": [], "metrics": {}}, "names no run directories"),
        ({"folds": "fold-1", "metrics": {}}, "folds must be a list of strings"),
        ({"metrics": {}}, "folds"),
    ],
)
def test_damaged_records_are_refused(tmp_path, document, message):
    (tmp_path / "folds.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=message):
        Predictor(tmp_path)


def test_models_that_differ_are_not_averaged(tmp_path):
    for k, labels in enumerate(("0123456789", "012345678x")):
        model = create_model("vit_nano_conv_patch2_8", num_classes=10, seed=0)
        model.labels = list(labels)
        vitral.save_model(model, tmp_path / f"fold-{k}", layout="vitral")
    (tmp_path / "folds.json").write_text(json.dumps({"folds": ["fold-0", "fold-1"], "metrics": {}}))
    with pytest.raises(CheckpointError, match="different labels or inputs"):
        Predictor(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--folds", "1"], "folds must be at least 2, got 1"),
        (["--folds", "1000"], "1000 folds need at least 2000 images"),
        (["--folds", "3", "--seeds", "2"], "--folds 3 and --seeds 2 cannot be combined"),
    ],
)
def test_impossible_folds_are_refused(tmp_path, capsys, flags, message):
    assert main(["train", "digits", "--out", str(tmp_path / "run"), *flags, *TINY]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_only_one_prediction_for_an_image_can_be_augmented():
    vit = create_model("vit_nano_conv_patch2_8", num_classes=0, seed=0)
    segmenter = Segmenter(SegmenterConfig(backbone=vit.config, num_classes=3, head="linear"))
    with pytest.raises(InputError, match="leave --tta out"):
        Predictor(segmenter, tta=True)
