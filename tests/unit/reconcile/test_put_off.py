"""What can wait is done once, after a while, however often it is asked for."""

from __future__ import annotations

from kvstrata.model.refs import Key
from kvstrata.reconcile.queue import WorkQueue
from tests.support.worlds import finish

KEY = Key("CachedModel", "team", "tiny")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_first_request_waits_and_the_key_is_due_when_the_wait_ends() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    assert not queue.put_off(KEY, 0.25)
    assert len(queue) == 0
    clock.now += 0.25
    assert len(queue) == 1
    assert finish(queue.take()) == KEY
    assert queue.put_off(KEY, 0.25)


def test_more_requests_do_not_prolong_the_wait() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    for _ in range(4):
        assert not queue.put_off(KEY, 0.25)
        clock.now += 0.0625
    assert queue.put_off(KEY, 0.25)


def test_what_goes_on_for_long_waits_longer_each_time_but_never_for_more_than_seconds() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    done: list[float] = []
    for _ in range(200):
        if queue.put_off(KEY, 0.25):
            done.append(clock.now - 100.0)
        clock.now += 0.125
    assert done[:4] == [0.25, 1.25, 5.25, 9.25]


def test_what_was_done_meanwhile_waits_no_more() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.put_off(KEY, 0.25)
    queue.put_off_no_more(KEY)
    clock.now += 1
    assert not queue.put_off(KEY, 0.25), "a wait that was ended must not count for the next"


def test_a_key_that_is_put_off_while_it_is_worked_on_gets_another_turn() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(KEY)
    taken = finish(queue.take())
    queue.put_off(taken, 0.25)
    queue.done(taken)
    clock.now += 0.25
    assert finish(queue.take()) == KEY


def test_a_server_that_names_an_absurd_time_is_asked_again_after_a_minute() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(KEY)
    queue.failed(finish(queue.take()), retry_after_s=86400.0)
    clock.now += 60
    queue.add(KEY)
    assert finish(queue.take()) == KEY
