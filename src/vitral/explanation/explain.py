"""`explain`: from a model and an image to maps of what the model uses, to draw, save and score."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vitral.data.images import AtLeast, read_image
from vitral.data.inputs import ImageInputs, ImageLike
from vitral.data.targets import View
from vitral.data.transforms import eval_view, normalize, resize
from vitral.errors import InputError, unknown_name
from vitral.explanation import relevance
from vitral.explanation.attention import FUSIONS, Recorder, patch_token, to_maps
from vitral.explanation.captions import Chosen, part_shown, prediction
from vitral.explanation.faithfulness import Curves, curves
from vitral.explanation.page import Rows, all_rows
from vitral.explanation.placement import DEFAULT_STYLE, DRAWN, Style, bounded
from vitral.explanation.positions import check_positions, position_similarity
from vitral.explanation.tokens import principal_colours
from vitral.explanation.windows import stage_of, window_maps
from vitral.explanation.writing import looks, words, writer_of
from vitral.inference.predictor import Predictor
from vitral.models.backbone import Backbone
from vitral.models.merge import MergingViT, merged
from vitral.models.swin import SwinTransformer
from vitral.models.vit import VisionTransformer
from vitral.tasks.classify import Classify
from vitral.tasks.regress import Regress

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Explanation:
    """Maps over the patches of one image, with everything needed to draw them."""

    method: str
    maps: Tensor
    """(n, G_h, G_w), one for each title; colours (3, G_h, G_w) if `colours` is set."""
    titles: list[str]
    image: Tensor
    """uint8 (C, H, W): the prepared image, the input of the model."""
    patch: tuple[int, int]
    """Height and width of a cell of the maps (a patch), in pixels of the prepared image."""
    size: tuple[int, int]
    """Height and width of the original image."""
    view: View
    """The part of the original that became the prepared image."""
    original: Tensor | None = None
    """uint8 (C, H, W): the original image, reduced to `DRAWN` pixels; None if it was not needed for drawing."""
    part: str = ""
    """That part in words."""
    about: str = ""
    """The class that was explained; or the model's answer, if the maps do not depend on a class."""
    where: str = ""
    """The block, and the token whose attention is shown."""
    layer: int | None = None
    head: int | None = None
    asked: tuple[int, int] | None = None
    """A pixel (x, y) of the patch that was requested, if one was."""
    label: str | None = None
    """Name of the class that was explained."""
    probability: float | None = None
    """Its probability."""
    answer: str = ""
    """The model's prediction for the image."""
    colours: bool = False
    rows: Rows | None = None
    """Every attention row, for the interactive page."""
    scores: dict[str, float] = field(default_factory=dict)
    """Areas under the deletion and insertion curves, if requested."""
    name: str = ""
    """Name of the image."""
    source: str = ""
    """Name of the model."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.maps.shape[-2], self.maps.shape[-1]

    @property
    def crop(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the model's crop, in pixels of the original; it may extend into padding."""
        (H, W), v = self.size, self.view
        return v.left * W, v.top * H, (v.left + v.width) * W, (v.top + v.height) * H

    @property
    def cell(self) -> tuple[float, float]:
        """Height and width of a cell of the maps, in pixels of the original; the first starts at the crop's corner."""
        left, top, right, bottom = self.crop
        H, W = self.image.shape[1:]
        return (bottom - top) * self.patch[0] / H, (right - left) * self.patch[1] / W

    @property
    def caption(self) -> str:
        """One line that describes the maps."""
        text = "; ".join(filter(None, (self.where, self.about)))
        return f"{self.method}: {text}" if text else self.method

    def to_dict(self) -> dict[str, Any]:
        """Options, results and maps as plain values, rounded to five digits."""
        return {
            "method": self.method,
            "about": self.caption,
            "answer": self.answer or None,
            "class": self.label,
            "probability": self.probability,
            "layer": self.layer,
            "head": self.head,
            "patch": self.asked,
            "part": self.part,
            "size": self.size,
            "crop": [round(edge, 3) for edge in self.crop],
            "cell": [round(side, 5) for side in self.cell],
            "grid": self.grid,
            "titles": self.titles,
            "scores": self.scores,
            "maps": [[[float(f"{v:.5g}") for v in row] for row in map_] for map_ in self.maps.tolist()],
        }

    def figure(self, style: Style = DEFAULT_STYLE) -> "Figure":
        """Draw the maps over the original image.

        Args:
            style: "patches" gives each patch one colour, "smooth" interpolates between the centres of patches.

        Returns:
            A matplotlib figure in which a pixel of the original is a pixel, as long as it does not become too large.
        """
        from vitral.explanation.figures import draw

        return draw(self, style)

    def save(self, path: str | Path, style: Style = DEFAULT_STYLE) -> Path:
        """Write a picture (.png, .svg, .pdf, .jpg) or an interactive page (.html), which opens in this style."""
        from vitral.explanation.figures import save

        return save(self, Path(path), style)


