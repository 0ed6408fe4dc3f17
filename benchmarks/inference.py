"""Inference on the CPU: vitral's engines beside timm and transformers, with the same weights, in the same run.

    python benchmarks/inference.py [--models vit_base_patch16_224 ...] [--batches 1 8] [--int8] [--merge 0.5]

Rivals: transformers (SDPA), timm eager, timm compiled with freezing, timm in OpenVINO, and with --int8 the int8 models
of NNCF, with --merge ours with that share of the patches merged away too. Prints the ratio of each to timm eager, and
of vitral's best to the best rival of its kind, by rounds that are interleaved; writes results/NAME.json (--out).
The rivals compute in a process of their own, as they do for those who use them, and ours in another, where memory is
kept between passes as `vitral.Predictor` lets it be; one of the two is at rest while the other computes.
--shared-memory-settings lets the rivals' process keep its memory too.
int8 is calibrated with noise here: for the speed alone, not for accuracy (benchmarks/int8_accuracy.py).
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from measure import gemm_rate, interleave, multiply_adds, write_json
from sides import Side
from vitral import create_model
from vitral.inference.choose import make_engine
from vitral.inference.export import convert_openvino, quiet
from vitral.inference.graph import Graph, graph_of
from vitral.inference.memory import keep_freed_memory
from vitral.inference.one_by_one import best_call, compile_openvino
from vitral.inference.peers import peer_of
from vitral.inference.quantize import int8_openvino
from vitral.models.merge import merged

BASE = "timm eager"
PAUSE = 0.02
"""Seconds between two calls: right behind one of torch, OpenVINO took 4 % longer for an image, as torch's threads still
looked for work."""
KINDS = {"fp32": "fp32", "int8": "int8", "int8 merged": "int8"}
"""Columns, and the kind of rival that each is held against."""


def in_openvino(graph: Graph, int8: bool) -> Any:
    """A graph as OpenVINO has it, in fp32 or int8."""
    with quiet():
        model = convert_openvino(graph)
        return int8_openvino(model, graph.example(20).numpy(), []) if int8 else model


def plain_call(model: Any) -> Callable[[Tensor], Any]:
    """An OpenVINO model as one calls it."""
    compiled = compile_openvino(model)
    return lambda x: compiled([x.numpy()], share_inputs=True)


def our_call(graph: Graph) -> Callable[[Tensor], Any]:
    """A graph in int8 as our engine calls it."""
    return best_call(in_openvino(graph, int8=True), graph.inputs, graph.outputs, one_size=True)


def theirs(model: Any, engines: Sequence[str], int8: bool, merge: float) -> dict[str, Callable[[Tensor], Any]]:
    """The same model in other libraries, by name."""
    timm: Any = peer_of("timm", model)
    graph = graph_of_peer(timm, model)
    found: dict[str, Callable[[Tensor], Any]] = {BASE: timm, "transformers": peer_of("transformers", model)}
    if "compile" in engines:
        found["timm compile"] = torch.compile(timm, options={"freezing": True})
    if "openvino" in engines:
        found["timm openvino"] = plain_call(in_openvino(graph, int8=False))
    if int8:
        found["timm int8"] = plain_call(in_openvino(graph, int8=True))
    return found


def ours(model: Any, engines: Sequence[str], int8: bool, merge: float) -> dict[str, Callable[[Tensor], Any]]:
    """The model in our engines, by name; the names begin with "vitral"."""
    p = model.preprocess
    found: dict[str, Callable[[Tensor], Any]] = {f"vitral {name}": make_engine(name, model, p) for name in engines}
    if int8:
        found["vitral int8"] = our_call(graph_of(model, p))
    if int8 and merge:
        found["vitral int8 merged"] = our_call(graph_of(merged(model, merge), p))
    return found


def on_batches(
    make: Callable[..., dict[str, Callable[[Tensor], Any]]], keep_memory: bool, name: str, *what: Any
) -> dict[str, Callable[[int], None]]:
    """The rivals of a side as calls for a number of images, in the process that they are to compute in."""
    if keep_memory:
        keep_freed_memory()
    model = create_model(name, seed=0).eval()
    batch_of = lru_cache(None)(graph_of(model, model.preprocess).example)

    def timed(run: Callable[[Tensor], Any], batch: int) -> None:
        with torch.inference_mode():
            run(batch_of(batch))

    return {rival: partial(timed, run) for rival, run in make(model, *what).items()}


def graph_of_peer(peer: Any, model: Any) -> Graph:
    """timm's model as a graph; it takes the images that ours takes."""
    return Graph(peer, ("logits",), graph_of(model, model.preprocess).shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_base_patch16_224", "vit_small_patch16_224"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--engines", nargs="+", default=["eager", "packed", "compile", "onnxruntime", "openvino"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=20, help="time for each row, at least")
    parser.add_argument("--int8", action="store_true")
    parser.add_argument("--merge", type=float, default=0.0, help="share of the patches, or how many in each block")
    parser.add_argument("--shared-memory-settings", action="store_true")
    parser.add_argument("--out", default="inference", help="name of the result")
    options = parser.parse_args()

    rows = []
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; ratios to {BASE}, medians of paired rounds")
    for name in options.models:
        model = create_model(name, seed=0).eval()
        shape = graph_of(model, model.preprocess).shape
        macs = multiply_adds(peer_of("timm", model), shape)  # nominal: of the full model
        what = (name, options.engines, options.int8, options.merge)
        sides = [
            Side(on_batches, theirs, options.shared_memory_settings, *what),
            Side(on_batches, ours, True, *what),
        ]
        at = {rival: side for side in sides for rival in side.names}
        for batch in options.batches:
            rate = gemm_rate(own_products(model, batch))
            calls = {rival: partial(side.call, rival, batch) for rival, side in at.items()}
            times = interleave(calls, options.seconds, 2, options.rounds, PAUSE)
            row = summary(times, batch, macs, rate)
            rows.append({"model": name, "batch": batch, **row})
            print(f"\n{name}, batch {batch}, {row['rounds']} rounds")
            for rival, ratio in sorted(row["ratios"].items(), key=lambda item: -item[1]):
                print(f"  {rival:20} {ratio:6.2f}   {batch / row['medians'][rival]:8.2f} images/s")
            for kind, (best, rival, ahead) in row["ahead"].items():
                print(f"  {kind}: {best} is {ahead:.3f} times as fast as {rival}")
            print(f"  {row['share_of_gemm_rate']:.1%} of the GEMM rate, {rate / 1e9:.0f} G/s, best fp32")
        for side in sides:
            side.close()
    settings = {"merge": options.merge, "shared_memory_settings": options.shared_memory_settings}
    print(f"wrote {write_json(options.out, {**settings, 'rows': rows})}")


def own_products(model: Any, batch: int) -> list[tuple[int, int, int]]:
    """The matrix products of the blocks of a model: rows, inner side and columns."""
    layers = [part for part in model.blocks[0].modules() if isinstance(part, torch.nn.Linear)]
    tokens = model.forward_features(graph_of(model, model.preprocess).example(1)).shape[1]
    return [(batch * tokens, layer.in_features, layer.out_features) for layer in layers]


def summary(times: dict[str, list[float]], batch: int, macs: int, rate: float) -> dict[str, Any]:
    """Medians, ratios by round to timm eager, and our best beside the best rival, in fp32 and in int8."""
    medians = {name: statistics.median(t) for name, t in times.items()}
    ahead = {}
    for kind, other in KINDS.items():
        ours = [name for name in times if name.startswith("vitral") and kind_of(name) == kind]
        theirs = [name for name in times if not name.startswith("vitral") and kind_of(name) == other]
        if ours and theirs:
            best, rival = (min(group, key=medians.__getitem__) for group in (ours, theirs))
            ahead[kind] = (best, rival, paired(times, rival, best))
    exact = min(t for name, t in medians.items() if name.startswith("vitral") and kind_of(name) == "fp32")
    return {
        "rounds": len(next(iter(times.values()))),
        "medians": medians,
        "ratios": {name: paired(times, BASE, name) for name in times},
        "ahead": ahead,
        "share_of_gemm_rate": batch * macs / exact / rate,
    }


def kind_of(name: str) -> str:
    """The column of a row."""
    return next((kind for kind in reversed(KINDS) if name.endswith(kind)), "fp32")


def paired(times: dict[str, list[float]], slow: str, fast: str) -> float:
    """How many times as fast `fast` is, the median over the rounds."""
    return statistics.median(s / f for s, f in zip(times[slow], times[fast], strict=True))


if __name__ == "__main__":
    main()
