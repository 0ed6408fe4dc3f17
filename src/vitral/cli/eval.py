"""`vitral eval`: evaluate a model, or probe its frozen features, on labelled data."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import tyro

from vitral.cli.output import print_json, print_table
from vitral.config import ProbeKind, Probing, Running, Writing
from vitral.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Evaluate a trained model on labelled data.

    Data that the run was trained on get the run's split again, and the test split is evaluated. Other data are
    compared with the training images: those that overlap are counted and reported separately.

    With --probe the head is not used: a classifier on the frozen features of any ViT is fitted on the training split.
    As baselines, the name of a model means random weights (of --seed), and the word pixels means no model.

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
    """Data as for vitral train: a name, a folder with a folder for each class, a CSV or Parquet file."""
    split: Annotated[str | None, tyro.conf.arg(metavar="SPLIT", help_behavior_hint="(default: test, or else val)")] = (
        None
    )
    """Split of the data."""
    image_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of image paths in a table."""
    label_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of labels, or of texts to write, in a table; several are separated by commas."""
    text_column: Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")] = None
    """Column of texts to read in a table."""
    probe: Annotated[ProbeKind | None, tyro.conf.arg(metavar="{knn,linear}", help_behavior_hint="")] = None
    """Probe frozen features by nearest neighbours or a linear layer."""
    probing: Annotated[Probing, tyro.conf.arg(name="")] = field(default_factory=Probing)
    """How features are probed, with --probe."""
    running: Annotated[Running, tyro.conf.arg(name="")] = field(default_factory=Running)
    """How the model is run."""
    writing: Annotated[Writing, tyro.conf.arg(name="")] = field(default_factory=Writing)
    """How text is written."""
    strict: bool = False
    """Stop if a row or an image cannot be used, instead of dropping it."""
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
    metrics = evaluate(predictor, data, split=options.split, strict=options.strict)
    if options.json:
        print_json(metrics)
        return
    for note in metrics["notes"]:
        print(note)
    _print_metrics(options.source, metrics, data.what)
    for line in _overlap_lines(metrics.get("training_overlap"), data.what):
        print(line)


def _print_metrics(source: str, metrics: dict[str, Any], what: str) -> None:
    from vitral.tasks.metrics import grouped

    title = f"{source} on {metrics['data']}, {metrics['split']} split, {metrics['images']:,} {what}"
    _, rows = grouped(metrics)
    if not rows:
        print(title)
        print("; ".join(filter(None, [metrics["summary"], metrics["baseline_summary"]])))
        return
    columns = list(next(iter(rows.values()), {}))
    calibration = f", calibration error {metrics['ece']:.3f}" if "ece" in metrics else ""
    print_table(
        title,
        ["", *columns],
        [[name, *(_cell(row[key]) for key in columns)] for name, row in rows.items()],
        note="\n".join(filter(None, [metrics["summary"] + calibration, metrics["baseline_summary"]])),
    )


def _overlap_lines(overlap: dict[str, Any] | None, what: str) -> list[str]:
    """A warning, and the metrics of the inputs in the training split and of the others."""
    if not overlap or not overlap["images"]:
        return []
    lines = [f"warning: {overlap['images']:,} of these {overlap['of']:,} {what} are in the training split of the run"]
    return lines + [
        f"{name}, {overlap[key]['images']:,} {what}: {overlap[key]['summary']}"
        for key, name in (("overlapping", "in the training split"), ("other", "not in the training split"))
        if key in overlap
    ]


def _run_probe(options: Options, kind: ProbeKind) -> None:
    if options.text_column is not None or replace(options.writing, seed=0) != Writing():
        raise ConfigError("a probe reads images and writes no text; omit --text-column, --beam and similar options.")
    if options.running != Running():
        raise ConfigError(
            "--merge, --engine, --device, --workers and --batch-size are for complete models; omit them with --probe."
        )
    from vitral.api import probe
    from vitral.data.sources.open import open_data

    data = open_data(options.data, options.image_column, options.label_column, "classify")
    if options.strict:
        data.refuse_problems(strict=True)
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
        f"{options.source} on {metrics['data']}: {kind} probe, {metrics['split']} split, {metrics['images']:,} images",
        ["labels", "images", "accuracy", ""],
        rows,
        note=_notes(metrics),
    )


def _notes(metrics: dict[str, Any]) -> str:
    """Notes below the table, one per line."""
    settings = {
        "knn": "k {k}, temperature {temperature:g}",
        "linear": "rate {lr:g}, decay {weight_decay:g}, chosen on {val_images:,} other images",
    }[metrics["probe"]]
    origin = " from the cache" * metrics["from_cache"]
    lines = [f"{metrics['width']:,} features ({metrics['features']}){origin}; {settings.format(**metrics)}"]
    unreadable = metrics["unreadable"]
    lines += [f"{unreadable:,} images cannot be read and were dropped (vitral check lists them)"] * bool(unreadable)
    return "\n".join([*lines, *metrics["notes"]])


def _cell(value: float | int) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
