import csv
import json
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image

from vitral.cli.main import main
from vitral.config import SegmentOptions
from vitral.data.check import check_data
from vitral.data.images import _rotate
from vitral.data.sources.base import PROBLEMS, stratified_split
from vitral.data.sources.coco import (
    Instance,
    coco_document,
    mask_to_rle,
    rle_to_mask,
    write_coco,
    write_predictions,
)
from vitral.data.sources.digits import load_digits
from vitral.data.sources.open import open_data
from vitral.data.sources.scenes_digits import OUT, VISIBLE, _hides_too_much, make_digit_scenes, make_rotated_digits
from vitral.data.sources.yolo import simple_names, write_yolo
from vitral.data.targets import IGNORE, View
from vitral.errors import DataError
from vitral.tasks.segment import Segment

WIDE, HIGH = 40, 30


def write_image(path, colour=(9, 9, 9), size=(WIDE, HIGH)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def write_mask(path, pixels, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.asarray(pixels, np.uint8))
    if mode == "P":
        image.putpalette([v for i in range(256) for v in (i, 255 - i, 7)])
    image.save(path)
    return path


def kinds(data):
    return sorted(p["kind"] for p in data.problems)


def counted(data):
    return dict(Counter(kinds(data)))


class TestScenes:
    @pytest.fixture(scope="class")
    def data(self):
        return make_digit_scenes(train=150, test=50)

    def test_the_seed_decides(self, data):
        again = make_digit_scenes(train=150, test=50)
        assert torch.equal(again.inputs.pixels, data.inputs.pixels)
        assert torch.equal(again.masks.images.pixels, data.masks.images.pixels)
        assert all(torch.equal(a, b) for a, b in zip(again.boxes.rows, data.boxes.rows, strict=True))
        assert not torch.equal(make_digit_scenes(150, 50, seed=1).inputs.pixels, data.inputs.pixels)

    def test_a_scene_is_the_same_however_many_there_are(self, data):
        assert torch.equal(make_digit_scenes(20, 0).inputs.pixels, data.inputs.pixels[:20])

    def test_none_to_six_digits_and_what_is_present_is_said(self, data):
        counts = {len(rows) for rows in data.boxes.rows}
        assert counts == set(range(7))
        assert data.kind == "labels"
        for present, rows in zip(data.targets, data.boxes.rows, strict=True):
            assert present.nonzero()[:, 0].tolist() == sorted(set(rows[:, 0].long().tolist()))
        assert data.mask_classes == ["background", *map(str, range(10))]
        assert data.describe().startswith("digits-scenes: 200 images, 10 classes, ")

    def test_boxes_are_tight_around_the_ink_that_nothing_covers(self, data):
        checked = 0
        for rows, mask in zip(data.boxes.rows, data.masks.images.pixels[:, 0], strict=True):
            boxes = (rows[:, 1:] * 64).round().long()
            assert torch.allclose(rows[:, 1:] * 64, boxes.double())
            for i, (x0, y0, x1, y1) in enumerate(boxes.tolist()):
                alone = all(
                    j == i or a1 <= x0 or x1 <= a0 or b1 <= y0 or y1 <= b0
                    for j, (a0, b0, a1, b1) in enumerate(boxes.tolist())
                )
                if alone:
                    checked += 1
                    ink = mask[y0:y1, x0:x1] == rows[i, 0] + 1
                    assert ink.any(0)[[0, -1]].all()
                    assert ink.any(1)[[0, -1]].all()
                    outside = mask.clone()
                    outside[y0:y1, x0:x1] = 0
                    ring = outside[max(y0 - 1, 0) : y1 + 1, max(x0 - 1, 0) : x1 + 1]
                    if len(boxes) == 1:
                        assert not ring.any()
        assert checked > 100

    def test_a_digit_is_not_placed_where_it_hides_another(self):
        owner = np.full((9, 9), -1, np.int8)
        owner[0, :5] = owner[3, :3] = 0  # 8 of 10 pixels of digit 0 can be seen
        ink = np.zeros((4, 5), bool)
        ink[0, :4] = True
        assert not _hides_too_much(owner, np.s_[0:4, 0:5], ink, [10])  # 4 are left
        ink[0, 4] = True
        assert _hides_too_much(owner, np.s_[0:4, 0:5], ink, [10])
        assert not _hides_too_much(owner, np.s_[5:9, 0:5], ink, [10])

    def test_every_digit_can_be_seen(self, data):
        for rows, mask in zip(data.boxes.rows, data.masks.images.pixels[:, 0], strict=True):
            for label, x0, y0, x1, y1 in (rows * torch.tensor([1, 64, 64, 64, 64])).round().long().tolist():
                seen = (mask[y0:y1, x0:x1] == label + 1).sum()
                assert seen >= VISIBLE * 0.1 * (x1 - x0) * (y1 - y0)  # a digit's ink fills more than a tenth of its box

    def test_training_and_test_scenes_share_no_digit(self, monkeypatch):
        from vitral.data.sources import scenes_digits

        shown = {"train": set(), "test": set()}
        place, background = scenes_digits._place, scenes_digits._background
        digits = load_digits()
        part = {len(v): k for k, v in digits.splits.items()}

        def spy(function, members_at):
            def wrapped(*args):
                members = args[members_at]
                shown[part[len(members)]] |= set(members.tolist())
                return function(*args)

            return wrapped

        monkeypatch.setattr(scenes_digits, "_place", spy(place, 3))
        monkeypatch.setattr(scenes_digits, "_background", spy(background, 3))
        make_digit_scenes(5, 5)
        assert shown["train"]
        assert shown["test"]
        assert not shown["train"] & shown["test"]

    def test_other_sides(self):
        data = make_digit_scenes(10, 2, side=97)
        assert data.inputs.pixels.shape == (12, 1, 97, 97)
        assert max(float(r[:, 3:].max()) for r in data.boxes.rows if len(r)) <= 1


class TestRotated:
    @pytest.fixture(scope="class")
    def data(self):
        return make_rotated_digits(train=2, test=1)

    def test_angles_are_the_targets(self, data):
        assert data.kind == "numbers"
        assert data.target_names == ["angle"]
        assert data.targets.shape == (len(data.inputs), 1)
        assert data.targets.abs().max() <= 60
        assert data.targets.abs().max() > 59
        assert data.describe().startswith(
            f"digits-rotated: {len(data.inputs):,} images, number angle, split train/val/"
        )
        assert torch.equal(make_rotated_digits(2, 1).inputs.pixels, data.inputs.pixels)

    def test_the_frame_says_nothing(self, data):
        centres = torch.arange(OUT) + 0.5 - OUT / 2
        outside = (centres[:, None] ** 2 + centres**2).sqrt() > OUT / 2
        assert outside.sum() > 150
        assert data.inputs.pixels[:, 0, outside].eq(0).all()

    def test_turned_back_they_stand_upright(self):
        """Counter-clockwise by Pillow's reckoning: digits turned back are more alike than turned ones."""
        data = make_rotated_digits(train=1, test=1)
        turned = data.inputs.pixels[:300, 0].numpy()
        angles = data.targets[:300, 0].tolist()
        back = np.stack(
            [
                np.asarray(Image.fromarray(x).rotate(-a, Image.Resampling.BILINEAR))
                for x, a in zip(turned, angles, strict=True)
            ]
        ).astype(float)
        twice = np.stack(
            [
                np.asarray(Image.fromarray(x).rotate(a, Image.Resampling.BILINEAR))
                for x, a in zip(turned, angles, strict=True)
            ]
        ).astype(float)
        labels = load_digits().targets[
            stratified_split(load_digits().targets, load_digits().splits["train"], 0.1, 0)[0]
        ]
        spread = lambda x: sum(x[labels[:300] == k].var(0).sum() for k in range(10))  # noqa: E731
        assert spread(back) < 0.8 * spread(turned.astype(float)) < 0.8 * spread(twice)

    def test_no_digit_in_two_parts(self, data):
        digits = load_digits()
        rest, val = stratified_split(digits.targets, digits.splits["train"], 0.1, 0)
        assert not set(rest.tolist()) & set(val.tolist())
        assert {k: len(v) for k, v in data.splits.items()} == {
            "train": 2 * len(rest),
            "val": len(val),
            "test": len(digits.splits["test"]),
        }


def coco(path, images, annotations, categories=("cat", "dog"), first=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    listed = [{"id": first + i, "name": name} for i, name in enumerate(categories)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": listed}))
    return path


def entry(number, name, size=(WIDE, HIGH)):
    return {"id": number, "file_name": name, "width": size[0], "height": size[1]}


def note(image_id, box, category=7, **more):
    return {"image_id": image_id, "category_id": category, "bbox": box, "iscrowd": 0} | more


class TestCoco:
    def test_boxes_labels_and_images_without_objects(self, tmp_path):
        for name in ("a.png", "b.png"):
            write_image(tmp_path / "images" / name)
        notes = [note(1, [4, 3, 20, 15]), note(1, [0, 0, 40, 30], 8)]
        data = open_data(coco(tmp_path / "own.json", [entry(1, "a.png"), entry(2, "b.png")], notes))
        assert data.classes == ["cat", "dog"]
        assert data.boxes.rows[0].tolist() == [[0, 0.1, 0.1, 0.6, 0.6], [1, 0, 0, 1, 1]]
        assert data.boxes.rows[1].shape == (0, 5)
        assert data.targets.tolist() == [[1, 1], [0, 0]]
        assert data.masks is None
        assert data.problems == []
        assert data.describe() == "own: 2 images, 2 classes, 2 boxes, split train 2"

    @pytest.mark.parametrize("place", ["", "images", "../images", "../train2017", "../images/train2017"])
    def test_where_images_may_lie(self, tmp_path, place):
        file = tmp_path / "annotations" / "instances_train2017.json"
        write_image((file.parent / place / "a.png").resolve())
        data = open_data(coco(file, [entry(1, "a.png")], [note(1, [1, 1, 5, 5])]))
        assert len(data.inputs) == 1

    def test_the_published_layout(self, tmp_path):
        for part in ("train2017", "val2017"):
            write_image(tmp_path / part / "a.png")
            coco(tmp_path / f"annotations/instances_{part}.json", [entry(1, "a.png")], [note(1, [1, 1, 5, 5], 8)])
        data = open_data(tmp_path)
        assert {k: v.tolist() for k, v in data.splits.items()} == {"train": [0], "val": [1]}

    def test_roboflows_layout_and_its_family_name(self, tmp_path):
        for part in ("train", "valid", "test"):
            write_image(tmp_path / part / "a.png")
            file = coco(tmp_path / part / "_annotations.coco.json", [entry(1, "a.png")], [note(1, [1, 1, 5, 5], 8)])
            document = json.loads(file.read_text())
            document["categories"] = [
                {"id": 0, "name": "pets", "supercategory": "none"},
                {"id": 8, "name": "cat", "supercategory": "pets"},
            ]
            file.write_text(json.dumps(document))
        data = open_data(tmp_path)
        assert data.classes == ["cat"]
        assert list(data.splits) == ["train", "val", "test"]
        assert data.notes == ["pets only names a family of classes and is none itself"]

    def test_outlines_and_run_lengths_become_masks(self, tmp_path):
        write_image(tmp_path / "a.png")
        square = torch.zeros(HIGH, WIDE, dtype=torch.bool)
        square[20:25, 30:38] = True
        crowd = torch.zeros(HIGH, WIDE, dtype=torch.bool)
        crowd[0:2] = True
        notes = [
            note(1, [4, 3, 10, 6], segmentation=[[4, 3, 14, 3, 14, 9, 4, 9]]),
            note(1, [9, 6, 10, 6], 8, segmentation=[[9, 6, 19, 6, 19, 12, 9, 12]]),
            note(1, [30, 20, 8, 5], segmentation=mask_to_rle(square)),
            note(1, [30, 20, 4, 5], 8, segmentation=mask_to_rle(square & (torch.arange(WIDE) < 34), compressed=True)),
            note(1, [20, 14, 3, 4]),
            note(1, [0, 0, 40, 2], segmentation=mask_to_rle(crowd), iscrowd=1),
        ]
        data = open_data(coco(tmp_path / "a.json", [entry(1, "a.png")], notes))
        expected = torch.zeros(HIGH, WIDE, dtype=torch.uint8)
        expected[0:2] = IGNORE
        expected[3:9, 4:14] = 1
        expected[6:12, 9:19] = 2  # later over earlier
        expected[20:25, 30:38] = 1
        expected[20:25, 30:34] = 2
        expected[14:18, 20:23] = IGNORE  # a box without an outline
        assert torch.equal(data.masks.take(0, View.whole(), (HIGH, WIDE)), expected)
        assert data.mask_classes == ["background", "cat", "dog"]
        assert data.notes == ["1 crowds were left out of the boxes; masks ignore them"]
        assert len(data.boxes.rows[0]) == 5

    def test_polygons_fill_as_pycocotools_has_them(self, tmp_path):
        tools = pytest.importorskip("pycocotools.mask")
        write_image(tmp_path / "a.png", size=(60, 50))
        random = np.random.default_rng(0)
        for _ in range(20):
            angle, reach = np.sort(random.uniform(0, 2 * np.pi, 9)), random.uniform(6, 20, 9)
            points = np.stack([30 + reach * np.cos(angle), 25 + reach * np.sin(angle)], 1).flatten().tolist()
            notes = [note(1, [1, 1, 50, 40], segmentation=[points])]
            data = open_data(coco(tmp_path / "a.json", [entry(1, "a.png", (60, 50))], notes))
            ours = data.masks.take(0, View.whole(), (50, 60)).numpy() == 1
            theirs = tools.decode(tools.merge(tools.frPyObjects([points], 50, 60))).astype(bool)
            edge = theirs ^ ours  # theirs rounds corners to a fifth of a pixel
            assert edge.sum() <= 0.12 * theirs.sum()
            assert abs(int(ours.sum()) - int(theirs.sum())) <= 0.08 * theirs.sum()

    def test_bad_annotations_are_listed_and_left_out(self, tmp_path):
        write_image(tmp_path / "a.png")
        write_image(tmp_path / "odd.png", size=(WIDE, HIGH + 1))
        (tmp_path / "broken.png").write_bytes(b"nothing")
        notes = [
            note(1, [30, 20, 20, 5]),  # cut
            note(1, [50, 20, 5, 5]),
            note(1, [5, 5, 0, 5]),
            note(1, [5, 5, -3, 5]),
            note(1, [5, float("nan"), 3, 5]),
            note(1, [5, 5, 3]),
            note(1, [5, 5, 10**400, 3]),
            note(1, [5, 5, 3, 3], 99),
            note(1, [5, 5, 3, 3], [7]),
            note({}, [5, 5, 3, 3]),
            note(1, [5, 5, 6, 6], segmentation="outline"),
            note(1, [5, 5, 6, 6], segmentation={"size": [HIGH, WIDE], "counts": "~~"}),
            note(55, [5, 5, 3, 3]),
            note(1, [5, 5, 6, 6], segmentation=[[1, 2, 3, 4]]),
            note(1, [5, 5, 6, 6], segmentation={"size": [3, 3], "counts": [9]}),
            note(1, [5, 5, 6, 6], segmentation=[[5, 5, 9, 5, 9, 9]]),
            note(2, [5, 5, 3, 3]),
        ]
        images = [entry(1, "a.png"), entry(2, "gone.png"), entry(3, "odd.png"), entry(4, "broken.png")]
        data = open_data(coco(tmp_path / "a.json", images, notes))
        alone = ("box_clipped", "box_outside", "box_empty", "image_size")
        several = {"box_invalid": 4, "unknown_class": 2, "missing_image": 4, "bad_shape": 4}
        assert counted(data) == dict.fromkeys(alone, 1) | several
        assert len(data.inputs) == 2
        assert data.boxes.rows[0][:, 1:].tolist()[0] == pytest.approx([0.75, 20 / 30, 1, 25 / 30])
        assert len(data.boxes.rows[0]) == 6
        assert f"4 {PROBLEMS['box_invalid']} (vitral check lists them)" in data.notes
        report = check_data(data)
        assert len(report["annotations"]["missing_image"]) == 4
        assert report["problems"] == 18
        json.dumps(report)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "cannot be read as JSON"),
            ("[1]", "it needs a list 'images'"),
            ('{"images": [{"id": 1}], "annotations": [], "categories": []}', "each with id and file_name"),
            ('{"images": [], "categories": []}', "it needs a list 'annotations'"),
            ('{"images": [], "annotations": [], "categories": []}', "has 0 categories"),
            (
                '{"images": [{"id": 1, "file_name": "x"}], "annotations": [], "categories": [{"id": 1, "name": "a"}]}',
                r"none of its images was found \(.*x: does not exist \(0 annotations\)\); put them beside the file",
            ),
        ],
    )
    def test_files_that_cannot_be_used(self, tmp_path, text, message):
        (tmp_path / "a.json").write_text(text)
        with pytest.raises(DataError, match=message) as error:
            open_data(tmp_path / "a.json")
        assert "\n" not in str(error.value)

    def test_what_is_written_is_read_again(self, tmp_path):
        write_image(tmp_path / "a.png")
        write_image(tmp_path / "b.png", size=(23, 31))
        mask = torch.zeros(HIGH, WIDE, dtype=torch.bool)
        mask[3:9, 5:11] = True
        found = [[Instance(1, (0.125, 0.1, 0.275, 0.3), 0.75, mask)], []]
        sizes = [(HIGH, WIDE), (31, 23)]
        write_coco(tmp_path / "out.json", ["a.png", "b.png"], sizes, found, ["cat", "dog"])
        data = open_data(tmp_path / "out.json")
        assert data.problems == []
        assert data.boxes.rows[0].flatten().tolist() == pytest.approx([1, 0.125, 0.1, 0.275, 0.3])
        assert torch.equal(data.masks.images.read(0, "grey")[0] == 2, mask)
        results = coco_document(["a.png", "b.png"], sizes, found, ["cat", "dog"])["annotations"]
        assert results[0]["score"] == 0.75
        assert results[0]["bbox"] == pytest.approx([5, 3, 6, 6])
        assert results[0]["area"] == 36

    def test_coco_tools_read_what_is_written(self, tmp_path, capsys):
        tools = pytest.importorskip("pycocotools.coco")
        found = [[Instance(0, (0.1, 0.1, 0.5, 0.5), 0.9)]]
        write_coco(tmp_path / "out.json", ["a.png"], [(HIGH, WIDE)], found, ["cat"])
        truth = tools.COCO(str(tmp_path / "out.json"))
        loaded = truth.loadRes(coco_document(["a.png"], [(HIGH, WIDE)], found, ["cat"])["annotations"])
        assert loaded.anns[1]["bbox"] == pytest.approx([4, 3, 16, 12])

    @pytest.mark.parametrize(
        ("turn", "upright"), [*((turn, True) for turn in range(1, 9)), *((turn, False) for turn in (5, 6, 7, 8))]
    )
    @pytest.mark.parametrize("kind", ["png", "tiff"])
    def test_boxes_and_masks_turn_with_the_image(self, tmp_path, turn, upright, kind):
        """Annotated upright or as the file lies, a box and an outline stay on what they lay on.

        Files of orientation 2 to 4 have one size either way, so these are taken as annotated upright. A TIFF is turned
        by Pillow itself.
        """
        file = torch.zeros(HIGH, WIDE, dtype=torch.bool)
        file[3:14, 5:22] = file[14:20, 5:11] = True  # an L: no turn leaves it as it was
        run = torch.zeros(HIGH, WIDE, dtype=torch.bool)
        run[23:30, 30:37] = True
        shown, shown_run = (_rotate(x[None], turn)[0] for x in (file, run))
        seen, seen_run = (shown, shown_run) if upright else (file, run)
        image = Image.fromarray((file.numpy() * 255).astype(np.uint8))
        exif = Image.Exif()
        exif[0x0112] = turn
        image.save(tmp_path / f"a.{kind}", exif=exif)

        def box(x):
            (y0, x0), (y1, x1) = x.nonzero().amin(0).tolist(), (x.nonzero().amax(0) + 1).tolist()
            return [x0, y0, x1 - x0, y1 - y0]

        corners = np.array([(5, 3), (22, 3), (22, 14), (11, 14), (11, 20), (5, 20)])
        high, wide = seen.shape
        notes = [
            note(1, box(seen), 7, segmentation=mask_to_rle(seen) if upright else [corners.flatten().tolist()]),
            note(1, box(seen_run), 8, segmentation=mask_to_rle(seen_run, compressed=True)),
        ]
        data = open_data(coco(tmp_path / "a.json", [entry(1, f"a.{kind}", (wide, high))], notes))
        pixels = data.inputs.read(0, "grey")[0] > 0
        assert torch.equal(pixels, shown)
        assert torch.equal(data.masks.images.read(0, "grey")[0], shown.byte() + 2 * shown_run.byte())
        for row, part in zip(data.boxes.rows[0], (shown, shown_run), strict=True):
            x, y, w, h = box(part)
            sides = torch.tensor([part.shape[1], part.shape[0]] * 2)
            assert (row[1:] * sides).tolist() == pytest.approx([x, y, x + w, y + h])
        assert data.problems == []
        said = [] if upright else ["the annotations of 1 images are for the unturned file and were turned by its EXIF"]
        assert data.notes == said

    def test_a_swapped_size_without_a_turn_is_a_problem(self, tmp_path):
        write_image(tmp_path / "a.png")
        data = open_data(coco(tmp_path / "a.json", [entry(1, "a.png", (HIGH, WIDE))], [note(1, [1, 1, 5, 5])]))
        assert kinds(data) == ["image_size"]

    @pytest.mark.parametrize(
        "document", [{"images": 12}, {"images": ["a.png"]}, {"images": [], "annotations": [], "categories": 3}, [1]]
    )
    def test_class_folders_with_some_json_beside_them(self, tmp_path, document):
        for name in ("cat", "dog"):
            write_image(tmp_path / name / "1.png")
        (tmp_path / "info.json").write_text(json.dumps(document))
        assert open_data(tmp_path).kind == "label"

    def test_a_lone_file_in_a_folder(self, tmp_path):
        write_image(tmp_path / "a.png")
        file = coco(tmp_path / "own.json", [entry(1, "a.png")], [note(1, [1, 1, 5, 5])])
        file.write_text(json.dumps({"info": "x"} | json.loads(file.read_text()), indent=3))
        (tmp_path / "info.json").write_text('{"images": 1}')
        assert len(open_data(tmp_path).boxes.rows[0]) == 1

    def test_a_part_without_its_images_is_left_out(self, tmp_path):
        for part in ("train", "valid"):
            coco(tmp_path / part / "_annotations.coco.json", [entry(1, "a.png")], [note(1, [1, 1, 5, 5])])
        write_image(tmp_path / "train" / "a.png")
        data = open_data(tmp_path)
        assert list(data.splits) == ["train"]
        assert kinds(data) == ["missing_image"]
        assert "the val split has no usable image and was dropped" in data.notes


