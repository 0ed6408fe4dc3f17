"""`vitral.probe` and `vitral eval --probe`: from a source and data to figures, by way of the kept features."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import vitral
from helpers import difference, redraw
from vitral.cli.main import main
from vitral.config import Preprocess, Probing, ViTConfig
from vitral.data.sources.base import Data, ImageArray
from vitral.data.sources.open import open_data
from vitral.data.transforms import eval_transform, normalize
from vitral.errors import ConfigError, DataError, InputError, VitralError
from vitral.inference import features
from vitral.inference.cache import cache_folder
from vitral.inference.evaluate import _parts
from vitral.inference.features import extract, open_extractor
from vitral.models.segmenter import Segmenter
from vitral.models.vit import VisionTransformer
from vitral.weights.atomic import save_tensors
from vitral.weights.rundir import CONFIG, WEIGHTS, config_document

NAME = "vit_nano_patch2_8"
DIGITS = open_data("digits")
FEW = 300
"""Images of a small set of digits; the rest is never looked at."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def small(first=0):
    """Some of the digits: 200 to train, 100 to judge."""
    indices = torch.arange(first, first + FEW)
    return Data("some", ImageArray(DIGITS.images.pixels), DIGITS.targets, DIGITS.classes,
                {"train": indices[:200], "test": indices[200:]}, mode="grey")  # fmt: skip


def numbers():
    return replace(small(), kind="numbers", targets=DIGITS.targets[:, None].float())


def model(seed=0, **options):
    options = {"in_chans": 1, "img_size": 8, "patch_size": 2, "embed_dim": 24, "depth": 2, "num_heads": 3} | options
    made = redraw(VisionTransformer(ViTConfig.from_dict({"num_classes": 0} | options)), seed)
    made.preprocess = Preprocess(img_size=8, mean=(0.4,), std=(0.3,), crop_mode="squash")
    return made


def write_run(path, vit):
    """A run of pretraining, as `load_model` reads it: no labels, no classes."""
    path.mkdir()
    save_tensors(path / WEIGHTS, vit.state_dict())
    parts = {"task": "pretrain", "labels": [], "model": vit.config.to_dict(), "preprocess": vit.preprocess.to_dict()}
    (path / CONFIG).write_bytes(config_document({"architecture": "vit"} | parts))
    return path


def files(tmp_path, per_class=6, parts=("",)):
    """A folder for each of two classes, told by their colour, in each part."""
    for part in parts:
        for name, colour in (("dark", 40), ("light", 200)):
            folder = tmp_path / "photos" / part / name
            folder.mkdir(parents=True)
            for i in range(per_class):
                pixels = np.full((9 + i, 12, 3), colour + i, np.uint8)
                pixels[:, ::2] //= 1 + (name == "dark")
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


def counted(monkeypatch):
    """A list with the size of every batch that features are computed of."""
    sizes, compute = [], features._compute
    monkeypatch.setattr(features, "_compute", lambda data, wanted, *rest: sizes.append(len(wanted)) or compute(
        data, wanted, *rest))  # fmt: skip
    return sizes


# ---- figures ----


def flat(part):
    indices = DIGITS.splits[part]
    return DIGITS.images.pixels[indices].flatten(1).double().numpy() / 255, DIGITS.targets[indices].numpy()


def test_neighbours_of_pixels_are_those_of_scikit_learn():
    (x, labels), (x_test, labels_test) = flat("train"), flat("test")
    oracle = KNeighborsClassifier(20, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / 0.07)).fit(
        x, labels
    )
    found = vitral.probe("pixels", "digits")
    right = (oracle.predict(x_test) == labels_test).mean()
    assert 0.9 < right < 1
    assert found["accuracy"] == right
    assert (found["split"], found["images"], found["train_images"], found["width"]) == ("test", 360, 1437, 64)
    assert (found["features"], found["k"], found["temperature"], found["unreadable"]) == ("pixels", 20, 0.07, 0)
    assert found["accuracy_95"][0] < right < found["accuracy_95"][1]
    assert vitral.probe("pixels", "digits", k=1)["accuracy"] != right


