"""What computes a model's answers: torch itself, torch compiled, onnxruntime or OpenVINO, behind one call.

`engine.run(x)` takes normalised pixels (B, C, H, W) on the CPU and answers as the model does. The packages that are not
torch are imported when an engine of theirs is made.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn

from vitral.config import EngineName
from vitral.errors import CheckpointError, ConfigError, InputError, VitralError
from vitral.inference.graph import DECODER, FREE_SIDES, WHOLE, Graph, Parts, assemble
from vitral.inference.lanes import in_lanes
from vitral.inference.one_by_one import best_call, compile_openvino
from vitral.inference.packages import import_openvino, require
from vitral.models.seq2seq import check_tokens
from vitral.weights.files import refuse_program

Document = dict[str, Any]
"""What an exported file knows about itself: task, labels, preprocessing (`vitral.inference.export.describe`)."""


class Engine(ABC):
    """One way to compute a model's answers."""

    name: ClassVar[EngineName]
    threads: int | None = None
    """Threads that torch computes in while it runs; None for as many as ever."""

    def __call__(self, x: Tensor) -> Any:
        """As the model would be called."""
        with torch_threads(self.threads):
            return self.run(x)

    @abstractmethod
    def run(self, x: Tensor) -> Any:
        """Pixels (B, C, H, W) -> what the model answers with."""


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let torch compute in so many threads, and engines that are made meanwhile too."""
    before = torch.get_num_threads()
    if number in (None, before):
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- torch ----


class Eager(Engine):
    """The model itself, operation by operation."""

    name = "eager"

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @torch.inference_mode()
    def run(self, x: Tensor) -> Any:
        """What the model gives."""
        return self.model(x)


class Packed(Eager):
    """The same with packed matrices (`vitral.inference.packed`), and a part of the batch for each core."""

    name = "packed"

    def run(self, x: Tensor) -> Any:
        """What the model gives."""
        return in_lanes(super().run, x)


class Compiled(Engine):
    """Machine code that torch's own compiler made of a graph, for any number of images."""

    name = "compile"

    def __init__(self, graph: Graph, compiled: Callable[[Tensor], Any]) -> None:
        self.graph, self._compiled = graph, compiled

    @torch.inference_mode()
    def run(self, x: Tensor) -> Any:
        """What the model gives."""
        _check_shape(x, self.graph.shape)
        return _assemble(self.graph.outputs, self._compiled(x))


# ---- exported files ----


