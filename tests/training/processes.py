"""A training run of 50 steps whose losses are printed as JSON; started once, or once for each of several processes.

python tests/training/processes.py float64|float32|dino FOLDER STOP LOG_STEPS

The run stops after step STOP with a checkpoint in FOLDER, and continues from one that is there.
"""

import contextlib
import json
import sys
from itertools import count
from pathlib import Path

import torch

from vitral.config import Augmentation, DINOOptions, PretrainConfig, TrainConfig
from vitral.data.crops import Crops
from vitral.data.inputs import ImageInputs
from vitral.data.loader import TrainLoader
from vitral.data.sources.digits import load_digits
from vitral.models.zoo import create_model
from vitral.tasks.classify import Classify
from vitral.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from vitral.training.distributed import processes
from vitral.training.loop import Hooks, fit
from vitral.training.pretrain import make_method


def classify(dtype):
    """A model, what it learns, and how it is fed."""
    model = create_model("vit_nano_conv_patch2_8", seed=0, drop_path_rate=0.1, patch_drop_rate=0.2).to(dtype)
    model.register_forward_pre_hook(lambda module, args: (args[0].to(dtype),))
    return model, Classify(load_digits().classes, 0.1), ImageInputs(model.preprocess)


def self_distil(who):
    """The same for DINO."""
    config = PretrainConfig(
        model="vit_nano_patch2_8", drop_path_rate=0.1,
        dino=DINOOptions(prototypes=64, hidden=32, bottleneck=16, local_crops=2, ibot=0.5, momentum=0.9),
    )  # fmt: skip
    method = make_method(config, 1, who)
    method.model.double().register_forward_pre_hook(
        lambda module, args: (Crops(args[0].large.double(), args[0].small.double()), *args[1:])
    )
    return method.model, method, method.inputs


def main() -> None:
    torch.set_num_threads(1)
    what, folder, (stop, log_steps) = sys.argv[1], Path(sys.argv[2]), map(int, sys.argv[3:])
    augment = Augmentation(
        shift=0.05, rotate=5, flip=0.1, mixup=0.2, cutmix=0.2, erasing=0.1, policy="rand", magnitude=0.1
    )
    config = TrainConfig(
        epochs=5, batch_size=136, optimizer="muon", lr=5e-3, warmup_epochs=0.5, augment=augment, log_steps=log_steps
    )
    data, cpu = load_digits(), torch.device("cpu")
    lines: list[dict[str, float]] = []
    with processes(cpu) as who:
        made = self_distil(who) if what == "dino" else classify(getattr(torch, what))
        model, objective, inputs = made
        loader = TrainLoader(data, inputs, augment, 136, 0, False, 0, who.rank, who.world)

        def save(checkpoint: Checkpoint) -> None:
            if who.first:
                save_checkpoint(folder, checkpoint)

        newest, _ = load_newest(folder)
        steps = count(newest.step + 1 if newest else 1)
        hooks = Hooks(lines.append, None, save, lambda: None, lambda text: None, stop=lambda: next(steps) == stop)
        with contextlib.suppress(KeyboardInterrupt):
            fit(model, objective, loader, config, hooks, who, cpu, None, newest)
        if who.first:
            told = ("loss", "teacher_entropy" if what == "dino" else "accuracy", "grad_norm")
            print(json.dumps([[line[name] for name in told] for line in lines]))


if __name__ == "__main__":
    main()
