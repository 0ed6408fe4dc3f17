import copy
import math

import pytest
import torch
import torch.nn.functional as F

from helpers import difference, images, redraw
from vitral.config import SwinConfig
from vitral.errors import ConfigError, InputError
from vitral.models.init import blank
from vitral.models.swin import PatchMerging, SwinTransformer, WindowAttention, Windows, init_swin
from vitral.models.zoo import MODELS
from vitral.nn.patches import patchify

SMALL = {
    "img_size": (12, 18),
    "patch_size": (2, 3),
    "num_classes": 11,
    "embed_dim": 10,
    "depths": (2, 3),
    "num_heads": (2, 5),
    "window_size": 3,
    "mlp_ratio": 1.5,
}

# Rows and columns of the first map, where the window is 3.
SIZES = {
    "the window divides every map": (6, 12),
    "as many windows down as across": (6, 6),
    "one window": (3, 3),
    "the window divides no map": (7, 11),
    "odd maps": (5, 9),
    "smaller than the window": (2, 1),
    "smaller along one axis": (2, 13),
    "one token": (1, 1),
    "one more than the window": (4, 4),
}


def small(seed=0, **options):
    return redraw(SwinTransformer(SwinConfig(**(SMALL | options))), seed)


def pixels(rows=6, columns=6, B=2, **kwargs):
    return images(B, 3, 2 * rows, 3 * columns, **kwargs)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


# ---- the paper, written out with loops: no rolling, no padding of maps, no windows but by comparison ----


