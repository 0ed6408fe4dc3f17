"""Work ahead of time: the same as `map`, in order, bounded, and nothing left behind."""

import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from vitral.data.ahead import ahead
from vitral.data.images import _QUIET


@pytest.mark.parametrize("workers", [0, 1, 3, 50])
@pytest.mark.parametrize("count", [0, 1, 2, 23])
def test_it_is_map(workers, count):
    assert list(ahead(lambda x: x * x, range(count), workers, 4)) == [x * x for x in range(count)]


def test_an_error_comes_in_its_place():
    def half(x):
        if x == 5:
            raise ValueError("five")
        return x

    seen, before = [], threading.active_count()
    with pytest.raises(ValueError, match="five"):
        seen.extend(ahead(half, range(9), 2, 4))
    assert seen == [0, 1, 2, 3, 4]
    assert threading.active_count() == before


@pytest.mark.parametrize("depth", [1, 3, 7])
def test_no_more_than_depth_are_begun_ahead(depth):
    taken = []

    def endless():
        for i in range(10**9):
            taken.append(i)
            yield i

    source = ahead(lambda x: x, endless(), 2, depth)
    for read in range(1, 6):
        next(source)
        assert len(taken) <= read + depth
    source.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("vitral-ahead")]


def test_threads_work_at_the_same_time():
    """Each waits for the other: one thread alone could not go on."""
    together = threading.Barrier(2)
    assert sorted(ahead(lambda x: together.wait(timeout=30), range(2), 2, 2)) == [0, 1]


def test_torch_uses_one_core_in_each_thread_and_all_elsewhere():
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert set(ahead(lambda x: torch.get_num_threads(), range(8), 2, 4)) == {1}
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as other:
            assert other.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_quiet_in_several_threads_puts_the_filters_back():
    before = list(warnings.filters)
    within = threading.Barrier(2)

    def hush():
        with _QUIET:
            within.wait(timeout=30)
            warnings.warn("not heard", stacklevel=1)

    threads = [threading.Thread(target=hush) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before
    with pytest.warns(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)
