"""The reference implementations, as oracles of the tests and rivals of the benchmarks."""

from vitral.inference.peers import import_timm, import_transformers, mend_torchvision

__all__ = ["import_timm", "import_transformers", "mend_torchvision"]