@dataclass(frozen=True)
class Answer:
    name: str
    size: tuple[int, int]
    boxes: list[list[float]]
    scores: list[float]
    numbers: list[int]


class TestPredictions:
    answers = (
        Answer("a.png", (HIGH, WIDE), [[3.3, 2.1, 17.7, 23.9], [0, 0, WIDE, HIGH]], [0.75, 0.5], [1, 0]),
        Answer("b.png", (31, 23), [], [], []),
        Answer("unreadable.png", (0, 0), [], [], []),
        Answer("c.png", (31, 23), [[1.5, 7.25, 11, 29.5]], [0.25], [2]),
    )

    def images(self, folder):
        write_image(folder / "a.png")
        for name in ("b.png", "c.png"):
            write_image(folder / name, size=(23, 31))

    def same(self, data):
        assert data.problems == []
        assert [data.inputs.name(i).rpartition("/")[2] for i in range(3)] == ["a.png", "b.png", "c.png"]
        answers = [answer for answer in self.answers if answer.size != (0, 0)]
        for rows, answer in zip(data.boxes.rows, answers, strict=True):
            high, wide = answer.size
            sides = torch.tensor([wide, high, wide, high])
            assert rows[:, 0].tolist() == answer.numbers
            for row, box in zip(rows[:, 1:], torch.tensor(answer.boxes), strict=True):
                assert row.tolist() == pytest.approx((box / sides).tolist(), abs=1e-4)

    def test_coco(self, tmp_path):
        self.images(tmp_path)
        write_predictions(tmp_path / "out.json", iter(self.answers), ["cat", "dog", "emu"])
        data = open_data(tmp_path / "out.json")
        assert data.classes == ["cat", "dog", "emu"]
        self.same(data)
        document = json.loads((tmp_path / "out.json").read_text())
        assert [entry["score"] for entry in document["annotations"]] == [0.75, 0.5, 0.25]
        assert [(image["file_name"], image["height"], image["width"]) for image in document["images"]] == [
            ("a.png", HIGH, WIDE),
            ("b.png", 31, 23),
            ("c.png", 31, 23),
        ]

    def test_yolo(self, tmp_path):
        self.images(tmp_path / "images" / "train")
        write_yolo(tmp_path / "labels" / "train", iter(self.answers))
        (tmp_path / "data.yaml").write_text("names: [cat, dog, emu]")
        self.same(open_data(tmp_path))
        texts = {p.name: p.read_text() for p in (tmp_path / "labels" / "train").iterdir()}
        assert sorted(texts) == ["a.txt", "b.txt", "c.txt"]
        assert texts["b.txt"] == ""
        assert texts["a.txt"].splitlines()[1] == "0 0.500000 0.500000 1.000000 1.000000"

    def test_two_images_of_one_name_have_no_place_in_one_folder(self, tmp_path):
        answers = [Answer(f"{folder}/a.png", (3, 5), [], [], []) for folder in "xy"]
        with pytest.raises(DataError, match=r"two images are called a, but each needs a a\.txt"):
            write_yolo(tmp_path / "out", answers)
        assert not (tmp_path / "out").exists()


