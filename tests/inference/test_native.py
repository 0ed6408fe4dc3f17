"""Our own attention gives what the formula gives, and where it cannot be had, torch's serves."""

import os
import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import difference, images, redraw
from tiny import VIT
from vitral.inference import native
from vitral.inference.native import attend_by_torch, native_attention
from vitral.inference.packed import PackedAttention, packed
from vitral.models.vit import VisionTransformer

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A cache of its own, and nothing remembered, before and after."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_attention.cache_clear()
    yield tmp_path / "vitral" / "native"
    native_attention.cache_clear()


def formula(qkv, heads):
    """softmax(Q K^T / sqrt(d)) V, head by head, in double precision."""
    B, N, D = *qkv.shape[:2], qkv.shape[2] // 3
    d, found = D // heads, torch.empty(B, N, D, dtype=torch.float64)
    Q, K, V = qkv.double().split(D, dim=2)
    for i in range(heads):
        at = slice(i * d, (i + 1) * d)
        found[..., at] = (Q[..., at] @ K[..., at].mT / d**0.5).softmax(-1) @ V[..., at]
    return found


def assert_as_exact(attend, qkv, heads):
    """No further from the formula than torch is, by more than rounding can do."""
    ours, theirs = ((f(qkv, heads) - formula(qkv, heads)).abs().max() for f in (attend, attend_by_torch))
    assert ours < 2 * theirs + 1e-6


@needs_compiler
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("B", "N", "heads", "d"),
    [
        (1, 1, 1, 16), (2, 5, 3, 16), (3, 16, 2, 32), (2, 17, 5, 48), (1, 31, 3, 64), (2, 67, 2, 80), (1, 197, 3, 64),
        (2, 7, 3, 4), (1, 131, 1, 144),
    ],
)  # fmt: skip
def test_it_is_the_formula(B, N, heads, d, number, threads):
    attend = native_attention()
    assert attend is not None
    threads(number)
    qkv = torch.randn(B, N, 3 * heads * d, generator=torch.Generator().manual_seed(N)) * 2
    assert_as_exact(attend, qkv, heads)
    turned = qkv.transpose(0, 1).contiguous().transpose(0, 1)  # the same numbers, elsewhere in memory
    assert torch.equal(attend(turned, heads), attend(qkv, heads))


@needs_compiler
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the words of another compiler")
def test_processors_with_shorter_vectors_find_the_same(without, fresh, monkeypatch):
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, without))
    attend = native_attention()
    assert attend is not None
    for B, N, heads, d in ((2, 5, 3, 8), (1, 37, 2, 24), (1, 67, 3, 64), (1, 11, 1, 40)):
        assert_as_exact(attend, torch.randn(B, N, 3 * heads * d, generator=torch.Generator().manual_seed(N)), heads)


@needs_compiler
def test_what_the_kernel_does_not_take_goes_to_torch():
    attend = native_attention()
    assert attend is not None
    qkv = torch.randn(2, 5, 3 * 32, generator=torch.Generator().manual_seed(3))
    assert attend(qkv.double(), 2).dtype == torch.float64
    assert difference(attend(qkv.double(), 2).float(), attend(qkv, 2)) < 1e-5
    assert attend(qkv.clone().requires_grad_(), 2).requires_grad
    for shape in ((0, 5, 96), (2, 0, 96)):
        assert attend(torch.zeros(shape), 2).shape == (*shape[:2], 32)


@needs_compiler
def test_scores_that_are_far_apart_stay_exact():
    attend = native_attention()
    assert attend is not None
    qkv = torch.randn(1, 23, 3 * 32, generator=torch.Generator().manual_seed(1))
    qkv[..., :64] *= 40  # scores in the thousands: one key takes all
    assert_as_exact(attend, qkv, 1)
    assert torch.isfinite(attend(qkv, 1)).all()


