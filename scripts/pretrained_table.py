"""Write src/vitral/weights/pretrained.csv: the published weights of timm that vitral loads.

    python scripts/pretrained_table.py --check
    python scripts/pretrained_table.py --write --results results-imagenet.csv

Names, hub ids, preprocessing and licences are those of timm's `default_cfgs`. An architecture is listed if vitral's
model gives the outputs of timm's for the same random weights (with fewer blocks, which takes minutes, not hours).
Accuracies come from the file that `TOP1_SOURCE` names; without `--results` those of the table are kept.
"""

import argparse
import csv
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import save_file

import vitral
from vitral.config import pair
from vitral.errors import VitralError
from vitral.inference.peers import import_timm
from vitral.models.cost import model_cost
from vitral.weights import pretrained
from vitral.weights.detect import detect, is_resnet, is_swin
from vitral.weights.files import WeightFile
from vitral.weights.layout import Lazy

TABLE = Path(pretrained.__file__).with_suffix(".csv")
MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "swin_transformer", "resnet")
"""Files of timm with architectures that vitral has."""
FEWER_BLOCKS: dict[str, dict[str, Any]] = {
    "vision_transformer": {"depth": 2},
    "vision_transformer_hybrid": {"depth": 2},
    "deit": {"depth": 2},
    "swin_transformer": {"depths": (2, 2, 2, 2)},
    "resnet": {},
}
TOLERANCE = 1e-4


@cache
def timm() -> ModuleType:
    """Import timm on first use."""
    return import_timm()


def candidates() -> Iterator[str]:
    """NAME.TAG of every file of these modules on the hub, the default tag of an architecture first."""
    _registry = timm().models._registry
    for architecture in timm().list_models():
        if _registry._model_to_module[architecture] in MODULES:
            for tag in _registry._model_default_cfgs[architecture].tags:
                name = f"{architecture}.{tag}" if tag else architecture
                if timm().get_pretrained_cfg(name).hf_hub_id:
                    yield name


def settings_of(name: str) -> dict[str, str]:
    """The columns that are timm's own."""
    cfg = timm().get_pretrained_cfg(name)
    height, width = cfg.input_size[1:]
    assert height == width, name
    assert cfg.hf_hub_filename is None, f"{name} has a file name of its own; is it safetensors?"
    return {
        "name": name,
        "repository": cfg.hf_hub_id,
        "file": "model.safetensors",
        "img_size": str(height),
        "num_classes": str(cfg.num_classes),
        "mean": " ".join(map(str, cfg.mean)),
        "std": " ".join(map(str, cfg.std)),
        "interpolation": cfg.interpolation,
        "crop_pct": str(cfg.crop_pct),
        "crop_mode": "squash_center" if cfg.crop_mode == "squash" and cfg.crop_pct < 1 else cfg.crop_mode,
        "licence": cfg.license or "",
    }


@torch.no_grad()
def config_if_equal(name: str) -> Any:
    """The vitral config of a model, if its outputs equal timm's for the same weights; raises VitralError if not."""
    _registry = timm().models._registry
    architecture = name.partition(".")[0]
    fewer = FEWER_BLOCKS[_registry._model_to_module[architecture]]
    with torch.device("meta"):
        whole = timm().create_model(name)
        theirs = timm().create_model(name, **fewer).eval()
    row = pretrained._read_row({**settings_of(name), "params": "0", "macs": "0", "top1": ""})
    _refuse_early(theirs.state_dict(), row)
    torch.manual_seed(0)
    theirs = timm().create_model(name, **fewer).eval()
    for key, tensor in theirs.state_dict().items():
        if tensor.is_floating_point():  # LayerScale and biases would otherwise hide a difference
            tensor.add_(torch.randn_like(tensor) * 0.02)
        if key.endswith("running_var"):
            tensor.abs_()
    with tempfile.TemporaryDirectory() as folder:
        save_file({key: t.contiguous().clone() for key, t in theirs.state_dict().items()}, f"{folder}/{row.file}")
        Path(folder, "config.json").write_text(json.dumps(row.document))
        ours = vitral.load_model(folder, quiet=True)
    if ours.preprocess != row.preprocess:
        raise VitralError(f"{name}: the preprocessing is {ours.preprocess}, timm's is {row.preprocess}.")
    x = torch.randn(1, 3, *pair(row.preprocess.img_size))
    a, b = theirs(x), ours(x) if ours.config.num_classes else ours.embed(x)
    if a.shape != b.shape or (a - b).abs().max() > TOLERANCE * a.abs().max():
        raise VitralError(f"{name}: the outputs differ from timm's.")
    if fewer:
        depth = (
            {"depth": len(whole.blocks)}
            if "depth" in fewer
            else {"depths": tuple(len(layer.blocks) for layer in whole.layers)}
        )
        return replace(ours.config, **depth)
    return ours.config


def _refuse_early(tensors: dict[str, torch.Tensor], row: pretrained.Pretrained) -> None:
    """Raise by names and shapes, before weights are made, for what is no ViT of ours."""
    names = {name: Lazy(tuple(t.shape), torch.float32, lambda: torch.empty(0)) for name, t in tensors.items()}
    if not is_swin(names) and not is_resnet(names):
        found = detect(WeightFile(Path(row.name), "safetensors", names, config=row.document))
        if found.plan.unexpected:
            raise VitralError(f"{row.name} has tensors that no ViT here has: {found.plan.unexpected[:3]}.")


def rows(accuracies: dict[str, str], log: Any) -> Iterator[dict[str, str]]:
    """The table, row by row."""
    seen: dict[tuple[str, ...], Any] = {}
    for name in candidates():
        settings = settings_of(name)
        key = (name.partition(".")[0], *(settings[k] for k in settings if k not in ("name", "repository", "licence")))
        if key not in seen:
            try:
                seen[key] = config_if_equal(name)
            except VitralError as error:
                print(f"- {error}", file=log)
                seen[key] = None
        if seen[key] is not None:
            cost = model_cost(seen[key])
            more = {"params": str(cost.params), "macs": str(cost.macs), "top1": accuracies.get(name, "")}
            print(f"+ {name}", file=log, flush=True)
            yield settings | more


def read_accuracies(results: Path | None) -> dict[str, str]:
    """Top-1 accuracy by name: of timm's results at the size of the weights, or of the table as it is."""
    if results is None:
        return (
            {row["name"]: row["top1"] for row in csv.DictReader(TABLE.read_text().splitlines())}
            if TABLE.exists()
            else {}
        )
    found = {}
    for row in csv.DictReader(results.read_text().splitlines()):
        cfg = timm().get_pretrained_cfg(row["model"])
        if cfg is not None and row["img_size"] == str(cfg.input_size[-1]):
            found[row["model"]] = row["top1"]
    return found


def main() -> int:
    """Write the table, or compare it with what would be written; return 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--write", action="store_true")
    mode.add_argument("--check", action="store_true")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    if timm().__version__ != pretrained.TIMM_VERSION:
        print(f"timm is {timm().__version__}, the table is of {pretrained.TIMM_VERSION}; set TIMM_VERSION first.")
        return 1
    text = io.StringIO()
    writer = csv.DictWriter(text, pretrained.COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows(read_accuracies(options.results), sys.stderr))
    if options.write:
        TABLE.write_text(text.getvalue())
    same = TABLE.exists() and TABLE.read_text() == text.getvalue()
    print(f"{TABLE.name}: {'up to date' if same else 'out of date; --write updates it'}")
    return not same


if __name__ == "__main__":
    sys.exit(main())
