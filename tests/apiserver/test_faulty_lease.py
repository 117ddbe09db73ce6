"""The Lease cannot be renewed: the process stops writing before another may lead, and ends. Work alone is no reason."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from itertools import count

import pytest

from kvstrata.clients.lease import DURATION_S, RENEW_DEADLINE_S, RENEW_EVERY_S
from tests.apiserver.faulty import LEADS_WITHIN_S, FaultyWorld, assert_well
from tests.apiserver.operator_process import OperatorProcess
from tests.support.api_proxy_faults import WRITES, Answer, BreakAfter, Fault, Garble, Hang
from tests.support.operator_that_hangs import SILENT_LIMIT_S, STAYS, STILL_S

LEASE = "/leases/kvstrata-operator$"
ENDS_WITHIN_S = 20.0
"""After the Lease is lost: three waits of STOP_WITHIN_S, and what a busy machine adds."""
HANGS = "tests.support.operator_that_hangs"
NAMES = (f"operator-{number}" for number in count())
"""Pods have names of their own; two processes of one name would take each other's Lease for theirs."""


@pytest.fixture(autouse=True)
def _nobody_stays(faulty: FaultyWorld) -> Iterator[None]:
    """Kill what a failed test left behind."""
    yield
    for running in faulty.operators.running():
        running.kill()


@pytest.mark.parametrize(
    ("fault", "methods"),
    [
        pytest.param(Hang(), {"PUT"}, id="renewals-hang"),
        pytest.param(Hang(after=True), {"PUT"}, id="answers-to-renewals-are-lost"),
        pytest.param(Hang(), {"GET", "PUT"}, id="nothing-is-answered"),
        pytest.param(Answer(500, "InternalError"), {"PUT"}, id="renewals-fail"),
    ],
)
def test_a_leader_that_cannot_renew_stops_writing_before_another_may_lead(
    faulty: FaultyWorld, fault: Fault, methods: set[str]
) -> None:
    leader = faulty.start(next(NAMES))
    # Beside the proxy, so nothing but the Lease tells it that the leader is in trouble.
    successor = faulty.operators.start(next(NAMES))
    stop = _edits(faulty)
    try:
        with faulty.proxy.fault(fault, path=LEASE, methods=methods):
            cut_off = time.monotonic()
            leader.process.wait(RENEW_DEADLINE_S + ENDS_WITHIN_S)
            ended = time.monotonic()
        wrote = [e.at for e in faulty.writes(since=cut_off)]
        assert wrote, "edits were carried out while it still led"
        # A renewal that was sent just before the cut counts for RENEW_DEADLINE_S.
        assert max(wrote) - cut_off < RENEW_DEADLINE_S + 1.0
        successor.wait_until_leading(LEADS_WITHIN_S)
        assert [e for e in faulty.writes(since=max(wrote)) if e.at > ended] == []
        faulty.wait("the successor to act", lambda: faulty.carried_out("tenant-1", suspended=_suspended(faulty)))
        assert_well(successor)
    finally:
        stop()


def test_a_leader_without_its_lease_ends_although_a_part_of_it_ignores_its_cancellation(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES), module=HANGS, **{STAYS: "1"})
    with faulty.proxy.fault(Hang(), path=LEASE, methods={"PUT"}):
        assert leader.process.wait(RENEW_DEADLINE_S + ENDS_WITHIN_S) == 0
    assert "coroutine object _stay" in leader.log_tail()


def test_the_successor_leads_only_after_the_last_write_of_the_predecessor(faulty: FaultyWorld) -> None:
    faulty.start(next(NAMES))
    successor = faulty.operators.start(next(NAMES))
    stop = _edits(faulty)
    try:
        with faulty.proxy.fault(Hang(), path=LEASE, methods={"PUT"}):
            cut_off = time.monotonic()
            while not successor.leading:
                assert time.monotonic() < cut_off + LEADS_WITHIN_S, successor.log_tail()
                time.sleep(0.05)
            leads = time.monotonic()
        writes = faulty.writes(since=cut_off)
        assert writes
        assert max(e.until for e in writes) < leads - 1.0
    finally:
        stop()


