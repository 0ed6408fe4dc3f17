"""E_pos: where each token stands.

Every kind here answers one call, `positions(grid, table, like)`, with a table (1, R + N, D) for a grid of any size:
`R` rows for the prefix tokens (zero where a token has no position), then one row per patch, row by row.
The learned table itself belongs to the model, which keeps it under the name `pos_embed` of published files.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.config import PositionResize
from vitral.errors import InputError

Grid = tuple[int, int]


def sincos_1d(positions: Tensor, dim: int) -> Tensor:
    """PE(p)_2i = sin(p / 10000^(2i/D)), PE(p)_2i+1 = cos(p / 10000^(2i/D)): positions (n) -> (n, D).

    Computed in double precision: at large p the angle would lose its digits otherwise.
    """
    if dim % 2:
        raise InputError(f"a sinusoid needs an even number of dimensions, got {dim}.")
    i = torch.arange(dim // 2, dtype=torch.float64, device=positions.device)
    angle = positions.double()[:, None] / 10000 ** (2 * i / dim)  # (n, D/2)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def sincos_2d(grid: Grid, dim: int) -> Tensor:
    """PE(r, c) = [PE_1D(r) | PE_1D(c)]: the row in the first half of D, the column in the second. (N, D)."""
    if dim % 4:
        raise InputError(f"a 2D sinusoid needs a multiple of 4 dimensions, got {dim}.")
    G_h, G_w = grid
    row = sincos_1d(torch.arange(G_h), dim // 2)[:, None].expand(G_h, G_w, -1)
    column = sincos_1d(torch.arange(G_w), dim // 2)[None].expand(G_h, G_w, -1)
    return torch.cat([row, column], dim=-1).flatten(0, 1)


def resize_positions(table: Tensor, old: Grid, new: Grid, resize: PositionResize) -> Tensor:
    """Resize a table (1, R + N_old, D) to another grid; the R rows of prefix tokens stay as they are."""
    rows = table.shape[1] - old[0] * old[1]
    if rows < 0:
        raise InputError(f"a position table of {table.shape[1]} rows cannot hold a grid of {old[0]}x{old[1]}.")
    if old == new:
        return table
    grid = table[:, rows:].reshape(1, *old, -1).permute(0, 3, 1, 2)  # (1, D, G_h, G_w)
    grid = grid.to(torch.promote_types(grid.dtype, torch.float32))
    # With an offset the reference implementations hand the ratio itself to the kernel, not the size it leads to.
    scale = tuple((n + resize.offset) / o for n, o in zip(new, old, strict=True)) if resize.offset else None
    grid = F.interpolate(
        grid,
        size=None if scale else new,
        scale_factor=scale,  # type: ignore[arg-type]
        mode=resize.mode.removesuffix("_corners"),
        align_corners=resize.mode.endswith("_corners"),
        antialias=resize.antialias,
    )
    assert tuple(grid.shape[2:]) == tuple(new), f"resized to {tuple(grid.shape[2:])}, wanted {new}"
    return torch.cat([table[:, :rows], grid.flatten(2).transpose(1, 2).to(table.dtype)], dim=1)


def resize_matrix(old: int, new: int, resize: PositionResize, offset: Tensor) -> Tensor:
    """The same resize along one axis as a matrix (new, old), made by plain operations whatever `new` is.

    W_ij = k((j - x_i) / a), where x_i is the place of new cell i among the old ones, a how far the filter is widened
    against aliasing (1 without), and k the cubic or linear kernel. What would fall beside the old cells is counted to
    the outermost ones, or with antialiasing left out, and the rest made to sum to 1.
    """
    cells = torch.ones(new, device=offset.device)
    n, i = cells.sum(), cells.cumsum(0) - 1
    if resize.mode.endswith("_corners"):
        x = i * ((old - 1) / (n - 1).clamp(min=1))
        a = torch.ones_like(n)
    else:
        scale = old / (n + offset)
        x = (i + 0.5) * scale - 0.5
        a = scale.clamp(min=1) if resize.antialias else torch.ones_like(n)
    reach = old if resize.antialias else 2  # the most that a kernel reaches beyond the ends
    j = torch.arange(-reach, old + reach, device=offset.device)
    cubic = resize.mode.startswith("bicubic")
    t = ((j - x[:, None]) / a).abs()  # (new, old + 2 reach)
    W = _cubic(t, -0.5 if resize.antialias else -0.75) if cubic else (1 - t).clamp(min=0)
    if resize.antialias:
        W = W[:, reach : old + reach]
        return W / W.sum(1, keepdim=True)
    return W @ (j.clamp(0, old - 1)[:, None] == torch.arange(old, device=offset.device)).to(W.dtype)


def _cubic(t: Tensor, a: float) -> Tensor:
    """Keys' cubic kernel of |t|; `a` is its slope at 1."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((t - 5) * t + 8) * t * a - 4 * a
    return torch.where(t <= 1, near, torch.where(t < 2, far, torch.zeros_like(t)))


def insert_rows(table: Tensor, after: int, rows: int) -> Tensor:
    """Insert `rows` zero rows, for tokens without a position, behind the first `after` rows."""
    if rows == 0:
        return table
    return torch.cat([table[:, :after], table.new_zeros(1, rows, table.shape[2]), table[:, after:]], dim=1)


