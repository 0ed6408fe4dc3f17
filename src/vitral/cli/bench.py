"""`vitral bench`: how fast a model is here, by engine and batch size, beside other libraries if asked."""

from dataclasses import dataclass
from typing import Annotated, TypeVar

import tyro

from vitral.cli.output import human, print_json, print_table
from vitral.errors import ConfigError

N = TypeVar("N", int, float)


@dataclass(frozen=True)
class Options:
    """Measure a model in every engine that is installed, in turn, in one process.

    Figures of one run can be compared with each other; those of two runs only as far as the machine was the same.

    Examples:
      vitral bench runs/digits
      vitral bench vit_small_patch16_224 --compare timm,transformers
      vitral bench model.onnx --batch-sizes 1,8,32 --json
      vitral bench runs/photos --merge 0,8,16
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Run directory, file of weights, exported file (.onnx, .xml), or a name from vitral models (fresh weights are as
    fast)."""
    engines: Annotated[str, tyro.conf.arg(metavar="A,B", help_behavior_hint="(default: all that are installed)")] = ""
    """Engines: eager, packed, compile, onnxruntime, openvino. The first is what ratios refer to."""
    batch_sizes: Annotated[str, tyro.conf.arg(metavar="N,M")] = "1,8"
    """Images at once."""
    merge: Annotated[str, tyro.conf.arg(metavar="R,S")] = "0"
    """Token merging, as in vitral predict: every engine is measured with each amount; 0 is exact."""
    compare: Annotated[str, tyro.conf.arg(metavar="A,B", help_behavior_hint="")] = ""
    """Also the same weights in other libraries: timm, transformers."""
    seconds: Annotated[float, tyro.conf.arg(metavar="S")] = 5.0
    """Time for each batch size, at least."""
    json: bool = False
    """Print JSON instead of a table."""


def run(options: Options) -> None:
    """Measure and print."""
    from vitral.inference.bench import bench
    from vitral.inference.predictor import Predictor
    from vitral.models.zoo import create_model, is_model
    from vitral.weights.fetch import is_source

    batches = numbers(options.batch_sizes, int, "--batch-sizes takes whole numbers")
    merges = numbers(options.merge, float, "--merge takes numbers")
    fresh = is_model(options.source) and not is_source(options.source)
    source = create_model(options.source, seed=0) if fresh else options.source
    found = bench(Predictor(source), words(options.engines), batches, words(options.compare), options.seconds, merges)
    if options.json:
        print_json({"source": options.source, **found})
        return
    side, about = "x".join(map(str, found["image"])), found["machine"]
    cost = f", {found['macs'] / 1e9:.3g} G multiply-adds" if found["macs"] else ""
    print_table(
        f"{options.source}: images of {side}{cost}; {about['threads']} threads, {about['processor']}",
        ["engine", "batch", "merge", "median ms", "p95 ms", "images/s", "ratio", "peak memory", "of GEMM rate"],
        [
            [
                row["engine"],
                str(row["batch_size"]),
                f"{row['merge']:g}",
                f"{row['median_ms']:.3g}",
                f"{row['p95_ms']:.3g}",
                f"{row['images_per_second']:.4g}",
                f"{row['ratio']:.2f}",
                "" if row["peak_memory"] is None else human(row["peak_memory"], "B"),
                "" if row["share_of_gemm_rate"] is None else f"{100 * row['share_of_gemm_rate']:.0f} %",
            ]
            for row in found["rows"]
        ],
        note="ratio: to the first of each batch size; peak memory: how far the process grows in a call",
    )


def numbers(text: str, kind: type[N], rule: str) -> list[N]:
    """The numbers between commas."""
    try:
        return [kind(word) for word in words(text)]
    except ValueError:
        raise ConfigError(f"{rule}, got {text!r}.") from None


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]