@needs_compiler
@pytest.mark.parametrize("wrong", [0x7FC00000, 0x7FC00001, 0x7F800000], ids=["nan", "another nan", "inf"])
def test_what_is_no_number_is_not_hidden(wrong):
    attend = native_attention()
    assert attend is not None
    wrong = torch.tensor(wrong, dtype=torch.int32).view(torch.float32)
    qkv = torch.randn(2, 19, 3 * 2 * 16, generator=torch.Generator().manual_seed(2))
    right = attend(qkv, 2)
    qkv[1, 4, 32 + 3] = wrong  # a key of the first head of the second image
    found, theirs = attend(qkv, 2), attend_by_torch(qkv, 2)
    assert found[1, :, :16].isnan().any()
    assert torch.equal(found.isnan(), theirs.isnan())
    found[1, :, :16] = right[1, :, :16]
    assert torch.equal(found, right)


@needs_compiler
@torch.inference_mode()
def test_a_packed_model_uses_it_and_answers_as_before():
    model = redraw(VisionTransformer(replace(VIT, embed_dim=96)))
    twin, x = packed(model), images(3, 3, 16, 24)
    assert all(type(block.attn) is PackedAttention for block in twin.blocks)
    assert difference(twin(x), model(x)) < 1e-5
    assert difference(twin.forward_features(x), model.forward_features(x)) < 1e-5
    together = list(
        zip(twin.forward_packed([x[0], x[1, :, :8]]), model.forward_packed([x[0], x[1, :, :8]]), strict=True)
    )
    assert all(difference(a, b) < 1e-5 for a, b in together)
    rows = zip(twin.attention(x, layers="all"), model.attention(x, layers="all"), strict=True)
    assert all(difference(a, b) < 1e-5 for a, b in rows)


@needs_compiler
def test_it_is_compiled_once_and_again_if_it_is_damaged(fresh, monkeypatch):
    assert native_attention() is not None
    (library,) = fresh.iterdir()
    written = library.stat().st_mtime_ns
    native_attention.cache_clear()
    assert native_attention() is not None
    assert library.stat().st_mtime_ns == written
    whole = library.read_bytes()
    library.unlink()  # what is loaded stays as it is
    library.write_bytes(whole[:1000])
    native_attention.cache_clear()
    assert native_attention() is not None
    assert [file.name for file in fresh.iterdir()] == [library.name]


def no_compiler(monkeypatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", str(folder))


def failing_compiler(monkeypatch, folder: Path) -> None:
    (folder / "g++").write_text("#!/bin/sh\nexit 1\n")
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def mistaken_kernel(monkeypatch, folder: Path) -> None:
    text = native.SOURCE.read_text().replace("1.44269504f", "1.0f")
    assert text != native.SOURCE.read_text()
    (folder / "wrong.cpp").write_text(text)
    monkeypatch.setattr(native, "SOURCE", folder / "wrong.cpp")


def open_folder(monkeypatch, folder: Path) -> None:
    cache = folder / "vitral" / "native"
    cache.mkdir(parents=True)
    cache.chmod(0o777)


def no_folder(monkeypatch, folder: Path) -> None:
    (folder / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "taken"))


def another_system(monkeypatch, folder: Path) -> None:
    monkeypatch.setattr(native.sys, "platform", "darwin")


@pytest.mark.parametrize(
    "trouble",
    [
        no_compiler, failing_compiler, pytest.param(mistaken_kernel, marks=needs_compiler),
        pytest.param(open_folder, marks=needs_compiler), no_folder, another_system,
    ],
)  # fmt: skip
def test_without_it_torch_serves(trouble, fresh, tmp_path, monkeypatch):
    trouble(monkeypatch, tmp_path)
    assert native_attention() is None
    model, x = redraw(VisionTransformer(replace(VIT, embed_dim=96))), images(2, 3, 16, 16)
    twin = packed(model)
    assert not any(isinstance(part, PackedAttention) for part in twin.modules())
    assert difference(twin(x), model(x)) < 1e-5
    if trouble is open_folder:
        assert os.listdir(fresh) == []  # nothing was put where others could change it
