"""Draining: when it begins, when the engine may stop, and when it is over because the engine is back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstrata_sidecar.gate.http.drain import Drain

GRACE_S = 5.0


class Pod:
    """The volume that the engine's hook and the gate share, and a clock."""

    def __init__(self, directory: Path) -> None:
        self.now_s = 100.0
        self.socket, self.asked = directory / "engine.sock", directory / "draining"
        self.told = directory / "drained"
        self.drain = Drain(self.socket, grace_s=GRACE_S, clock=lambda: self.now_s)
        self.start_engine(at_s=1)

    def start_engine(self, at_s: int) -> None:
        self.socket.touch()
        os.utime(self.socket, (at_s, at_s))

    def ask(self, at_s: int = 2) -> None:
        self.asked.touch()
        os.utime(self.asked, (at_s, at_s))

    def poll(self, *, after_s: float = 0.0, in_flight: int = 0, engine_ready: bool = True) -> bool:
        """Return whether the engine may stop."""
        self.now_s += after_s
        self.drain.poll(in_flight=in_flight, engine_ready=engine_ready)
        return self.told.exists()


@pytest.fixture
def pod(tmp_path: Path) -> Pod:
    return Pod(tmp_path)


def test_nothing_drains_before_the_hook_asks(pod: Pod) -> None:
    assert not pod.poll(after_s=2 * GRACE_S)
    assert not pod.drain.active
    pod.ask()
    assert not pod.drain.active
    pod.poll()
    assert pod.drain.active


def test_the_grace_period_begins_with_the_first_poll_that_sees_the_hook(pod: Pod) -> None:
    pod.ask()
    assert not pod.poll()
    assert not pod.poll(after_s=GRACE_S - 1)
    assert pod.poll(after_s=1)


def test_the_grace_period_is_not_prolonged_by_a_second_reason_to_drain(pod: Pod) -> None:
    pod.drain.begin()
    pod.now_s += GRACE_S - 1
    pod.drain.begin()
    pod.ask()
    assert not pod.poll()
    assert pod.poll(after_s=1)


def test_a_request_in_flight_is_waited_for_after_the_grace_period(pod: Pod) -> None:
    pod.ask()
    pod.poll(in_flight=1)
    assert not pod.poll(after_s=2 * GRACE_S, in_flight=1)
    assert pod.poll()


def test_the_end_is_told_once(pod: Pod) -> None:
    pod.ask()
    pod.poll()
    assert pod.poll(after_s=GRACE_S)
    pod.told.unlink()
    assert not pod.poll(after_s=GRACE_S)
    assert pod.drain.active


def test_an_engine_that_started_after_the_hook_ends_the_drain_once_it_is_ready(pod: Pod) -> None:
    pod.ask()
    pod.poll()
    assert pod.poll(after_s=GRACE_S)
    pod.start_engine(at_s=3)
    assert pod.poll(engine_ready=False)
    assert pod.drain.active
    assert not pod.poll()
    assert not pod.drain.active
    assert not pod.asked.exists()


def test_a_drain_that_was_over_can_begin_again_in_full(pod: Pod) -> None:
    pod.ask()
    pod.poll()
    pod.poll(after_s=GRACE_S)
    pod.start_engine(at_s=3)
    pod.poll()
    pod.ask(at_s=4)
    assert not pod.poll(after_s=GRACE_S)
    assert not pod.poll(after_s=GRACE_S - 1)
    assert pod.poll(after_s=1)


@pytest.mark.parametrize("started_s", [1, 2], ids=["before", "at the same time"])
def test_an_engine_that_is_not_younger_than_the_hook_ends_no_drain(pod: Pod, started_s: int) -> None:
    pod.start_engine(at_s=started_s)
    pod.ask()
    pod.poll()
    assert pod.poll(after_s=GRACE_S)
    assert pod.drain.active


def test_a_ready_engine_without_a_socket_ends_no_drain(pod: Pod) -> None:
    pod.ask()
    pod.poll()
    pod.socket.unlink()
    assert pod.poll(after_s=GRACE_S)
    assert pod.drain.active


def test_a_drain_ends_though_the_end_was_never_told(pod: Pod) -> None:
    pod.ask()
    pod.poll(in_flight=1)
    pod.start_engine(at_s=3)
    assert not pod.poll(in_flight=1)
    assert not pod.drain.active
