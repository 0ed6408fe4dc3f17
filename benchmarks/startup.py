"""Start-up: CPU seconds that `import vitral` and the quick commands take above an empty interpreter.

    python benchmarks/startup.py

Medians of 9 fresh processes each; writes benchmarks/results/startup.json.
"""

import resource
import statistics
import subprocess
import sys

from measure import write_json

COMMANDS = {
    "import vitral": ["-c", "import vitral"],
    "vitral --help": ["-m", "vitral", "--help"],
    "vitral models": ["-m", "vitral", "models"],
    "vitral cost vit_base_patch16_224": ["-m", "vitral", "cost", "vit_base_patch16_224"],
    "import torch": ["-c", "import torch"],
}


def cpu_seconds(args: list[str]) -> float:
    """User and system time of one fresh interpreter."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    empty = statistics.median(cpu_seconds(["-c", "pass"]) for _ in range(9))
    rows = {"python": empty}
    print(f"{'empty interpreter':36} {empty:6.3f} s CPU")
    for name, args in COMMANDS.items():
        times = [cpu_seconds(args) - empty for _ in range(9)]
        rows[name] = statistics.median(times)
        print(f"{name:36} {rows[name]:6.3f} s above it ({min(times):.3f} to {max(times):.3f})")
    print(f"wrote {write_json('startup', {'cpu_seconds': rows})}")


if __name__ == "__main__":
    main()