def test_a_linear_layer_on_pixels_is_as_good_as_scikit_learns():
    found = vitral.probe("pixels", "digits", "linear")
    (x, labels), (x_test, labels_test) = flat("train"), flat("test")
    mean, std = x.mean(0), x.std(0)
    std[std < 1e-6] = 1
    oracle = LogisticRegression(C=1 / (found["weight_decay"] * len(x)), max_iter=2000).fit((x - mean) / std, labels)
    assert abs(found["accuracy"] - oracle.score((x_test - mean) / std, labels_test)) < 0.01
    assert (found["train_images"], found["val_images"]) == (1295, 142)
    assert found["notes"] == ["no val split was given: 142 images (10% of the training split) are used as one"]


@pytest.mark.parametrize(
    ("options", "kind", "want"),
    [
        ({}, "pooled", lambda m, x: m(x)),
        ({}, "cls", lambda m, x: m.forward_features(x)[:, 0]),
        ({}, "mean", lambda m, x: m.forward_features(x)[:, 1:].mean(1)),
        ({}, "cls_mean", lambda m, x: torch.cat([m(x), m.forward_features(x)[:, 1:].mean(1)], 1)),
        ({"global_pool": "mean", "norm_after_pool": True}, "pooled", lambda m, x: m(x)),
        ({"global_pool": "mean", "norm_after_pool": True}, "mean", lambda m, x: m(x)),
        ({"reg_tokens": 3}, "mean", lambda m, x: m.forward_features(x)[:, 4:].mean(1)),
        ({"class_token": False, "global_pool": "map"}, "mean", lambda m, x: m.forward_features(x).mean(1)),
    ],
)
def test_what_is_looked_at(options, kind, want):
    data, vit = small(), model(**options)
    got = extract(data, open_extractor(vit, data, kind, None, 0), cache=False)
    p = Preprocess(img_size=8, mean=(0.4,), std=(0.3,), crop_mode="squash")
    x = torch.stack([eval_transform(image, p) for image in data.images.pixels[:FEW]])
    with torch.no_grad():
        assert difference(got.x, want(vit, normalize(x, p))) < 1e-5
    assert torch.equal(got.indices, torch.arange(FEW))


def test_the_rows_are_those_of_the_images_asked_for():
    data = replace(small(), splits={"train": torch.tensor([17, 3, 11]), "test": torch.tensor([5, 2])})
    found = extract(data, open_extractor("pixels", data, "pooled", None, 0), cache=False)
    assert found.indices.tolist() == [2, 3, 5, 11, 17]
    x, read = found.of(torch.tensor([17, 4, 3, 99]))
    assert read.tolist() == [17, 3]
    assert torch.equal(x, data.images.pixels[[17, 3]].flatten(1) / 255)


def test_pixels_take_a_size_and_colours_are_kept(tmp_path):
    assert vitral.probe("pixels", small(), img_size=5)["width"] == 25
    assert vitral.probe("pixels", files(tmp_path), k=3)["width"] == 3 * 32 * 32


def test_a_model_of_colours_sees_grey_images():
    rgb = model(in_chans=3)
    rgb.preprocess = Preprocess(img_size=8, mean=(0.4,) * 3, std=(0.3,) * 3, crop_mode="squash")
    assert vitral.probe(rgb, small())["width"] == 24


# ---- few labels ----


@pytest.mark.parametrize("kind", ["knn", "linear"])
def test_few_labels(kind):
    found = vitral.probe("pixels", "digits", kind, few_shot=True, draws=2, lrs=(1.0,), weight_decays=(0.01,))
    rows = found["few_shot"]
    assert [row["fraction"] for row in rows] == [0.01, 0.05, 0.1]
    assert [row["labels"] for row in rows] == ([10, 70, 142] if kind == "knn" else [20, 75, 141])
    for row in rows:
        a, b = row["accuracies"]
        assert row["accuracy"] == pytest.approx((a + b) / 2)
        assert row["spread"] == pytest.approx(abs(a - b) / 2**0.5)
    assert any(row["spread"] for row in rows)
    accuracies = [row["accuracy"] for row in rows] + [found["accuracy"]]
    assert accuracies[0] > 0.3
    assert accuracies == sorted(accuracies)
    assert "few_shot" not in vitral.probe("pixels", small())


