"""The digits recipe, chosen without the test images: five-fold cross-validation on the training part.

    python benchmarks/digits_choice.py [--folds 5]

Each candidate is the recipe with a few options changed; each fold of the 1,437 training images serves once as the test
part of a run on the other four. Writes benchmarks/results/digits_choice.json.
"""

import argparse
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from measure import write_json
from vitral import train
from vitral.data.sources.base import Data
from vitral.data.sources.digits import load_digits

CANDIDATES: dict[str, dict[str, Any]] = {
    "the recipe": {},
    "Muon rate 0.02": {"muon_lr": 0.02},
    "Muon rate 0.02, mixup 0.5": {"muon_lr": 0.02, "augment": {"mixup": 0.5}},
    "Muon rate 0.005": {"muon_lr": 0.005},
}


def fold(data: Data, number: int, folds: int) -> Data:
    """The training part alone, one fold of it as the test part."""
    train_part = data.splits["train"]
    order = train_part[torch.randperm(len(train_part), generator=torch.Generator().manual_seed(0))]
    test = order[number::folds]
    rest = order[~torch.isin(order, test)]
    return replace(data, splits={"train": rest.sort().values, "test": test.sort().values})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5)
    options = parser.parse_args()
    data, found = load_digits(), {}
    for name, changed in CANDIDATES.items():
        scores = []
        for number in range(options.folds):
            with tempfile.TemporaryDirectory() as folder:
                run = train(fold(data, number, options.folds), out=Path(folder) / "run", quiet=True, **changed)
            scores.append(100 * run.metrics["test"]["accuracy"])
        found[name] = scores
        told = " ".join(f"{score:.2f}" for score in scores)
        print(f"{name:28} {statistics.mean(scores):6.2f} %   ({told})", flush=True)
    print(f"wrote {write_json('digits_choice', {'accuracy': found})}")


if __name__ == "__main__":
    main()