def LN(norm, t):
    centred = t - t.mean(-1, keepdim=True)
    return centred / (t.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt() * norm.weight + norm.bias


def MLP(mlp, t):
    t = t @ mlp.fc1.weight.T + mlp.fc1.bias
    return 0.5 * t * (1 + torch.erf(t / math.sqrt(2))) @ mlp.fc2.weight.T + mlp.fc2.bias


def same_window(a, b, side, M, shifted):
    """Whether two rows, or columns, of a map lie between the same cuts."""
    if side <= M:
        return True
    s = M // 2 if shifted else 0
    return math.floor((a - s) / M) == math.floor((b - s) / M)


def literal_rows(z, attn, M, shifted):
    """Softmax over all tokens of the map, where all but those of a token's window count nothing: (B, h, HW, HW)."""
    B, H, W, C = z.shape
    h = attn.num_heads
    d = C // h
    places = [(y, x) for y in range(H) for x in range(W)]
    table = attn.relative_position_bias_table
    Q, K, _ = (z.reshape(B, H * W, C) @ attn.qkv.weight.T + attn.qkv.bias).split(C, dim=-1)
    scores = torch.full((B, h, H * W, H * W), -math.inf)
    for i, (y, x) in enumerate(places):
        for j, (v, u) in enumerate(places):
            if same_window(y, v, H, M, shifted) and same_window(x, u, W, M, shifted):
                bias = table[(y - v + M - 1) * (2 * M - 1) + (x - u + M - 1)]  # (h)
                product = (Q[:, i] * K[:, j]).view(B, h, d).sum(-1)
                scores[:, :, i, j] = product / math.sqrt(d) + bias
    return scores.softmax(-1)


def literal_attention(z, attn, M, shifted):
    B, H, W, C = z.shape
    V = (z.reshape(B, H * W, C) @ attn.qkv.weight.T + attn.qkv.bias)[..., 2 * C :]
    V = V.view(B, H * W, attn.num_heads, -1).transpose(1, 2)
    heads = (literal_rows(z, attn, M, shifted) @ V).transpose(1, 2).reshape(B, H, W, C)
    return heads @ attn.proj.weight.T + attn.proj.bias


def literal_merging(z, merging):
    B, H, W, C = z.shape
    merged = []
    for y in range(0, H, 2):
        for x in range(0, W, 2):
            four = [
                z[:, v, u] if v < H and u < W else torch.zeros(B, C)
                for v, u in ((y, x), (y + 1, x), (y, x + 1), (y + 1, x + 1))
            ]
            merged.append(LN(merging.norm, torch.cat(four, -1)) @ merging.reduction.weight.T)
    return torch.stack(merged, 1).view(B, -(-H // 2), -(-W // 2), 2 * C)


def literal_maps(model, x):
    """The map after each stage."""
    P_h, P_w = model.config.patch
    H, W = x.shape[2] // P_h, x.shape[3] // P_w
    z = patchify(x, (P_h, P_w)) @ model.patch_embed.E + model.patch_embed.proj.bias
    z = LN(model.patch_embed.norm, z).view(len(x), H, W, -1)
    maps = []
    for stage, M in zip(model.layers, model.config.windows, strict=True):
        if maps:
            z = literal_merging(z, stage.downsample)
        for j, block in enumerate(stage.blocks):
            z = z + literal_attention(LN(block.norm1, z), block.attn, M, j % 2 == 1)
            z = z + MLP(block.mlp, LN(block.norm2, z))
        maps.append(z)
    return maps


class TestAgainstThePaperWrittenOut:
    @pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
    def test_the_whole_model_at_any_size(self, size):
        model = small()
        x = pixels(*size)
        first, last = literal_maps(model, x)
        ours = model.intermediate(x, norm=False)
        assert difference(ours[0], first.movedim(-1, 1)) < 1e-5
        assert difference(ours[1], last.movedim(-1, 1)) < 1e-5
        y = LN(model.norm, last).mean((1, 2))
        assert difference(model.embed(x), y) < 1e-5
        assert difference(model(x), y @ model.head.fc.weight.T + model.head.fc.bias) < 1e-5

    @pytest.mark.parametrize("shifted", [False, True])
    @pytest.mark.parametrize("M", [1, 2, 3, 4, 5])
    def test_attention_in_windows_is_masked_attention_over_the_map(self, M, shifted):
        """Windows of even and odd side, on a map that none of them but 1 and 5 divides."""
        attn = redraw(WindowAttention(6, 3, M, shifted, True, 0.0, 0.0))
        z = images(2, 5, 11, 6)
        assert difference(attn(z), literal_attention(z, attn, M, shifted)) < 1e-5

    def test_rows_are_those_of_masked_attention_over_the_map(self):
        for shifted in (False, True):
            attn = redraw(WindowAttention(6, 3, 3, shifted, True, 0.0, 0.0))
            z = images(2, 5, 7, 6)
            rows = attn.rows(z)  # (B, w, h, n, n)
            tokens = attn.windows_of(z).tokens(z.device)  # (w, n)
            whole = torch.zeros(2, 3, 35 + 1, 35 + 1)  # the last place gathers what is said of padding
            for window, at in enumerate(tokens.where(tokens >= 0, 35)):
                whole[:, :, at[:, None], at] += rows[:, window]
            assert difference(whole[:, :, :35, :35], literal_rows(z, attn, 3, shifted)) < 1e-5
            assert not whole[:, :, :35, 35].any()  # nobody looks at padding
            torch.testing.assert_close(rows.sum(-1), torch.ones(rows.shape[:-1]))

    def test_merging_in_the_published_order(self):
        for H, W in ((4, 6), (5, 3), (1, 1), (1, 2)):
            merging = redraw(PatchMerging(7, 1e-5))
            z = images(2, H, W, 7)
            assert difference(merging(z), literal_merging(z, merging)) < 1e-5

    def test_windows_of_another_side_in_each_stage(self):
        model = small(window_size=(4, 2))
        x = pixels(6, 9)
        assert model.layers[0].blocks[0].attn.relative_position_bias_table.shape == (49, 2)
        assert model.layers[1].blocks[2].attn.relative_position_bias_table.shape == (9, 5)
        assert difference(model.intermediate(x, [-1], norm=False)[0], literal_maps(model, x)[1].movedim(-1, 1)) < 1e-5


class TestWindows:
    @pytest.mark.parametrize("shifted", [False, True])
    @pytest.mark.parametrize("size", SIZES.values(), ids=SIZES.keys())
    def test_joining_undoes_splitting(self, size, shifted):
        windows = Windows.of(size, 3, shifted)
        z = images(2, *size, 5)
        assert torch.equal(windows.join(windows.split(z)), z)
        tokens = windows.tokens(z.device)
        assert sorted(tokens[tokens >= 0].tolist()) == list(range(size[0] * size[1]))
        split = windows.split(z).flatten(1, 2)
        for place, token in enumerate(tokens.flatten().tolist()):
            expected = z.flatten(1, 2)[:, token] if token >= 0 else torch.zeros(2, 5)
            assert torch.equal(split[:, place], expected)

    def test_the_shift_is_half_a_window_and_windows_at_the_edge_are_shared(self):
        windows = Windows.of((6, 6), 4, True)
        assert windows.shift == (2, 2)
        assert windows.tokens(torch.device("cpu"))[0].tolist() == [
            *[14, 15, 16, 17, 20, 21, 22, 23, 26, 27, 28, 29, 32, 33, 34, 35]
        ]
        even = Windows.of((8, 4), 2, True)
        assert even.tokens(torch.device("cpu"))[-1].tolist() == [31, 28, 3, 0]  # the four corners
        assert even.mask(torch.device("cpu"))[-1].tolist() == torch.eye(4, dtype=torch.bool).tolist()
        assert even.mask(torch.device("cpu"))[0].all()

    def test_no_mask_where_none_is_needed(self):
        assert Windows.of((6, 9), 3, False).mask(torch.device("cpu")) is None
        assert Windows.of((3, 3), 3, True).mask(torch.device("cpu")) is None
        assert Windows.of((6, 9), 3, True).mask(torch.device("cpu")) is not None
        assert Windows.of((6, 8), 3, False).mask(torch.device("cpu")) is not None

    def test_a_smaller_map_is_one_window_and_an_axis_of_one_window_is_not_shifted(self):
        assert Windows.of((2, 1), 3, True) == Windows((2, 1), (2, 1), (0, 0))
        assert Windows.of((3, 7), 3, True) == Windows((3, 7), (3, 3), (0, 1))


class TestLaws:
    def test_shapes_and_the_pyramid(self):
        model = small(depths=(1, 2, 1), num_heads=(1, 2, 5))
        x = pixels(7, 9)
        assert [tuple(m.shape) for m in model.intermediate(x)] == [(2, 10, 7, 9), (2, 20, 4, 5), (2, 40, 2, 3)]
        assert model.forward_features(x).shape == (2, 6, 40)
        assert model.grid_of(x) == (2, 3)
        assert model.embed(x).shape == (2, 40)
        assert model(x).shape == (2, 11)
        assert [tuple(r.shape) for r in model.attention(x, "all")] == [
            *[(2, 9, 1, 9, 9), (2, 4, 2, 9, 9), (2, 4, 2, 9, 9), (2, 1, 5, 6, 6)]
        ]

    def test_forward_is_features_then_head(self):
        model, x = small(), pixels()
        z = model.forward_features(x)
        assert difference(model.forward_head(z), model(x)) < 1e-6
        assert difference(model.head(model.embed(x)), model(x)) < 1e-6
        last = model.intermediate(x, [-1])[0]
        torch.testing.assert_close(last.flatten(2).mT, z)
        torch.testing.assert_close(model.intermediate(x, [1], as_grid=False)[0], z)
        assert difference(model.intermediate(x, [1], norm=False)[0], last) > 1e-3

    @pytest.mark.parametrize("size", [(6, 12), (7, 11)])
    def test_an_image_gives_the_same_alone_and_in_a_batch(self, size):
        model, x = small(), pixels(*size, B=3)
        alone = torch.cat([model(x[i : i + 1]) for i in range(3)])
        assert difference(model(x), alone) < 1e-5
        assert difference(model(x)[:1], model(x)[1:2]) > 1e-3  # the images do differ

    def test_every_part_reaches_the_output(self):
        """Each row of the tables of biases too, where windows are whole."""
        model, x = small(window_size=2), pixels(4, 8)
        before = model(x)
        for name, parameter in model.named_parameters():
            rows = range(len(parameter)) if name.endswith("bias_table") else [slice(None)]
            for row in rows:
                kept = parameter.clone()
                parameter[row] += 0.5 * images(*parameter[row].shape, seed=3)
                changed = difference(model(x), before)
                parameter.copy_(kept)
                assert changed > 1e-6, f"{name}[{row}] does nothing"

    def test_an_image_that_the_patch_does_not_divide_is_padded_with_zeros(self):
        model = small()
        x = images(2, 3, 11, 17)
        assert torch.equal(model(x), model(F.pad(x, (0, 1, 0, 1))))
        assert model.grid_of(x) == (3, 3)
        assert model.intermediate(x, [0])[0].shape == (2, 10, 6, 6)

    def test_without_shifts_windows_never_meet_and_with_them_they_do(self):
        """In one stage: what changes when a corner of the image changes."""
        options = {"depths": (3,), "num_heads": (2,), "img_size": (12, 18)}
        for shifted in (False, True):
            model = small(**options)
            for block in model.layers[0].blocks:
                block.attn.shifted = block.attn.shifted and shifted
            x = pixels(6, 6)
            other = x.clone()
            other[:, :, :2, :3] += 1  # the first token
            (a,), (b,) = model.intermediate(x, norm=False), model.intermediate(other, norm=False)
            reached = (a - b).abs().amax((0, 1)) > 1e-6
            assert reached[:3, :3].all()
            assert reached[3:, 3:].any() == shifted

    def test_the_cost_is_linear_in_the_pixels(self):
        """Scores are made for w windows of n by n, and w grows as the map does."""
        model = small()
        once, twice = (sum(r.numel() for r in model.attention(pixels(12, n), "all")) for n in (12, 24))
        assert twice == 2 * once

    def test_weights_survive_a_state_dict_and_hold_no_buffers(self):
        model = small()
        assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}
        twin = SwinTransformer(model.config).eval()
        twin.load_state_dict(model.state_dict())
        assert torch.equal(twin(pixels()), model(pixels()))

    def test_a_blank_model_filled_from_a_state_dict_is_whole(self):
        """Nothing that is computed is left behind on the meta device."""
        model = small()
        filled = blank(lambda: SwinTransformer(model.config))
        filled.load_state_dict(model.state_dict(), assign=True)
        for size in ((6, 6), (7, 11)):
            assert torch.equal(filled.eval()(pixels(*size)), model(pixels(*size)))

    def test_copies_are_independent_and_double_precision_works(self):
        model, x = small(), pixels(7, 11)
        twin = copy.deepcopy(model).double()
        assert difference(twin(x.double()).float(), model(x)) < 1e-5
        for parameter in twin.parameters():
            parameter.zero_()
        assert model(x).any()

    def test_autocast_runs_and_is_near(self):
        model, x = small(), pixels(7, 11)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = model(x)
        assert 0 < difference(half.float(), model(x)) < 0.1

    def test_gradients_reach_every_parameter_and_are_finite_beside_padding(self):
        model, x = small(), pixels(7, 11)
        with torch.enable_grad():
            model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad.isfinite().all(), name
            assert parameter.grad.any(), name

    def test_it_exports_with_any_batch_size(self):
        model = small()
        batch = torch.export.Dim("batch", min=1, max=64)
        exported = torch.export.export(model, (pixels(7, 11),), dynamic_shapes={"x": {0: batch}})
        x = pixels(7, 11, B=5)
        assert difference(exported.module()(x), model(x)) < 1e-5

    @pytest.mark.slow
    def test_it_compiles_to_the_same_numbers(self):
        model, x = small(depths=(1, 2)), pixels(7, 11)
        torch._dynamo.reset()
        assert difference(torch.compile(model)(x), model(x)) < 1e-5


class TestLookingInside:
    def test_attention_is_the_softmax_of_each_block_on_its_input(self):
        model, x = small(), pixels(7, 11)
        inputs = list(model.block_inputs(x))
        assert [tuple(z.shape[1:]) for _, z in inputs] == [(7, 11, 10)] * 2 + [(4, 6, 20)] * 3
        whole = model.attention(x, "all")
        for ours, (block, z) in zip(whole, inputs, strict=True):
            assert torch.equal(ours, block.attn.rows(block.norm1(z)))
        last, first = model.attention(x, [-1, 0])
        assert torch.equal(last, whole[4])
        assert torch.equal(first, whole[0])
        assert torch.equal(model.attention(x)[0], last)

    def test_window_tokens_say_what_the_rows_are_of(self):
        model, x = small(), pixels(7, 11)
        tokens = model.window_tokens(x, "all")
        for number, (block, z) in enumerate(model.block_inputs(x)):
            assert torch.equal(tokens[number], block.attn.windows_of(z).tokens(x.device))
        assert torch.equal(model.window_tokens(x)[0], tokens[-1])

    def test_rows_do_not_depend_on_the_kernel(self):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        model, x = small(), pixels(7, 11)
        before = model(x)
        with sdpa_kernel(SDPBackend.MATH):
            assert difference(model(x), before) < 1e-5

    @pytest.mark.parametrize("layers", [[2], [-3], [], "last", 1, None, 2.0, ["0"]])
    def test_a_stage_that_is_not_there_is_an_error(self, layers):
        with pytest.raises(InputError, match="layers must be 'all' or a list of stage numbers from -2 to 1, got"):
            small().intermediate(pixels(), layers)

    def test_a_block_that_is_not_there_is_an_error(self):
        for ask in (small().attention, small().window_tokens):
            with pytest.raises(InputError, match=r"a list of block numbers from -5 to 4, got \[5\]"):
                ask(pixels(), [5])


class TestTraining:
    def test_stochastic_depth_rises_through_the_stages(self):
        blocks = [block for stage in small(drop_path_rate=0.4).layers for block in stage.blocks]
        for part in ("drop_path1", "drop_path2"):
            assert [getattr(block, part).rate for block in blocks] == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])

    def test_a_dropped_path_leaves_the_residual_alone(self):
        model = small(drop_path_rate=0.5)
        block = model.layers[1].blocks[2].train()
        block.drop_path1.noise = block.drop_path2.noise = torch.tensor([0.4, 0.6])
        z = images(2, 4, 5, 20)
        out = block(z)
        assert torch.equal(out[0], z[0])
        assert difference(out[1], z[1]) > 1e-2

    @pytest.mark.parametrize("name", ["drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"])
    def test_dropout_and_stochastic_depth_act_in_training_only(self, name):
        model, x = small(**{name: 0.4}), pixels(7, 11, B=5)
        assert torch.equal(model(x), model(x))
        model.train()
        torch.manual_seed(0)
        assert difference(model(x), model(x)) > 1e-3

    def test_each_dropout_is_where_it_belongs(self):
        model = small(drop_rate=0.999999).train()
        assert torch.equal(model(pixels()), model.head.fc.bias.expand(2, -1))
        block = small(proj_drop_rate=0.999999).train().layers[0].blocks[0]
        assert not block.attn(images(2, 4, 5, 10)).any()
        assert not block.mlp(images(2, 4, 5, 10)).any()
        attn = small(attn_drop_rate=0.999999).train().layers[0].blocks[0].attn
        assert torch.equal(attn(images(2, 4, 5, 10)), attn.proj.bias.expand(2, 4, 5, -1))

    def test_fresh_weights_come_from_a_seed(self):
        a, b = SwinTransformer(SwinConfig(**SMALL)), blank(lambda: SwinTransformer(SwinConfig(**SMALL)))
        b.to_empty(device="cpu")
        init_swin(a, seed=3)
        init_swin(b, seed=3)
        for name, tensor in a.state_dict().items():
            assert torch.equal(tensor, b.state_dict()[name]), name
        table = a.layers[0].blocks[0].attn.relative_position_bias_table
        assert 0.01 < table.std() < 0.03
        assert not torch.equal(table, a.layers[0].blocks[1].attn.relative_position_bias_table)
        init_swin(b, seed=4, zero_head=True)
        assert not torch.equal(table, b.layers[0].blocks[0].attn.relative_position_bias_table)
        assert not b.head.fc.weight.any()


