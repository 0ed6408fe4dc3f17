"""From images and texts to answers, for library, command line and server."""

import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitral.config import (
    BATCH_SIZE,
    TOP_K,
    DetectOptions,
    EngineChoice,
    EngineName,
    Preprocess,
    Running,
    SegmentOptions,
    Writing,
    pair,
)
from vitral.data.ahead import ahead
from vitral.data.images import ImageMode
from vitral.data.inputs import ImageInputs, ImageLike, Inputs
from vitral.data.sources.folder import list_images
from vitral.data.targets import View
from vitral.data.transforms import eval_view
from vitral.display import html_facts
from vitral.errors import CheckpointError, ConfigError, ImageError, InputError, VitralError
from vitral.inference.average import Averaged
from vitral.inference.choose import choose_engine, open_engine, usual_engine
from vitral.inference.engines import Document, Engine, FileEngine, Packed, is_exported
from vitral.inference.export import EMBED, refuse_text
from vitral.inference.lanes import in_lanes
from vitral.inference.memory import keep_freed_memory
from vitral.inference.text import WritingFile
from vitral.models.backbone import Backbone, backbone_of
from vitral.models.detector import Detector
from vitral.models.merge import merged
from vitral.models.segmenter import Segmenter
from vitral.models.seq2seq import Seq2Seq, TextDecoder, TextEncoder
from vitral.models.vit import VisionTransformer
from vitral.schema import conform
from vitral.tasks.base import Answer, Answers, Frame, Task, map_tensors
from vitral.tasks.classify import Classify
from vitral.tasks.detect import Detect
from vitral.tasks.open import load_inputs, load_task
from vitral.tasks.segment import Segment, slide
from vitral.tasks.write import Writes
from vitral.training.folds import is_ensemble, read_folds
from vitral.training.precision import resolve_device
from vitral.weights.load import load_model
from vitral.weights.rundir import PRETRAIN, AnyModel, Described, is_run, read_run_config

MOST_LABELS = 30
"""Labels that a notebook shows of a predictor."""


@dataclass(frozen=True)
class Ready:
    """One input, prepared for the model, with its frame."""

    frame: Frame
    x: Tensor