@dataclass(frozen=True)
class Shown:
    """An image as it is fed to a model, decoded once for any number of explanations."""

    pixels: Tensor
    """uint8 (C, H, W): the prepared image."""
    size: tuple[int, int]
    """Height and width of the original."""
    view: View
    """The part of the original that it is."""
    part: str
    """That part in words."""
    original: Tensor | None = None
    """uint8 (C, H, W): the original image, for drawing."""
    name: str = ""

    @classmethod
    def to(cls, predictor: Predictor, image: ImageLike, original: bool = True) -> "Shown":
        """Read an image for a model; `original` keeps it for drawing too."""
        if not isinstance(image, ImageLike):
            what = "None" if image is None else f"a {type(image).__name__}"
            raise InputError(f"explain takes one image (a path, bytes, a picture or an array), got {what}.")
        x, size = predictor.images.read_sized(image, whole=predictor.task.spatial)
        return cls(
            predictor.images.fit(x),
            size,
            eval_view(size, predictor.preprocess),
            part_shown(size, predictor.preprocess),
            _original(predictor.images, image, x, size) if original else None,
            str(image) if isinstance(image, str | Path) else "",
        )


def _original(images: ImageInputs, image: ImageLike, x: Tensor, size: tuple[int, int]) -> Tensor:
    """The image at its own resolution or at `DRAWN` pixels; a JPEG that was decoded smaller than that is read again."""
    drawn = bounded(size, DRAWN)
    if x.shape[1] < drawn[0] and isinstance(image, str | Path | bytes):
        x = read_image(image, images.mode, AtLeast(*drawn, even=True), images.limits)
    return resize(x, drawn, "bicubic")


@dataclass(frozen=True)
class Question:
    """The prepared image (1, C, H, W), the model and the options of a method."""

    backbone: Backbone
    x: Tensor
    layer: int | None = None
    head: int | None = None
    target: relevance.Target = None
    patch: tuple[int, int] | None = None
    track: relevance.Track = iter
    predictor: Predictor | None = None
    depth: int = 1
    """Number of blocks to choose from."""

    @property
    def model(self) -> VisionTransformer:
        """The backbone, for methods that need a ViT (`FITS`)."""
        assert isinstance(self.backbone, VisionTransformer)
        return self.backbone

    @property
    def block(self) -> int:
        """The requested block, or the last."""
        return (-1 if self.layer is None else self.layer) % self.depth

    @property
    def pooled(self) -> bool:
        """Whether to show the attention of the pooling: no [CLS], and neither a patch nor a block was requested."""
        if not isinstance(self.backbone, VisionTransformer):
            return False
        no_token = self.model.cls_token is None and self.patch is None
        return no_token and self.layer is None and self.model.config.global_pool == "map"


Maps = tuple[Tensor, list[str]]
MERGING_MAPS = 4
"""Number of blocks after which the tokens are shown."""
MERGE = 0.5
"""Default share of the patches that is merged."""


def _attention(q: Question) -> Maps:
    if isinstance(q.backbone, SwinTransformer):
        return _by_head(q, window_maps(q.backbone, q.x, q.block, q.patch))
    with torch.no_grad():
        if q.patch is not None:
            token = patch_token(q.model, (q.x.shape[2], q.x.shape[3]), *q.patch)
            (rows,) = q.model.attention(q.x, [q.block], [token])
        elif q.model.cls_token is not None:
            (rows,) = q.model.attention(q.x, [q.block], "cls")
        elif q.pooled:
            rows = _pooling_rows(q)
        else:
            rows = q.model.attention(q.x, [q.block], "all")[0].mean(2, keepdim=True)
    return _by_head(q, to_maps(q.model, rows[0, :, 0], q.model.grid_of(q.x)))


