"""How a trained model does on labelled data, and what its frozen features are worth there."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, get_args

from vitral.config import ProbeKind, Probing, TrainConfig
from vitral.data.sources.base import Data
from vitral.errors import DataError, InputError
from vitral.inference.features import PIXELS, extract, open_extractor, progress
from vitral.inference.predictor import Predictor
from vitral.inference.probe import FEW, Labelled, few_shot, knn_probe, linear_probe
from vitral.models.backbone import Backbone
from vitral.training.session import find


def evaluate_run(predictor: Predictor, data: Data, split: str | None = None) -> dict[str, Any]:
    """Metrics of a model on a split of the data: the test part, or else validation, or else everything."""
    predictor.require_classes()
    split = split or next((part for part in ("test", "val") if part in data.splits), "train")
    if split not in data.splits:
        raise DataError(f"{data.name} has no split {split!r}; it has {', '.join(data.splits)}.")
    asked = replace(data, splits={split: data.splits[split]})
    data = predictor.task.usable(predictor.inputs.usable(asked))
    left_out = max(len(asked.splits[split]) - len(data.splits.get(split, [])), 0)  # running text is cut into more
    if split not in data.splits:
        raise DataError(f"all {left_out:,} {data.what} of the {split} part are too long for this model.")
    model, task, inputs = predictor.network, predictor.task, predictor.inputs
    found = find(model, task, data, data.splits[split], inputs, predictor.batch_size, predictor.workers)
    metrics = predictor.task.metrics(found)
    summary = predictor.task.summary(metrics) + f"; {left_out:,} too long and left out" * bool(left_out)
    return {"data": data.name, "split": split, "summary": summary, "left_out": left_out, **metrics}


# ---- frozen features ----


def probe_source(
    source: str | Path | Backbone, data: Data, kind: ProbeKind, probing: Probing, split: str | None, seed: int
) -> dict[str, Any]:
    """How well the classes can be told from a source's features: fitted on the training part, judged on another."""
    parts, judged = _parts(data, kind, split)
    found = extract(data, open_extractor(source, data, probing.features, probing.img_size, seed), probing.cache)
    labelled: dict[str, Labelled] = {}
    for part, indices in parts.splits.items():
        x, read = found.of(indices)
        if not len(read):
            raise DataError(f"none of the {len(indices):,} images of the {part} part can be read.")
        labelled[part] = x, data.targets[read]
    metrics = _fit(kind, labelled, probing, seed)
    settings = metrics.pop("settings")
    low, high = (100 * value for value in metrics["accuracy_95"])
    return {
        "source": source.__class__.__name__ if isinstance(source, Backbone) else str(source),
        "data": data.name,
        "split": judged,
        "probe": kind,
        "features": PIXELS if source == PIXELS else probing.features,
        "width": found.x.shape[1],
        "from_cache": found.from_cache,
        **{f"{part}_images": len(labels) for part, (_, labels) in labelled.items() if part != "test"},
        **metrics,
        "unreadable": sum(map(len, data.splits.values())) - len(found.indices),
        **settings,
        **({"few_shot": _few_shot_rows(kind, labelled, probing, seed)} if probing.few_shot else {}),
        "notes": parts.notes[len(data.notes) :],
        "summary": f"accuracy {100 * metrics['accuracy']:.2f} % (95 %: {low:.2f} to {high:.2f})",
    }


def _parts(data: Data, kind: ProbeKind, split: str | None) -> tuple[Data, str]:
    """The data with "train", "test" and for a linear layer "val", and the part that serves as "test".

    Parts that are missing are cut from training; the rate and decay are never chosen on what judges.
    """
    if kind not in get_args(ProbeKind):
        raise InputError(f"a probe is one of {', '.join(get_args(ProbeKind))}, got {kind!r}.")
    if data.what != "images" or data.kind != "label":
        raise DataError(f"a probe needs images with one class each, which {data.name} has not ({data.describe()}).")
    if split == "train":
        raise InputError("a probe is fitted on the train part; judge it on another, such as --split test.")
    fraction = TrainConfig().val_fraction
    if set(data.splits) == {"train"}:
        data = data.with_splits(0, fraction, seed=0)
    judged = split or ("test" if "test" in data.splits else "val")
    if judged not in data.splits:
        raise DataError(f"{data.name} has no split {judged!r}; it has {', '.join(data.splits)}.")
    chosen_on = {"val": data.splits["val"]} if "val" in data.splits and judged != "val" else {}
    splits = {"train": data.splits["train"], **chosen_on, "test": data.splits[judged]}
    if kind == "knn":
        splits.pop("val", None)
        return replace(data, splits=splits), judged
    data = replace(data, splits=splits).with_splits(fraction, 0, seed=0)
    if "val" not in data.splits:
        raise DataError(f"{data.name} has too few images for a part to choose the rate on; give a val part.")
    return data, judged


def _fit(kind: ProbeKind, parts: dict[str, Labelled], probing: Probing, seed: int) -> dict[str, Any]:
    if kind == "knn":
        return knn_probe(parts["train"], parts["test"], probing.k, probing.knn_temperature)
    return linear_probe(
        parts["train"], parts["val"], parts["test"], probing.lrs, probing.weight_decays, seed=seed
    )  # fmt: skip


def _few_shot_rows(kind: ProbeKind, parts: dict[str, Labelled], probing: Probing, seed: int) -> list[dict[str, Any]]:
    """Accuracy with a share of the labels of all parts but the one that judges, drawn several times."""

    def share(part: str, fraction: float, draw: int) -> Labelled:
        x, labels = parts[part]
        chosen = few_shot(labels, fraction, seed + draw)
        return x[chosen], labels[chosen]

    rows = {fraction: {"fraction": fraction, "labels": 0, "accuracies": []} for fraction in FEW}
    for fraction, draw in progress(list(product(FEW, range(probing.draws))), "few labels", len(FEW) * probing.draws):
        few = {part: share(part, fraction, draw) for part in parts if part != "test"}
        if not all(len(labels) for _, labels in few.values()):
            continue  # a class of one has none to give
        rows[fraction]["accuracies"].append(_fit(kind, few | {"test": parts["test"]}, probing, seed)["accuracy"])
        rows[fraction]["labels"] = sum(len(labels) for _, labels in few.values())
    return [
        row | {"accuracy": mean(a := row["accuracies"]), "spread": stdev(a) if len(a) > 1 else 0.0}
        for row in rows.values()
        if row["accuracies"]
    ]
