"""Explanations as figures: maps over the original image, aligned to the pixel.

Every map has its own scale, by the rule of `colours.py`, with its numbers below it. Each panel is a whole number of
pixels in size and position, so that a pixel of the original image is a pixel of the figure.
"""

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from vitral.errors import InputError
from vitral.explanation.colours import Scale, colormap, number, scale_of
from vitral.explanation.explain import Explanation
from vitral.explanation.page import save_page
from vitral.explanation.placement import DEFAULT_STYLE, DRAWN, Placement, Style, as_picture, check_style, place
from vitral.nn.patches import patchify

PICTURES = (".png", ".svg", ".pdf", ".jpg")
ENCODING: dict[str, Any] = {".png": {"pil_kwargs": {"compress_level": 4}}, ".jpg": {"pil_kwargs": {"quality": 92}}}
"""PNG in half the time of the default and at the same size; JPEG without visible artefacts."""
MOST = 48
"""Largest number of maps in one figure."""
LARGEST_GRID = 7
"""Largest number of positions along a side of the grid of grids."""
SIDE, TALLEST = 2.4, 4.8
"""Width of a panel, and its largest height, in inches."""
LEAST_DPI = 150
"""Small images are enlarged until the panels have this resolution."""
PIXELS = 8e6
"""Largest number of pixels of all panels of a figure."""
ABOVE, BELOW, GAP, TITLE = 15, 31, 8, 13
"""Points above a panel (its title), below it (its legend), between panels, and for each line of the figure's title."""


def draw(e: Explanation, style: Style = DEFAULT_STYLE, pixels: float = PIXELS) -> Figure:
    """The image, then every map over it; positions as a grid of grids; all panels have at most so many pixels."""
    check_style(style)
    if e.method == "positions":
        return _draw_grid_of_grids(e)
    maps = [e.maps] if e.colours else list(e.maps[:MOST])
    count = 1 + len(maps)
    columns = columns_for(count)
    least = math.ceil(TALLEST * LEAST_DPI), math.ceil(SIDE * LEAST_DPI)
    p = place(e, DRAWN, least, pixels / count)
    title = textwrap.fill(e.caption, max(40, int(columns * SIDE * 13)))
    figure, axes = _panels(p.size, columns, count, title)
    for i, ax in enumerate(axes):
        map_ = maps[i - 1]
        if i == 0:
            shown, (H, W), (h, w) = as_picture(p.picture), e.size, e.image.shape[1:]
            ax.set_title(f"image, {W} x {H} pixels", fontsize=9)
            _below(ax, e.part)
            _below(ax, f"input of the model: {w} x {h} pixels", line=1)
        elif e.colours:
            shown = p.cover((255 * p.spread(map_, style)).round().byte().permute(1, 2, 0).numpy())
            _below(ax, "patches of similar colour are similar to the model")
        elif e.method == "merging":
            shown = _draw_groups(ax, e, p, map_.long())
        else:
            shown = p.blend(map_, style)
            _legend(ax, scale_of(map_))
        if i > 0:
            ax.set_title(e.titles[i - 1], fontsize=9, parse_math=False)
        ax.imshow(shown, interpolation="nearest", extent=(0, p.size[1], p.size[0], 0), aspect="auto")
        if p.cropped:
            left, top, right, bottom = p.crop
            _outline(ax, (left, top), (right, bottom))
        if e.asked is not None:
            row, column = e.asked[1] // e.patch[0], e.asked[0] // e.patch[1]
            _outline(ax, p.corner(row, column), p.corner(row + 1, column + 1))
    return figure