def _by_head(q: Question, maps: Tensor) -> Maps:
    """From maps of all heads (h, G_h, G_w): the requested one, or the mean, the maximum and each of them."""
    if q.head is not None:
        return maps[q.head][None], [f"head {q.head % len(maps)}"]
    every = [f"head {i}" for i in range(len(maps))] if len(maps) > 1 else []
    merged = torch.stack([maps.mean(0), maps.amax(0)])
    return torch.cat([merged, maps] if every else [merged]), ["mean of heads", "max of heads", *every]


def _pooling_rows(q: Question) -> Tensor:
    """The attention of the pooling, with zeros for prefix tokens, which it does not attend to."""
    with Recorder() as record:
        q.model(q.x)
    rows = record.rows[-1]
    return torch.cat([rows.new_zeros(*rows.shape[:3], q.model.prefix_tokens), rows], -1)


def _where(q: Question, method: str) -> str:
    """The block, and the token whose attention is shown."""
    if method not in ("attention", "tokens", "writing", "merging"):
        return ""
    if method == "merging":
        assert isinstance(q.model, MergingViT)
        amount = q.model.amount
        return f"{100 * amount:g} % of the patches in all" if 0 < amount < 1 else f"{amount:g} patches in each block"
    if method == "writing":
        return f"block {q.block} of the decoder"
    if method == "tokens":
        return f"{'block' if isinstance(q.backbone, VisionTransformer) else 'stage'} {q.block}"
    if isinstance(q.backbone, SwinTransformer):
        place = f"block {q.block}, in stage {stage_of(q.backbone, q.block)}"
        return place + (f", from the patch at {q.patch[0]},{q.patch[1]}" if q.patch else ", mean over all patches")
    if q.patch is not None:
        return f"block {q.block}, from the patch at {q.patch[0]},{q.patch[1]}"
    if q.model.cls_token is not None:
        return f"block {q.block}, from [CLS]"
    return "attention of the pooling" if q.pooled else f"block {q.block}, mean over all patches"


def _rollout(q: Question) -> Maps:
    maps = torch.cat([relevance.attention_rollout(q.model, q.x, fusion=fusion) for fusion in FUSIONS])
    return maps, [f"rollout, {fusion} of heads" for fusion in FUSIONS]


def _relevance(q: Question) -> Maps:
    maps = [method(q.model, q.x, q.target) for method in (relevance.attribution, relevance.gradient_rollout)]
    return torch.cat(maps), ["gradient x attention", "gradient rollout"]


def _gradcam(q: Question) -> Maps:
    maps = {
        "Grad-CAM": relevance.grad_cam(q.backbone, q.x, q.target),
        "input gradients": relevance.input_gradients(q.backbone, q.x, q.target),
    }
    if isinstance(q.backbone, VisionTransformer):
        along = relevance.integrated_gradients(q.model, q.x, q.target, track=q.track)
        maps = {"Grad-CAM": maps["Grad-CAM"], "integrated gradients": along, **maps}
    return torch.cat(list(maps.values())), list(maps)


def _occlusion(q: Question) -> Maps:
    return relevance.occlusion(q.backbone, q.x, q.target, track=q.track), ["occlusion"]


def _positions(q: Question) -> Maps:
    maps = position_similarity(q.model)
    rows, columns = q.model.config.grid
    return maps, [f"{i // columns},{i % columns}" for i in range(rows * columns)]


def _tokens(q: Question) -> Maps:
    (features,) = q.backbone.intermediate(q.x, [q.block])
    return principal_colours(features.detach())[0], [f"principal components of {_where(q, 'tokens')}"]


def _writing(q: Question) -> Maps:
    assert q.predictor is not None
    tokens, rows = looks(q.predictor, q.x, q.layer, q.head)
    titles = [f"{i}: {word!r}" for i, word in enumerate(words(writer_of(q.predictor)[1].tokenizer, tokens), 1)]
    return to_maps(q.model, rows, q.model.grid_of(q.x)), titles


def _merging(q: Question) -> Maps:
    """The index of the token that each patch belongs to, after a few blocks."""
    assert isinstance(q.model, MergingViT)
    maps = torch.cat(q.model.merge_maps(q.x)).unflatten(1, q.model.grid_of(q.x))  # (L, G_h, G_w)
    few = sorted({round((i + 1) * q.depth / MERGING_MAPS) - 1 for i in range(MERGING_MAPS)} - {-1})
    blocks = few if q.layer is None else [q.block]
    return maps[blocks].float(), [f"after block {i}: {int(maps[i].max()) + 1} of {maps[i].numel()}" for i in blocks]


