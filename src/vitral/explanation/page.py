"""The page to play with: one file for a browser, with every attention row of a model for one image."""

import base64
import io
import json
import zlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitral.errors import InputError
from vitral.explanation.colours import TABLE, paint, scale_of
from vitral.models.vit import VisionTransformer
from vitral.weights.atomic import write_atomically

if TYPE_CHECKING:
    from vitral.explanation.explain import Explanation

LARGEST = 16 * 2**20
"""Weights that a page holds before heads are averaged."""


@dataclass(frozen=True)
class Rows:
    """Attention of [CLS], if there is one, and of every patch to the patches, in every block."""

    shares: Tensor
    """uint8 (L, h, queries, N): each row scaled so that its largest is 255."""
    largest: Tensor
    """float32 (L, h, queries): the largest weight of each row."""
    heads: list[int]
    """Which heads these are; none where there is only their mean."""
    note: str = ""
    """What was left out, if anything."""


def are_vast(model: VisionTransformer, grid: tuple[int, int]) -> bool:
    """Whether all rows of all heads are more than a page should hold."""
    N, config = grid[0] * grid[1], model.config
    return config.depth * config.num_heads * (N + (model.cls_token is not None)) * N > LARGEST


@torch.no_grad()
def all_rows(model: VisionTransformer, x: Tensor, head: int | None) -> Rows:
    """The rows of all heads for one image (1, C, H, W); where that would be vast, of one head, or their mean."""
    R, (G_h, G_w) = model.prefix_tokens, model.grid_of(x)
    L, h = model.config.depth, model.config.num_heads
    asked = torch.tensor([0] * (model.cls_token is not None) + list(range(R, R + G_h * G_w)))
    heads, note = list(range(h)), ""
    if are_vast(model, (G_h, G_w)) and h > 1:
        heads = [] if head is None else [head % h]
        left = (
            "their mean is here; of attention, --head N keeps one head" if head is None else f"head {heads[0]} is here"
        )
        note = f"All {h} heads of {L} blocks and {G_h} x {G_w} patches are too much for a page: only {left}."
    shares, largest = [], []
    for block, z in zip(model.blocks, model.states(model.embed_tokens(x)[0]), strict=False):
        rows = block.attention_rows(z, asked)[0, ..., R:]  # (h, queries, N)  # pyright: ignore
        rows = rows[heads] if heads else rows.mean(0, keepdim=True)
        top = rows.amax(-1)
        shares.append((255 * rows / top[..., None].clamp(min=1e-12)).round().to(torch.uint8).cpu())
        largest.append(top.float().cpu())
    return Rows(torch.stack(shares), torch.stack(largest), heads, note)


def save_page(e: "Explanation", path: Path) -> Path:
    """One file to open in a browser: hover a patch to see where it looks, choose block and head, play the blocks."""
    if e.rows is None:
        raise InputError("the page needs every attention row; make the explanation with interactive=True.")
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = pack_rows(e.rows)
    height, width = e.image.shape[1:]
    facts: dict[str, Any] = {
        "image": f"data:image/png;base64,{png_base64(e.image)}",
        "height": height,
        "width": width,
        "rows": height // e.patch[0],
        "columns": width // e.patch[1],
        "cls": packed["queries"] > e.rows.shares.shape[-1],
        "title": f"{e.method}: {e.about}" if e.about else e.method,
        "about": " · ".join(filter(None, (e.name, e.source, f"{width} x {height} pixels: {e.part}"))),
        "maps": [] if e.method == "attention" else _maps(e),
        "start": _start(e),
        "colours": TABLE.tolist(),
        **packed,
    }
    document = json.dumps(facts).replace("</", "<\\/")
    folder = files("vitral.explanation")
    page, maps = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "maps.js"))
    page = page.replace("{{MAPS}}", maps.replace("export ", "").rstrip())  # a file has no modules to import from
    write_atomically(path, page.replace("{{FACTS}}", document).encode())
    return path


def pack_rows(rows: Rows) -> dict[str, Any]:
    """Rows as plain values; the weights themselves compressed, in base64, for `unpackRows` of maps.js."""
    layers, _, queries, _ = rows.shares.shape
    return {
        "layers": layers,
        "heads": rows.heads,
        "queries": queries,
        "note": rows.note,
        "largest": _packed(rows.largest.numpy().astype("<f4")),
        "shares": _packed(rows.shares.numpy()),
    }


def png_base64(image: Tensor) -> str:
    """A picture, uint8 (C, H, W), as a PNG in base64."""
    return _base64(_png(image))


def _start(e: "Explanation") -> dict[str, Any]:
    """What the page shows first: block, head and patch that were asked for."""
    query = None
    if e.asked is not None:
        query = e.asked[1] // e.patch[0] * e.grid[1] + e.asked[0] // e.patch[1]
    return {"layer": e.layer, "head": e.head, "query": query}


def _maps(e: "Explanation") -> list[dict[str, Any]]:
    """Maps besides attention: name, colour of each patch, and what there is to say about it."""
    if e.colours:
        cells = (255 * e.maps.permute(1, 2, 0)).round().int().flatten(0, 1).tolist()
        return [{"name": e.titles[0], "cells": cells, "values": None, "range": "alike in colour, alike to the model"}]
    found = []
    for title, map_ in zip(e.titles, e.maps, strict=True):
        scale = scale_of(map_)
        values = [float(f"{v:.4g}") for v in map_.flatten().tolist()]
        cells = paint(map_).reshape(-1, 3).tolist()
        ends = {"bottom": scale.bottom, "top": scale.top}
        found.append({"name": title, "cells": cells, "values": values, "range": scale.text(), **ends})
    return found


def _png(image: Tensor) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(image.expand(3, -1, -1).permute(1, 2, 0).numpy())).save(buffer, "PNG")
    return buffer.getvalue()


def _packed(values: np.ndarray) -> str:
    return _base64(zlib.compress(np.ascontiguousarray(values).tobytes()))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
