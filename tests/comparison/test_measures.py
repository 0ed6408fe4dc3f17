"""Every measure against a truth that was planted, or a literal loop."""

import math
import re

import pytest
import torch
from torch import nn

from helpers import images, redraw
from vitral.comparison.distance import attention_distance, attention_distances, places_of, uniform_distance
from vitral.comparison.field import effective_field, field_reach, field_side, theoretical_fields
from vitral.comparison.growth import fitted_exponent, growth
from vitral.comparison.measure import measure
from vitral.comparison.robustness import add_noise, hide_pieces, robustness, shuffle_pieces
from vitral.comparison.translation import equivariance_error, layer_errors, shift, shift_effects
from vitral.config import SwinConfig
from vitral.models.cost import receptive_fields
from vitral.models.swin import SwinTransformer
from vitral.models.zoo import create_model, model_spec
from vitral.reporting.charts import Chart, spread_chart


def chance(seed=0):
    return torch.Generator().manual_seed(seed)


class TestField:
    def test_five_layers_of_kernel_three_see_eleven_pixels(self):
        torch.manual_seed(0)
        layers = [layer for _ in range(5) for layer in (nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())]
        field = effective_field(nn.Sequential(*layers), images(3, 2, 23, 29))
        seen = (field > 0).nonzero()
        assert (seen.max(0).values - seen.min(0).values + 1).tolist() == [11, 11]  # k + (k - 1)(L - 1)
        assert field_reach(field) == 11

    def test_strides_widen_what_comes_after_them(self):
        convolutions = nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Conv2d(3, 2, 3, dilation=2, padding=2))
        field = effective_field(convolutions, images(2, 1, 24, 24))
        seen = (field.sum(0) > 0).nonzero()[:, 0]
        assert int(seen.max() - seen.min() + 1) == 3 + 4 * 2  # 1 + (3 - 1) + (3 - 1) 2 dilation, of steps of 2 pixels

    def test_the_field_of_a_known_kernel_is_its_size(self):
        kernel = torch.tensor([[1.0, -2.0, 3.0], [0.0, 4.0, -5.0], [6.0, 7.0, 8.0]])
        layer = nn.Conv2d(1, 1, 3, padding=1, bias=False)
        layer.weight.data[0, 0] = kernel
        field = effective_field(layer, images(4, 1, 7, 9))
        assert torch.equal(field[2:5, 3:6], kernel.abs())
        assert float(field.sum()) == 36

    def test_it_sees_through_a_layer_norm(self):
        normed = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.GroupNorm(1, 5))
        assert float(effective_field(normed, images(2, 1, 9, 9)).sum()) > 0.1

    def test_the_square_that_holds_a_share(self):
        field = torch.zeros(9, 9)
        field[4, 4], field[3, 4], field[0, 0], field[8, 1] = 8.0, 0.9, 0.6, 0.5
        assert field_side(field, 0.79) == 1
        assert field_side(field, 0.85) == math.sqrt(2)
        assert field_side(field, 0.99) == 2
        assert field_side(torch.zeros(3, 3)) == 0
        assert field_reach(field) == 9
        assert field_reach(torch.zeros(3, 3)) == 0

    @pytest.mark.parametrize("name", ["vit_micro_patch8_32", "vit_micro_conv_patch8_32", "vit_pico_deepconv_patch8_32"])
    def test_the_theoretical_field_of_a_token_is_where_its_gradient_is(self, name):
        model = redraw(create_model(name, seed=0))
        field = effective_field(lambda x: model.patch_embed(x).mT.unflatten(2, (4, 4)), images(2, 3, 32, 32))
        seen = (field > 0).nonzero()
        theory = theoretical_fields(model.config, (2, 2))
        assert theory["kind"] == "token"
        first = [max(start, 0) for start in theory["start"]]
        last = [min(start + theory["side"], 32) - 1 for start in theory["start"]]
        assert (seen.min(0).values.tolist(), seen.max(0).values.tolist()) == (first, last)
        above, left = theoretical_fields(model.config, (1, 3))["start"]
        assert (above, left) == (theory["start"][0] - 8, theory["start"][1] + 8)


