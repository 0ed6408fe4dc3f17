import math

import numpy as np
import pytest
import torch
from scipy.ndimage import zoom

from helpers import difference, images
from vitral.config import PositionResize
from vitral.errors import ConfigError, InputError
from vitral.nn.positions import (
    FreePositions,
    GridCache,
    LearnedPositions,
    NoPositions,
    SinusoidalPositions,
    resize_positions,
    sincos_1d,
    sincos_2d,
)

MODES = ["bilinear", "bicubic", "bilinear_corners", "bicubic_corners"]


def how(mode):
    return PositionResize(mode=mode, antialias=not mode.endswith("_corners"))


def test_sincos_1d_golden():
    golden = torch.tensor([0.841471, 0.540302, 0.00999983, 0.99995], dtype=torch.float64)
    torch.testing.assert_close(sincos_1d(torch.tensor([1]), 4)[0], golden, rtol=0, atol=5e-7)


def test_sincos_1d_is_its_formula():
    table = sincos_1d(torch.arange(11), 6)
    for p in range(11):
        for i in range(3):
            angle = p / 10000 ** (2 * i / 6)
            assert table[p, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[p, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)


def test_sincos_2d_golden_similarities():
    table = sincos_2d((2, 2), 8)
    similarity = table @ table.T
    same_row_or_column, across = 2 + math.cos(1) + math.cos(0.01), 2 * (math.cos(1) + math.cos(0.01))
    expected = torch.full((4, 4), same_row_or_column, dtype=torch.float64)
    expected.fill_diagonal_(4.0)
    for i in range(4):
        expected[i, 3 - i] = across
    torch.testing.assert_close(similarity, expected)
    assert [round(v, 2) for v in (4.0, same_row_or_column, across)] == [4.00, 3.54, 3.08]


def test_sincos_2d_has_the_row_in_the_first_half_and_the_column_in_the_second():
    table = sincos_2d((3, 5), 12).view(3, 5, 12)
    for r in range(3):
        for c in range(5):
            torch.testing.assert_close(table[r, c, :6], sincos_1d(torch.tensor([r]), 6)[0])
            torch.testing.assert_close(table[r, c, 6:], sincos_1d(torch.tensor([c]), 6)[0])


def test_learned_golden():
    table = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [-0.1, 0.0, 0.1, 0.2]]])
    positions = LearnedPositions((1, 2), prefix=0, rows=0, resize=PositionResize())
    z = torch.tensor([[[1.0] * 4, [2.0] * 4]])
    expected = torch.tensor([[[1.1, 1.2, 1.3, 1.4], [1.9, 2.0, 2.1, 2.2]]])
    torch.testing.assert_close(z + positions((1, 2), table, z), expected)


def test_no_positions_add_nothing():
    z = images(2, 7, 3)
    assert torch.equal(z + NoPositions()((1, 7), None, z), z)


@pytest.mark.parametrize(("rows", "first"), [(0, 0), (1, 1)])
def test_sincos_1d_positions_count_on_from_the_class_token_if_it_has_a_row(rows, first):
    like = images(1, 1, 8)
    E_pos = SinusoidalPositions(8, prefix=3, rows=rows, two_d=False)((2, 5), None, like)
    sequence = sincos_1d(torch.arange(11), 8).float()
    assert E_pos.shape == (1, 3 + 10, 8)
    torch.testing.assert_close(E_pos[0, 3:], sequence[first : first + 10])
    torch.testing.assert_close(E_pos[0, :rows], sequence[:rows])
    assert not E_pos[0, rows:3].any()


def test_sincos_2d_positions_leave_the_prefix_at_zero():
    E_pos = SinusoidalPositions(8, prefix=3, rows=1, two_d=True)((2, 5), None, images(1, 1, 8))
    assert not E_pos[0, :3].any()
    torch.testing.assert_close(E_pos[0, 3:], sincos_2d((2, 5), 8).float())


def test_learned_positions_put_zero_rows_where_registers_stand():
    table = images(1, 1 + 6, 4)
    E_pos = LearnedPositions((2, 3), prefix=5, rows=1, resize=PositionResize())((2, 3), table, table)
    torch.testing.assert_close(E_pos[0, :1], table[0, :1])
    assert not E_pos[0, 1:5].any()
    torch.testing.assert_close(E_pos[0, 5:], table[0, 1:])


@pytest.mark.parametrize("mode", MODES)
def test_a_constant_table_stays_constant_and_prefix_rows_stay_as_they_are(mode):
    table = torch.cat([images(1, 2, 3), torch.full((1, 5 * 7, 3), 0.7)], 1)
    resized = resize_positions(table, (5, 7), (11, 4), how(mode))
    assert torch.equal(resized[:, :2], table[:, :2])
    torch.testing.assert_close(resized[:, 2:], torch.full((1, 44, 3), 0.7))


