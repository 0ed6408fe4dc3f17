"""Files and folders of weights, whatever they are called: what tensors are in them, read only when asked for.

Nothing in a file is ever run: pickles only through torch's `weights_only` reader, numpy archives without objects, and
sizes are compared with the file before memory is taken. A file that cannot be read so is refused in one sentence.
"""

import argparse
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from vitral.errors import CheckpointError
from vitral.schema import shortened
from vitral.weights.layout import Lazy, strip_prefix

WRAPPERS = ("teacher", "model_ema", "ema", "state_dict", "model", "module")
"""Keys under which training programs keep the weights, the one to prefer first."""
WEIGHT_FILES = (
    *("model.safetensors", "model.safetensors.index.json", "open_clip_model.safetensors"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json", "open_clip_pytorch_model.bin"),
)
DOCUMENTS = ("config.json", "preprocessor_config.json", "open_clip_config.json")
"""What may lie beside the weights and says more of them."""
SUFFIXES = (".safetensors", ".npz", ".pth", ".pt", ".bin", ".onnx")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
_DTYPES |= {"BOOL": torch.bool}
MAPPED, COPIED = "mmap", "pread"
"""How safetensors reads a file: by mapping it into memory, or by copying it there."""
_MAX_JSON = 64 * 2**20
_PROGRAM = re.compile(r"(.*/)?(archive_format|models/[^/]+\.json|serialized_exported_program\.json)")
"""Entries of an archive that only `torch.export` and torch's compiler write."""
_MAX_NAME = 255  # bytes, as file systems have it
_BOMB = (2**30, 50)  # more than this many bytes, and this many times the file


@dataclass(frozen=True)
class WeightFile:
    """What lies in a file or folder: tensors by name, and what was found beside them."""

    path: Path
    kind: str
    tensors: dict[str, Lazy]
    notes: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    """`config.json` of a folder."""
    preprocessor: dict[str, Any] = field(default_factory=dict)
    """`preprocessor_config.json` of a folder."""

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def open_weights(path: Path, mapped: bool = True) -> WeightFile:
    """Open a file of weights, or the folder of one.

    With `mapped`, safetensors are mapped into memory, and pages are read from the file when they are used; otherwise
    tensors are copied, and a file that is overwritten or truncated later has no effect on them.
    """
    if path.is_dir():
        return _open_folder(path, mapped)
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give a file of weights, a folder, or hf-hub:owner/name.")
    refuse_program(path)
    if path.name.endswith(".index.json"):
        return _open_shards(path, mapped)
    if path.suffix not in OPENERS:
        raise CheckpointError(
            f"{path} is a file of an unknown kind ({path.suffix or 'no suffix'}); weights end in {', '.join(OPENERS)}."
        )
    opened = (OPENERS if mapped else READERS)[path.suffix](path)
    if not opened.tensors:
        raise CheckpointError(f"{path} holds no tensors.")
    empty = next((name for name, tensor in opened.tensors.items() if 0 in tensor.shape), None)
    if empty is not None:
        raise CheckpointError(f"{path}: tensor {empty} is empty (shape {opened.tensors[empty].shape}).")
    opened = _unwrapped(opened)
    return _with_documents(opened, path.parent) if path.name in WEIGHT_FILES else opened


def refuse_program(path: Path) -> None:
    """Raise for a program exported for torch, by its name or, if it was renamed, by the directory of its archive.

    To open one is to run it: torch evaluates expressions in it and calls the operators that it names.
    """
    if path.suffix.lower() == ".pt2" or any(map(_PROGRAM.fullmatch, _entries(path))):
        raise CheckpointError(
            f"{path} is a program exported for torch (.pt2), and opening one can run code, so vitral does not open it; "
            f"use the run directory, its weights, or a .onnx or .xml file, or if you trust its origin, run it with "
            f'torch.export.load("{path.name}").module().'
        )


def _entries(path: Path) -> list[str]:
    """The names in a zip archive, from its directory; none if the file is no archive, or a damaged one."""
    if not zipfile.is_zipfile(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        return []


def _unwrapped(file: WeightFile) -> WeightFile:
    """Take off what wrappers of torch put before every name."""
    for prefix in ("module.", "_orig_mod.", "module."):
        if any(name.startswith(prefix) for name in file.tensors):
            notes = [*file.notes, f"prefix {prefix!r} taken off"]
            file = replace(file, tensors=strip_prefix(file.tensors, prefix), notes=notes)
    return file


def _with_documents(file: WeightFile, folder: Path) -> WeightFile:
    """Add what lies beside the weights in their folder."""
    found = {name: read_json(folder / name) for name in DOCUMENTS if (folder / name).is_file()}
    config = found.get("config.json", {})
    if "open_clip_config.json" in found:
        config = {**config, "open_clip": found["open_clip_config.json"]}
    return replace(file, config=config, preprocessor=found.get("preprocessor_config.json", {}))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, which is not read if it is larger than such files are."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON:
            raise CheckpointError(f"{path} has {size:,} bytes, too many for a JSON file of this kind.")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror or error}).") from error
    return parse_json(data, path)


