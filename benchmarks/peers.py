"""The reference implementations, as oracles of the tests and rivals of the benchmarks. Never a part of vitral."""

import sys
from types import ModuleType

import torch

_LIBRARIES: list[torch.library.Library] = []  # definitions live as long as the object that made them


def mend_torchvision() -> None:
    """Make torchvision importable where its compiled operators do not fit this build of torch.

    timm and transformers import it, and it fails when nobody has defined the operator `nms`. Models need none of it.
    """
    try:
        import torchvision  # noqa: F401  # pyright: ignore
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


def import_timm() -> ModuleType:
    """Import timm."""
    mend_torchvision()
    import timm

    return timm


def import_transformers() -> ModuleType:
    """Import Hugging Face transformers."""
    mend_torchvision()
    import transformers

    return transformers
