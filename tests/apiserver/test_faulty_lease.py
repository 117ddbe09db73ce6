"""The Lease cannot be renewed: the process stops writing before another may lead, and ends. Work alone is no reason."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http import HTTPStatus
from itertools import count, cycle, pairwise

import pytest

from kvstrata.clients.lease import DURATION_S, RENEW_DEADLINE_S
from kvstrata.clients.resources import SECRET
from kvstrata.objects import names
from tests.apiserver.faulty import LEADS_WITHIN_S, MODEL, NAMESPACE, FaultyWorld, assert_well
from tests.apiserver.operator_process import OperatorProcess
from tests.support.api_proxy import Exchange
from tests.support.api_proxy_faults import WRITES, Answer, BreakAfter, Fault, Garble, Hang
from tests.support.operator_that_hangs import SILENT_LIMIT_S, STAYS, STILL_S

LEASE = "/leases/kvstrata-operator$"
ENDS_WITHIN_S = 90.0
"""Only a guard: the exit code is the verdict."""
STALLS = 2
"""How often a machine may stall for longer than the two seconds that a renewal which hangs leaves for the next one."""
HANGS = "tests.support.operator_that_hangs"
NAMES = (f"operator-{number}" for number in count())
"""Pods have names of their own; two processes of one name would take each other's Lease for theirs."""


@pytest.fixture(autouse=True)
def _no_process_stays(faulty: FaultyWorld) -> Iterator[None]:
    """Kill operators that a test left running."""
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
    # Beside the proxy, so nothing but the Lease shows it that the leader is in trouble.
    successor = faulty.operators.start(next(NAMES))
    with _edits(faulty) as stop_edits:
        with faulty.proxy.fault(fault, path=LEASE, methods=methods):
            cut_off = time.monotonic()
            assert leader.process.wait(ENDS_WITHIN_S) == 0, leader.log_tail()
        successor.wait_until_leading(LEADS_WITHIN_S)
        stop_edits()
        _assert_acts(faulty, successor)
    # Read only now: the proxy may have been slow to take those that were sent just before the process ended.
    wrote = [e.at for e in faulty.writes(since=cut_off)]
    assert wrote, "edits were carried out while it still led"
    assert max(wrote) < _renewals(faulty)[-1].until + DURATION_S


def test_a_leader_without_its_lease_ends_although_a_part_of_it_ignores_its_cancellation(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES), module=HANGS, **{STAYS: "1"})
    with faulty.proxy.fault(Hang(), path=LEASE, methods={"PUT"}):
        assert leader.process.wait(ENDS_WITHIN_S) == 0
    assert "coroutine object _stay" in leader.log.read_text()


def test_the_successor_leads_only_after_the_last_write_of_the_predecessor(faulty: FaultyWorld) -> None:
    faulty.start(next(NAMES))
    successor = faulty.operators.start(next(NAMES))
    with _edits(faulty), faulty.proxy.fault(Hang(), path=LEASE, methods={"PUT"}):
        cut_off = time.monotonic()
        successor.wait_until_leading(LEADS_WITHIN_S)
        leads = time.monotonic()
        writes = faulty.writes(since=cut_off)
    assert writes
    assert max(e.until for e in writes) < leads - 1.0


def test_renewals_that_fail_for_less_than_the_deadline_end_nothing(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES))
    for fault in (Answer(500, "InternalError"), Garble(), BreakAfter(), Hang()):
        stalls = STALLS if isinstance(fault, Hang) else 0
        while not _outlasts(faulty, leader, fault):
            assert stalls, f"{fault} ends a leadership\n{leader.log_tail()}"
            stalls -= 1
            assert leader.process.wait(ENDS_WITHIN_S) == 0, leader.log_tail()
            leader = faulty.start(next(NAMES))
        assert_well(leader)


def _outlasts(faulty: FaultyWorld, leader: OperatorProcess, fault: Fault) -> bool:
    """Have one renewal fail; return whether two more follow before the process ends."""

    def has_ended() -> bool:
        return leader.process.poll() is not None

    with faulty.proxy.fault(fault, path=LEASE, methods=WRITES, times=1) as hit:
        faulty.wait("a renewal to fail", lambda: hit.hits == 1 or has_ended())
        began = time.monotonic()
        faulty.wait("two renewals", lambda: has_ended() or len(_renewals(faulty, since=began)) >= 2)
    return not has_ended()