def read_tensors(path: Path, mapped: bool = True) -> dict[str, Tensor]:
    """All tensors of a safetensors file that vitral wrote; `mapped` as in `open_weights`."""
    try:
        return load_file(path, backend=MAPPED if mapped else COPIED)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({_first_line(error)}).") from error


def parse_json(data: bytes | str, source: object) -> dict[str, Any]:
    """A JSON object from text that may be damaged; `source` is named in errors."""
    try:
        document = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # broken, not UTF-8, integers of too many digits, nested too deep
        raise CheckpointError(f"{source} cannot be read as JSON ({_first_line(error)}).") from error
    if not isinstance(document, dict):
        raise CheckpointError(f"{source} should hold a JSON object, got {type(document).__name__}.")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key that occurs twice is refused, as readers would disagree on its value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {shortened(twice)} occurs twice")
    return made


# ---- folders ----


def _open_folder(path: Path, mapped: bool) -> WeightFile:
    present = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
    present += [file for suffix in SUFFIXES for file in sorted(path.glob(f"*{suffix}"))]
    if not present:
        raise CheckpointError(f"{path} holds no weights; looked for {', '.join(WEIGHT_FILES[:3])} and the like.")
    opened = _with_documents(open_weights(present[0], mapped), path)
    return replace(opened, path=path, notes=[*opened.notes, f"weights: {present[0].name}"])


def is_plain_name(name: str) -> bool:
    """Whether a name found in a file is that of another file in the same folder, on every system."""
    plain = PurePosixPath(name).name == name and not name.startswith(".") and not {"\\", "\0"} & set(name)
    return plain and len(name.encode("utf-8", "replace")) <= _MAX_NAME


def read_shard_index(path: Path) -> dict[str, str]:
    """The file of each tensor, from the index of weights that are stored in several files."""
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise CheckpointError(f"{path} has no weight_map from tensors to files.")
    for name in sorted(set(files.values())):
        if not is_plain_name(name) or Path(name).suffix not in OPENERS:
            raise CheckpointError(
                f"{path} names the file {shortened(name)}; shards must be plain file names next to the index."
            )
    return files


def _open_shards(path: Path, mapped: bool) -> WeightFile:
    """Several files, and an index that maps each tensor to its file."""
    files = read_shard_index(path)
    tensors: dict[str, Lazy] = {}
    for name in sorted(set(files.values())):
        shard = open_weights(path.parent / name, mapped).tensors
        lost = [tensor for tensor, file in files.items() if file == name and tensor not in shard]
        if lost:
            raise CheckpointError(f"{path} maps {shortened(lost[0])} to {name}, which does not hold it.")
        tensors |= {tensor: lazy for tensor, lazy in shard.items() if files.get(tensor) == name}
    return WeightFile(path, "safetensors", tensors, [f"{len(set(files.values()))} shards"])


# ---- safetensors ----


