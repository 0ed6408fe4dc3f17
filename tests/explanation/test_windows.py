"""Looking into what is no ViT: a Swin's windows on the image, Grad-CAM on its last map, and what is refused."""

import numpy as np
import pytest
import torch

import vitral
from helpers import difference, images, redraw
from vitral.config import SwinConfig
from vitral.errors import InputError
from vitral.explanation.explain import METHODS, explain
from vitral.explanation.placement import place
from vitral.explanation.relevance import grad_cam, input_gradients
from vitral.explanation.windows import window_maps
from vitral.models.swin import SwinTransformer


@pytest.fixture(scope="module")
def model():
    options = {"depths": (2, 3), "num_heads": (2, 4), "window_size": 3, "num_classes": 5}
    return redraw(SwinTransformer(SwinConfig(img_size=(22, 28), patch_size=2, embed_dim=8, **options))).eval()


@pytest.fixture(scope="module")
def picture():
    return np.random.default_rng(3).integers(0, 255, (22, 28, 3), dtype=np.uint8)


def literal_rows(model, x, block):
    """(h, N, N) over all tokens of a stage's map: full attention, in which only pairs of one piece are not masked."""
    blocks = list(model.block_inputs(x))
    this, z = blocks[block]
    z = this.norm1(z)[0]
    H, W = z.shape[:2]
    attn, M = this.attn, this.attn.M
    q, k, _ = attn.qkv(z.flatten(0, 1)).unflatten(1, (3, attn.num_heads, -1)).permute(1, 2, 0, 3)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    s = [M // 2 if attn.shifted and side > M else 0 for side in (H, W)]
    table = attn.relative_position_bias_table.view(2 * M - 1, 2 * M - 1, -1)
    for a in range(H * W):
        for b in range(H * W):
            (y, x_), (v, u) = divmod(a, W), divmod(b, W)
            same = (y + M - s[0]) // M == (v + M - s[0]) // M and (x_ + M - s[1]) // M == (u + M - s[1]) // M
            scores[:, a, b] += table[y - v + M - 1, x_ - u + M - 1] if same else -torch.inf
    return scores.softmax(-1).unflatten(2, (H, W)).unflatten(1, (H, W))


@pytest.mark.parametrize("block", [0, 1, 3])
@torch.no_grad()
def test_windows_on_the_image_are_literal_masked_full_attention(model, block):
    x = images(1, 3, 22, 27)  # maps of 11 x 14 and 6 x 7: padded to windows, shifted and not
    full = literal_rows(model, x, block)
    stride = 2 if block < 2 else 4
    for px, py in ((0, 0), (26, 21), (13, 9)):
        rows = window_maps(model, x, block, (px, py))
        assert difference(rows, full[:, py // stride, px // stride]) < 1e-5
        assert rows.flatten(1).sum(1) == pytest.approx(1, abs=1e-5)
    received = window_maps(model, x, block, None)
    assert received.shape[1:] == full.shape[3:]
    assert difference(received, full.mean((1, 2))) < 1e-5


def test_grad_cam_is_the_map_of_the_class(model):
    """The head is linear on the mean of the last map: what each cell gives to the class, where it speaks for it."""
    x = images(2, 3, 22, 28)
    with torch.no_grad():
        weight = model.head.fc.weight[3]
        share = (model.forward_features(x) @ weight / model.forward_features(x).shape[1]).clamp(min=0)
    assert difference(grad_cam(model, x, 3), share.unflatten(1, model.grid_of(x))) < 1e-5
    assert input_gradients(model, images(1, 3, 21, 27), 3).shape == (1, 6, 7)


def test_explain_shows_it(model, picture, tmp_path):
    made = explain(model, picture)
    assert made.grid == (6, 7)
    assert made.patch == (4, 4)
    assert made.where == "block 4, in stage 1, mean over all patches"
    assert len(made.titles) == 2 + 4
    placed = place(made)
    assert placed.corner(5, 7)[1] + placed.cell[0] > placed.crop[3]  # the last row of cells extends beyond the image
    assert placed.corner(6, 7) == placed.crop[2:]  # and is cut there
    asked = explain(model, picture, layer=1, head=-1, patch=(13, 9))
    assert asked.grid == (11, 14)
    assert asked.patch == (2, 2)
    assert asked.titles == ["head 1"]
    assert asked.where == "block 1, in stage 0, from the patch at 13,9"
    assert float(asked.maps.sum()) == pytest.approx(1, abs=1e-5)
    assert asked.save(tmp_path / "x.png").stat().st_size > 1000
    scored = explain(model, picture, "gradcam", score=True)
    assert scored.titles == ["Grad-CAM", "input gradients"]
    assert set(scored.scores) >= {"Grad-CAM: deletion", "chance: insertion"}
    assert explain(model, picture, "occlusion").grid == (6, 7)
    tokens = explain(model, picture, "tokens", layer=0)
    assert tokens.grid == (11, 14)
    assert tokens.titles == ["principal components of stage 0"]
    assert vitral.explain is explain


@pytest.mark.parametrize("method", ["rollout", "relevance", "positions", "writing"])
def test_what_needs_a_vit_says_so(model, picture, method):
    assert method in METHODS
    message = f"{method} needs a ViT, and the backbone of this model is a SwinTransformer; use attention, gradcam, "
    with pytest.raises(InputError, match=message):
        explain(model, picture, method)


def test_other_refusals(model, picture):
    with pytest.raises(InputError, match="a page needs a ViT"):
        explain(model, picture, interactive=True)
    with pytest.raises(InputError, match="use gradcam or occlusion"):
        explain(model, picture, score=True)
    with pytest.raises(InputError, match="layer must be a block from -5 to 4, got 5"):
        explain(model, picture, layer=5)
    with pytest.raises(InputError, match="layer must be a block from -2 to 1, got 2"):
        explain(model, picture, "tokens", layer=2)
    with pytest.raises(InputError, match="head must be a head from -2 to 1, got 2"):
        explain(model, picture, layer=0, head=2)
