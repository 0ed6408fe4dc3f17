import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbclient
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_a_script_and_draws_what_it_says(path, tmp_path):
    done = subprocess.run(
        [sys.executable, path],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"MPLBACKEND": "agg"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = [line.split("picture: ")[1] for line in done.stdout.splitlines() if "picture: " in line]
    assert len(said) == 6
    for picture in said:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    for golden in ("4.00 3.54 3.54 3.08", "0.841471", "(1, 197, 768)", "86,567,656", "616,225", "17.564"):
        assert golden in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_a_notebook(path, tmp_path):
    notebook = jupytext.read(path)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) > 8
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == 6
