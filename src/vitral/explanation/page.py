"""The interactive page: one HTML file with every attention row of a model for one image."""

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
from vitral.explanation.colours import TABLE, scale_of
from vitral.explanation.placement import DEFAULT_STYLE, Style, as_picture, check_style, place
from vitral.models.vit import VisionTransformer
from vitral.weights.atomic import write_atomically

if TYPE_CHECKING:
    from vitral.explanation.explain import Explanation

LARGEST = 16 * 2**20
"""Largest number of attention weights in a page; beyond it heads are averaged."""
PAGE = 1200
"""Longest side of the image in a page, in pixels."""
PHOTOGRAPH = 200
"""Pictures with a longer side are stored as JPEG in pages, which makes them several times smaller."""


@dataclass(frozen=True)
class Rows:
    """Attention of [CLS], if there is one, and of every patch to the patches, in every block."""

    shares: Tensor
    """uint8 (L, h, queries, N): each row scaled so that its largest is 255."""
    largest: Tensor
    """float32 (L, h, queries): the largest weight of each row."""
    heads: list[int]
    """Numbers of these heads; empty if there is only their mean."""
    note: str = ""
    """What was omitted, if anything."""


def are_vast(model: VisionTransformer, grid: tuple[int, int]) -> bool:
    """Whether the rows of all heads are too many for a page."""
    N, config = grid[0] * grid[1], model.config
    return config.depth * config.num_heads * (N + (model.cls_token is not None)) * N > LARGEST


@torch.no_grad()
def all_rows(model: VisionTransformer, x: Tensor, head: int | None) -> Rows:
    """The rows of all heads for one image (1, C, H, W); if they are too many, of one head, or their mean."""
    R, (G_h, G_w) = model.prefix_tokens, model.grid_of(x)
    L, h = model.config.depth, model.config.num_heads
    asked = torch.tensor([0] * (model.cls_token is not None) + list(range(R, R + G_h * G_w)))
    heads, note = list(range(h)), ""
    if are_vast(model, (G_h, G_w)) and h > 1:
        heads = [] if head is None else [head % h]
        kept = "their mean is included; --head N includes one head" if head is None else f"head {heads[0]} is included"
        note = f"All {h} heads of {L} blocks and {G_h} x {G_w} patches are too large for a page: only {kept}."
    shares, largest = [], []
    for block, z in zip(model.blocks, model.states(model.embed_tokens(x)[0]), strict=False):
        rows = block.attention_rows(z, asked)[0, ..., R:]  # (h, queries, N)  # pyright: ignore
        rows = rows[heads] if heads else rows.mean(0, keepdim=True)
        top = rows.amax(-1)
        shares.append((255 * rows / top[..., None].clamp(min=1e-12)).round().to(torch.uint8).cpu())
        largest.append(top.float().cpu())
    return Rows(torch.stack(shares), torch.stack(largest), heads, note)


def save_page(e: "Explanation", path: Path, style: Style = DEFAULT_STYLE) -> Path:
    """Write the page: hover over a patch to see its attention, choose block and head, play the blocks."""
    if e.rows is None:
        raise InputError("the page needs every attention row; create the explanation with interactive=True.")
    check_style(style)
    path.parent.mkdir(parents=True, exist_ok=True)
    packed = pack_rows(e.rows)
    p, (h, w) = place(e, PAGE), e.image.shape[1:]
    height, width = p.size
    facts: dict[str, Any] = {
        "image": picture_url(Image.fromarray(as_picture(p.picture))),
        "height": height,
        "width": width,
        "crop": p.crop,
        "cell": p.cell,
        "rows": h // e.patch[0],
        "columns": w // e.patch[1],
        "cls": packed["queries"] > e.rows.shares.shape[-1],
        "title": f"{e.method}: {e.about}" if e.about else e.method,
        "about": " · ".join(filter(None, (e.name, e.source, f"input of the model: {e.part}, at {w} x {h} pixels"))),
        "maps": [] if e.method == "attention" else _maps(e),
        "start": _start(e) | {"style": style},
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
    """Rows as plain values, with the weights compressed in base64, for `unpackRows` of maps.js."""
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
    """A picture, uint8 (C, H, W), as PNG in base64."""
    return _base64(_encoded(Image.fromarray(as_picture(image)), "PNG"))


def picture_url(image: Image.Image) -> str:
    """A picture as a data URL: PNG if it is small, otherwise JPEG."""
    if max(image.size) <= PHOTOGRAPH:
        return f"data:image/png;base64,{_base64(_encoded(image, 'PNG'))}"
    return f"data:image/jpeg;base64,{_base64(_encoded(image, 'JPEG', quality=88, subsampling=0))}"


def _encoded(image: Image.Image, kind: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _start(e: "Explanation") -> dict[str, Any]:
    """What the page shows first: the requested block, head and patch."""
    query = None
    if e.asked is not None:
        query = e.asked[1] // e.patch[0] * e.grid[1] + e.asked[0] // e.patch[1]
    return {"layer": e.layer, "head": e.head, "query": query}


def _maps(e: "Explanation") -> list[dict[str, Any]]:
    """Maps of other methods than attention: name, values and scale; or red, green and blue of each patch."""
    if e.colours:
        planes = (255 * e.maps).round().int().flatten(1).tolist()
        note = "patches of similar colour are similar to the model"
        return [{"name": e.titles[0], "planes": planes, "values": None, "range": note}]
    found = []
    for title, map_ in zip(e.titles, e.maps, strict=True):
        scale = scale_of(map_)
        values = [float(f"{v:.4g}") for v in map_.flatten().tolist()]
        ends = {"bottom": scale.bottom, "top": scale.top}
        found.append({"name": title, "values": values, "range": scale.text(), **ends})
    return found


def _packed(values: np.ndarray) -> str:
    return _base64(zlib.compress(np.ascontiguousarray(values).tobytes()))


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
