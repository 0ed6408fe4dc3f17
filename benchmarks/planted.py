"""A planted truth: how much of each explanation lies in the box that holds the digit.

    python benchmarks/planted.py [--epochs 14] [--images 300] [--run DIR]

Trains a small ViT (patches of 4, linear projection) on `data/sources/scenes`, then asks every method for the true class
of test scenes it gets right: the share of the map's positive mass inside the digit's box, over the share of the area
that the box covers. 1 is chance. A run that is in DIR already is used as it is. Writes benchmarks/results/planted.json.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from measure import write_json
from methods import METHODS
from vitral import Predictor, evaluate, train
from vitral.data.sources.scenes import make_scenes
from vitral.data.transforms import normalize
from vitral.explanation.faithfulness import curves


def inside(maps: Tensor, boxes: Tensor, patch: int) -> Tensor:
    """Share of the positive mass in the box over the box's share of the area, one number an image."""
    pixels = maps.clamp(min=0).repeat_interleave(patch, 1).repeat_interleave(patch, 2)
    ratios = []
    for map_, (x, y, w, h) in zip(pixels, boxes.tolist(), strict=True):
        share = map_[y : y + h, x : x + w].sum() / map_.sum().clamp(min=1e-12)
        ratios.append(share / (w * h / map_.numel()))
    return torch.stack(ratios)


def main() -> None:
    """Train, explain and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--images", type=int, default=300)
    options = parser.parse_args()
    data, boxes = make_scenes()
    with tempfile.TemporaryDirectory() as folder:
        place = options.run or Path(folder) / "run"
        if not (place / "model.safetensors").exists():
            settings = {"optimizer": "muon", "lr": 3e-3, "muon_lr": 0.01, "warmup_epochs": 0.5, "val_fraction": 0.02}
            train(data, out=place, model="vit_micro_patch4_28", img_size=32, epochs=options.epochs, **settings)
        predictor = Predictor(place)
        accuracy = evaluate(place, data)["accuracy"]
    model = predictor.vit
    chosen = data.splits["test"][: options.images]
    x = normalize(torch.stack([data.images.read(int(i), "grey") for i in chosen]), predictor.preprocess)
    target = data.targets[chosen]
    with torch.no_grad():
        right = model(x).argmax(1) == target
    x, target, box = x[right], target[right], boxes[chosen][right]
    print(f"test accuracy {100 * accuracy:.2f} %, {len(x)} scenes explained")
    results = {}
    for name, method in METHODS.items():
        maps = method(model, x, target)
        ratio = inside(maps, box, model.config.patch[0])
        measured = curves(model, x, maps, target)
        results[name] = {
            "mass in the box over its area": float(ratio.mean()),
            "deletion": float(measured.deletion_auc.mean()),
            "insertion": float(measured.insertion_auc.mean()),
        }
        told = "   ".join(f"{key} {value:.3f}" for key, value in results[name].items())
        print(f"{name:28} {told}", flush=True)
    print(f"wrote {write_json('planted', {'accuracy': accuracy, 'scenes': len(x), 'methods': results})}")


if __name__ == "__main__":
    main()
