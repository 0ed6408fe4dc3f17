"""Vision Transformers that read like the paper.

Public names are looked up when first used (PEP 562), so `import vitral` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "Index": "vitral.retrieval.index",
    "Predictor": "vitral.inference.predictor",
    "compare": "vitral.api",
    "create_model": "vitral.weights.load",
    "evaluate": "vitral.api",
    "explain": "vitral.explanation.explain",
    "export": "vitral.api",
    "list_models": "vitral.weights.pretrained",
    "load_model": "vitral.weights.load",
    "pretrain": "vitral.api",
    "probe": "vitral.api",
    "save_model": "vitral.weights.save",
    "train": "vitral.api",
    "VitralError": "vitral.errors",
}

__all__ = [
    "Index",
    "Predictor",
    "VitralError",
    "__version__",
    "compare",
    "create_model",
    "evaluate",
    "explain",
    "export",
    "list_models",
    "load_model",
    "pretrain",
    "probe",
    "save_model",
    "train",
]

if TYPE_CHECKING:
    from vitral.api import compare, evaluate, export, pretrain, probe, train
    from vitral.errors import VitralError
    from vitral.explanation.explain import explain
    from vitral.inference.predictor import Predictor
    from vitral.retrieval.index import Index
    from vitral.weights.load import create_model, load_model
    from vitral.weights.pretrained import list_models
    from vitral.weights.save import save_model


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vitral' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
