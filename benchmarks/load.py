"""Loading B/16 from safetensors: `load_model` beside `safetensors.torch.load_file` and `load_state_dict`.

    python benchmarks/load.py [--rounds 9]

Each load runs in a process of its own, after the imports. The rival once fills a model that was built before its clock
started, which ours has to build, and once builds its own in the cheapest way (on the meta device, tensors assigned).
Medians, interleaved; peak memory is what the process grew by. Writes benchmarks/results/load.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file

from measure import write_json
from vitral import create_model

CHILD = """
import gc, json, sys, time
import torch
from safetensors.torch import load_file
from vitral import create_model
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import model_spec
from vitral.weights.load import load_model

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

def reset():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")

def now():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

rival, path = sys.argv[1:]
model = create_model("vit_base_patch16_224") if rival == "load_file" else None
gc.collect()
reset()
before, began = now(), time.perf_counter()
if rival == "load_file":
    model.load_state_dict(load_file(path))
elif rival == "build and load_file":
    with torch.device("meta"):
        model = VisionTransformer(model_spec("vit_base_patch16_224").config)
    model.load_state_dict(load_file(path), assign=True)
    sum(p.sum() for p in model.parameters())  # the file is mapped: look at its numbers, as ours does
else:
    model = load_model(path, quiet=True)
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "peak": peak() - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file(create_model("vit_base_patch16_224", seed=0).state_dict(), path)
        size = path.stat().st_size
        found: dict[str, list[dict[str, float]]] = {"load_file": [], "build and load_file": [], "load_model": []}
        for _ in range(options.rounds):
            for rival, results in found.items():
                done = subprocess.run([sys.executable, "-c", CHILD, rival, str(path)], capture_output=True, check=True)
                results.append(json.loads(done.stdout))
    seconds = {rival: statistics.median(r["seconds"] for r in results) for rival, results in found.items()}
    peak = {rival: statistics.median(r["peak"] for r in results) / size for rival, results in found.items()}
    for rival in found:
        print(f"{rival:20} {1000 * seconds[rival]:7.0f} ms   peak memory {peak[rival]:.2f} times the file")
    ratio = seconds["load_model"] / seconds["load_file"]
    like = seconds["load_model"] / seconds["build and load_file"]
    print(f"load_model takes {ratio:.2f} times as long as load_file and load_state_dict into a model that is there,")
    print(f"{like:.2f} times as long as building that model, load_file and load_state_dict")
    result = {
        "seconds": seconds,
        "ratio_to_filling": ratio,
        "ratio_to_building_and_filling": like,
        "peak_over_file": peak,
        "file_bytes": size,
    }
    print(f"wrote {write_json('load', result)}")


if __name__ == "__main__":
    main()