class FileEngine(Engine):
    """An exported file: it needs no model, and knows what to do with its answers."""

    document: Document

    @abstractmethod
    def __init__(self, path: Path, mapped: bool = True) -> None:
        """Open a file; unless `mapped`, nothing of it stays mapped into memory, and it may be overwritten later."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images it takes, or where any size will do, of those that the model is fed."""
        C, (H, W) = self.document["input"]["shape"][1], self.document["preprocess"]["img_size"]
        return C, H, W

    @property
    def multiple(self) -> tuple[int, int] | None:
        """What H and W must be multiples of where any size will do."""
        found = self.document["input"].get("multiple")
        return None if found is None else (found[0], found[1])

    @property
    def outputs(self) -> list[str]:
        """Names of what it gives."""
        return self.document["outputs"]

    @property
    def parts(self) -> Parts:
        """What is run one by one."""
        return _parts(self.document)

    def run(self, x: Tensor) -> Any:
        """What the model would give."""
        return _assemble(self.outputs, self.run_part(WHOLE, [self.checked(x)]))

    def checked(self, x: Tensor) -> Tensor:
        """Images or tokens, unless they are not what the graph was made for."""
        about = self.document["input"]
        if self.document["preprocess"] is None:
            check_tokens(x, None, about["vocabulary"], about["max_length"], what="source")
        else:
            _check_shape(x, self.shape, self.multiple)
        return x

    def run_part(self, part: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a part, in their order, for its inputs in theirs."""
        return self._tensors(part, [x.contiguous() for x in inputs])

    @abstractmethod
    def _tensors(self, part: str, inputs: Sequence[Tensor]) -> list[Tensor]: ...


class OnnxRuntime(FileEngine):
    """An ONNX file in onnxruntime."""

    name = "onnxruntime"

    def __init__(self, path: Path, mapped: bool = True) -> None:
        (onnxruntime,) = require("onnxruntime", "onnxruntime")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3

        def open_session(model: Path | bytes) -> Any:
            return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        with _reading(path):
            if not mapped:
                _add_external_data(options, path)
            whole = open_session(path if mapped else path.read_bytes())
        self.document = read_document(path, whole.get_modelmeta().custom_metadata_map.get("vitral"))
        self._sessions: dict[str, Any]
        if len(self.parts) == 1:
            (names, _), *_ = self.parts.values()
            _check_names(path, names, [port.name for port in whole.get_inputs()])
            self._sessions = dict.fromkeys(self.parts, whole)
        else:  # onnxruntime would run all of them each time
            with _reading(path):
                self._sessions = {part: open_session(model) for part, model in _onnx_parts(path, self.parts).items()}

    def _tensors(self, part: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        names, outputs = self.parts[part]
        feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in self._sessions[part].run(outputs, feeds)]


def _add_external_data(options: Any, path: Path) -> None:
    """Hand over the second file of a large model, which onnxruntime would map."""
    file = external_data_of(path)
    if file.is_file():
        data = file.read_bytes()
        options.add_external_initializers_from_files_in_memory([file.name], [data], [len(data)])


def external_data_of(path: Path) -> Path:
    """The file in which an ONNX file that is too large for one stores its weights."""
    return path.with_name(f"{path.name}.data")


def _onnx_parts(path: Path, parts: Parts) -> dict[str, bytes]:
    """Each part of an ONNX file as a file of its own."""
    onnx, tools = require("onnxruntime for a model that writes", "onnx", "onnx.utils")
    extractor = tools.Extractor(onnx.load(path))
    return {name: extractor.extract_model(*map(list, part)).SerializeToString() for name, part in parts.items()}


class OpenVINO(FileEngine):
    """OpenVINO's own file, or an ONNX file, in OpenVINO; always in fp32, or int8 where the file says so."""

    name = "openvino"

    def __init__(self, path: Path, mapped: bool = True) -> None:
        openvino = import_openvino()
        core = openvino.Core()
        core.set_property({"ENABLE_MMAP": mapped})
        weights = path.with_suffix(".bin")
        with _reading(path):
            if mapped or path.suffix == ".onnx" or not weights.is_file():
                model = core.read_model(path)
            else:  # OpenVINO itself does not notice a file that gets shorter while it is read
                model = core.read_model(path.read_bytes(), weights.read_bytes())
        place = ["framework", "vitral"] if path.suffix == ".onnx" else ["vitral"]
        text = model.get_rt_info(place).value if model.has_rt_info(place) else None
        self.document = read_document(path, text)
        with _reading(path):
            self._calls = {name: self._call(path, _openvino_part(model, *p), *p) for name, p in self.parts.items()}

    def _call(self, path: Path, model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Callable[..., Any]:
        """What computes a part."""

        def compile(*what: Any) -> Any:
            with _reading(path):
                return compile_openvino(*what)

        one_size = self.document["preprocess"] is not None and self.multiple is None and len(self.parts) == 1
        return best_call(model, inputs, outputs, one_size, compile)

    def _tensors(self, part: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        return self._calls[part](*inputs)


def _openvino_part(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """What leads from some inputs of a model to some outputs."""
    if set(inputs) == {port.get_any_name() for port in model.inputs}:
        return model
    ends = [model.output(name).get_node() for name in outputs]
    return import_openvino().Model(ends, [model.input(name).get_node() for name in inputs])


FILE_ENGINES: dict[str, tuple[type[FileEngine], ...]] = {
    ".onnx": (OnnxRuntime, OpenVINO),
    ".xml": (OpenVINO,),
}
"""What runs a file of each kind; the first does unless another is asked for."""


def is_exported(source: object) -> bool:
    """Whether a source names an exported file that vitral runs."""
    return isinstance(source, str | Path) and Path(source).suffix in FILE_ENGINES and not Path(source).is_dir()


def open_exported(path: Path, engine: str | None = None, mapped: bool = True) -> FileEngine:
    """An exported file in the engine of that name, or in the usual one; `mapped` as in `FileEngine`."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; give an exported file, a run directory or a file of weights.")
    refuse_program(path)
    usual, *_ = kinds = FILE_ENGINES[path.suffix]
    if engine is None:
        return usual(path, mapped)
    check_engine(str(engine))
    for kind in kinds:
        if kind.name == engine:
            return kind(path, mapped)
    raise ConfigError(
        f"{path} cannot be run by the {engine} engine; it takes {' or '.join(kind.name for kind in kinds)}."
    )


def read_document(path: Path, text: str | None) -> Document:
    """What an exported file says about itself, checked."""
    if text is None:
        raise CheckpointError(
            f"{path} does not say how its images are prepared: vitral export did not make it. If it holds "
            f"the weights of a published model, take them out of it: vitral convert {path} FOLDER --to vitral"
        )
    try:
        document = json.loads(text)
        right = _is_whole(document)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        right, document = False, {}
    if not right:
        raise CheckpointError(f"{path}: what it says about its inputs is broken; export it again.")
    return document


def _is_whole(document: Document) -> bool:
    """Whether a document has the sizes and names that its file is run with."""
    about, preprocess, parts = document["input"], document["preprocess"], _parts(document)
    if preprocess is None:
        sizes, right = [about["vocabulary"], about["max_length"], document["source_length"]], True
    else:
        (C, *sides), size, multiple = about["shape"][1:], list(preprocess["img_size"]), about.get("multiple", [1, 1])
        free = tuple(sides) == FREE_SIDES
        sizes, right = [C, *size, *multiple], len(size) == len(multiple) == 2 and free == ("multiple" in about)
        right = right and (free or size == sides) and all(m and n % m == 0 for n, m in zip(size, multiple, strict=True))
    if "parts" in document:
        decoder = document["parts"][DECODER]
        blocks, heads, d = decoder["keys"]
        own = [decoder["vocabulary"], decoder["max_length"], document.get("target_length", 1)]
        sizes = [*sizes, *own, blocks, heads, d]
    names = [*document["outputs"], *(name for part in parts.values() for side in part for name in side)]
    right = right and all(isinstance(n, int) and n > 0 for n in sizes) and isinstance(document["labels"], list)
    return right and all(isinstance(name, str) for name in names)


def _check_names(path: Path, told: Sequence[str], found: Sequence[str]) -> None:
    """Raise for a file that takes something else than it says."""
    if set(told) != set(found):
        raise CheckpointError(
            f"{path} says that it takes {', '.join(told)}, but is broken: it takes {', '.join(found)}."
        )


def _parts(document: Document) -> Parts:
    """The parts of a file: one, unless it names them."""
    if "parts" not in document:
        return {WHOLE: ((document["input"]["name"],), tuple(document["outputs"]))}
    return {
        name: (tuple(each["name"] for each in part["inputs"]), tuple(part["outputs"]))
        for name, part in document["parts"].items()
    }


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what a package says about a file that it cannot read into a sentence."""
    try:
        yield
    except VitralError:
        raise
    except Exception as error:
        words = " ".join(str(error).split())[:200]
        raise CheckpointError(f"{path} cannot be read; it is damaged or no such file ({words}).") from error


def _check_shape(x: Tensor, shape: tuple[int, int, int], multiple: tuple[int, int] | None = None) -> None:
    if x.ndim == 4 and x.dtype == torch.float32 and x.shape[1] == shape[0]:
        if tuple(x.shape[2:]) == shape[1:]:
            return
        if multiple is not None and not any(n % m for n, m in zip(x.shape[2:], multiple, strict=True)):
            return
    told = f"{', '.join(map(str, shape))}), the size that the graph was made for"
    if multiple is not None:
        told = f"{shape[0]}, H, W), H and W multiples of {multiple[0]} and {multiple[1]}"
    raise InputError(f"images must be float32 (B, {told}, got {x.dtype} {tuple(x.shape)}.")


def _assemble(names: tuple[str, ...] | list[str], tensors: Any) -> Any:
    return assemble(dict(zip(names, tensors, strict=True)))


def check_engine(name: str) -> None:
    """Raise for a word that is no engine."""
    if name not in get_args(EngineName):
        raise ConfigError(f"engine must be one of {', '.join(get_args(EngineName))}, got {name!r}.")
