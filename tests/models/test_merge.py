"""A ViT that merges tokens: laws, and its traced form."""

import itertools

import pytest
import torch

from helpers import difference, images, redraw
from vitral.config import DetectorConfig, SegmenterConfig, SwinConfig, ViTConfig
from vitral.errors import ConfigError, InputError
from vitral.models.detector import Detector
from vitral.models.merge import merged
from vitral.models.segmenter import Segmenter
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer

SMALL = {
    "img_size": (12, 20), "patch_size": 2, "in_chans": 3, "num_classes": 7, "embed_dim": 24, "depth": 4, "num_heads": 3,
}  # fmt: skip
KINDS = {
    "cls": {},
    "registers": {"reg_tokens": 2, "global_pool": "cls"},
    "distilled": {"reg_tokens": 1, "global_pool": "cls_dist", "head": "distilled", "pos_registers": True},
    "mean": {"global_pool": "mean"},
    "mean, no prefix": {"global_pool": "mean", "class_token": False, "norm_after_pool": True},
    "max": {"global_pool": "max"},
    "cls_mean": {"global_pool": "cls_mean"},
    "cls of three blocks": {"pool_layers": 3},
    "cls_mean of two blocks": {"global_pool": "cls_mean", "pool_layers": 2},
    "map": {"global_pool": "map", "class_token": False},
    "norm last": {"block": "post", "global_pool": "mean"},
    "layer scale": {"init_values": 0.1},
}


def small(**options):
    return redraw(VisionTransformer(ViTConfig(**SMALL | options)))


@pytest.fixture(params=KINDS)
def model(request):
    return small(**KINDS[request.param])


@torch.no_grad()
def test_merging_nothing_changes_no_bit(model):
    x = images(3, 3, 12, 20)
    again = merged(model, 0)
    assert torch.equal(again(x), model(x))
    assert torch.equal(again.forward_features(x), model.forward_features(x))
    assert [g.tolist() for g in again.merge_maps(x)] == [[list(range(60))] * 3] * 4


@torch.no_grad()
def test_equal_patches_merge_without_loss(model):
    """Of equal patches one lies in each half: after the first block there are 30 tokens, and no difference."""
    assert model.pos_embed is not None
    model.pos_embed[:, model.config.pos_rows :] = 0
    half = images(2, 3, 12, 10)
    x = half.unflatten(3, (5, 2)).repeat_interleave(2, 3).flatten(3)  # every patch, then itself again
    again = merged(model, 30)
    again.schedule = lambda patches: [30, 0, 0, 0]
    places = again.merge_maps(x)[0]
    assert torch.equal(places[:, ::2], places[:, 1::2])
    assert places.amax() == 29
    assert difference(again(x), model(x)) < 1e-5
    assert difference(again.forward_features(x), model.forward_features(x)) < 1e-5
    alike = images(2, 3, 2, 2).repeat(1, 1, 6, 10)  # one patch everywhere: whatever is merged, nothing is lost
    assert difference(merged(model, 8)(alike), model(alike)) < 1e-5


@torch.no_grad()
def test_every_block_has_as_many_tokens_as_scheduled(monkeypatch):
    model, x = small(global_pool="mean"), images(2, 3, 12, 20)
    counts = []
    for block in model.blocks:
        block.attn.qkv.register_forward_hook(lambda module, args, out: counts.append(args[0].shape[1]))
        block.mlp.register_forward_hook(lambda module, args, out: counts.append(args[0].shape[1]))
    merged(model, 7)(x)
    assert counts == [61, 54, 54, 47, 47, 40, 40, 33]
    counts.clear()
    merged(model, 0.5)(x)
    assert counts[0] == 61
    assert counts[-1] == 31
    assert [place.amax() + 1 for place in merged(model, 9).merge_maps(x)] == [51, 42, 33, 24]


@torch.no_grad()
def test_one_image_answers_as_in_a_batch(model):
    x, again = images(5, 3, 12, 20), merged(model, 6)
    together = again(x)
    assert difference(together, model(x)) > 1e-4  # it does act
    for i in range(5):
        assert difference(again(x[i : i + 1]), together[i : i + 1]) < 1e-5


