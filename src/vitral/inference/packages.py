"""Packages beside torch that engines and exports need: imported when they are needed, or asked for in a sentence."""

import os
import subprocess
import sys
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vitral.errors import VitralError


def require(what: str, *packages: str) -> list[Any]:
    """The packages, or a sentence that says how to install them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise VitralError(f"{what} needs {' and '.join(missing)}: pip install 'vitral[export]'.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [import_module(package) for package in packages]


# A multiplication in whole numbers, as an int8 file has them.
_INT8 = """
import numpy, openvino
from openvino import opset13 as op
number = lambda value: op.constant(numpy.float32(value))
x = op.parameter([64, 256], numpy.float32)
coarse = op.fake_quantize(x, number(0), number(2.55), number(0), number(2.55), 256)
weight = op.multiply(op.convert(op.constant(numpy.ones((128, 256), numpy.int8)), numpy.float32), number(0.01))
model = openvino.Model([op.matmul(coarse, weight, False, True)], [x])
openvino.Core().compile_model(model, "CPU")([numpy.ones((64, 256), numpy.float32)])
"""
ISA, SAFE_ISA = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"


def import_openvino(what: str = "the openvino engine") -> Any:
    """OpenVINO, kept from matrix units that a virtual machine announces and does not have.

    Their use would end the process, so another process tries first, once.
    """
    (openvino,) = require(what, "openvino")
    if ISA not in os.environ and sys.platform == "linux" and _announces_matrix_units() and not _child_lives(_INT8):
        os.environ[ISA] = SAFE_ISA  # read by the library when it computes for the first time
    return openvino


def _announces_matrix_units() -> bool:
    try:
        return " amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@cache
def _child_lives(code: str) -> bool:
    """Whether a process that runs this ends by itself, rather than by a signal."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    return done.returncode >= 0
