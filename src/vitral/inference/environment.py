"""The environment that vitral runs in, as `vitral doctor` reports it: versions, hardware, extras, caches, hub, speed.

Only the standard library is imported here, and torch and the rest inside functions: the report also describes an
installation in which an import fails.
"""

import contextlib
import getpass
import io
import os
import platform
import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from vitral import __version__
from vitral.inference.hardware import describe_hardware

EXTRAS = {
    "fast": "decode JPEG files faster",
    "train": "train detectors and models of text, TensorBoard",
    "serve": "serve models over HTTP (vitral serve)",
    "export": "write and run ONNX and OpenVINO files, int8",
    "search": "approximate search in large indexes",
    "postgres": "store an index in PostgreSQL",
    "data": "read Hugging Face data sets and Parquet files, results as pandas tables",
}
"""The purpose of each extra in pyproject.toml, except `dev`; the packages of an extra are read from the metadata."""
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_ENDPOINT", "HF_HOME", "HF_HUB_OFFLINE", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA", "XDG_CACHE_HOME",
)  # fmt: skip
"""Environment variables that change what vitral does; none of them holds a secret."""
SPEED_MODEL = "vit_tiny_patch16_224"
SPEED_BATCH = 4
SPEED_SECONDS = 4.0
"""Duration of the speed check, without the last round and the warm-up: 10 seconds leave room for a slow machine."""
JPEG_SIZE = (400, 500)


def describe_environment(speed_seconds: float = SPEED_SECONDS) -> dict[str, Any]:
    """Return the report, in plain values; a part that cannot be determined has an `error` instead of its values.

    Args:
        speed_seconds: Duration of the speed check.

    Returns:
        Values under `versions`, `machine`, `torch`, `variables`, `extras`, `cache`, `hub` and `speed`. The home folder
        is written as `~`, and names of users, passwords and tokens are removed.

    Example:
        >>> describe_environment(speed_seconds=0.1)["versions"]["vitral"]
        '0.1.0'
    """
    parts: dict[str, Callable[[], Any]] = {
        "versions": _versions,
        "machine": describe_hardware,
        "torch": _torch,
        "variables": lambda: {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "extras": _extras,
        "cache": _cache,
        "hub": _hub,
        "speed": partial(_speed, speed_seconds),
    }
    return without_identity({name: _attempt(describe) for name, describe in parts.items()})


def _attempt(describe: Callable[[], Any]) -> Any:
    """The result of a function, or the error that it raised: a report does not end at what it should report."""
    try:
        return describe()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}


def without_identity(value: Any) -> Any:
    """Return plain values with the home folder as `~`, and without names of users, passwords and tokens."""
    if isinstance(value, dict):
        return {without_identity(key): without_identity(each) for key, each in value.items()}
    if isinstance(value, list):
        return [without_identity(each) for each in value]
    return _anonymous(value) if isinstance(value, str) else value


def _anonymous(text: str) -> str:
    home, users = "", set()
    with contextlib.suppress(RuntimeError):
        home = str(Path.home())
        users.add(Path(home).name)
    with contextlib.suppress(KeyError, OSError, ImportError):
        users.add(getpass.getuser())
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    for user in filter(None, users):
        text = re.sub(rf"(?<=[/\\]){re.escape(user)}(?![\w.-])", "USER", text)
    text = re.sub(r"(?<=://)[^/@\s]+@|(?<=[?&])\S+", "", text)  # a password, or the parameters of an address
    return re.sub(r"\bhf_\w{8,}", "hf_...", text)


def _requirements() -> list[tuple[str, str]]:
    """Packages that vitral requires, each with the extra that it belongs to, empty for the core."""
    found = []
    for line in metadata.requires("vitral") or []:
        requirement, _, marker = line.partition(";")
        name = re.match(r"[\w.-]+", requirement)
        extra = re.search(r"""extra\s*==\s*['"]([\w-]+)""", marker)
        if name:
            found.append((name[0], extra[1] if extra else ""))
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, Any]:
    known = {"vitral": __version__, "python": platform.python_version(), "platform": platform.platform()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        known |= {name: _version(name) for name, extra in _requirements() if not extra}
    return known


def _extras() -> dict[str, Any]:
    required = _requirements()
    found = {}
    for extra, purpose in EXTRAS.items():
        packages = {name: _version(name) for name, of in required if of == extra}
        found[extra] = {"purpose": purpose, "installed": all(packages.values()), "packages": packages}
    return found


def _torch() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.version.cuda,
        "gpus": [{"name": gpu.name, "memory": gpu.total_memory} for gpu in gpus],
        "mps": torch.backends.mps.is_available(),
    }


def _cache() -> dict[str, Any]:
    from huggingface_hub import constants

    from vitral.inference.cache import cache_folder

    folder, hub = cache_folder(""), Path(constants.HF_HUB_CACHE)
    kinds = sorted(each for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []
    return {
        "folder": str(folder),
        "kinds": {each.name: _size(each) for each in kinds},
        "hub": {"folder": str(hub), **_size(hub)},
    }


def _size(folder: Path) -> dict[str, int]:
    """Files in a folder and their bytes; links are not followed, so each file counts once."""
    sizes = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed by another process in the meantime
                path = Path(place, name)
                sizes += [] if path.is_symlink() else [path.stat().st_size]
    return {"files": len(sizes), "bytes": sum(sizes)}


def _hub() -> dict[str, Any]:
    from huggingface_hub import constants

    from vitral.weights.hub import hub_reachable

    return {
        "endpoint": constants.ENDPOINT,
        "offline": bool(constants.HF_HUB_OFFLINE),
        "reachable": hub_reachable(),
    }


def _speed(seconds: float) -> dict[str, Any]:
    """Images per second through a small ViT, and of reading a JPEG file at the size of that model."""
    from statistics import median

    import torch

    from vitral.inference.predictor import Predictor
    from vitral.inference.timing import interleave
    from vitral.models.zoo import create_model

    predictor, jpeg = Predictor(create_model(SPEED_MODEL, seed=0)), _jpeg()
    x = predictor.inputs.normal(torch.stack([predictor.prepare(jpeg)] * SPEED_BATCH))
    calls: dict[str, Callable[[], Any]] = {
        "forward": partial(predictor.outputs, x),
        "decode": lambda: [predictor.prepare(jpeg) for _ in range(SPEED_BATCH)],
    }
    times = interleave(calls, seconds, warmup=1, rounds=1)
    rates = {f"{name}_images_per_second": SPEED_BATCH / median(each) for name, each in times.items()}
    return {"model": SPEED_MODEL, "batch_size": SPEED_BATCH, "jpeg_size": list(JPEG_SIZE), **rates}


def _jpeg() -> bytes:
    """A JPEG file with as much detail as a photograph: random colours, enlarged."""
    import numpy as np
    from PIL import Image

    H, W = JPEG_SIZE
    small = np.random.default_rng(0).integers(0, 256, (H // 8, W // 8, 3), np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(small).resize((W, H), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
