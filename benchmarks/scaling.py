"""How time and memory grow with the image: Swin-T beside ViT-S/16, and the ViT's attention by itself.

    python benchmarks/scaling.py [--sides 224,448,896] [--seconds 20]

One image, fp32, a forward pass without gradients. Time is interleaved in one process at each size, medians; memory is
what a forward adds to the peak of a process of its own. The exponent p of cost = a tokens^p is fitted by least squares
on logarithms; tokens are those of the ViT, and for Swin of its first stage: both grow with the area. The attention of
the ViT is softmax(Q K^T) V of all its blocks on random numbers, without the linear layers. Writes results/scaling.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from math import log
from typing import Any

import torch
import torch.nn.functional as F

from measure import interleave, write_json
from vitral import create_model
from vitral.config import ViTConfig
from vitral.models.cost import model_cost
from vitral.models.zoo import model_spec

NAMES = {"Swin-T": "swin_tiny_patch4_window7_224", "ViT-S/16": "vit_small_patch16_224"}
ATTENTION = "ViT-S/16, attention alone"
CHILD = """
import sys
import torch
from vitral import create_model

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

side = int(sys.argv[2])
model = create_model(sys.argv[1], img_size=side, seed=0).eval()
x = torch.randn(1, 3, side, side)
with torch.inference_mode():
    model(x[:, :, :32, :32])
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted from here on: making the weights had one of its own
    before = status("VmRSS")
    model(x)
print(status("VmHWM") - before)
"""


def peak(name: str, side: int) -> int:
    """Bytes that a forward adds to the process at its peak."""
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}  # freed tensors go back to the system at once
    command = [sys.executable, "-c", CHILD, name, str(side)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True, env=exact).stdout)


def times_at(side: int, seconds: float) -> dict[str, float]:
    """Median seconds of a forward of each model, and of the ViT's attention."""
    x = torch.randn(1, 3, side, side)
    models = {name: create_model(model, img_size=side, seed=0).eval() for name, model in NAMES.items()}
    c = models["ViT-S/16"].config
    assert isinstance(c, ViTConfig)
    q, k, v = torch.randn(3, 1, c.num_heads, model_cost(c).tokens, c.embed_dim // c.num_heads)

    def attention() -> None:
        for _ in range(c.depth):
            F.scaled_dot_product_attention(q, k, v)

    rivals: dict[str, Any] = {name: lambda model=model: model(x) for name, model in models.items()}
    with torch.inference_mode():
        found = interleave(rivals | {ATTENTION: attention}, seconds)
    return {name: statistics.median(times) for name, times in found.items()}


def exponent(x: list[float], y: list[float]) -> float:
    """p of y = a x^p, by least squares on logarithms."""
    a, b = [log(each) for each in x], [log(each) for each in y]
    mean_a, mean_b = statistics.mean(a), statistics.mean(b)
    return sum((u - mean_a) * (w - mean_b) for u, w in zip(a, b, strict=True)) / sum((u - mean_a) ** 2 for u in a)


def main() -> None:
    """Measure, fit and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="224,448,896")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing at each size")
    options = parser.parse_args()
    sides = [int(side) for side in options.sides.split(",")]
    costs = {n: [model_cost(model_spec(model, img_size=side).config) for side in sides] for n, model in NAMES.items()}
    tokens = {name: [float(cost.tokens) for cost in each] for name, each in costs.items()}
    tokens[ATTENTION] = tokens["ViT-S/16"]
    macs = {name: [float(cost.macs) for cost in each] for name, each in costs.items()}
    macs[ATTENTION] = [float(cost.macs_by_part["attention"]) for cost in costs["ViT-S/16"]]
    measured = [times_at(side, options.seconds) for side in sides]
    seconds = {name: [each[name] for each in measured] for name in tokens}
    memory = {name: [float(max(peak(model, side), 1)) for side in sides] for name, model in NAMES.items()}

    kinds = {"seconds": seconds, "bytes": memory, "macs": macs}
    fitted = {kind: {name: exponent(tokens[name], y) for name, y in each.items()} for kind, each in kinds.items()}
    print(f"{'':28}{'side':>6}{'tokens':>9}{'GMACs':>9}{'ms':>9}{'MB':>8}")
    for name in tokens:
        for i, side in enumerate(sides):
            mb = f"{memory[name][i] / 1e6:8.0f}" if name in memory else ""
            row = f"{tokens[name][i]:9,.0f}{macs[name][i] / 1e9:9.2f}{1000 * seconds[name][i]:9.1f}"
            print(f"{name:28}{side:6}{row}{mb}")
    for name in tokens:
        said = ", ".join(f"{kind} {each[name]:.2f}" for kind, each in fitted.items() if name in each)
        print(f"{name}: exponents in tokens: {said}")
    result = {"sides": sides, "tokens": tokens, **kinds, "exponents": fitted}
    print(f"wrote {write_json('scaling', json.loads(json.dumps(result)))}")


if __name__ == "__main__":
    main()