class TestTranslation:
    def test_a_shift_moves_pixels_and_repeats_the_edge(self):
        x = torch.arange(12.0).view(1, 1, 3, 4)
        assert shift(x, 1, 0)[0, 0].tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7]]
        assert shift(x, 0, -2)[0, 0].tolist() == [[2, 3, 3, 3], [6, 7, 7, 7], [10, 11, 11, 11]]
        assert torch.equal(shift(x, 0, 0), x)

    def test_a_convolution_moves_with_shifts_by_its_stride_away_from_the_edges(self):
        convolution, x = nn.Conv2d(3, 4, 3, stride=2, padding=1), images(2, 3, 20, 24)
        still = convolution(x)
        for cells in [(1, 0), (0, 1), (-1, 0), (2, -3)]:
            moved = convolution(shift(x, 2 * cells[0], 2 * cells[1]))
            assert equivariance_error(still, moved, cells, margin=1) < 1e-6
            assert equivariance_error(still, moved, cells) < 0.5  # the edges alone
        assert equivariance_error(still, convolution(shift(x, 1, 0)), (1, 0), margin=1) > 0.3  # half a stride

    def test_one_is_two_cells_at_random(self):
        assert equivariance_error(images(8, 5, 11, 13), images(8, 5, 11, 13, seed=1), (0, 1)) == pytest.approx(
            1, abs=0.05
        )

    def test_a_map_that_does_not_move_is_told(self):
        x = images(4, 2, 12, 12)
        fixed = images(1, 6, 6, 6).expand(4, -1, -1, -1)
        rows = layer_errors(lambda z: [nn.functional.avg_pool2d(z, 2), fixed, z, z.mean((2, 3), keepdim=True)], x)
        assert [(row.layer, row.stride, row.shift) for row in rows] == [(0, 2, 2), (1, 2, 2), (2, 1, 2)]
        assert rows[0].error < 1e-6
        assert rows[2].error < 1e-6
        assert rows[1].error == pytest.approx(1, abs=0.25)

    def test_layers_whose_strides_do_not_fit_are_moved_by_their_own(self):
        pools = [lambda z: nn.functional.avg_pool2d(z, 3), lambda z: nn.functional.avg_pool2d(z, 2)]
        rows = layer_errors(lambda z: [pool(z) for pool in pools], images(2, 1, 12, 12))
        assert [(row.stride, row.shift) for row in rows] == [(3, 3), (2, 2)]
        assert all(row.error < 1e-6 for row in rows)

    def test_effects_of_a_shift(self):
        """A model that reads the sum of the left half: it does not heed shifts down."""
        x = torch.rand(6, 1, 8, 8, generator=chance())
        x[:] = x[:, :, :1]  # every row alike

        def look(z):
            left = z[:, 0, :, :4].sum((1, 2))
            return torch.stack([left, torch.full_like(left, 16.0)], 1), left[:, None]

        targets = look(x)[0].argmax(1)
        rows = shift_effects(look, x, targets, [0, 3])
        assert (rows[0].accuracy, rows[0].same, rows[0].probability, rows[0].features) == (1, 1, 0, 0)
        assert rows[1].same < 1
        right = [look(shift(x, 0, by)) for by in (3, -3)]
        literal = sum(float((logits.argmax(1) == targets).double().mean()) for logits, _ in right)
        assert rows[1].accuracy == pytest.approx((2 + literal) / 4)
        apart = torch.pdist(look(x)[1].double()).mean()
        moved = sum(float((e - look(x)[1]).double().abs().mean()) for _, e in right) / 4
        assert rows[1].features == pytest.approx(moved / float(apart), rel=1e-5)


