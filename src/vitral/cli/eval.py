"""`vitral eval`: how a trained model does on labelled data, or what its frozen features are worth there."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import tyro

from vitral.cli.output import print_json, print_table
from vitral.config import ProbeKind, Probing, Running, Writing
from vitral.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Evaluate a trained model on labelled data.

    With --probe the head is left aside, and the classes are told from the frozen features of any ViT, fitted on the
    training part. To compare with, the name of a model stands for random weights (of --seed), and the word pixels for
    no model at all.

    Examples:
      vitral eval runs/digits digits
      vitral eval runs/photos new-photos/ --json
      vitral eval runs/numbers-en-it numbers-en-it --beam 4
      vitral eval runs/digits digits --probe knn
      vitral eval model.safetensors photos/ --probe linear --few-shot
      vitral eval vit_nano_conv_patch2_8 digits --probe knn
      vitral eval pixels digits --probe knn
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="RUN")]
    """Run directory, file of weights, pretrained name, or exported file (.onnx, .xml). With --probe also a name from
    vitral models (fresh weights), or pixels."""
    data: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DATA")]
    """What vitral train takes: a name, a folder with a folder for each class, a CSV or Parquet file."""
    split: Annotated[str | None, tyro.conf.arg(metavar="PART", help_behavior_hint="(default: test, or else val)")] = (
        None
    )
    """Part of the data."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels in a table, or of what is to be written; several are separated by commas."""
    text_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of texts to read in a table."""
    probe: Annotated[ProbeKind | None, tyro.conf.arg(metavar="{knn,linear}", help_behavior_hint="")] = None
    """Probe frozen features: by their nearest neighbours, or by a linear layer."""
    probing: Annotated[Probing, tyro.conf.arg(name="")] = field(default_factory=Probing)
    """How features are probed, with --probe."""
    running: Annotated[Running, tyro.conf.arg(name="")] = field(default_factory=Running)
    """How the model is run."""
    writing: Annotated[Writing, tyro.conf.arg(name="")] = field(default_factory=Writing)
    """How text is written."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Print the metrics."""
    if options.probe is not None:
        _run_probe(options, options.probe)
        return
    if options.probing != Probing():
        raise ConfigError("--features, --k, --few-shot and the like are for probes; give --probe knn or linear too.")
    from vitral.api import evaluate
    from vitral.data.sources.open import open_data
    from vitral.inference.predictor import Predictor

    writing = options.writing if options.writing != Writing() else None
    predictor = Predictor(options.source, writing=writing, **options.running.to_dict())
    task = predictor.task.name
    data = open_data(options.data, options.image_column, options.label_column, task, options.text_column)
    metrics = evaluate(predictor, data, split=options.split)
    if options.json:
        print_json(metrics)
        return
    rows = next((metrics[key] for key in ("by_class", "by_label", "by_target", "by_length") if key in metrics), {})
    if not rows:
        print(f"{options.source} on {metrics['data']}, {metrics['split']} part, {metrics['images']:,} {data.what}")
        print(metrics["summary"])
        return
    columns = list(next(iter(rows.values()), {}))
    print_table(
        f"{options.source} on {metrics['data']}, {metrics['split']} part, {metrics['images']:,} {data.what}",
        ["", *columns],
        [[name, *(_cell(row[key]) for key in columns)] for name, row in rows.items()],
        note=metrics["summary"] + (f", calibration error {metrics['ece']:.3f}" if "ece" in metrics else ""),
    )


def _run_probe(options: Options, kind: ProbeKind) -> None:
    if options.text_column is not None or replace(options.writing, seed=0) != Writing():
        raise ConfigError("a probe looks at images and writes nothing; leave --text-column, --beam and the like out.")
    if options.running != Running():
        raise ConfigError(
            "--merge, --engine, --device, --workers and --batch-size are for a whole model; "
            "leave them out with --probe."
        )
    from vitral.api import probe
    from vitral.data.sources.open import open_data

    data = open_data(options.data, options.image_column, options.label_column, "classify")
    metrics = probe(
        options.source, data, kind, split=options.split, seed=options.writing.seed, **options.probing.to_dict()
    )
    if options.json:
        print_json(metrics)
        return
    low, high = (100 * value for value in metrics["accuracy_95"])
    used = metrics["train_images"] + metrics.get("val_images", 0)
    rows = [["all", f"{used:,}", f"{100 * metrics['accuracy']:.2f} %", f"{low:.2f} to {high:.2f} (95 %)"]]
    for few in metrics.get("few_shot", []):
        draws = len(few["accuracies"])
        spread = f"± {100 * few['spread']:.2f} ({draws} draw{'s' * (draws > 1)})"
        rows.append([f"{100 * few['fraction']:g} %", f"{few['labels']:,}", f"{100 * few['accuracy']:.2f} %", spread])
    print_table(
        f"{options.source} on {metrics['data']}: {kind} probe, {metrics['split']} part, {metrics['images']:,} images",
        ["labels", "images", "accuracy", ""],
        rows,
        note=_notes(metrics),
    )


def _notes(metrics: dict[str, Any]) -> str:
    """What to know beside the table, a line for each."""
    settings = {
        "knn": "k {k}, temperature {temperature:g}",
        "linear": "rate {lr:g}, decay {weight_decay:g}, chosen on {val_images:,} other images",
    }[metrics["probe"]]
    origin = " from the cache" * metrics["from_cache"]
    lines = [f"{metrics['width']:,} features ({metrics['features']}){origin}; {settings.format(**metrics)}"]
    unreadable = metrics["unreadable"]
    lines += [f"{unreadable:,} images cannot be read and were left out (vitral check names them)"] * bool(unreadable)
    return "\n".join([*lines, *metrics["notes"]])


def _cell(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