def test_a_leader_that_works_for_longer_than_its_lease_lasts_keeps_it(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES), module=HANGS, **{STILL_S: str(DURATION_S + 5.0)})
    successor = faulty.operators.start(next(NAMES))
    faulty.wait("the successor to contend", lambda: successor.metric("kvstrata_watchers") > 0)
    before = _holder(faulty)
    began = time.monotonic()

    def pauses() -> list[tuple[float, float]]:
        """Times of more than DURATION_S between two writes, although edits never cease: its event loop did not turn."""
        times = [e.at for e in faulty.writes(since=began)]
        return [(last, first) for last, first in pairwise(times) if first - last > DURATION_S]

    with _edits(faulty) as stop_edits:
        leader.process.send_signal(signal.SIGUSR1)
        faulty.wait("its work to end", lambda: bool(pauses()))
        stop_edits()
        _assert_acts(faulty, leader)
    stopped, continued = pauses()[0]
    assert [e for e in _renewals(faulty) if stopped < e.at < continued]
    assert _holder(faulty) == before


UNCONCERNED = ("/cachedmodels/tiny/status", "/cachedomains/default/status")
"""Statuses that no edit of a policy changes."""


def test_a_leader_that_hangs_is_replaced_and_changes_nothing_when_it_turns_again(faulty: FaultyWorld) -> None:
    leader = faulty.start(next(NAMES), module=HANGS, **{STILL_S: "600", SILENT_LIMIT_S: "12"})
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
    faulty: FaultyWorld, leader: OperatorProcess, stop: Callable[[], None], resume: Callable[[], None]
) -> None:
    """Stop a leader, wait for its successor, let it continue, and see it end without another change."""
    # Beside the proxy, so the proxy sees only the leader.
    successor = faulty.operators.start(next(NAMES))
    with _edits(faulty) as stop_edits:
        stop()
        successor.wait_until_leading(LEADS_WITHIN_S)
        leads = time.monotonic()
        assert leads - _renewals(faulty)[-1].until > RENEW_DEADLINE_S
        # A write that the leader was about to send when it stopped may go out when it wakes. It names the version that
        # it replaces, so it is refused where the successor has written since; that it leads is not enough.
        before = _versions(faulty)
        faulty.wait("the successor to write", lambda: before.isdisjoint(_versions(faulty)))
        resumed = time.monotonic()
        resume()
        assert leader.process.wait(ENDS_WITHIN_S) == 0, leader.log_tail()
        stop_edits()
        _assert_acts(faulty, successor)
    # The status of an object that the edits do not concern may be taken, once for each; nothing else may.
    late = faulty.writes(since=resumed)
    taken = [one for one in late if one.status is None or one.status < HTTPStatus.BAD_REQUEST]
    assert [one for one in taken if not one.path.endswith(UNCONCERNED)] == []
    assert len({one.path for one in taken}) == len(taken)


@contextmanager
def _edits(faulty: FaultyWorld) -> Iterator[Callable[[], None]]:
    """Edit a policy again and again, so that the leader has something to write at every moment; yield how to stop."""
    stopped = threading.Event()

    def edit() -> None:
        for suspended in cycle((True, False)):
            if stopped.wait(0.25):
                return
            faulty.edit("tenant-1", suspend=suspended)

    with ThreadPoolExecutor(1, "edits") as thread:
        editing = thread.submit(edit)

        def stop() -> None:
            """Raises the error of an edit."""
            stopped.set()
            editing.result()

        try:
            faulty.wait("writes of the leader", lambda: bool(faulty.writes(since=time.monotonic() - 1.0)))
            yield stop
        finally:
            stop()


def _assert_acts(faulty: FaultyWorld, leader: OperatorProcess) -> None:
    """A leader carries out an edit and is well."""
    suspended = not faulty.get("TenantCachePolicy", "tenant-1")["spec"].get("suspend")
    faulty.edit("tenant-1", suspend=suspended)
    faulty.wait("an edit to be carried out", lambda: faulty.carried_out("tenant-1", suspended=suspended))
    assert_well(leader)


def _renewals(faulty: FaultyWorld, since: float = 0.0) -> list[Exchange]:
    """Writes of the Lease through the proxy that were carried out and answered."""
    asked = faulty.proxy.requests(LEASE, methods={"PUT"}, since=since)
    return [one for one in asked if one.status == HTTPStatus.OK and one.fault is None]


def _holder(faulty: FaultyWorld) -> tuple[str, int]:
    """Holder of the Lease, and how often it changed."""
    spec = faulty.get("Lease", "kvstrata-operator", faulty.operators.namespace)["spec"]
    return spec["holderIdentity"], spec["leaseTransitions"]


def _versions(faulty: FaultyWorld) -> set[tuple[str, str]]:
    """Names and versions of the objects that edits of the policy change: its own, and the Secrets of the bundle."""
    secrets = faulty.api.get(SECRET.path(NAMESPACE))["items"]
    bundle = [one for one in secrets if one["metadata"]["name"].startswith(names.bundle_root(MODEL))]
    concerned = (faulty.get("TenantCachePolicy", "tenant-1"), *bundle)
    return {(one["metadata"]["name"], one["metadata"]["resourceVersion"]) for one in concerned}
