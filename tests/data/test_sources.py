import csv
import gzip
import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.cli.main import main
from vitral.data.check import check_data
from vitral.data.sources.base import Data, ImageArray, stratified_split
from vitral.data.sources.open import open_data
from vitral.errors import DataError


def write_image(path, colour, size=(10, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


@pytest.fixture
def photos(tmp_path):
    for name, red in (("cat", 200), ("dog", 40), ("emu", 90)):
        for i in range(7):
            write_image(tmp_path / "photos" / name / f"{i}.png", (red + i, 10 * i, 50))
    return tmp_path / "photos"


class TestDigits:
    def test_they_are_the_uci_digits_with_scikit_learns_split(self):
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        data = open_data("digits")
        reference = load_digits()
        pixels = data.inputs.pixels.view(-1, 64).double() * 16 / 255
        assert np.abs(pixels.numpy() - reference.data).max() < 0.04
        assert data.targets.tolist() == reference.target.tolist()
        _, test = train_test_split(range(1797), test_size=0.2, stratify=reference.target, random_state=0)
        assert data.splits["test"].tolist() == sorted(test)
        assert data.describe() == "digits: 1,797 images, 10 classes, split train/test 1,437/360"


class TestFolder:
    def test_class_folders(self, photos):
        data = open_data(photos)
        assert data.classes == ["cat", "dog", "emu"]
        assert data.targets.tolist() == [0] * 7 + [1] * 7 + [2] * 7
        assert data.inputs.read(8, "rgb")[0, 0, 0] == 41
        assert list(data.splits) == ["train"]

    def test_splits_above_the_classes(self, tmp_path, photos):
        for part, count in (("train", 5), ("valid", 2), ("test", 3)):
            for name in ("a", "b"):
                for i in range(count):
                    write_image(tmp_path / "parted" / part / name / f"{i}.jpg", (i, 0, 0))
        data = open_data(tmp_path / "parted")
        assert {part: len(v) for part, v in data.splits.items()} == {"train": 10, "val": 4, "test": 6}

    def test_missing_parts_are_cut_class_by_class_and_said(self, photos):
        data = open_data(photos).with_splits(val_fraction=0.3, test_fraction=0.15, seed=0)
        assert {part: len(v) for part, v in data.splits.items()} == {"train": 12, "val": 6, "test": 3}
        assert torch.bincount(data.targets[data.splits["val"]]).tolist() == [2, 2, 2]
        everything = torch.cat(list(data.splits.values())).sort().values
        assert everything.tolist() == list(range(21))
        assert data.notes[0].startswith("no test split was given: 3 images (15% of the training split)")
        again = open_data(photos).with_splits(val_fraction=0.3, test_fraction=0.15, seed=0)
        assert again.splits["val"].tolist() == data.splits["val"].tolist()

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda p: p.mkdir(), "is empty; it should hold a folder of images for each class"),
            (
                lambda p: write_image(p / "a" / "1.png", "red"),
                "at least two folders, one for each class, got only one, a",
            ),
            (lambda p: write_image(p / "1.png", "red"), "got none .it holds images without class folders"),
            (lambda p: [write_image(p / "test" / n / "1.png", "red") for n in "ab"], "has test but no train folder"),
        ],
    )
    def test_folders_that_cannot_be_used(self, tmp_path, make, message):
        make(tmp_path / "bad")
        with pytest.raises(DataError, match=message):
            open_data(tmp_path / "bad")