class TestConfig:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"depths": ()}, r"depths must be positive whole numbers, one for each stage, got \(\)"),
            ({"depths": 4}, "depths must be a list of integers, got 4"),
            ({"depths": (2, 0)}, r"depths must be positive whole numbers, one for each stage, got \(2, 0\)"),
            ({"num_heads": (2,)}, r"num_heads must be as many as depths \(2\), got \(2,\)"),
            ({"num_heads": (3, 5)}, "must divide the width of each stage, got 3 for 10 in stage 0"),
            ({"num_heads": (2, 3)}, "must divide the width of each stage, got 3 for 20 in stage 1"),
            ({"window_size": 0}, "window_size must be positive whole numbers, one for each stage, got 0"),
            ({"window_size": (7, 7, 7)}, r"window_size must be as many as depths \(2\), got \(7, 7, 7\)"),
            ({"mlp_ratio": 0.01}, r"embed_dim \* mlp_ratio must be at least 1, got 10 \* 0.01"),
            ({"act": "swiglu"}, "act must be one of gelu, gelu_tanh, quick_gelu, relu, got 'swiglu'"),
            ({"drop_path_rate": 1}, "drop_path_rate must be a number from 0 to below 1, got 1"),
        ],
    )
    def test_what_cannot_be_is_one_clear_sentence(self, options, message):
        with pytest.raises(ConfigError, match=message):
            SwinConfig(**(SMALL | options))

    def test_it_survives_a_dictionary(self):
        import json

        for window in (3, (3, 2)):
            config = SwinConfig(**(SMALL | {"window_size": window}))
            assert SwinConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    @pytest.mark.parametrize(
        ("name", "params"),
        [
            ("swin_tiny_patch4_window7_224", 28_288_354),
            ("swin_small_patch4_window7_224", 49_606_258),
            ("swin_base_patch4_window7_224", 87_768_224),
            ("swin_large_patch4_window7_224", 196_532_476),
            ("swin_base_patch4_window12_384", 87_903_584),
            ("swin_large_patch4_window12_384", 196_735_516),
        ],
    )
    def test_published_sizes(self, name, params):
        model = blank(lambda: SwinTransformer(MODELS[name].config))
        assert sum(p.numel() for p in model.parameters()) == params
        side = int(name.rpartition("_")[2])
        assert model.preprocess.img_size == (side, side)

    def test_a_head_of_no_classes_gives_the_embedding(self):
        model = small(num_classes=0)
        assert torch.equal(model(pixels()), model.embed(pixels()))

    def test_other_channels(self):
        model = small(in_chans=1)
        assert model(images(2, 1, 12, 18)).shape == (2, 11)
        assert len(model.preprocess.mean) == 1


class TestBadInput:
    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (images(2, 5, 6, 10), r"must have 3 channels, got 5 in shape \(2, 5, 6, 10\); pass in_chans=5"),
            (images(2, 6, 10, 3), r"must have 3 channels, got 6 in shape \(2, 6, 10, 3\); move the channels first"),
            (images(3, 6, 10), r"must have 4 axes \(B, C, H, W\), got 3 in shape \(3, 6, 10\); add a batch axis"),
            (torch.zeros(2, 3, 6, 10, dtype=torch.uint8), r"must be floating point, got torch\.uint8; scale with"),
            (torch.zeros(2, 3, 0, 10), r"must not be empty, got shape \(2, 3, 0, 10\)"),
            (torch.full((1, 3, 6, 10), math.nan), "must be finite, got 180 NaN or infinite values"),
            (images(1, 3, 6, 10).double(), r"must be torch\.float32 like the model, got torch\.float64"),
            ([[1.0]], r"must be a torch tensor \(B, C, H, W\), got list"),
        ],
    )
    def test_one_clear_sentence(self, x, message):
        for call in (small(), small().embed, small().intermediate, small().attention):
            with pytest.raises(InputError, match=message):
                call(x)
