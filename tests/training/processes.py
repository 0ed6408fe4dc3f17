"""A training run of 50 steps whose losses are printed as JSON; started once, or once for each of several processes.

python tests/training/processes.py float64|float32 FOLDER STOP

The run stops after step STOP with a checkpoint in FOLDER, and goes on from one that is there.
"""

import contextlib
import json
import sys
from pathlib import Path

import torch

from vitral.config import Augmentation, TrainConfig
from vitral.data.inputs import ImageInputs
from vitral.data.loader import TrainLoader
from vitral.data.sources.digits import load_digits
from vitral.models.zoo import create_model
from vitral.tasks.classify import Classify
from vitral.training.checkpoint import load_newest, save_checkpoint
from vitral.training.distributed import processes
from vitral.training.loop import Hooks, fit


def main() -> None:
    torch.set_num_threads(1)
    dtype, folder, stop = getattr(torch, sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    augment = Augmentation(
        shift=0.05, rotate=5, flip=0.1, mixup=0.2, cutmix=0.2, erasing=0.1, policy="rand", magnitude=0.1
    )
    config = TrainConfig(
        epochs=5, batch_size=136, optimizer="muon", lr=5e-3, warmup_epochs=0.5, augment=augment, log_steps=1
    )
    data = load_digits()
    model = create_model("vit_nano_conv_patch2_8", seed=0, drop_path_rate=0.1).to(dtype)
    model.register_forward_pre_hook(lambda module, args: (args[0].to(dtype),))
    lines: list[dict[str, float]] = []
    with processes(torch.device("cpu")) as who:
        loader = TrainLoader(data, ImageInputs(model.preprocess), augment, 136, 0, False, 0, who.rank, who.world)
        save = (lambda checkpoint: save_checkpoint(folder, checkpoint)) if who.first else (lambda checkpoint: None)
        hooks = Hooks(lines.append, None, save, lambda: None, lambda text: None, stop=lambda: lines[-1]["step"] == stop)
        task, cpu, found = Classify(data.classes, 0.1), torch.device("cpu"), load_newest(folder)[0]
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, task, loader, config, hooks, who, cpu, None, found)
        if who.first:
            print(json.dumps([[line["loss"], line["accuracy"], line["grad_norm"]] for line in lines]))


if __name__ == "__main__":
    main()
