"""What looking inside costs: [CLS] rows of all layers beside a plain forward, and beside transformers' own.

    python benchmarks/attention_memory.py

S/8 at 224, batch 8, fp32. Each library runs in a process of its own, first a plain forward, then one that gives rows;
memory is what the second adds to the peak of the first, median of three processes. Time is interleaved in one process,
medians. Writes benchmarks/results/attention_memory.json.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from measure import write_json
from vitral import create_model
from vitral.models.vit import VisionTransformer

CHILD = """
import json, sys
sys.path.insert(0, {here!r})
import torch

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

torch.manual_seed(0)
x = torch.randn(8, 3, 224, 224)
if sys.argv[1] == "vitral":
    from vitral import create_model
    model = create_model("vit_small_patch8_224").eval()
    calls = [lambda: model(x), lambda: model.attention(x, "all", "cls")]
else:
    from peers import import_transformers
    T = import_transformers()
    config = T.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, patch_size=8)
    model = T.ViTModel._from_config(config, attn_implementation="eager").eval()
    calls = [lambda: model(x), lambda: model(x, output_attentions=True)]
with torch.inference_mode():
    before = status("VmRSS")
    peaks = []
    for call in calls:
        kept = call()
        peaks.append(status("VmHWM") - before)
    print(json.dumps(peaks))
"""


def peaks(who: str) -> tuple[int, int]:
    """Bytes that a plain forward adds to the process at its peak, and then one that gives the rows too."""
    code = CHILD.replace("{here!r}", repr(str(Path(__file__).parent)))
    # Freed tensors go back to the system at once, so that what is measured is what is in use, not what the heap keeps.
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"}
    done = subprocess.run([sys.executable, "-c", code, who], capture_output=True, text=True, check=True, env=exact)
    plain, rows = json.loads(done.stdout.splitlines()[-1])
    return plain, rows


def main() -> None:
    """Measure and print."""
    memory, added = {}, {}
    for who in ("vitral", "transformers"):
        measured = [peaks(who) for _ in range(3)]
        memory[f"{who} plain"] = statistics.median(plain for plain, _ in measured)
        added[who] = statistics.median(rows - plain for plain, rows in measured)
        print(f"{who:12} plain forward {memory[f'{who} plain'] / 1e6:6.0f} MB, rows add {added[who] / 1e6:6.0f} MB")
    share = max(added["vitral"], 1) / added["transformers"]
    ours, theirs = added["vitral"] / 1e6, added["transformers"] / 1e6
    print(f"rows add {ours:.0f} MB, in transformers (output_attentions=True) {theirs:.0f} MB: 1/{1 / share:.0f}")
    model, x = create_model("vit_small_patch8_224", seed=0).eval(), torch.randn(8, 3, 224, 224)
    assert isinstance(model, VisionTransformer)
    times: dict[str, list[float]] = {"plain": [], "rows": []}
    with torch.inference_mode():
        for _ in range(6):
            for name, call in (("plain", lambda: model(x)), ("rows", lambda: model.attention(x, "all", "cls"))):
                began = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - began)
    ratio = statistics.median(r / p for r, p in zip(times["rows"][1:], times["plain"][1:], strict=True))
    print(f"time of the rows of all layers: {ratio:.2f} times a plain forward")
    result = {"peak_bytes": memory, "added_bytes": added, "share_of_transformers": share, "time_over_forward": ratio}
    print(f"wrote {write_json('attention_memory', result)}")


if __name__ == "__main__":
    main()
