"""Explanations as pictures: maps over the image, patch by patch and to the pixel.

Every map has its own scale, by the rule of `colours.py`, and its numbers below it. Images keep their aspect.
"""

import math
import textwrap
from pathlib import Path

import numpy as np
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from torch import Tensor

from vitral.errors import InputError
from vitral.explanation.colours import Scale, colormap, number, paint, scale_of
from vitral.explanation.explain import Explanation
from vitral.explanation.page import save_page
from vitral.nn.patches import patchify

PICTURES = (".png", ".svg", ".pdf", ".jpg")
MOST = 48
"""Maps that one figure shows at most."""
LARGEST_GRID = 7
"""Positions on a side that the grid of grids shows at most."""
SIDE = 2.4
"""Width of a panel in inches."""


def draw(e: Explanation) -> Figure:
    """The image, then every map laid over it; positions as a grid of grids; colours as they are."""
    if e.method == "positions":
        return _draw_grid_of_grids(e)
    maps = [e.maps] if e.colours else list(e.maps[:MOST])
    columns = columns_for(1 + len(maps))
    rows = math.ceil((1 + len(maps)) / columns)
    H, W = e.image.shape[1:]
    title = textwrap.fill(e.caption, max(40, int(columns * SIDE * 13)))
    height = rows * (SIDE * H / W + 0.7) + 0.18 * (1 + title.count("\n"))
    figure = Figure(figsize=(columns * SIDE, height), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for ax in axes:
        ax.set_axis_off()
    picture = as_picture(e.image)
    for i, ax in enumerate(axes[: 1 + len(maps)]):
        ax.imshow(picture)
        if i == 0:
            ax.set_title(f"image, {W} x {H} pixels", fontsize=9)
            _below(ax, e.part)
        elif e.colours:
            ax.imshow(e.maps.permute(1, 2, 0).numpy(), interpolation="nearest", extent=_extent(covered(e)))
            _within(ax, (H, W))
            ax.set_title(e.titles[0], fontsize=9)
            _below(ax, "alike in colour, alike to the model")
        elif e.method == "merging":
            _draw_groups(ax, e, maps[i - 1].long())
            ax.set_title(e.titles[i - 1], fontsize=9)
        else:
            overlay(ax, maps[i - 1], covered(e))
            _within(ax, (H, W))
            ax.set_title(e.titles[i - 1], fontsize=9, parse_math=False)
            _legend(ax, scale_of(maps[i - 1]))
        if e.asked is not None:
            _frame(ax, e)
    figure.suptitle(title, fontsize=10, parse_math=False)
    return figure


def columns_for(panels: int) -> int:
    """Columns that leave no panel alone in the last row, and the fewest places empty."""
    if panels <= 5:
        return panels
    choice = (4, 3, 5) if panels <= 12 else (4, 5, 6, 7)
    return min(choice, key=lambda columns: (panels % columns == 1, -panels % columns))


def overlay(ax: Axes, map_: Tensor, size: tuple[int, int], alpha: float = 0.72) -> None:
    """Lay a map over an image that is drawn at its pixels, each cell on its patch; all of them cover `size`."""
    scale = scale_of(map_)
    ax.imshow(
        map_.numpy(), cmap=colormap(scale.low < 0), vmin=scale.bottom, vmax=scale.top, alpha=alpha,
        interpolation="nearest", extent=_extent(size),
    )  # fmt: skip
    _within(ax, size)


def covered(e: Explanation) -> tuple[int, int]:
    """Height and width of all cells together: of the image, or a little more where they do not divide it."""
    return e.grid[0] * e.patch[0], e.grid[1] * e.patch[1]


def _within(ax: Axes, size: tuple[int, int]) -> None:
    """Show so many pixels and no more."""
    ax.set_xlim(-0.5, size[1] - 0.5)
    ax.set_ylim(size[0] - 0.5, -0.5)


def group_colours(image: Tensor, groups: Tensor, patch: tuple[int, int]) -> Tensor:
    """The mean colour of all patches that are in one token: uint8 (C, H, W), (G_h, G_w) -> (G_h, G_w, C) in 0..1."""
    pixels = patchify(image[None].float() / 255, patch)[0].unflatten(1, (-1, image.shape[0])).mean(1)  # (N, C)
    member = F.one_hot(groups.flatten()).float()  # (N, tokens)
    return (member @ ((member.mT @ pixels) / member.sum(0)[:, None])).unflatten(0, tuple(groups.shape))


def _draw_groups(ax: Axes, e: Explanation, groups: Tensor) -> None:
    """Patches of one token in their mean colour, and a line wherever another token begins."""
    size, (P_h, P_w) = (e.image.shape[1], e.image.shape[2]), e.patch
    colours = group_colours(e.image, groups, e.patch).expand(-1, -1, 3)
    ax.imshow(colours.numpy(), interpolation="nearest", extent=_extent(size))
    lines = []
    for row, column in (groups[:, 1:] != groups[:, :-1]).nonzero().tolist():  # a line on the right of a patch
        x, y = (column + 1) * P_w - 0.5, row * P_h - 0.5
        lines.append([(x, y), (x, y + P_h)])
    for row, column in (groups[1:] != groups[:-1]).nonzero().tolist():  # and below one
        x, y = column * P_w - 0.5, (row + 1) * P_h - 0.5
        lines.append([(x, y), (x + P_w, y)])
    ax.add_collection(LineCollection(lines, colors="black", linewidths=0.5))


def _extent(size: tuple[int, int]) -> tuple[float, float, float, float]:
    return -0.5, size[1] - 0.5, size[0] - 0.5, -0.5


def _below(ax: Axes, text: str, place: float = 0.5, line: int = 0) -> None:
    """Small words below a panel."""
    align = {0.0: "left", 1.0: "right"}.get(place, "center")
    down = (0, -9 - 9 * line)
    ax.annotate(
        text, (place, 0), down, xycoords="axes fraction", textcoords="offset points", ha=align, va="top", fontsize=7
    )


def _legend(ax: Axes, scale: Scale) -> None:
    """Below a panel its colours, from which number to which they go, and the range of the values."""
    strip = ax.inset_axes((0, -0.045, 1, 0.03))
    strip.imshow(np.linspace(0, 1, 256)[None], cmap=colormap(scale.low < 0), aspect="auto")
    strip.set_axis_off()
    _below(ax, number(scale.bottom), 0.0)
    _below(ax, number(scale.top), 1.0)
    _below(ax, scale.text(), line=1)


def _frame(ax: Axes, e: Explanation) -> None:
    """A thin frame round the patch that was asked, white on black to be seen on everything."""
    assert e.asked is not None
    P_h, P_w = e.patch
    corner = (e.asked[0] // P_w * P_w - 0.5, e.asked[1] // P_h * P_h - 0.5)
    for colour, width in (("black", 1.8), ("white", 0.8)):
        ax.add_patch(Rectangle(corner, P_w, P_h, fill=False, edgecolor=colour, linewidth=width))


def as_picture(image: Tensor) -> np.ndarray:
    """uint8 (C, H, W) -> (H, W, 3)."""
    return image.expand(3, -1, -1).permute(1, 2, 0).numpy()


def blended(image: Tensor, map_: Tensor, alpha: float = 0.55) -> Image.Image:
    """An image with one map laid over it, as a picture of at least 112 pixels a side."""
    H, W = image.shape[1:]
    factor = max(1, -(-112 // min(H, W)))
    photo = np.kron(as_picture(image), np.ones((factor, factor, 1), np.uint8)).astype(float)
    cells = paint(map_)
    rows = np.arange(H * factor) * cells.shape[0] // (H * factor)
    columns = np.arange(W * factor) * cells.shape[1] // (W * factor)
    return Image.fromarray(((1 - alpha) * photo + alpha * cells[rows][:, columns]).round().astype(np.uint8))


def _draw_grid_of_grids(e: Explanation) -> Figure:
    """One small map for each position, in its place; of a large grid an even choice of them."""
    G_h, G_w = e.grid
    chosen_rows, chosen_columns = (_evenly(count, LARGEST_GRID) for count in (G_h, G_w))
    n_h, n_w = len(chosen_rows), len(chosen_columns)
    figure = Figure(figsize=(min(8.0, 0.8 * n_w + 1.4), min(8.0, 0.8 * n_h + 0.8)), layout="constrained")
    gap = max(1, min(G_h, G_w) // 8)
    sheet = np.full((n_h * (G_h + gap) - gap, n_w * (G_w + gap) - gap), np.nan)
    for i, row in enumerate(chosen_rows):
        for k, column in enumerate(chosen_columns):
            top, left = i * (G_h + gap), k * (G_w + gap)
            sheet[top : top + G_h, left : left + G_w] = e.maps[row * G_w + column]
    ax = figure.subplots()
    shown = ax.imshow(sheet, cmap=colormap(True), vmin=-1, vmax=1, interpolation="nearest")
    for axis, count, side in ((ax.xaxis, chosen_columns, G_w), (ax.yaxis, chosen_rows, G_h)):
        middles = [(side + gap) * i + (side - 1) / 2 for i in range(len(count))]
        axis.set_ticks(middles, [str(place + 1) for place in count], fontsize=8)
    ax.set_xlabel("patch column")
    ax.set_ylabel("patch row")
    ax.set_title("cosine of each position with all others", fontsize=9)
    figure.colorbar(shown, ax=ax, shrink=0.8)
    return figure


def _evenly(count: int, most: int) -> list[int]:
    return [round(i * (count - 1) / (min(count, most) - 1)) for i in range(min(count, most))] if count > 1 else [0]


def check_suffix(path: Path) -> str:
    """The end of a name, if it is one that can be written."""
    suffix = path.suffix.lower()
    if suffix not in (*PICTURES, ".html"):
        raise InputError(f"{path} should end in {', '.join(PICTURES)} or .html.")
    return suffix


def save(e: Explanation, path: Path) -> Path:
    """Write the figure, or the page, as the end of the name says."""
    if check_suffix(path) == ".html":
        return save_page(e, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(e).savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.06)
    return path
