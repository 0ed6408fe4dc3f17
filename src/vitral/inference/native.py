"""Attention in machine code of our own, compiled once for this processor; where there is no compiler, torch's serves.

torch's kernel multiplies small blocks by a library that is made for large ones. To load what was compiled is to run it,
so it is loaded from one folder of the cache, which must be the user's alone, and tried before it is used.
"""

import ctypes
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import VitralError
from vitral.inference.cache import key_of, private_folder
from vitral.weights.atomic import workspace

SOURCE = files("vitral.inference").joinpath("attention.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
COMPILER_SECONDS = 60
"""A compiler that takes longer is not waited for."""
Attend = Callable[[Tensor, int], Tensor]
"""Queries, keys and values side by side (B, N, 3D), and the number of heads -> what the heads find (B, N, D)."""


@cache
def native_attention() -> Attend | None:
    """Our kernel, if there can be one here; compiled now if it is new."""
    compiler = shutil.which("g++") if sys.platform == "linux" else None
    if compiler is None:
        return None
    try:
        source = SOURCE.read_bytes()
        about = [source.decode(), FLAGS, _version(compiler), platform.machine(), _abilities()]
        path = private_folder("native") / f"{key_of(about)}.so"
        try:
            attend = _load(path)
        except (OSError, AttributeError):  # not there, or damaged
            _compile(compiler, source, path)
            attend = _load(path)
        return attend if _is_right(attend) else None
    except (VitralError, OSError, AttributeError, subprocess.SubprocessError):  # no place to keep it, no OpenMP, ...
        return None


def _version(compiler: str) -> str:
    return subprocess.run(
        [compiler, "--version"], capture_output=True, check=True, timeout=COMPILER_SECONDS
    ).stdout.decode(errors="replace")


def _abilities() -> list[str]:
    """What this processor says that it can do: code that was compiled for more would end the process."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((sorted(line.split()) for line in lines if line.startswith(("flags", "Features"))), [])


def _compile(compiler: str, source: bytes, path: Path) -> None:
    """Compile in a folder that is removed, and put the result in its place when it is whole."""
    with workspace(path) as folder:
        made = folder / path.name
        command = [compiler, *FLAGS, "-x", "c++", "-", "-o", str(made)]
        subprocess.run(command, input=source, capture_output=True, check=True, timeout=COMPILER_SECONDS)
        made.replace(path)


def _load(path: Path) -> Attend:
    library = ctypes.CDLL(str(path))
    kernel, room_of, multiple = library.attention, library.room_of, library.multiple_of()
    kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4 + [ctypes.c_int]
    kernel.restype = None
    room_of.argtypes, room_of.restype = [ctypes.c_long] * 2, ctypes.c_long

    def attend(qkv: Tensor, heads: int) -> Tensor:
        B, N, D = *qkv.shape[:2], qkv.shape[2] // 3
        d, threads = D // heads, torch.get_num_threads()
        if d % multiple or qkv.dtype != torch.float32 or qkv.device.type != "cpu" or qkv.requires_grad:
            return attend_by_torch(qkv, heads)
        qkv, out, rooms = qkv.contiguous(), qkv.new_empty(B, N, D), qkv.new_empty(threads, room_of(N, d))
        kernel(qkv.data_ptr(), out.data_ptr(), rooms.data_ptr(), B, N, heads, d, threads)
        return out

    return attend


def attend_by_torch(qkv: Tensor, heads: int) -> Tensor:
    """The same by torch."""
    q, k, v = qkv.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def _is_right(attend: Attend) -> bool:
    """Whether it answers as torch does; numbers of tokens that fill no vector are the ones to get wrong."""
    x = torch.randn(2, 21, 3 * 3 * 32, generator=torch.Generator().manual_seed(0))
    return torch.allclose(attend(x, 3), attend_by_torch(x, 3), rtol=1e-4, atol=1e-5)
