import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import distributed as dist

from vitral.config import TrainConfig
from vitral.data.sources.digits import load_digits
from vitral.errors import CheckpointError, TrainingError
from vitral.training.distributed import Processes, processes
from vitral.training.session import open_run
from vitral.weights.lock import locked

SCRIPT = Path(__file__).with_name("processes.py")


def losses(dtype, world, folder, stop=50, log_steps=1):
    """Loss, accuracy and gradient norm of the steps to `stop`, by one process or several on the loopback interface."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # here, as in torchrun: no port is lost
    started = []
    for rank in range(world):
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        if world > 1:
            env |= {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
            }
            env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
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


# ---- restarts by torchrun ----


def torchrun(out, kill_rank):
    """Train with two ranks, of which one is killed at step 7; return what was printed on stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", str(SCRIPT.with_name("killed_once.py")), "train", "digits", "--out", str(out)]
    command += ["--max-steps", "12", "--save-steps", "3", "--log-steps", "1", "--resume"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"KILL_RANK": kill_rank, "KILL_STEP": "7"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "run"
    assert "was lost" not in torchrun(out, kill_rank="none")
    return load_file(out / "model.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_restart_by_torchrun_continues_the_run(uninterrupted, rank, tmp_path):
    out = tmp_path / "run"
    errors = torchrun(out, kill_rank=rank)
    assert errors.count("resuming from step 6") == 1
    assert errors.count("the connection to another of the 2 processes was lost") == 1  # a second restart is not needed
    assert "Traceback" not in errors
    assert "an error of ours" not in errors
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == uninterrupted.keys()
    assert all(torch.equal(weights[name], uninterrupted[name]) for name in weights)


LOST = [
    RuntimeError("[/src/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"),
    dist.DistNetworkError("Connection closed by peer [127.0.0.1]:4242. More follows.\nAnd more"),
]


@pytest.mark.parametrize("error", LOST, ids=["gloo", "store"])
def test_a_lost_connection_is_one_sentence(error, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("vitral.training.distributed._fresh_store", lambda rank, world: None)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    words = r"another of the 3 processes was lost \(Connection closed by peer \[127.0.0.1\]:4242\); start all of them"
    with pytest.raises(TrainingError, match=words), processes(torch.device("cpu")):
        raise error
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), processes(torch.device("cpu")):
        raise RuntimeError("shapes differ")


class Ranks(Processes):
    """One of two ranks, of which the other raises a flag or does not."""

    other = False

    def any(self, flag):
        return flag or self.other


def test_only_rank_0_takes_the_lock_and_all_ranks_stop_if_it_is_refused(tmp_path):
    data, config = load_digits(), TrainConfig()
    with locked(tmp_path), open_run(tmp_path, config, "classify", data, False, Ranks(1, 2)) as opened:
        assert opened == (False, None, [])
    refused = Ranks(1, 2)
    object.__setattr__(refused, "other", True)
    with (
        pytest.raises(CheckpointError, match="rank 0 could not open"),
        open_run(tmp_path, config, "classify", data, False, refused),
    ):
        pass
    with (
        locked(tmp_path),
        pytest.raises(CheckpointError, match="another process is writing"),
        open_run(tmp_path, config, "classify", data, False, Ranks(0, 2)),
    ):
        pass
