"""Explanations as pictures: maps over the image, patch by patch and to the pixel, and a page to play with.

Colours come from cividis, which reads the same to colour-blind eyes; every map of a figure has its own scale.
Non-square images keep their aspect.
"""

import base64
import io
import json
import math
from importlib.resources import files
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from vitral.errors import InputError
from vitral.explanation.explain import Explanation
from vitral.weights.atomic import write_atomically

PICTURES = (".png", ".svg", ".pdf", ".jpg")
COLOURS = "cividis"
MOST = 48
"""Maps that one figure shows at most."""
LARGEST_GRID = 7
"""Positions on a side that the grid of grids shows at most."""


def draw(e: Explanation) -> Figure:
    """The image, then every map laid over it; positions as a grid of grids; colours as they are."""
    if e.colours:
        return _draw_colours(e)
    if e.method == "positions":
        return _draw_grid_of_grids(e)
    panels = min(len(e.maps), MOST) + 1
    columns = min(panels, 4 if panels <= 12 else 7)
    rows = math.ceil(panels / columns)
    H, W = e.image.shape[1:]
    side = 2.4
    figure = Figure(figsize=(columns * side, rows * (side * H / W + 0.32) + 0.3 * bool(e.about)), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for ax in axes:
        ax.set_axis_off()
    axes = list(figure.axes)
    picture = as_picture(e.image)
    axes[0].imshow(picture)
    axes[0].set_title(f"{W} x {H} pixels", fontsize=9)
    for ax, map_, title in zip(axes[1:], e.maps, e.titles, strict=False):
        ax.imshow(picture)
        overlay(ax, map_, (H, W))
        ax.set_title(title, fontsize=9)
    if e.about:
        figure.suptitle(f"{e.method}: {e.about}", fontsize=10)
    return figure


def overlay(ax: Axes, map_: Tensor, size: tuple[int, int], alpha: float = 0.72) -> None:
    """Lay a map over an image that is drawn at its pixels, each cell exactly on its patch."""
    H, W = size
    ax.imshow(map_.numpy(), cmap=COLOURS, alpha=alpha, interpolation="nearest", extent=(-0.5, W - 0.5, H - 0.5, -0.5))
    ax.set_xlim(-0.5, W - 0.5)
    ax.set_ylim(H - 0.5, -0.5)


def as_picture(image: Tensor) -> np.ndarray:
    """uint8 (C, H, W) -> (H, W, 3)."""
    return image.expand(3, -1, -1).permute(1, 2, 0).numpy() if image.shape[0] == 1 else image.permute(1, 2, 0).numpy()


def blended(image: Tensor, map_: Tensor, alpha: float = 0.55) -> Image.Image:
    """An image with one map laid over it, as a picture of at least 112 pixels a side."""
    H, W = image.shape[1:]
    factor = max(1, -(-112 // min(H, W)))
    photo = np.kron(as_picture(image), np.ones((factor, factor, 1), np.uint8)).astype(float)
    low, high = float(map_.min()), float(map_.max())
    cells = ((map_ - low) / max(high - low, 1e-12)).numpy()
    rows = np.arange(H * factor) * cells.shape[0] // (H * factor)
    columns = np.arange(W * factor) * cells.shape[1] // (W * factor)
    colours = 255 * matplotlib.colormaps[COLOURS](cells[rows][:, columns])[..., :3]
    return Image.fromarray(((1 - alpha) * photo + alpha * colours).round().astype(np.uint8))


def _draw_colours(e: Explanation) -> Figure:
    H, W = e.image.shape[1:]
    figure = Figure(figsize=(6, 3 * H / W + 0.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(as_picture(e.image))
    right.imshow(e.maps.permute(1, 2, 0).numpy(), interpolation="nearest", extent=(-0.5, W - 0.5, H - 0.5, -0.5))
    for ax, title in ((left, "image"), (right, e.titles[0])):
        ax.set_title(title, fontsize=9)
        ax.set_axis_off()
    return figure


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
    shown = ax.imshow(sheet, cmap=COLOURS, vmin=-1, vmax=1, interpolation="nearest")
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


def save(e: Explanation, path: Path) -> Path:
    """Write the figure, or the page, as the end of the name says."""
    suffix = path.suffix.lower()
    if suffix == ".html":
        return save_page(e, path)
    if suffix not in PICTURES:
        raise InputError(f"{path} should end in {', '.join(PICTURES)} or .html.")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(e).savefig(path, dpi=150, bbox_inches="tight", pad_inches=0.06)
    return path


def save_page(e: Explanation, path: Path) -> Path:
    """One file to open in a browser: hover a patch to see where it looks, choose layer and head, play the layers."""
    if e.rows is None:
        raise InputError("the page needs every attention row; make the explanation with interactive=True.")
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(as_picture(e.image))).save(buffer, "PNG")
    layers, heads, queries, _ = e.rows.shape
    height, width = e.image.shape[1:]
    map_ = e.maps[0] if not e.colours and e.method not in ("attention", "positions") else None
    facts = {
        "image": "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode(),
        "height": height,
        "width": width,
        "rows": height // e.patch[0],
        "columns": width // e.patch[1],
        "layers": layers,
        "heads": heads,
        "queries": queries,
        "cls": queries > e.rows.shape[3],
        "about": e.about,
        "map": None if map_ is None else _stretched(map_),
        "mapName": e.titles[0] if map_ is not None else "",
        "attention": base64.b64encode(e.rows.numpy().tobytes()).decode(),
        "colours": _colour_table(),
    }
    document = json.dumps(facts).replace("</", "<\\/")
    page = files("vitral.explanation").joinpath("page.html").read_text()
    write_atomically(path, page.replace("{{FACTS}}", document).encode())
    return path


def _stretched(map_: Tensor) -> list[int]:
    low, high = float(map_.min()), float(map_.max())
    return ((map_ - low) / max(high - low, 1e-12) * 255).round().int().flatten().tolist()


def _colour_table() -> list[list[int]]:
    return [[round(255 * v) for v in colour[:3]] for colour in matplotlib.colormaps[COLOURS](np.linspace(0, 1, 256))]
