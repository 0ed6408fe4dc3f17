"""Set-up of the test process."""

import os

import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:  # two workers share two cores
    torch.set_num_threads(1)


@pytest.fixture
def threads():
    """A setter of torch's threads, undone afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
