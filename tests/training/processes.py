"""A training run of 50 steps whose losses are printed as JSON; started once, or once for each of several processes.

python tests/training/processes.py float64|float32
"""

import json
import sys

import torch

from vitral.config import Augmentation, TrainConfig
from vitral.data.loader import TrainLoader
from vitral.data.sources.digits import load_digits
from vitral.models.zoo import create_model
from vitral.tasks.classify import Classify
from vitral.training.distributed import processes
from vitral.training.loop import Hooks, fit


def main() -> None:
    torch.set_num_threads(1)
    dtype = getattr(torch, sys.argv[1])
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
        loader = TrainLoader(data, model.preprocess, augment, 136, 0, False, 0, who.rank, who.world)
        hooks = Hooks(lines.append, None, lambda c: None, lambda: None, lambda text: None, lambda: False)
        fit(
            model,
            Classify(data.classes, 0.1),
            loader,
            model.preprocess,
            config,
            hooks,
            who,
            torch.device("cpu"),
            None,
        )
        if who.first:
            print(json.dumps([[line["loss"], line["accuracy"], line["grad_norm"]] for line in lines]))


if __name__ == "__main__":
    main()