METHODS: dict[str, Callable[[Question], Maps]] = {
    "attention": _attention,
    "rollout": _rollout,
    "relevance": _relevance,
    "gradcam": _gradcam,
    "occlusion": _occlusion,
    "positions": _positions,
    "tokens": _tokens,
    "writing": _writing,
    "merging": _merging,
}
TAKES: dict[str, tuple[str, ...]] = {
    "attention": ("layer", "head", "patch", "score", "interactive", "style"),
    "rollout": ("score", "interactive", "style"),
    "relevance": ("target", "score", "interactive", "style"),
    "gradcam": ("target", "score", "interactive", "style"),
    "occlusion": ("target", "score", "interactive", "style"),
    "positions": (),
    "tokens": ("layer", "interactive", "style"),
    "writing": ("layer", "head", "style"),
    "merging": ("layer", "merge"),
}
"""Options that each method accepts."""

FITS: dict[str, tuple[type[Backbone], ...]] = {
    "attention": (VisionTransformer, SwinTransformer),
    "rollout": (VisionTransformer,),
    "relevance": (VisionTransformer,),
    "gradcam": (Backbone,),
    "occlusion": (Backbone,),
    "positions": (VisionTransformer,),
    "tokens": (Backbone,),
    "writing": (VisionTransformer,),
    "merging": (VisionTransformer,),
}
"""Models that each method supports."""


def methods_of(predictor: Predictor) -> list[str]:
    """The methods that support this model; `explain` refuses the others."""

    def can(method: str) -> bool:
        try:
            check_can(method, predictor)
        except InputError:
            return False
        return True

    return [method for method in METHODS if can(method)]


def blocks_of(predictor: Predictor) -> int:
    """Number of blocks whose attention can be shown."""
    return _depth(predictor, "attention") if "attention" in methods_of(predictor) else 0


def looks_from_cls(predictor: Predictor) -> bool:
    """Whether attention is that of [CLS], unless a patch is requested."""
    return blocks_of(predictor) > 0 and getattr(predictor.backbone, "cls_token", None) is not None


def check_can(method: str, predictor: Predictor, target: Any = None) -> None:
    """Raise for a method that does not support this model."""
    model = predictor.backbone
    if not isinstance(model, FITS[method]):
        can = ", ".join(name for name, kinds in FITS.items() if isinstance(model, kinds))
        kind = type(model).__name__
        raise InputError(f"{method} needs a ViT, and the backbone of this model is a {kind}; use {can}.")
    if method == "merging":
        merged(predictor.model, MERGE)
    elif isinstance(predictor.model, MergingViT):
        raise InputError(f"{method} does not support a model that merges tokens; omit merge, or use merging.")
    if method == "writing":
        writer_of(predictor)
    if method == "positions":
        check_positions(predictor.vit)
    if "target" in TAKES[method]:
        _check_classes(predictor, target)


def _check_with(method: str, model: Backbone, interactive: bool, score: bool) -> None:
    """Raise for a page or a score that this model does not support."""
    kind = type(model).__name__
    if interactive and not isinstance(model, VisionTransformer):
        raise InputError(f"a page needs a ViT, and the backbone of this model is a {kind}; write a picture instead.")
    if score and method == "attention" and not isinstance(model, VisionTransformer):
        raise InputError(f"the attention of a {kind} cannot be scored; use gradcam or occlusion.")


def check_takes(method: str, options: Mapping[str, Any], words: Mapping[str, str]) -> None:
    """Raise if an option is set that the method does not accept; `words` are the user's names of the options."""
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    for name, value in options.items():
        if value is None or value is False or name in TAKES[method]:
            continue
        others = [other for other in METHODS if name in TAKES[other]]
        raise InputError(f"{method} does not accept {words.get(name, name)}; it is for {', '.join(others)}.")


