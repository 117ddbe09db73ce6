"""Watches that die silently, break, lose their place or lose events: noticed and repaired, without a restart."""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.apiserver.faulty import FaultyWorld, assert_well, gaps_s
from tests.apiserver.operator_process import OperatorProcess
from tests.support.api_proxy_faults import Answer, Delay, Event, Hang

SILENCE_S = 4.0
NOTICED_WITHIN_S = SILENCE_S + 30
"""The API server would end a watch after five minutes, and the next pass over all objects is an hour away."""
WATCHES = 17
"""One for each kind that the operator follows."""
POLICIES = "/tenantcachepolicies$"
MISSED = "kvstrata_missed_changes_total"


@pytest.fixture
def watching(faulty: FaultyWorld) -> OperatorProcess:
    """An operator that relies on its watches: the pass that compares everything is an hour away."""
    return faulty.started("watching", KVSTRATA_WATCH_SILENCE_SECONDS=str(SILENCE_S), KVSTRATA_RESYNC_SECONDS="3600")


def every_watch_runs(faulty: FaultyWorld) -> None:
    """Wait until those that a fault before has ended are taken up again."""
    faulty.wait("every watch to run", lambda: faulty.proxy.running_watches() >= WATCHES)


@pytest.mark.claim("watches that fall silent are noticed and taken up where they stopped")
def test_watches_that_die_without_a_word_are_taken_up_where_they_stopped(
    faulty: FaultyWorld, watching: OperatorProcess
) -> None:
    missed = watching.metric(MISSED)
    # A watch that has just been renewed has no connection for a moment.
    faulty.wait("all watches to fall silent at once", lambda: faulty.proxy.silence(at_least=WATCHES) >= WATCHES)
    faulty.edit("tenant-0", suspend=True)
    faulty.delete("TenantCachePolicy", "tenant-1")
    faulty.wait("the edit", lambda: faulty.carried_out("tenant-0", suspended=True), NOTICED_WITHIN_S)
    faulty.wait("the deletion", lambda: faulty.is_out("tenant-1"), NOTICED_WITHIN_S)
    assert watching.metric(MISSED) == missed, "the watches themselves told of it, no list was needed"
    assert_well(watching)


def test_a_silent_network_of_some_seconds_delays_edits_and_loses_none(
    faulty: FaultyWorld, watching: OperatorProcess
) -> None:
    with faulty.proxy.fault(Hang(), watch=True) as hung:
        faulty.proxy.silence()
        faulty.edit("tenant-2", suspend=True)
        faulty.wait("watches to be asked for again", lambda: hung.hits >= WATCHES, NOTICED_WITHIN_S)
    faulty.wait("the edit", lambda: faulty.carried_out("tenant-2", suspended=True))
    assert_well(watching)


def test_watches_whose_connections_break_are_taken_up(faulty: FaultyWorld, watching: OperatorProcess) -> None:
    missed = watching.metric(MISSED)
    for suspended in (True, False):
        every_watch_runs(faulty)
        # A watch that has just been renewed has no connection for a moment.
        faulty.wait("every watch to be cut off at once", lambda: faulty.proxy.reset() >= WATCHES)
        faulty.edit("tenant-3", suspend=suspended)
        faulty.wait("the edit", partial(faulty.carried_out, "tenant-3", suspended=suspended))
    assert watching.metric(MISSED) == missed
    assert_well(watching)


def test_a_deletion_before_a_watch_lost_its_place_is_found_within_seconds(
    faulty: FaultyWorld, watching: OperatorProcess
) -> None:
    passes = watching.metric("kvstrata_resyncs_total")
    missed = watching.metric(MISSED, kind="TenantCachePolicy")
    with faulty.proxy.lost_events(POLICIES, lambda event: event["type"] == "DELETED") as lost:
        faulty.delete("TenantCachePolicy", "tenant-4")
        faulty.wait("the event to be lost", lambda: lost.hits > 0)
        faulty.wait("a look at the bundle", lambda: "tenant-4" in faulty.entries())
        # The list that follows shows what there is. Only a comparison shows what there is no more. A watch that is
        # renewed before it loses its place receives the deletion again.
        faulty.wait("the watch to lose its place", lambda: faulty.proxy.expire(POLICIES) >= 1)
        faulty.wait("the deletion", lambda: faulty.is_out("tenant-4"), NOTICED_WITHIN_S)
    assert watching.metric(MISSED, kind="TenantCachePolicy") > missed
    faulty.wait("the pass to end", lambda: watching.metric("kvstrata_resyncs_total") > passes)
    assert_well(watching)


