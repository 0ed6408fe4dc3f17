"""How the columns of a table are read, what is reported about them, and what is never a class."""

import csv

import pytest
from PIL import Image

from vitral.cli.main import main
from vitral.data.sources.open import open_data
from vitral.errors import DataError

MISSING = ["", " ", "NaN", "nan", "None", "null", "NULL", "NA", "<NA>"]


@pytest.fixture
def images(tmp_path):
    for i in range(30):
        Image.new("RGB", (9, 8), (8 * i, 255 - 8 * i, 40)).save(tmp_path / f"{i}.png")
    return tmp_path


def write_csv(folder, column, values, name="table.csv"):
    path = folder / name
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("image", column), *((f"{i}.png", value) for i, value in enumerate(values))])
    return path


def write_parquet(folder, column, values):
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"image": [f"{i}.png" for i in range(len(values))], column: values})
    parquet.write_table(table, folder / "table.parquet")
    return folder / "table.parquet"


def note_of(data, column):
    return next(note for note in data.notes if note.startswith(f"column {column}:"))


class TestNumbers:
    @pytest.mark.parametrize("column", ["label", "class", "category", "Label"])
    def test_few_integers_in_a_column_named_for_classes_are_classes(self, images, column):
        data = open_data(write_csv(images, column, ["3", "11", "3", "-2"]), label_column=column)
        assert data.kind == "label"
        assert data.classes == ["-2", "3", "11"]
        assert note_of(data, column) == (
            f"column {column}: 3 classes, because it is named {column} and holds at most 20 distinct integers; "
            f"--task regress reads it as a number"
        )

    @pytest.mark.parametrize(
        ("column", "values", "why"),
        [
            ("count", ["3", "11", "3"], "it holds integers and is not named label, class or category"),
            ("target", ["0", "1", "0"], "it holds integers and is not named label, class or category"),
            ("label", ["3", "2.0", "3"], "it holds numbers that are not written as integers, such as 2.0"),
            ("label", [str(i) for i in range(21)], "it holds 21 distinct integers, more than 20"),
        ],
    )
    def test_all_other_numbers_are_regression_targets(self, images, column, values, why):
        data = open_data(write_csv(images, column, values), label_column=column)
        assert data.kind == "numbers"
        assert data.targets.tolist() == [[float(value)] for value in values]
        expected = f"column {column}: a number to estimate, because {why}; --task classify reads it as classes"
        assert note_of(data, column) == expected
        assert open_data(write_csv(images, column, values), label_column=column, task="classify").kind == "label"

    def test_twenty_distinct_integers_are_still_classes(self, images):
        assert len(open_data(write_csv(images, "label", [str(i) for i in range(20)])).classes) == 20

    def test_integers_of_a_parquet_file(self, images):
        assert open_data(write_parquet(images, "label", [3, 11, None, 3])).classes == ["3", "11"]
        assert open_data(write_parquet(images, "label", [3.0, 11.0, 3.0])).kind == "numbers"
        assert open_data(write_parquet(images, "count", [3, 11, 3]), label_column="count").kind == "numbers"

    def test_the_rule_is_printed(self, images, capsys):
        assert main(["check", str(write_csv(images, "count", ["3", "11", "5"])), "--label-column", "count"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "column image: images, because of its name; --image-column NAME changes it" in out
        assert "column count: a number to estimate, because it holds integers and is not named label" in out
        assert "--task classify reads it as classes" in out


class TestEveryColumn:
    def test_each_is_reported_once(self, images):
        path = images / "table.csv"
        path.write_text("file,category,split,author\n0.png,cat,train,x\n1.png,dog,train,y\n2.png,cat,test,z\n")
        assert open_data(path).notes == [
            "column file: images, because of its name; --image-column NAME changes it",
            "column category: 2 classes, because it holds words",
            "column split: the split of each row, because of its name",
            "not used: author (--label-column NAME chooses the target)",
        ]

    def test_a_column_named_by_an_option(self, images):
        path = images / "table.csv"
        path.write_text("place,kind\n0.png,cat\n1.png,dog\n")
        data = open_data(path, image_column="place", label_column="kind", task="classify")
        assert data.notes[0] == "column place: images, as --image-column asks"
        assert note_of(data, "kind") == "column kind: 2 classes, as --task classify asks"

    def test_texts(self, tmp_path):
        (tmp_path / "table.csv").write_text("text,label\ngood,1\nbad,0\nodd,NA\n")
        data = open_data(tmp_path / "table.csv")
        assert note_of(data, "text").startswith("column text: texts to read")
        assert data.lines == ["good", "bad"]


class TestMissing:
    @pytest.mark.parametrize("task", [None, "classify"])
    def test_never_a_class(self, images, task):
        values = ["cat", "dog", *MISSING, "cat"]
        data = open_data(write_csv(images, "label", values), task=task)
        assert data.classes == ["cat", "dog"]
        assert data.targets.tolist() == [0, 1, 0]
        assert [p["kind"] for p in data.problems] == ["bad_target"] * len(MISSING)
        assert data.problems[2]["error"].endswith("4.png: label is NaN, not a class")
        assert any(note.startswith(f"{len(MISSING)} rows have no usable target") for note in data.notes)

    def test_integers_with_missing_cells_stay_classes(self, images):
        assert open_data(write_csv(images, "label", ["1", "NaN", "0", ""])).classes == ["0", "1"]

    def test_never_one_of_several_labels(self, images):
        data = open_data(write_csv(images, "tags", ["cat;dog", "nan", "dog;None", "", "cat"]))
        assert data.classes == ["cat", "dog"]
        assert data.targets.tolist() == [[1, 1], [0, 0], [1, 0]]
        assert len(data.problems) == 2
        assert "1 empty cells are rows without a label" in note_of(data, "tags")

    @pytest.mark.parametrize("values", [["cat", None, "dog"], ["cat", "nan", "dog"]])
    def test_parquet(self, images, values):
        data = open_data(write_parquet(images, "label", values))
        assert data.classes == ["cat", "dog"]
        assert len(data.problems) == 1

    def test_a_missing_text_of_a_parquet_file_is_no_text(self, tmp_path):
        import pyarrow
        from pyarrow import parquet

        table = pyarrow.table({"text": ["good", None, "bad"], "label": ["a", "b", "b"]})
        parquet.write_table(table, tmp_path / "table.parquet")
        assert open_data(tmp_path / "table.parquet").lines == ["good", "bad"]

    def test_hugging_face(self, images):
        import datasets

        rows = {"image": [str(images / f"{i}.png") for i in range(4)], "label": ["cat", None, "nan", "dog"]}
        features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
        datasets.Dataset.from_dict(rows, features).save_to_disk(str(images / "saved"))
        data = open_data(images / "saved")
        assert data.classes == ["cat", "dog"]
        assert len(data.problems) == 2
        assert data.inputs.read(1, "rgb")[0, 0, 0] == 24  # the image of the fourth row

    def test_shards(self, images):
        import io
        import tarfile

        with tarfile.open(images / "a.tar", "w") as tar:
            for i, label in enumerate([b"cat", b"nan", b"dog"]):
                for name, content in ((f"{i}.png", (images / f"{i}.png").read_bytes()), (f"{i}.cls", label)):
                    info = tarfile.TarInfo(name)
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
        data = open_data(images / "a.tar")
        assert data.classes == ["cat", "dog"]
        assert len(data.problems) == 1


class TestBadLines:
    def test_they_are_all_listed_and_dropped(self, images):
        path = images / "table.csv"
        path.write_text("image,label\n0.png,cat\n1.png\n2.png,dog\n3.png,dog,extra\n")
        data = open_data(path)
        assert data.targets.tolist() == [0, 1]
        assert [p["kind"] for p in data.problems] == ["bad_line", "bad_line"]
        assert [p["image"].rpartition(" ")[2] for p in data.problems] == ["3", "5"]

    def test_json_lines(self, tmp_path):
        path = tmp_path / "table.jsonl"
        path.write_text('{"text": "good", "label": "a"}\nno json\n{"text": "bad", "label": "b"}\n{"text": "odd"}\n')
        data = open_data(path)
        assert data.lines == ["good", "bad"]
        assert [p["image"].rpartition(" ")[2] for p in data.problems] == ["2", "4"]

    def test_no_usable_line(self, images):
        (images / "table.csv").write_text("image,label\n0.png\n")
        with pytest.raises(DataError, match=r"has no usable row; the first problem: .*line 2: it does not have 2"):
            open_data(images / "table.csv")
