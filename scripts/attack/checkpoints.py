"""Damaged weights of every format through everything that opens them."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attack.damage import mutate, mutate_json
from attack.fuzz import Fuzz, refusals
from helpers import images, redraw, tampered
from vitral import create_model, export, load_model, save_model
from vitral.inference.predictor import Predictor
from vitral.weights.inspect import inspect_weights

OPTIONS = {"embed_dim": 64, "depth": 1, "num_heads": 1, "mlp_ratio": 2.0, "img_size": 32, "num_classes": 3}
CANARY = "canary"
"""A folder that appears in the current directory if something in a file is executed."""


class Payload:
    """Something that makes a folder when it is unpickled."""

    def __init__(self, path: str | Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return (os.mkdir, (str(self.path),))


def edit_tensors(tensors: dict[str, Tensor], chance: Random) -> dict[str, Tensor]:
    """Rename, remove, reshape, convert or overwrite tensors."""
    tensors = dict(tensors)
    for _ in range(chance.randint(1, 3)):
        name = chance.choice(list(tensors))
        value = tensors[name]
        kind = chance.randrange(6)
        if kind == 0:
            tensors[name + chance.choice([".x", "_", "0"])] = tensors.pop(name)
        elif kind == 1:
            del tensors[name]
        elif kind == 2:
            tensors[name] = torch.zeros([max(1, side + chance.choice([-1, 1, 7])) for side in value.shape])
        elif kind == 3:
            tensors[name] = value.to(chance.choice([torch.int64, torch.float16, torch.bool, torch.float64]))
        elif kind == 4:
            tensors[name] = torch.full_like(value, float("nan")) if value.is_floating_point() else value
        else:
            tensors[name] = value.reshape(-1) if value.ndim > 1 else value[None]
    return {name: value.contiguous() for name, value in tensors.items()}


def write_sources(folder: Path) -> None:
    """Write one small model in every format: a folder for each, which holds what a user would have."""
    model: Any = redraw(create_model("vit_tiny_patch16_224", **OPTIONS), seed=1)
    model.labels = ["ant", "bee", "cow"]
    state = {name: value.contiguous() for name, value in model.state_dict().items()}
    places = {name: folder / name for name in (*FILES, *FOLDERS)}
    for place in places.values():
        place.mkdir()
    save_file(state, places["safetensors"] / "x.safetensors")
    save_file(state, places["tensors"] / "x.safetensors")
    torch.save({"model": state}, places["zip"] / "x.pth")
    torch.save({"model": state}, places["old"] / "x.pt", _use_new_zipfile_serialization=False)
    torch.save({"model": state, "more": Payload(CANARY)}, places["payload"] / "x.pth")
    save_model(model, places["npz"] / "x.npz", "google")
    export(model, places["onnx"] / "x.onnx")
    export(model, places["pt2"] / "x.pt2")
    save_model(model, places["run"], "vitral")
    save_model(model, places["hf"], "huggingface")
    shutil.copy(places["hf"] / "config.json", places["bin"])
    foreign = load_file(places["hf"] / "model.safetensors")
    torch.save(foreign, places["bin"] / "pytorch_model.bin")
    shutil.copy(places["hf"] / "config.json", places["shards"])
    names = sorted(foreign)
    shards = {"one.safetensors": names[: len(names) // 2], "two.safetensors": names[len(names) // 2 :]}
    for shard, members in shards.items():
        save_file({name: foreign[name] for name in members}, places["shards"] / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (places["shards"] / "model.safetensors.index.json").write_text(json.dumps(index))


FILES = ("safetensors", "tensors", "zip", "old", "payload", "npz", "onnx", "pt2")
"""Formats of one file."""
FOLDERS = ("hf", "bin", "shards", "run")
"""Formats of several files, which are opened by their folder."""
ARCHIVES = ("zip", "payload", "npz", "pt2")
"""Zip files: half of the damage is done to what is inside, so that the checksums are right."""
REFUSED = ("payload", "pt2")
"""What may be refused even if it is intact."""


class Checkpoints(Fuzz):
    """1,000 damaged files of weights."""

    name = "checkpoints"
    size = 1_000
    failure = "any error but a VitralError of one line, a crash, 60 s for a file, 1 GiB of memory, code that was run"
    seconds = 60.0
    memory = 2**30

    def prepare(self, folder: Path) -> None:
        """Write the files."""
        write_sources(folder)

    def begin(self, folder: Path) -> None:
        """Run a model from each of them once: a campaign on files that nothing can open would prove nothing."""
        torch.set_num_threads(1)
        self.folder = folder
        self.image = np.random.default_rng(0).integers(0, 256, (40, 52, 3), np.uint8)
        for name in (*FILES, *FOLDERS):
            if name not in REFUSED:
                Predictor(_source(folder / name)).predict(self.image)

    def damage(self, place: Path, number: int, chance: Random) -> None:
        """Copy a folder and damage one of its files."""
        kind = (*FILES, *FOLDERS)[number % (len(FILES) + len(FOLDERS))]
        for file in sorted((self.folder / kind).iterdir()):
            shutil.copy(file, place)
        path = chance.choice(sorted(place.iterdir()))
        if kind == "tensors":
            save_file(edit_tensors(load_file(self.folder / kind / path.name), chance), path)
        elif path.suffix == ".json":
            path.write_bytes(mutate_json(path.read_bytes(), chance))
        elif kind in ARCHIVES and chance.random() < 0.5:
            _damage_inside(self.folder / kind / path.name, path, chance)
        else:
            path.write_bytes(mutate(path.read_bytes(), chance))

    def attack(self, place: Path, number: int) -> None:
        """Load, inspect and predict."""
        source = _source(place)
        with refusals():
            model = load_model(source, quiet=True)
            bad = [name for name, value in model.state_dict().items() if not value.isfinite().all()]
            assert not bad, f"{bad[0]} has values that are not finite"
            if hasattr(model.config, "image"):
                model(images(1, model.config.in_chans, *model.config.image))
        with refusals():
            inspect_weights(str(source), None, None)
        with refusals():
            Predictor(source).predict(self.image)


def _source(place: Path) -> Path:
    """What a user would open: the file of weights, or the folder of a format of several files."""
    return next((file for file in sorted(place.glob("x.*")) if file.suffix != ".json"), place)


def _damage_inside(source: Path, target: Path, chance: Random) -> None:
    """Damage one member of an archive."""
    with zipfile.ZipFile(source) as archive:
        names = [info.filename for info in archive.infolist() if info.file_size]
    small = [name for name in names if name.endswith((".pkl", ".json"))]  # what a reader interprets
    victim = chance.choice(small if small and chance.random() < 0.8 else names)
    change = mutate_json if victim.endswith(".json") else mutate
    tampered(source, target, lambda name, data: change(data, chance) if name == victim else data)
