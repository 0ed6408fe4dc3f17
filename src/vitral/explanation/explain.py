"""`explain`: one call from a model and an image to maps that can be looked at, saved and scored."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vitral.data.transforms import normalize
from vitral.errors import InputError, unknown_name
from vitral.explanation import relevance
from vitral.explanation.attention import FUSIONS, Recorder, check_head, patch_token, to_maps
from vitral.explanation.faithfulness import Curves, curves
from vitral.explanation.positions import position_similarity
from vitral.explanation.tokens import principal_colours
from vitral.inference.predictor import ImageLike, Predictor
from vitral.models.vit import VisionTransformer

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Explanation:
    """Maps over the patches of one image, with what is needed to draw them."""

    method: str
    maps: Tensor
    """(n, G_h, G_w), one for each title; colours (3, G_h, G_w) where `colours` is set."""
    titles: list[str]
    image: Tensor
    """uint8 (C, H, W): what the model was shown."""
    patch: tuple[int, int]
    about: str = ""
    """What was explained, for the caption."""
    colours: bool = False
    rows: Tensor | None = None
    """Every attention row as uint8 (L, h, queries, N), scaled to its largest: what the interactive page shows."""
    scores: dict[str, float] = field(default_factory=dict)
    """Areas under the deletion and insertion curves, if they were asked for."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.maps.shape[-2], self.maps.shape[-1]

    def figure(self) -> "Figure":
        """The maps laid over the image, as a matplotlib figure."""
        from vitral.explanation.figures import draw

        return draw(self)

    def save(self, path: str | Path) -> Path:
        """Write a picture (.png, .svg, .pdf) or an interactive page (.html)."""
        from vitral.explanation.figures import save

        return save(self, Path(path))


@dataclass(frozen=True)
class Question:
    """What is asked of a model: the prepared image (1, C, H, W) and the options."""

    model: VisionTransformer
    x: Tensor
    layer: int | None = None
    head: int | None = None
    target: relevance.Target = None
    patch: tuple[int, int] | None = None

    @property
    def layers(self) -> list[int]:
        """The block asked for, or the last."""
        return [-1 if self.layer is None else self.layer]


Maps = tuple[Tensor, list[str]]


def _attention(q: Question) -> Maps:
    check_head(q.model, q.head)
    size = (q.x.shape[2], q.x.shape[3])
    with torch.no_grad():
        if q.patch is not None:
            token = patch_token(q.model, size, *q.patch)
            (rows,) = q.model.attention(q.x, q.layers, [token])
        elif q.model.cls_token is not None:
            (rows,) = q.model.attention(q.x, q.layers, "cls")
        else:
            rows = _pooled_rows(q)
    maps = to_maps(q.model, rows[0, :, 0], q.model.grid_of(q.x))
    if q.head is not None:
        return maps[q.head][None], [f"head {q.head % len(maps)}"]
    every = [f"head {i}" for i in range(len(maps))] if len(maps) > 1 else []
    merged = torch.stack([maps.mean(0), maps.amax(0)])
    return torch.cat([merged, maps] if every else [merged]), ["mean of heads", "max of heads", *every]


def _pooled_rows(q: Question) -> Tensor:
    """Models without [CLS]: what attention pooling reads, or else the mean over the queries of all patches."""
    with Recorder() as record:
        q.model(q.x)
    if len(record.rows) > q.model.config.depth:
        R = q.model.prefix_tokens
        rows = record.rows[-1]
        return torch.cat([rows.new_zeros(*rows.shape[:3], R), rows], -1)
    return q.model.attention(q.x, q.layers, "all")[0].mean(2, keepdim=True)


def _rollout(q: Question) -> Maps:
    maps = torch.cat([relevance.attention_rollout(q.model, q.x, fusion=fusion) for fusion in FUSIONS])
    return maps, [f"rollout, {fusion} of heads" for fusion in FUSIONS]


def _by(*methods: tuple[str, Callable[..., Tensor]]) -> Callable[[Question], Maps]:
    def answer(q: Question) -> Maps:
        return torch.cat([method(q.model, q.x, q.target) for _, method in methods]), [name for name, _ in methods]

    return answer


def _positions(q: Question) -> Maps:
    maps = position_similarity(q.model)
    rows, columns = q.model.config.grid
    return maps, [f"{i // columns},{i % columns}" for i in range(rows * columns)]


def _tokens(q: Question) -> Maps:
    layer = q.model._resolve_layers(q.layers)
    (features,) = q.model.intermediate(q.x, layer)
    return principal_colours(features.detach())[0], [f"principal components of block {layer[0]}"]