class TestDistance:
    def test_identity_looks_nowhere_else_and_uniform_as_a_literal_loop(self):
        grid, cell = (3, 5), (4.0, 2.0)
        places = places_of(grid, cell)
        assert places[0].tolist() == [2, 1]
        assert places[6].tolist() == [6, 3]  # the second row's second
        assert float(attention_distance(torch.eye(15), places, places)) == 0
        total = 0.0
        for i in range(15):
            for j in range(15):
                total += math.hypot((i // 5 - j // 5) * 4, (i % 5 - j % 5) * 2)
        assert float(attention_distance(torch.full((15, 15), 1 / 15), places, places)) == pytest.approx(total / 225)
        assert uniform_distance(grid, cell) == pytest.approx(total / 225)

    def test_attention_to_one_neighbour(self):
        rows = torch.zeros(2, 4, 4)
        rows[0, torch.arange(4), torch.tensor([1, 0, 3, 2])] = 1  # left and right
        rows[1, torch.arange(4), torch.tensor([2, 3, 0, 1])] = 0.25  # up and down; what is left out does not count
        places = places_of((2, 2), (7, 3))
        assert attention_distance(rows, places, places).tolist() == [3, 7]

    def test_a_vit_whose_queries_are_zero_looks_everywhere(self):
        model = create_model("vit_nano_patch2_8", seed=0).eval()
        redraw(model)
        D = model.config.embed_dim
        attn = model.blocks[1].attn
        attn.qkv.weight.data[:D], attn.qkv.bias.data[:D] = 0, 0
        layers = attention_distances(model, images(3, 1, 8, 8))
        assert [len(heads) for heads in layers] == [4, 4, 4, 4]
        assert layers[1] == pytest.approx([uniform_distance((4, 4), (2, 2))] * 4, rel=1e-5)
        assert layers[0] != pytest.approx(layers[1], rel=1e-3)

    def test_swin_looks_within_its_windows(self):
        """Uniform attention in windows of 2 cells: the mean distance in a square of four, and in what is left of it."""
        config = SwinConfig(img_size=24, patch_size=2, in_chans=1, num_classes=3, embed_dim=8, depths=(1, 1),
                            num_heads=(2, 2), window_size=2)  # fmt: skip
        model = SwinTransformer(config).eval()
        for stage, width in zip(model.layers, config.dims, strict=True):
            attn = stage.blocks[0].attn
            attn.qkv.weight.data[:width], attn.qkv.bias.data[:width] = 0, 0
            attn.relative_position_bias_table.data[:] = 0
        square = (0 + 1 + 1 + math.sqrt(2)) / 4
        found = attention_distances(model, images(2, 1, 24, 24))
        assert found[0] == pytest.approx([2 * square] * 2, rel=1e-5)
        assert found[1] == pytest.approx([4 * square] * 2, rel=1e-5)

    def test_a_cell_is_as_large_as_its_stride_also_where_the_image_ends_before_it(self):
        """28 pixels in patches of 4, then 8: 4 rows, of which the last has 4 pixels of the image."""
        config = SwinConfig(img_size=28, patch_size=4, in_chans=1, num_classes=3, embed_dim=8, depths=(1, 1),
                            num_heads=(2, 2), window_size=2)  # fmt: skip
        model = SwinTransformer(config).eval()
        for stage, width in zip(model.layers, config.dims, strict=True):
            attn = stage.blocks[0].attn
            attn.qkv.weight.data[:width], attn.qkv.bias.data[:width] = 0, 0
            attn.relative_position_bias_table.data[:] = 0
        square = (0 + 1 + 1 + math.sqrt(2)) / 4
        assert attention_distances(model, images(2, 1, 28, 28))[1] == pytest.approx([8 * square] * 2, rel=1e-5)

    def test_a_network_without_attention_has_no_distance(self):
        assert attention_distances(nn.Conv2d(1, 1, 1), images(1, 1, 4, 4)) == []


class TestRobustness:
    def test_noise_has_its_deviation(self):
        x = torch.full((4, 3, 32, 32), 0.5)
        assert float(add_noise(x, 0.1, chance()).std()) == pytest.approx(0.1, rel=0.03)
        assert torch.equal(add_noise(x, 0.0, chance()), x)
        assert float(add_noise(x, 9.0, chance()).max()) == 1

    def test_hidden_pieces_are_whole_and_as_many_as_said(self):
        x = torch.rand(5, 3, 12, 18, generator=chance())
        spoiled = hide_pieces(x, 0.25, 6, (2.0, 3.0, 4.0), chance(1))
        hidden = (spoiled == torch.tensor([2.0, 3.0, 4.0])[:, None, None]).all(1)  # (B, H, W)
        pieces = hidden.view(5, 6, 2, 6, 3).permute(0, 1, 3, 2, 4).flatten(3)
        assert torch.equal(pieces.all(3), pieces.any(3))
        assert pieces.all(3).sum((1, 2)).tolist() == [9] * 5
        assert not torch.equal(hidden[0], hidden[1])  # each image has its own
        assert torch.equal(spoiled[~hidden[:, None].expand_as(x)], x[~hidden[:, None].expand_as(x)])
        assert torch.equal(hide_pieces(x, 0.0, 6, (0, 0, 0), chance()), x)

    def test_shuffling_keeps_every_piece_whole(self):
        x = torch.arange(2 * 3 * 8 * 12.0).view(2, 3, 8, 12)
        spoiled = shuffle_pieces(x, 4, chance())

        def pieces(z):
            return {
                tuple(z[0, :, i : i + 2, j : j + 3].flatten().tolist()) for i in range(0, 8, 2) for j in range(0, 12, 3)
            }

        assert not torch.equal(spoiled, x)
        assert pieces(spoiled) == pieces(x)

    def test_a_judge_of_brightness_is_fooled_by_hiding_and_not_by_shuffling(self):
        x = torch.cat([torch.full((8, 1, 16, 16), 0.9), torch.full((8, 1, 16, 16), 0.6)])
        targets = torch.tensor([1] * 8 + [0] * 8)

        def answer(z):
            mean = z.mean((1, 2, 3))
            return torch.stack([torch.full_like(mean, 0.75), mean], 1)

        found = robustness(answer, x, targets, (0.0,))
        assert [row["accuracy"] for row in found["shuffled"]] == [1, 1, 1, 1]
        assert found["hidden"][0] == {"strength": 0.0, "accuracy": 1}
        assert found["hidden"][3] == {"strength": 0.5, "accuracy": 0.5}
        assert found["noise"][0]["accuracy"] == 1


class TestGrowth:
    def test_exponents_of_known_powers(self):
        x = [1.0, 3.0, 10.0, 50.0]
        assert fitted_exponent(x, [7 * value**1.5 for value in x]) == pytest.approx(1.5)
        assert fitted_exponent(x, [2.0] * 4) == pytest.approx(0)

    def test_attention_of_a_vit_is_quadratic_and_the_whole_between(self):
        found = growth(model_spec("vit_micro_patch8_32").config, (4, 8, 16, 32))
        assert [row["side"] for row in found["rows"]] == [128, 256, 512, 1024]
        assert found["exponents"]["attention"] == pytest.approx(2, abs=0.01)  # not exactly: [CLS] is a token too
        assert 1 < found["exponents"]["macs"] < 2


def test_everything_at_once_of_a_small_vit():
    model = create_model("vit_nano_conv_patch2_8", seed=0).eval()
    redraw(model)
    pixels, targets = torch.rand(9, 1, 8, 8, generator=chance()), torch.arange(9)
    found = measure(model, pixels, targets).found
    said = model((pixels - 0.5) / 0.5).argmax(1)
    accuracy = float((said == targets).double().mean())
    assert [rows[0]["accuracy"] for rows in found["robustness"].values()] == [accuracy] * 3
    assert found["shifts"][0]["accuracy"] == accuracy
    assert [row["pixels"] for row in found["shifts"]] == [0, 1, 2]
    assert [row["layer"] for row in found["equivariance"]] == [0, 1, 2, 3]
    assert len(found["attention_distance"]) == 4
    assert found["field"]["cells"] == [4, 4]
    assert found["field"]["reach"] == 8  # attention sees the whole image
    assert found["field"]["theoretical"]["side"] == 5  # two convolutions of 3, the stride in the second
    assert 0 < found["field"]["effective"] <= 8


def test_everything_at_once_of_a_small_cnn():
    model = redraw(create_model("resnet8_8", seed=0))
    found = measure(model, torch.rand(9, 1, 8, 8, generator=chance()), torch.arange(9)).found
    assert found["attention_distance"] == []
    assert found["field"]["theoretical"]["kind"] == "cell"
    assert found["field"]["theoretical"]["side"] == receptive_fields(model.config)[-1].size
    assert found["growth"]["exponents"] == {"macs": pytest.approx(1, abs=0.01)}
    assert [row["stride"] for row in found["equivariance"]] == [s for s, _ in model.config.map_strides if s < 8]


def test_a_model_keeps_its_colour_where_it_has_no_line():
    line = [(0.0, 1.0, 0.0), (1.0, 2.0, 0.5)]
    both, one = (spread_chart(Chart("t", {"a": first, "b": line}, "x", "y")) for first in (line, []))
    colour = re.compile(r'<polyline [^>]*stroke="([^"]+)"')
    assert colour.findall(one) == colour.findall(both)[1:]
    assert "</svg>a</span>" in both
    assert "</svg>a</span>" not in one