def explain(
    source: str | os.PathLike[str] | Backbone | Predictor,
    image: ImageLike | Shown,
    method: str = "attention",
    *,
    layer: int | None = None,
    head: int | None = None,
    target: relevance.Target | str = None,
    patch: tuple[int, int] | None = None,
    score: bool = False,
    interactive: bool = False,
    track: relevance.Track = iter,
    merge: float | None = None,
) -> Explanation:
    """Explain what a model uses of an image.

    Args:
        source: A run directory, a file of weights, a model or a `Predictor`.
        image: A path, bytes, a PIL image or an array.
        method: attention, rollout, relevance, gradcam, occlusion, positions, tokens, writing or merging.
        layer: The block for attention, tokens, merging and writing (a block of the decoder); the last by default.
        head: One head of attention or writing, instead of all.
        target: The class (name or number) or a function of the output, for relevance, gradcam and occlusion.
        patch: Attention of the patch at this pixel (x, y) of the prepared image, instead of [CLS].
        score: Measure how faithful the first map is.
        interactive: Compute every attention row, which the .html page needs.
        track: Wraps the steps of slow methods, to show progress (such as tqdm).
        merge: How many patches merging merges; half of them by default.

    Returns:
        An `Explanation` with the maps, which `save` draws over the original image.

    Raises:
        InputError: The model does not support the method, or the method does not accept an option.

    Example:
        >>> vitral.explain("runs/digits", "seven.png", "relevance").save("relevance.png")  # doctest: +SKIP
    """
    given: dict[str, Any] = {"layer": layer, "head": head, "target": target, "patch": patch, "score": score}
    given |= {"interactive": interactive, "merge": merge}
    check_takes(method, given, {"score": "score=True", "interactive": "interactive=True"})
    predictor = source if isinstance(source, Predictor) else Predictor(source)
    check_can(method, predictor, target)
    _check_with(method, predictor.backbone, interactive, score)
    if method == "merging":
        predictor = _with_merging(predictor, merge)
    model = predictor.backbone
    depth = _depth(predictor, method)
    layer = _number("layer", "a block", layer, -depth, depth - 1)
    heads = _heads(predictor, method, layer)
    head = _number("head", "a head", head, -heads, heads - 1)
    by_class = "target" in TAKES[method]
    chosen = _target(predictor, target) if by_class else None
    if score and (callable(chosen) or not predictor.labels or not isinstance(predictor.task, Classify)):
        raise InputError("a score needs a class: a model that classifies, and no function as the target.")
    shown = image if isinstance(image, Shown) else Shown.to(predictor, image)
    size = (shown.pixels.shape[1], shown.pixels.shape[2])
    if patch is not None:
        patch = _pixel(patch, size, shown.part)
    x = normalize(shown.pixels[None], predictor.preprocess).to(predictor.device)
    with torch.inference_mode(False):
        question = Question(model, x, layer, head, _asked_of(predictor, chosen), patch, track, predictor, depth)
        maps, titles = METHODS[method](question)
        scores = _scores(question, titles[0], method, maps) if score else {}
        rows = all_rows(question.model, x, head) if interactive else None
    return Explanation(
        method, maps.detach().cpu(), titles, shown.pixels, _cell(model, size, maps), shown.size, shown.view,
        shown.original, shown.part,
        where=_where(question, method),
        layer=question.block if "layer" in TAKES[method] and not question.pooled and method != "merging" else layer,
        head=None if head is None else head % heads,
        asked=patch,
        **prediction(predictor, x, chosen, by_class) if method not in ("positions", "tokens") else {},
        colours=method == "tokens", rows=rows, scores=scores,
        name=shown.name,
        source=os.fspath(source) if isinstance(source, str | os.PathLike) else "",
    )  # fmt: skip


def _depth(predictor: Predictor, method: str) -> int:
    """Number of blocks to choose from; of feature maps for tokens."""
    if method == "writing":
        return writer_of(predictor)[0].config.decoder.depth
    model = predictor.backbone
    looks = isinstance(model, VisionTransformer | SwinTransformer) and method != "tokens"
    return model.config.depth if looks else _maps_of(model)  # type: ignore[union-attr]


def _maps_of(model: Backbone) -> int:
    return len(model.config.map_dims)


def _heads(predictor: Predictor, method: str, layer: int | None) -> int:
    """Number of heads of the requested block; 1 without heads."""
    if method == "writing":
        return writer_of(predictor)[0].config.decoder.num_heads
    model = predictor.backbone
    if isinstance(model, SwinTransformer):
        return model.config.num_heads[stage_of(model, (-1 if layer is None else layer) % model.config.depth)]
    return model.config.num_heads if isinstance(model, VisionTransformer) else 1


