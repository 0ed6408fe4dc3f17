import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import vitral

ROOT = Path(__file__).parents[1]


def test_public_names():
    names = (
        "Index Predictor VitralError __version__ compare create_model evaluate explain export list_models load_model "
        "pretrain probe save_model train"
    )
    assert sorted(vitral.__all__) == names.split()
    for name in vitral.__all__:
        assert getattr(vitral, name) is not None
    assert set(dir(vitral)) == set(vitral.__all__)
    with pytest.raises(AttributeError, match="no attribute 'train_model'; public names: "):
        vitral.train_model  # noqa: B018


def test_pyproject_gives_ranges_and_constraints_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for requirement in project["dependencies"] + extras:
        assert "==" not in requirement
        assert ">=" in requirement
    assert "torch>=2.6" in project["dependencies"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert "torch==2.13.0" in pins


@pytest.mark.slow
def test_the_wheel_installs_into_an_empty_venv(tmp_path):
    def run(*command, **kwargs):
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True, cwd=tmp_path, **kwargs)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    run(sys.executable, "-m", "venv", "empty")
    run("empty/bin/python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    assert run("empty/bin/vitral", "--version", env=clean) == f"vitral {vitral.__version__}\n"
    script = "import vitral; m = vitral.create_model('vit_nano_patch2_8'); print(vitral.__version__, type(m).__name__)"
    assert run("empty/bin/python", "-c", script, env=clean) == f"{vitral.__version__} VisionTransformer\n"
    assert "vit_nano_patch2_8" in run("empty/bin/vitral", "models", env=clean)
    run("empty/bin/vitral", "train", "digits", "--epochs", "1", "--out", "run", env=clean)  # with data and recipe
    assert (tmp_path / "run" / "report.html").exists()