def test_one_draw_has_no_spread_and_the_seed_decides():
    def rows(seed):
        return vitral.probe("pixels", small(), few_shot=True, draws=1, seed=seed)["few_shot"]

    assert [row["spread"] for row in rows(0)] == [0, 0, 0]
    assert rows(0) == rows(0)
    assert rows(0) != rows(1)


# ---- parts ----


@pytest.mark.parametrize(
    ("kind", "given", "split", "sizes", "judged"),
    [
        ("knn", {"train": 200, "test": 100}, None, {"train": 200, "test": 100}, "test"),
        ("knn", {"train": 150, "val": 50, "test": 100}, None, {"train": 150, "test": 100}, "test"),
        ("knn", {"train": 150, "val": 50, "test": 100}, "val", {"train": 150, "test": 50}, "val"),
        ("knn", {"train": 250, "val": 50}, None, {"train": 250, "test": 50}, "val"),
        ("linear", {"train": 150, "val": 50, "test": 100}, None, {"train": 150, "val": 50, "test": 100}, "test"),
        ("linear", {"train": 150, "val": 50, "test": 100}, "val", {"train": 135, "val": 15, "test": 50}, "val"),
        ("linear", {"train": 250, "val": 50}, None, {"train": 225, "val": 25, "test": 50}, "val"),
        ("knn", {"train": 300}, None, {"train": 270, "test": 30}, "test"),
        ("linear", {"train": 300}, None, {"train": 245, "val": 25, "test": 30}, "test"),
    ],
)
def test_what_fits_what_chooses_and_what_judges(kind, given, split, sizes, judged):
    cut = dict(zip(given, torch.arange(FEW).split(list(given.values())), strict=True))
    parts, got = _parts(replace(small(), targets=torch.arange(len(DIGITS.targets)) % 5, splits=cut), kind, split)
    assert got == judged
    assert {part: len(indices) for part, indices in parts.splits.items()} == sizes
    assert len(torch.cat(list(parts.splits.values())).unique()) == sum(sizes.values())
    if judged in given:
        assert torch.equal(parts.splits["test"], cut[judged])


# ---- sources ----


def test_a_run_a_file_and_the_model_itself_are_the_same(tmp_path):
    vit = model()
    run, file = write_run(tmp_path / "run", vit), tmp_path / "published"
    vitral.save_model(vit, file, layout="timm")
    want = vitral.probe(vit, small(), cache=False)
    del want["source"]
    for source in (str(run), run, str(file)):
        found = vitral.probe(source, small(), cache=False)
        assert found.pop("source") == str(source)
        if source != str(file):  # a published file does not tell all of the preprocessing
            assert found == want
        else:
            assert found["width"] == 24


def test_the_vit_inside_a_segmenter(tmp_path):
    vit = model()
    segmenter = Segmenter.__new__(Segmenter)
    torch.nn.Module.__init__(segmenter)
    segmenter.backbone, segmenter.preprocess = vit, vit.preprocess
    inside = features._of_model(segmenter, "pooled")
    assert inside.identity == features._of_model(vit, "pooled").identity
    assert inside.preprocess == vit.preprocess


def test_a_name_is_a_fresh_model_of_the_seed():
    first, again, other = (vitral.probe(NAME, small(), seed=seed, cache=False) for seed in (0, 0, 1))
    assert first == again
    assert first["accuracy"] != other["accuracy"]
    fresh = vitral.create_model(NAME, seed=0)
    assert vitral.probe(fresh, small(), cache=False)["accuracy"] == first["accuracy"]
    assert vitral.probe("vit_micro_patch8_32", small(), img_size=16)["width"] == 128  # of grey images here


# ---- the cache ----


def test_features_are_computed_once(monkeypatch):
    sizes, vit, data = counted(monkeypatch), model(), small()
    first = vitral.probe(vit, data)
    again = vitral.probe(vit, data)
    assert sizes == [FEW]
    assert (first.pop("from_cache"), again.pop("from_cache")) == (False, True)
    assert first == again
    vitral.probe(vit, data, "linear", lrs=(1.0,), weight_decays=(0.1,))  # another probe, other parts, the same images
    assert sizes == [FEW]
    assert vitral.probe(vit, data, cache=False)["accuracy"] == first["accuracy"]
    assert sizes == [FEW] * 2
    assert len(list(cache_folder("features").iterdir())) == 1


