"""Which numbers to compute in, and where: asked of the machine, not assumed."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from vitral.errors import ConfigError
from vitral.tasks.base import map_tensors

_PROBE = """
import torch
x = torch.randn(64, 64, dtype=torch.bfloat16)
torch.nn.functional.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None])
torch.nn.functional.linear(x, x).sum().item()
"""


def resolve_device(device: str) -> torch.device:
    """Turn auto, cpu, cuda, mps, or one of several such as cuda:1, into a device, or say that it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if device == "auto":
        device = next(name for name, available in there.items() if available)
    if not there.get(device.partition(":")[0]):
        raise ConfigError(f"device {device} is not available here; use --device cpu or auto.")
    return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" else device)


def bf16_works_on_cpu() -> bool:
    """Try bf16 in a child process: some CPUs claim to have it, and the process dies when it is used."""
    return subprocess.run([sys.executable, "-c", _PROBE], capture_output=True).returncode == 0


def resolve_precision(precision: str, device: torch.device) -> tuple[torch.dtype | None, str]:
    """The dtype of autocast, None for plain fp32, and what to tell the user if it is not what was asked for."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"
    if precision == "fp32":
        return None, ""
    if precision == "bf16" and device.type == "cpu" and not bf16_works_on_cpu():
        return None, "bf16 kills the process on this CPU (tried in a child process), so fp32 is used"
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision], ""


def full_precision(outputs: Any) -> Any:
    """What a model gives, in at least fp32."""
    return map_tensors(lambda t: t.to(torch.promote_types(t.dtype, torch.float32)), outputs)


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager:
    """The context to run the model in."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
