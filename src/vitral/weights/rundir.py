"""A run directory: `config.json` with all that rebuilds the model and its preprocessing, `model.safetensors`, more."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from vitral.config import BackboneConfig, DetectorConfig, Preprocess, SegmenterConfig, Seq2SeqConfig, TextConfig
from vitral.errors import CheckpointError
from vitral.models.backbone import Backbone
from vitral.models.build import BACKBONES
from vitral.models.detector import Detector
from vitral.models.init import blank
from vitral.models.segmenter import Segmenter
from vitral.models.seq2seq import Seq2Seq, TextDecoder, TextEncoder
from vitral.weights.files import read_json

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


@dataclass(frozen=True)
class RunConfig:
    """What `config.json` holds, with what `tokenizer.json` holds under `tokenizers`."""

    document: dict[str, Any]

    @property
    def model(self) -> AnyConfig:
        """The model."""
        return ARCHITECTURES[self.architecture][0].from_dict(self.document["model"])

    @property
    def architecture(self) -> str:
        """The word for the model's kind."""
        return self.document.get("architecture", "vit")

    def build(self) -> AnyModel:
        """The model, its weights as they come."""
        return ARCHITECTURES[self.architecture][1](self.model)

    @property
    def preprocess(self) -> Preprocess | None:
        """What is done to an image before the model sees it; None where it reads text."""
        options = self.document["preprocess"]
        return None if options is None else Preprocess.from_dict(options)

    @property
    def labels(self) -> list[str] | None:
        """Names of the classes, where they have any."""
        labels = self.document.get("labels")
        return None if labels is None else list(labels)

    @property
    def temperature(self) -> float:
        """What logits are divided by, fitted on validation data."""
        return float(self.document.get("temperature", 1.0))


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory; others have a `config.json` too, but without our format's number."""
    if not (path / CONFIG).is_file():
        return False
    try:
        return "format_version" in read_json(path / CONFIG)
    except CheckpointError:  # broken: whose it was is told by what lies beside it
        return (path / "metrics.jsonl").exists()


def read_run_config(path: Path) -> RunConfig:
    """Read and check `config.json`."""
    try:
        document = json.loads((path / CONFIG).read_bytes())
        assert isinstance(document, dict)
        version = document["format_version"]
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise CheckpointError(f"{path} is not a run directory: config.json is missing or broken ({error}).") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {version}, this vitral reads {FORMAT_VERSION}.")
    if document.get("architecture", "vit") not in ARCHITECTURES:
        raise CheckpointError(f"{path}: config.json names an unknown architecture, {document['architecture']!r}.")
    kinds = {"model": dict, "preprocess": dict | None}
    lost = [part for part, kind in kinds.items() if not isinstance(document.get(part, ""), kind)]
    if lost or not isinstance(document.get("labels"), list | None):
        raise CheckpointError(f"{path}: config.json lacks {lost[0] if lost else 'a list of labels'}; it is broken.")
    if (path / TOKENIZERS).is_file():
        document["tokenizers"] = read_json(path / TOKENIZERS)
    written = ["target"] if document.get("architecture") == "seq2seq" else []
    needed = [*written, *(["source"] if document["preprocess"] is None else [])]
    if not set(needed) <= set(document.get("tokenizers", {})):
        raise CheckpointError(f"{path} has no {TOKENIZERS} for {' and '.join(needed)}; without it no text can be made.")
    return RunConfig(document)


def architecture_of(model: AnyModel) -> str:
    """The word for a model's kind."""
    return next(name for name, (_, kind) in ARCHITECTURES.items() if type(model) is kind)


def load_run(path: Path) -> AnyModel:
    """Build the model of a run, ready to predict: eval mode, with its preprocessing and labels."""
    config = read_run_config(path)
    if not (path / WEIGHTS).is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}: the run is not finished; go on with vitral train --resume.")
    model = blank(config.build)
    try:
        weights = load_file(path / WEIGHTS)
        model.load_state_dict(weights, assign=True)
    except (SafetensorError, RuntimeError, OSError) as error:
        raise CheckpointError(f"{path / WEIGHTS} does not fit config.json ({str(error).splitlines()[0]}).") from error
    model.preprocess, model.labels = config.preprocess, config.labels  # type: ignore[assignment]
    return model.eval()


def config_document(parts: Mapping[str, Any]) -> bytes:
    """`config.json` as bytes."""
    return (json.dumps({"format_version": FORMAT_VERSION, **parts}, indent=1) + "\n").encode()
