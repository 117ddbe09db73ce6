"""Writes and reads that the API server refuses, loses, delays or garbles: repaired, bounded, and never done twice."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.apiserver.faulty import (
    STATUS_OF_POLICIES,
    FaultyWorld,
    assert_well,
    gaps_s,
)
from tests.apiserver.operator_process import OperatorProcess
from tests.support import objects
from tests.support.api_proxy_faults import (
    WRITES,
    Answer,
    BreakAfter,
    Fault,
    Garble,
    Truncate,
)

FAILURES = "kvstrata_reconcile_failures_total"
RESYNC_S = 4.0
LATE_S = 5.0
"""How late an operator on a busy machine may write what it put off."""
ROOT = "/secrets/kvs-tiny-bundle$"
CHILD = "/services/kvs-tiny$"
CLAIMED = ((STATUS_OF_POLICIES, BreakAfter()), (ROOT, Truncate()))
LOST = pytest.mark.claim("a write whose answer is lost has no double effect")


@pytest.fixture
def running(faulty: FaultyWorld) -> OperatorProcess:
    """An operator that compares everything every few seconds."""
    return faulty.started("running", KVSTRATA_RESYNC_SECONDS=str(RESYNC_S))


@pytest.mark.claim("429 is waited out as the API server says")
def test_429_is_waited_out_as_the_api_server_says_and_counted(faulty: FaultyWorld, running: OperatorProcess) -> None:
    wait_s = 3
    path = "/tenantcachepolicies/tenant-0/status$"
    counted = running.metric(FAILURES, kind="TenantCachePolicy", reason="TooManyRequests")
    busy = Answer(429, "TooManyRequests", {"Retry-After": str(wait_s)})
    began = time.monotonic()
    with faulty.proxy.fault(busy, path=path, methods=WRITES, times=2) as refused:
        faulty.edit("tenant-0", suspend=True)
        faulty.wait("the first refusal", lambda: refused.hits >= 1)
        # Whatever happens meanwhile concerns the key, and is no reason to ask sooner.
        faulty.edit("tenant-0", suspend=False)
        faulty.edit("tenant-0", suspend=True)
        faulty.wait("the edit", lambda: faulty.carried_out("tenant-0", suspended=True))
    # The API server shows a status before its answer has passed the proxy.
    faulty.wait("the answer", lambda: len(faulty.proxy.requests(path, methods=WRITES, since=began)) >= 3)
    asked = faulty.proxy.requests(path, methods=WRITES, since=began)
    assert [request.status == 429 for request in asked[:3]] == [True, True, False]
    assert min(gaps_s(request.at for request in asked[:3])) >= wait_s
    assert running.metric(FAILURES, kind="TenantCachePolicy", reason="TooManyRequests") == counted + 2
    assert_well(running)


@pytest.mark.parametrize(("status", "reason"), [(500, "InternalError"), (503, "ServiceUnavailable"), (504, "Timeout")])
def test_writes_that_fail_are_tried_again_ever_more_slowly(
    faulty: FaultyWorld, running: OperatorProcess, status: int, reason: str
) -> None:
    path = "/tenantcachepolicies/tenant-1/status$"
    counted = running.metric(FAILURES, reason=reason)
    suspended = not faulty.suspended("tenant-1")
    began = time.monotonic()
    with faulty.proxy.fault(Answer(status, reason), path=path, methods=WRITES) as refused:
        faulty.edit("tenant-1", suspend=suspended)
        faulty.wait("some attempts", lambda: refused.hits >= 6)
        faulty.wait("the bundle, which does not wait for a status", lambda: faulty.suspended("tenant-1") == suspended)
    faulty.wait("the edit", lambda: faulty.carried_out("tenant-1", suspended=suspended))
    failed = [r.at for r in faulty.proxy.requests(path, methods=WRITES, since=began) if r.status == status]
    # The passes of every few seconds ask for each key once more; without them each gap is twice the one before.
    assert len(failed) <= 8 + (failed[-1] - failed[0]) / RESYNC_S
    assert failed[5] - failed[0] >= 1.5
    assert running.metric(FAILURES, reason=reason) - counted == len(failed)
    assert_well(running)


@pytest.mark.claim("conflicts are read again and end")
@pytest.mark.parametrize("path", [STATUS_OF_POLICIES, ROOT])
def test_conflicts_are_read_again_and_end(faulty: FaultyWorld, running: OperatorProcess, path: str) -> None:
    suspended = not faulty.suspended("tenant-2")
    with faulty.proxy.fault(Answer(409, "Conflict"), path=path, methods=WRITES, times=3) as refused:
        faulty.edit("tenant-2", suspend=suspended)
        faulty.wait("the edit", lambda: faulty.carried_out("tenant-2", suspended=suspended))
    assert refused.hits == 3
    assert_well(running)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        pytest.param(path, fault, id=f"{path}-{fault}", marks=LOST if (path, fault) in CLAIMED else ())
        for path in (STATUS_OF_POLICIES, ROOT, "/secrets/kvs-tiny-bundle-")
        for fault in (BreakAfter(), Truncate(), Garble(), Answer(500, "InternalError"))
    ],
)
def test_an_answer_that_never_came_has_no_double_effect(
    faulty: FaultyWorld, running: OperatorProcess, path: str, fault: Fault
) -> None:
    suspended = not faulty.suspended("tenant-3")
    before = faulty.bundle()
    with faulty.proxy.fault(fault, path=path, methods=WRITES, times=1) as hit:
        faulty.edit("tenant-3", suspend=suspended)
        faulty.wait("the edit", lambda: faulty.carried_out("tenant-3", suspended=suspended))
        assert hit.hits == 1
    faulty.wait("rest", faulty.at_rest)
    after = faulty.bundle()
    assert after.root.revision == before.root.revision + 1
    untouched = {tenant: entry for tenant, entry in before.entries.items() if tenant != "tenant-3"}
    assert {tenant: after.entries[tenant] for tenant in untouched} == untouched
    assert_well(running)


@pytest.mark.parametrize("fault", [BreakAfter(), Truncate(), Garble()], ids=str)
def test_an_invalidation_whose_writes_get_no_answer_rolls_its_tenant_once(
    faulty: FaultyWorld, running: OperatorProcess, fault: Fault
) -> None:
    name = f"leaves-{type(fault).__name__.lower()}"
    before = faulty.get("TenantCachePolicy", "tenant-4")["status"]["scope"]
    with faulty.proxy.fault(fault, path="/status$", methods=WRITES, times=4) as hit:
        faulty.api.create(objects.invalidation(name, scope={"tenant": "tenant-4"}))
        faulty.wait("completion", lambda: faulty.condition("CacheInvalidation", name, "Complete") == "True")
        # The object is complete before its last answer is lost.
        faulty.wait("four lost answers", lambda: hit.hits == 4)
    after = faulty.get("TenantCachePolicy", "tenant-4")["status"]["scope"]
    assert after["epoch"] != before["epoch"]
    assert after.get("rolls", 0) == before.get("rolls", 0) + 1
    assert_well(running)


@pytest.mark.parametrize(
    "fault", [BreakAfter(), Truncate(), Garble(), Answer(500, "InternalError"), Answer(409, "Conflict")], ids=str
)
def test_a_child_whose_apply_fails_comes_back_all_the_same(
    faulty: FaultyWorld, running: OperatorProcess, fault: Fault
) -> None:
    with faulty.proxy.fault(fault, path=CHILD, methods={"PATCH"}, times=1) as hit:
        faulty.delete("Service", "kvs-tiny")
        faulty.wait("the Service", lambda: hit.hits == 1 and bool(faulty.get("Service", "kvs-tiny")))
    faulty.wait("the model", lambda: faulty.condition("CachedModel", "tiny", "Stalled") != "True")
    assert_well(running)


def test_a_deletion_that_no_watch_told_is_found_by_the_next_pass(faulty: FaultyWorld, running: OperatorProcess) -> None:
    missed = running.metric("kvstrata_missed_changes_total", kind="TenantCachePolicy")
    with faulty.proxy.lost_events("/tenantcachepolicies$", _is_deletion) as lost:
        faulty.delete("TenantCachePolicy", "tenant-5")
        faulty.wait("the event to be lost", lambda: lost.hits > 0)
        faulty.wait("the deletion", lambda: faulty.is_out("tenant-5"))
    assert running.metric("kvstrata_missed_changes_total", kind="TenantCachePolicy") > missed
    assert_well(running)


@pytest.mark.parametrize("fault", [Garble(), Truncate(), Answer(500, "InternalError"), Answer(410, "Expired")], ids=str)
def test_a_pass_whose_lists_fail_is_made_again_and_forgets_nothing(
    faulty: FaultyWorld, running: OperatorProcess, fault: Fault
) -> None:
    faulty.wait("rest", partial(faulty.at_rest, LATE_S))
    began, revision = time.monotonic(), faulty.bundle().root.revision
    with faulty.proxy.fault(fault, path="/(tenantcachepolicies|secrets)$", times=1) as hit:
        faulty.wait("a failed pass", lambda: hit.hits == 1)
    passes = running.metric("kvstrata_resyncs_total")
    faulty.wait("a whole pass", lambda: running.metric("kvstrata_resyncs_total") > passes)
    assert faulty.bundle().root.revision == revision
    assert faulty.writes(since=began) == []
    assert_well(running)


def test_an_api_server_that_fails_at_the_start_is_waited_for(faulty: FaultyWorld, running: OperatorProcess) -> None:
    faulty.wait("rest", partial(faulty.at_rest, LATE_S))
    assert running.stop() == 0
    with (
        faulty.proxy.fault(Answer(500, "InternalError"), path="/cachetiers$", times=1) as failed,
        faulty.proxy.fault(Truncate(), path="/secrets$", times=1) as cut_off,
        faulty.proxy.fault(Answer(429, "TooManyRequests", {"Retry-After": "1"}), path="/pods$", times=1) as busy,
    ):
        successor = faulty.start("successor", KVSTRATA_RESYNC_SECONDS="3600")
    assert [rule.hits for rule in (failed, cut_off, busy)] == [1, 1, 1]
    assert successor.metric("kvstrata_writes_total") == 0
    assert_well(successor)


def _is_deletion(event: object) -> bool:
    return isinstance(event, dict) and event["type"] == "DELETED"