class TestRunLengths:
    def masks(self):
        random = torch.Generator().manual_seed(0)
        yield torch.zeros(5, 7, dtype=torch.bool)
        yield torch.ones(5, 7, dtype=torch.bool)
        for share in (0.02, 0.5, 0.9):
            yield torch.rand(13, 37, generator=random) < share
        large = torch.zeros(211, 307, dtype=torch.bool)
        large[20:190, 31:250] = True
        large[50:60, 70:80] = False
        yield large

    @pytest.mark.parametrize("compressed", [False, True])
    def test_there_and_back(self, compressed):
        for mask in self.masks():
            rle = mask_to_rle(mask, compressed)
            json.dumps(rle)
            assert torch.equal(rle_to_mask(rle), mask)

    @pytest.mark.parametrize("module", ["pycocotools.mask", "faster_coco_eval.core.mask"])
    def test_they_are_those_of_others(self, module):
        tools = pytest.importorskip(module)
        for mask in self.masks():
            ours = mask_to_rle(mask, compressed=True)
            theirs = tools.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
            assert ours["counts"].encode() == theirs["counts"]
            assert torch.equal(rle_to_mask(theirs), mask)
            plain = mask_to_rle(mask)
            again = tools.decode(tools.frPyObjects(plain, *plain["size"]))
            assert np.array_equal(again.astype(bool), mask.numpy())

    def test_a_string_that_is_cut_short(self):
        rle = mask_to_rle(torch.rand(9, 9) < 0.5, compressed=True)
        with pytest.raises(DataError, match=r"run lengths make .* pixels, not 9 x 9"):
            rle_to_mask({"size": [9, 9], "counts": rle["counts"][:-4]})