@pytest.mark.parametrize("mode", MODES)
def test_rows_and_columns_are_not_confused(mode):
    rows = torch.arange(5.0)[:, None].expand(5, 7).reshape(1, 35, 1)  # depends on the row alone
    resized = resize_positions(rows, (5, 7), (11, 4), how(mode)).view(11, 4)
    torch.testing.assert_close(resized, resized[:, :1].expand(11, 4))
    assert (resized[1:, 0] >= resized[:-1, 0] - 0.2).all()
    assert resized[-1, 0] > resized[0, 0] + 3


def test_corners_mode_is_scipy_zoom_of_order_1():
    table = images(1, 1 + 5 * 7, 3)
    ours = resize_positions(table, (5, 7), (13, 4), PositionResize(mode="bilinear_corners", antialias=False))
    grid = table[0, 1:].view(5, 7, 3).numpy()
    reference = zoom(grid, (13 / 5, 4 / 7, 1), order=1)
    np.testing.assert_allclose(ours[0, 1:].view(13, 4, 3).numpy(), reference, atol=1e-5)


def test_offset_hands_the_kernel_the_shifted_ratio():
    table = images(1, 6 * 6, 3)
    ours = resize_positions(table, (6, 6), (9, 4), PositionResize(antialias=False, offset=0.1))
    grid = table.view(1, 6, 6, 3).permute(0, 3, 1, 2)
    scale = ((9 + 0.1) / 6, (4 + 0.1) / 6)
    reference = torch.nn.functional.interpolate(grid, scale_factor=scale, mode="bicubic")
    torch.testing.assert_close(ours.view(9, 4, 3), reference[0].permute(1, 2, 0))
    plain = resize_positions(table, (6, 6), (9, 4), PositionResize(antialias=False))
    assert difference(ours, plain) > 1e-3