class NoPositions(nn.Module):
    """E_pos = 0: the model sees a set of patches."""

    def forward(self, grid: Grid, table: None, like: Tensor) -> Tensor:
        """Return a single zero row, which broadcasts over every token."""
        return like.new_zeros(1, 1, 1)


class SinusoidalPositions(nn.Module):
    """Fixed sinusoids, computed for whatever grid is asked.

    Over the sequence (`two_d` off) a [CLS] row, if wanted, is position 0 and the patches follow from 1; over rows and
    columns [CLS] has no place, so its row is zero.
    """

    def __init__(self, dim: int, prefix: int, rows: int, two_d: bool) -> None:
        super().__init__()
        self.dim, self.prefix, self.rows, self.two_d = dim, prefix, rows, two_d
        self._cache = GridCache()

    def forward(self, grid: Grid, table: None, like: Tensor) -> Tensor:
        """Return (1, R + N, D) in the dtype and on the device of `like`."""
        return self._cache.get((grid, like.dtype, like.device), lambda: self._compute(grid).to(like))

    def _compute(self, grid: Grid) -> Tensor:
        if self.two_d:
            return insert_rows(sincos_2d(grid, self.dim)[None], 0, self.prefix)
        sequence = sincos_1d(torch.arange(self.rows + grid[0] * grid[1]), self.dim)[None]
        return insert_rows(sequence, self.rows, self.prefix - self.rows)


class LearnedPositions(nn.Module):
    """A learned table, resized when the image has another grid than the one it was made for.

    Resized tables are kept, as long as the table they came from has the same numbers; with gradients on, each call
    resizes anew so that they flow into the table.
    """

    def __init__(self, grid: Grid, prefix: int, rows: int, resize: PositionResize) -> None:
        super().__init__()
        self.grid, self.prefix, self.rows, self.resize = grid, prefix, rows, resize
        self._cache = GridCache()

    def forward(self, grid: Grid, table: Tensor, like: Tensor) -> Tensor:
        """(1, rows + N_old, D) -> (1, R + N, D)."""
        if grid == self.grid:
            return insert_rows(table, self.rows, self.prefix - self.rows)
        if torch.is_grad_enabled() and table.requires_grad:
            return self._compute(grid, table)
        return self._cache.get(grid, lambda: self._compute(grid, table.detach()), source=table)

    def _compute(self, grid: Grid, table: Tensor) -> Tensor:
        return insert_rows(resize_positions(table, self.grid, grid, self.resize), self.rows, self.prefix - self.rows)


class FreePositions(nn.Module):
    """The same as `LearnedPositions`, in operations that any exported file has, for a grid that is known when it runs.

    E'_pos = W_h E_pos W_w^T (`resize_matrix`).
    """

    def __init__(self, learned: LearnedPositions) -> None:
        super().__init__()
        self.learned = learned

    def forward(self, grid: Grid, table: Tensor, like: Tensor) -> Tensor:
        """(1, rows + N_old, D) -> (1, R + N, D)."""
        p, (old_h, old_w) = self.learned, self.learned.grid
        rows = table.shape[1] - old_h * old_w
        # An offset moves no table of the right size; most of torch's kernels leave an axis of the right size alone too.
        same = torch.stack([torch.ones(n, device=table.device).sum() == o for n, o in zip(grid, p.grid, strict=True)])
        each = p.resize.antialias or p.resize.mode == "bilinear"
        offsets = p.resize.offset * (~(same if each else same.all().expand(2))).to(table.dtype)
        W_h, W_w = (resize_matrix(p.grid[i], grid[i], p.resize, offsets[i]) for i in (0, 1))
        cells = table[0, rows:].reshape(old_h, -1)  # (G_h, G_w D)
        cells = (W_h @ cells).reshape(-1, old_w, table.shape[2])  # (G'_h, G_w, D)
        cells = (W_w @ cells).flatten(0, 1)  # (N, D)
        return insert_rows(torch.cat([table[:, :rows], cells[None]], dim=1), p.rows, p.prefix - p.rows)


class GridCache:
    """The tables of the last few grids, as long as the source they were made from has the same numbers.

    What is kept is replaced, never changed, so that threads may share it; and made outside inference mode, so that
    training may use it later. While tracing, and on devices where comparing would wait, nothing is kept.
    """

    LIMIT = 16

    def __init__(self) -> None:
        self._kept: tuple[Tensor | None, dict[object, Tensor]] = (None, {})

    def get(self, key: object, compute: Callable[[], Tensor], source: Tensor | None = None) -> Tensor:
        """Return the table of `key`, computing it if it is new, and forgetting the oldest beyond the limit."""
        if torch.compiler.is_compiling() or (source is not None and source.device.type != "cpu"):
            return compute()
        kept_source, tables = self._kept
        # Compared by value: an optimiser, an EMA or a loader may write into the table by a way that leaves no mark.
        if not _same(kept_source, source):
            kept_source, tables = None if source is None else source.detach().clone(), {}
        if key in tables:
            return tables[key]
        with torch.inference_mode(False), torch.no_grad():
            table = compute()
        self._kept = (kept_source, dict([*tables.items(), (key, table)][-self.LIMIT :]))
        return table


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