class Predictor:
    """A trained model with its preprocessing and task: `Predictor("runs/digits").predict("image.png")`.

    `slide` lets a segmenter look at large images window by window, at their own resolution, instead of at a small copy
    of the whole. `writing` is how a model that writes text does it: greedily if it is not given. A source may also be
    an exported file. `engine` is what computes, a `vitral.config.EngineChoice`: by default torch, with packed matrices
    where it has them and the model was loaded here, or for an exported file what it was made for; `auto` measures once
    which is the fastest here, in how many threads, and if no `batch_size` is given in batches of which size. `workers`
    threads read images while it computes. `merge` makes a ViT quicker by token merging (`vitral.models.merge`).
    `tta` averages the predictions for an image and its mirror image. The source may also be the directory of a
    cross-validation (`vitral train --folds`): the models of all folds are then averaged.
    With `mapped`, weights may stay in their file, mapped into memory; `mapped=False` copies them, so that the file may
    be overwritten or truncated in place while the predictor is in use.
    """

    def __init__(
        self, source: str | os.PathLike[str] | AnyModel, *, batch_size: int | None = Running.batch_size,
        device: str = Running.device, slide: bool = False, writing: Writing | None = None,
        engine: EngineChoice | None = Running.engine, workers: int = Running.workers, merge: float = Running.merge,
        mapped: bool = True, tta: bool = Running.tta,
    ) -> None:  # fmt: skip
        device = str(resolve_device(device))
        source = source if isinstance(source, nn.Module) else os.fspath(source)
        self.source = "" if isinstance(source, nn.Module) else source
        self.network: Any  # what a batch goes through: the model, or an engine in its place
        if not isinstance(source, nn.Module) and is_ensemble(Path(source)):
            options: dict[str, Any] = {"batch_size": batch_size, "device": device, "engine": engine, "merge": merge}
            members = [Predictor(run, **options, mapped=mapped) for run in read_folds(Path(source))]
            _require_same(members)
            self.network, self._model, engine, merge = Averaged([m.network for m in members], False), None, None, 0.0
            self.task, self.inputs, batch_size = members[0].task, members[0].inputs, members[0].batch_size
        elif not isinstance(source, nn.Module) and is_exported(source):
            opened, batch_size = open_engine(Path(source), engine, batch_size, mapped)
            self.network = opened
            self._model = None
            self.task, self.inputs = task_of_export(opened.document, Path(source))
            if isinstance(self.task, Writes):
                self.network = WritingFile(opened)
        else:
            loaded = source.eval() if isinstance(source, nn.Module) else load_model(source, mapped=mapped)
            self.network = self._model = loaded
            if not isinstance(source, nn.Module) and is_run(Path(source)):
                run = read_run_config(Path(source))
                # A run of pretraining has no task yet.
                self.task = _task_of(self.model) if run.task == PRETRAIN else load_task(run)
                self.inputs = load_inputs(run)
            else:
                self.task, self.inputs = _task_of(self.model), ImageInputs(_preprocess_of(self.model))
        if slide and not isinstance(self.task, Segment):
            raise InputError("slide is for segmentation: other tasks see an image as a whole.")
        if writing is not None:
            if not isinstance(self.task, Writes):
                raise InputError(
                    f"this model was trained to {self.task.name}, and writes no text; leave --beam and the like out."
                )
            self.task.writing = writing
        if merge:
            self.network = self._model = merged(self.model, merge)
        if device != "cpu" and (isinstance(self.network, Engine | WritingFile) or engine not in (None, "eager")):
            raise ConfigError(f"engines run on the CPU, got device {device!r}; leave one of the two out.")
        if self._model is not None:
            self._model.to(device)
            if engine is None and not isinstance(source, nn.Module) and device == "cpu":
                engine = usual_engine(self._model)
            if engine not in (None, "eager"):
                refuse_text(self._model)
                self.network, batch_size = choose_engine(str(engine), self._model, self.preprocess, batch_size)
        if tta:
            if self.inputs.what != "image" or self.task.spatial or isinstance(self.task, Writes):
                raise InputError(
                    f"test-time augmentation is for tasks with one prediction for an image, not to {self.task.name}; "
                    f"leave --tta out."
                )
            self.network = Averaged([self.network], mirror=True)
        keep_freed_memory()
        self.device, self.batch_size, self.slide = torch.device(device), batch_size or BATCH_SIZE, slide
        self.workers = workers if self.inputs.what == "image" else 0
        self.labels = self.task.labels

    def __repr__(self) -> str:
        facts = self._facts()
        shown = ", ".join(str(facts[name]) for name in ("task", "model", "inputs", "engine"))
        return f"Predictor({f'{self.source!r}: ' if self.source else ''}{shown})"

    def _repr_html_(self) -> str:
        labels = ", ".join(self.labels[:MOST_LABELS]) + ", ..." * (len(self.labels) > MOST_LABELS)
        return html_facts(f"Predictor {self.source}".strip(), {**self._facts(), "labels": labels})

    def _facts(self) -> dict[str, object]:
        """What it is made of, in words."""
        task = f"{self.task.name} ({len(self.labels)} labels)" if self.labels else self.task.name
        if isinstance(self.network, Averaged) and self._model is None:
            model = f"mean of {len(self.network.networks)} models"
        elif self._model is None:
            model = "exported file"
        else:
            parameters = sum(p.numel() for p in self._model.parameters())
            model = f"{type(self._model).__name__} with {parameters:,} parameters"
        engine = f"{self.engine} engine on {self.device}"
        return {"task": task, "model": model, "inputs": self.inputs.size, "engine": engine, "batch": self.batch_size}

    @property
    def model(self) -> AnyModel:
        """The model; an exported file has none.

        Raises:
            InputError: The source is an exported file.
        """
        if self._model is None:
            raise InputError(
                "an exported file or an ensemble of folds only gives predictions; use a single run or the weights that "
                "the file was exported from."
            )
        return self._model

    @property
    def engine(self) -> EngineName:
        """What computes the answers."""
        return self._single.name if isinstance(self._single, Engine | WritingFile) else "eager"

    @property
    def _single(self) -> Any:
        """The network, or the first of those that are averaged."""
        return self.network.networks[0] if isinstance(self.network, Averaged) else self.network

    @property
    def embeds(self) -> bool:
        """Whether what computes answers gives vectors too; other engines leave those to the model itself."""
        return self.engine in ("eager", "packed") or self._gives_vectors

    @property
    def _gives_vectors(self) -> bool:
        """Whether it is an exported file that gives vectors and nothing else."""
        return isinstance(self._single, FileEngine) and self._single.outputs == ["embedding"]

    @property
    def images(self) -> ImageInputs:
        """How images are read, where the model reads images."""
        if not isinstance(self.inputs, ImageInputs):
            raise InputError(f"this model reads {self.inputs.what}s, not images.")
        return self.inputs

    @property
    def preprocess(self) -> Preprocess:
        """What is done to an image before the model sees it."""
        return self.images.preprocess

    @preprocess.setter
    def preprocess(self, p: Preprocess) -> None:
        self.inputs = ImageInputs(p)

    @property
    def mode(self) -> ImageMode:
        """Whether the model sees colours."""
        return self.images.mode

    @property
    def backbone(self) -> Backbone:
        """What looks at the images, itself or inside another model."""
        return image_backbone_of(self.model)

    @property
    def vit(self) -> VisionTransformer:
        """The same, where it must be a ViT."""
        backbone = self.backbone
        if not isinstance(backbone, VisionTransformer):
            raise InputError(f"this model looks through a {type(backbone).__name__}, not a ViT.")
        return backbone

    @torch.inference_mode()
    def outputs(self, x: Tensor) -> Any:
        """What the task makes the model give for a batch that is ready for it, images or tokens."""
        return map_tensors(Tensor.cpu, self.task.run(self.network, x.to(self.device)))

    def logits(self, x: Tensor) -> Any:
        """The model's own outputs for pixels (B, C, H, W), already normalised, or for tokens (B, T), in any engine."""
        if isinstance(self.task, Writes):
            raise InputError("a model that writes gives texts, one token after the other, and no logits of them.")
        return self.outputs(x)

    def predict(self, inputs: ImageLike | Sequence[ImageLike], top_k: int = TOP_K) -> Answers:
        """Predict for one input or several.

        Args:
            inputs: An image, several, or a folder of them; for a model that reads text, a text or several.
            top_k: Labels of each answer, for tasks that rank labels.

        Returns:
            A list with an answer for each input, in order; `to_pandas` gives it as one table.

        Raises:
            ImageError: An image cannot be read (InputError for a text); `stream` continues after such an input.

        Example:
            >>> Predictor("runs/digits").predict("image.png")[0].labels[0]
            'seven'
        """
        answers = Answers(self.stream(self._expand(inputs), top_k))
        for answer in answers:
            if answer.error:
                raise self._unreadable(answer.error)
        return answers

    def require_classes(self) -> None:
        """Raise for a backbone without a head, which has features alone."""
        if isinstance(self.task, Classify) and not self.labels:
            raise InputError(
                "this model has no classes to answer with: train a head (vitral train DATA --model), or probe its "
                "features (vitral eval RUN DATA --probe knn)."
            )

    def _unreadable(self, error: str) -> VitralError:
        return ImageError(error) if self.inputs.what == "image" else InputError(error)

    def stream(self, inputs: Iterable[ImageLike], top_k: int = TOP_K) -> Iterator[Answer]:
        """Answers one by one, in order, for any number of inputs; one that cannot be read answers with an error."""
        self.require_classes()
        with closing(self._batches(inputs)) as batches:
            for frames, read, errors in batches:
                answers: Iterator[Answer] = iter(())
                if read:
                    good = (frame for frame, error in zip(frames, errors, strict=True) if not error)
                    answers = self.answer([Ready(*pair) for pair in zip(good, read, strict=True)], top_k)
                for frame, error in zip(frames, errors, strict=True):
                    yield self.task.answer(frame.name, error) if error else next(answers)

    def ready(self, item: ImageLike, name: str) -> Ready:
        """One input as the model is fed it, apart from its batch; one that cannot be read raises."""
        x = self._read(item)
        return Ready(self._frame(name, x), x if self.slide else self.inputs.fit(x))

    def answer(self, batch: Sequence[Ready], top_k: int = TOP_K) -> Iterator[Answer]:
        """Answers for one batch of inputs that are ready, in order."""
        self.require_classes()
        frames = [item.frame for item in batch]
        answers = self.task.decode(self._look([item.x for item in batch]), frames, top_k)
        for frame, answer in zip(frames, answers, strict=True):
            yield replace(answer, note="; ".join(filter(None, [frame.note, answer.note])))

    @torch.inference_mode()
    def vectors(self, read: list[Tensor]) -> Tensor:
        """(B, D): what the head receives for one batch of inputs at the size the model is fed."""
        x = self.inputs.normal(self.inputs.stack(read))
        if self._gives_vectors:
            return self.outputs(x)
        embed = self.embedder.embed
        return (in_lanes(embed, x) if isinstance(self._single, Packed) else embed(x.to(self.device))).cpu()

    def _look(self, read: list[Tensor]) -> Any:
        if not self.slide:
            return self.outputs(self.inputs.normal(self.inputs.stack(read)))
        window, K = pair(self.preprocess.img_size), len(self.labels)
        normal = (self.inputs.normal(x[None])[0].to(self.device) for x in read)
        return [slide(self.network, x, window, K).cpu() for x in normal]

    def embed(self, inputs: ImageLike | Sequence[ImageLike]) -> Tensor:
        """(N, D): what the head receives, one row an image or text."""
        rows = []
        for row, error in self.embed_each(self._expand(inputs)):
            if row is None:
                raise self._unreadable(error)
            rows.append(row)
        if not rows:
            raise InputError(f"there is no {self.inputs.what} to embed; give at least one.")
        return torch.stack(rows)

    def embed_each(self, inputs: Iterable[ImageLike]) -> Iterator[tuple[Tensor | None, str]]:
        """What the head receives (D) for any number of inputs, in order; one that cannot be read has an error."""
        with closing(self._batches(inputs)) as batches:
            for _, read, errors in batches:
                rows = iter(self.vectors(read) if read else ())
                for error in errors:
                    yield (None, error) if error else (next(rows), "")

    @property
    def embedder(self) -> Any:
        """The model that gives one vector for an image or text."""
        if self.task.pool == "tokens":
            raise InputError("this model has a vector for each token, not one for a text; embed with another.")
        if isinstance(self.task, Writes) and self.inputs.what == "text":
            raise InputError("a model that writes has no vector for a text; embed with a run that classifies texts.")
        model = self._single.model if self._model is not None and isinstance(self._single, Packed) else self.model
        return model if isinstance(model, TextEncoder) else image_backbone_of(model)

    def with_model(self, model: AnyModel) -> "Predictor":
        """The same task and inputs with another model, run by torch."""
        other = copy(self)
        other.network = other._model = model
        return other

    def prepare(self, image: ImageLike) -> Tensor:
        """One image as uint8 (C, h, w), or one text as tokens (T,), at the size the model is fed."""
        return self.inputs.fit(self._read(image))

    def _read(self, item: ImageLike) -> Tensor:
        return self.inputs.read(item, whole=self.task.spatial)

    def _expand(self, inputs: ImageLike | Sequence[ImageLike]) -> Iterator[ImageLike]:
        if self.inputs.what == "image":
            return expand(inputs)
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            return iter([cast(ImageLike, inputs)])
        return iter(cast(Sequence[ImageLike], inputs))

    def _batches(self, inputs: Iterable[ImageLike]) -> Generator[tuple[list[Frame], list[Tensor], list[str]]]:
        """Frames, those inputs that could be read, and errors, a batch at a time, while the next one is read."""
        depth = max(self.batch_size, 2 * self.workers)
        with closing(ahead(self._try_read, enumerate(inputs), self.workers, depth)) as source:
            while batch := list(islice(source, self.batch_size)):
                frames, read, errors = zip(*batch, strict=True)
                yield list(frames), [x for x in read if x is not None], list(errors)

    def _try_read(self, numbered: tuple[int, ImageLike]) -> tuple[Frame, Tensor | None, str]:
        """One input as the model is fed it, or else what is wrong with it."""
        i, item = numbered
        name = str(item) if isinstance(item, str | Path) else f"{self.inputs.what} {i}"
        try:
            one = self.ready(item, name)
            return one.frame, one.x, ""
        except VitralError as error:
            return Frame(name, (0, 0), View.whole()), None, str(error)

    def _frame(self, name: str, x: Tensor) -> Frame:
        if not isinstance(self.inputs, ImageInputs):
            return Frame(name, (1, len(x)), View.whole(), self.inputs.note(name))
        size = (x.shape[1], x.shape[2])
        return Frame(name, size, View.whole() if self.slide else eval_view(size, self.preprocess))


