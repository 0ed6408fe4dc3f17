"""What the page on serving tells people to type works."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from process import serving
from small_server import picture, train_runs

from vitral.cli.main import parse
from vitral.cli.serve import Options

PAGE = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_every_command_is_one_that_can_be_given():
    commands = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("vitral ")]
    commands += [re.search(r"bin/(vitral serve .*)", block)[1] for block in blocks("ini")]
    assert len(commands) == 3
    for command in commands:
        options = parse(Options, shlex.split(command)[2:], "vitral serve")
        assert options.sources, command


def test_every_code_is_named():
    source = "".join(p.read_text() for p in (Path(__file__).parents[2] / "src/vitral/serving").glob("*.py"))
    codes = set(re.findall(r'(?:RefusedError\(|refusal\()\s*\d+,\s*"(\w+)"', source)) | {"bad_request", "bad_method"}
    assert len(codes) > 15
    for code in codes - {"gone"}:  # nobody is there to read that
        assert f"`{code}`" in PAGE, code


@pytest.mark.slow
def test_examples_run(tmp_path, monkeypatch, capsys):
    assert shutil.which("curl")
    monkeypatch.chdir(tmp_path)
    run = train_runs(tmp_path, ("classify",))["classify"]
    Path("seven.png").write_bytes(picture())
    with serving(f"digits={run}") as (url, _, _):
        asked = [line for block in blocks("sh") for line in block.splitlines() if line.startswith("curl ")]
        assert len(asked) == 4
        for command in asked:
            done = subprocess.run(
                [*shlex.split(command.replace("http://127.0.0.1:8000", url)), "-s"], capture_output=True
            )
            told = json.loads(done.stdout)
            assert "error" not in told
        for block in blocks("python"):
            exec(block.replace("http://127.0.0.1:8000", url), {})
            label, probability = capsys.readouterr().out.split()
            assert label in "0123456789"
            assert 0 < float(probability) < 1
