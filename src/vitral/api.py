"""The public functions, which the command line calls too."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Unpack, cast

from vitral.comparison.compare import Comparison, compare_models
from vitral.config import (
    CompareConfig,
    ExportFormat,
    Preset,
    PretrainConfig,
    ProbeKind,
    Probing,
    QuantizeOptions,
    Running,
    TaskName,
    TrainConfig,
    Writing,
)
from vitral.data.sources.base import Data
from vitral.data.sources.open import open_data, open_images
from vitral.errors import ConfigError
from vitral.inference.evaluate import evaluate_run, probe_source
from vitral.inference.export import Exported, describe, format_of, is_of_text, write_export
from vitral.inference.frozen import FrozenStart
from vitral.inference.health import QUERIES, Health
from vitral.inference.predictor import Predictor
from vitral.inference.quantize import quantize
from vitral.models.backbone import Backbone
from vitral.models.merge import merged
from vitral.options import CompareDict, PretrainConfigDict, ProbingDict, QuantizeOptionsDict, TrainConfigDict
from vitral.recipes import layered, list_recipes, read_preset, read_recipe
from vitral.reporting.html import write_report
from vitral.reporting.pretrain import PICTURES, draw_progress, write_pretraining_report
from vitral.signatures import list_options
from vitral.tasks.method import Method
from vitral.tasks.open import infer_task
from vitral.training.auto import AUTO, choose, survey
from vitral.training.finetune import require_weights
from vitral.training.pretrain import pretrain_model
from vitral.training.session import Run, train_model
from vitral.weights.fetch import available
from vitral.weights.hub import hub_reachable
from vitral.weights.pretrained import find_pretrained
from vitral.weights.rundir import PRETRAIN, AnyModel, RunConfig, is_run, read_run_config


def resolve_config(
    data: Data,
    given: Mapping[str, Any],
    task: str | None = None,
    preset: str | None = None,
    resumed: RunConfig | None = None,
) -> TrainConfig:
    """Defaults < recipe of the data for the task, or for all < preset < options given.

    The options of a run that is resumed take the place of the defaults and the recipe.
    """
    if resumed is not None:
        base = resumed.training(TrainConfig).to_dict()
    else:
        names = [f"{data.recipe}-{task or infer_task(data)}", data.recipe] if data.recipe else []
        base = next((read_recipe(name) for name in names if name in list_recipes()), {})
    return TrainConfig.from_dict(layered(base, read_preset(preset) if preset else {}, given))


def resolve_training(
    data: Data,
    given: Mapping[str, Any],
    task: str | None = None,
    preset: str | None = None,
    resumed: RunConfig | None = None,
) -> tuple[TrainConfig, list[str]]:
    """As `resolve_config`, with `--model auto` resolved from the data: the options, and what to report about them."""
    config = resolve_config(data, given, task, preset, resumed)
    if config.model != AUTO or resumed is not None or data.what != "images":
        return config, []
    explicit = layered(read_preset(preset) if preset else {}, {k: v for k, v in given.items() if k != "model"})
    choice = choose(survey(data, task or infer_task(data)), _can_be_had, explicit)
    return TrainConfig.from_dict(layered(choice.options, explicit)), choice.lines


def _can_be_had(weights: str) -> bool:
    """Whether published weights are on this machine, or can be downloaded."""
    return available(weights) is not None or (bool(find_pretrained(weights).repository) and hub_reachable())


@list_options
def train(
    data: str | Path | Data,
    *,
    out: str | Path,
    task: TaskName | None = None,
    preset: Preset | None = None,
    resume: bool = False,
    quiet: bool = False,
    command: str = "",
    **options: Unpack[TrainConfigDict],
) -> Run:
    """Train a model and write its run directory.

    Args:
        data: Name or path of a data set, or a `Data` that `open_data` returned.
        out: Run directory to write.
        task: One of `vitral.config.TaskName`; inferred from the data by default.
        preset: One of `vitral.config.Preset`: how to fine-tune the weights that `model` names. `options` override it.
        resume: Continue the run in `out` from its newest checkpoint; start one if there is none.
        quiet: Print nothing.
        command: The command line, for the record in the run.
        options: Fields of `vitral.config.TrainConfig`.

    Returns:
        The finished run, with its metrics.

    Raises:
        VitralError: An option, the data or the run directory cannot be used.

    Example:
        >>> run = vitral.train("digits", out="runs/digits", epochs=20)
    """
    resumed = run_to_resume(Path(out), resume)
    if task is None and resumed is not None:
        task = cast(TaskName, resumed.task)
    opened = data if isinstance(data, Data) else open_data(data, task=task)
    config, notes = resolve_training(opened, options, task, preset, resumed)
    opened = replace(opened, notes=[*opened.notes, *notes])
    return train_and_report(
        opened, config, Path(out), task=task, preset=preset, resume=resume, quiet=quiet, command=command
    )


def run_to_resume(out: Path, resume: bool, pretraining: bool = False) -> RunConfig | None:
    """Return the run of that kind whose options a resumed run keeps; None if there is none, or a run is started."""
    run = read_run_config(out) if resume and is_run(out) else None
    return run if run and (run.task == PRETRAIN) == pretraining else None


def train_and_report(
    data: Data, config: TrainConfig, out: Path, *, task: str | None, preset: str | None, resume: bool, quiet: bool,
    command: str,
) -> Run:  # fmt: skip
    """Train, then write the report."""
    if preset is not None:
        require_weights(config.model, f"--preset {preset}")

    return train_model(
        data, config, out, task=task, resume=resume, quiet=quiet, command=command,
        start=None if config.probe == "none" else FrozenStart(),
        report=lambda run: write_report(run.path, run.data, quiet),
    )  # fmt: skip


def resolve_pretraining(data: Data, given: Mapping[str, Any], resumed: RunConfig | None = None) -> PretrainConfig:
    """Defaults < recipe of the method < recipe of the data for the method < options given.

    The options of a run that is resumed take the place of the defaults and the recipes.
    """
    if resumed is not None:
        return PretrainConfig.from_dict(layered(resumed.training(PretrainConfig).to_dict(), given))
    method = given.get("method", PretrainConfig().method)
    names = [f"pretrain-{method}", f"{data.recipe}-{method}"]
    recipes = [read_recipe(name) for name in names if name in list_recipes()]
    return PretrainConfig.from_dict(layered({"method": method}, *recipes, given))


@list_options
def pretrain(
    data: str | Path | Data,
    *,
    out: str | Path,
    labelled: str | Path | Data | None = None,
    resume: bool = False,
    quiet: bool = False,
    command: str = "",
    **options: Unpack[PretrainConfigDict],
) -> Run:
    """Pretrain a model on images without their labels, and write its run directory.

    Args:
        data: Name or path of a data set or a folder of images, or a `Data` that `open_images` returned.
        out: Run directory to write.
        labelled: Data with class labels, for the k-NN accuracy during training; by default the labels of `data`, if
            there are any.
        resume: Continue the run in `out` from its newest checkpoint; start one if there is none.
        quiet: Print nothing.
        command: The command line, for the record in the run.
        options: Fields of `vitral.config.PretrainConfig`.

    Returns:
        The finished run.

    Raises:
        VitralError: An option, the data or the run directory cannot be used.

    Example:
        >>> run = vitral.pretrain("photos/", method="dino", out="runs/dino")
    """
    opened = data if isinstance(data, Data) else open_images(data)
    watched = open_data(labelled) if isinstance(labelled, str | Path) else labelled
    config = resolve_pretraining(opened, options, run_to_resume(Path(out), resume, pretraining=True))
    return pretrain_and_report(opened, watched, config, Path(out), resume=resume, quiet=quiet, command=command)


def pretrain_and_report(
    data: Data, labelled: Data | None, config: PretrainConfig, out: Path, *, resume: bool, quiet: bool, command: str
) -> Run:
    """Pretrain with health signals, then write the report."""
    data = data.with_splits(config.val_fraction, 0.0, config.split_seed)
    health = Health(data, labelled and labelled.with_splits(QUERIES, 0.0, seed=0), config)

    def look(method: Method, epoch: int) -> tuple[dict[str, float], str]:
        if epoch % config.picture_every == 0 or epoch < 2:  # also the last, which is -1
            draw_progress(method, health.examples(PICTURES), out / "pictures", epoch)
        return health.look(method)

    return pretrain_model(
        data, config, out, look, resume=resume, quiet=quiet, command=command,
        report=lambda run: write_pretraining_report(run.path),
    )  # fmt: skip


@list_options
def compare(
    data: str | Path | Data, *, models: Sequence[str], out: str | Path, quiet: bool = False, command: str = "",
    **options: Unpack[CompareDict],
) -> Comparison:  # fmt: skip
    """Train models on growing shares of the same data with the same budget, measure them, and write a report.

    An interrupted comparison continues when it is called again.

    Args:
        data: Name or path of a data set, or a `Data` that `open_data` returned.
        models: Names of models.
        out: Folder to write.
        quiet: Print nothing.
        command: The command line, for the record in the results.
        options: Fields of `vitral.config.CompareConfig` (`fractions`, `seeds`, ...) and of `TrainConfig`, which all
            models share.

    Returns:
        The results; they are also in `results.json` and `report.html`.

    Raises:
        VitralError: An option, the data or the folder cannot be used.

    Example:
        >>> models = ["vit_nano_patch2_8", "vit_nano_conv_patch2_8"]
        >>> vitral.compare("digits", models=models, out="runs/two", max_minutes=1)
    """
    opened = data if isinstance(data, Data) else open_data(data, task="classify")
    own = {f.name for f in fields(CompareConfig)}
    chosen = CompareConfig.from_dict({"models": models} | {k: v for k, v in options.items() if k in own})
    train = resolve_config(opened, {k: v for k, v in options.items() if k not in own}, "classify")
    return compare_and_report(opened, chosen, train, Path(out), quiet=quiet, command=command)


def compare_and_report(
    data: Data, compare: CompareConfig, train: TrainConfig, out: Path, *, quiet: bool, command: str
) -> Comparison:
    """Compare, with messages on stderr."""

    def say(text: str) -> None:
        if not quiet:
            print(text, file=sys.stderr, flush=True)

    return compare_models(data, compare, train, out, say=say, quiet=quiet, command=command)


def evaluate(
    source: str | os.PathLike[str] | Predictor,
    data: str | Path | Data,
    *,
    split: str | None = None,
    strict: bool = False,
    writing: Writing | None = None,
    running: Running | None = None,
) -> dict[str, Any]:
    """Evaluate a trained model on a split of labelled data.

    Data that the run was trained on get the run's split again. Images of the training split among the evaluated ones
    are counted in `training_overlap`, with metrics for them and for the others.

    Args:
        source: A run, a file of published weights, an exported file, or a `Predictor`.
        data: A name, a path, or data that are already open.
        split: The split to evaluate; by default test, then validation, then everything.
        strict: Raise for rows and images that cannot be used, instead of dropping them.
        writing: How a model that writes text decodes; greedy by default.
        running: How the model is run: engine, token merging and so on.

    Returns:
        The metrics of the task, with `data`, `split`, `summary`, `notes` and `baselines`: the metrics of trivial
        predictors, fitted on the training split of the data if they have one.

    Raises:
        VitralError: The model or the data cannot be used.

    Example:
        >>> vitral.evaluate("runs/digits", "digits")["accuracy"]
    """
    if not isinstance(source, Predictor):
        source = Predictor(source, writing=writing, **(running or Running()).to_dict())
    opened = data if isinstance(data, Data) else open_data(data, task=source.task.name)
    return evaluate_run(source, opened, split, strict)


@list_options
def export(
    source: str | os.PathLike[str] | AnyModel | Predictor,
    path: str | Path,
    format: ExportFormat | None = None,
    *,
    merge: float = Running.merge,
    dynamic_size: bool = False,
    int8: bool = False,
    data: str | Path | Data | None = None,
    **options: Unpack[QuantizeOptionsDict],
) -> Exported:
    """Write a model as one file that runs without vitral, and verify it.

    Args:
        source: A run, a file of weights, a model, or a `Predictor`.
        path: File to write. `vitral.Predictor` opens ONNX and OpenVINO files; a "pt2" file runs in torch
            (docs/export.md), and vitral does not open it.
        format: "onnx", "openvino" or "pt2"; by default from the suffix of `path`.
        merge: Token merging in the file (`vitral.models.merge`): faster, with nearly the same answers.
        dynamic_size: Accept images of any size that is a multiple of the patch size.
        int8: Quantize: smaller, and faster on processors with int8 instructions.
        data: Labelled data to calibrate and evaluate an int8 model with.
        options: Fields of `vitral.config.QuantizeOptions`, for int8.

    Returns:
        What was written, and how far its answers differ from those of the model.

    Raises:
        VitralError: The model cannot be exported in this way.

    Example:
        >>> vitral.export("runs/digits", "digits.onnx")
    """
    path = Path(path)
    format = format_of(path, format)
    predictor = source if isinstance(source, Predictor) else Predictor(source)
    name = Path(source).name if isinstance(source, str | os.PathLike) else type(predictor.model).__name__
    if int8 and is_of_text(predictor.model):
        raise ConfigError("int8 is for models of images, and this one reads or writes text; omit int8.")
    if merge:
        predictor = predictor.with_model(merged(predictor.model, merge))
    if int8 != (data is not None):
        raise ConfigError(
            "int8 needs data for calibration and evaluation, and data are only for int8: give both or neither."
        )
    if data is not None:
        if dynamic_size:
            raise ConfigError("int8 is calibrated for images of one size; omit int8 or dynamic_size.")
        opened = data if isinstance(data, Data) else open_data(data, task=predictor.task.name)
        return quantize(predictor, opened, name, path, format, QuantizeOptions.from_dict(options))
    document = describe(predictor.model, predictor.task, predictor.inputs, name)
    preprocess = predictor.preprocess if predictor.inputs.what == "image" else None
    return write_export(predictor.model, preprocess, document, path, format, dynamic_size)


@list_options
def probe(
    source: str | os.PathLike[str] | Backbone,
    data: str | Path | Data,
    kind: ProbeKind = "knn",
    *,
    split: str | None = None,
    seed: int = 0,
    **options: Unpack[ProbingDict],
) -> dict[str, Any]:
    """Classify frozen features by their nearest neighbours ("knn") or by a linear layer ("linear").

    Args:
        source: A model, a run, a file of weights, hf-hub:owner/name, the name of a model with random weights, or
            "pixels", the images themselves.
        data: Name or path of a data set with class labels, or a `Data` that `open_data` returned.
        kind: "knn" or "linear".
        split: Split to evaluate; by default test, or else validation.
        seed: Seed of random weights.
        options: Fields of `vitral.config.Probing`.

    Returns:
        Accuracy with its interval, and the settings of the probe.

    Raises:
        VitralError: An option, the model or the data cannot be used.

    Example:
        >>> vitral.probe("runs/digits", "digits")["accuracy"]
    """
    opened = data if isinstance(data, Data) else open_data(data, task="classify")
    source = source if isinstance(source, Backbone) else os.fspath(source)
    return probe_source(source, opened, kind, Probing.from_dict(options), split, seed)