def changed(vit):
    with torch.no_grad():
        vit.blocks[1].mlp.fc2.bias[3] += 1e-6
    return vit


def with_mean(vit, mean):
    vit.preprocess = replace(vit.preprocess, mean=(mean,))
    return vit


def other_pixel():
    data = small()
    pixels = data.images.pixels.clone()
    pixels[FEW - 1, 0, 7, 7] += 1
    return replace(data, inputs=ImageArray(pixels))


@pytest.mark.parametrize(
    ("vit", "data", "options"),
    [
        (changed(model()), small(), {}),
        (model(norm_eps=1e-5), small(), {}),
        (with_mean(model(), 0.41), small(), {}),
        (model(), small(first=1), {}),
        (model(), other_pixel(), {}),
        (model(), small(), {"features": "mean"}),
    ],
)
def test_what_differs_is_computed_anew(monkeypatch, vit, data, options):
    sizes = counted(monkeypatch)
    vitral.probe(model(), small())
    vitral.probe(vit, data, **options)
    vitral.probe(model(), small())
    assert sizes == [FEW] * 2


def test_a_file_that_was_changed_is_looked_at_again(tmp_path, monkeypatch):
    sizes, folder = counted(monkeypatch), files(tmp_path)
    vitral.probe(NAME, folder, k=3)
    vitral.probe(NAME, folder, k=3)
    assert sizes == [12]
    Image.new("RGB", (7, 7), "red").save(folder / "dark" / "0.png")
    vitral.probe(NAME, folder, k=3)
    assert sizes == [12, 12]


@pytest.mark.parametrize("damage", [b"", b"not features", "cut", "flipped", "another"])
def test_damaged_features_are_computed_anew(monkeypatch, damage):
    sizes = counted(monkeypatch)
    first = vitral.probe(model(), small())
    (file,) = cache_folder("features").iterdir()
    whole = file.read_bytes()
    if damage == "another":
        save_tensors(file, {"features": torch.zeros(3, 2)})
    else:
        at = whole.index(b"}}") + 5000
        flipped = whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        file.write_bytes({"cut": whole[:-7], "flipped": flipped}.get(damage, damage))
    assert vitral.probe(model(), small()) == first
    assert sizes == [FEW] * 2
    assert file.read_bytes() == whole


def test_a_place_that_cannot_be_written_is_no_error(monkeypatch, tmp_path):
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    assert vitral.probe(model(), small())["from_cache"] is False


def test_the_cache_has_an_end(monkeypatch):
    for seed in range(3):
        vitral.probe(model(seed), small())
    assert len(list(cache_folder("features").iterdir())) == 3
    one = next(cache_folder("features").iterdir()).stat().st_size
    monkeypatch.setattr(features, "CACHE_BYTES", 2 * one + 5)
    vitral.probe(model(0), small())  # used again: not the oldest any more
    vitral.probe(model(3), small())
    used = [vitral.probe(model(seed), small(), split="test")["from_cache"] for seed in (0, 3)]
    assert used == [True, True]
    assert len(list(cache_folder("features").iterdir())) == 2


def test_without_the_variable_it_lies_in_the_home(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("features") == tmp_path / ".cache" / "vitral" / "features"


def test_pixels_are_not_kept():
    vitral.probe("pixels", small())
    assert not cache_folder("features").exists()


# ---- images that cannot be read ----


def test_unreadable_images_are_left_out_and_counted(tmp_path):
    folder = files(tmp_path, parts=("train", "test"))
    (folder / "train" / "dark" / "3.png").write_bytes(b"no image")
    (folder / "test" / "light" / "2.png").write_bytes(b"no image")
    for _ in range(2):  # computed, and kept
        found = vitral.probe(NAME, folder, k=3)
        assert (found["unreadable"], found["train_images"], found["images"]) == (2, 11, 11)
    for file in (folder / "test").rglob("*.png"):
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match="none of the 12 images of the test split can be read"):
        vitral.probe(NAME, folder)


# ---- what cannot be ----


