"""A graph as machine code by torch's own compiler: made once, and loaded by every later process.

To load it is to run it. So it is loaded from one folder of the cache, which must be the user's alone, and from nowhere
else.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitral.errors import VitralError
from vitral.inference.cache import CACHE_BYTES, keep_newest, key_of, private_folder
from vitral.inference.timing import machine
from vitral.weights.atomic import workspace

Run = Callable[..., Any]


def load_or_compile(what: object, program: Callable[[], Any]) -> Run:
    """The machine code of a program (`torch.export`), for this torch on this machine; made now if it is new.

    The weights are laid out for it (freezing), and are in it: `what` must tell them apart.
    """
    folder = private_folder("compiled")
    path = folder / f"{key_of([what, machine()])}.pt2"
    try:
        run = _load(path)
        os.utime(path)
    except (RuntimeError, OSError):  # not there, or damaged
        print("vitral: compiling the model, once ...", file=sys.stderr)
        _compile(program(), path)
        keep_newest([file for file in folder.iterdir() if file.is_file()], CACHE_BYTES, path)
        run = _load(path)
    return run


def _load(path: Path) -> Run:
    if not path.is_file():
        raise FileNotFoundError(path)
    return torch._inductor.aoti_load_package(str(path))


def _compile(program: Any, path: Path) -> None:
    """Compile in a folder that is removed, and put the result in its place when it is whole."""
    from torch._inductor.utils import fresh_cache

    with workspace(path) as folder:
        made = folder / path.name
        try:
            with torch.no_grad(), fresh_cache(dir=str(folder)):
                torch._inductor.aoti_compile_and_package(
                    program, package_path=str(made), inductor_configs={"freezing": True}
                )
        except Exception as error:  # a compiler that is missing is said in many ways
            words = " ".join(str(error).split())[:200]
            raise VitralError(
                f"the model cannot be compiled ({words}); torch needs a C++ compiler for it. Or take another --engine."
            ) from error
        made.replace(path)
