"""Damaged documents of run directories through everything that reads a run."""

import contextlib
import io
import shutil
import tempfile
from pathlib import Path
from random import Random

import torch

from attack.damage import mutate_json, mutate_json_lines
from attack.fuzz import Fuzz, refusals
from attack.images import picture
from attack.runs import RUNS, write_data
from vitral.cli.main import main
from vitral.data.sources.open import open_data
from vitral.inference.predictor import Predictor
from vitral.reporting.html import write_report
from vitral.reporting.pretrain import write_pretraining_report
from vitral.weights.rundir import read_run_config

EVERY = 4
"""Every so many documents, one run is resumed."""
DOCUMENTS = ("config.json", "metrics.jsonl", "tokenizer.json", "state.json", "compare.json", "results.json")
TEXT = "red cat 42"


class Documents(Fuzz):
    """2,000 damaged documents."""

    name = "documents"
    size = 2_000
    failure = (
        "any error but a VitralError of one line, an exit code but 0 and 2, a crash, 120 s for a run, 2 GiB of memory"
    )
    seconds = 120.0
    memory = 2**31

    def prepare(self, folder: Path) -> None:
        """Train one run of each kind."""
        (data := folder / "data").mkdir()
        write_data(data)
        for name, run in RUNS.items():
            _call(run.command(data, folder / name), allowed=(0,))

    def begin(self, folder: Path) -> None:
        """Open the data that reports are made of."""
        torch.set_num_threads(1)
        self.folder = folder
        self.image = picture()
        self.data = {
            name: open_data(run.source(folder / "data"), task=run.task)
            for name, run in RUNS.items()
            if run.verb == "train"
        }

    def damage(self, place: Path, number: int, chance: Random) -> None:
        """Copy a run and damage one of its documents."""
        name = list(RUNS)[number % len(RUNS)]
        shutil.copytree(self.folder / name, place / name, ignore=shutil.ignore_patterns("tensorboard", "report.html"))
        kind = chance.choice(sorted({path.name for path in place.rglob("*.json*") if path.name in DOCUMENTS}))
        path = chance.choice(sorted(place.rglob(kind)))
        change = mutate_json_lines if path.suffix == ".jsonl" else mutate_json
        path.write_bytes(change(path.read_bytes(), chance))

    def attack(self, place: Path, number: int) -> None:
        """Read the run, predict, write its report; every now and then, resume it."""
        (out,) = place.iterdir()
        run = RUNS[out.name]
        if run.verb != "compare":
            with refusals():
                read_run_config(out)
            with refusals():
                Predictor(out).predict(self.image if run.reads == "image" else TEXT)
            with refusals():
                write_report(out, self.data[out.name]) if run.verb == "train" else write_pretraining_report(out)
        if run.verb == "compare" or number // len(RUNS) % EVERY == 0:
            used = Path(tempfile.mkdtemp(dir=place.parent)) / out.name
            shutil.copytree(out, used)
            _call(run.command(self.folder / "data", used, resume=True), allowed=(0, 2))
            shutil.rmtree(used.parent)


def _call(words: list[str], allowed: tuple[int, ...]) -> None:
    """Run a command of vitral in this process."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        code = main(words)
    if code not in allowed:
        last = (printed.getvalue().strip().splitlines() or ["nothing was printed"])[-1]
        saved = Path(last.rstrip(".").rpartition(" ")[2])  # an internal error names the file of its traceback
        details = saved.read_text() if saved.suffix == ".txt" and saved.is_file() else last
        why = details.strip().splitlines()[-1]
        raise AssertionError(f"vitral {words[0]} ended with exit code {code}: {why}\n{details}")