METHODS: dict[str, Callable[[Question], Maps]] = {
    "attention": _attention,
    "rollout": _rollout,
    "relevance": _by(("gradient x attention", relevance.attribution), ("gradient rollout", relevance.gradient_rollout)),
    "gradcam": _by(
        ("Grad-CAM", relevance.grad_cam),
        ("integrated gradients", relevance.integrated_gradients),
        ("input gradients", relevance.input_gradients),
    ),
    "occlusion": _by(("occlusion", relevance.occlusion)),
    "positions": _positions,
    "tokens": _tokens,
}


def explain(
    source: str | Path | VisionTransformer | Predictor,
    image: ImageLike,
    method: str = "attention",
    *,
    layer: int | None = None,
    head: int | None = None,
    target: relevance.Target | str = None,
    patch: tuple[int, int] | None = None,
    score: bool = False,
    interactive: bool = False,
) -> Explanation:
    """Show what a model looks at: attention, rollout, relevance, gradcam, occlusion, positions or tokens.

    `layer` and `head` choose for attention and tokens; `patch` (x, y in pixels of the prepared image) asks where that
    patch looks; `target` is a class (name or number), or a function of the output, for the methods with gradients.
    `score` measures how faithful the first map is; `interactive` gathers what the .html page needs.
    """
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    predictor = source if isinstance(source, Predictor) else Predictor(source)
    model = predictor.model
    pixels = predictor.prepare(image)
    x = normalize(pixels[None], predictor.preprocess).to(predictor.device)
    number = _class_number(predictor, target)
    with torch.inference_mode(False):
        question = Question(model, x, layer, head, number, patch)
        maps, titles = METHODS[method](question)
        scores = _scores(question, maps) if score else {}
        rows = _all_rows(model, x) if interactive else None
    about = _caption(predictor, x, method, number)
    colours = method == "tokens"
    return Explanation(method, maps.detach().cpu(), titles, pixels, model.config.patch, about, colours, rows, scores)


def _class_number(predictor: Predictor, target: Any) -> Any:
    """A class by its number; a function of the output stays what it is."""
    if isinstance(target, str):
        if target not in predictor.labels and not target.isdigit():
            raise unknown_name("class", target, predictor.labels)
        target = predictor.labels.index(target) if target in predictor.labels else int(target)
    classes = predictor.model.config.num_classes
    if isinstance(target, int) and not 0 <= target < classes:
        raise InputError(f"target must be a class from 0 to {classes - 1}, got {target}.")
    return target


def _caption(predictor: Predictor, x: Tensor, method: str, target: Any) -> str:
    if method in ("positions", "tokens") or not predictor.model.config.num_classes:
        return ""
    probabilities = (predictor.logits(x)[0] / predictor.temperature).softmax(0)
    wanted = int(probabilities.argmax()) if not isinstance(target, int) else target
    return f"{predictor.labels[wanted]} {100 * probabilities[wanted]:.1f} %"


def _scores(q: Question, maps: Tensor) -> dict[str, float]:
    """How faithful the first map is, beside input gradients and chance."""
    classes = q.model.config.num_classes and not callable(q.target)
    if not classes or maps.shape[-2:] != q.model.grid_of(q.x):
        raise InputError("a score needs a class to ask for, and a map over the patches of the image.")
    with torch.no_grad():
        target = q.model(q.x).argmax(1) if q.target is None else torch.as_tensor(q.target).view(1)
    chance = torch.rand(maps[:1].shape, generator=torch.Generator().manual_seed(0))
    rivals = {"map": maps[:1], "input gradients": relevance.input_gradients(q.model, q.x, target), "chance": chance}
    found: dict[str, float] = {}
    for name, each in rivals.items():
        measured: Curves = curves(q.model, q.x, each, target)
        found[f"{name}: deletion"] = float(measured.deletion_auc)
        found[f"{name}: insertion"] = float(measured.insertion_auc)
    return found


LARGEST_PAGE = 16 * 2**20


def _all_rows(model: VisionTransformer, x: Tensor) -> Tensor:
    """Attention of [CLS], if there is one, and of every patch, in every layer and head as uint8 (L, h, queries, N).

    Heads are averaged where it would be vast.
    """
    R, (G_h, G_w) = model.prefix_tokens, model.grid_of(x)
    asked = torch.tensor([0] * (model.cls_token is not None) + list(range(R, R + G_h * G_w)))
    vast = model.config.depth * model.config.num_heads * len(asked) * G_h * G_w > LARGEST_PAGE
    kept = []
    with torch.no_grad():
        for block, z in zip(model.blocks, model.states(model.embed_tokens(x)[0]), strict=False):
            rows = block.attention_rows(z, asked)[0, ..., R:]  # (h, queries, N)  # pyright: ignore
            rows = rows.mean(0, keepdim=True) if vast else rows
            kept.append((255 * rows / rows.amax(-1, keepdim=True).clamp(min=1e-12)).round().to(torch.uint8).cpu())
    return torch.stack(kept)
