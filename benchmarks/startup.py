"""Start-up: CPU seconds that `import vitral` and the quick commands take above an empty interpreter.

    python benchmarks/startup.py

Medians of 9 fresh processes each. Then `vitral predict` of one image from an exported file beside `import torch`, in
interleaved rounds: the ratio of their times. Writes benchmarks/results/startup.json.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from PIL import Image

import vitral
from measure import interleave, ratio, write_json

COMMANDS = {
    "import vitral": ["-c", "import vitral"],
    "vitral --help": ["-m", "vitral", "--help"],
    "vitral models": ["-m", "vitral", "models"],
    "vitral cost vit_base_patch16_224": ["-m", "vitral", "cost", "vit_base_patch16_224"],
    "import torch": ["-c", "import torch"],
}


TORCH, EXPORTED = "import torch", "vitral predict model.onnx image.png"


def run(args: list[str]) -> None:
    """One fresh interpreter, to its end."""
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)


def cpu_seconds(args: list[str]) -> float:
    """User and system time of one fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run(args)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def exported_beside_torch() -> dict[str, float]:
    """How many times as long as `import torch` an answer from an exported file takes, on the clock."""
    with tempfile.TemporaryDirectory() as folder:
        file, image = Path(folder) / "model.onnx", Path(folder) / "image.png"
        vitral.export(vitral.create_model("vit_nano_patch2_8", seed=0), file)
        Image.effect_noise((40, 30), 90).save(image)
        rivals = {TORCH: COMMANDS[TORCH], EXPORTED: ["-m", "vitral", "predict", str(file), str(image)]}
        times = interleave({name: partial(run, args) for name, args in rivals.items()}, 0, warmup=1, rounds=15)
    share, error = ratio(times, EXPORTED, TORCH)
    print(f"{EXPORTED}: {share:.2f} +- {error:.2f} times as long as {TORCH}")
    return {"ratio": share, "standard_error": error, **{k: statistics.median(t) for k, t in times.items()}}


def main() -> None:
    empty = statistics.median(cpu_seconds(["-c", "pass"]) for _ in range(9))
    rows = {"python": empty}
    print(f"{'empty interpreter':36} {empty:6.3f} s CPU")
    for name, args in COMMANDS.items():
        times = [cpu_seconds(args) - empty for _ in range(9)]
        rows[name] = statistics.median(times)
        print(f"{name:36} {rows[name]:6.3f} s above it ({min(times):.3f} to {max(times):.3f})")
    print(f"wrote {write_json('startup', {'cpu_seconds': rows, 'exported': exported_beside_torch()})}")


if __name__ == "__main__":
    main()
