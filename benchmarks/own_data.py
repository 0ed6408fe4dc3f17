"""The first command on images of one's own: `vitral train FOLDER` and nothing else, once per fold.

    python scripts/stamp_folds.py DIR
    vitral fetch vit_small_patch14_focus
    python benchmarks/own_data.py DIR             # with the fetched weights in the cache
    python benchmarks/own_data.py DIR --offline   # with an empty cache and no hub

Each fold starts with a cache that has nothing but the weights. Prints the accuracy on the test images of every fold,
the accuracy of all folds together with its 95 % interval, the seconds until the first answer (the linear probe) and
until the command returns. Writes benchmarks/results/own-data[-offline].json.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import write_json
from vitral.tasks.metrics import wilson_interval
from vitral.weights.fetch import cache_folder

FIRST = "linear probe"
"""What the line with the first answer begins with."""


def train(fold: Path, options: list[str], offline: bool, work: Path) -> dict[str, Any]:
    """Run the command on one fold and return its scores and times."""
    cache = work / f"cache-{fold.name}"
    (cache / "vitral").mkdir(parents=True)
    if not offline:
        shutil.copytree(cache_folder("weights"), cache / "vitral" / "weights")
    env = {**os.environ, "XDG_CACHE_HOME": str(cache), "HF_HUB_OFFLINE": "1"}
    run = work / fold.name
    command = [sys.executable, "-m", "vitral", "train", str(fold), "--out", str(run), *options]
    began, first = time.monotonic(), None
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            if first is None and line.startswith(FIRST):
                first = time.monotonic() - began
    seconds = time.monotonic() - began
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    document = json.loads((run / "config.json").read_text())
    test, probe = document["metrics"]["test"], document.get("probe") or {}
    return {
        "fold": fold.name, "images": test["images"], "accuracy": test["accuracy"], "model": document["model_name"],
        "seconds": seconds, "training_seconds": document["spent"]["seconds"], "first_answer_seconds": first,
        "probe_accuracy": probe.get("accuracy"), "probe_kept": probe.get("kept"),
    }  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--offline", action="store_true", help="with an empty cache and no hub")
    parser.add_argument("--folds", type=int, nargs="+", default=range(5))
    parser.add_argument("--out", help="name of the results")
    given, options = parser.parse_known_args()
    rows = []
    with tempfile.TemporaryDirectory() as work:
        for number in given.folds:
            rows.append(train(given.folder / f"fold-{number}", options, given.offline, Path(work)))
            print(json.dumps(rows[-1]), flush=True)
    images = sum(row["images"] for row in rows)
    right = sum(round(row["images"] * row["accuracy"]) for row in rows)
    low, high = wilson_interval(right, images)
    slowest = max(row["seconds"] for row in rows)
    print(
        f"accuracy {right / images:.1%} (95 %: {low:.1%} to {high:.1%}), {images} images; slowest fold {slowest:.0f} s"
    )
    name = given.out or ("own-data-offline" if given.offline else "own-data")
    pooled = {"accuracy": right / images, "accuracy_95": [low, high], "images": images, "slowest_seconds": slowest}
    print(write_json(name, {"options": options, "pooled": pooled, "folds": rows}))


if __name__ == "__main__":
    main()