def _cell(model: Backbone, size: tuple[int, int], maps: Tensor) -> tuple[int, int]:
    """Height and width of a cell of the maps in pixels: a patch, or the stride of a stage."""
    grid = tuple(maps.shape[-2:])
    fits = (s for s in model.config.map_strides if grid == (-(-size[0] // s[0]), -(-size[1] // s[1])))
    return next(fits, model.config.map_strides[-1])


def _with_merging(predictor: Predictor, merge: float | None) -> Predictor:
    """The same predictor with tokens merged: as requested, as it already is, or half of them."""
    if merge is not None or not isinstance(predictor.model, MergingViT):
        predictor = predictor.with_model(merged(predictor.model, MERGE if merge is None else merge))
    return predictor


def _number(name: str, what: str, value: Any, low: int, high: int) -> int | None:
    """An integer in a range, or None."""
    try:
        number = None if value is None else index(value)
    except TypeError:
        number = high + 1
    if number is not None and not low <= number <= high:
        raise InputError(f"{name} must be {what} from {low} to {high}, got {value!r}.")
    return number


def _pixel(patch: Any, size: tuple[int, int], part: str) -> tuple[int, int]:
    """A pixel (x, y) of the prepared image."""
    try:
        x, y = (index(value) for value in patch)
    except (TypeError, ValueError):
        raise InputError(f"patch must be two integers (x, y), got {patch!r}.") from None
    height, width = size
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(
            f"the patch at {x},{y} is outside the prepared image of {width} x {height} pixels (of your image: {part})."
        )
    return x, y


def _is_function(target: Any) -> bool:
    return callable(target) and not isinstance(target, Tensor)


def _check_classes(predictor: Predictor, target: Any) -> None:
    """Raise for a model without classes, unless a function of its output is explained."""
    own_head = predictor.backbone is predictor.model
    if not own_head or not (predictor.labels or _is_function(target)):
        can = ", ".join(name for name in METHODS if "target" not in TAKES[name])
        lacks = "has no classes" if own_head else "has no class for the entire image"
        other = ", or in Python pass a function of its output as target" * own_head
        raise InputError(f"this model {lacks} to explain; use {can}{other}.")


def _target(predictor: Predictor, target: Any) -> Chosen:
    """The number of a class by its name or number, a function of the output as it is, or None for the likeliest."""
    labels = predictor.labels
    if _is_function(target):
        return cast(Callable[[Tensor], Tensor], target)
    if target is None:
        if isinstance(predictor.task, Regress) and len(labels) > 1:
            raise InputError(f"this model predicts several numbers; choose which to explain: {', '.join(labels)}.")
        return None
    if isinstance(target, str):
        if target in labels:
            return labels.index(target)
        if not (target.isascii() and target.removeprefix("-").isdecimal()):
            raise unknown_name("class", target, labels)
        target = int(target)
    return _number("class", "a number", target, 0, len(labels) - 1)


def _asked_of(predictor: Predictor, chosen: Chosen) -> relevance.Target:
    """The target of gradients: a class if classes exclude each other, otherwise its output."""
    if isinstance(predictor.task, Classify) or callable(chosen):
        return chosen
    K = len(predictor.labels)
    if chosen is None:
        return lambda y: y[:, :K].amax(1)
    return lambda y: y[:, chosen]


def _scores(q: Question, title: str, method: str, maps: Tensor) -> dict[str, float]:
    """How faithful the first map is, compared with input gradients and chance."""
    with torch.no_grad():
        target = q.backbone(q.x).argmax(1) if q.target is None else torch.as_tensor(q.target).view(1)
    name = f"attention, {title}" if method == "attention" else title
    chance = torch.rand(maps[:1].shape, generator=torch.Generator().manual_seed(0))
    rivals = {name: maps[:1], "input gradients": relevance.input_gradients(q.backbone, q.x, target), "chance": chance}
    scores: dict[str, float] = {}
    for rival, each in rivals.items():
        measured: Curves = curves(q.backbone, q.x, each, target)
        scores[f"{rival}: deletion"] = float(measured.deletion_auc)
        scores[f"{rival}: insertion"] = float(measured.insertion_auc)
    return scores
