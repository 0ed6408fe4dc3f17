"""`explain`: one call from a model and an image to maps that can be looked at, saved and scored."""

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from vitral.data.inputs import ImageLike
from vitral.data.transforms import normalize
from vitral.display import short
from vitral.errors import InputError, unknown_name
from vitral.explanation import relevance
from vitral.explanation.attention import FUSIONS, Recorder, patch_token, to_maps
from vitral.explanation.captions import Chosen, part_shown, said
from vitral.explanation.faithfulness import Curves, curves
from vitral.explanation.page import Rows, all_rows
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


@dataclass(frozen=True, repr=False)
class Explanation:
    """Maps over the patches of one image, with what is needed to draw them."""

    method: str
    maps: Tensor
    """(n, G_h, G_w), one for each title; colours (3, G_h, G_w) where `colours` is set."""
    titles: list[str]
    image: Tensor
    """uint8 (C, H, W): the prepared image, what the model was shown."""
    patch: tuple[int, int]
    """Height and width in pixels of what a cell of the maps stands for: a patch."""
    part: str = ""
    """Which part of the original the prepared image is."""
    about: str = ""
    """The class that was explained; or what the model says, where the maps do not depend on a class."""
    where: str = ""
    """Which block, and from which token."""
    layer: int | None = None
    head: int | None = None
    asked: tuple[int, int] | None = None
    """A pixel (x, y) of the patch that was asked, if one was."""
    label: str | None = None
    """Name of the class that was explained."""
    probability: float | None = None
    """Its probability."""
    answer: str = ""
    """What the model says about the image."""
    colours: bool = False
    rows: Rows | None = None
    """Every attention row: what the interactive page shows."""
    scores: dict[str, float] = field(default_factory=dict)
    """Areas under the deletion and insertion curves, if they were asked for."""
    name: str = ""
    """The image's name."""
    source: str = ""
    """The model's name."""

    def __repr__(self) -> str:
        G_h, G_w = self.grid
        named = f"{self.name!r}, " if self.name else ""
        return f"Explanation({named}{short(self.caption)}: {len(self.titles)} maps of {G_h}x{G_w} patches)"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.maps.shape[-2], self.maps.shape[-1]

    @property
    def caption(self) -> str:
        """What is shown, in a line."""
        said = "; ".join(filter(None, (self.where, self.about)))
        return f"{self.method}: {said}" if said else self.method

    def to_dict(self) -> dict[str, Any]:
        """As plain values: what was asked and explained, and the maps, to five digits."""
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
            "grid": self.grid,
            "titles": self.titles,
            "scores": self.scores,
            "maps": [[[float(f"{v:.5g}") for v in row] for row in map_] for map_ in self.maps.tolist()],
        }

    def figure(self) -> "Figure":
        """The maps laid over the image, as a matplotlib figure."""
        from vitral.explanation.figures import draw

        return draw(self)

    def save(self, path: str | Path) -> Path:
        """Write a picture (.png, .svg, .pdf, .jpg) or an interactive page (.html)."""
        from vitral.explanation.figures import save

        return save(self, Path(path))


@dataclass(frozen=True)
class Shown:
    """An image as a model is shown it: read once, however often it is asked about."""

    pixels: Tensor
    """uint8 (C, H, W)."""
    part: str
    """Which part of the original it is."""
    name: str = ""

    @classmethod
    def to(cls, predictor: Predictor, image: ImageLike) -> "Shown":
        """Read an image for a model."""
        if not isinstance(image, ImageLike):
            what = "None" if image is None else f"a {type(image).__name__}"
            raise InputError(f"explain takes one image (a path, bytes, a picture or an array), got {what}.")
        x, size = predictor.images.read_sized(image, whole=predictor.task.spatial)
        part = part_shown(size, predictor.preprocess)
        return cls(predictor.images.fit(x), part, str(image) if isinstance(image, str | Path) else "")


