"""Tasks by their names, and which of them a data set is for."""

from vitral.config import Seq2SeqConfig, TextConfig, TrainConfig
from vitral.data.inputs import ImageInputs, Inputs, TextInputs
from vitral.data.sources.base import Data, Texts
from vitral.data.text import reading_length
from vitral.errors import ConfigError, unknown_name
from vitral.tasks.base import Task, load_tokenizer, speaks
from vitral.tasks.classify import Classify
from vitral.tasks.complete import Complete
from vitral.tasks.detect import Detect
from vitral.tasks.multilabel import Multilabel
from vitral.tasks.regress import Regress
from vitral.tasks.segment import Segment
from vitral.tasks.tag import Tag
from vitral.tasks.write import Caption, Translate
from vitral.weights.rundir import Described

TASKS: dict[str, type[Task]] = {
    task.name: task for task in (Classify, Multilabel, Regress, Segment, Detect, Caption, Translate, Complete, Tag)
}
_BY_KIND = {"label": "classify", "labels": "multilabel", "numbers": "regress", "tags": "tag", "none": "complete"}


def infer_task(data: Data) -> str:
    """The task that the data leave no doubt about."""
    if data.boxes is not None and data.masks is not None:
        raise ConfigError(f"{data.name} has boxes and masks; say which to learn: --task detect or --task segment.")
    if data.boxes is not None:
        return "detect"
    if data.texts is not None and data.kind != "tags":
        return "caption" if data.what == "images" else "translate"
    return "segment" if data.masks is not None else _BY_KIND[data.kind]


def make_task(name: str | None, data: Data, config: TrainConfig) -> Task:
    """The task of that name on the data, or else the one the data are for."""
    name = name or infer_task(data)
    if name not in TASKS:
        raise unknown_name("task", name, TASKS)
    task = TASKS[name].from_data(data, config)
    if task.spatial and (config.augment.mixup or config.augment.cutmix):
        raise ConfigError(f"mixup and cutmix do not go with --task {name}; set --augment.mixup 0 --augment.cutmix 0.")
    return task


def make_inputs(data: Data, config: TrainConfig, task: str) -> TextInputs | None:
    """How the texts of the data are read; None where they are images, which the model tells how to read."""
    if not isinstance(data.inputs, Texts):
        return None
    return TextInputs(data.tokenizers["source"], reading_length(data, config.text), ends=task != Complete.name)


def load_inputs(about: Described) -> Inputs:
    """How a run or an exported file reads images or texts, from what it records."""
    if about.preprocess is not None:
        return ImageInputs(about.preprocess)
    tokenizer, length = load_tokenizer(about, "source"), about.given("source_length")
    encoder = about.model.encoder if isinstance(about.model, Seq2SeqConfig) else about.model
    if isinstance(encoder, TextConfig) and not speaks(encoder, tokenizer, length):
        expected = f"at most {encoder.max_length}, with a tokenizer of {encoder.vocab_size} tokens"
        raise about.wrong("source_length", f"{expected} (there is one of {len(tokenizer)})")
    return TextInputs(tokenizer, length, ends=about.task != Complete.name)


def load_task(about: Described) -> Task:
    """The task of a run or of an exported file, from what it records; raises if its model does not fit the task."""
    if about.task not in TASKS:
        raise about.wrong("task", f"one of {', '.join(TASKS)}")
    task = TASKS[about.task].from_run(about)
    if about.model is not None and not task.fits(about):
        raise about.wrong(
            "task", f"what the model does: a {about.architecture} of this shape does not {about.task} these labels"
        )
    return task