def image_backbone_of(model: nn.Module) -> Backbone:
    """What looks at the images: the model, or the one it is built upon."""
    backbone = backbone_of(model)
    if not isinstance(backbone, Backbone):
        raise InputError(f"this model looks through a {type(backbone).__name__}, not a ViT or its like.")
    return backbone


def _preprocess_of(model: AnyModel) -> Preprocess:
    if model.preprocess is None:
        raise InputError("a model of texts needs its tokenizers; give the run directory.")
    return model.preprocess


def _require_same(members: Sequence[Predictor]) -> None:
    """Raise if models cannot be averaged: another task, other labels or other inputs."""
    first = members[0]
    if first.inputs.what != "image" or first.task.spatial or isinstance(first.task, Writes):
        raise InputError(f"models that {first.task.name} cannot be averaged; use the runs of the folds one by one.")
    for other in members[1:]:
        if (other.task.name, other.labels, other.inputs.identity()) != (
            first.task.name, first.labels, first.inputs.identity(),
        ):  # fmt: skip
            raise CheckpointError(
                f"{other.source} and {first.source} have different labels or inputs; train them again."
            )


def _task_of(model: AnyModel) -> Task:
    """The task of a model that no run tells about."""
    if isinstance(model, Detector):
        c = model.config
        labels = model.labels or [str(i) for i in range(c.num_classes)]
        return Detect(labels, DetectOptions(queries=c.queries))
    if isinstance(model, Segmenter):
        return Segment(model.labels or [str(i) for i in range(model.config.num_classes)], SegmentOptions())
    if isinstance(model, Seq2Seq | TextDecoder | TextEncoder):
        raise InputError("a model that reads or writes text needs its tokenizers; give the run directory.")
    return Classify(model.labels or [str(i) for i in range(model.config.num_classes)])


def task_of_export(document: Document, path: Path) -> tuple[Task, Inputs]:
    """The task of an exported file, and what it is fed, from what it records about itself."""
    try:
        # The document has passed `read_document`: it is an object, and so is `model`, if there is one.
        about: Described = conform({**document, "source": str(path), "model": None, "architecture": ""}, Described, "")
        task = Classify([]) if about.task == EMBED else load_task(about)
        if isinstance(task, Writes) != ("parts" in document):
            raise ConfigError(f"{task.name} in {'parts' if 'parts' in document else 'one piece'}")
        return task, load_inputs(about)
    except VitralError as error:
        raise CheckpointError(f"{path}: what it says about its task is broken ({error}); export it again.") from error


def expand(images: ImageLike | Sequence[ImageLike]) -> Iterator[ImageLike]:
    """One image, a list of them, or folders, as images one by one."""
    several: Sequence[Any] = (
        images if isinstance(images, Sequence) and not isinstance(images, str | bytes) else [images]
    )
    for image in several:
        if isinstance(image, str | Path) and Path(image).is_dir():
            found = list_images(Path(image))
            if not found:
                raise ImageError(f"{image} has no images in it.")
            yield from found
        else:
            yield image
