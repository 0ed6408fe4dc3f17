"""A run directory: `config.json` with everything that rebuilds the model and its preprocessing, `model.safetensors`.

`read_run_config` checks `config.json` once and returns it as a typed object; code that receives one trusts it. What a
task reads in addition is checked by `vitral.tasks.open.load_task`, for only the task knows it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from vitral.config import (
    BackboneConfig,
    DetectOptions,
    DetectorConfig,
    MultilabelOptions,
    Options,
    Preprocess,
    RegressOptions,
    SegmenterConfig,
    SegmentOptions,
    Seq2SeqConfig,
    TextConfig,
    TextOptions,
)
from vitral.errors import CheckpointError, VitralError
from vitral.models.backbone import Backbone
from vitral.models.build import BACKBONES
from vitral.models.detector import Detector
from vitral.models.init import blank
from vitral.models.segmenter import Segmenter
from vitral.models.seq2seq import Seq2Seq, TextDecoder, TextEncoder
from vitral.schema import Count, Finite, Length, Positive, conform, shortened
from vitral.weights.files import read_json, read_tensors

AnyConfig = BackboneConfig | SegmenterConfig | DetectorConfig | Seq2SeqConfig | TextConfig
AnyModel = Backbone | Segmenter | Detector | Seq2Seq | TextEncoder | TextDecoder
ARCHITECTURES: dict[str, tuple[type[AnyConfig], Any]] = {
    **BACKBONES,
    "segmenter": (SegmenterConfig, Segmenter),
    "detector": (DetectorConfig, Detector),
    "seq2seq": (Seq2SeqConfig, Seq2Seq),
    "text_encoder": (TextConfig, TextEncoder),
    "text_decoder": (TextConfig, TextDecoder),
}
"""What a run's model may be: its options and its class."""
FORMAT_VERSION = 1
PRETRAIN = "pretrain"
"""What stands for the task of a run that learned without labels."""
CONFIG, WEIGHTS, TOKENIZERS = "config.json", "model.safetensors", "tokenizer.json"
REPORT = "report.html"
REMEDY = "restore the file from a copy, or train the model again"
"""The end of an error about a damaged file."""
Group = TypeVar("Group", bound=Options)


@dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """The options of the tasks, as a part of the training options."""

    regress: RegressOptions = field(default_factory=RegressOptions)
    multilabel: MultilabelOptions = field(default_factory=MultilabelOptions)
    segment: SegmentOptions = field(default_factory=SegmentOptions)
    detect: DetectOptions = field(default_factory=DetectOptions)
    text: TextOptions = field(default_factory=TextOptions)