class TestTable:
    def table(self, folder, rows, header=("image", "label")):
        path = folder / "labels.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
        return path

    def test_columns_and_splits(self, tmp_path, photos):
        rows = [(f"photos/{n}/{i}.png", n, "test" if i == 6 else "train") for n in ("cat", "dog") for i in range(7)]
        data = open_data(self.table(tmp_path, rows, ("path", "class", "split")))
        assert data.classes == ["cat", "dog"]
        assert {part: len(v) for part, v in data.splits.items()} == {"train": 12, "test": 2}

    def test_numbers_are_sorted_as_numbers(self, tmp_path, photos):
        rows = [("photos/cat/0.png", label) for label in ("10", "9", "2")]
        assert open_data(self.table(tmp_path, rows)).classes == ["2", "9", "10"]

    def test_named_columns(self, tmp_path, photos):
        path = self.table(tmp_path, [("photos/cat/0.png", "x"), ("photos/dog/0.png", "y")], ("where", "what"))
        with pytest.raises(
            DataError, match=r"has no image column \(image, path.*its columns are where, what; name it with"
        ):
            open_data(path)
        assert open_data(path, image_column="where", label_column="what").classes == ["x", "y"]
        with pytest.raises(DataError, match="has no column 'which', its columns are where, what"):
            open_data(path, image_column="which")

    def test_bad_tables(self, tmp_path, photos):
        with pytest.raises(DataError, match=r"names 2 images, none of which exists; the first: .*none\.png"):
            open_data(self.table(tmp_path, [("none.png", "a"), ("nor.png", "b")]))
        with pytest.raises(DataError, match="has only one class"):
            open_data(self.table(tmp_path, [("photos/cat/0.png", "a")]))
        with pytest.raises(DataError, match="has no rows"):
            open_data(self.table(tmp_path, []))
        with pytest.raises(
            DataError, match=r"has no usable row; the first problem: .*line 2: it does not have 2 fields"
        ):
            open_data(self.table(tmp_path, [("photos/cat/0.png",)]))

    def test_images_that_do_not_exist_are_all_listed_and_left_out(self, tmp_path, photos, capsys):
        names = ["none.png", "photos/cat/0.png", "nor.png", "photos/dog/0.png", "photos/dog/1.png"]
        path = self.table(tmp_path, list(zip(names, "abcde", strict=True)))
        data = open_data(path)
        assert data.classes == ["b", "d", "e"]
        assert [data.inputs.name(i) for i in range(3)] == [str(tmp_path / names[i]) for i in (1, 3, 4)]
        assert data.targets.tolist() == [0, 1, 2]
        assert data.splits["train"].tolist() == [0, 1, 2]
        main(["check", str(path)])
        out = capsys.readouterr().out
        assert f"missing image: {tmp_path / 'none.png'}: does not exist" in out
        assert f"missing image: {tmp_path / 'nor.png'}: does not exist" in out
        assert "2 problems" in out

    def test_a_part_whose_images_do_not_exist_is_left_out(self, tmp_path, photos):
        rows = [("none.png", "a", "val"), ("photos/cat/0.png", "a", "train"), ("photos/dog/0.png", "b", "train")]
        data = open_data(self.table(tmp_path, rows, ("image", "label", "split")))
        assert {part: v.tolist() for part, v in data.splits.items()} == {"train": [0, 1]}
        assert "the val split has no usable image and was dropped" in data.notes

    def test_more_than_ten_are_counted(self, tmp_path, photos, capsys):
        rows = [(f"none{i}.png", "a") for i in range(13)] + [("photos/cat/0.png", "a"), ("photos/dog/0.png", "b")]
        main(["check", str(self.table(tmp_path, rows))])
        assert "missing image: and 3 more; --json lists them all" in capsys.readouterr().out


class TestEmptyParts:
    def data(self, **sizes):
        starts = np.cumsum([0, *sizes.values()])
        splits = {part: torch.arange(a, a + n) for (part, n), a in zip(sizes.items(), starts, strict=False)}
        count = sum(sizes.values())
        pixels = torch.zeros(count, 1, 2, 2, dtype=torch.uint8)
        return Data("set", ImageArray(pixels), torch.zeros(count, dtype=torch.long), ["a"], splits)

    def test_they_are_left_out_and_said(self):
        data = self.data(train=3, val=0, test=2)
        assert {part: len(v) for part, v in data.splits.items()} == {"train": 3, "test": 2}
        assert data.notes == ["the val split has no usable image and was dropped"]
        assert replace(data, name="again").notes == data.notes

    def test_nothing_to_train_on(self):
        with pytest.raises(DataError, match=r"^set has no usable image in its training split\.$"):
            self.data(train=0, val=2)

    def test_class_folders(self, tmp_path):
        for name in "ab":
            write_image(tmp_path / "set" / "train" / name / "1.png", "red")
            (tmp_path / "set" / "val" / name).mkdir(parents=True)
        assert list(open_data(tmp_path / "set").splits) == ["train"]


class TestIdx:
    def write(self, folder, zipped, cut=0):
        folder.mkdir()
        opener = gzip.open if zipped else open
        for prefix, count in (("train", 5), ("t10k", 3)):
            pixels = np.arange(count * 6 * 4, dtype=np.uint8).reshape(count, 6, 4)
            header = b"\0\0\x08\x03" + np.array(pixels.shape, ">i4").tobytes()
            with opener(folder / f"{prefix}-images-idx3-ubyte{'.gz' * zipped}", "wb") as file:
                file.write((header + pixels.tobytes())[: None if not cut else -cut])
            with opener(folder / f"{prefix}-labels-idx1-ubyte{'.gz' * zipped}", "wb") as file:
                file.write(b"\0\0\x08\x01" + np.array([count], ">i4").tobytes() + bytes(range(count)))

    @pytest.mark.parametrize("zipped", [False, True])
    def test_it_is_read(self, tmp_path, zipped):
        self.write(tmp_path / "mnist", zipped)
        data = open_data(tmp_path / "mnist")
        assert {part: len(v) for part, v in data.splits.items()} == {"train": 5, "test": 3}
        assert data.inputs.pixels.shape == (8, 1, 6, 4)
        assert data.inputs.read(1, "grey")[0, 0].tolist() == [24, 25, 26, 27]
        assert data.targets.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]

    def test_a_file_cut_short_is_an_error(self, tmp_path):
        self.write(tmp_path / "mnist", False, cut=7)
        with pytest.raises(DataError, match=r"is cut short: 113 bytes for the shape \(5, 6, 4\)"):
            open_data(tmp_path / "mnist")