class TestYolo:
    def folder(self, path, lines, names="names: [cat, dog]", layout="images/{part}", parts=("train", "val")):
        for part in parts:
            images = path / layout.format(part=part)
            labels = path / layout.format(part=part).replace("images", "labels")
            write_image(images / "a.png")
            write_image(images / "empty.png")
            labels.mkdir(parents=True, exist_ok=True)
            (labels / "a.txt").write_text("\n".join(lines))
        if names:
            (path / "data.yaml").write_text(f"path: x\n{names}\nnc: 2\n")
        return path

    @pytest.mark.parametrize("layout", ["images/{part}", "{part}/images"])
    def test_boxes(self, tmp_path, layout):
        data = open_data(self.folder(tmp_path / "set", ["1 0.5 0.5 0.5 0.25", "0 0.1 0.1 0.2 0.2"], layout=layout))
        assert data.classes == ["cat", "dog"]
        assert data.boxes.rows[0].flatten().tolist() == pytest.approx([1, 0.25, 0.375, 0.75, 0.625, 0, 0, 0, 0.2, 0.2])
        assert data.boxes.rows[1].shape == (0, 5)
        assert {k: len(v) for k, v in data.splits.items()} == {"train": 2, "val": 2}
        assert data.targets[0].tolist() == [1, 1]
        assert data.problems == []

    @pytest.mark.parametrize(
        "names",
        ["names: [cat, 'dog']", "names:\n  0: cat\n  1: dog", "names:\n- cat\n- dog", "names: {0: cat, 1: dog}"],
    )
    @pytest.mark.parametrize("with_yaml", [True, False])
    def test_names(self, tmp_path, names, with_yaml, monkeypatch):
        if not with_yaml:
            monkeypatch.setitem(sys.modules, "yaml", None)
        assert open_data(self.folder(tmp_path / "set", [], names)).classes == ["cat", "dog"]

    def test_without_names_the_numbers_are_the_names(self, tmp_path):
        data = open_data(self.folder(tmp_path / "set", ["2 0.5 0.5 0.5 0.25"], names=""))
        assert data.classes == ["0", "1", "2"]
        assert "classes are called by their numbers" in data.notes[0]

    def test_bad_lines_are_listed_and_left_out(self, tmp_path):
        lines = [
            "0 0.5 0.5 0.5 0.25",
            "0 0.9 0.5 0.4 0.2",  # cut
            "0 1.9 0.5 0.4 0.2",
            "0 0.5 0.5 0 0.2",
            "0 0.5 0.5 -0.1 0.2",
            "0 nan 0.5 0.1 0.2",
            "5 0.5 0.5 0.1 0.2",
            "-1 0.5 0.5 0.1 0.2",
            "cat 0.5 0.5 0.1 0.2",
            "0 0.5 0.5",
            "0 0.1 0.1 0.3 0.1 0.3 0.4",  # an outline
        ]
        path = self.folder(tmp_path / "set", lines, parts=("train",))
        (path / "labels/train/gone.txt").write_text("0 0.5 0.5 0.5 0.5")
        (path / "labels/train/classes.txt").write_text("cat")
        data = open_data(path)
        twice = ("box_invalid", "unknown_class", "bad_line")
        alone = ("box_clipped", "box_outside", "box_empty", "missing_image")
        assert counted(data) == dict.fromkeys(alone, 1) | dict.fromkeys(twice, 2)
        assert len(data.boxes.rows[0]) == 3
        assert data.boxes.rows[0][2].tolist() == pytest.approx([0, 0.1, 0.1, 0.3, 0.4])
        assert "1 outlines are taken as the boxes around them" in data.notes
        assert set(check_data(data)["annotations"]) == set(kinds(data))
        outside = next(p["error"] for p in data.problems if p["kind"] == "box_outside")
        written = "the box of line 3, `0 1.9 0.5 0.4 0.2`, in fractions of the image,"
        assert outside.endswith(f"a.png: {written} is outside the image")

    def test_folders_that_cannot_be_used(self, tmp_path):
        with pytest.raises(DataError, match="should name the classes"):
            open_data(self.folder(tmp_path / "a", ["0 .5 .5 .1 .1"], names="names: 7"))
        with pytest.raises(DataError, match="has images for val but none for a training part"):
            open_data(self.folder(tmp_path / "b", ["0 .5 .5 .1 .1"], parts=("val",)))
        with pytest.raises(DataError, match=r"its classes are unknown; add data\.yaml"):
            open_data(self.folder(tmp_path / "c", [], names=""))

    def test_names_that_are_not_utf_8(self, tmp_path):
        path = self.folder(tmp_path / "set", ["0 .5 .5 .1 .1"])
        (path / "data.yaml").write_bytes("names: [chèvre, âne]".encode("latin-1"))
        with pytest.raises(
            DataError, match=r"data\.yaml cannot be read as UTF-8 text \(.*\); save it as UTF-8"
        ) as error:
            open_data(path)
        assert "\n" not in str(error.value)

    def test_no_names_in_the_text(self):
        assert simple_names("path: x") is None


