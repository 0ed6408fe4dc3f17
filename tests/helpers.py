"""What several tests share: random weights that hide nothing, and a measure of difference."""

import re
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn


def redraw(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter anew, so that no zero head, unit norm or tiny LayerScale lets a wrong model pass."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)

    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2 and not name.endswith(("_token", "_tokens", "pos_embed", "latent", "embeddings")):
                p.copy_(normal(p) * p[0].numel() ** -0.5)
            elif p.ndim == 1 and name.endswith(("weight", "gamma", "lambda1")):
                p.copy_(1 + 0.3 * normal(p))
            else:
                p.copy_(0.5 * normal(p))
    return model.eval()


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, as a share of the largest value of the reference `b`."""
    assert a.shape == b.shape, f"{tuple(a.shape)} against {tuple(b.shape)}"
    return ((a - b).abs().max() / b.abs().max()).item()


def images(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random pixels."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def bytes_kept(model: nn.Module, run) -> int:
    """What `run()` keeps for the gradients, besides the weights and buffers of the model."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept, held = {}, []

    def keep(t):
        held.append(t)  # memory that is freed could be taken for another's
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(kept.values())


@contextmanager
def stop_after(monkeypatch, module, steps):
    """Make a run of that module want to stop after so many looks at the signal."""
    left = [steps]

    @contextmanager
    def signals():
        def stop():
            left[0] -= 1
            return left[0] <= 0

        yield stop

    with monkeypatch.context() as patch:
        patch.setattr(module, "signals", signals)
        yield


def tampered(source: Path, target: Path, change) -> Path:
    """A copy of an archive, each entry passed through `change(name, bytes)`."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


def documented(page: str, word: str) -> str:
    """The one Python block of a page in docs/ that holds a word."""
    blocks = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "docs" / page).read_text(), re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    return block


def same(a, b, tolerance: float = 1e-3) -> bool:
    """Whether two answers are the same but for the last digits."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        return all(same(a[key], b[key], tolerance) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return a == pytest.approx(b, rel=tolerance, abs=tolerance) if isinstance(a, float) else a == b


def tensors(found):
    """What a classifier, segmenter or detector gives, as a list."""
    return [found] if isinstance(found, torch.Tensor) else [found.logits, found.boxes]
