"""How faithful each explanation is to a trained model: deletion and insertion curves on its test images.

    python benchmarks/faithfulness.py RUN DATA [--images 500] [--name digits]

RUN is a run directory, DATA what it was trained on. Adds a table to benchmarks/results/faithfulness.json.
"""

import argparse
import json
from pathlib import Path

import torch

from measure import write_json
from methods import METHODS
from vitral import Predictor
from vitral.data.sources.open import open_data
from vitral.data.transforms import eval_transform, normalize
from vitral.explanation.faithfulness import curves

RESULTS = Path(__file__).parent / "results" / "faithfulness.json"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("data")
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--name", default="")
    options = parser.parse_args()
    predictor, data = Predictor(options.run), open_data(options.data)
    model, p = predictor.vit, predictor.preprocess
    chosen = data.splits["test"][: options.images]
    pixels = [eval_transform(data.images.read(int(i), predictor.mode), p) for i in chosen]
    x = normalize(torch.stack(pixels), p)
    with torch.no_grad():
        target = model(x).argmax(1)  # what the model says is explained, right or wrong
    table = {}
    for name, method in METHODS.items():
        measured = curves(model, x, method(model, x, target), target)
        table[name] = {
            "deletion": float(measured.deletion_auc.mean()),
            "insertion": float(measured.insertion_auc.mean()),
        }
        print(
            f"{name:28} deletion {table[name]['deletion']:.3f}   insertion {table[name]['insertion']:.3f}", flush=True
        )
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    tables = before.get("tables", {}) | {options.name or data.name: {"images": len(x), "methods": table}}
    print(f"wrote {write_json('faithfulness', {'tables': tables})}")


if __name__ == "__main__":
    main()
