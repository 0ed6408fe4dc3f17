"""README.md of a run: the model card."""

from typing import Any

from vitral.models.zoo import is_model
from vitral.tasks.base import Task
from vitral.weights.rundir import Baselines


def model_card(describe: dict[str, Any], task: Task, metrics: dict[str, Any], baselines: dict[str, Baselines]) -> str:
    """Describe the model: its task, metrics next to baselines, data, weights, and how to reproduce it."""
    data, labels, what = describe["data"], describe["labels"], describe["data"]["what"]
    names = ", ".join(labels[:20]) + (" ..." if len(labels) > 20 else "")
    best = describe["train"]["select"] == "best"
    weights = "the weights that were best on the validation part" if best else "the averaged weights of the last step"
    parts = ", ".join(f"{count:,} {part}" for part, count in data["splits"].items())
    notes = "".join(f"- {note}\n" for note in data["notes"])
    summaries = {
        part: "; ".join(filter(None, [task.summary(m), task.baseline_summary(baselines.get(part, {}))]))
        for part, m in metrics.items()
    }
    rows = "\n".join(f"| {part} | {m['images']:,} | {summaries[part]} |" for part, m in metrics.items())
    kind = kind_of(describe["preprocess"] is not None, describe["architecture"])
    return f"""# {describe["model_name"]} on {data["name"]}

A {kind} that {task.what.format(n=len(labels))}{": " * bool(names)}{names}.

| split | {what} | metrics |
|---|---|---|
{rows}

## Data
{data["name"]}, licence: {data["licence"]}. {what.capitalize()}: {parts}.
{notes}
## Weights
{start_of(describe)} `model.safetensors` holds {weights}; \
the test part chose nothing.{_learnt(describe)}

## Intended use
{what.capitalize()} like those it was trained on. On others its confidence means little.

## Reproduce
`{describe["command"] or "vitral.train(...)"}` with vitral {describe["versions"]["vitral"]}, seed {describe["seed"]}.
"""


def kind_of(reads_images: bool, architecture: str) -> str:
    """The kind of model, in words."""
    if not reads_images:
        return "Transformer"
    return "ResNet" if architecture == "resnet" else "Vision Transformer"


def _learnt(describe: dict[str, Any]) -> str:
    """What was trained, where that is not everything."""
    whole, trained, lora = describe["parameters"], describe["trained_parameters"], describe["train"]["lora"]
    how = f" LoRA of rank {lora['rank']} on {lora['parts']} is folded into them." if lora["rank"] else ""
    return f" Of {whole:,} parameters {trained:,} were trained.{how}" if trained != whole else ""


def start_of(describe: dict[str, Any]) -> str:
    """What training started from, with the licence of published weights."""
    name, weights = describe["model_name"], describe.get("weights")
    if weights is None:
        fresh = describe["preprocess"] is None or is_model(name)
        return f"Trained from {'scratch' if fresh else name}."
    via = "" if name == weights["name"] else f" by way of {name}"
    commit = f", commit {weights['commit']}" if weights["commit"] else ""
    source = f" ({weights['licence_source']})" if weights["licence"] else ""
    origin = f"{weights['source']}: {weights['origin']}{commit}"
    licence = f"{weights['licence'] or 'not stated'}{source}"
    return f"Trained from the published weights {weights['name']}{via} ({origin}). Their licence: {licence}."


def pretrained_card(describe: dict[str, Any], signals: dict[str, float]) -> str:
    """Say what a model that learned without labels is, how healthy it is, and what to do with it."""
    data = describe["data"]
    parts = ", ".join(f"{count:,} {part}" for part, count in data["splits"].items())
    notes = "".join(f"- {note}\n" for note in data["notes"])
    rows = "\n".join(f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in signals.items())
    return f"""# {describe["model_name"]} on {data["name"]}, without labels

A Vision Transformer that learned to {describe["what"]} ({describe["method"].upper()}). It has no classes yet.

| on images kept apart | |
|---|---|
{rows}

## Data
{data["name"]}, licence: {data["licence"]}. Images: {parts}. Their labels, if any, were used for the k-NN signal alone.
{notes}
## Weights
{start_of(describe)}

## Use
`vitral train DATA --model THIS_FOLDER --preset full` fine-tunes it; `vitral eval THIS_FOLDER DATA --probe knn` tells
how much it knows as it is; `vitral explain THIS_FOLDER image.png` shows what it looks at.

## Reproduce
`{describe["command"] or "vitral.pretrain(...)"}` with vitral {describe["versions"]["vitral"]}, seed {describe["seed"]}.
"""
