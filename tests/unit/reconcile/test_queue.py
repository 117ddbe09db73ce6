"""The queue: one worker a key, many requests are one, and failures wait longer each time."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.model.refs import Key
from kvstrata.reconcile.queue import BASE_BACKOFF_S, MAX_BACKOFF_S, WorkQueue
from tests.support.worlds import finish

A, B = Key("CachedModel", "ns", "a"), Key("CachedModel", "ns", "b")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queue(clock: Clock) -> WorkQueue:
    return WorkQueue(clock)


def test_many_requests_are_one(queue: WorkQueue) -> None:
    for _ in range(5):
        queue.add(A)
    assert len(queue) == 1
    assert finish(queue.take()) == A
    queue.done(A)
    assert queue.idle


def test_a_key_that_is_worked_on_runs_again_afterwards_and_not_beside(queue: WorkQueue) -> None:
    queue.add(A)
    finish(queue.take())
    queue.add(A)
    queue.add(A)
    assert len(queue) == 0
    queue.done(A)
    assert finish(queue.take()) == A
    queue.done(A)
    assert queue.idle


def test_keys_are_taken_in_the_order_in_which_they_are_due(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A, 5)
    queue.add(B, 1)
    clock.now = 6
    assert [finish(queue.take()), finish(queue.take())] == [B, A]


def test_of_two_times_the_earlier_counts(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A, 5)
    queue.add(A, 1)
    queue.add(A, 9)
    clock.now = 1
    assert finish(queue.take()) == A
    queue.done(A)
    clock.now = 100
    assert len(queue) == 0


def test_failures_wait_twice_as_long_each_time_up_to_a_minute(queue: WorkQueue, clock: Clock) -> None:
    waited = []
    for _ in range(14):
        queue.add(A)
        clock.now += MAX_BACKOFF_S
        finish(queue.take())
        waited.append(queue.failed(A))
    assert waited[0] == 2 * BASE_BACKOFF_S
    assert waited == sorted(waited)
    assert waited[-1] == MAX_BACKOFF_S
    clock.now += MAX_BACKOFF_S
    finish(queue.take())
    queue.done(A)
    queue.add(A)
    finish(queue.take())
    assert queue.failed(A) == waited[0]


def test_a_server_that_asks_for_patience_gets_it(queue: WorkQueue) -> None:
    queue.add(A)
    finish(queue.take())
    assert queue.failed(A, retry_after_s=7.0) == 7.0


def test_an_event_cuts_a_backoff_short(queue: WorkQueue) -> None:
    queue.add(A)
    finish(queue.take())
    queue.failed(A)
    assert len(queue) == 0
    queue.add(A)
    assert len(queue) == 1


def test_a_key_that_is_held_off_does_not_start_earlier(queue: WorkQueue, clock: Clock) -> None:
    queue.add(A)
    finish(queue.take())
    queue.hold_off(A, 0.1)
    queue.add(A)
    queue.done(A)
    assert len(queue) == 0
    clock.now = 0.2
    assert finish(queue.take()) == A


async def test_a_waiting_worker_wakes_for_a_new_key() -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    worker = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add(A, 60)
    await asyncio.sleep(0)
    queue.add(B)
    assert await asyncio.wait_for(worker, 30) == B


def test_a_key_stays_away_as_long_as_the_server_asked_whatever_happens_meanwhile() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    finish(queue.take())
    queue.add(A)
    assert queue.failed(A, retry_after_s=30) == 30
    queue.add(A)
    clock.now += 29
    assert len(queue) == 0
    clock.now += 1
    assert len(queue) == 1


async def test_a_worker_that_is_cancelled_when_a_key_comes_ends() -> None:
    queue = WorkQueue(asyncio.get_running_loop().time)
    queue.add(B, 60)
    worker = asyncio.create_task(queue.take())
    await asyncio.sleep(0.01)
    queue.add(A, 30)
    await asyncio.sleep(0)
    worker.cancel()
    done, _ = await asyncio.wait({worker}, timeout=60)
    assert done
    assert worker.cancelled()


@given(st.lists(st.tuples(st.sampled_from(["add", "take", "done", "failed"]), st.sampled_from([A, B])), max_size=40))
def test_no_key_is_ever_worked_on_twice_at_once_and_none_is_lost(steps: list[tuple[str, Key]]) -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    active: set[Key] = set()
    wanted: set[Key] = set()
    for step, key in steps:
        clock.now += MAX_BACKOFF_S
        if step == "add":
            queue.add(key)
            wanted.add(key)
        elif step == "take" and len(queue):
            taken = finish(queue.take())
            assert taken not in active
            active.add(taken)
            wanted.discard(taken)
        elif step in ("done", "failed") and key in active:
            active.discard(key)
            if step == "failed":
                wanted.add(key)
            getattr(queue, step)(key)
    for key in list(active):
        queue.done(key)
    clock.now += MAX_BACKOFF_S
    left = set()
    while len(queue):
        taken = finish(queue.take())
        left.add(taken)
        queue.done(taken)
    assert left == wanted


async def test_one_key_wakes_one_worker() -> None:
    queue = WorkQueue(time.monotonic)
    workers = [asyncio.create_task(queue.take()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.add(A)
    assert sum(1 for waiter in queue._waiters if not waiter.done()) == 2
    done, _ = await asyncio.wait(workers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result() for task in done] == [A]
    for task in workers:
        task.cancel()


async def test_a_key_that_is_due_later_finds_a_worker_when_the_one_that_knew_of_it_took_another() -> None:
    queue = WorkQueue(time.monotonic)
    first = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add(A, 0.05)
    await asyncio.sleep(0.01)
    second = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add(B)
    assert {await asyncio.wait_for(first, 60), await asyncio.wait_for(second, 60)} == {A, B}


async def test_a_worker_that_is_cancelled_when_it_was_woken_leaves_the_key_to_another() -> None:
    queue = WorkQueue(time.monotonic)
    first, second = (asyncio.create_task(queue.take()) for _ in range(2))
    await asyncio.sleep(0)
    queue.add(A)
    first.cancel()
    assert await asyncio.wait_for(second, 60) == A


async def test_workers_that_wait_in_vain_leave_nothing_behind() -> None:
    queue = WorkQueue(time.monotonic)
    queue.add(A, 60)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.take(), 0.01)
    assert not queue._waiters
