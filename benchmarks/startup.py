"""Start-up: CPU seconds of `import vitral` and of `vitral --help`, the median of fresh processes less an empty one's.

python benchmarks/startup.py
"""

import os
import statistics
import subprocess
import sys

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import vitral": ["-c", "import vitral"],
    "vitral --help": ["-m", "vitral", "--help"],
    "vitral models": ["-m", "vitral", "models"],
    "vitral cost vit_base_patch16_224": ["-m", "vitral", "cost", "vit_base_patch16_224"],
    "import torch": ["-c", "import torch"],
}


def cpu_seconds(args: list[str]) -> float:
    """User and system time of one fresh interpreter."""
    before = os.times()
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    for name, args in COMMANDS.items():
        times = [cpu_seconds(args) for _ in range(7)]
        print(f"{name:36} {statistics.median(times):6.3f} s CPU ({min(times):.3f} to {max(times):.3f})")


if __name__ == "__main__":
    main()
