"""README.md of a run: the model card."""

from typing import Any


def model_card(describe: dict[str, Any], metrics: dict[str, Any]) -> str:
    """Say what the model is, how good it is, what it was made from and how to make it again."""
    data, labels = describe["data"], describe["labels"]
    names = ", ".join(labels[:20]) + (" ..." if len(labels) > 20 else "")
    best = describe["train"]["select"] == "best"
    weights = "the weights that were best on the validation part" if best else "the averaged weights of the last step"
    parts = ", ".join(f"{count:,} {part}" for part, count in data["splits"].items())
    notes = "".join(f"- {note}\n" for note in data["notes"])
    return f"""# {describe["model_name"]} on {data["name"]}

A Vision Transformer that tells {len(labels)} classes apart: {names}.

| part | images | accuracy | 95 % interval | calibration error |
|---|---|---|---|---|
{chr(10).join(_row(part, m) for part, m in metrics.items())}

## Data
{data["name"]}, licence: {data["licence"]}. Images: {parts}.
{notes}
## Weights
Trained from scratch. `model.safetensors` holds {weights}; the test part chose nothing.

## Intended use
Images like those it was trained on. On others its confidence means little.

## Reproduce
`{describe["command"] or "vitral.train(...)"}` with vitral {describe["versions"]["vitral"]}, seed {describe["seed"]}.
"""


def _row(part: str, m: dict[str, Any]) -> str:
    low, high = (100 * value for value in m["accuracy_95"])
    return f"| {part} | {m['images']:,} | {100 * m['accuracy']:.2f} % | {low:.2f} to {high:.2f} % | {m['ece']:.3f} |"
