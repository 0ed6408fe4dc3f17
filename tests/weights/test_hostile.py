"""Files that are damaged, foreign or hostile: one clear error each, nothing run, nothing hung."""

import io
import json
import os
import pickle
import random
import struct
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import difference, images, redraw
from vitral import create_model, load_model, save_model
from vitral.errors import CheckpointError, VitralError

SMALL = {"embed_dim": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0, "img_size": 32, "num_classes": 3}


@pytest.fixture(scope="module")
def model():
    return redraw(create_model("vit_tiny_patch16_224", **SMALL), seed=1)


def refused(path, match):
    with pytest.raises(CheckpointError, match=match) as error:
        load_model(path, quiet=True)
    assert "\n" not in str(error.value)


class Payload:
    """Something that makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


class TestTorch:
    @pytest.mark.parametrize("name", ["x.pth", "x.pt", "x.bin"])
    @pytest.mark.parametrize("zipped", [True, False])
    def test_a_payload_is_not_run(self, tmp_path, model, name, zipped):
        content = {"state_dict": model.state_dict(), "extra": Payload(tmp_path / "ran")}
        torch.save(content, tmp_path / name, _use_new_zipfile_serialization=zipped)
        refused(tmp_path / name, r"holds a Python object \((posix|os)\.mkdir\) besides tensors")
        assert not (tmp_path / "ran").exists()

    def test_a_bare_pickle_is_not_run(self, tmp_path):
        (tmp_path / "x.pth").write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
        refused(tmp_path / "x.pth", r"x\.pth")
        assert not (tmp_path / "ran").exists()

    def test_a_whole_module_is_refused(self, tmp_path, model):
        torch.save(torch.nn.Linear(2, 2), tmp_path / "x.pth")
        refused(tmp_path / "x.pth", r"Python object \(torch.nn.modules.linear.Linear\) .*save the state_dict alone")

    def test_torchscript_is_refused_with_the_remedy(self, tmp_path):
        module = torch.jit.script(torch.nn.Linear(2, 2))
        torch.jit.save(module, tmp_path / "clip.pt")
        refused(tmp_path / "clip.pt", r"TorchScript archive .*runs the code in it; .*hf-hub:openai/clip")

    def test_a_view_that_claims_more_than_the_file_holds(self, tmp_path, model):
        huge = {
            name: value.flatten()[:1].as_strided((2**20, 2**20), (0, 0)) for name, value in model.state_dict().items()
        }
        torch.save(huge, tmp_path / "x.pth")
        assert (tmp_path / "x.pth").stat().st_size < 2**20
        refused(tmp_path / "x.pth", "claims more numbers than the file holds")

    def test_compressed_parts_are_refused(self, tmp_path, model):
        torch.save(model.state_dict(), tmp_path / "a.pth")
        with (
            zipfile.ZipFile(tmp_path / "a.pth") as a,
            zipfile.ZipFile(tmp_path / "b.pth", "w", zipfile.ZIP_DEFLATED) as b,
        ):
            for member in a.namelist():
                b.writestr(member, a.read(member))
        refused(tmp_path / "b.pth", "compressed parts")

    @pytest.mark.parametrize(
        ("content", "match"),
        [
            ({}, "at its top: nothing"),
            ({"epoch": 3, "loss": 0.5}, "at its top: epoch, loss"),
            ([1, 2], "at its top: list"),
            ({"model": {"model": {"a": 1}}}, "at its top: a"),
        ],
    )
    def test_no_weights_in_it(self, tmp_path, content, match):
        torch.save(content, tmp_path / "x.pth")
        refused(tmp_path / "x.pth", match)


class TestNumpy:
    def test_objects_are_refused(self, tmp_path):
        np.savez(tmp_path / "x.npz", a=np.array([Payload(tmp_path / "ran")], dtype=object))
        refused(tmp_path / "x.npz", "a holds Python objects, and reading them could run code")
        assert not (tmp_path / "ran").exists()

    def test_a_bomb_is_refused_before_memory_is_taken(self, tmp_path):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**29,)})
        with (
            zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive,
            archive.open("a.npy", "w", force_zip64=True) as file,
        ):
            file.write(header.getvalue())
            for _ in range(2**7):
                file.write(bytes(2**24))
        assert (tmp_path / "x.npz").stat().st_size < 2**23
        refused(tmp_path / "x.npz", "would grow from .* to 2,147,483")

    def test_a_shape_that_the_bytes_do_not_fill(self, tmp_path):
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (10**6, 10**6)})
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.writestr("a.npy", header.getvalue() + bytes(16))
        refused(tmp_path / "x.npz", "a claims shape .* but holds 16 bytes")

    def test_text_is_no_weight(self, tmp_path):
        np.savez(tmp_path / "x.npz", a=np.array(["x", "y"]))
        refused(tmp_path / "x.npz", "a is of type <U1, which weights are not kept in")


class TestSafetensors:
    def test_a_header_longer_than_the_file(self, tmp_path):
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", 2**60) + b"{}")
        refused(tmp_path / "x.safetensors", "cannot be read as safetensors")

    def test_offsets_beyond_the_file(self, tmp_path):
        header = json.dumps({"a": {"dtype": "F32", "shape": [2**30], "data_offsets": [0, 2**32]}}).encode()
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        refused(tmp_path / "x.safetensors", "cannot be read as safetensors")

    @pytest.mark.parametrize(
        "name",
        [
            "../secret.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "..\\x.safetensors",
            ".hidden.safetensors",
            "x.txt",
        ],
    )
    def test_an_index_that_points_elsewhere(self, tmp_path, name):
        save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
        folder = tmp_path / "folder"
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
        refused(folder, "shards must be plain file names next to the index")

    def test_an_index_that_lies(self, tmp_path):
        save_file({"a": torch.zeros(1)}, tmp_path / "one.safetensors")
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
        refused(index, r"maps .b. to one.safetensors, which does not hold it")
        index.write_text(json.dumps({"weight_map": {"a": "two.safetensors"}}))
        refused(index, "two.safetensors does not exist")
        for broken in ("[", "[]", '{"weight_map": 3}', "[" * 100_000):
            index.write_text(broken)
            refused(index, "index.json")


class TestElsewhere:
    def test_nothing_there(self, tmp_path):
        refused(tmp_path / "no.safetensors", "does not exist")
        refused(tmp_path, "holds no weights")

    def test_an_unknown_kind(self, tmp_path):
        (tmp_path / "x.tar").write_bytes(b"x")
        refused(tmp_path / "x.tar", r"a file of an unknown kind \(.tar\); weights end in .safetensors, .npz")

    @pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".pth", ".onnx"])
    @pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", bytes(1000), b"\x80\x02}q\x00."])
    def test_rubbish(self, tmp_path, suffix, content):
        (tmp_path / f"x{suffix}").write_bytes(content)
        refused(tmp_path / f"x{suffix}", "x" + suffix.replace(".", r"\."))

    def test_a_config_that_is_broken(self, tmp_path, model):
        save_model(model, tmp_path / "hf", "huggingface")
        for broken in ("{", "[]", '{"hidden_act": "swishy", "num_attention_heads": 2}', '{"num_attention_heads": 5}'):
            (tmp_path / "hf" / "config.json").write_text(broken)
            refused(tmp_path / "hf", "config.json|do not fit together")

    def test_a_hub_name_that_is_none(self):
        for name in ("hf-hub:x", "hf-hub:a/b/c", "hf-hub:/b"):
            refused(name, "should be hf-hub:owner/name")

    def test_offline(self, tmp_path, monkeypatch):
        import huggingface_hub.constants as constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        refused(
            "hf-hub:nobody/nothing", r"not in the cache, and offline mode \(HF_HUB_OFFLINE\) is on; .* give its path"
        )

    def test_offline_from_the_cache(self, tmp_path, monkeypatch, model):
        import huggingface_hub.constants as constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        repository, commit = tmp_path / "models--someone--vit", "0" * 40
        (repository / "refs").mkdir(parents=True)
        for name in ("main", "v2"):
            (repository / "refs" / name).write_text(commit)
        save_model(model, repository / "snapshots" / commit, "huggingface")
        x = images(1, 3, 32, 32)
        for source in ("hf-hub:someone/vit", "hf-hub:someone/vit@v2"):
            assert difference(load_model(source, quiet=True)(x), model(x)) < 1e-6


# ---- five hundred mutations ----


def mutate(data, rng):
    """Damage bytes: cut, flip, overwrite, insert, or repeat."""
    data = bytearray(data)
    kind = rng.randrange(5)
    at = rng.randrange(len(data))
    if kind == 0:
        return bytes(data[: rng.randrange(len(data))])
    if kind == 1:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at : at + 16] = rng.randbytes(16)
    elif kind == 3:
        data[at:at] = rng.randbytes(rng.randint(1, 64))
    else:
        for _ in range(4):
            data[rng.randrange(min(len(data), 3000))] ^= 1 << rng.randrange(8)  # where the names and shapes are
    return bytes(data)


def edit_tensors(tensors, rng):
    """Rename, remove, reshape, retype, or spoil tensors."""
    tensors = dict(tensors)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(tensors))
        value = tensors[name]
        kind = rng.randrange(6)
        if kind == 0:
            tensors[name + rng.choice([".x", "_", "0"])] = tensors.pop(name)
        elif kind == 1:
            del tensors[name]
        elif kind == 2:
            tensors[name] = torch.zeros([max(1, side + rng.choice([-1, 1, 7])) for side in value.shape])
        elif kind == 3:
            tensors[name] = value.to(rng.choice([torch.int64, torch.float16, torch.bool, torch.float64]))
        elif kind == 4:
            tensors[name] = torch.full_like(value, float("nan")) if value.is_floating_point() else value
        else:
            tensors[name] = value.reshape(-1) if value.ndim > 1 else value[None]
    return tensors


def write(model, path, kind):
    if kind == "npz":
        save_model(model, path, "google")
    elif kind == "pth":
        torch.save({"model": model.state_dict()}, path)
    else:
        save_file(model.state_dict(), path)


LAYOUTS_OF_TENSORS = ("tensors", "google tensors", "huggingface tensors")


def in_layout(model, kind, folder):
    """The tensors of the model under the names of a layout."""
    if kind == "google tensors":
        save_model(model, folder / "g.npz", "google")
        with np.load(folder / "g.npz") as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays}
    if kind == "huggingface tensors":
        save_model(model, folder / "h", "huggingface")
        return load_file(folder / "h" / "model.safetensors")
    return model.state_dict()


@pytest.mark.parametrize("kind", ["safetensors", "pth", "npz", *LAYOUTS_OF_TENSORS])
def test_mutated_files_load_rightly_or_fail_clearly(tmp_path, model, kind, capfd):
    rng = random.Random(kind)
    suffix = "safetensors" if kind in LAYOUTS_OF_TENSORS else kind
    tensors = in_layout(model, kind, tmp_path)
    whole, path = tmp_path / f"whole.{suffix}", tmp_path / f"x.{suffix}"
    write(model, whole, kind)
    data, x = whole.read_bytes(), images(1, 3, 32, 32)
    loads, messages = 0, []
    for _ in range(125):
        if kind in LAYOUTS_OF_TENSORS:
            save_file({k: v.contiguous() for k, v in edit_tensors(tensors, rng).items()}, path)
        else:
            path.write_bytes(mutate(data, rng))
        try:
            loaded = load_model(path, quiet=True, num_heads=None if kind in ("npz", "google tensors") else 2)
        except VitralError as error:
            messages.append(str(error))
            continue
        assert all(value.isfinite().all() for value in loaded.state_dict().values())
        side = loaded.config.image
        loaded(images(1, loaded.config.in_chans, *side) if side != (32, 32) else x)
        loads += 1
    assert all("\n" not in text and len(text) > 20 for text in messages)
    assert len(messages) + loads == 125
    assert len(messages) > 30
    if suffix == "safetensors":  # the others keep a checksum of every part
        assert loads > 3
