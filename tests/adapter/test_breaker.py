"""The breaker, without time passing."""

from __future__ import annotations

import pytest

from kvstrata_sidecar.adapter.tier.breaker import Breaker, BreakerState


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock, threshold=3, first_pause_s=1.0, longest_pause_s=5.0)


def close(breaker: Breaker) -> None:
    assert breaker.begin_probe()
    breaker.probe_succeeded()


def test_a_server_that_was_never_seen_gets_a_probe_at_once_and_no_traffic(breaker: Breaker) -> None:
    assert not breaker.closed
    assert breaker.probe_in_s() == 0


def test_a_probe_that_succeeds_closes_it(breaker: Breaker) -> None:
    close(breaker)
    assert breaker.closed
    assert breaker.detail == ""
    assert breaker.probe_in_s() is None


def test_only_one_probe_is_under_way(breaker: Breaker) -> None:
    assert breaker.begin_probe()
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.begin_probe()


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not(breaker: Breaker) -> None:
    close(breaker)
    for _ in range(4):
        breaker.failed("late")
        breaker.failed("late")
        breaker.succeeded()
    assert breaker.closed
    for _ in range(3):
        breaker.failed("late")
    assert breaker.state is BreakerState.OPEN
    assert breaker.detail == "late"


def test_a_fatal_failure_opens_it_at_once(breaker: Breaker) -> None:
    close(breaker)
    breaker.failed("access refused", fatal=True)
    assert breaker.state is BreakerState.OPEN


def test_a_success_of_old_traffic_does_not_close_it(breaker: Breaker) -> None:
    close(breaker)
    breaker.failed("gone", fatal=True)
    breaker.succeeded()
    assert not breaker.closed
    assert breaker.detail == "gone"


def test_pauses_double_up_to_the_longest_and_start_anew_after_a_success(breaker: Breaker, clock: Clock) -> None:
    pauses = []
    for _ in range(4):
        assert breaker.begin_probe()
        breaker.probe_failed("gone")
        pause_s = breaker.probe_in_s()
        assert pause_s is not None
        pauses.append(pause_s)
        assert not breaker.begin_probe()
        clock.now_s += pause_s
    assert pauses == [2.0, 4.0, 5.0, 5.0]
    close(breaker)
    breaker.failed("gone", fatal=True)
    assert breaker.probe_in_s() == 1.0
