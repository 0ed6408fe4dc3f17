"""Tar files of samples, and images that lie in a Parquet file: the same images as from files."""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.cli.main import main
from vitral.data.sources.open import open_data
from vitral.errors import DataError, ImageError


def png(seed, size=(9, 7)):
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def pack(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            tar.addfile(about, io.BytesIO(data))
    return path


def labelled(path, seeds, word=lambda seed: "cat" if seed % 2 else "dog", **more):
    files = {}
    for seed in seeds:
        files |= {f"a/{seed:03}.png": png(seed), f"a/{seed:03}.cls": word(seed).encode()}
    return pack(path, files | more)


def test_a_range_of_tars_holds_what_was_packed(tmp_path):
    labelled(tmp_path / "s-00.tar", range(3))
    labelled(tmp_path / "s-01.tar", range(3, 8))
    data = open_data(str(tmp_path / "s-{00..01}.tar"))
    assert (data.name, len(data.inputs), data.classes, data.kind) == ("s", 8, ["cat", "dog"], "label")
    assert data.targets.tolist() == [1, 0, 1, 0, 1, 0, 1, 0]
    for seed in range(8):
        pixels = np.asarray(Image.open(io.BytesIO(png(seed))))
        assert torch.equal(data.inputs.read(seed, "rgb"), torch.tensor(pixels).permute(2, 0, 1))
    assert data.inputs.name(4) == f"{tmp_path / 's-01.tar'}: a/004.png"


def test_parts_are_told_by_the_names_of_the_tars(tmp_path):
    (folder := tmp_path / "set").mkdir()
    for name, seeds in (("train-0.tar", range(4)), ("validation-0.tar", range(4, 6)), ("test-0.tar", range(6, 9))):
        labelled(folder / name, seeds)
    data = open_data(folder)
    assert {part: len(rows) for part, rows in data.splits.items()} == {"train": 4, "val": 2, "test": 3}


def test_labels_may_stand_in_json_and_texts_are_captions(tmp_path):
    facts = {f"{i}.json": json.dumps({"label": i % 2, "width": 7}).encode() for i in range(4)}
    data = open_data(pack(tmp_path / "j.tar", facts | {f"{i}.png": png(i) for i in range(4)}))
    assert (data.classes, data.targets.tolist()) == (["0", "1"], [0, 1, 0, 1])
    texts = {f"{i}.txt": f"picture  {i}\n".encode() for i in range(3)} | {f"{i}.png": png(i) for i in range(4)}
    data = open_data(pack(tmp_path / "t.tar", texts))
    assert (data.kind, data.texts) == ("none", ["picture 0", "picture 1", "picture 2"])
    assert [problem["kind"] for problem in data.problems] == ["bad_target"]


def test_images_alone_are_enough_to_learn_without_labels(tmp_path):
    data = open_data(pack(tmp_path / "i.tar", {f"{i}.png": png(i) for i in range(3)}))
    assert (data.kind, len(data.inputs)) == ("none", 3)


def test_what_is_wrong_is_said(tmp_path):
    labelled(tmp_path / "s-0.tar", range(2))
    with pytest.raises(DataError, match=r"s-1\.tar does not exist"):
        open_data(str(tmp_path / "s-{0..1}.tar"))
    with pytest.raises(DataError, match="2 comes after 1"):
        open_data(str(tmp_path / "s-{2..1}.tar"))
    with pytest.raises(DataError, match="has no images in it; a sample is"):
        open_data(pack(tmp_path / "none.tar", {"a.cls": b"1"}))
    with pytest.raises(DataError, match="compressed must be unpacked first"):
        open_data(pack(tmp_path / "packed.tar", {"a.png": png(0)}, "w:gz"))
    with pytest.raises(DataError, match="too many for a label"):
        open_data(pack(tmp_path / "long.tar", {"a.png": png(0), "a.cls": bytes(2**21)}))
    data = open_data(labelled(tmp_path / "bad.tar", range(2), **{"a/9.png": b"junk", "a/9.cls": b"cat"}))
    with pytest.raises(ImageError, match=r"bad\.tar: a/9\.png: image is not an image"):
        data.inputs.read(2, "rgb")


def test_links_and_paths_in_a_tar_lead_nowhere(tmp_path):
    (tmp_path / "secret.png").write_bytes(png(5))
    with tarfile.open(tmp_path / "l.tar", "w") as tar:
        link = tarfile.TarInfo("a.png")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path / "secret.png")
        tar.addfile(link)
        away = tarfile.TarInfo("../../b.png")
        away.size = len(data := png(1))
        tar.addfile(away, io.BytesIO(data))
    data = open_data(tmp_path / "l.tar")
    assert len(data.inputs) == 1
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".png"] == ["secret.png"]


def test_a_folder_of_classes_with_an_old_archive_in_it_is_still_one(tmp_path):
    for word in ("ant", "bee"):
        (tmp_path / word).mkdir()
        (tmp_path / word / "1.png").write_bytes(png(1))
    pack(tmp_path / "old.tar", {"a.png": png(0)})
    assert open_data(tmp_path).classes == ["ant", "bee"]


@pytest.mark.parametrize("form", ["bytes", "hugging face"])
def test_a_parquet_file_may_hold_the_images_themselves(tmp_path, form):
    import pyarrow as pa
    from pyarrow import parquet

    cells = [png(i) for i in range(4)]
    if form == "hugging face":
        cells = [{"bytes": cell, "path": None} for cell in cells[:3]] + [{"bytes": None, "path": "3.png"}]
        (tmp_path / "3.png").write_bytes(png(3))
    table = pa.table({"image": cells, "label": ["a", "b", "a", "b"]})
    parquet.write_table(table, path := tmp_path / "t.parquet")
    data = open_data(path)
    assert (data.classes, data.targets.tolist()) == (["a", "b"], [0, 1, 0, 1])
    for i in range(4):
        pixels = np.asarray(Image.open(io.BytesIO(png(i))))
        assert torch.equal(data.inputs.read(i, "rgb"), torch.tensor(pixels).permute(2, 0, 1))
    assert data.inputs.name(1) == f"{path} row 2"


def test_from_shards_to_a_model(tmp_path, capsys):
    (packed := tmp_path / "packed").mkdir()
    labelled(packed / "train-0.tar", range(24))
    labelled(packed / "test-0.tar", range(24, 30))
    assert main(["check", str(packed)]) == 0
    assert "30 images, 2 classes" in capsys.readouterr().out
    options = {"model": "vit_nano_patch2_8", "max_steps": 2, "batch_size": 8, "quiet": True}
    run = vitral.train(packed, out=tmp_path / "run", **options)
    metrics = vitral.evaluate(run, packed)  # a run may stand for its path
    assert metrics["images"] == 6
    assert vitral.Predictor(run).source == str(tmp_path / "run")
    assert vitral.load_model(run).config == vitral.Predictor(run.path).model.config
    assert vitral.explain(run, png(1)).source == str(tmp_path / "run")
    assert vitral.export(run, tmp_path / "m.onnx").path.name == "m.onnx"
