"""The same ViT in the libraries that others use, to be measured beside ours. Nothing but `vitral bench` needs them."""

import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitral.errors import InputError, VitralError
from vitral.models.vit import VisionTransformer
from vitral.weights.save import save_model

Run = Callable[[Tensor], Tensor]
_LIBRARIES: list[torch.library.Library] = []  # definitions live as long as the object that made them


def mend_torchvision() -> None:
    """Make torchvision importable where its compiled operators do not fit this build of torch.

    timm and transformers import it, and it fails when nobody has defined the operator `nms`. Models need none of it.
    """
    try:
        import torchvision  # noqa: F401  # pyright: ignore
    except ImportError:
        return
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


def _timm(folder: str) -> Run:
    return import_timm().create_model(f"local-dir:{folder}", pretrained=True).eval()


def _transformers(folder: str) -> Run:
    transformers = import_transformers()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    return lambda x: model(x).logits


PEERS: dict[str, tuple[str, Callable[[str], Run]]] = {
    "timm": ("timm", _timm),
    "transformers": ("huggingface", _transformers),
}
"""The layout that a library reads, and how it reads a folder."""


def peer_of(name: str, model: nn.Module) -> Run:
    """The model, with its weights, in another library."""
    if name not in PEERS:
        raise InputError(f"vitral compares with {' and '.join(PEERS)}, got {name!r}.")
    if not isinstance(model, VisionTransformer) or not model.config.num_classes:
        raise InputError(f"{name} is compared with on ViTs that classify; leave --compare out.")
    if find_spec(name) is None:
        raise VitralError(f"to compare with {name} it must be installed: pip install {name}.")
    layout, read = PEERS[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_model(model, folder, layout)
        return read(folder)
