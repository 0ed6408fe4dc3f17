"""Exact rows, laws of the methods, and a model that is the same before, during and after."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers import difference, images, redraw
from peers import import_transformers
from vitral import Predictor, create_model, explain, load_model, save_model
from vitral.cli.main import main
from vitral.config import Preprocess
from vitral.data.transforms import normalize
from vitral.errors import InputError, UnknownNameError
from vitral.explanation import relevance
from vitral.explanation.attention import (
    Recorder,
    entropy,
    fuse,
    mean_distance,
    patch_token,
    pool_row,
    to_maps,
    top_mass,
)
from vitral.explanation.captions import part_shown
from vitral.explanation.colours import number, paint, scale_of
from vitral.explanation.faithfulness import curves
from vitral.explanation.figures import columns_for, group_colours
from vitral.explanation.positions import position_colours, position_similarity, position_table
from vitral.explanation.rollout import rollout
from vitral.explanation.tokens import nearest_patches, principal_colours, token_norms
from vitral.models.mae import over_pixels
from vitral.models.merge import merged

SMALL = {"embed_dim": 48, "depth": 3, "num_heads": 3, "mlp_ratio": 2.0, "img_size": 64, "num_classes": 7}
FAMILIES = [
    ("vit_tiny_patch16_224", {}),
    ("vit_small_patch14_reg4_dinov2", {"img_size": 56, "num_classes": 7}),
    ("vit_base_patch16_siglip_224", {}),
    ("vit_tiny_patch16_224", {"global_pool": "mean", "class_token": False}),
    ("vit_tiny_patch16_224", {"global_pool": "cls_mean", "pool_layers": 3}),
    ("vit_tiny_patch16_224", {"block": "post"}),
    ("vit_tiny_patch16_224", {"head": "distilled", "global_pool": "cls_dist", "reg_tokens": 1, "pos_registers": True}),
]


def small(name="vit_tiny_patch16_224", **options):
    return redraw(create_model(name, **{**SMALL, **options}), seed=1)


@pytest.fixture
def model():
    return small()


@pytest.fixture
def picture(tmp_path):
    rows = torch.arange(64)[:, None, None] * 4
    pixels = torch.cat([rows.expand(64, 64, 1), rows.expand(64, 64, 1).transpose(0, 1), rows.expand(64, 64, 1) // 2], 2)
    Image.fromarray(pixels.to(torch.uint8).numpy()).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


class TestExactness:
    transformers = import_transformers()

    @pytest.mark.parametrize(
        ("kind", "options", "size"),
        [
            ("ViT", {"image_size": 64}, (48, 80)),
            ("Dinov2WithRegisters", {"image_size": 56, "patch_size": 14}, (42, 70)),
            ("DeiT", {"image_size": 64}, (64, 64)),
        ],
    )
    @torch.no_grad()
    def test_recorded_rows_are_those_of_transformers(self, tmp_path, kind, options, size):
        shape = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3}
        shape |= {} if kind.startswith("Dino") else {"intermediate_size": 96}
        config = getattr(self.transformers, f"{kind}Config")(**shape, **options)
        name = "DeiTForImageClassificationWithTeacher" if kind == "DeiT" else f"{kind}Model"
        theirs = redraw(getattr(self.transformers, name)._from_config(config, attn_implementation="eager"), seed=1)
        theirs.save_pretrained(tmp_path)
        ours = load_model(tmp_path, quiet=True, num_heads=3)
        x = images(2, 3, *size)
        call = {} if kind.startswith("Dino") else {"interpolate_pos_encoding": True}
        reference = theirs(x, output_attentions=True, **call).attentions
        with Recorder() as record:
            relevance.from_tokens(ours, ours.embed_tokens(x)[0])
        for a, b, c in zip(record.rows, reference, ours.attention(x, "all", "all"), strict=True):
            assert difference(a, b) <= 1e-5
            assert difference(c, b) <= 1e-5
            assert (a.sum(-1) - 1).abs().max() <= 1e-6

    @pytest.mark.parametrize(("name", "options"), FAMILIES)
    def test_the_model_is_the_same_before_during_and_after(self, name, options):
        model = small(name, **options).train()
        model.blocks[1].eval()
        model.cls_token is None or model.cls_token.requires_grad_(False)
        x = images(1, 3, *model.config.image)
        model.eval()
        before = model(x)
        model.train()
        model.blocks[1].eval()
        state = {k: v.clone() for k, v in model.state_dict().items()}
        modes = [m.training for m in model.modules()]
        wants = [p.requires_grad for p in model.parameters()]
        for method in (
            relevance.attribution,
            relevance.gradient_rollout,
            relevance.grad_cam,
            relevance.integrated_gradients,
            relevance.input_gradients,
            relevance.occlusion,
        ):
            maps = method(model, x)
            assert maps.shape == (1, *model.config.grid)
            assert maps.isfinite().all()
        assert [m.training for m in model.modules()] == modes
        assert [p.requires_grad for p in model.parameters()] == wants
        assert all(p.grad is None for p in model.parameters())
        assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())
        model.eval()
        assert torch.equal(model(x), before)

    def test_a_recorder_in_one_place_leaves_others_alone(self, model):
        from threading import Thread

        x, results = images(1, 3, 64, 64), []
        before = model(x)
        with Recorder() as record:
            thread = Thread(target=lambda: results.append(model(x)))
            thread.start()
            thread.join()
            assert record.rows == []
        assert torch.equal(results[0], before)


class TestReading:
    def test_patch_at_a_pixel(self, model):
        assert patch_token(model, (64, 64), 0, 0) == 1
        assert patch_token(model, (64, 64), 63, 63) == 16
        assert patch_token(model, (64, 64), 17, 0) == 2
        assert patch_token(model, (48, 80), 16, 16) == 1 + 5 + 1
        with pytest.raises(InputError, match=r"the patch at 64,0 lies outside the image of 64 x 64 pixels"):
            patch_token(model, (64, 64), 64, 0)

    def test_fusion_entropy_and_distance(self, model):
        rows = torch.zeros(1, 3, 17, 17)
        rows[0, 0] = 1 / 17  # everywhere alike
        rows[0, 1] = torch.eye(17)  # at itself
        rows[0, 2, :, 1] = 1  # at the first patch
        assert entropy(rows)[0, 0] == pytest.approx([math.log(17)] * 17)
        assert entropy(rows)[0, 1].abs().max() == 0
        far = mean_distance(model, rows, (4, 4))[0]
        assert far[1] == 0
        places = [math.hypot(16 * r, 16 * c) for r in range(4) for c in range(4)]
        assert far[2] == pytest.approx(sum(places) / 16)
        assert fuse(rows, "max")[0, 5, 1] == 1
        assert fuse(rows, "min")[0, 5, 1] == 0
        with pytest.raises(UnknownNameError, match="unknown fusion of heads 'median'; did you mean mean or min"):
            fuse(rows, "median")

    def test_top_mass(self):
        map_ = torch.tensor([[0.5, 0.1], [0.3, 0.1]])
        assert top_mass(map_, 0.5).tolist() == [[True, False], [False, False]]
        assert top_mass(map_, 0.6).tolist() == [[True, False], [True, False]]
        assert top_mass(map_, 1.0).all()
        with pytest.raises(InputError, match="share must be above 0"):
            top_mass(map_, 0)

    def test_positions(self, model):
        table = position_table(model)
        assert torch.equal(table, model.pos_embed[0, 1:])
        similar = position_similarity(model)
        assert similar.shape == (16, 4, 4)
        for i in (0, 7):
            assert similar[i].flatten()[i] == pytest.approx(1, abs=1e-5)
            cosine = torch.cosine_similarity(table[i], table[3], dim=0)
            assert similar[i].flatten()[3] == pytest.approx(cosine.item(), abs=1e-5)
        assert position_colours(model).shape == (3, 4, 4)
        with pytest.raises(InputError, match="this model has no positions"):
            position_table(small(positions="none"))

    def test_principal_colours_find_planted_directions(self):
        maps = torch.zeros(1, 5, 6, 6)
        maps[0, 1] = 9 * torch.arange(6)[None].expand(6, 6)  # the strongest runs from left to right
        maps[0, 3] = 3 * torch.arange(6)[:, None].expand(6, 6)
        maps[0, 4, 0, 0] = 0.5
        colours = principal_colours(maps)[0]
        red, green = colours[0], colours[1]
        assert (red.diff(dim=1) >= -1e-6).all()
        assert red[:, 0].max() < 0.05
        assert red[:, -1].min() > 0.95
        assert (green.diff(dim=0) >= -1e-6).all()
        with pytest.raises(InputError, match="three components"):
            principal_colours(torch.zeros(1, 2, 4, 4))

    @torch.no_grad()
    def test_norms_and_neighbours(self, model):
        x = images(1, 3, 64, 64)
        norms = token_norms(model, x)
        assert norms.shape == (1, 3, 4, 4)
        expected = model.intermediate(x, [1], norm=False)[0].norm(dim=1)
        assert difference(norms[:, 1], expected) < 1e-6
        places, cosine = nearest_patches(model, x, x)
        assert places.tolist() == [[r, c] for r in range(4) for c in range(4)]
        assert cosine.min() > 0.999


class TestMethods:
    @torch.no_grad()
    def test_rollout_is_the_product_of_matrices(self, model):
        x = images(2, 3, 64, 64)
        rows = model.attention(x, "all", "all")
        start = torch.zeros(2, 1, 17)
        start[..., 0] = 1
        product = torch.eye(17).expand(2, 17, 17)
        for A in rows:
            product = (A.mean(1) + torch.eye(17)) / 2 @ product
        share = rollout([A.mean(1) for A in rows], start)
        assert difference(share, product[:, 0]) < 1e-6
        assert (share.sum(1) - 1).abs().max() < 1e-5
        assert difference(relevance.attention_rollout(model, x), product[:, 0, 1:].unflatten(1, (4, 4))) < 1e-5
        with pytest.raises(InputError, match="discard must be from 0 to below 1"):
            relevance.attention_rollout(model, x, discard=1.0)

    def test_discarding_keeps_the_largest(self):
        rows = torch.tensor([[[0.1, 0.2, 0.3, 0.4]] * 4])
        start = torch.tensor([[[1.0, 0, 0, 0]]])
        share = rollout([rows], start, discard=0.5)[0]
        assert share.tolist() == pytest.approx([1 / 1.7, 0, 0.3 / 1.7, 0.4 / 1.7])

    def test_attribution_is_the_literal_recursion(self, model):
        x = images(1, 3, 64, 64)
        z = model.embed_tokens(x)[0]
        with Recorder() as record:
            answer = relevance.from_tokens(model, z)[0, 3]
        grads = torch.autograd.grad(answer, record.rows)
        R = torch.eye(17)[None]
        for A, G in zip(record.rows, grads, strict=True):
            R = R + (G * A).clamp(min=0).mean(1) @ R
        expected = to_maps(model, R[:, 0], (4, 4))
        assert difference(relevance.attribution(model, x, 3), expected) < 1e-5

    def test_gradients_of_rows_are_right(self, model):
        """Against finite differences on one attention weight."""
        model, x = model.double(), images(1, 3, 64, 64).double()
        step, layer, at = 1e-6, 1, (0, 1, 3, 5)
        with Recorder() as record:
            answer = relevance.from_tokens(model, model.embed_tokens(x)[0])[0, 2]
        grads = torch.autograd.grad(answer, record.rows)

        class Nudged(Recorder):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func is not torch.nn.functional.scaled_dot_product_attention:
                    return func(*args, **(kwargs or {}))
                from vitral.nn.attention import softmax_rows

                rows = softmax_rows(args[0], args[1], None)
                if len(self.rows) == layer:
                    rows = rows.clone()
                    rows[at] += step
                self.rows.append(rows)
                return rows @ args[2]

        with torch.no_grad():
            z = model.embed_tokens(x)[0]
            with Nudged():
                moved = relevance.from_tokens(model, z)[0, 2]
            rest = relevance.from_tokens(model, z)[0, 2]
        assert ((moved - rest) / step).item() == pytest.approx(grads[layer][at].item(), rel=1e-4)

    @pytest.mark.parametrize(("name", "options"), FAMILIES[:4])
    @torch.no_grad()
    def test_integrated_gradients_add_up(self, name, options):
        model = small(name, **options)
        x = 0.3 * images(1, 3, *model.config.image)
        maps = relevance.integrated_gradients(model, x, 1, steps=200)
        z, base = model.embed_tokens(x)[0], model.embed_tokens(torch.zeros_like(x))[0]
        change = (relevance.from_tokens(model, z) - relevance.from_tokens(model, base))[0, 1]
        assert maps.sum().item() == pytest.approx(change.item(), rel=0.02, abs=1e-3)

    @torch.no_grad()
    def test_occlusion_is_the_fall_of_the_answer(self, model):
        x = images(2, 3, 64, 64)
        maps = relevance.occlusion(model, x, 4, batch=5)
        painted = x[1:].clone()
        painted[:, :, 32:48, 16:32] = x[1].mean((1, 2))[:, None, None]
        fall = model(x[1:]).log_softmax(1)[0, 4] - model(painted).log_softmax(1)[0, 4]
        assert maps[1, 2, 1].item() == pytest.approx(fall.item(), abs=1e-5)
        most = relevance.occlusion(model, x)
        assert difference(most[:1], relevance.occlusion(model, x[:1], int(model(x[:1]).argmax()))) < 1e-4
        spread = relevance.occlusion(model, x, lambda y: y.var(1))
        assert spread.shape == (2, 4, 4)

    def test_input_gradients_are_the_gradient(self, model):
        x = images(1, 3, 64, 64).requires_grad_()
        model(x)[0, 4].backward()
        grad = x.grad.abs().sum(1)[0]
        expected = torch.stack(
            [grad[16 * r : 16 * r + 16, 16 * c : 16 * c + 16].sum() for r in range(4) for c in range(4)]
        )
        assert difference(relevance.input_gradients(model, x.detach(), 4).flatten(), expected) < 1e-5

    def test_any_number_of_the_output_can_be_the_target(self, model):
        x = images(2, 3, 64, 64)
        first = relevance.attribution(model, x, lambda y: y[:, 2])
        assert torch.equal(first, relevance.attribution(model, x, 2))
        assert torch.equal(relevance.attribution(model, x), relevance.attribution(model, x, model(x).argmax(1)))
        spread = relevance.attribution(model, x, lambda y: y.var(1))
        assert difference(spread, first) > 0.01
        with pytest.raises(InputError, match=r"target must give one number for each image, got shape \(2, 7\)"):
            relevance.attribution(model, x, lambda y: y)
        with pytest.raises(InputError, match="target must be a class from 0 to 6, got 7"):
            relevance.attribution(model, x, 7)

    def test_where_pooling_reads(self):
        for (name, options), expected in zip(FAMILIES[:4], ("cls", "cls", "map", "mean"), strict=True):
            model = small(name, **options)
            with torch.no_grad(), Recorder() as record:
                relevance.from_tokens(model, model.embed_tokens(images(1, 3, *model.config.image))[0])
            blocks, start = pool_row(model, record.rows)
            assert len(blocks) == 3
            assert start.sum().item() == pytest.approx(1, abs=1e-5)
            assert (start[0, 0, 0] == 1) == (expected == "cls")


class TestFaithfulness:
    def test_a_planted_patch_is_found_by_the_curves(self, model):
        """A model that answers by one patch alone: the true map drops at once, the reversed one last."""

        class OnePatch(torch.nn.Module):
            config, training, grid_of = model.config, False, staticmethod(model.grid_of)

            def forward(self, x):
                seen = x[:, :, 16:32, 32:48].mean((1, 2, 3)) * 8
                return torch.stack([seen, torch.zeros_like(seen)], 1)

        x = torch.zeros(1, 3, 64, 64)
        x[:, :, 16:32, 32:48] = 1
        truth = torch.zeros(1, 4, 4)
        truth[0, 1, 2] = 1
        good, bad = (curves(OnePatch(), x, map_, torch.tensor([0]), steps=16) for map_ in (truth, -truth))
        assert good.deletion[0, 0] > 0.99
        assert good.deletion[0, 1] < 0.8  # painted over with the mean, 1/16
        assert good.insertion[0, 0] < 0.99 < good.insertion[0, 1]
        assert bad.deletion[0, -2] > 0.99
        assert good.deletion_auc < 0.8 < 0.95 < bad.deletion_auc
        assert good.insertion_auc > bad.insertion_auc
        with pytest.raises(InputError, match=r"maps must be \(1, 4, 4\) for these images, got \(1, 3, 4\)"):
            curves(OnePatch(), x, truth[:, :3], torch.tensor([0]))


class TestExplain:
    @pytest.mark.parametrize(
        "method", ["attention", "rollout", "relevance", "gradcam", "occlusion", "positions", "tokens"]
    )
    @pytest.mark.parametrize(("name", "options"), FAMILIES)
    def test_every_method_on_every_family(self, tmp_path, picture, name, options, method):
        model = small(name, **options)
        made = explain(model, picture, method, interactive=method != "positions")
        assert made.grid == model.config.grid
        assert made.maps.isfinite().all()
        assert len(made.titles) == (1 if method == "tokens" else len(made.maps))
        if made.rows is not None:
            made.save(tmp_path / "x.html")
        if method == "attention":
            made.save(tmp_path / "x.png")
            with Image.open(tmp_path / "x.png") as shown:
                assert shown.size[0] > 300

    @pytest.mark.parametrize(("name", "options"), FAMILIES)
    def test_the_rows_of_the_page_are_the_models(self, picture, name, options):
        model = small(name, **options, **({} if "img_size" in options else {"img_size": (32, 96)}))
        predictor = Predictor(model)
        made = explain(predictor, picture, "rollout", interactive=True)
        p = predictor.preprocess
        x = normalize(predictor.prepare(picture)[None], p)
        (rows,) = model.attention(x, [1], "all")
        R, cls = model.prefix_tokens, model.cls_token is not None
        assert made.rows.heads == [0, 1, 2]
        assert made.rows.shares.shape == (3, 3, cls + rows.shape[-1] - R, rows.shape[-1] - R)
        expected = rows[0, :, R + 2, R:]
        assert torch.equal(made.rows.largest[1, :, cls + 2], expected.amax(1))
        shown = made.rows.shares[1, :, cls + 2].float() / 255 * made.rows.largest[1, :, cls + 2, None]
        assert (shown - expected).abs().max() <= expected.max() / 255

    def test_layer_head_and_patch(self, model, picture):
        predictor = Predictor(model)
        x = (predictor.prepare(picture)[None].float() / 255 - 0.5) / 0.5
        (rows,) = model.attention(x, [1], [1 + 4 * 2 + 3])
        made = explain(predictor, picture, layer=1, head=2, patch=(50, 33))
        assert torch.allclose(made.maps[0], rows[0, 2, 0, 1:].view(4, 4))
        assert made.titles == ["head 2"]
        assert (made.layer, made.head, made.asked) == (1, 2, (50, 33))
        assert made.where == "block 1, from the patch at 50,33"
        assert explain(predictor, picture, layer=-3, head=-1).where == "block 0, from [CLS]"

    def test_an_oblong_image_keeps_its_shape(self, tmp_path, picture):
        model = small(img_size=(32, 96))
        made = explain(model, picture, "rollout")
        assert made.grid == (2, 6)
        made.save(tmp_path / "x.svg")
        with Image.open(made.save(tmp_path / "x.png")) as shown:
            assert shown.size[0] > 1.5 * shown.size[1]

    def test_scores(self, model, picture):
        scores = explain(model, picture, "relevance", score=True).scores
        assert set(scores) == {
            f"{n}: {k}"
            for n in ("gradient x attention", "input gradients", "chance")
            for k in ("deletion", "insertion")
        }
        assert all(0 <= v <= 1 for v in scores.values())

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"layer": 3}, r"layer must be a block from -3 to 2, got 3\."),
            ({"layer": "all"}, r"layer must be a block from -3 to 2, got 'all'\."),
            ({"head": 3}, "head must be a head from -3 to 2, got 3"),
            (
                {"patch": (64, 3)},
                r"outside the prepared image of 64 x 64 pixels \(of your image: the middle 58 x 58 of 64 x 64\)\.",
            ),
            ({"patch": 3}, r"patch must be two integers \(x, y\), got 3\."),
            ({"patch": (3.5, 3)}, r"patch must be two integers \(x, y\), got \(3.5, 3\)\."),
            ({"method": "relevance", "target": 7}, "class must be a number from 0 to 6, got 7"),
            ({"method": "relevance", "target": "-1"}, "class must be a number from 0 to 6, got -1"),
            ({"method": "relevance", "target": 1.5}, r"class must be a number from 0 to 6, got 1\.5"),
            ({"target": 3}, r"attention does not accept target; it is for relevance, gradcam, occlusion\."),
            ({"method": "rollout", "patch": (3, 3)}, r"rollout does not accept patch; it is for attention\."),
            (
                {"method": "positions", "layer": 0},
                r"positions does not accept layer; it is for attention, tokens, writing, merging\.",
            ),
            ({"method": "tokens", "head": 0}, r"tokens does not accept head; it is for attention, writing\."),
            ({"method": "tokens", "score": True}, "tokens does not accept score=True"),
            ({"method": "positions", "interactive": True}, "positions does not accept interactive=True"),
            ({"method": "relevance", "target": lambda y: y[:, 0], "score": True}, "a score needs a class:"),
            ({"method": "relevance", "target": "zebra"}, "unknown class 'zebra'"),
            ({"method": "relevance", "target": "²"}, "unknown class '²'"),
            ({"method": "relevance", "target": "३"}, "unknown class '३'"),
            ({"method": "atention"}, "unknown method 'atention'; did you mean attention"),
        ],
    )
    def test_mistakes_are_one_sentence(self, model, picture, options, message):
        with pytest.raises((InputError, UnknownNameError), match=message):
            explain(model, picture, **options)

    @pytest.mark.parametrize("image", [None, [], ["x.png"], 3])
    def test_one_image_at_a_time(self, model, image):
        with pytest.raises(InputError, match=r"explain takes one image .*, got (None|a list|a int)\."):
            explain(model, image)

    def test_what_is_said_about_the_class(self, model, picture):
        predictor = Predictor(model)
        x = (predictor.prepare(picture)[None].float() / 255 - 0.5) / 0.5
        with torch.no_grad():
            p = model(x).double().softmax(1)[0]
        best, other = int(p.argmax()), int(p.argmin())
        says = f"{best}, {100 * p[best]:.1f} %"
        assert explain(predictor, picture).caption == f"attention: block 2, from [CLS]; prediction: {says}"
        assert explain(predictor, picture, "rollout").caption == f"rollout: prediction: {says}"
        assert explain(predictor, picture, "relevance").caption == f"relevance: class {says}"
        assert explain(predictor, picture, "relevance", target=best).about == f"class {says}"
        asked = explain(predictor, picture, "relevance", target=str(other))
        assert asked.about == f"class {other} ({100 * p[other]:.1f} %; prediction: {says})"
        assert (asked.label, asked.answer) == (str(other), says)
        assert asked.probability == pytest.approx(float(p[other]))
        own = explain(predictor, picture, "relevance", target=lambda y: y.sum(1))
        assert own.about == f"your function, {model(x).sum().item():.4g}"
        assert explain(predictor, picture, "tokens").caption == "tokens: block 2"
        model.labels = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
        assert explain(model, picture, "occlusion").about == f"{model.labels[best]}, {100 * p[best]:.1f} %"

    def test_a_model_without_classes(self, picture):
        headless = small(num_classes=0)
        assert explain(headless, picture).caption == "attention: block 2, from [CLS]"
        for target in (None, 3, "3"):
            with pytest.raises(InputError, match="this model has no classes to explain; use attention, "):
                explain(headless, picture, "relevance", target=target)
        made = explain(headless, picture, "relevance", target=lambda y: y[:, 5])
        assert made.about.startswith("your function, ")
        with pytest.raises(InputError, match="a score needs a class:"):
            explain(headless, picture, score=True)

    @pytest.mark.parametrize("names", [["age"], ["age", "height"]])
    def test_a_model_that_tells_numbers(self, picture, names):
        from vitral.config import RegressOptions
        from vitral.tasks.regress import Regress

        predictor = Predictor(small(num_classes=len(names)))
        predictor.task = Regress(names, [30.0, 170.0][: len(names)], [10.0, 20.0][: len(names)], RegressOptions())
        predictor.labels = names
        if len(names) == 2:
            with pytest.raises(InputError, match="several numbers; choose which to explain: age, height"):
                explain(predictor, picture, "occlusion")
        made = explain(predictor, picture, "occlusion", target=names[-1])
        x = normalize(predictor.prepare(picture)[None], predictor.preprocess)
        last = len(names) - 1
        assert difference(made.maps, relevance.occlusion(predictor.model, x, lambda y: y[:, last])) < 1e-6
        assert made.maps.abs().max() > 0
        assert made.about.startswith(f"{names[-1]}; prediction: age ")
        assert explain(predictor, picture).about.startswith("prediction: age ")

    def test_where_attention_pooling_reads_and_where_a_block_of_it_looks(self, picture):
        model = small("vit_base_patch16_siglip_224")
        assert explain(model, picture).where == "attention of the pooling"
        made = explain(model, picture, layer=1)
        assert made.where == "block 1, mean over all patches"
        x = normalize(Predictor(model).prepare(picture)[None], model.preprocess)
        (rows,) = model.attention(x, [1], "all")
        assert torch.allclose(made.maps[2:], rows[0].mean(1).unflatten(1, (4, 4)))

    def test_slow_methods_tell_how_far_they_are(self, model, picture):
        seen = []

        def track(steps):
            seen.append(len(steps))
            return iter(steps)

        explain(model, picture, "gradcam", track=track)
        explain(small(img_size=96), picture, "occlusion", track=track)
        assert seen == [32, 3]  # steps of integrated gradients; 36 patches, 16 at once

    def test_pages_and_pictures_only(self, tmp_path, model, picture):
        made = explain(model, picture)
        with pytest.raises(InputError, match=r"should end in .png, .svg, .pdf, .jpg or .html"):
            made.save(tmp_path / "x.gif")
        with pytest.raises(InputError, match="interactive=True"):
            made.save(tmp_path / "x.html")


class TestPart:
    @pytest.mark.parametrize(
        ("size", "options", "text"),
        [
            ((300, 451), {"crop_pct": 1.0}, "the middle 300 x 300 of 451 x 300"),
            ((451, 300), {"crop_pct": 1.0}, "the middle 300 x 300 of 300 x 451"),
            ((300, 300), {"crop_pct": 1.0}, "all of 300 x 300"),
            ((300, 300), {"crop_pct": 0.5}, "the middle 150 x 150 of 300 x 300"),
            ((300, 451), {"crop_mode": "squash"}, "all of 451 x 300, squeezed to 224 x 224"),
            ((300, 301), {"crop_mode": "squash"}, "all of 301 x 300"),
            ((300, 450), {"crop_mode": "pad"}, "all of 450 x 300, padded"),
            ((1, 1), {"crop_pct": 0.875}, "all of 1 x 1"),
        ],
    )
    def test_which_part_of_an_image_is_shown(self, size, options, text):
        assert part_shown(size, Preprocess(**options)) == text

    def test_the_size_is_that_of_the_file(self, tmp_path):
        Image.new("RGB", (1600, 800)).save(tmp_path / "x.jpg")  # decoded smaller for a model of 64 pixels
        made = explain(small(), tmp_path / "x.jpg")
        assert made.part.endswith(" of 1600 x 800")
        for image in (Image.new("RGB", (90, 70)), torch.zeros(3, 70, 90, dtype=torch.uint8)):
            assert explain(small(), image).part.endswith(" of 90 x 70")
        assert explain(small(), np.zeros((70, 90), np.uint8)).part.endswith(" of 90 x 70")


class TestColours:
    def test_from_zero_to_the_largest(self):
        scale = scale_of(torch.tensor([[0.056, 0.062], [0.06, 0.058]]))
        assert (scale.bottom, scale.top) == (0, pytest.approx(0.062))
        assert scale.text() == "0.056 to 0.062"
        signed = scale_of(torch.tensor([[-0.3, 0.1]]))
        assert (signed.bottom, signed.top) == (pytest.approx(-0.3), pytest.approx(0.3))
        assert signed.text() == "-0.3 to 0.1"
        assert scale_of(torch.zeros(2, 2)).top == 1

    def test_a_nearly_uniform_map_does_not_look_lively(self):
        flat = paint(torch.tensor([[0.0500, 0.0505]])).astype(int)
        lively = paint(torch.tensor([[0.0, 0.0505]])).astype(int)
        assert np.abs(flat[0, 0] - flat[0, 1]).max() < 10
        assert np.abs(lively[0, 0] - lively[0, 1]).max() > 150

    def test_zero_is_dark_and_signs_have_their_own_colours(self):
        below, zero, above = paint(torch.tensor([[-1.0, 0.0, 1.0]]))[0].astype(int)
        assert zero.max() < 90
        assert above[0] > above[2] + 100  # yellow
        assert below[2] > below[0] + 50  # blue
        assert (paint(torch.tensor([[0.0, 1.0]]))[0, 1] == above).all()

    def test_few_outliers_are_cut_off_unless_they_are_everything(self):
        map_ = torch.full((20, 20), 0.5)
        map_[3, 4], map_[5, 6] = 9.0, 7.0
        assert scale_of(map_).top == 0.5
        assert scale_of(map_).text() == "0.5 to 9, 2 cut off at 0.5"
        map_[7, 8] = 4.5  # no more than two in 400 are cut off, and none is where the largest is not twice the others
        assert (scale_of(map_).top, scale_of(map_).beyond) == (9, 0)
        alone = torch.full((20, 20), 1e-6)
        alone[3, 4] = 0.9
        assert scale_of(alone).top == pytest.approx(0.9)
        assert scale_of(torch.tensor([[0.1, 5.0]])).top == 5  # in a small map nothing is an outlier

    @pytest.mark.parametrize(
        ("value", "text"), [(0.0, "0"), (0.0617, "0.0617"), (-12.3456, "-12.3"), (2.6e-7, "2.6e-7"), (12345.0, "12300")]
    )
    def test_numbers(self, value, text):
        assert number(value) == text


class TestFigure:
    def test_every_panel_has_its_title_crop_and_range(self, model, picture):
        made = explain(model, picture, layer=1, patch=(20, 50))
        figure = made.figure()
        assert figure.get_suptitle() == made.caption
        first, *maps = figure.axes
        assert first.get_title() == "image, 64 x 64 pixels"
        assert [t.get_text() for t in first.texts] == [made.part, "input of the model: 64 x 64 pixels"]
        for ax, map_, title in zip(maps, made.maps, made.titles, strict=True):
            assert ax.get_title() == title
            assert [t.get_text() for t in ax.texts] == ["0", number(map_.max().item()), scale_of(map_).text()]
        start, side = (
            6 * 3 / 71 * 64,
            6 * 64 / 71 * 64,
        )  # drawn six times as large; 64 of 71 pixels are fed to the model
        crop = (start, start, side, side)
        patch = (start + side / 4, start + 3 * side / 4, side / 4, side / 4)
        for ax in figure.axes:
            bounds = [each for rectangle in ax.patches for each in rectangle.get_bbox().bounds]
            assert bounds == pytest.approx([*crop, *crop, *patch, *patch])

    def test_signed_maps_are_drawn_round_zero(self, model, picture):
        made = explain(model, picture, "gradcam")
        assert made.maps[1].min() < 0
        ax = made.figure().axes[2]
        largest = number(made.maps[1].abs().max().item())
        assert [t.get_text() for t in ax.texts][:2] == [f"-{largest}", largest]

    def test_no_panel_stands_alone(self):
        for panels in range(2, 60):
            columns = columns_for(panels)
            assert columns <= 7
            assert panels <= columns or panels % columns != 1
        assert [columns_for(n) for n in (4, 7, 9, 15)] == [4, 4, 3, 5]


class TestPage:
    def test_where_all_heads_would_be_vast(self, model, picture, monkeypatch):
        from vitral.explanation import page

        monkeypatch.setattr(page, "LARGEST", 3 * 3 * 17 * 16 - 1)
        made = explain(model, picture, interactive=True)
        assert made.rows.heads == []
        assert "All 3 heads of 3 blocks and 4 x 4 patches are too large for a page" in made.rows.note
        assert made.rows.largest[2, 0, 0].item() == pytest.approx(made.maps[0].max().item())
        one = explain(model, picture, head=-1, interactive=True)
        assert one.rows.heads == [2]
        assert one.rows.note.endswith("only head 2 is included.")
        assert one.rows.largest[2, 0, 0].item() == pytest.approx(one.maps[0].max().item())
        monkeypatch.setattr(page, "LARGEST", 3 * 3 * 17 * 16)
        assert explain(model, picture, interactive=True).rows.note == ""

    def test_it_is_packed(self, tmp_path, picture):
        made = explain(small(img_size=224), picture, interactive=True)
        sharp = replace(made, rows=replace(made.rows, shares=torch.where(made.rows.shares < 255, 0, 255).byte()))
        assert sharp.save(tmp_path / "x.html").stat().st_size < made.rows.shares.numel() / 4


class TestVerb:
    @pytest.fixture
    def run(self, tmp_path, model):
        from vitral import save_model

        model.labels = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]
        save_model(model, tmp_path / "run", "vitral")
        return tmp_path / "run"

    def test_a_picture_a_page_and_numbers(self, tmp_path, run, picture, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert main(["explain", str(run), str(picture)]) == 0
        assert (tmp_path / "picture-attention.png").exists()
        assert (
            main(["explain", str(run), str(picture), "--out", "p.html", "--method", "relevance", "--class", "fox"]) == 0
        )
        assert "fox" in (tmp_path / "p.html").read_text()
        capsys.readouterr()
        args = ["--method", "gradcam", "--class", "fox", "--score", "--json", "--out", str(tmp_path / "many")]
        assert main(["explain", str(run), str(picture), str(picture), *args]) == 0
        text = capsys.readouterr().out
        (first, second) = json.loads(text)
        assert first["grid"] == [4, 4]
        assert first["titles"] == ["Grad-CAM", "integrated gradients", "input gradients"]
        assert (first["class"], first["layer"], first["patch"], first["source"]) == ("fox", None, None, str(run))
        assert 0 < first["probability"] < 1
        assert len(text.splitlines()) == 2 + 2 * (2 + 18 + 2 + 3)  # a field a line, a map a line
        assert second["file"] == str(tmp_path / "many" / "picture-2-gradcam.png")
        for document in (first, second):
            assert Path(document["file"]).exists()
        assert main(["explain", str(run), str(picture), "--score", "--method", "rollout"]) == 0
        said = capsys.readouterr().out
        assert "insertion (more is better)" in said
        assert "rollout, mean of heads  " in said

    def test_block_head_and_patch_go_on_to_the_page(self, tmp_path, run, picture):
        out = tmp_path / "x.html"
        args = ["--layer", "1", "--head", "-1", "--patch", "50,33", "--out", str(out)]
        assert main(["explain", str(run), str(picture), *args]) == 0
        assert '"start": {"layer": 1, "head": 2, "query": 11, "style": "patches"}' in out.read_text()

    def test_folders_patterns_and_names(self, tmp_path, run, picture, capsys):
        folder = tmp_path / "in"
        folder.mkdir()
        Image.new("RGB", (90, 60)).save(folder / "a.png")
        Image.new("RGB", (64, 64)).save(folder / "a.jpg")
        assert main(["explain", str(run), str(folder), "--out", f"{tmp_path}/pages/{{}}-x.html"]) == 0
        assert sorted(p.name for p in (tmp_path / "pages").iterdir()) == ["a-2-x.html", "a-x.html"]
        said = capsys.readouterr().out.splitlines()
        assert "a.jpg" in said[0]
        assert "a.png (the middle " in said[1]
        assert " of 90 x 60): attention: block 2, from [CLS]; prediction: " in said[1]

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--patch", "3"], "--patch must be two integers X,Y, got '3'"),
            (
                ["--patch", "64,3"],
                "outside the prepared image of 64 x 64 pixels (of your image: the middle 58 x 58 of 64 x 64)",
            ),
            (["--layer", "9"], "layer must be a block from -3 to 2, got 9."),
            (["--head", "9"], "head must be a head from -3 to 2, got 9."),
            (["--method", "relevance", "--class", "10"], "class must be a number from 0 to 6, got 10."),
            (["--method", "relevance", "--class", "-1"], "class must be a number from 0 to 6, got -1."),
            (["--class", "fox"], "attention does not accept --class; it is for relevance, gradcam, occlusion."),
            (["--method", "rollout", "--patch", "3,3"], "rollout does not accept --patch; it is for attention."),
            (["--method", "positions", "--score"], "positions does not accept --score;"),
            (["--method", "merging", "--style", "smooth"], "merging does not accept --style;"),
            (["--method", "positions", "--out", "x.html"], "positions cannot be a page; write .png, .svg, .pdf, .jpg"),
            (["--out", "x.gif"], "x.gif should end in .png, .svg, .pdf, .jpg or .html."),
        ],
    )
    def test_mistakes(self, run, picture, capsys, args, message):
        assert main(["explain", str(run), str(picture), *args]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert message in said

    def test_nothing_is_overwritten_and_nothing_begun_in_vain(self, tmp_path, picture, capsys):
        """The model does not even exist: all of this is found out before it is loaded."""
        other = tmp_path / "other.png"
        other.write_bytes(picture.read_bytes())
        for args, message in (
            ([picture, other, "--out", "x.png"], "--out x.png is one file for 2 images; give a folder, or a name with"),
            ([picture, other, tmp_path / "missing.png"], "missing.png does not exist."),
            ([picture, "--out", picture], "is one of the images; give another name"),
            ([picture, "--out", "x.gif"], "x.gif should end in"),
            ([], "no images are named"),
        ):
            assert main(["explain", "nowhere", *map(str, args)]) == 2
            assert message in capsys.readouterr().err
        assert sorted(p.name for p in tmp_path.iterdir()) == ["other.png", "picture.png"]

    def test_the_table_of_the_docs_says_what_each_method_takes(self):
        from typing import get_args, get_type_hints

        from vitral.cli.explain import FLAGS, Options
        from vitral.explanation.explain import METHODS, TAKES

        assert list(get_args(get_type_hints(Options)["method"])) == list(METHODS) == list(TAKES)
        docs = (Path(__file__).parents[2] / "docs" / "explain.md").read_text()
        for method, takes in TAKES.items():
            words = [
                FLAGS[name].removeprefix("--") for name in takes if name in FLAGS and name not in ("score", "style")
            ]
            (row,) = (line for line in docs.splitlines() if line.startswith(f"| `{method}` |"))
            assert row.split("|")[3].strip() == ", ".join(words)


class TestMerging:
    def test_the_map_is_the_models(self, model, picture):
        made = explain(model, picture, "merging", merge=3)
        x = normalize(Predictor(model).prepare(picture)[None], model.preprocess)
        assert made.titles == [f"after block {i}: {13 - 3 * i} of 16" for i in range(3)]
        assert torch.equal(made.maps.long().flatten(1), torch.cat(merged(model, 3).merge_maps(x)))
        assert made.caption.startswith("merging: 3 patches in each block; prediction:")
        assert explain(Predictor(model, merge=3), picture, "merging").caption == made.caption
        (one,) = explain(model, picture, "merging", merge=3, layer=1).maps
        assert torch.equal(one, made.maps[1])

    def test_half_of_the_patches_by_default(self, model, picture):
        made = explain(model, picture, "merging")
        assert made.maps[-1].max() + 1 == 8
        assert made.where == "50 % of the patches in all"

    def test_patches_of_one_token_have_their_mean_colour(self):
        image = torch.arange(3 * 4 * 6, dtype=torch.uint8).view(3, 4, 6)
        groups = torch.tensor([[0, 1, 0], [2, 2, 0]])
        colours = group_colours(image, groups, (2, 2))
        assert colours.shape == (2, 3, 3)
        for token in range(3):
            pixels = over_pixels(groups[None].flatten(1), (2, 3), (2, 2))[0] == token
            mean = image[:, pixels].float().mean(1) / 255
            torch.testing.assert_close(colours[groups == token], mean.expand(int((groups == token).sum()), -1))

    def test_a_picture_from_the_command_line(self, model, picture, tmp_path):
        save_model(model, tmp_path / "run", "vitral")
        out = tmp_path / "merged.png"
        assert main(["explain", str(tmp_path / "run"), str(picture), "--method", "merging", "--out", str(out)]) == 0
        with Image.open(out) as written:
            assert written.width > 500

    def test_refusals(self, model, picture):
        with pytest.raises(InputError, match="rollout does not support a model that merges tokens"):
            explain(Predictor(model, merge=3), picture, "rollout")
        with pytest.raises(InputError, match="attention does not accept merge; it is for merging"):
            explain(model, picture, merge=3)