@dataclass(frozen=True, kw_only=True)
class Described:
    """What a run directory or an exported file records about its task and its inputs."""

    source: str
    """The file that holds the record, for errors."""
    preprocess: Preprocess | None
    """What is done to an image before the model sees it; None if the model reads text."""
    task: str = "classify"
    labels: list[str] | None = None
    """Names of classes, or of numbers; None if they have no names."""
    train: TaskOptions = field(default_factory=TaskOptions)
    num_classes: int = 0
    """Classes of the model."""
    model: AnyConfig | None = None
    architecture: str = "vit"
    """The word for the model's kind."""
    temperature: Positive = 1.0
    """What logits are divided by, fitted on validation data."""
    thresholds: list[Finite] | None = None
    """Of each label, from which probability on it is present."""
    threshold: Finite = 0.5
    """Of detection: the least score of a box that is shown."""
    target_mean: list[Finite] | None = None
    target_std: list[Positive] | None = None
    source_length: Length | None = None
    target_length: Length | None = None
    """Tokens of the longest text that is read, and that is written."""
    tokenizers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The labels, or numbers in their place."""
        return list(self.labels or map(str, range(self.num_classes)))

    def wrong(self, key: str, expected: str) -> CheckpointError:
        """The error for a key that does not fit the others."""
        value = getattr(self, key, None)
        return CheckpointError(f"{self.source}: {key} must be {expected}, got {shortened(value)}; {REMEDY}.")

    def each(self, key: str) -> list[float]:
        """A list of numbers, one for each label."""
        values = getattr(self, key)
        if values is None or len(values) != len(self.names):
            raise self.wrong(key, f"{len(self.names)} numbers, one for each label")
        return values

    def given(self, key: str) -> Any:
        """A value that the task cannot do without."""
        value = getattr(self, key)
        if value is None:
            raise CheckpointError(f"{self.source}: {key} is missing, which the task {self.task} needs; {REMEDY}.")
        return value


@dataclass(frozen=True, kw_only=True)
class DataRecord:
    """The data that a run was trained on."""

    name: str
    splits: dict[str, Count]
    """Samples in each split."""
    what: str = "images"
    texts: str | None = None
    """Fingerprint of the texts; None for data without texts."""
    licence: str = "unknown"
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Spent:
    """What training has cost."""

    steps: Count
    seconds: Finite
    skipped: Count = 0
    """Steps whose loss was not finite."""


Baselines = dict[str, dict[str, Finite]]
"""Metrics of trivial predictors, by the name of the predictor."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem of a finished run, the numbers that show it, and the next command to try."""

    problem: str
    evidence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.evidence}. Next: {self.remedy}"


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What a run or a comparison was made from, and by which command."""

    data: DataRecord
    seed: int = 0
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class History(Provenance):
    """How a run was trained, and its metrics."""

    task: str
    train: dict[str, Any]
    """The options of the run; `RunConfig.training` gives them typed."""
    model_name: str
    parameters: Count = 0
    spent: Spent | None = None
    metrics: dict[str, dict[str, Any]] | None = None
    """By split; None for a run that is not finished."""
    baselines: dict[str, Baselines] = field(default_factory=dict)
    """By split; none for tasks without baselines."""
    diagnosis: list[Finding] = field(default_factory=list)
    method: str = ""
    what: str = ""
    trouble: str = ""
    """Of pretraining: the method, what it learns, and signs of collapse."""

    @property
    def vitral(self) -> str:
        """The version that trained it."""
        return self.versions.get("vitral", "of unknown version")


@dataclass(frozen=True, kw_only=True)
class RunConfig(Described):
    """`config.json` of a run, checked; `tokenizer.json` is under `tokenizers`."""

    model: AnyConfig  # pyright: ignore[reportGeneralTypeIssues]  # every run has one
    document: dict[str, Any]
    """The file as it is."""
    recorded: History | None
    """None for weights that were saved without a training run."""

    @property
    def history(self) -> History:
        """How the run was made; raises for weights that were saved without a training run."""
        if self.recorded is None:
            raise CheckpointError(f"{self.source} records no training run: its weights were saved without one.")
        return self.recorded

    @property
    def finished(self) -> bool:
        """Whether the run has its metrics."""
        return self.recorded is not None and self.recorded.metrics is not None

    def training(self, kind: type[Group]) -> Group:
        """The options that the run was trained with."""
        with naming(self.source):
            return conform(self.history.train, kind, "train")

    def measured(self, kind: Any) -> dict[str, Any]:
        """The metrics by split, each checked against the type hint `kind`."""
        if self.history.metrics is None:
            raise CheckpointError(f"{self.source}: metrics are missing: the run is not finished; resume it.")
        with naming(self.source):
            return conform(self.history.metrics, dict[str, kind], "metrics")

    def build(self) -> AnyModel:
        """The model, with weights as they come."""
        try:
            return ARCHITECTURES[self.architecture][1](self.model)
        except (RuntimeError, OverflowError) as error:  # shapes that no tensor can have
            reason = str(error).splitlines()[0]
            raise CheckpointError(f"{self.source}: model cannot be built ({reason}); {REMEDY}.") from error


@contextmanager
def naming(source: object) -> Iterator[None]:
    """Turn errors about values into a `CheckpointError` that names the file and the remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except VitralError as error:
        raise CheckpointError(f"{source}: {str(error).rstrip('.')}; {REMEDY}.") from error


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory; folders of other programs have a `config.json` without `format_version`."""
    if not (path / CONFIG).is_file():
        return False
    try:
        return "format_version" in read_json(path / CONFIG)
    except CheckpointError:  # damaged: recognised by the log next to it
        return (path / "metrics.jsonl").exists()


def read_run_config(path: Path) -> RunConfig:
    """Read `config.json` and check all of it; an error names the file, the key, what is expected and what was found."""
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} is not a run directory: it has no {CONFIG}.")
    document = read_json(file)
    version = document.get("format_version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{file}: format_version must be {FORMAT_VERSION}, got {shortened(version)}; if a newer vitral wrote it, "
            f"update vitral."
        )
    if (path / TOKENIZERS).is_file():
        document["tokenizers"] = read_json(path / TOKENIZERS)
    with naming(file):
        architecture = conform(document.get("architecture", "vit"), str, "architecture")
        if architecture not in ARCHITECTURES:
            raise CheckpointError(
                f"{file}: architecture must be one of {', '.join(ARCHITECTURES)}, got {shortened(architecture)}; "
                f"{REMEDY}."
            )
        if not isinstance(document.get("model"), dict):
            raise CheckpointError(f"{file}: model must be an object, got {shortened(document.get('model'))}; {REMEDY}.")
        model = conform(document["model"], ARCHITECTURES[architecture][0], "model")
        more = {"source": str(file), "architecture": architecture, "model": model, "document": document}
        more |= {"num_classes": getattr(model, "num_classes", 0), "recorded": _history(document)}
        config = conform({**document, **more}, RunConfig, "")
    _check_together(config)
    return config


def _history(document: Mapping[str, Any]) -> History | None:
    """How a run was trained, None for weights that were saved without a training run."""
    return conform(document, History, "") if "data" in document else None


def _encoder(model: AnyConfig) -> BackboneConfig | TextConfig:
    """The part of a model that reads its inputs."""
    if isinstance(model, Seq2SeqConfig):
        inside = model.vit or model.encoder
        assert inside is not None, "one of them is given"
        return inside
    return model.backbone if isinstance(model, SegmenterConfig | DetectorConfig) else model


def _check_together(run: RunConfig) -> None:
    """Raise unless the parts of the document fit each other."""
    image, encoder = run.preprocess, _encoder(run.model)
    if isinstance(encoder, TextConfig) != (image is None):
        raise run.wrong("preprocess", "null for a model that reads text, and an object for one that reads images")
    if image is not None and len(image.mean) != encoder.in_chans:  # type: ignore[union-attr]
        raise run.wrong("preprocess", f"for the {encoder.in_chans} channels of the model")  # type: ignore[union-attr]
    outputs = run.train.regress.outputs if run.task == "regress" else 1
    if run.labels and len(run.labels) * outputs != run.num_classes:
        raise run.wrong("labels", f"names for the {run.num_classes // outputs} outputs of the model")
    written = ["target"] if run.architecture == "seq2seq" else []
    needed = [*written, *(["source"] if image is None else [])]
    if not set(needed) <= set(run.tokenizers):
        raise CheckpointError(
            f"{run.source}: {TOKENIZERS} must hold the tokenizers {' and '.join(needed)}, got "
            f"{', '.join(run.tokenizers) or 'none'}; without them the model cannot read or write text."
        )


def architecture_of(model: AnyModel) -> str:
    """The word for a model's kind."""
    return next(name for name, (_, kind) in ARCHITECTURES.items() if type(model) is kind)


def load_run(path: Path, mapped: bool = True) -> AnyModel:
    """Build the model of a run in eval mode, with its preprocessing and labels; `mapped` as in `open_weights`."""
    config = read_run_config(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}: the run is not finished; resume it with --resume.")
    model = blank(config.build)
    wanted = {name: tensor.is_floating_point() for name, tensor in model.state_dict().items()}
    weights = read_tensors(path / WEIGHTS, mapped)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path / WEIGHTS} does not fit config.json ({str(error).splitlines()[0]}).") from error
    for name, tensor in weights.items():
        if tensor.is_floating_point() != wanted[name]:
            raise CheckpointError(f"{path / WEIGHTS} does not fit config.json ({name} holds {tensor.dtype}).")
    model.preprocess, model.labels = config.preprocess, config.labels  # type: ignore[assignment]
    return model.eval()


def config_document(parts: Mapping[str, Any]) -> bytes:
    """`config.json` as bytes."""
    return (json.dumps({"format_version": FORMAT_VERSION, **parts}, indent=1) + "\n").encode()