class TestCifar:
    def pixels(self, count, seed):
        return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), np.uint8)

    def test_binary_and_png_give_the_same(self, tmp_path):
        labels = {"train": [], "test": []}
        for folder in ("bin", "png"):
            (tmp_path / folder).mkdir()
        for i, name in enumerate([f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]):
            pixels, targets = self.pixels(4, i), np.arange(4, dtype=np.uint8) + i
            rows = np.concatenate([targets[:, None], pixels.reshape(4, -1)], 1)
            (tmp_path / "bin" / f"{name}.bin").write_bytes(rows.tobytes())
            Image.fromarray(pixels.transpose(0, 2, 3, 1).reshape(4, 1024, 3)).save(tmp_path / "png" / f"{name}.png")
            labels["test" if name == "test_batch" else "train"] += targets.tolist()
        for part, values in labels.items():
            (tmp_path / "png" / f"{part}_lables.json").write_text(json.dumps(values))
        a, b = open_data(tmp_path / "bin"), open_data(tmp_path / "png")
        assert torch.equal(a.inputs.pixels, b.inputs.pixels)
        assert torch.equal(a.inputs.pixels[4:8], torch.from_numpy(self.pixels(4, 1)))
        assert a.targets.tolist() == b.targets.tolist() == labels["train"] + labels["test"]
        assert {part: len(v) for part, v in a.splits.items()} == {"train": 20, "test": 4}

    @pytest.mark.parametrize("protocol", [2, 4])
    def test_python_batches_are_read_without_being_loaded(self, tmp_path, protocol):
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 256, (12, 3072), dtype=np.uint8)
        labels = [int(v) for v in rng.integers(0, 10, 12)]
        for i, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
            rows = slice(2 * i, 2 * i + 2)
            # Python 2 wrote the published files: byte strings are its "str".
            batch = {"batch_label": "testing batch 1 of 1", "labels": labels[rows], "filenames": ["a.png", "b.png"]}
            data = pickle.dumps(batch | {"data": "@"}, protocol)
            (tmp_path / name).write_bytes(_with_bytes(data, pixels[rows].tobytes(), protocol))
        data = open_data(tmp_path)
        assert torch.equal(data.inputs.pixels.flatten(1), torch.from_numpy(pixels))
        assert data.targets.tolist() == labels
        assert {part: len(v) for part, v in data.splits.items()} == {"train": 10, "test": 2}

    def test_a_hostile_pickle_runs_nothing(self, tmp_path):
        class Hostile:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "ran"),))

        (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"labels": [1], "data": Hostile()}))
        with pytest.raises(DataError, match=r"data_batch_1 is not a python batch of CIFAR-10.*1 labels found"):
            open_data(tmp_path)
        (tmp_path / "data_batch_1").write_bytes(b"no pickle at all")
        with pytest.raises(DataError, match="not a python batch"):
            open_data(tmp_path)
        assert not (tmp_path / "ran").exists()


def _with_bytes(data, content, protocol):
    """Put a byte string in the place of the text "@" of a pickle, with the opcodes that Python 2 or 3 writes."""
    place = b"X\x01\x00\x00\x00@" if protocol == 2 else b"\x8c\x01@"
    assert data.count(place) == 1
    opcode = b"T" if protocol == 2 else b"B"
    return data.replace(place, opcode + len(content).to_bytes(4, "little") + content)


