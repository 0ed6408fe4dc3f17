"""What the benchmarks share: vitral's own timing, and where results are written."""

import json
from pathlib import Path
from typing import Any

from vitral.inference.timing import gemm_rate, interleave, machine, multiply_adds, ratio

__all__ = ["gemm_rate", "interleave", "multiply_adds", "ratio", "write_json"]

RESULTS = Path(__file__).parent / "results"


def write_json(name: str, document: dict[str, Any]) -> Path:
    """Write a result with the machine it was measured on."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine(), **document}, indent=2) + "\n")
    return path
