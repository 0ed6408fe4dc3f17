"""The embedded data set: 1,797 handwritten digits of 8 x 8 grey pixels.

E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998,
doi:10.24432/C50P49, CC BY 4.0. Made by scripts/make_digits.py.
"""

from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

from vitral.data.sources.base import Data, ImageArray


def load_digits() -> Data:
    """Return the digits with a fixed stratified split: 1,437 to train, 360 to test."""
    with (
        files("vitral.data.sources").joinpath("digits.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        pixels, labels = arrays["pixels"].T, torch.from_numpy(arrays["labels"]).long()
        is_test = torch.zeros(len(labels), dtype=torch.bool)
        is_test[torch.from_numpy(arrays["test"].astype(np.int64))] = True
    scaled = torch.from_numpy(np.round(pixels * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    return Data(
        name="digits",
        inputs=ImageArray(scaled),
        targets=labels,
        classes=[str(i) for i in range(10)],
        splits={"train": (~is_test).nonzero()[:, 0], "test": is_test.nonzero()[:, 0]},
        mode="grey",
        recipe="digits",
        licence="CC BY 4.0 (UCI, Alpaydin and Kaynak, 1998)",
    )


def digit_pixels(digits: Data) -> Tensor:
    """All of them at once, uint8 (N, 1, 8, 8)."""
    assert isinstance(digits.inputs, ImageArray)
    return digits.inputs.pixels