def _open_safetensors(path: Path, backend: str = MAPPED) -> WeightFile:
    try:
        file = safe_open(path, "pt", backend=backend)
        tensors = {}
        for name in file.keys():  # noqa: SIM118  # it is no dictionary
            view = file.get_slice(name)
            kind = view.get_dtype()
            dtype = _DTYPES.get(kind)
            if dtype is None:
                raise CheckpointError(f"{path}: tensor {name} is of type {kind}, which weights are not kept in.")
            tensors[name] = Lazy(tuple(view.get_shape()), dtype, _reader(path, name, lambda n=name: file.get_tensor(n)))
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({_first_line(error)}).") from error
    return WeightFile(path, "safetensors", tensors)


def _reader(path: Path, name: str, read: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def guarded() -> Tensor:
        try:
            return read()
        except Exception as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read ({_first_line(error)}).") from error

    return guarded


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# ---- torch ----


class _Bounded(io.BufferedReader):
    """A file that never allocates more than it holds: the length of a string in a damaged pickle may be anything."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.length = path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        """Read at most what is left."""
        return super().read(size if size is None or size < 0 else min(size, max(self.length - self.tell(), 0)))


def _open_torch(path: Path) -> WeightFile:
    _refuse_hostile(path)
    try:
        # DINO's full checkpoints keep their command line, a Namespace, beside the weights. Nothing else is let in.
        with torch.serialization.safe_globals([argparse.Namespace]), _Bounded(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise CheckpointError(_refusal(path, error)) from error
    found, notes = unwrap(path, content)
    tensors = {}
    for name, tensor in found.items():
        if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise CheckpointError(f"{path}: tensor {name} is not an ordinary one, and cannot be a weight.")
        if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
            raise CheckpointError(f"{path}: tensor {name} claims more numbers than the file holds; it is damaged.")
        tensors[name] = Lazy(tuple(tensor.shape), tensor.dtype, lambda t=tensor: t.detach())
    return WeightFile(path, "torch", tensors, notes)


def _refuse_hostile(path: Path) -> None:
    """Refuse archives with code in them, compressed ones, and pickles that would fill the memory with nothing."""
    if not zipfile.is_zipfile(path):
        with path.open("rb") as file:
            _refuse_bytearrays(path, file.read(_MAX_JSON))
        return
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            for member in members:
                if member.filename.endswith(".pkl") and member.compress_type == zipfile.ZIP_STORED:
                    _refuse_bytearrays(path, archive.read(member))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"{path} is damaged ({_first_line(error)}).") from error
    if any(PurePosixPath(member.filename).name == "constants.pkl" or "/code/" in member.filename for member in members):
        raise CheckpointError(
            f"{path} is a TorchScript archive (as OpenAI publishes CLIP), and reading it runs the code in it; "
            f"get the same weights as safetensors, such as hf-hub:openai/clip-vit-base-patch32."
        )
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise CheckpointError(f"{path} holds compressed parts, which no program writes for weights; it is refused.")


def _refuse_bytearrays(path: Path, pickled: bytes) -> None:
    """torch's reader would make a bytearray of any size that a pickle asks for; weights never need one."""
    if b"bytearray" in pickled:
        raise CheckpointError(f"{path} asks for a bytearray, which no weights need; it is refused.")


def _refusal(path: Path, error: Exception) -> str:
    text = str(error)
    if found := re.search(r"(?:GLOBAL|class) ([\w.]+)", text):
        return (
            f"{path} holds a Python object ({found[1]}) besides tensors, and reading it could run code; "
            f"save the state_dict alone, as safetensors, where you trust the file."
        )
    why = next((line for line in text.splitlines()[1:] if "rror" in line), type(error).__name__).strip()
    return f"{path} cannot be read as a file of tensors ({why}); it is damaged, or holds code."


def unwrap(path: Path, content: Any) -> tuple[dict[str, Tensor], list[str]]:
    """Find the weights in what a training program saved."""
    notes = []
    for _ in range(8):
        if not isinstance(content, Mapping):
            break
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        key = next((key for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
        if key is None or len(tensors) > 4:
            others = [str(name) for name in content if str(name) not in tensors]
            if tensors:
                return tensors, [*notes, *([f"left alone: {', '.join(others[:8])}"] if others else [])]
            break
        notes.append(f"weights taken from {key!r}, of {', '.join(map(str, list(content)[:8]))}")
        content = content[key]
    what = ", ".join(map(str, list(content)[:8])) if isinstance(content, Mapping) else type(content).__name__
    raise CheckpointError(f"{path} holds no weights that vitral can find; at its top: {what or 'nothing'}.")


# ---- numpy ----


def _open_npz(path: Path) -> WeightFile:
    try:
        archive = zipfile.ZipFile(path)
        members = [member for member in archive.infolist() if member.filename.endswith(".npy")]
        total, size = sum(member.file_size for member in members), path.stat().st_size
        if total > _BOMB[0] and total > _BOMB[1] * size:
            raise CheckpointError(f"{path} would grow from {size:,} to {total:,} bytes; no weights do, it is refused.")
        tensors = {}
        for member in members:
            name = member.filename.removesuffix(".npy")
            tensors[name] = _npy_entry(path, archive, member, name)
    except CheckpointError:
        raise
    except Exception as error:  # damaged archives raise whatever zipfile, zlib, ast and numpy raise
        raise CheckpointError(f"{path} cannot be read as a numpy archive ({_first_line(error)}).") from error
    return WeightFile(path, "npz", tensors)


def _npy_entry(path: Path, archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> Lazy:
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise CheckpointError(f"{path}: {name} holds Python objects, and reading them could run code.")
        here = member.file_size - file.tell()
    numbers = int(np.prod(shape, dtype=object)) if shape else 1
    if numbers * dtype.itemsize != here:
        raise CheckpointError(f"{path}: {name} claims shape {shape} but holds {here:,} bytes; it is damaged.")
    bf16 = dtype.kind == "V" and dtype.itemsize == 2  # how numpy keeps a type that it does not know
    kind = torch.bfloat16 if bf16 else _torch_dtype(path, name, dtype)

    def read() -> Tensor:
        with archive.open(member) as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if bf16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array.astype(dtype.newbyteorder("="), copy=False)))

    return Lazy(tuple(shape), kind, _reader(path, name, read))


def _torch_dtype(path: Path, name: str, dtype: np.dtype) -> torch.dtype:
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        raise CheckpointError(f"{path}: {name} is of type {dtype}, which weights are not kept in.") from None


# ---- onnx ----


def _open_onnx(path: Path) -> WeightFile:
    """The initialisers of a graph. One that the exporter left without a name is called by where it is used."""
    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise CheckpointError(f"{path} needs onnx to be read: pip install 'vitral[export]'.") from None
    try:
        graph = onnx.load(path, load_external_data=False).graph
        named = {tensor.name: tensor for tensor in graph.initializer}
        anonymous = {name for name in named if name.startswith("onnx::")}
        places: dict[str, str] = {}
        turned = set()
        for node in graph.node:
            for name in anonymous.intersection(node.input):
                scope = node.name.strip("/").replace("/", ".").rpartition(".")[0]
                matrix = node.op_type == "MatMul"
                places[name] = f"{scope}.weight" if matrix else f"{scope}.{node.op_type}"
                turned.update({name} if matrix else ())
        tensors = {}
        for name, tensor in named.items():
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                raise CheckpointError(f"{path} keeps its weights in other files; save it as one file first.")
            array = numpy_helper.to_array(tensor)
            if array.dtype.kind != "f":  # axes and sizes, not weights
                continue
            array = array.T if name in turned else array
            dtype = _torch_dtype(path, name, array.dtype)
            tensors[places.get(name, name)] = Lazy(array.shape, dtype, lambda a=array: torch.from_numpy(a.copy()))
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as ONNX ({_first_line(error)}).") from error
    return WeightFile(path, "onnx", tensors)


OPENERS: dict[str, Callable[[Path], WeightFile]] = {
    ".safetensors": _open_safetensors,
    ".npz": _open_npz,
    **dict.fromkeys((".pth", ".pt", ".bin"), _open_torch),
    ".onnx": _open_onnx,
}
READERS = OPENERS | {".safetensors": partial(_open_safetensors, backend=COPIED)}
"""The same without mapping a file; only safetensors are mapped."""
