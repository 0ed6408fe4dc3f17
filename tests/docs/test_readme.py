"""What README tells people to type works."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_and_their_shapes_are_true(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = 0
    for block in blocks("python"):
        names = {}
        exec(block, names)
        for name, listed, shape in re.findall(r"^(\w+) = .*# (\[?)(\([\d, ]+\))", block, re.MULTILINE):
            value = names[name][0] if listed else names[name]
            assert str(tuple(value.shape)) == shape, name
            checked += 1
    assert checked == 4


@pytest.mark.slow
def test_commands_run(tmp_path):
    commands = [line[2:] for block in blocks("console") for line in block.splitlines()]
    assert len(commands) >= 6
    for command in commands:  # in their order: later ones use what earlier ones made
        program, *args = shlex.split(command)
        assert program == "vitral"
        done = subprocess.run([sys.executable, "-m", "vitral", *args], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout


def test_the_file_map_names_every_file():
    package = ROOT / "src" / "vitral"
    listed = README[README.index("## File map") :]
    for path in package.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"^ +{path.name} ", listed, re.MULTILINE), f"{path} is not in README's file map"
    for name in re.findall(r"^ +(\w+\.py) ", listed, re.MULTILINE):
        assert list(package.rglob(name)), f"README's file map names {name}, which does not exist"


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        prose = re.sub(r"`[^`\n]+`", "", page.read_text())
        for target in re.findall(r"\]\((?!http)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_number_of_models_is_true():
    from vitral import list_models

    assert f"| names | {len(list_models())} models" in README


def test_the_speed_table_is_what_was_measured():
    rows = json.loads((ROOT / "benchmarks" / "results" / "forward.json").read_text())["rows"]
    for row in rows:
        name = {"tiny": "Ti/16", "small": "S/16", "base": "B/16"}[row["model"]]
        speed = row["images_per_second"]
        numbers = " | ".join(f"{speed[peer]:#.3g}" for peer in ("vitral", "timm", "transformers"))
        ratio = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f} | {row['share_of_gemm_rate']:.0%}".replace("%", " %")
        assert f"| {name} | {row['batch']} | {numbers} | {ratio} |" in README


def test_make_targets_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\bmake ([a-z-]+)\b(?=\s*[`#]|`)", (ROOT / page).read_text()):
            assert target in targets, f"{page} names make {target}"
