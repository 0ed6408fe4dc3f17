"""The typed keywords of the public functions are the options of config.py."""

import inspect
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from IPython.core.completer import IPCompleter, provisionalcompleter

import vitral
from typed_options import FILE, GROUPS, generated
from vitral import config, options
from vitral.errors import UnknownNameError

ROOT = Path(__file__).parents[1]


def names(*groups):
    return {field.name for group in groups for field in fields(group)}


def keywords(function):
    """The keyword-only parameters whose default is not shown: the options."""
    shown = inspect.signature(function).parameters.values()
    return {p.name for p in shown if p.kind is p.KEYWORD_ONLY and p.default is ...}


def test_the_generated_file_is_up_to_date():
    assert FILE.read_text() == generated()


@pytest.mark.parametrize("group", GROUPS)
def test_a_typed_dict_has_the_fields_of_its_group(group):
    typed = get_type_hints(getattr(options, f"{group}Dict"))
    assert set(typed) == names(getattr(config, group)) - {"models"}


def test_groups_are_accepted_as_objects_and_as_dictionaries():
    assert get_type_hints(options.TrainConfigDict)["augment"] == config.Augmentation | options.AugmentationDict


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (vitral.train, names(config.TrainConfig)),
        (vitral.pretrain, names(config.PretrainConfig)),
        (vitral.compare, names(config.TrainConfig, config.CompareConfig) - {"models"}),
        (vitral.probe, names(config.Probing)),
        (vitral.export, names(config.QuantizeOptions)),
        (vitral.Index.build, names(config.Indexing)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_signature_lists_every_option(function, expected):
    assert keywords(function) == expected
    assert "options" not in inspect.signature(function).parameters


@pytest.mark.parametrize("jedi", [False, True])
def test_a_notebook_completes_options(jedi):
    completer = IPCompleter(namespace={"vitral": vitral}, use_jedi=jedi)
    typed = "vitral.train('digits', warm"
    with provisionalcompleter():
        assert "warmup_epochs=" in [found.text for found in completer.completions(typed, len(typed))]


def test_an_unknown_option_is_an_error_at_run_time_too(tmp_path):
    with pytest.raises(UnknownNameError, match="unknown option 'epoch'; did you mean epochs"):
        vitral.train("digits", out=tmp_path / "run", epoch=3)


@pytest.mark.slow
def test_a_type_checker_accepts_options_and_finds_mistakes(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
        import vitral
        run = vitral.train("digits", out="run", task="classify", epochs=3, augment={"flip": 0.5})
        vitral.train("digits", out="run", model=run, precision="fp32")
        vitral.compare("digits", models=["a"], out="run", seeds=2, lr=0.1)
        vitral.train("digits", out="run", epoch=3)
        vitral.train("digits", out="run", epochs="3")
        vitral.train("digits", out="run", task="clasify")
        vitral.train("digits", out="run", augment={"flop": 0.5})
        vitral.pretrain("digits", out="run", method="dina")
        vitral.compare("digits", models=["a"], out="run", seed_count=2)
        """)
    )
    (tmp_path / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{ROOT / "src"}"]}}')
    pyright = Path(sys.executable).with_name("pyright")
    command = [pyright, "--pythonpath", sys.executable, "--project", tmp_path, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    wrong = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line or " - error:" in line}
    assert wrong == set(range(6, 12)), done.stdout
