import os
import subprocess
import sys
from pathlib import Path

import jupytext
import nbclient
import pytest

# Pictures and words that each must give; photographs and real weights may be missing, and then there are fewer.
EXPECTED = {
    "vit_step_by_step": (6, ("4.00 3.54 3.54 3.08", "0.841471", "(1, 197, 768)", "86,567,656", "616,225", "17.564")),
    "equations_to_pictures": (4, ("4.00 3.54 3.54 3.08", "(1, 4, 16)", "test accuracy after 8 epochs")),
    "what_a_head_looks_at": (8, ("sum to 1.0000", "16x24")),
    "encoder_decoder": (
        5,
        ("sum to 1.0000", "written: Ti amo molto <EOS>", "Molte grazie", "[7] words, the decoder [1, 1, 1, 1]"),
    ),
    "results_in_a_notebook": (1, ("['class', 'images', 'recall', 'precision', 'f1']", "8 images in the index")),
    "dino_attention": (7, ("large crops (4, 2, 1, 24, 24)", "rows sum to 1.0000 .. 1.0000", "k-NN by trained")),
}
# Tables and pictures that are displayed as HTML, by a word in each, in order.
DISPLAYED = {
    "results_in_a_notebook": (
        "digits-run/report.html",
        "VisionTransformer with",
        "digits-images/0.png",
        "digits-images/7.png",
        "8 images",
        "<figcaption>1.000 0.png",
    )
}
NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.py"))


QUICK = "vit_step_by_step"
"""The one that also runs in the fast set."""
MINUTES = "dino_attention"
"""The one that trains for minutes."""


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem == QUICK else pytest.mark.slow, id=path.stem) for path in NOTEBOOKS],
)
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
    count, goldens = EXPECTED[path.stem]
    assert len(said) == count
    for picture in said:
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    for golden in goldens:
        assert golden in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.stem != MINUTES], ids=lambda path: path.stem)
def test_a_notebook_runs_as_a_notebook(path, tmp_path):
    """All except the one that trains for minutes, whose cells run as a script above."""
    notebook = jupytext.read(path)
    assert sum(cell.cell_type == "code" for cell in notebook.cells) > 6
    nbclient.NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    pictures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert len(pictures) == EXPECTED[path.stem][0]
    if path.stem in DISPLAYED:
        shown = [
            o.data["text/html"]
            for c in notebook.cells
            for o in c.get("outputs", [])
            if "text/html" in o.get("data", {})
        ]
        assert len(shown) == len(DISPLAYED[path.stem])
        for source, word in zip(shown, DISPLAYED[path.stem], strict=True):
            assert word in source
