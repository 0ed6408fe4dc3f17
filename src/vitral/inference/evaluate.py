"""How a trained model does on labelled data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from vitral.config import Writing
from vitral.data.sources.base import Data
from vitral.errors import DataError
from vitral.inference.predictor import Predictor
from vitral.training.session import find


def evaluate_run(
    source: str | Path, data: Data, split: str | None = None, writing: Writing | None = None
) -> dict[str, Any]:
    """Metrics of a run on a split of the data: the test part, or else validation, or else everything."""
    predictor = Predictor(source, writing=writing)
    split = split or next((part for part in ("test", "val") if part in data.splits), "train")
    if split not in data.splits:
        raise DataError(f"{data.name} has no split {split!r}; it has {', '.join(data.splits)}.")
    asked = replace(data, splits={split: data.splits[split]})
    data = predictor.task.usable(predictor.inputs.usable(asked))
    left_out = max(len(asked.splits[split]) - len(data.splits.get(split, [])), 0)  # running text is cut into more
    if split not in data.splits:
        raise DataError(f"all {left_out:,} {data.what} of the {split} part are too long for this model.")
    found = find(predictor.model, predictor.task, data, data.splits[split], predictor.inputs, predictor.batch_size)
    metrics = predictor.task.metrics(found)
    summary = predictor.task.summary(metrics) + f"; {left_out:,} too long and left out" * bool(left_out)
    return {"data": data.name, "split": split, "summary": summary, "left_out": left_out, **metrics}
