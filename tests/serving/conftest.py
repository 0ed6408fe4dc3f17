import pytest
from small_server import client, train_runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    return train_runs(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def served(runs):
    with client(runs) as made:
        yield made
