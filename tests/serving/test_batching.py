"""Laws of batching, with threads that wait for the test rather than for time."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vitral.config import Serving
from vitral.serving.batching import Batcher, BusyError

LONG = 60_000.0


def run(scenario):
    """Run a coroutine function that is bounded in time whatever happens."""
    with ThreadPoolExecutor(1) as apart:  # the browser tests leave a loop running in this thread
        return apart.submit(lambda: asyncio.run(asyncio.wait_for(scenario(), 60))).result()


class Gate:
    """A run that tells what it was given, and waits until it is let through."""

    def __init__(self):
        self.open, self.batches = threading.Event(), []
        self.began = threading.Semaphore(0)

    def __call__(self, key, items):
        self.batches.append((key, list(items)))
        self.began.release()
        assert self.open.wait(60)
        return [ValueError(item) if item == "bad" else (key, item) for item in items]

    async def wait(self):
        await asyncio.to_thread(self.began.acquire, True, 60)


async def ask(batcher, item, key="k"):
    with batcher.place():
        return await batcher.send(key, item)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_one_alone_never_waits():
    async def scenario():
        gate = Gate()
        gate.open.set()
        batcher = Batcher(gate, Serving(wait_ms=LONG))
        batcher.start()
        for i in range(3):
            assert (await ask(batcher, i)).result == ("k", i)
        await batcher.close()
        assert gate.batches == [("k", [0]), ("k", [1]), ("k", [2])]

    run(scenario)


def test_what_comes_meanwhile_travels_together_and_each_gets_its_own_result():
    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=LONG, max_batch=4))
        batcher.start()
        first = asyncio.create_task(ask(batcher, 0))
        await gate.wait()
        others = [asyncio.create_task(ask(batcher, i)) for i in range(1, 8)]
        await settle()
        gate.open.set()
        done = await asyncio.gather(first, *others[:4])
        assert [each.result for each in done] == [("k", i) for i in range(5)]
        assert [each.batch for each in done] == [1, 4, 4, 4, 4]
        assert gate.batches[:2] == [("k", [0]), ("k", [1, 2, 3, 4])]
        await batcher.close()

    run(scenario)


def test_half_of_those_under_way_leave_and_the_other_half_is_waited_for():
    """After four with three others under way, the next batch waits for four: here longer than the test may take."""

    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=LONG, max_batch=8))
        batcher.start()
        first = asyncio.create_task(ask(batcher, 0))
        await gate.wait()
        others = [asyncio.create_task(ask(batcher, i)) for i in range(1, 8)]
        await settle()
        gate.open.set()
        await asyncio.gather(first, *others[:4])  # eight were under way, then seven
        await settle()
        assert gate.batches[1:] == [("k", [1, 2, 3, 4])]
        eighth = asyncio.create_task(ask(batcher, 8))
        await asyncio.gather(*others, eighth)
        assert gate.batches[2:] == [("k", [5, 6, 7, 8])]
        await batcher.close()

    run(scenario)


def test_the_first_of_a_batch_does_not_wait_for_ever():
    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=1))
        batcher.start()
        first = asyncio.create_task(ask(batcher, 0))
        await gate.wait()
        others = [asyncio.create_task(ask(batcher, i)) for i in (1, 2, 3)]
        await settle()
        gate.open.set()
        await asyncio.gather(first, *others)  # three were under way at last, and nobody joins the third
        await batcher.close()
        assert [len(items) for _, items in gate.batches] == [1, 2, 1]

    run(scenario)


def test_only_equal_keys_share_a_batch():
    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=0))
        batcher.start()
        first = asyncio.create_task(ask(batcher, 0))
        await gate.wait()
        tasks = [asyncio.create_task(ask(batcher, i, key)) for i, key in enumerate("abab")]
        await settle()
        gate.open.set()
        done = await asyncio.gather(first, *tasks)
        assert [each.result for each in done[1:]] == [("a", 0), ("b", 1), ("a", 2), ("b", 3)]
        assert gate.batches[1:] == [("a", [0, 2]), ("b", [1, 3])]
        await batcher.close()

    run(scenario)


@pytest.mark.parametrize("raises", [True, False])
def test_a_bad_apple_fails_alone(raises):
    async def scenario():
        begun, go = threading.Semaphore(0), threading.Event()

        def work(key, items):
            begun.release()
            assert go.wait(60)
            if raises and "bad" in items:
                raise ValueError("bad")
            return [ValueError("bad") if item == "bad" else item for item in items]

        batcher = Batcher(work, Serving(wait_ms=0))
        batcher.start()
        first = asyncio.create_task(ask(batcher, 0))
        await asyncio.to_thread(begun.acquire, True, 60)
        tasks = [asyncio.create_task(ask(batcher, item)) for item in (1, "bad", 2)]
        await settle()
        go.set()
        good = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert [good[i].result for i in (0, 1, 3)] == [0, 1, 2]
        assert isinstance(good[2], ValueError)
        await batcher.close()

    run(scenario)


def test_beyond_the_queue_one_is_refused_at_once_and_taken_again_later():
    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(max_queue=3, wait_ms=0))
        batcher.start()
        tasks = [asyncio.create_task(ask(batcher, i)) for i in range(3)]
        await gate.wait()
        assert batcher.full
        assert batcher.taken == 3
        with pytest.raises(BusyError):
            await ask(batcher, 3)
        gate.open.set()
        await asyncio.gather(*tasks)
        assert (await ask(batcher, 4)).result == ("k", 4)
        await batcher.close()

    run(scenario)


def test_kinds_take_turns_and_those_that_gain_nothing_by_a_batch_run_alone():
    """Three slow ones (numbers) were there first, and a fourth kind (None) is not forgotten for the other two."""

    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=0), alone=lambda key: key == 7)
        batcher.start()
        first = asyncio.create_task(ask(batcher, "first", 7))
        await gate.wait()
        tasks = [asyncio.create_task(ask(batcher, i, key)) for i, key in enumerate([7, 7, 7, "a", "a", None, "b", "b"])]
        await settle()
        gate.open.set()
        done = await asyncio.gather(first, *tasks)
        assert [each.batch for each in done] == [1, 1, 1, 1, 2, 2, 1, 2, 2]
        assert gate.batches[1:] == [("a", [3, 4]), (7, [0]), (None, [5]), (7, [1]), ("b", [6, 7]), (7, [2])]
        await batcher.close()

    run(scenario)


@pytest.mark.parametrize("thrown", [StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_whatever_is_thrown_the_next_is_answered(thrown):
    async def scenario():
        def work(key, items):
            if items == ["bad"]:
                raise thrown
            return items

        batcher = Batcher(work, Serving(wait_ms=0))
        batcher.start()
        with pytest.raises(RuntimeError, match=type(thrown).__name__):
            await ask(batcher, "bad")
        assert (await ask(batcher, "good")).result == "good"
        assert batcher.alive
        await batcher.close()

    run(scenario)


def test_a_question_that_is_given_up_is_not_run_and_not_kept():
    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=0))
        batcher.start()
        first = asyncio.create_task(ask(batcher, 0))
        await gate.wait()
        given_up = asyncio.create_task(ask(batcher, "late"))
        await settle()
        assert [job.item for job in batcher._waiting] == ["late"]
        given_up.cancel()
        await settle()
        assert (len(batcher._waiting), batcher.taken) == (0, 1)
        second = asyncio.create_task(ask(batcher, 1))
        await settle()
        gate.open.set()
        await asyncio.gather(first, second)
        assert gate.batches == [("k", [0]), ("k", [1])]
        assert batcher.taken == 0
        await batcher.close()

    run(scenario)


def test_closing_finishes_what_was_taken_and_takes_no_more():
    async def scenario():
        gate = Gate()
        batcher = Batcher(gate, Serving(wait_ms=LONG))
        batcher.start()
        tasks = [asyncio.create_task(ask(batcher, i)) for i in range(5)]
        await gate.wait()
        closing = asyncio.create_task(batcher.close())
        await settle()
        assert not batcher.alive
        with pytest.raises(BusyError):
            await ask(batcher, 5)
        assert not closing.done()
        gate.open.set()
        done = await asyncio.gather(*tasks)
        await closing
        assert [each.result for each in done] == [("k", i) for i in range(5)]

    run(scenario)