def _panels(size: tuple[int, int], columns: int, count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with axes of exactly `size` pixels, row by row, at integer positions."""
    H, W = size
    dpi = math.ceil(max(W / SIDE, H / TALLEST))
    above, below, gap, line = (round(points * dpi / 72) for points in (ABOVE, BELOW, GAP, TITLE))
    across, down = math.ceil(SIDE * dpi) + gap, above + H + below + gap
    start = gap + line * (1 + title.count("\n"))
    width, height = gap + columns * across, start + math.ceil(count / columns) * down
    figure = Figure(figsize=(_inches(width, dpi), _inches(height, dpi)), dpi=dpi)
    axes = []
    for i in range(count):
        left = gap + i % columns * across + (across - gap - W) // 2
        bottom = height - (start + i // columns * down + above + H)
        ax = figure.add_axes((left / width, bottom / height, W / width, H / height))
        ax.set_axis_off()
        axes.append(ax)
    figure.suptitle(title, fontsize=10, parse_math=False, y=1 - gap / 2 / height, va="top")
    return figure, axes


def _inches(pixels: int, dpi: int) -> float:
    """A length that matplotlib turns into exactly so many pixels; it rounds down."""
    inches = pixels / dpi
    return inches if int(inches * dpi) == pixels else math.nextafter(inches, math.inf)


def columns_for(panels: int) -> int:
    """Number of columns without a single panel in the last row, and with the fewest empty places."""
    if panels <= 5:
        return panels
    choice = (4, 3, 5) if panels <= 12 else (4, 5, 6, 7)
    return min(choice, key=lambda columns: (panels % columns == 1, -panels % columns))


def overlay(ax: Axes, map_: Tensor, size: tuple[int, int], alpha: float = 0.72) -> None:
    """Draw a map over an image of `size` pixels in a figure of your own; its cells cover the image."""
    scale = scale_of(map_)
    ax.imshow(
        map_.numpy(), cmap=colormap(scale.low < 0), vmin=scale.bottom, vmax=scale.top, alpha=alpha,
        interpolation="nearest", extent=(-0.5, size[1] - 0.5, size[0] - 0.5, -0.5),
    )  # fmt: skip


def group_colours(image: Tensor, groups: Tensor, patch: tuple[int, int]) -> Tensor:
    """The mean colour of all patches of one token: uint8 (C, H, W), (G_h, G_w) -> (G_h, G_w, C) in 0..1."""
    pixels = patchify(image[None].float() / 255, patch)[0].unflatten(1, (-1, image.shape[0])).mean(1)  # (N, C)
    member = F.one_hot(groups.flatten()).float()  # (N, tokens)
    return (member @ ((member.mT @ pixels) / member.sum(0)[:, None])).unflatten(0, tuple(groups.shape))


def _draw_groups(ax: Axes, e: Explanation, p: Placement, groups: Tensor) -> np.ndarray:
    """Draw lines between tokens; returns the picture with the patches of each token in their mean colour."""
    beside = (groups[:, 1:] != groups[:, :-1]).nonzero().tolist()  # another token at the right of a patch
    under = (groups[1:] != groups[:-1]).nonzero().tolist()  # or below it
    lines = [[p.corner(row, column + 1), p.corner(row + 1, column + 1)] for row, column in beside]
    lines += [[p.corner(row + 1, column), p.corner(row + 1, column + 1)] for row, column in under]
    ax.add_collection(LineCollection(lines, colors="black", linewidths=0.5))
    colours = group_colours(e.image, groups, e.patch).expand(-1, -1, 3).permute(2, 0, 1)
    return p.cover((255 * p.spread(colours, "patches")).round().byte().permute(1, 2, 0).numpy())


def _below(ax: Axes, text: str, place: float = 0.5, line: int = 0) -> None:
    """Small text below a panel."""
    align = {0.0: "left", 1.0: "right"}.get(place, "center")
    down = (0, -10 - 9 * line)
    ax.annotate(
        text, (place, 0), down, xycoords="axes fraction", textcoords="offset points", ha=align, va="top", fontsize=7
    )


def _legend(ax: Axes, scale: Scale) -> None:
    """Below a panel: its colours, the numbers at their ends, and the range of the values."""
    figure = ax.get_figure()
    assert figure is not None
    point = figure.dpi / 72 / ax.bbox.height  # in heights of the panel
    strip = ax.inset_axes((0, -8 * point, 1, 5 * point))
    strip.imshow(np.linspace(0, 1, 256)[None], cmap=colormap(scale.low < 0), aspect="auto")
    strip.set_axis_off()
    _below(ax, number(scale.bottom), 0.0)
    _below(ax, number(scale.top), 1.0)
    _below(ax, scale.text(), line=1)


def _outline(ax: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """A thin rectangle between two corners (x, y), white on black to be visible on any colour."""
    for colour, width in (("black", 1.8), ("white", 0.8)):
        ax.add_patch(
            Rectangle(start, end[0] - start[0], end[1] - start[1], fill=False, edgecolor=colour, linewidth=width)
        )


def _draw_grid_of_grids(e: Explanation) -> Figure:
    """One small map for each position, in its place; of a large grid an evenly spaced selection."""
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
    """The suffix of a file name; raises unless it is one that can be written."""
    suffix = path.suffix.lower()
    if suffix not in (*PICTURES, ".html"):
        raise InputError(f"{path} should end in {', '.join(PICTURES)} or .html.")
    return suffix


def save(e: Explanation, path: Path, style: Style = DEFAULT_STYLE) -> Path:
    """Write the figure or the page, according to the suffix."""
    if check_suffix(path) == ".html":
        return save_page(e, path, style)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = draw(e, style)
    if e.method == "positions":
        figure.savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.06)
    else:
        figure.savefig(path, dpi="figure", **ENCODING.get(path.suffix.lower(), {}))
    return path
