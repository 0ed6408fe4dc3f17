"""Tensors to Pillow and back, for tests that compare with it."""

import numpy as np
import torch
from PIL import Image


def to_pil(x):
    return Image.fromarray((x * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


def from_pil(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