class TestMasks:
    def pixels(self, *values):
        mask = np.zeros((HIGH, WIDE), np.uint8)
        for i, value in enumerate(values):
            mask[3 * i : 3 * i + 3] = value
        return mask

    def folder(self, path, masks, name="masks", mode="L"):
        for i, mask in enumerate(masks):
            write_image(path / "images" / f"{i}.jpg")
            write_mask(path / name / f"{i}.png", mask, mode)
        return path

    @pytest.mark.parametrize("name", ["masks", "labels", "annotations"])
    @pytest.mark.parametrize("mode", ["L", "P"])
    def test_numbers(self, tmp_path, name, mode):
        mask = self.pixels(1, 2, 255)
        data = open_data(self.folder(tmp_path / "set", [mask, self.pixels(0)], name, mode))
        assert data.kind == "none"
        assert data.mask_classes == data.classes == ["0", "1", "2"]
        assert np.array_equal(data.masks.take(0, View.whole(), (HIGH, WIDE)).numpy(), mask)
        assert data.notes == ["pixels of 255 in the masks are ignored"]
        assert data.describe() == "set: 2 images, masks of 3 classes, split train 2"

    @pytest.mark.parametrize("layout", [("images/{}", "masks/{}"), ("{}/images", "{}/masks")])
    def test_parts(self, tmp_path, layout):
        for part in ("train", "val"):
            write_image(tmp_path / layout[0].format(part) / "a.png")
            write_mask(tmp_path / layout[1].format(part) / "a_mask.png", self.pixels(1))
        data = open_data(tmp_path)
        assert {k: v.tolist() for k, v in data.splits.items()} == {"train": [0], "val": [1]}

    @pytest.mark.parametrize("kind", ["L", "1", "RGB"])
    def test_black_and_white(self, tmp_path, kind):
        path = self.folder(tmp_path / "set", [self.pixels(255)])
        Image.open(path / "masks/0.png").convert(kind).save(path / "masks/0.png")
        data = open_data(path)
        assert data.mask_classes == ["0", "1"]
        assert data.masks.take(0, View.whole(), (HIGH, WIDE)).unique().tolist() == [0, 1]
        assert data.notes == ([] if kind == "1" else ["the masks hold only 0 and 255: 255 is taken as class 1"])

    def test_colours(self, tmp_path):
        red, blue = self.pixels(255), self.pixels(0, 255)
        path = self.folder(tmp_path / "set", [np.stack([red, 0 * red, blue], 2)])
        (path / "classes.txt").write_text("background\nwater\nland\n")
        data = open_data(path)
        mask = data.masks.take(0, View.whole(), (HIGH, WIDE))
        assert mask[[0, 3, 6], 0].tolist() == [2, 1, 0]
        assert data.mask_classes == ["background", "water", "land"]
        assert data.notes == [
            "each colour of the masks is a class: #000000 = background, #0000ff = water, #ff0000 = land"
        ]

    def test_colours_without_names_are_called_by_themselves(self, tmp_path):
        """So that a model that knows red is not asked about green."""
        some, other = self.pixels(255), self.pixels(0, 255)
        red = open_data(self.folder(tmp_path / "red", [np.stack([some, 0 * some, other], 2)]))
        green = open_data(self.folder(tmp_path / "green", [np.stack([0 * some, some, other], 2)]))
        assert red.mask_classes == ["#000000", "#0000ff", "#ff0000"]
        assert green.mask_classes == ["#000000", "#0000ff", "#00ff00"]
        assert red.notes == ["each colour of the masks is a class: #000000, #0000ff, #ff0000"]
        assert red.masks.take(0, View.whole(), (HIGH, WIDE))[[0, 3, 6], 0].tolist() == [2, 1, 0]
        task = Segment(red.mask_classes, SegmentOptions())
        assert task.targets(red) is red.masks
        with pytest.raises(DataError, match="they must be the same"):
            task.targets(green)

    def test_names_that_are_not_utf_8(self, tmp_path):
        path = self.folder(tmp_path / "set", [self.pixels(1)])
        (path / "classes.txt").write_bytes("ciel\nforêt\n".encode("latin-1"))
        with pytest.raises(DataError, match=r"classes\.txt cannot be read as UTF-8 text"):
            open_data(path)

    @pytest.mark.parametrize("names", [["sky", "sea"], {"0": "sky", "1": "sea"}, {"sky": 0, "sea": 1}])
    def test_names_and_numbers_beyond_them(self, tmp_path, names):
        path = self.folder(tmp_path / "set", [self.pixels(1, 9), self.pixels(1)])
        (path / "classes.json").write_text(json.dumps(names))
        data = open_data(path)
        assert data.mask_classes == ["sky", "sea"]
        assert kinds(data) == ["unknown_class"]
        assert data.masks.take(0, View.whole(), (HIGH, WIDE))[3, 0] == IGNORE

    def test_bad_masks_are_listed_and_left_out(self, tmp_path):
        path = self.folder(tmp_path / "set", [self.pixels(1)] * 4)
        write_mask(path / "masks/1.png", np.zeros((HIGH, WIDE + 1)))
        (path / "masks/2.png").write_bytes(b"nothing")
        (path / "masks/3.png").rename(path / "masks/other.png")
        data = open_data(path)
        assert kinds(data) == ["mask_size", "mask_unreadable", "missing_image", "missing_mask"]
        assert len(data.inputs) == 1
        report = check_data(data)
        assert report["problems"] == 4
        assert report["classes"] == {}
        assert "has 41 x 30 pixels, its image 40 x 30" in report["annotations"]["mask_size"][0]["error"]

    def test_folders_that_cannot_be_used(self, tmp_path):
        path = self.folder(tmp_path / "a", [self.pixels(1)])
        Image.open(path / "masks/0.png").save(path / "masks/0.jpg")
        (path / "masks/0.png").unlink()
        with pytest.raises(DataError, match="is a JPEG, which blurs class numbers; store masks as PNG"):
            open_data(path)
        path = self.folder(tmp_path / "b", [self.pixels(1), np.stack([self.pixels(1), self.pixels(2)] * 2, 2)[..., :3]])
        with pytest.raises(DataError, match="mixes masks of class numbers with masks of colours"):
            open_data(path)
        path = self.folder(tmp_path / "c", [np.random.default_rng(0).integers(0, 256, (HIGH, WIDE, 3))])
        with pytest.raises(DataError, match=r"have .* colours for at most 254 classes"):
            open_data(path)
        path = self.folder(tmp_path / "d", [np.zeros((3, 3))])
        with pytest.raises(DataError, match="has no image with a usable mask"):
            open_data(path)


