"""The angle of turned digits: the recipe's ViT beside a small CNN of the same cost, both for the same minutes.

    python benchmarks/rotated.py [--minutes 3] [--threads 2]

The CNN goes through the same loop, with the same data, augmentation, loss and optimiser for its kernels. Its width is
chosen so that an image costs it as many multiply-adds as the ViT. Writes benchmarks/results/rotated.json.
"""

import argparse
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measure import write_json
from vitral.api import resolve_config
from vitral.config import Preprocess, TrainConfig, ViTConfig
from vitral.data.inputs import ImageInputs
from vitral.data.loader import TrainLoader
from vitral.data.noise import Noise
from vitral.data.sources.base import Data
from vitral.data.sources.digits import digit_pixels, load_digits
from vitral.data.sources.scenes_digits import make_rotated_digits, soften, turn_digits
from vitral.data.transforms import normalize
from vitral.models.cost import model_cost
from vitral.models.vit import VisionTransformer
from vitral.models.zoo import model_spec
from vitral.tasks.base import Task
from vitral.tasks.open import make_task
from vitral.training.distributed import Processes
from vitral.training.loop import Hooks, fit
from vitral.training.session import find


class SmallCNN(nn.Module):
    """Pairs of 3x3 convolutions, each pair at half the size and twice the width of the one before, then the mean."""

    def __init__(self, width: int, stages: int = 3) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 1
        for i in range(stages):
            for stride in (2 if i else 1, 1):
                out = width << i
                layers += [nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
                channels = out
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, H, W) -> (B, 1)."""
        return self.head(self.features(x).mean((2, 3)))


def macs(cnn: nn.Module, side: int) -> int:
    """Multiply-adds of the convolutions for an image."""
    total = 0

    def count(module: nn.Conv2d, inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += output[0].numel() * module.weight[0].numel()

    hooks = [m.register_forward_hook(count) for m in cnn.modules() if isinstance(m, nn.Conv2d)]
    cnn.eval()(torch.zeros(1, 1, side, side))
    for hook in hooks:
        hook.remove()
    return total


def train(model: Any, task: Task, data: Data, p: Preprocess, config: TrainConfig) -> dict[str, Any]:
    """Train by vitral's loop and give the metrics on the test part."""
    targets = task.targets(data)
    loader = TrainLoader(data, ImageInputs(p), config.augment, config.batch_size, 0, False, 0, 0, 1, targets)
    quiet = Hooks(lambda line: None, None, lambda state: None, lambda: None, print, lambda: False)
    state = fit(model, task, loader, config, quiet, Processes(0, 1), torch.device("cpu"), None)
    metrics = task.metrics(find(model, task, data, data.splits["test"], ImageInputs(p), 256))
    return {"steps": state.step, "seconds": state.seconds, "mae": metrics["mae"], "mae_95": metrics["mae_95"]}


@torch.no_grad()
def control(model: nn.Module, task: Any, p: Preprocess) -> list[float]:
    """How far the answer follows the lattice, and how far the digit: 1 and 1 if no lattice or frame gives it away.

    Test digits are turned by a base angle on their own 8 x 8 lattice, and then by another with it; the answers are
    written as a sum of both angles by least squares. Who reads the lattice or the frame does not see the first.
    """
    digits = load_digits()
    small = digit_pixels(digits)[digits.splits["test"]]
    noise = Noise(1, torch.arange(len(small)))
    with_lattice, base = noise.between("with", -30, 30), noise.between("base", -25, 25)
    cos, sin = base.deg2rad().cos(), base.deg2rad().sin()
    turn = torch.stack([cos, -sin, 0 * cos, sin, cos, 0 * cos], 1).view(-1, 2, 3).float()
    grid = F.affine_grid(turn, list(small.shape), align_corners=False)
    turned = F.grid_sample(small.float(), grid, mode="bicubic", align_corners=False).round().clamp(0, 255)
    images = turn_digits(soften(turned.to(torch.uint8)), with_lattice, torch.zeros(len(small), 2).double())
    told = task.split(model.eval()(normalize(images, p)))[0][:, 0].double()
    angles = torch.stack([with_lattice, base], 1)
    return torch.linalg.lstsq(angles, (told - told.mean())[:, None]).solution.flatten().tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    data = make_rotated_digits()
    config = replace(resolve_config(data, {}), max_minutes=options.minutes, epochs=1000)
    task = make_task(None, data, config)
    spec = model_spec(config.model, in_chans=1, num_classes=1)
    assert isinstance(spec.config, ViTConfig)
    cost = model_cost(spec.config).macs
    width = min(range(4, 128, 2), key=lambda w: abs(macs(SmallCNN(w), 32) - cost))
    found: dict[str, Any] = {}
    for name in ("vit", "cnn"):
        torch.manual_seed(0)
        model = VisionTransformer(spec.config) if name == "vit" else SmallCNN(width)
        each = cost if name == "vit" else macs(model, 32)
        found[name] = train(model, task, data, spec.preprocess, config) | {"macs": each}
        found[name]["follows"] = control(model, task, spec.preprocess)
        print(f"{name}: MAE {found[name]['mae']:.2f} degrees, {found[name]['steps']:,} steps, {each / 1e6:.1f} M macs")
        lattice, digit = found[name]["follows"]
        print(f"    follows a turn with its lattice by {lattice:.2f}, one of the digit alone by {digit:.2f}")
    print(f"wrote {write_json('rotated', {'threads': options.threads, 'minutes': options.minutes, **found})}")


if __name__ == "__main__":
    main()
