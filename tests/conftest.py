"""Set-up of the test process."""

import os

import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # two workers share two cores
    torch.set_num_threads(1)
