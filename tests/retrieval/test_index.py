"""An index of images or texts: what it finds, what it keeps, and what it refuses."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from small_server import as_form, client

import vitral
from helpers import redraw
from vitral.cli import serve
from vitral.cli.main import main, parse
from vitral.config import ViTConfig
from vitral.errors import CheckpointError, ConfigError, DataError, InputError, VitralError
from vitral.inference.predictor import Predictor
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import create_model
from vitral.retrieval import folder as folder_module
from vitral.retrieval import index as index_module
from vitral.retrieval.folder import Folder
from vitral.retrieval.index import Index, fingerprint
from vitral.retrieval.nearest import Approximate, Exact
from vitral.retrieval.store import Embedding, Item, Manifest


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    vitral.save_model(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=5), path)
    return path


@pytest.fixture(scope="module")
def predictor(weights):
    return Predictor(weights, batch_size=4)


def draw(path, seed, size=(19, 23)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)).save(path)
    return path


@pytest.fixture
def photos(tmp_path):
    for i in range(11):
        draw(tmp_path / "photos" / ("deep" if i % 3 == 0 else ".") / f"{i:02d}.png", i)
    return tmp_path / "photos"


class Counting:
    """Wraps what is computed, and counts it."""

    def __init__(self):
        self.totals = []

    def __call__(self, steps, total):
        self.totals.append(total)
        return steps


def names(index):
    return sorted(item.name for item in index.items)


def test_search_is_the_cosine_of_embeddings(predictor, photos, tmp_path):
    index, change = Index.build(predictor, photos, tmp_path / "i")
    assert (change.added, change.kept, change.removed, change.unreadable) == (11, 0, 0, {})
    query = draw(tmp_path / "query.png", 99)
    files = sorted(photos.rglob("*.png"))
    vectors = np.stack([predictor.embed(file)[0].numpy() for file in files]).astype(np.float64)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    q = predictor.embed(query)[0].numpy().astype(np.float64)
    cosines = vectors @ (q / np.linalg.norm(q))
    order = np.argsort(-cosines)[:5]
    (found,) = index.search(query, top_k=5)
    assert [match.name for match in found] == [str(files[i].resolve()) for i in order]
    assert [match.score for match in found] == pytest.approx(cosines[order].tolist(), abs=1e-5)
    assert len(index.search(query, top_k=99)[0]) == 11
    itself = index.search(files[4], top_k=1)[0][0]
    assert itself.name == str(files[4].resolve())
    assert itself.score == pytest.approx(1, abs=1e-5)


def test_only_new_and_changed_files_are_looked_at(predictor, photos, tmp_path):
    out, watch = tmp_path / "i", Counting()
    Index.build(predictor, photos, out, watch=watch)
    before = {item.name: v for item, v in zip(Index(out).items, Index(out).vectors, strict=True)}
    (photos / "01.png").unlink()
    draw(photos / "02.png", 102, size=(31, 17))
    draw(photos / "new.png", 103)
    index, change = Index.build(predictor, photos, out, watch=watch)
    assert watch.totals == [11, 2]
    assert (change.added, change.kept, change.removed) == (2, 9, 2)
    assert names(index) == sorted(p.relative_to(photos).as_posix() for p in photos.rglob("*.png"))
    after = {item.name: v for item, v in zip(index.items, index.vectors, strict=True)}
    assert not torch.equal(after["02.png"], before["02.png"])
    for name in set(before) - {"01.png", "02.png"}:
        assert torch.equal(after[name], before[name])
    _, change = Index.build(predictor, photos, out, watch=watch)
    assert (change.added, watch.totals[-1]) == (0, 0)
    assert len(list(out.glob("*.safetensors"))) == 1


def test_full_parts_stay_when_a_file_is_added(predictor, photos, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "PART_ITEMS", 4)
    Index.build(predictor, photos, out := tmp_path / "i", nearest="hnsw", save_seconds=0)
    first, second, third = sorted(path.name for path in out.glob("*.safetensors"))
    for i in range(2):
        draw(photos / f"new{i}.png", 200 + i)
        index, change = Index.build(predictor, photos, out)
        assert (change.added, change.kept) == (1, 11 + i)
        found, (whole, _) = vectors_of(index), Index.build(predictor, photos, tmp_path / f"whole{i}")
        assert all(torch.allclose(found[name], vector, atol=1e-6) for name, vector in vectors_of(whole).items())
        kept = {path.name for path in out.glob("*.safetensors")}
        assert {first, second} < kept
        assert third not in kept
        assert len(kept) == (3, 4)[i]
        assert index.search(photos / f"new{i}.png", top_k=1)[0][0].item == f"new{i}.png"


def test_a_file_that_cannot_be_read_is_told_and_not_tried_again(predictor, photos, tmp_path):
    (photos / "bad.png").write_bytes(b"no picture")
    out, watch = tmp_path / "i", Counting()
    index, change = Index.build(predictor, photos, out, watch=watch)
    assert list(change.unreadable) == ["bad.png"]
    assert "not an image" in change.unreadable["bad.png"]
    assert len(index) == 11
    _, change = Index.build(predictor, photos, out, watch=watch)
    assert watch.totals == [12, 0]
    assert list(change.unreadable) == ["bad.png"]
    draw(photos / "bad.png", 7)
    index, change = Index.build(predictor, photos, out)
    assert (change.added, change.unreadable, len(index)) == (1, {}, 12)


def test_a_stop_in_the_middle_loses_only_what_was_not_yet_written(predictor, photos, tmp_path):
    out = tmp_path / "i"

    def stop_after(steps, total):
        for number, step in enumerate(steps):
            if number == 7:
                raise KeyboardInterrupt
            yield step

    with pytest.raises(KeyboardInterrupt):
        Index.build(predictor, photos, out, watch=stop_after, save_seconds=0)
    assert len(Index(out)) == 7
    watch = Counting()
    index, change = Index.build(predictor, photos, out, watch=watch)
    assert (change.kept, change.added, watch.totals) == (7, 4, [4])
    whole, _ = Index.build(predictor, photos, tmp_path / "whole")
    assert names(index) == names(whole)


@pytest.mark.parametrize("at", ["part", "manifest", "graph"])
def test_every_moment_of_writing_may_be_the_last(predictor, photos, tmp_path, monkeypatch, at):
    out = tmp_path / "i"
    kept = vectors_of(Index.build(predictor, photos, out, nearest="hnsw")[0])
    del kept["deep/03.png"]
    (photos / "deep" / "03.png").unlink()
    draw(photos / "new.png", 103)
    module, name = {
        "part": (folder_module, "save_tensors"),
        "manifest": (folder_module, "write_atomically"),
        "graph": (faiss, "write_index"),
    }[at]
    real, left = getattr(module, name), 0

    def dies(*args):
        nonlocal left
        left -= 1
        if not left:
            if at == "graph":
                Path(args[1]).write_bytes(b"half")
            raise SystemExit
        return real(*args)

    for killed in range(9):
        left = killed + 1
        with monkeypatch.context() as patch:
            patch.setattr(module, name, dies)
            try:
                Index.build(predictor, photos, out)
                break
            except SystemExit:
                index = Index(out)
        found = vectors_of(index)
        assert kept.keys() <= found.keys() <= kept.keys() | {"new.png", "deep/03.png"}
        assert all(torch.equal(found[name], kept[name]) for name in kept)
        assert index.search(photos / "01.png", 1)[0][0].item == "01.png"
    else:
        pytest.fail("never finished")
    assert killed
    index, change = Index.build(predictor, photos, out)
    assert (change.added, change.removed, index.manifest.nearest) == (0, 0, "hnsw")
    assert vectors_of(index).keys() == kept.keys() | {"new.png"}


def vectors_of(index):
    """The vector of each name, each of which is there once."""
    found = {item.name: vector for item, vector in zip(index.items, index.vectors, strict=True)}
    assert len(found) == len(index)
    return found


def test_leftovers_of_a_kill_are_removed(predictor, photos, tmp_path):
    out = tmp_path / "i"
    Index.build(predictor, photos, out)
    part = next(out.glob("*.safetensors"))
    (out / "000077.safetensors").write_bytes(part.read_bytes())
    (out / ".000078.safetensors.123.tmp").write_bytes(b"half")
    assert len(Index(out)) == 11
    Index.build(predictor, photos, out)
    assert [p.name for p in out.glob("*.safetensors")] == [part.name]
    assert not list(out.glob(".*.tmp"))


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_what_finds_neighbours_belongs_to_the_vectors_there_are(predictor, photos, tmp_path, kind):
    """Also where every file was replaced, and their number and that of the parts are as before."""
    out = tmp_path / "i"
    Index.build(predictor, photos, out, nearest=kind)
    files = sorted(photos.rglob("*.png"))
    for i, file in enumerate(files):
        draw(file, 500 + i)
    index, change = Index.build(predictor, photos, out, nearest=kind)
    assert (change.added, change.removed) == (11, 11)
    assert index.manifest.nearest == kind
    assert len(list(out.glob("*.faiss"))) == 1
    for file in files:
        assert index.search(file, top_k=1)[0][0].name == str(file.resolve())
    next(out.glob("*.faiss")).unlink()  # as while it is brought up to date
    assert Index(out).search(files[3], top_k=1)[0][0].name == str(files[3].resolve())


def test_what_was_asked_for_stays(predictor, photos, tmp_path, monkeypatch):
    asked, own = tmp_path / "asked", tmp_path / "own"

    def stop(steps, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Index.build(predictor, photos, asked, nearest="ivf", watch=stop)
    assert Index.build(predictor, photos, asked)[0].manifest.nearest == "ivf"
    draw(photos / "new.png", 103)
    assert Index.build(predictor, photos, asked)[0].manifest.nearest == "ivf"
    Index.build(predictor, photos, asked, nearest="exact")
    assert Index.build(predictor, photos, own)[0].manifest.nearest == "exact"
    monkeypatch.setattr(index_module, "LARGE", 12)
    assert Index.build(predictor, photos, asked)[0].manifest.nearest == "exact"
    assert Index.build(predictor, photos, own)[0].manifest.nearest == "hnsw"
    (photos / "new.png").unlink()
    assert Index.build(predictor, photos, own)[0].manifest.nearest == "hnsw"


def test_what_was_asked_for_stays_while_there_is_nothing(predictor, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(b"no picture")
    index, _ = Index.build(predictor, tmp_path / "photos", tmp_path / "i", nearest="hnsw")
    assert index.search_vectors(torch.ones(2, 64)) == [[], []]
    draw(tmp_path / "photos" / "a.png", 1)
    index, _ = Index.build(predictor, tmp_path / "photos", tmp_path / "i")
    assert (index.manifest.nearest, len(index), len(list((tmp_path / "i").glob("*.faiss")))) == ("hnsw", 1, 1)


def test_without_faiss_nothing_is_computed_first(predictor, photos, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    watch = Counting()
    with pytest.raises(ConfigError, match=r"needs faiss: .*, or give --nearest exact"):
        Index.build(predictor, photos, tmp_path / "i", nearest="hnsw", watch=watch)
    monkeypatch.setattr(index_module, "LARGE", 11)
    with pytest.raises(ConfigError, match="needs faiss"):
        Index.build(predictor, photos, tmp_path / "i", watch=watch)
    assert watch.totals == []
    index, _ = Index.build(predictor, photos, tmp_path / "i", nearest="exact")
    assert len(index) == 11


def test_a_graph_grows_until_something_is_taken_away(predictor, photos, tmp_path, monkeypatch):
    out, built = tmp_path / "i", []
    real = Approximate.of
    monkeypatch.setattr(Approximate, "of", lambda *args: built.append(args) or real(*args))

    def build(**options):
        index, _ = Index.build(predictor, photos, out, **options)
        assert len(list(out.glob("*.faiss"))) == 1
        for file in photos.rglob("*.png"):
            assert index.search(file, top_k=1)[0][0].name == str(file.resolve())

    build(nearest="hnsw")
    assert len(built) == 1
    for number in range(3):
        draw(photos / f"new-{number}.png", 103 + number)
        build(save_seconds=0)
    assert len(built) == 1
    (graph,) = out.glob("*.faiss")
    graph.write_bytes(graph.read_bytes()[:1000])  # damaged: the vectors are all there
    draw(photos / "new-3.png", 107)
    build()
    assert len(built) == 2
    built.pop()
    (photos / "01.png").unlink()
    build()
    assert len(built) == 2
    draw(photos / "last.png", 109)
    build(nearest="ivf")
    assert len(built) == 3


def test_cells_that_hold_too_few_are_not_all_that_is_looked_at(tmp_path):
    vectors = F.normalize(torch.randn(701, 13, generator=torch.Generator().manual_seed(0)), dim=1)
    manifest = Manifest("text", "/somewhere", "", Embedding("a model", "pooled", 13), nearest="ivf")
    store = Folder(tmp_path / "i")
    with store.writing():
        store.create(manifest)
        store.add(manifest, [Item(str(i)) for i in range(701)], list(vectors))
        store.finish(manifest)
    store = Folder(tmp_path / "i")
    store.open()
    few = Approximate.read(next((tmp_path / "i").glob("*.faiss")), vectors).search(vectors[:5], 300)[1]
    assert (few < 0).any(dim=1).all()
    for k in (300, 701, 999):
        found = store.search(vectors[:5], k)
        values, rows = Exact(vectors).search(vectors[:5], min(k, 701))
        assert [[int(item.name) for _, item in some] for some in found] == rows.tolist()
        assert [[score for score, _ in some] for some in found] == values.tolist()
    assert [some[0][1].name for some in store.search(vectors[:5], 3)] == ["0", "1", "2", "3", "4"]


# ---- readers while there is a writer ----


def test_a_reader_that_meets_a_writer_reads_what_that_one_wrote(predictor, photos, tmp_path, monkeypatch):
    out = tmp_path / "i"
    Index.build(predictor, photos, out)
    real = folder_module.load_file

    def late(path, **options):
        monkeypatch.setattr(folder_module, "load_file", real)
        draw(photos / "new.png", 103)
        Index.build(predictor, photos, out)
        assert not path.exists()
        return real(path, **options)

    monkeypatch.setattr(folder_module, "load_file", late)
    assert len(Index(out)) == 12


def test_a_graph_that_a_writer_takes_away_is_not_missed(predictor, photos, tmp_path, monkeypatch):
    Index.build(predictor, photos, tmp_path / "i", nearest="hnsw")
    real = Approximate.read
    monkeypatch.setattr(Approximate, "read", lambda path, vectors: path.unlink() or real(path, vectors))
    assert Index(tmp_path / "i").search(photos / "01.png", 1)[0][0].item == "01.png"


# ---- what belongs to an index ----


def test_a_link_that_leads_nowhere_stops_nothing(predictor, photos, tmp_path):
    (photos / "gone.png").symlink_to(tmp_path / "nowhere.png")
    _, change = Index.build(predictor, photos, tmp_path / "i")
    assert (change.added, list(change.unreadable)) == (11, ["gone.png"])


def test_a_kill_before_there_is_an_index_leaves_a_folder_to_begin_in(predictor, photos, tmp_path):
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / ".index.json.123.tmp").write_bytes(b"half")
    index, _ = Index.build(predictor, photos, tmp_path / "i")
    assert len(index) == 11


def test_other_weights_and_other_folders_are_refused(predictor, photos, tmp_path, weights):
    out = tmp_path / "i"
    Index.build(predictor, photos, out)
    other = tmp_path / "other.safetensors"
    vitral.save_model(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=6), other)
    with pytest.raises(CheckpointError, match="made with another model"):
        Index.build(other, photos, out)
    with pytest.raises(InputError, match="other weights or preprocessing"):
        Index(out, source=other).search(photos / "01.png")
    assert Index(out, source=weights).search(photos / "01.png")[0][0].score == pytest.approx(1, abs=1e-5)
    draw(tmp_path / "elsewhere" / "a.png", 1)
    with pytest.raises(CheckpointError, match="is an index of"):
        Index.build(predictor, tmp_path / "elsewhere", out)
    with pytest.raises(CheckpointError, match="not empty and not an index"):
        Index.build(predictor, photos, photos)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no images"):
        Index.build(predictor, tmp_path / "none", tmp_path / "j")
    assert not (tmp_path / "j").exists()


def test_every_engine_is_the_same_model(tmp_path):
    config = ViTConfig(img_size=16, patch_size=4, num_classes=5, embed_dim=24, depth=2, num_heads=3, init_values=0.1)
    vitral.save_model(redraw(VisionTransformer(config)), tmp_path, layout="vitral")
    packed, eager = Predictor(tmp_path, engine="packed"), Predictor(tmp_path, engine="eager")
    assert fingerprint(packed) == fingerprint(eager)


def test_another_preprocessing_is_another_embedding(weights, photos, tmp_path):
    out = tmp_path / "i"
    Index.build(weights, photos, out)
    predictor = Predictor(weights)
    predictor.preprocess = type(predictor.preprocess).from_dict(
        predictor.preprocess.to_dict() | {"mean": (0.1, 0.1, 0.1)}
    )
    with pytest.raises(CheckpointError, match="another model"):
        Index.build(predictor, photos, out)


def test_two_writers_do_not_meet(predictor, photos, tmp_path):
    out = tmp_path / "i"
    out.mkdir()
    with index_module.store_at(out).writing(), pytest.raises(CheckpointError, match="another process"):
        Index.build(predictor, photos, out)
    Index.build(predictor, photos, out)


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: d.pop("embedding"),
        lambda d: d.update(parts=["../../x.safetensors"]),
        lambda d: d.update(parts=["000099.safetensors"]),
        lambda d: d.update(surprise=1),
        lambda d: d.update(format_version=99),
        lambda d: d["embedding"].update(width=3),
        lambda d: d.update(unreadable=[1]),
    ],
)
def test_a_damaged_index_is_told_in_a_sentence(predictor, photos, tmp_path, harm):
    out = tmp_path / "i"
    Index.build(predictor, photos, out)
    document = json.loads((out / "index.json").read_text())
    harm(document)
    (out / "index.json").write_text(json.dumps(document))
    with pytest.raises(VitralError):
        Index(out)


def test_an_index_that_is_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"not an index.*vitral index"):
        Index(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere does not exist; make an index with vitral index"):
        Index(tmp_path / "nowhere")


def test_an_index_that_lost_a_part_says_what_to_remove(predictor, photos, tmp_path):
    Index.build(predictor, photos, tmp_path / "i")
    (part,) = (tmp_path / "i").glob("*.safetensors")
    part.unlink()
    with pytest.raises(CheckpointError, match=r"is damaged or gone \(.*\); remove .*/i, and make the index anew\."):
        Index.build(predictor, photos, tmp_path / "i")


def test_wrong_queries(predictor, photos, tmp_path):
    index, _ = Index.build(predictor, photos, tmp_path / "i")
    with pytest.raises(InputError, match="top_k must be at least 1, got 0"):
        index.search(photos / "01.png", top_k=0)
    with pytest.raises(InputError, match=r"queries must be \(m, 64\), got \(2, 7\)"):
        index.search_vectors(torch.zeros(2, 7))
    with pytest.raises(VitralError, match="not an image"):
        index.search(b"text")


def test_copies_are_found(predictor, photos, tmp_path):
    for name, of in (("copy-a.png", "01.png"), ("copy-b.png", "01.png"), ("copy-c.png", "05.png")):
        (photos / name).write_bytes((photos / of).read_bytes())
    index, _ = Index.build(predictor, photos, tmp_path / "i")
    groups = [[os.path.basename(name) for name in group] for group in index.duplicates(0.99999)]
    assert [sorted(group) for group in groups] == [["01.png", "copy-a.png", "copy-b.png"], ["05.png", "copy-c.png"]]
    with pytest.raises(InputError, match=r"above 0 and at most 1, got 1\.5"):
        index.duplicates(1.5)


@pytest.mark.parametrize(("spread", "doubtful"), [(0.01, True), (3.0, False)])
def test_a_model_that_cannot_tell_images_apart_is_named(predictor, photos, tmp_path, monkeypatch, spread, doubtful):
    index, _ = Index.build(predictor, photos, tmp_path / "i")
    planted = 1 + spread * torch.randn(len(index), 16, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(Index, "vectors", property(lambda self: planted))
    assert ("does not tell these images apart: half of all pairs" in index.doubt(0.95)) is doubtful
    monkeypatch.setattr(Index, "vectors", property(lambda self: planted[:2]))
    assert index.doubt(0.95) == ""


def test_a_model_without_a_file_must_be_given_again(photos, tmp_path):
    model = create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=5)
    index, _ = Index.build(Predictor(model), photos, tmp_path / "i")
    assert index.search(photos / "01.png", top_k=1)[0][0].name.endswith("01.png")
    with pytest.raises(InputError, match="a model that has no file"):
        Index(tmp_path / "i").search(photos / "01.png")


def test_texts(tmp_path, capsys):
    words = ["red", "green", "blue", "old", "new", "small"]
    lines = [f"a {a} and {b} boat" for a in words for b in words if a != b]
    kinds = "".join(f"{line},{'warm' if 'red' in line else 'cold'}\n" for line in lines)
    (tmp_path / "boats.csv").write_text("text,label\n" + kinds)
    run = vitral.train(tmp_path / "boats.csv", out=tmp_path / "run", epochs=1, batch_size=16, quiet=True)
    texts = tmp_path / "lines.txt"
    texts.write_text("\n".join([*lines, "", lines[0]]))  # an empty line, and one that comes twice
    index, change = Index.build(run.path, texts, tmp_path / "i")
    assert (change.added, len(index), index.manifest.what) == (len(lines), len(lines), "text")
    (found,) = Index(tmp_path / "i").search("a red and old boat", top_k=3)
    assert found[0].name == "a red and old boat"
    assert found[0].score == pytest.approx(1, abs=1e-5)
    assert opened(tmp_path / "i", "--engine", "packed").predictor.engine == "eager"  # texts have no other
    texts.write_text("\n".join(lines[3:]))
    index, change = Index.build(run.path, texts, tmp_path / "i")
    assert (change.added, change.kept, change.removed) == (0, len(lines) - 3, 3)
    (tmp_path / "nothing.txt").touch()
    assert main(["search", str(tmp_path / "i"), str(tmp_path / "nothing.txt")]) == 2
    assert "there is no text to look for; give at least one." in capsys.readouterr().err
    assert main(["search", str(tmp_path / "i"), lines[5], lines[5], "--top-k", "1"]) == 0
    assert capsys.readouterr().out.count(f"  1.0000  {lines[5]}\n") == 2
    with pytest.raises(DataError, match="is not a file"):
        Index.build(run.path, tmp_path, tmp_path / "j")


# ---- the command line ----


def test_commands(weights, photos, tmp_path, capsys):
    out = str(tmp_path / "p.index")
    assert main(["index", str(weights), str(photos), "--out", out]) == 0
    said = capsys.readouterr().out
    assert "11 images: 11 new" in said
    assert "exact search" in said
    assert main(["search", out, str(photos / "01.png"), "--top-k", "2", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["matches"][0] == {"name": str((photos / "01.png").resolve()), "score": pytest.approx(1, abs=1e-5)}
    assert len(row["matches"]) == 2
    page = tmp_path / "found.html"
    assert main(["search", out, str(photos), "--top-k", "3", "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.count("1.0000") >= 11
    assert said.endswith(f"page: {page}\n")
    assert page.read_text().count("<figure") == 11 * 4
    copies = tmp_path / "copies.html"
    (photos / "copy.png").write_bytes((photos / "01.png").read_bytes())
    asked = ["index", str(weights), str(photos), "--out", out, "--duplicates", "--least", "0.99999"]
    assert main([*asked, "--page", str(copies), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["images"], document["added"], document["kept"]) == (12, 1, 11)
    assert [sorted(map(os.path.basename, g)) for g in document["duplicates"]] == [["01.png", "copy.png"]]
    assert copies.read_text().count("<figure") == 2
    assert main(asked) == 0
    one, copy = sorted(str((photos / name).resolve()) for name in ("01.png", "copy.png"))
    assert f"1 group of near copies (cosine at least 0.99999)\ngroup 1:\n  {one}\n  {copy}\n" in capsys.readouterr().out


def test_a_query_that_cannot_be_read_does_not_keep_others_from_being_found(weights, photos, tmp_path, capsys):
    out, broken = str(tmp_path / "p.index"), tmp_path / "broken.png"
    broken.write_bytes(b"no picture")
    assert main(["index", str(weights), str(photos), "--out", out]) == 0
    asked = ["search", out, str(broken), str(photos / "01.png"), str(photos / "01.png"), "--top-k", "1"]
    capsys.readouterr()
    page = tmp_path / "found.html"
    assert main([*asked, "--out", str(page)]) == 0
    said = capsys.readouterr()
    assert f"warning: {broken} is not an image of a known format" in said.err
    assert said.out.count("01.png:") == 2
    assert page.read_text().count("<figure") == 4
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [len(row["matches"]) for row in rows] == [0, 1, 1]
    assert "is not an image" in rows[0]["error"]
    assert "error" not in rows[1]
    assert main(["search", out, str(broken)]) == 2
    assert "is not an image of a known format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("here", "given", "out"),
    [
        (".", "photos", "photos.index"),
        (".", "photos/", "photos.index"),
        ("photos", ".", "{tmp}/photos.index"),
        ("photos/deep", "..", "{tmp}/photos.index"),
        ("photos", "deep/..", "{tmp}/photos.index"),
        ("photos", "deep", "deep.index"),
        ("photos", "../photos/deep", "../photos/deep.index"),
    ],
)
def test_an_index_lies_beside_its_folder(weights, photos, tmp_path, capsys, monkeypatch, here, given, out):
    monkeypatch.chdir(tmp_path / here)
    assert main(["index", str(weights), given]) == 0
    place = out.format(tmp=tmp_path.resolve())
    assert capsys.readouterr().out.startswith(f"{place}: {4 if 'deep' in out else 11} images")
    assert (tmp_path / here / place / "index.json").is_file()


def opened(index, *more, served=()):
    """What vitral serve searches in."""
    options = parse(serve.Options, ["m", "--index", str(index), *map(str, more)], "vitral serve")
    return serve.open_index(options, "cpu", served)


def test_a_server_has_the_model_of_an_index_once(predictor, weights, photos, tmp_path):
    Index.build(predictor, photos, tmp_path / "i")
    other = Predictor(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=6))
    exported = tmp_path / "m.onnx"
    vitral.export(weights, exported)
    assert opened(tmp_path / "i", served=[Predictor(exported), other, predictor]).predictor is predictor
    index = opened(tmp_path / "i", "--engine", "eager", "--max-batch", "5", served=[other])
    assert (index.predictor.engine, index.predictor.batch_size) == ("eager", 5)
    assert index.search(photos / "01.png", 1)[0][0].item == "01.png"
    quick = Predictor(weights, engine="onnxruntime")  # whose answers are quick, and whose vectors are not
    index = opened(tmp_path / "i", "--engine", "onnxruntime", served=[quick])
    assert index.predictor is not quick
    assert index.predictor.engine == "packed"


def test_a_model_and_its_index_are_asked_at_once(predictor, photos, tmp_path):
    Index.build(predictor, photos, tmp_path / "i")
    index = opened(tmp_path / "i", served=[predictor])
    files = sorted(photos.rglob("*.png"))
    labels = [answer.to_dict()["predictions"][0]["label"] for answer in predictor.predict(files, top_k=1)]
    with client({"m": predictor}, index=index) as c, ThreadPoolExecutor(8) as pool:

        def ask(where, file):
            return c.post(f"/v1/{where}", **as_form(file.read_bytes(), top_k=1)).json()

        for _ in range(3):
            said = [pool.submit(ask, "predict", file) for file in files]
            found = [pool.submit(ask, "search", file) for file in files]
            assert [each.result()["predictions"][0]["label"] for each in said] == labels
            assert [photos / each.result()["matches"][0]["name"] for each in found] == files


def test_a_server_is_told_where_the_model_of_an_index_is_now(weights, photos, tmp_path):
    first, now, other = tmp_path / "first.safetensors", tmp_path / "now.safetensors", tmp_path / "other.safetensors"
    first.write_bytes(weights.read_bytes())
    Index.build(first, photos, tmp_path / "i")
    first.rename(now)
    moved = r"the model of .*/i cannot be loaded \(.*first\.safetensors.*\); if it has moved, say where it is now"
    with pytest.raises(InputError, match=moved):
        opened(tmp_path / "i")
    with pytest.raises(InputError, match=moved):
        Index(tmp_path / "i").search(photos / "01.png")
    assert opened(tmp_path / "i", "--index-model", now).search(photos / "01.png", 1)[0][0].item == "01.png"
    vitral.save_model(create_model("vit_nano_patch2_8", num_classes=3, in_chans=3, seed=6), other)
    with pytest.raises(InputError, match=r"other weights or preprocessing than .*other\.safetensors has now"):
        opened(tmp_path / "i", "--index-model", other)


def test_an_index_of_a_model_without_a_file_is_searched_by_a_served_one(weights, photos, tmp_path):
    model = vitral.load_model(weights)
    Index.build(Predictor(model), photos, tmp_path / "i")
    assert opened(tmp_path / "i", served=[Predictor(weights)]).search(photos / "01.png", 1)[0][0].item == "01.png"
    with pytest.raises(InputError, match="--index-model of vitral serve"):
        assert opened(tmp_path / "i").predictor


def test_mistakes_end_with_2(weights, photos, tmp_path, capsys):
    assert main(["search", str(tmp_path), "x.png"]) == 2
    assert "not an index" in capsys.readouterr().err
    assert main(["index", str(weights), str(photos), "--page", "x.html"]) == 2
    assert "--duplicates" in capsys.readouterr().err
    asked = ["index", str(weights), str(photos), "--out", str(tmp_path / "i"), "--duplicates"]
    assert main([*asked, "--page", "x.png"]) == 2
    assert "--page writes a page, so its name ends in .html, got x.png." in capsys.readouterr().err
    assert main([*asked, "--least", "2"]) == 2
    assert "must be above 0 and at most 1, got 2" in capsys.readouterr().err
    assert not (tmp_path / "i").exists()  # nothing was embedded first
    assert main(["search", str(tmp_path), "x.png", "--out", "found"]) == 2
    assert "--out writes a page, so its name ends in .html, got found." in capsys.readouterr().err
    assert main(["index", str(weights), "/"]) == 2
    assert "beside / there is no place for an index; give --out" in capsys.readouterr().err
    (busy := tmp_path / "busy").mkdir()
    (busy / "letter.txt").write_text("keep me")
    assert main(["index", str(weights), str(photos), "--out", str(busy)]) == 2
    assert "is not empty and not an index; give another --out." in capsys.readouterr().err
    assert [path.name for path in busy.iterdir()] == ["letter.txt"]
    assert main(["index", str(weights), str(photos), "--out", str(busy / "letter.txt")]) == 2
    assert "letter.txt is a file, and an index is a folder; give another --out." in capsys.readouterr().err
    assert main(["index", str(weights), str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
