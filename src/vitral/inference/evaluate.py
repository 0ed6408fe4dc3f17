"""Metrics of a trained model on labelled data, and of probes on frozen features."""

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
from vitral.tasks.base import Found, Task
from vitral.training.seen import Seen, read_seen
from vitral.training.session import find


def evaluate_run(predictor: Predictor, data: Data, split: str | None = None, strict: bool = False) -> dict[str, Any]:
    """Evaluate a model on a split of the data, with separate metrics for the inputs that it was trained on."""
    predictor.require_classes()
    if strict:
        data.refuse_problems(strict)
    seen = read_seen(predictor.source)
    notes = list(data.notes)
    if seen is not None and (own := seen.split_like_run(data)) is not data:
        data = own
        notes.append(f"{data.name} is the data set of this run: the split of the run is used")
    split = split or next((part for part in ("test", "val") if part in data.splits), "train")
    if split not in data.splits:
        raise DataError(f"{data.name} has no split {split!r}; it has {', '.join(data.splits)}.")
    asked = replace(data, splits={split: data.splits[split]})
    fitted = replace(
        data, splits={"train": data.splits.get("train", data.splits[split])}
    )  # what baselines are fitted on
    data = predictor.task.usable(predictor.inputs.usable(asked))
    dropped = max(len(asked.splits[split]) - len(data.splits.get(split, [])), 0)  # running text is cut into more
    if split not in data.splits:
        raise DataError(f"all {dropped:,} {data.what} of the {split} split are too long for this model.")
    model, task, inputs, indices = predictor.network, predictor.task, predictor.inputs, data.splits[split]
    outputs = find(model, task, data, indices, inputs, predictor.batch_size, predictor.workers)
    unreadable = len(indices) - len(outputs["indices"])
    if strict and unreadable:
        raise DataError(f"{unreadable:,} of {len(indices):,} {data.what} cannot be read; vitral check lists them.")
    metrics = task.metrics(outputs)
    baselines = task.baselines(fitted, {split: outputs}).get(split, {})
    summary = task.summary(metrics) + f"; {dropped:,} too long and dropped" * bool(dropped)
    overlap = {} if seen is None else {"training_overlap": _overlap(seen, task, data, outputs)}
    about = {"data": data.name, "split": split, "summary": summary, "left_out": dropped, "notes": notes}
    return {**about, **metrics, "baselines": baselines, "baseline_summary": task.baseline_summary(baselines), **overlap}


def _overlap(seen: Seen, task: Task, data: Data, outputs: Found) -> dict[str, Any]:
    """How many evaluated inputs are in the training split, and the metrics of those and of the others."""
    trained = seen.contains(data, outputs["indices"])
    groups = {}
    for name, chosen in (("overlapping", trained), ("other", ~trained)):
        if trained.any() and chosen.any():
            metrics = task.metrics({key: tensor[chosen] for key, tensor in outputs.items()})
            groups[name] = {"summary": task.summary(metrics), **metrics}
    return {"images": int(trained.sum()), "of": len(trained), **groups}


# ---- frozen features ----


def probe_source(
    source: str | Path | Backbone, data: Data, kind: ProbeKind, probing: Probing, split: str | None, seed: int
) -> dict[str, Any]:
    """Fit a probe on a source's features of the training split, and evaluate it on another split."""
    parts, judged = _parts(data, kind, split)
    found = extract(data, open_extractor(source, data, probing.features, probing.img_size, seed), probing.cache)
    labelled: dict[str, Labelled] = {}
    for part, indices in parts.splits.items():
        x, read = found.of(indices)
        if not len(read):
            raise DataError(f"none of the {len(indices):,} images of the {part} split can be read.")
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
    """The data with "train", "test" and for a linear probe "val", and the name of the split used as "test".

    Missing splits are taken from training; the rate and decay are never chosen on the evaluated split.
    """
    if kind not in get_args(ProbeKind):
        raise InputError(f"a probe is one of {', '.join(get_args(ProbeKind))}, got {kind!r}.")
    if data.what != "images" or data.kind != "label":
        raise DataError(f"a probe needs images with one class each, got {data.describe()}.")
    if split == "train":
        raise InputError("a probe is fitted on the train split; evaluate it on another, such as --split test.")
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
        raise DataError(
            f"{data.name} has too few images for a validation split to choose the rate on; give a val split."
        )
    return data, judged


def _fit(kind: ProbeKind, parts: dict[str, Labelled], probing: Probing, seed: int) -> dict[str, Any]:
    if kind == "knn":
        return knn_probe(parts["train"], parts["test"], probing.k, probing.knn_temperature)
    return linear_probe(
        parts["train"], parts["val"], parts["test"], probing.lrs, probing.weight_decays, seed=seed
    )  # fmt: skip


def _few_shot_rows(kind: ProbeKind, parts: dict[str, Labelled], probing: Probing, seed: int) -> list[dict[str, Any]]:
    """Accuracy with a share of the labels of all splits but the evaluated one, drawn several times."""

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
