"""What int8 and token merging cost in accuracy, and bring in speed, on a trained model and the test part of its data.

    python benchmarks/int8_accuracy.py RUN DATA [--merges 0.2 0.4 0.6] [--batch 8] [--rounds 15]

OpenVINO runs all of them; `fp32` is the plain model. int8 is calibrated with 300 images of the training part, every
layer. Speed is of one batch, by rounds that are interleaved, as a ratio to fp32 in OpenVINO and to torch, eager.
Writes benchmarks/results/int8_accuracy-NAME.json.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from measure import interleave, write_json
from vitral import Predictor
from vitral.data.sources.open import open_data
from vitral.inference.export import convert_openvino, quiet
from vitral.inference.graph import graph_of
from vitral.inference.one_by_one import compile_openvino
from vitral.inference.quantize import VAL_FRACTION, calibration_images, int8_openvino
from vitral.models.merge import merged
from vitral.training.session import find


def in_openvino(model: Any, predictor: Predictor, images: Any) -> Callable[[Tensor], Tensor]:
    """A model in OpenVINO; in int8 where there are images to calibrate it with."""
    with quiet():
        graph = convert_openvino(graph_of(model, predictor.preprocess))
        compiled = compile_openvino(graph if images is None else int8_openvino(graph, images, []))
    return lambda x: torch.from_numpy(compiled([x.numpy()], share_inputs=True)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("data")
    parser.add_argument("--merges", nargs="*", type=float, default=[0.2, 0.4, 0.6])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    o = parser.parse_args()

    predictor = Predictor(o.run, batch_size=100)
    data = open_data(o.data).with_splits(VAL_FRACTION, 0.0, seed=0)
    images = calibration_images(predictor, data, 300)
    model = predictor.model
    networks: dict[str, Callable[[Tensor], Tensor]] = {
        "eager": model,
        "fp32": in_openvino(model, predictor, None),
        "int8": in_openvino(model, predictor, images),
    }
    for amount in o.merges:
        less = merged(model, amount)
        networks[f"fp32, {amount:g} merged"] = in_openvino(less, predictor, None)
        networks[f"int8, {amount:g} merged"] = in_openvino(less, predictor, images)

    x = torch.randn(o.batch, images.shape[1], *images.shape[2:])
    with torch.inference_mode():
        times = interleave({name: partial(run, x) for name, run in networks.items()}, 10, 2, o.rounds)
    test = replace(data, splits={"test": data.splits["test"]})
    rows = []
    print(f"{o.run} on {o.data}: {len(test.splits['test']):,} test images; speed at batch {o.batch}")
    print(f"{'':20}{'accuracy':>10}{'points':>8}{'x fp32':>8}{'x eager':>8}")
    for name, network in networks.items():
        with torch.inference_mode():
            found = find(network, predictor.task, test, test.splits["test"], predictor.inputs, 100)
        accuracy = 100 * predictor.task.metrics(found)[predictor.task.better]
        faster = {
            base: statistics.median(a / b for a, b in zip(times[base], times[name], strict=True))
            for base in ("fp32", "eager")
        }
        rows.append({"name": name, "accuracy": accuracy, "faster": faster})
        lost = accuracy - rows[0]["accuracy"]
        print(f"{name:20}{accuracy:10.2f}{lost:+8.2f}{faster['fp32']:8.2f}{faster['eager']:8.2f}")
    print(f"wrote {write_json(f'int8_accuracy-{Path(o.run).name}', {'batch': o.batch, 'rows': rows})}")


if __name__ == "__main__":
    main()