@dataclass(frozen=True)
class Question:
    """What is asked of a model: the prepared image (1, C, H, W) and the options."""

    backbone: Backbone
    x: Tensor
    layer: int | None = None
    head: int | None = None
    target: relevance.Target = None
    patch: tuple[int, int] | None = None
    track: relevance.Track = iter
    predictor: Predictor | None = None
    depth: int = 1
    """Blocks that there are to choose from."""

    @property
    def model(self) -> VisionTransformer:
        """The backbone, where a method is for ViTs alone (`FITS`)."""
        assert isinstance(self.backbone, VisionTransformer)
        return self.backbone

    @property
    def block(self) -> int:
        """The block asked for, or the last."""
        return (-1 if self.layer is None else self.layer) % self.depth

    @property
    def pooled(self) -> bool:
        """Whether attention is that of the pooling: no [CLS], and neither patch nor block asked for."""
        if not isinstance(self.backbone, VisionTransformer):
            return False
        no_token = self.model.cls_token is None and self.patch is None
        return no_token and self.layer is None and self.model.config.global_pool == "map"


Maps = tuple[Tensor, list[str]]
MERGING_MAPS = 4
"""Blocks after which the tokens are shown."""
MERGE = 0.5
"""Share of the patches that is merged where nothing is said."""


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
    """Maps of all heads (h, G_h, G_w) as they are shown: the one asked for, or the mean, the largest and each."""
    if q.head is not None:
        return maps[q.head][None], [f"head {q.head % len(maps)}"]
    every = [f"head {i}" for i in range(len(maps))] if len(maps) > 1 else []
    merged = torch.stack([maps.mean(0), maps.amax(0)])
    return torch.cat([merged, maps] if every else [merged]), ["mean of heads", "max of heads", *every]


def _pooling_rows(q: Question) -> Tensor:
    """What attention pooling reads, with nothing for prefix tokens, which it does not see."""
    with Recorder() as record:
        q.model(q.x)
    rows = record.rows[-1]
    return torch.cat([rows.new_zeros(*rows.shape[:3], q.model.prefix_tokens), rows], -1)


def _where(q: Question, method: str) -> str:
    """Which block a picture is of, and who asks."""
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
    return "where the pooling reads" if q.pooled else f"block {q.block}, mean over all patches"


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
    """The number of the token that each patch is in, after a few blocks."""
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
    "attention": ("layer", "head", "patch", "score", "interactive"),
    "rollout": ("score", "interactive"),
    "relevance": ("target", "score", "interactive"),
    "gradcam": ("target", "score", "interactive"),
    "occlusion": ("target", "score", "interactive"),
    "positions": (),
    "tokens": ("layer", "interactive"),
    "writing": ("layer", "head"),
    "merging": ("layer", "merge"),
}
"""Which options mean something to a method."""

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
"""Which models a method can look into."""


def methods_of(predictor: Predictor) -> list[str]:
    """The methods that show something of this model; `explain` refuses the others."""

    def can(method: str) -> bool:
        try:
            check_can(method, predictor)
        except InputError:
            return False
        return True

    return [method for method in METHODS if can(method)]


def blocks_of(predictor: Predictor) -> int:
    """Blocks whose attention can be looked at."""
    return _depth(predictor, "attention") if "attention" in methods_of(predictor) else 0


def looks_from_cls(predictor: Predictor) -> bool:
    """Whether attention is that of [CLS], where no patch is asked."""
    return blocks_of(predictor) > 0 and getattr(predictor.backbone, "cls_token", None) is not None


def check_can(method: str, predictor: Predictor, target: Any = None) -> None:
    """Raise for a method that shows nothing of this model, whatever the image."""
    model = predictor.backbone
    if not isinstance(model, FITS[method]):
        can = ", ".join(name for name, kinds in FITS.items() if isinstance(model, kinds))
        kind = type(model).__name__
        raise InputError(f"{method} is for ViTs, and this model looks through a {kind}; use {can}.")
    if method == "merging":
        merged(predictor.model, MERGE)
    elif isinstance(predictor.model, MergingViT):
        raise InputError(f"{method} is for a model that merges no tokens; leave merge out, or use merging.")
    if method == "writing":
        writer_of(predictor)
    if method == "positions":
        check_positions(predictor.vit)
    if "target" in TAKES[method]:
        _check_classes(predictor, target)


