"""What looking inside costs: [CLS] rows of all layers beside a plain forward, and beside transformers' own.

    python benchmarks/attention_memory.py

S/8 at 224, batch 8, fp32. Each case runs in a process of its own; memory is what its peak has above the peak of a plain
forward of the same model. Time is interleaved in one process, medians. Writes benchmarks/results/attention_memory.json.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from measure import write_json
from vitral import create_model

CHILD = """
import json, sys
sys.path.insert(0, {here!r})
import torch

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

case = sys.argv[1]
torch.manual_seed(0)
x = torch.randn(8, 3, 224, 224)
if case.startswith("vitral"):
    from vitral import create_model
    model = create_model("vit_small_patch8_224").eval()
    run = (lambda: model.attention(x, "all", "cls")) if case == "vitral rows" else (lambda: model(x))
else:
    from peers import import_transformers
    T = import_transformers()
    config = T.ViTConfig(hidden_size=384, num_attention_heads=6, intermediate_size=1536, patch_size=8)
    kind = "eager" if case == "transformers rows" else "sdpa"
    model = T.ViTModel._from_config(config, attn_implementation=kind).eval()
    run = lambda: model(x, output_attentions=case == "transformers rows")
with torch.inference_mode():
    before = status("VmRSS")
    kept = run()
    print(json.dumps(status("VmHWM") - before))
"""
CASES = ("vitral plain", "vitral rows", "transformers plain", "transformers rows")


def peak(case: str) -> int:
    """Bytes that one call adds to the process at its peak."""
    code = CHILD.replace("{here!r}", repr(str(Path(__file__).parent)))
    done = subprocess.run([sys.executable, "-c", code, case], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    memory = {case: statistics.median(peak(case) for _ in range(3)) for case in CASES}
    added = {who: memory[f"{who} rows"] - memory[f"{who} plain"] for who in ("vitral", "transformers")}
    for case, value in memory.items():
        print(f"{case:20} {value / 1e6:8.0f} MB")
    share = max(added["vitral"], 1) / added["transformers"]
    ours, theirs = added["vitral"] / 1e6, added["transformers"] / 1e6
    print(f"rows add {ours:.0f} MB, in transformers (output_attentions=True) {theirs:.0f} MB: 1/{1 / share:.0f}")
    model, x = create_model("vit_small_patch8_224", seed=0).eval(), torch.randn(8, 3, 224, 224)
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
