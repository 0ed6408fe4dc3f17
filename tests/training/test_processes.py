import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).with_name("processes.py")


def losses(dtype, world, folder, stop=50, log_steps=1):
    """Loss, accuracy and gradient norm of the steps to `stop`, by one process or several on the loopback interface."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    started = []
    for rank in range(world):
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if world > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            env |= {"GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, str(SCRIPT), dtype, str(folder), str(stop), str(log_steps)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env))
    outputs = [process.communicate(timeout=300) for process in started]
    assert all(process.returncode == 0 for process in started), outputs[0][1]
    return np.array(json.loads(outputs[0][0].splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-8), ("float32", 1e-4)])
def test_two_processes_give_the_loss_curve_of_one(dtype, tolerance, tmp_path):
    one, two = losses(dtype, 1, tmp_path / "one"), losses(dtype, 2, tmp_path / "two")
    assert one.shape == (50, 3)
    assert one[-5:, 0].mean() < one[0, 0] - 0.3
    assert np.abs(one[:, :2] - two[:, :2]).max() <= tolerance


@pytest.mark.slow
def test_two_processes_distil_as_one(tmp_path):
    """Teacher, centres and hidden patches included."""
    one, two = losses("dino", 1, tmp_path / "one", stop=20), losses("dino", 2, tmp_path / "two", stop=20)
    assert one.shape == (20, 3)
    assert np.ptp(one[:, 0]) > 0.05
    assert np.abs(one[:, 0] - two[:, 0]).max() <= 1e-8
    assert np.abs(one[:, 1] - two[:, 1]).max() <= 1e-5  # the entropy is told in fp32


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "log_steps"), [(1, 2, 1), (1, 2, 3), (2, 1, 3), (2, 2, 3)])
def test_a_resumed_run_may_have_another_number_of_processes(before, after, log_steps, tmp_path):
    """Step 17 is between two lines of the log, if it has one for every third step."""
    whole = losses("float64", after, tmp_path / "whole", log_steps=log_steps)
    first = losses("float64", before, tmp_path / "parts", stop=17, log_steps=log_steps)
    second = losses("float64", after, tmp_path / "parts", log_steps=log_steps)
    parts = np.concatenate([first, second])
    assert np.abs(parts[:, :2] - whole[:, :2]).max() <= 1e-8
    assert before != after or np.array_equal(parts, whole)