class TestTable:
    def table(self, folder, rows, header):
        for i in range(len(rows)):
            write_image(folder / f"{i}.png", (i, 0, 0))
        path = folder / "labels.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([("image", *header), *((f"{i}.png", *row) for i, row in enumerate(rows))])
        return path

    def test_numbers_that_are_not_integers(self, tmp_path):
        data = open_data(self.table(tmp_path, [("1.5",), ("2",), ("nan",), ("",), ("inf",), ("-3e1",)], ["target"]))
        assert data.kind == "numbers"
        assert data.targets.tolist() == [[1.5], [2], [-30]]
        assert data.target_names == ["target"]
        assert kinds(data) == ["bad_target"] * 3
        assert [p["error"].partition(": ")[2] for p in data.problems] == [
            "target is nan, not a finite number",
            "target is empty, not a finite number",
            "target is inf, not a finite number",
        ]
        assert "column target: a number to estimate, because it holds numbers that are not written as" in data.notes[1]
        report = check_data(data)
        assert report["numbers"]["target"]["largest"] == 2
        assert report["classes"] == {}

    def test_the_task_overrides_what_the_cells_suggest(self, tmp_path):
        path = self.table(tmp_path, [("3",), ("5",), ("word",)], ["label"])
        assert open_data(path).kind == "label"
        data = open_data(path, task="regress")
        assert data.targets.tolist() == [[3], [5]]
        assert len(data.problems) == 1
        path = self.table(tmp_path, [("1.5",), ("2.5",)], ["label"])
        assert open_data(path, task="classify").classes == ["1.5", "2.5"]

    def test_several_numbers(self, tmp_path):
        path = self.table(tmp_path, [("3", "0.5"), ("5", "0.25")], ["a", "b"])
        data = open_data(path, label_column="a,b")
        assert data.target_names == ["a", "b"]
        assert data.targets.tolist() == [[3, 0.5], [5, 0.25]]
        assert data.describe() == "labels: 2 images, numbers a, b, split train 2"
        with pytest.raises(DataError, match="has no column 'c'"):
            open_data(path, label_column="a,c")

    def test_a_column_for_each_class(self, tmp_path):
        path = self.table(tmp_path, [("1", "0"), ("1", "1"), ("", "1")], ["cat", "dog"])
        data = open_data(path, label_column="cat,dog")
        assert data.kind == "labels"
        assert data.classes == ["cat", "dog"]
        assert data.targets.tolist() == [[1, 0], [1, 1]]
        assert kinds(data) == ["bad_target"]

    def test_words_in_several_columns(self, tmp_path):
        path = self.table(tmp_path, [("x", "0"), ("y", "1")], ["cat", "dog"])
        with pytest.raises(DataError, match="columns cat, dog must hold 0 and 1, or numbers"):
            open_data(path, label_column="cat,dog")

    @pytest.mark.parametrize(
        "cells",
        [
            ["cat;dog", "dog", ""],
            ["cat | dog", "dog", ""],
            ["cat,dog", "dog", ""],
            ["[cat dog]", "[dog]", "[]"],
            ["['cat', 'dog']", "['dog']", "[]"],
        ],
    )
    def test_several_labels_to_a_cell(self, tmp_path, cells):
        data = open_data(self.table(tmp_path, [(cell,) for cell in cells], ["label"]))
        assert data.kind == "labels"
        assert data.classes == ["cat", "dog"]
        assert data.targets.tolist() == [[1, 1], [0, 1], [0, 0]]
        assert check_data(data)["classes"] == {"cat": 1, "dog": 2}

    @pytest.mark.parametrize("column", ["labels", "tags"])
    @pytest.mark.parametrize("cells", [["cat;hat", ""], ["cat,hat", ""]])
    def test_columns_that_are_called_so(self, tmp_path, column, cells):
        data = open_data(self.table(tmp_path, [(cell,) for cell in cells], [column]))
        assert data.kind == "labels"
        assert data.classes == ["cat", "hat"]
        assert data.targets.tolist() == [[1, 1], [0, 0]]

    def test_one_label_in_every_cell_of_labels(self, tmp_path):
        path = self.table(tmp_path, [("cat",), ("hat",)], ["labels"])
        assert open_data(path).kind == "label"
        assert open_data(path, task="multilabel").kind == "labels"

    def test_a_part_without_a_target_is_left_out(self, tmp_path):
        rows = [("1.5", "train"), ("nan", "val"), ("2.5", "train"), ("", "val")]
        data = open_data(self.table(tmp_path, rows, ["target", "split"]))
        assert {part: v.tolist() for part, v in data.splits.items()} == {"train": [0, 1]}
        assert "the val split has no usable image and was dropped" in data.notes
        assert list(data.with_splits(0.5, 0, seed=0).splits) == ["train", "val"]
        rows = [("1.5", "val"), ("nan", "train")]
        with pytest.raises(DataError, match=r"no usable image in its training split \(.*1\.png: target is nan"):
            open_data(self.table(tmp_path, rows, ["target", "split"]))

    def test_a_comma_in_a_name_is_no_separator(self, tmp_path):
        path = self.table(tmp_path, [("tench, Tinca tinca",), ("kite, bird of prey",)], ["label"])
        assert open_data(path).classes == ["kite, bird of prey", "tench, Tinca tinca"]
        assert len(open_data(path, task="multilabel").classes) == 4

    def test_no_usable_row(self, tmp_path):
        path = self.table(tmp_path, [("x",), ("",)], ["label"])
        with pytest.raises(DataError, match=r"has no row with a usable target; the first: .*label is x"):
            open_data(path, task="regress")