@torch.no_grad()
def test_without_positions_the_order_within_each_half_does_not_matter():
    """Whole rows of an even grid change places, so that every patch stays in its half of the first matching."""
    model = small(positions="none", global_pool="mean")
    x, again = images(2, 3, 12, 20), merged(model, 8)
    again.schedule = lambda patches: [21, 0, 0, 0]
    rows = torch.tensor([4, 0, 5, 2, 1, 3])
    moved = x.unflatten(2, (6, 2))[:, :, rows].flatten(2, 3)
    assert difference(again(moved), again(x)) < 1e-5


@torch.no_grad()
def test_features_heads_and_looking_inside_agree(model):
    x, again = images(2, 3, 12, 20), merged(model, 6)
    again.schedule = lambda patches: [6, 6, 6, 0]  # a head on [CLS] leaves the last merging out
    features = again.forward_features(x)
    R = model.prefix_tokens
    assert features.shape == (2, R + 60, 24 * model.config.pool_layers)
    assert difference(again.forward_head(features), again(x)) < 1e-5
    assert difference(again.intermediate(x, [-1], as_grid=False)[0], features[..., -24:]) < 1e-6
    assert again.intermediate(x, [1])[0].shape == (2, 24, 6, 10)
    (rows,) = again.attention(x, [2], "all")
    assert rows.shape == (2, 3, R + 60, R + 60)
    torch.testing.assert_close(rows.sum(-1), torch.ones(2, 3, R + 60))


@torch.no_grad()
def test_a_masked_image_answers_whatever_is_hidden(model):
    again, x, mask = merged(model, 7), images(2, 3, 12, 20), torch.ones(2, 12, 20, dtype=torch.bool)
    mask[0, 6:] = False
    mask[1, :, 13:] = False
    other = torch.where(mask[:, None], x, images(2, 3, 12, 20, seed=5))
    assert again(x, mask=mask).isfinite().all()
    assert difference(again(other, mask=mask), again(x, mask=mask)) < 1e-5
    assert difference(merged(model, 0)(x, mask=mask), model(x, mask=mask)) < 1e-6


def test_the_weights_are_shared_and_keep_their_names():
    model = small()
    again = merged(model, 3)
    assert {name: p.data_ptr() for name, p in again.named_parameters()} == {
        name: p.data_ptr() for name, p in model.named_parameters()
    }
    assert again.config == model.config
    assert not again.training


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_it_can_be_traced_for_any_batch(kind):
    again = merged(small(**KINDS[kind], depth=2), 7)
    batch = {"x": {0: torch.export.Dim("batch", min=1, max=64)}}
    traced = torch.export.export(again, (images(2, 3, 12, 20),), dynamic_shapes=batch).module()
    for count in (1, 5):
        x = images(count, 3, 12, 20, seed=count)
        assert difference(traced(x), again(x)) < 1e-5


def test_gradients_reach_every_parameter():
    model = small(global_pool="mean")
    merged(model, 6)(images(2, 3, 12, 20)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize("amount", [-1, 1.5, float("nan"), float("inf"), True, "8"])
def test_what_is_no_number_of_patches_is_refused(amount):
    with pytest.raises(ConfigError, match=r"merge must be a (whole )?number .* got "):
        merged(small(), amount)


def others():
    vit = ViTConfig(**SMALL | {"num_classes": 0})
    tiny = {"embed_dim": 24, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 3, "mlp_width": 8, "num_queries": 3}
    yield Segmenter(SegmenterConfig(backbone=vit, num_classes=3, layers=1, width=8))
    yield Detector(DetectorConfig(backbone=vit, num_classes=3, **tiny))
    yield SwinTransformer(SwinConfig(img_size=32, embed_dim=8, depths=(1, 1), num_heads=(2, 2), window_size=4))


def test_models_that_need_every_token_are_refused():
    for model in others():
        with pytest.raises(InputError, match=f"this model is a {type(model).__name__}, which needs every token"):
            merged(model, 3)
    with pytest.raises(InputError, match="cannot be packed while tokens are merged"):
        merged(small(), 3).forward_packed([images(3, 12, 20)])


def test_more_patches_than_half_are_never_merged():
    again, x = merged(small(), 1000), images(2, 3, 12, 20)
    assert again.schedule(60) == [30, 15, 7, 4]
    assert [int(place.amax()) + 1 for place in again.merge_maps(x)] == [30, 15, 8, 4]
    assert all(a >= b for a, b in itertools.pairwise(again.schedule(60)))