def literal_resize(values, new, antialias):
    """One axis by the definition: Keys' cubic kernel, widened by the ratio where it is to filter."""
    old = len(values)
    a, ratio = (-0.5, max(old / new, 1.0)) if antialias else (-0.75, 1.0)

    def kernel(t):
        t = abs(t)
        if t < 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

    out = []
    for i in range(new):
        centre = (i + 0.5) * old / new - 0.5
        if antialias:  # only what is there counts, and weights sum to 1
            near = [j for j in range(old) if abs(j - centre) < 2 * ratio]
            weights = [kernel((j - centre) / ratio) for j in near]
        else:  # the border goes on for ever
            near = [math.floor(centre) + k for k in (-1, 0, 1, 2)]
            weights = [kernel(j - centre) for j in near]
        total = sum(weights)
        out.append(sum(w / total * values[min(max(j, 0), old - 1)] for w, j in zip(weights, near, strict=True)))
    return out


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("new", [(3, 4), (11, 13), (9, 4)])
def test_bicubic_resize_is_its_definition(new, antialias):
    table = images(1, 7 * 5, 1, dtype=torch.float64)
    ours = resize_positions(table, (7, 5), new, PositionResize(antialias=antialias)).view(new)
    rows = [literal_resize(row, new[1], antialias) for row in table.view(7, 5).tolist()]
    columns = [literal_resize(list(column), new[0], antialias) for column in zip(*rows, strict=True)]
    torch.testing.assert_close(ours, torch.tensor(columns, dtype=torch.float64).T, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "resize",
    [
        *(PositionResize(mode=mode, antialias=antialias, offset=offset) for mode in ("bicubic", "bilinear")
          for antialias in (True, False) for offset in (0.0, 0.1)),
        *(PositionResize(mode=mode, antialias=False) for mode in ("bicubic_corners", "bilinear_corners")),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("old", [(5, 7), (14, 3), (1, 2)])
def test_positions_of_a_free_grid_are_those_of_the_kernels(resize, old):
    learned = LearnedPositions(old, prefix=3, rows=2, resize=resize)
    table = images(1, 2 + old[0] * old[1], 6)
    for new in [(5, 7), (5, 9), (2, 3), (1, 1), (14, 3), (23, 2), (37, 41)]:
        wanted = learned(new, table, table)
        assert difference(FreePositions(learned)(new, table, table), wanted) < 1e-5


def test_sinusoids_of_a_width_that_does_not_fit_are_errors():
    with pytest.raises(InputError, match="even number of dimensions, got 5"):
        sincos_1d(torch.arange(3), 5)
    with pytest.raises(InputError, match="multiple of 4 dimensions, got 6"):
        sincos_2d((2, 2), 6)


def test_antialias_matters_when_the_grid_shrinks():
    table = images(1, 8 * 8, 3)
    with_filter = resize_positions(table, (8, 8), (3, 3), PositionResize(antialias=True))
    without = resize_positions(table, (8, 8), (3, 3), PositionResize(antialias=False))
    assert difference(with_filter, without) > 0.1


def test_same_number_of_patches_in_another_shape_is_resized():
    table = images(1, 4 * 4, 3)
    assert difference(resize_positions(table, (4, 4), (2, 8), PositionResize()), table) > 0.1


def test_half_precision_tables_are_resized_in_single():
    table = images(1, 4 * 4, 3).half()
    resized = resize_positions(table, (4, 4), (3, 5), PositionResize())
    assert resized.dtype == torch.float16
    reference = resize_positions(table.float(), (4, 4), (3, 5), PositionResize())
    torch.testing.assert_close(resized, reference.half(), rtol=0, atol=0)


def test_a_table_too_short_for_its_grid_is_an_error():
    with pytest.raises(InputError, match="table of 5 rows cannot hold a grid of 2x3"):
        resize_positions(images(1, 5, 3), (2, 3), (4, 4), PositionResize())


def test_corners_with_antialias_is_refused():
    with pytest.raises(ConfigError, match="bicubic_corners takes neither antialias nor offset, got antialias=True"):
        PositionResize(mode="bicubic_corners", antialias=True)


class TestCache:
    def learned(self):
        table = torch.nn.Parameter(images(1, 12, 5))
        return LearnedPositions((3, 4), prefix=0, rows=0, resize=PositionResize()), table

    def test_a_resized_table_is_kept(self):
        positions, table = self.learned()
        with torch.no_grad():
            assert positions((5, 7), table, table) is positions((5, 7), table, table)

    @pytest.mark.parametrize("write", ["in place", "through .data", "new storage"])
    def test_it_is_dropped_when_the_table_changes(self, write):
        positions, table = self.learned()
        with torch.no_grad():
            before = positions((5, 7), table, table).clone()
            if write == "in place":
                table.mul_(2)
            elif write == "through .data":
                table.data.mul_(2)
            else:
                table.data = table.data * 2
            torch.testing.assert_close(positions((5, 7), table, table), 2 * before)

    def test_it_is_bypassed_under_gradients(self):
        positions, table = self.learned()
        with torch.no_grad():
            kept = positions((5, 7), table, table)
        fresh = positions((5, 7), table, table)
        assert fresh is not kept
        fresh.square().sum().backward()
        assert table.grad is not None
        assert table.grad.abs().min() > 0

    def test_it_follows_the_dtype_of_the_table(self):
        positions, table = self.learned()
        with torch.no_grad():
            positions((5, 7), table, table)
            assert positions((5, 7), table.double(), table).dtype == torch.float64

    def test_what_inference_mode_kept_can_be_trained_with(self):
        positions, table = self.learned()
        table.requires_grad_(False)
        with torch.inference_mode():
            positions((5, 7), table, table)
        scale = torch.ones(5, requires_grad=True)
        (positions((5, 7), table, table) * scale).sum().backward()
        assert scale.grad is not None

    def test_the_oldest_grids_are_forgotten(self):
        cache = GridCache()
        for i in range(GridCache.LIMIT + 3):
            cache.get(i, lambda: torch.zeros(1))
        kept = cache._kept[1]
        assert len(kept) == GridCache.LIMIT
        assert 0 not in kept
        assert GridCache.LIMIT + 2 in kept

    def test_threads_may_share_it(self):
        import sys
        from concurrent.futures import ThreadPoolExecutor

        positions, table = self.learned()
        other = torch.nn.Parameter(table.detach() * 2)

        def look(i):
            grid, source = (3 + i % 31, 5), (table, other)[i % 2]
            with torch.no_grad():
                return difference(positions(grid, source, source), positions._compute(grid, source))

        before = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        try:
            with ThreadPoolExecutor(8) as pool:
                assert max(pool.map(look, range(2000))) == 0
        finally:
            sys.setswitchinterval(before)

    def test_sinusoids_follow_dtype_and_grid(self):
        positions = SinusoidalPositions(8, prefix=1, rows=1, two_d=True)
        single, double = images(1, 1, 8), images(1, 1, 8, dtype=torch.float64)
        assert positions((2, 3), None, single).dtype == torch.float32
        assert positions((2, 3), None, double).dtype == torch.float64
        assert positions((4, 3), None, single).shape == (1, 13, 8)
