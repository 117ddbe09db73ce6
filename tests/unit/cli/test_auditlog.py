"""Lines of the operator's audit log leave by a thread: who tells waits for nothing, and what is lost is counted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY

from kvstrata.cli import logs
from kvstrata.cli.logs import AuditHandler
from kvstrata.contract.messages.audit import LOGGER, Action, Emitter, Happened, Line, Source
from kvstrata.reconcile.audit import record
from tests.support.audit import read_line

TELLER = Emitter(Source.OPERATOR, "kvstrata-0", "b007")


class Taker:
    """Takes lines, unless told to wait or to fail."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.open = threading.Event()
        self.open.set()
        self.stuck = threading.Event()
        self.broken: set[int] = set()
        """Numbers of lines that cannot be written."""

    def write(self, data: bytes) -> None:
        """Take a line."""
        if not self.open.is_set():
            self.stuck.set()
            assert self.open.wait(60)
        line = read_line(data)
        if line.sequence in self.broken:
            raise BrokenPipeError
        self.lines.append(line)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that starts late is no reader that hangs."""
    monkeypatch.setattr(logs, "FLUSH_WITHIN_S", 60.0)


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def handler(taker: Taker) -> Iterator[AuditHandler]:
    handler, log = AuditHandler(TELLER, taker.write, most=3), logging.getLogger(LOGGER)
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    taker.open.set()
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def lost(count: int) -> None:
    record(Happened(action=Action.TIER_LOST, tier=f"t{count}"))


def dropped() -> float:
    return REGISTRY.get_sample_value("kvstrata_audit_dropped_total") or 0.0


def written(taker: Taker, count: int) -> list[Line]:
    """Wait until there are so many lines."""
    until = time.monotonic() + 60
    while len(taker.lines) < count and time.monotonic() < until:
        time.sleep(0.005)
    return taker.lines


def test_lines_come_in_their_order_with_numbers_that_show_gaps(handler: AuditHandler, taker: Taker) -> None:
    for number in range(3):
        lost(number)
        written(taker, number + 1)
    assert [(line.sequence, line.tier) for line in taker.lines] == [(1, "t0"), (2, "t1"), (3, "t2")]
    assert {line.pod for line in taker.lines} == {"kvstrata-0"}


def test_who_tells_does_not_wait_for_a_reader_that_hangs_and_what_is_lost_is_told(
    handler: AuditHandler, taker: Taker
) -> None:
    before = dropped()
    taker.open.clear()
    lost(0)
    assert taker.stuck.wait(60)
    for number in range(1, 9):
        lost(number)  # returns, though nothing is taken: three wait, five are lost
    assert dropped() - before == 5
    taker.open.set()
    lines = written(taker, 5)
    assert [line.tier for line in lines] == ["t0", None, "t1", "t2", "t3"]
    assert (lines[1].action, lines[1].count) == (Action.EVENTS_DROPPED, 5)


def test_what_cannot_be_written_is_counted_and_told_once(handler: AuditHandler, taker: Taker) -> None:
    before = dropped()
    taker.broken = {1, 3}
    for number in range(3):
        lost(number)
        handler.flush()
    assert dropped() - before == 2
    assert [(line.sequence, line.action, line.count) for line in taker.lines] == [
        (2, Action.EVENTS_DROPPED, 1),
        (4, Action.EVENTS_DROPPED, 1),
        (5, Action.TIER_LOST, None),
    ]


def test_the_end_of_the_process_waits_for_lines_but_not_for_a_reader_that_hangs(
    handler: AuditHandler, taker: Taker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost(0)
    handler.flush()
    assert len(taker.lines) == 1
    taker.open.clear()
    lost(1)
    assert taker.stuck.wait(60)
    monkeypatch.undo()
    before_s = time.monotonic()
    handler.flush()
    assert time.monotonic() - before_s < 30
    assert len(taker.lines) == 1


def test_records_of_others_on_this_logger_are_no_lines(handler: AuditHandler, taker: Taker) -> None:
    logging.getLogger(LOGGER).info("some library's words")
    lost(0)
    handler.flush()
    assert [line.tier for line in taker.lines] == ["t0"]