def test_renewals_that_fail_for_less_than_the_deadline_end_nothing(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES))
    for fault in (Answer(500, "InternalError"), Garble(), BreakAfter(), Hang()):
        with faulty.proxy.fault(fault, path=LEASE, methods=WRITES, times=1) as hit:
            faulty.wait("a renewal to fail", lambda: hit.hits == 1)
            time.sleep(6)
        assert_well(leader)


def test_a_leader_that_works_for_longer_than_its_lease_lasts_keeps_it(faulty: FaultyWorld) -> None:
    busy_s = DURATION_S + 5.0
    leader = faulty.start(next(NAMES), module=HANGS, **{STILL_S: str(busy_s)})
    successor = faulty.operators.start(next(NAMES))
    began = time.monotonic()
    leader.process.send_signal(signal.SIGUSR1)
    time.sleep(1.0)
    assert leader.page("/livez") == (0, ""), "its event loop stands still"
    faulty.wait("its work to end", lambda: leader.leading)
    assert time.monotonic() - began >= busy_s
    renewed = faulty.proxy.requests(LEASE, methods={"PUT"}, since=began)
    assert len(renewed) > busy_s / RENEW_EVERY_S / 3
    assert not successor.leading
    suspended = not _suspended(faulty)
    faulty.edit("tenant-1", suspend=suspended)
    faulty.wait("an edit to be carried out", lambda: faulty.carried_out("tenant-1", suspended=suspended))
    assert_well(leader)


UNCONCERNED = ("/cachedmodels/tiny/status", "/cachedomains/default/status")
"""Statuses that no edit of a policy changes."""


def test_a_leader_that_hangs_is_replaced_and_changes_nothing_when_it_turns_again(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES), module=HANGS, **{STILL_S: "600", SILENT_LIMIT_S: "3"})
    process = leader.process
    _is_replaced(
        faulty, leader, lambda: process.send_signal(signal.SIGUSR1), lambda: process.send_signal(signal.SIGUSR2)
    )


def test_a_leader_that_was_frozen_changes_nothing_when_it_wakes(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES))
    process = leader.process
    _is_replaced(
        faulty, leader, lambda: process.send_signal(signal.SIGSTOP), lambda: process.send_signal(signal.SIGCONT)
    )


def _is_replaced(
    faulty: FaultyWorld, leader: OperatorProcess, stop: Callable[[], None], go_on: Callable[[], None]
) -> None:
    """Stop a leader, wait for its successor, let it go on, and see it end without another change."""
    # Beside the proxy, so what the proxy sees is the leader's.
    successor = faulty.operators.start(next(NAMES))
    end_edits = _edits(faulty)
    try:
        faulty.wait("writes of the leader", lambda: bool(faulty.writes(since=time.monotonic() - 1.0)))
        stop()
        stopped = time.monotonic()
        try:
            successor.wait_until_leading(LEADS_WITHIN_S)
        finally:
            go_on()
        assert time.monotonic() - stopped > RENEW_DEADLINE_S
        assert leader.process.wait(ENDS_WITHIN_S) == 0, leader.log_tail()
        # What it was just about to send when it stopped may go out when it wakes. It names the version that it
        # replaces, so it is refused where the successor has written since. The status of an object that the edits do
        # not concern may be taken, once for each; the edits go on, so nothing else may.
        late = faulty.writes(since=stopped + 1.0)
        taken = [one for one in late if one.status is None or one.status < HTTPStatus.BAD_REQUEST]
        assert [one for one in taken if not one.path.endswith(UNCONCERNED)] == []
        assert len({one.path for one in taken}) == len(taken)
        faulty.wait("the successor to act", lambda: faulty.carried_out("tenant-1", suspended=_suspended(faulty)))
        assert_well(successor)
    finally:
        end_edits()


def _edits(faulty: FaultyWorld) -> Callable[[], None]:
    """Edit a policy again and again, so that the leader has something to write at every moment; return how to stop."""
    stopped = threading.Event()

    def edit() -> None:
        suspended = False
        while not stopped.wait(0.25):
            suspended = not suspended
            faulty.edit("tenant-1", suspend=suspended)

    thread = threading.Thread(target=edit, name="edits", daemon=True)
    thread.start()

    def stop() -> None:
        stopped.set()
        thread.join(10)

    return stop


def _suspended(faulty: FaultyWorld) -> bool:
    return bool(faulty.get("TenantCachePolicy", "tenant-1")["spec"].get("suspend"))
