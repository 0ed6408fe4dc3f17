"""`vitral export`: a model as one file that runs without vitral."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from vitral.cli.output import human, print_json
from vitral.config import ExportFormat, QuantizeOptions, Running
from vitral.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Export a model to a file, and verify the file against the model.

    The file takes any number of images of the size that the model is fed, or with --dynamic-size of any, or of texts.
    Preprocessing, tokenizers, task and labels are in it, so vitral predict digits.onnx image.png needs no more.

    Examples:
      vitral export runs/digits --out digits.onnx
      vitral export runs/digits --format openvino
      vitral export model.safetensors --format pt2 --out model.pt2
      vitral export runs/photos --merge 8
      vitral export runs/photos --dynamic-size
      vitral export runs/digits --format openvino --int8 --data digits --max-drop 0.5
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Run directory, file or folder of weights, pretrained name, or hf-hub:owner/name."""
    format: Annotated[
        ExportFormat | None,
        tyro.conf.arg(metavar="{onnx,openvino,pt2}", help_behavior_hint="(default: as --out ends, or onnx)"),
    ] = None
    """ONNX, OpenVINO (.xml with .bin), or a program for torch (.pt2), which vitral writes but does not open."""
    out: Annotated[str, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: model.* in the run)")] = ""
    """File to write; a JSON file next to it describes its contents."""
    merge: Annotated[float, tyro.conf.arg(metavar="R")] = Running.merge
    """Token merging in the file, as in vitral predict: patches that each block merges into others, or below 1 the share
    of all that is gone at the end."""
    dynamic_size: bool = False
    """Let the file take images of any size that the patch divides: positions are resized in it. For ViTs, ResNets, and
    segmenters and detectors on them."""
    int8: bool = False
    """Eight bits for weights and activations: smaller, and faster where the processor can."""
    data: Annotated[str, tyro.conf.arg(metavar="DATA", help_behavior_hint="")] = ""
    """For --int8: labelled data, of which a few calibrate it and others judge what it costs."""
    quantize: Annotated[QuantizeOptions, tyro.conf.arg(name="")] = field(default_factory=QuantizeOptions)
    """How far --int8 may go."""
    json: bool = False
    """Print JSON."""


def run(options: Options) -> None:
    """Export, and report the difference between file and model."""
    from vitral.api import export
    from vitral.inference.export import SUFFIXES

    suffix = SUFFIXES.get(options.format or "onnx", "")
    source = Path(options.source)
    out = options.out or str(source / f"model{suffix}" if source.is_dir() else Path(source.name).with_suffix(suffix))
    if not options.int8 and options.quantize != QuantizeOptions():
        raise ConfigError("--max-drop and --calibration-images are for --int8; give it too, or leave them out.")
    made = export(
        options.source, out, options.format, merge=options.merge, dynamic_size=options.dynamic_size,
        int8=options.int8, data=options.data or None, **options.quantize.to_dict(),
    )  # fmt: skip
    if options.json:
        loss = None if made.loss is None else {**asdict(made.loss), "points": made.loss.points}
        found = {"path": str(made.path), "format": made.format, "bytes": made.bytes, "differences": made.differences}
        print_json(found | ({"int8": loss} if loss else {}))
        return
    print(f"{made.path}: {made.format}, {human(made.bytes, 'B')}; {made.sidecar.name} tells what is in it")
    if (loss := made.loss) is not None:
        print(
            f"int8, {loss.how}: {loss.metric} {100 * loss.before:.2f} % before, "
            f"{100 * loss.after:.2f} % after, on {loss.images:,} images of the {loss.part} part"
        )
    for batch, difference in made.differences.items():
        print(f"file and model differ by {difference:.1e} of the largest number for a batch of {batch}")
