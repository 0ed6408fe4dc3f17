"""Vision Transformers that read like the paper.

Public names are looked up when first used (PEP 562), so `import vitral` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_PUBLIC = {
    "create_model": "vitral.models.zoo",
    "list_models": "vitral.models.zoo",
    "VitralError": "vitral.errors",
}

__all__ = ["VitralError", "__version__", "create_model", "list_models"]

if TYPE_CHECKING:
    from vitral.errors import VitralError
    from vitral.models.zoo import create_model, list_models


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vitral' has no attribute {name!r}; public names: {', '.join(__all__)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