def test_edits_while_all_watches_lose_their_place_are_carried_out(
    faulty: FaultyWorld, watching: OperatorProcess
) -> None:
    every_watch_runs(faulty)
    # A watch that has just been renewed has no connection for a moment.
    faulty.wait("every watch to lose its place at once", lambda: faulty.proxy.expire() >= WATCHES)
    faulty.edit("tenant-5", suspend=True)
    faulty.wait("the edit", lambda: faulty.carried_out("tenant-5", suspended=True))
    assert_well(watching)


@pytest.mark.parametrize(
    ("answer", "least_s"),
    [
        pytest.param(Answer(429, "TooManyRequests", {"Retry-After": "3"}), 3.0, id="429"),
        pytest.param(Answer(500, "InternalError"), 1.0, id="500"),
        pytest.param(Answer(503, "ServiceUnavailable"), 1.0, id="503"),
        pytest.param(Answer(403, "Forbidden"), 1.0, id="403"),
    ],
)
def test_watches_that_are_refused_for_a_while_are_asked_for_again_and_not_at_once(
    faulty: FaultyWorld, watching: OperatorProcess, answer: Answer, least_s: float
) -> None:
    suspended = not faulty.suspended("tenant-5")
    began = time.monotonic()
    with faulty.proxy.fault(answer, path=POLICIES, watch=True, times=2) as refused:
        faulty.proxy.reset(POLICIES)
        faulty.edit("tenant-5", suspend=suspended)
        faulty.wait("the watch to be refused twice", lambda: refused.hits == 2)
    faulty.wait("the edit", lambda: faulty.carried_out("tenant-5", suspended=suspended))
    asked = [e.at for e in faulty.proxy.requests(POLICIES, since=began, watch=True) if e.status == answer.status]
    assert gaps_s(asked)[0] >= least_s
    assert_well(watching)


def test_an_api_server_that_is_slow_delays_and_breaks_nothing(faulty: FaultyWorld, watching: OperatorProcess) -> None:
    with faulty.proxy.fault(Delay(1.0), methods={"GET", "POST", "PUT", "PATCH"}, watch=None):
        faulty.edit("tenant-5", suspend=True)
        faulty.wait("the edit", lambda: faulty.carried_out("tenant-5", suspended=True))
        faulty.edit("tenant-5", suspend=False)
        faulty.wait("the edit", lambda: faulty.carried_out("tenant-5", suspended=False))
    assert_well(watching)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"<html>bad gateway</html>\n", id="garbage"),
        pytest.param({"type": "ERROR", "object": {"kind": "Status", "code": 500, "message": "no"}}, id="error-500"),
        pytest.param({"type": "MODIFIED", "object": {"kind": "TenantCachePolicy", "metadata": {}}}, id="no-name"),
    ],
)
def test_a_watch_that_cannot_be_read_is_listed_again_and_no_other_watch_is_touched(
    faulty: FaultyWorld, watching: OperatorProcess, said: Event | bytes
) -> None:
    every_watch_runs(faulty)
    began = time.monotonic()
    faulty.wait("a watch that receives it", lambda: faulty.proxy.send(said, POLICIES) >= 1)
    suspended = not faulty.suspended("tenant-5")
    faulty.edit("tenant-5", suspend=suspended)
    faulty.wait("the edit", lambda: faulty.carried_out("tenant-5", suspended=suspended))
    assert faulty.proxy.requests(POLICIES, methods={"GET"}, since=began), "it lists again"
    assert "cannot be read, and lists again" in watching.log.read_text()
    every_watch_runs(faulty)
    assert_well(watching)
