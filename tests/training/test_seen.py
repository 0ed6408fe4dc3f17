"""The default split of own data, and the evaluation of data that overlap the training split of a run."""

import json
from dataclasses import replace
from shutil import copy, copytree

import pytest
import torch
from PIL import Image

import vitral
from vitral.cli.main import main
from vitral.data.sources.base import Data, ImageArray
from vitral.data.sources.open import open_data
from vitral.errors import CheckpointError, DataError
from vitral.training.seen import SEEN, read_seen

SIZES = {"ant": 26, "bee": 34}
QUICK = {"model": "vit_nano_patch2_8", "epochs": 1, "batch_size": 16, "quiet": True}


def write_photos(folder, start=0, sizes=SIZES):
    """Class folders of images, all different from each other and from those of another `start`."""
    for number, (name, count) in enumerate(sizes.items()):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            colour = (start + i, 100 * number + i, 3 * i)
            Image.new("RGB", (9, 8), colour).save(folder / name / f"{i:02d}.png")
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return write_photos(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    return vitral.train(photos, out=tmp_path_factory.mktemp("runs") / "run", split_seed=7, **QUICK)


def sizes_of(data):
    return {part: len(indices) for part, indices in data.splits.items()}


class TestDefaultSplit:
    def test_own_images_get_a_test_split(self, photos):
        data = open_data(photos).with_splits(0.1, None, seed=0)
        assert sizes_of(data) == {"train": 46, "val": 5, "test": 9}
        assert data.notes[0] == "no test split was given: 9 images (15% of the training split) are used as one"

    def test_0_takes_none(self, photos):
        assert sizes_of(open_data(photos).with_splits(0.1, 0.0, seed=0)) == {"train": 54, "val": 6}

    def test_few_images_are_not_split(self, tmp_path):
        data = open_data(write_photos(tmp_path / "few", sizes={"ant": 24, "bee": 25}))
        assert "test" not in data.with_splits(0.1, None, seed=0).splits

    def test_embedded_data_and_texts_are_not_split(self):
        pixels = torch.zeros(60, 1, 2, 2, dtype=torch.uint8)
        data = Data("own", ImageArray(pixels), torch.arange(60) % 2, ["a", "b"], {"train": torch.arange(60)})
        assert data.default_test_fraction == 0.15
        assert replace(data, recipe="digits").default_test_fraction == 0
        digits = open_data("digits")
        assert sizes_of(digits.with_splits(0.1, None, 0)) == sizes_of(digits.with_splits(0.1, 0.0, 0))

    def test_a_test_split_that_is_there_stays(self, tmp_path):
        for part, start in (("train", 0), ("test", 60)):
            write_photos(tmp_path / "parted" / part, start)
        data = open_data(tmp_path / "parted")
        assert data.with_splits(0.1, None, seed=0).splits["test"].tolist() == data.splits["test"].tolist()

    def test_the_split_seed_is_an_option(self, photos, run):
        splits = [open_data(photos).with_splits(0.1, None, seed).splits["test"].tolist() for seed in (0, 7)]
        assert splits[0] != splits[1]
        config = json.loads((run.path / "config.json").read_text())["train"]
        assert config["split_seed"] == 7
        assert run.data.splits["test"].tolist() == splits[1]

    def test_the_seed_of_the_weights_does_not_change_the_split(self, photos, run, tmp_path):
        other = vitral.train(photos, out=tmp_path / "other", seed=5, split_seed=7, **QUICK)
        assert other.data.splits["test"].tolist() == run.data.splits["test"].tolist()


class TestEvaluate:
    def test_the_data_of_the_run_get_its_split_again(self, photos, run, tmp_path):
        moved = copytree(photos, tmp_path / "moved")  # found by content, not by path
        metrics = vitral.evaluate(run.path, moved)
        assert metrics["split"] == "test"
        assert metrics["images"] == 9
        assert metrics["loss"] == pytest.approx(run.metrics["test"]["loss"], rel=1e-5)
        assert metrics["training_overlap"] == {"images": 0, "of": 9}
        assert metrics["notes"][-1] == "moved is the data set of this run: the split of the run is used"
        assert vitral.evaluate(run.path, moved, split="val")["images"] == 5

    def test_overlapping_images_are_reported_separately(self, photos, run, tmp_path, capsys):
        folder = write_photos(tmp_path / "mixed", start=100, sizes={"ant": 5, "bee": 2})
        trained = run.data.splits["train"][[0, 1, -1]].tolist()
        for i in trained:
            copy(run.data.images.name(i), folder / run.data.classes[run.data.targets[i]] / f"old{i}.png")
        metrics = vitral.evaluate(run.path, folder)
        overlap = metrics["training_overlap"]
        assert (overlap["images"], overlap["of"], metrics["images"]) == (3, 10, 10)
        assert (overlap["overlapping"]["images"], overlap["other"]["images"]) == (3, 7)
        right = sum(overlap[key]["images"] * overlap[key]["accuracy"] for key in ("overlapping", "other"))
        assert right == pytest.approx(10 * metrics["accuracy"])
        assert main(["eval", str(run.path), str(folder)]) == 0
        out = capsys.readouterr().out
        assert "warning: 3 of these 10 images are in the training split of the run" in out
        assert "\nin the training split, 3 images: accuracy" in out
        assert "\nnot in the training split, 7 images: accuracy" in out

    def test_all_images_overlap(self, run, photos):
        overlap = vitral.evaluate(run.path, photos, split="train")["training_overlap"]
        assert overlap["images"] == overlap["of"] == 46
        assert "other" not in overlap

    def test_other_labels_make_other_data(self, photos, run, tmp_path):
        changed = copytree(photos, tmp_path / "changed")
        (changed / "ant" / "00.png").rename(changed / "bee" / "99.png")
        metrics = vitral.evaluate(run.path, changed)
        assert (metrics["split"], metrics["images"]) == ("train", 60)
        assert metrics["training_overlap"]["images"] == 46

    def test_the_record_is_small(self, run):
        assert (run.path / SEEN).stat().st_size < 46 * 8 + 300

    def test_a_broken_record(self, run, photos, tmp_path):
        broken = copytree(run.path, tmp_path / "broken")
        (broken / SEEN).write_bytes(b"nothing")
        with pytest.raises(CheckpointError, match=r"train_images.safetensors cannot be read .*remove it"):
            vitral.evaluate(broken, photos)
        (broken / SEEN).unlink()
        assert read_seen(broken) is None
        assert "training_overlap" not in vitral.evaluate(broken, photos)


class TestStrict:
    @pytest.fixture
    def table(self, photos):
        rows = [f"{name}/{i:02d}.png,{name}" for name in SIZES for i in range(4)]
        (photos / "table.csv").write_text("\n".join(["image,label", *rows, "ant/05.png,NaN", "bee/05.png,"]) + "\n")
        yield photos / "table.csv"
        (photos / "table.csv").unlink()

    def test_train(self, table, tmp_path):
        with pytest.raises(DataError, match=r"problems \(--strict\): 2 rows have no usable target.*label is NaN"):
            vitral.train(table, out=tmp_path / "run", strict=True, **QUICK)
        assert not (tmp_path / "run").exists()
        assert len(vitral.train(table, out=tmp_path / "run", **QUICK).data.inputs) == 8

    def test_eval(self, table, run, capsys):
        assert main(["eval", str(run.path), str(table), "--strict"]) == 2
        assert "2 rows have no usable target and were dropped" in capsys.readouterr().err
        assert main(["eval", str(run.path), str(table)]) == 0
        assert "2 rows have no usable target and were dropped" in capsys.readouterr().out

    def test_eval_of_images_that_cannot_be_read(self, run, tmp_path):
        folder = write_photos(tmp_path / "new", start=100, sizes={"ant": 3, "bee": 2})
        (folder / "ant" / "00.png").write_bytes(b"nothing")
        assert vitral.evaluate(run.path, folder)["images"] == 4
        with pytest.raises(DataError, match="1 of 5 images cannot be read; vitral check lists them"):
            vitral.evaluate(run.path, folder, strict=True)

    def test_check_exits_with_1(self, table, photos, capsys):
        assert main(["check", str(table)]) == 0
        assert "2 problems" in capsys.readouterr().out
        assert main(["check", str(table), "--strict"]) == 1
        assert main(["check", str(table), "--strict", "--json"]) == 1
        assert main(["check", str(photos), "--strict"]) == 0


class TestEmptyClasses:
    @pytest.fixture
    def folder(self, tmp_path):
        """Four problems of four kinds."""
        write_photos(tmp_path / "set" / "train", sizes={"ant": 4, "bee": 3})
        write_photos(tmp_path / "set" / "test", start=50, sizes={"ant": 2, "cow": 2})
        (tmp_path / "set" / "train" / "dog").mkdir()
        (tmp_path / "set" / "train" / "ant" / "00.png").write_bytes(b"nothing")
        Image.new("RGB", (5, 77)).save(tmp_path / "set" / "train" / "bee" / "strip.png")
        return tmp_path / "set"

    def test_check_lists_every_problem_in_one_pass(self, folder, capsys):
        assert main(["check", str(folder), "--strict"]) == 1
        out = capsys.readouterr().out
        assert f"empty class: {folder / 'train' / 'dog'}: has no image" in out
        assert f"empty class: {folder / 'train' / 'cow'}: does not exist" in out
        assert "cannot be read: " in out
        assert f"is tiny or very long: {folder / 'train' / 'bee' / 'strip.png'}: 5 x 77 pixels" in out
        assert "image width x height in pixels: smallest 5 x 8, median 9 x 8, largest 9 x 77" in out
        assert "4 problems" in out

    def test_training_refuses_them(self, folder, tmp_path):
        with pytest.raises(DataError, match=r"2 classes have no training image; add images or remove the class.*cow"):
            vitral.train(folder, out=tmp_path / "run", **QUICK)
        assert not (tmp_path / "run").exists()


def test_overlap_of_other_tasks(tmp_path):
    """Regression targets are split and compared like classes."""
    folder = write_photos(tmp_path / "photos")
    rows = [f"{name}/{i:02d}.png,{i}" for name, count in SIZES.items() for i in range(count)]
    (folder / "all.csv").write_text("\n".join(["image,count", *rows]) + "\n")
    (folder / "some.csv").write_text("\n".join(["image,count", *rows[:20]]) + "\n")
    data = open_data(folder / "all.csv", label_column="count")
    run = vitral.train(data, out=tmp_path / "run", **QUICK)
    again = vitral.evaluate(run.path, data)
    assert again["split"] == "test"
    assert again["mae"] == pytest.approx(run.metrics["test"]["mae"], rel=1e-5)
    some = vitral.evaluate(run.path, open_data(folder / "some.csv", label_column="count"))
    trained = set(run.data.splits["train"].tolist())
    assert some["training_overlap"]["images"] == sum(i in trained for i in range(20))