def test_parts_are_cut_at_random_where_there_are_no_classes():
    data = make_digit_scenes(40, 5).with_splits(val_fraction=0.1, test_fraction=0.1, seed=0)
    assert {k: len(v) for k, v in data.splits.items()} == {"train": 36, "val": 4, "test": 5}
    again = make_digit_scenes(40, 5).with_splits(val_fraction=0.1, test_fraction=0.1, seed=0)
    assert torch.equal(data.splits["val"], again.splits["val"])
    rest, cut = stratified_split(torch.rand(11, 3), torch.arange(11), 0.2, seed=1)
    assert sorted([*rest.tolist(), *cut.tolist()]) == list(range(11))
    assert len(cut) == 2
    assert len(stratified_split(torch.zeros(11, 0), torch.arange(11), 0.2, seed=1)[1]) == 2


def test_check_prints_what_the_source_found(tmp_path, capsys):
    write_image(tmp_path / "a.png")
    coco(tmp_path / "a.json", [entry(1, "a.png")], [note(1, [50, 20, 5, 5]), note(1, [1, 1, 5, 5])])
    main(["check", str(tmp_path / "a.json")])
    out = capsys.readouterr().out
    assert "1 boxes are outside their image and were dropped" in out
    assert "a.png: the box x 50, y 20, width 5, height 5 (pixels, in an image of 40 x 30) is outside the image" in out
    assert "1 problems" in out
    table = tmp_path / "t.csv"
    table.write_text("image,label\na.png,1.5\na.png,nan\n")
    main(["check", str(table), "--task", "regress"])
    assert "label is nan, not a finite number" in capsys.readouterr().out