@pytest.mark.parametrize(
    ("source", "data", "options", "error", "message"),
    [
        ("pixel", "digits", {}, VitralError, "unknown run, file or model 'pixel'; did you mean pixels"),
        ("pixels", "digits", {"kind": "svm"}, InputError, "a probe is one of knn, linear, got 'svm'"),
        ("pixels", "digits", {"split": "train"}, InputError, "fitted on the train split; evaluate it on another"),
        ("pixels", "digits", {"split": "val"}, DataError, "digits has no split 'val'; it has train, test"),
        ("pixels", "digits", {"features": "cls"}, InputError, "pixels have no tokens to take cls of"),
        ("pixels", "numbers-en-it", {}, DataError, "needs images with one class each, got numbers-en-it"),
        ("pixels", numbers(), {}, DataError, "one class each, got some: 1,797 images, number 0"),
        ("pixels", "digits", {"k": 0}, ConfigError, "k must be a whole number of at least 1, got 0"),
        ("pixels", "digits", {"lrs": ()}, ConfigError, r"lrs must be one or more numbers of at least 1e-06, got \(\)"),
        ("pixels", "digits", {"weight_decays": (0.1, -1)}, ConfigError, r"at least 0, got \(0.1, -1\)"),
        ("pixels", "digits", {"neighbours": 3}, VitralError, "unknown option 'neighbours'"),
        (
            model(class_token=False, global_pool="mean"),
            "digits",
            {"features": "cls"},
            InputError,
            "needs a .CLS. token",
        ),
        (model(), "digits", {"img_size": 16}, InputError, "has its size; leave img_size out"),
    ],
)
def test_what_cannot_be(source, data, options, error, message):
    with pytest.raises(error, match=message):
        vitral.probe(source, data, **options)


def test_too_few_images_to_choose_on():
    data = replace(small(), splits={"train": torch.tensor([0, 1]), "test": torch.tensor([2])})
    with pytest.raises(
        DataError, match="some has too few images for a validation split to choose the rate on; give a val split"
    ):
        vitral.probe("pixels", data, "linear")


def test_each_default_stands_in_one_place():
    found = vitral.probe("pixels", small())
    assert (found["k"], found["temperature"]) == (Probing().k, Probing().knn_temperature)


# ---- the command line ----


def run(capsys, *args):
    code = main(["eval", *args])
    out, err = capsys.readouterr()
    return code, out, err


def test_json_is_what_python_gives(capsys, tmp_path):
    path = str(write_run(tmp_path / "run", model()))
    args = ["--probe", "knn", "--k", "7", "--features", "mean", "--few-shot", "--draws", "1", "--seed", "4"]
    code, out, err = run(capsys, path, "digits", *args, "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["from_cache"] is False
    want = vitral.probe(path, "digits", "knn", k=7, features="mean", few_shot=True, draws=1, seed=4)
    assert found | {"from_cache": True} == want


def test_the_table(capsys, tmp_path):
    path = str(write_run(tmp_path / "run", model()))
    args = ["--lrs", "1", "--weight-decays", "0.1", "--probe", "linear", "--few-shot", "--draws", "1"]
    for origin in ("", " from the cache"):
        code, out, _ = run(capsys, path, "digits", *args)
        assert code == 0
        assert f"24 features (pooled){origin}; rate 1, decay 0.1, chosen on 142 other images\n" in out
        assert "no val split was given: 142 images" in out
        for start in ("all       1,437", "1 %          20", "5 %          75", "10 %        141"):
            assert start in out
        assert out.count("± 0.00 (1 draw)") == 3
    assert "from the cache" not in run(capsys, path, "digits", "--probe", "knn", "--no-cache")[1]


def test_the_table_counts_what_cannot_be_read(capsys, tmp_path):
    folder = files(tmp_path, parts=("train", "test"))
    (folder / "train" / "dark" / "3.png").write_bytes(b"no image")
    _, out, _ = run(capsys, "pixels", str(folder), "--probe", "knn")
    assert "1 images cannot be read and were dropped (vitral check lists them)" in out
    assert "3,072 features (pixels); k 11, temperature 0.07" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pixels", "digits", "--k", "3"], "vitral: --features, --k, --few-shot and the like are for probes; give"),
        (["pixels", "digits", "--probe", "knn", "--beam", "3"], "vitral: a probe reads images and writes no text;"),
        (["pixels", "digits", "--probe", "svm"], "vitral: invalid choice 'svm' for argument '--probe'"),
    ],
)
def test_flags_that_do_not_go_together(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)
