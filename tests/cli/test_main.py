import json
import os
import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from vitral import __version__
from vitral.cli.main import VERBS, main, parse
from vitral.models.cost import model_cost
from vitral.models.zoo import MODELS


def run(capsys, *args):
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


def test_help_names_every_verb(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for verb, (_, line) in VERBS.items():
        assert f"  {verb}" in out
        assert line in out
    assert run(capsys) == (0, out, "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0
    examples = re.findall(
        r"^  (?:.*\| )?vitral (\S+) (.*?)(?: > .*)?$", out.partition("\nExamples:\n")[2], re.MULTILINE
    )
    assert verb in dict(examples)
    for other, words in examples:  # each can be typed as it stands
        made = parse(import_module(VERBS[other][0]).Options, shlex.split(words), prog=f"vitral {other}")
        assert not isinstance(made, int), words


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"vitral {__version__}\n", "")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["cots"], "vitral: unknown verb 'cots'; did you mean cost or convert? vitral --help lists all.\n"),
        (
            ["cost", "vit_tiny_patch16_22"],
            "vitral: unknown model 'vit_tiny_patch16_22'; did you mean vit_tiny_patch16_224",
        ),
        (
            ["cost", "vit_tiny_patch16_224", "--img-size", "225"],
            "vitral: img_size must be a multiple of patch_size (16), got 225",
        ),
        (
            ["cost", "vit_tiny_patch16_224", "--imgsize", "3"],
            "vitral: unknown option or surplus word --imgsize, 3; did you mean --img-size? vitral cost --help",
        ),
        (
            ["cost", "vit_tiny_patch16_224", "--depth", "x"],
            "vitral: --depth cannot take 'x'. vitral cost --help lists all options.",
        ),
        (["cost"], "vitral: MODEL is missing. vitral cost --help lists all options."),
        (["models", "zzz"], "vitral: unknown model or pattern 'zzz'"),
    ],
)
def test_the_users_mistake_is_one_line_and_exit_code_2(capsys, args, message):
    code, out, err = run(capsys, *args)
    assert code == 2
    assert out == ""
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_our_mistake_is_exit_code_1_with_the_traceback_in_a_file(capsys, monkeypatch):
    monkeypatch.setattr("vitral.cli.models.list_models", lambda pattern, pretrained: 1 / 0)
    code, out, err = run(capsys, "models")
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    path = err.rsplit(" in ", 1)[1].strip().removesuffix(".")
    with open(path) as file:
        assert "ZeroDivisionError" in file.read()
    os.remove(path)


def test_ctrl_c_is_exit_code_130(capsys, monkeypatch):
    def interrupt(pattern, pretrained):
        raise KeyboardInterrupt

    monkeypatch.setattr("vitral.cli.models.list_models", interrupt)
    assert run(capsys, "models")[0] == 130


def test_models_lists_what_matches(capsys):
    code, out, _ = run(capsys, "models", "deit3_*")
    assert code == 0
    assert "8 models" in out
    assert "deit3_base_patch16_224" in out
    assert "86.6 M" in out
    assert "vit_tiny" not in out
    listed = json.loads(run(capsys, "models", "--json")[1])
    assert [entry["name"] for entry in listed] == list(MODELS)
    assert all(entry["params"] == model_cost(MODELS[entry["name"]].config).params for entry in listed)


def test_cost_prints_the_golden_values(capsys):
    code, out, _ = run(capsys, "cost", "vit_base_patch16_224")
    assert code == 0
    for value in ("86,567,656", "17.564 G", "38,809", "616,225", "16 *"):
        assert value in out
    document = json.loads(run(capsys, "cost", "vit_base_patch16_224", "--img-size", "384", "--json")[1])
    assert document["cost"]["params"] == 86_859_496
    assert round(document["cost"]["macs"] / 1e9, 3) == 55.484
    assert {row["patch_size"]: row["tokens"] for row in document["patch_sizes"]}[32] == 145


def test_cost_takes_two_sides_and_every_option(capsys):
    args = [
        "--img-size",
        "480",
        "640",
        "--patch-size",
        "8",
        "16",
        "--depth",
        "3",
        "--embed-dim",
        "60",
        "--num-heads",
        "5",
    ]
    args += ["--mlp-ratio", "3", "--reg-tokens", "4", "--in-chans", "2", "--num-classes", "7"]
    document = json.loads(run(capsys, "cost", "vit_tiny_patch16_224", *args, "--json")[1])
    assert document["cost"]["grid"] == [60, 40]
    assert document["cost"]["tokens"] == 60 * 40 + 5
    config = document["config"]
    assert (config["depth"], config["embed_dim"], config["num_heads"], config["mlp_ratio"]) == (3, 60, 5, 3)
    assert (config["reg_tokens"], config["in_chans"], config["num_classes"]) == (4, 2, 7)
    assert run(capsys, "cost", "vit_tiny_patch16_224", *args)[0] == 0


def test_a_full_disk_is_not_called_our_error():
    command = f'"{sys.executable}" -m vitral models > /dev/full'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "vitral: No space left on device.\n")


def test_tables_are_never_cut(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = run(capsys, "models", "vit_base_patch16_224*")
    assert "vit_base_patch16_224.augreg_in21k   224x224x3      197        103 M   17.6 G   augreg" in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize("args", [["models"], ["cost", "vit_base_patch16_224"], ["models", "--json"]])
def test_the_command_is_quiet_when_nobody_reads_its_output(args):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-m", "vitral", *args], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "code", ["import vitral; vitral.list_models()", "import vitral.cli.main as m; m.main(['--help'])"]
)
def test_torch_is_not_imported_before_it_is_needed(code):
    check = f"{code}\nimport sys; sys.exit('torch' in sys.modules or 'tyro' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("args", [["models"], ["cost", "vit_tiny_patch16_224"]])
def test_lists_and_costs_need_no_torch(args):
    check = f"from vitral.cli.main import main; main({args})\nimport sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], stdout=subprocess.DEVNULL).returncode == 0