class TestHuggingFace:
    @pytest.fixture
    def saved(self, tmp_path, photos):
        import datasets

        rows = sorted(photos.rglob("*.png"))
        names = ["cat", "dog", "emu"]
        features = datasets.Features({"picture": datasets.Image(), "animal": datasets.ClassLabel(names=names)})
        parts = {"train": rows[:14], "validation": rows[14:18], "test": rows[18:]}
        made = {
            part: datasets.Dataset.from_dict(
                {"picture": [str(p) for p in paths], "animal": [names.index(p.parent.name) for p in paths]}, features
            )
            for part, paths in parts.items()
        }
        datasets.DatasetDict(made).save_to_disk(str(tmp_path / "saved"))
        return tmp_path / "saved"

    def test_a_saved_folder(self, saved, photos):
        data = open_data(saved)
        reference = open_data(photos)
        assert data.classes == ["cat", "dog", "emu"]
        assert data.targets.tolist() == reference.targets.tolist()
        assert {part: v.tolist() for part, v in data.splits.items()} == {
            "train": list(range(14)),
            "val": list(range(14, 18)),
            "test": list(range(18, 21)),
        }
        for i in (0, 13, 14, 20):
            assert torch.equal(data.inputs.read(i, "rgb"), reference.inputs.read(i, "rgb"))

    def test_columns_are_named_when_asked_for(self, saved):
        assert open_data(saved, "picture", "animal").classes == ["cat", "dog", "emu"]
        with pytest.raises(DataError, match=r"has no column 'foto', its columns are picture, animal; .*--image-column"):
            open_data(saved, "foto")

    def test_offline_it_says_so_in_one_line(self, monkeypatch):
        import datasets

        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        with pytest.raises(DataError, match=r"hf-hub:no/such cannot be opened as a Hugging Face data set \(") as error:
            open_data("hf-hub:no/such")
        assert "\n" not in str(error.value)


def test_scenes_are_what_they_say():
    from vitral.data.sources.scenes import make_scenes

    data, boxes = make_scenes(train=20, test=5)
    again, _ = make_scenes(train=20, test=5)
    assert torch.equal(data.inputs.pixels, again.inputs.pixels)
    assert not torch.equal(make_scenes(20, 5, seed=1)[0].inputs.pixels, data.inputs.pixels)
    assert {part: len(v) for part, v in data.splits.items()} == {"train": 20, "test": 5}
    pixels = data.inputs.pixels[:, 0].float()
    for image, (x, y, w, h) in zip(pixels, boxes.tolist(), strict=True):
        assert 0 <= x <= 32 - w
        assert 0 <= y <= 32 - h
        assert 11 <= w == h <= 15
        assert image[y : y + h, x : x + w].max() > 200  # the digit's strokes
    assert data.targets.min() >= 0
    assert data.classes == [str(i) for i in range(10)]


def test_what_is_not_there_is_said_with_what_could_be():
    with pytest.raises(
        DataError, match=r"nowhere does not exist; give a folder of class folders.*digits, scenes, fashion-mnist"
    ):
        open_data("nowhere")


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "a.xml").write_text("x")
    with pytest.raises(DataError, match=r"unknown kind \(\.xml\); give a CSV"):
        open_data(tmp_path / "a.xml")


def test_stratified_split_takes_at_least_one_and_leaves_at_least_one():
    targets = torch.tensor([0] * 50 + [1] * 2 + [2])
    rest, cut = stratified_split(targets, torch.arange(53), 0.1, seed=0)
    assert torch.bincount(targets[cut], minlength=3).tolist() == [5, 1, 0]
    assert torch.bincount(targets[rest], minlength=3).tolist() == [45, 1, 1]


def test_check_finds_what_was_planted(tmp_path, photos):
    from shutil import copy

    for part in ("train", "test"):
        for name in ("cat", "dog"):
            for i in range(4):
                write_image(tmp_path / "set" / part / name / f"{i}.png", (i, 5 * (part == "test"), 9 * (name == "dog")))
    copy(tmp_path / "set/train/cat/0.png", tmp_path / "set/train/cat/again.png")
    copy(tmp_path / "set/train/cat/1.png", tmp_path / "set/test/cat/leak.png")
    copy(tmp_path / "set/train/cat/2.png", tmp_path / "set/train/dog/cat.png")
    write_image(tmp_path / "set/train/cat/strip.png", "red", size=(300, 9))
    (tmp_path / "set/train/dog/broken.png").write_bytes(b"nothing")
    for i in range(4):
        write_image(tmp_path / "set" / "train" / "Cats" / f"{i}.png", (i, 200, 7))
    report = check_data(open_data(tmp_path / "set"))
    short = lambda groups: [sorted(path.rsplit("/set/")[1] for path in group) for group in groups]  # noqa: E731
    assert [entry["image"].rsplit("/")[-1] for entry in report["unreadable"]] == ["broken.png"]
    assert short(report["leaks_between_splits"]) == [["test/cat/leak.png", "train/cat/1.png"]]
    assert short(report["same_image_other_label"]) == [["train/cat/2.png", "train/dog/cat.png"]]
    assert len(report["duplicates"]) == 3
    assert report["classes_alike_but_for_case"] == [["Cats", "cat"]]
    assert [entry["error"].rsplit("/")[-1] for entry in report["extreme_sizes"]] == ["strip.png: 300 x 9 pixels"]
    assert report["problems"] == 7
    assert check_data(open_data(photos))["problems"] == 0
