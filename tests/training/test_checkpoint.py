import os

import pytest
import torch

from helpers import images
from vitral.errors import CheckpointError
from vitral.training.checkpoint import (
    Checkpoint,
    list_checkpoints,
    load_newest,
    load_optimizer_tensors,
    optimizer_tensors,
    read_checkpoint,
    save_checkpoint,
    write_atomically,
)


def make(step, value=0.0):
    return Checkpoint(
        step, {"model": {"w": images(3, 2) + value}, "random": {"torch": torch.get_rng_state()}}, {"best": 0.5}
    )


def names(folder):
    return [path.name for path in list_checkpoints(folder)]


def test_the_newest_step_is_kept_however_many_digits_it_has(tmp_path):
    for step in (999_998, 999_999, 1_000_000, 10**9 - 1, 10**9):
        save_checkpoint(tmp_path, make(step))
        assert load_newest(tmp_path)[0].step == step
    assert names(tmp_path) == ["step-1000000000", "step-999999999"]


def test_checkpoints_of_earlier_versions_are_sorted_in(tmp_path):
    for step, old in ((999_999, "step-999999"), (1_000_000, "step-1000000")):
        save_checkpoint(tmp_path, make(step)).rename(tmp_path / old)
    (tmp_path / "step-foo").mkdir()
    (tmp_path / "step-٣").mkdir()
    assert names(tmp_path) == ["step-1000000", "step-999999"]
    save_checkpoint(tmp_path, make(1_000_000, 1.0))  # a run that was resumed at its end
    assert names(tmp_path) == ["step-001000000", "step-1000000"]
    save_checkpoint(tmp_path, make(1_000_001))
    assert names(tmp_path) == ["step-001000001", "step-001000000"]
    assert (tmp_path / "step-foo").is_dir()


def test_what_is_written_is_read(tmp_path):
    save_checkpoint(tmp_path, make(7))
    back = read_checkpoint(tmp_path / "step-000000007")
    assert back.step == 7
    assert torch.equal(back.tensors["model"]["w"], make(7).tensors["model"]["w"])
    assert back.values == {"best": 0.5}


def test_the_newest_two_are_kept(tmp_path):
    for step in (5, 10, 15, 20):
        save_checkpoint(tmp_path, make(step))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-000000020", "step-000000015"]
    assert load_newest(tmp_path)[0].step == 20
    assert load_newest(tmp_path / "nothing") == (None, [])


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "state", "version"])
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, damage):
    for step in (5, 10):
        save_checkpoint(tmp_path, make(step))
    newest = tmp_path / "step-000000010"
    weights, state = newest / "model.safetensors", newest / "state.json"
    if damage == "flip":
        data = bytearray(weights.read_bytes())
        data[-3] ^= 1
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-5])
    elif damage == "remove":
        weights.unlink()
    elif damage == "state":
        state.write_text("{")
    else:
        state.write_text(state.read_text().replace('"format_version": 1', '"format_version": 99'))
    found, problems = load_newest(tmp_path)
    assert found.step == 5
    assert "step-000000010" in problems[0]


def test_a_full_disk_costs_nothing_that_was_there(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, make(5))

    def full(path, tensors):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitral.training.checkpoint.write_tensors", full)
    with pytest.raises(
        CheckpointError, match=r"step-000000010 cannot be written .*No space left.* earlier ones are untouched"
    ):
        save_checkpoint(tmp_path, make(10))
    assert sorted(os.listdir(tmp_path)) == ["step-000000005"]
    assert load_newest(tmp_path)[0].step == 5


def test_an_unfinished_one_is_never_seen(tmp_path):
    save_checkpoint(tmp_path, make(5))
    (tmp_path / ".making-step-000000010").mkdir()
    assert load_newest(tmp_path)[0].step == 5


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new")
    assert path.read_bytes() == b"new"
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match="No space left on device"):
        write_atomically(path, b"newer")
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["config.json"]


def test_optimisers_get_their_state_back():
    def pair():
        w = torch.nn.Parameter(images(4, 3))
        return w, [torch.optim.AdamW([w], lr=0.1)]

    w, optimizers = pair()
    for i in range(3):
        w.grad = images(4, 3, seed=i)
        optimizers[0].step()
    other, fresh = pair()
    with torch.no_grad():
        other.copy_(w)
    load_optimizer_tensors(fresh, {name: t.clone() for name, t in optimizer_tensors(optimizers).items()})
    for p, o in ((w, optimizers), (other, fresh)):
        p.grad = images(4, 3, seed=9)
        o[0].step()
    assert torch.equal(w, other)