def _check_with(method: str, model: Backbone, interactive: bool, score: bool) -> None:
    """Raise for what cannot go with the maps."""
    kind = type(model).__name__
    if interactive and not isinstance(model, VisionTransformer):
        raise InputError(f"a page is of a ViT's rows, and this model looks through a {kind}; write a picture instead.")
    if score and method == "attention" and not isinstance(model, VisionTransformer):
        raise InputError(f"a score is of maps like the last one of a {kind}; use gradcam or occlusion.")


def check_takes(method: str, options: Mapping[str, Any], words: Mapping[str, str]) -> None:
    """Raise if an option is set that means nothing to the method; `words` are what the user calls the options."""
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    for name, value in options.items():
        if value is None or value is False or name in TAKES[method]:
            continue
        who = [other for other in METHODS if name in TAKES[other]]
        raise InputError(f"{method} takes no {words.get(name, name)}; it is for {', '.join(who)}.")


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
    """Show what a model looks at: attention, rollout, relevance, gradcam, occlusion, positions, tokens or writing.

    Or merging: which patches become one token, where `merge` says how many are merged (half of all by default).

    `layer` chooses the block for attention, tokens, merging and writing (there of the decoder), `head` one head of
    attention or writing, `patch` (x, y in pixels of the prepared image) asks where that patch looks; `target` is a
    class (name or number), or a function of the output, for relevance, gradcam and occlusion. `score` measures how
    faithful the first map is; `interactive` gathers what the .html page needs; `track` is put around the steps of slow
    methods, to show how far they are (tqdm will do).
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
        raise InputError("a score needs a class to ask for: a model that classifies, and no function as the target.")
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
        method, maps.detach().cpu(), titles, shown.pixels, _cell(model, size, maps), shown.part,
        where=_where(question, method),
        layer=question.block if "layer" in TAKES[method] and not question.pooled and method != "merging" else layer,
        head=None if head is None else head % heads,
        asked=patch,
        **said(predictor, x, chosen, by_class) if method not in ("positions", "tokens") else {},
        colours=method == "tokens", rows=rows, scores=scores,
        name=shown.name,
        source=os.fspath(source) if isinstance(source, str | os.PathLike) else "",
    )  # fmt: skip


def _depth(predictor: Predictor, method: str) -> int:
    """Blocks, or for tokens maps, that there are to choose from."""
    if method == "writing":
        return writer_of(predictor)[0].config.decoder.depth
    model = predictor.backbone
    looks = isinstance(model, VisionTransformer | SwinTransformer) and method != "tokens"
    return model.config.depth if looks else _maps_of(model)  # type: ignore[union-attr]


def _maps_of(model: Backbone) -> int:
    return len(model.config.map_dims)


def _heads(predictor: Predictor, method: str, layer: int | None) -> int:
    """Heads of the block that was asked for; 1 where there are none."""
    if method == "writing":
        return writer_of(predictor)[0].config.decoder.num_heads
    model = predictor.backbone
    if isinstance(model, SwinTransformer):
        return model.config.num_heads[stage_of(model, (-1 if layer is None else layer) % model.config.depth)]
    return model.config.num_heads if isinstance(model, VisionTransformer) else 1


def _cell(model: Backbone, size: tuple[int, int], maps: Tensor) -> tuple[int, int]:
    """Pixels down and across that a cell of the maps stands for: a patch, or as much as there is in that stage."""
    grid = tuple(maps.shape[-2:])
    fits = (s for s in model.config.map_strides if grid == (-(-size[0] // s[0]), -(-size[1] // s[1])))
    return next(fits, model.config.map_strides[-1])


def _with_merging(predictor: Predictor, merge: float | None) -> Predictor:
    """The same with tokens merged: as asked for, or as it is already, or half of them."""
    if merge is not None or not isinstance(predictor.model, MergingViT):
        predictor = predictor.with_model(merged(predictor.model, MERGE if merge is None else merge))
    return predictor


def _number(name: str, what: str, value: Any, low: int, high: int) -> int | None:
    """A whole number in a range, or None."""
    try:
        whole = None if value is None else index(value)
    except TypeError:
        whole = high + 1
    if whole is not None and not low <= whole <= high:
        raise InputError(f"{name} must be {what} from {low} to {high}, got {value!r}.")
    return whole


def _pixel(patch: Any, size: tuple[int, int], part: str) -> tuple[int, int]:
    """A pixel (x, y) of the prepared image."""
    try:
        x, y = (index(value) for value in patch)
    except (TypeError, ValueError):
        raise InputError(f"patch must be two whole numbers (x, y), got {patch!r}.") from None
    height, width = size
    if not (0 <= x < width and 0 <= y < height):
        raise InputError(
            f"the patch at {x},{y} lies outside the prepared image of {width} x {height} pixels "
            f"(of your image: {part})."
        )
    return x, y


def _is_function(target: Any) -> bool:
    return callable(target) and not isinstance(target, Tensor)


def _check_classes(predictor: Predictor, target: Any) -> None:
    """Raise for a model without a class, or a function of its output, that could be explained."""
    own_head = predictor.backbone is predictor.model
    if not own_head or not (predictor.labels or _is_function(target)):
        can = ", ".join(name for name in METHODS if "target" not in TAKES[name])
        lacks = "has no classes" if own_head else "has no class for the image as a whole"
        other = ", or from Python a function of its output as target" * own_head
        raise InputError(f"this model {lacks} that could be explained; use {can}{other}.")


def _target(predictor: Predictor, target: Any) -> Chosen:
    """The number of a class by its name or number, a function of the output as it is, or None for the likeliest."""
    labels = predictor.labels
    if _is_function(target):
        return cast(Callable[[Tensor], Tensor], target)
    if target is None:
        if isinstance(predictor.task, Regress) and len(labels) > 1:
            raise InputError(f"this model tells several numbers; say which to explain: {', '.join(labels)}.")
        return None
    if isinstance(target, str):
        if target in labels:
            return labels.index(target)
        if not (target.isascii() and target.removeprefix("-").isdecimal()):
            raise unknown_name("class", target, labels)
        target = int(target)
    return _number("class", "a number", target, 0, len(labels) - 1)


def _asked_of(predictor: Predictor, chosen: Chosen) -> relevance.Target:
    """What is asked of the output: a class where they exclude each other, and otherwise its number alone."""
    if isinstance(predictor.task, Classify) or callable(chosen):
        return chosen
    K = len(predictor.labels)
    if chosen is None:
        return lambda y: y[:, :K].amax(1)
    return lambda y: y[:, chosen]


def _scores(q: Question, title: str, method: str, maps: Tensor) -> dict[str, float]:
    """How faithful the first map is, beside input gradients and chance."""
    with torch.no_grad():
        target = q.backbone(q.x).argmax(1) if q.target is None else torch.as_tensor(q.target).view(1)
    name = f"attention, {title}" if method == "attention" else title
    chance = torch.rand(maps[:1].shape, generator=torch.Generator().manual_seed(0))
    rivals = {name: maps[:1], "input gradients": relevance.input_gradients(q.backbone, q.x, target), "chance": chance}
    found: dict[str, float] = {}
    for rival, each in rivals.items():
        measured: Curves = curves(q.backbone, q.x, each, target)
        found[f"{rival}: deletion"] = float(measured.deletion_auc)
        found[f"{rival}: insertion"] = float(measured.insertion_auc)
    return found
