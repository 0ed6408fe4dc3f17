"""How a trained model does on labelled data."""

from pathlib import Path
from typing import Any

import torch

from vitral.data.sources.base import Data
from vitral.errors import DataError
from vitral.inference.predictor import Predictor
from vitral.tasks.metrics import classification_metrics
from vitral.training.session import predict_logits


def evaluate_run(source: str | Path, data: Data, split: str | None = None) -> dict[str, Any]:
    """Metrics of a run on a split of the data: the test part, or else validation, or else everything."""
    predictor = Predictor(source)
    unknown = [name for name in data.classes if name not in predictor.labels]
    if unknown:
        raise DataError(
            f"{data.name} has classes that the model does not know: {', '.join(unknown[:5])}; "
            f"it knows {', '.join(predictor.labels[:10])}."
        )
    split = split or next((part for part in ("test", "val") if part in data.splits), "train")
    if split not in data.splits:
        raise DataError(f"{data.name} has no split {split!r}; it has {', '.join(data.splits)}.")
    found = predict_logits(predictor.model, data, data.splits[split], predictor.preprocess, 256)
    renumbered = torch.tensor([predictor.labels.index(name) for name in data.classes])
    targets = renumbered[found["targets"]]
    metrics = classification_metrics(found["logits"], targets, predictor.labels, predictor.temperature)
    return {"data": data.name, "split": split, **metrics}
