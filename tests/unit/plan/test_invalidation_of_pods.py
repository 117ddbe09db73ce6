"""Whom an invalidation waits for: every pod that may still hold what is revoked, and none for ever."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from kvstrata.api.cacheinvalidation import CacheInvalidationStatus, Phase
from kvstrata.api.scalars import format_timestamp
from kvstrata.plan.kinds.invalidation import plan_invalidation
from kvstrata.plan.witnesses import TOKEN_CACHE_S
from tests.support.objects import NAMESPACE, invalidation, model, pod, policy

from .invalidations import FENCE_S, KIND, at_rest, phase


def test_a_pod_that_vanished_without_a_word_delays_until_it_has_fenced_itself_off() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.delete("Pod", "pod-1")
    simulation.advance(FENCE_S - 10)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(15)
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"]["fenced"] == 1


def test_a_live_pod_that_nobody_reaches_delays_until_it_has_fenced_itself_off() -> None:
    simulation = at_rest(policy("acme"))
    simulation.store.lose_contact(NAMESPACE, simulation.pod("pod-1").uid)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(FENCE_S - 10)
    assert phase(simulation) == "AwaitingAcks"
    assert "pod-1" in simulation.status(KIND, "now")["message"]
    simulation.advance(15)
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"] == {"acked": 1, "live": 2, "fenced": 1}
    assert "1 could not be reached" in simulation.status(KIND, "now")["message"]


@pytest.mark.parametrize("ahead_h", [2, -2])
@pytest.mark.parametrize("vanished", [False, True])
def test_a_leader_with_another_clock_waits_again_for_a_pod_that_it_never_heard_of(
    *, vanished: bool, ahead_h: int
) -> None:
    simulation = at_rest(policy("acme"))
    simulation.now += timedelta(hours=4)
    simulation.settle()
    uid = simulation.pod("pod-1").uid
    simulation.store.lose_contact(NAMESPACE, uid)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    if vanished:
        simulation.delete("Pod", "pod-1", seen=False)
    del simulation.acks[uid]
    simulation.now += timedelta(hours=ahead_h)
    simulation.restart()
    simulation.settle()
    simulation.advance(FENCE_S - 10)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(25)
    assert phase(simulation) == "Complete"


def test_a_pod_that_says_that_its_policy_is_fresh_has_not_fenced_itself_off() -> None:
    simulation = at_rest(policy("acme"))
    before = simulation.bundle().root.revision
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.ack("pod-1", before)
    simulation.advance(FENCE_S + 600)
    assert phase(simulation) == "AwaitingAcks"
    simulation.ack("pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"]["fenced"] == 0


def test_a_pod_that_vanished_just_before_is_counted_too() -> None:
    simulation = at_rest(policy("acme"))
    simulation.delete("Pod", "pod-1")
    simulation.advance(20)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(FENCE_S + 5)
    assert phase(simulation) == "Complete"


def test_a_pod_that_vanished_long_before_is_not() -> None:
    simulation = at_rest(policy("acme"))
    simulation.delete("Pod", "pod-1")
    simulation.advance(FENCE_S + TOKEN_CACHE_S + 5)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "Complete"


@pytest.mark.parametrize("gone", [True, False])
def test_a_pod_whose_containers_ended_delays_nothing(gone: bool) -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.put(pod("pod-1", state="terminated", ready=False))
    if gone:
        simulation.delete("Pod", "pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"]["fenced"] == 0


def test_a_pod_that_was_deleted_before_its_engine_started_delays_nothing() -> None:
    simulation = at_rest(policy("acme"))
    starting = pod("pod-2", ready=False)
    gate = {"name": "gate", "state": {"running": {}}}
    starting["status"] |= {"initContainerStatuses": [gate], "containerStatuses": [_waiting("engine")]}
    simulation.put(starting)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    ended = {"name": "gate", "state": {"terminated": {}}}
    starting["status"] |= {"initContainerStatuses": [ended]}
    simulation.put(starting)
    assert not simulation.pod("pod-2").finished  # kubelet may start its gate again
    last = simulation.kube.objects[("Pod", NAMESPACE, "pod-2")]
    last = {**last, "metadata": {**last["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}}
    for key in simulation.store.forget("Pod", NAMESPACE, "pod-2", last):
        simulation.queue.add(key)
    simulation.settle()
    assert phase(simulation) == "Complete"


@pytest.mark.parametrize("on_stale", ["Fence", "ServeStale"])
def test_a_pod_that_waits_for_its_image_delays_until_a_start_would_have_been_reported_and_no_longer(
    on_stale: str,
) -> None:
    simulation = at_rest(policy("acme"), onStale=on_stale)
    simulation.put(pod("pod-2", state="waiting", ready=False))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.settle()
    message = simulation.status(KIND, "now")["message"]
    assert phase(simulation) == "AwaitingAcks", "it may have started, and read its policy, a moment before"
    assert "waiting for pod-2 since 2026-01-01T" in message
    simulation.advance(8)
    assert simulation.status(KIND, "now")["message"] == message, "nothing is written while it waits"
    simulation.advance(3)
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"] == {"acked": 2, "live": 2, "fenced": 0}


def test_a_pod_whose_start_is_reported_after_the_revocation_must_acknowledge() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    simulation.put(pod("pod-2", state="waiting", ready=False))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.put(pod("pod-2", ready=False))
    simulation.advance(60)
    assert phase(simulation) == "AwaitingAcks"
    assert "pod-2" in simulation.status(KIND, "now")["message"]
    simulation.ack("pod-2")
    simulation.settle()
    assert phase(simulation) == "Complete"


@pytest.mark.parametrize("ended", ["deleted", "rejected", "marked"])
def test_a_pod_that_never_started_delays_nothing_once_it_is_gone_or_rejected_but_a_deletion_mark_is_no_end(
    ended: str,
) -> None:
    simulation = at_rest(policy("acme"))
    waits = pod("pod-2", state="waiting", ready=False)
    simulation.put(waits)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    if ended == "deleted":
        simulation.delete("Pod", "pod-2")
    elif ended == "rejected":
        rejected = {"phase": "Failed", "reason": "OutOfcpu", "startTime": "2026-01-01T00:00:00Z"}
        simulation.put({**waits, "status": rejected})
    else:
        simulation.put({**waits, "metadata": {**waits["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}})
    simulation.advance(2)
    assert phase(simulation) == ("AwaitingAcks" if ended == "marked" else "Complete")
    simulation.advance(10)
    assert phase(simulation) == "Complete"


def test_a_new_leader_waits_again_for_the_start_of_a_waiting_pod_to_be_reported() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    simulation.put(pod("pod-2", state="waiting", ready=False))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.now += timedelta(hours=1)
    simulation.restart()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(11)
    assert phase(simulation) == "Complete"


def _waiting(container: str) -> dict[str, Any]:
    return {"name": container, "state": {"waiting": {"reason": "PodInitializing"}}}


def test_with_serve_stale_a_silent_pod_is_never_counted_as_fenced() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(23 * 3600)
    assert phase(simulation) == "AwaitingAcks"
    simulation.ack("pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"


@pytest.mark.parametrize("rolled", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_after_an_outage_longer_than_the_deadline_pods_are_heard_before_an_invalidation_ends(
    *, rolled: bool, answers: bool
) -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale", deletionDeadline="10m")
    started = {} if rolled else {"startTime": format_timestamp(simulation.now)}
    simulation.put({**invalidation("now", scope={"tenant": "acme"}), "status": started})
    if rolled:
        simulation.settle()
        assert phase(simulation) == "AwaitingAcks"
    simulation.now += timedelta(minutes=20)
    simulation.restart()
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    if answers:
        simulation.ack("pod-0")
        simulation.ack("pod-1")
    simulation.advance(70)
    assert phase(simulation) == ("Complete" if answers else "Failed")


def test_a_lazy_invalidation_ends_unproven_at_the_domains_deadline_and_names_the_pods_that_may_still_serve() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale", deletionDeadline="10m")
    before = simulation.entry("acme").keyspace
    simulation.put(
        invalidation("now", scope={"tenant": "acme"}), invalidation("own", scope={"all": True}, deadline="1h")
    )
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(590)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(20)
    assert phase(simulation) == "Failed"
    assert phase(simulation, "own") == "AwaitingAcks", "its own deadline counts"
    assert simulation.condition("CacheInvalidation", "now", "Failed") == ("True", "NotProven")
    assert "pod-1" in simulation.status("CacheInvalidation", "now")["message"]
    assert "pod-0" not in simulation.status("CacheInvalidation", "now")["message"]
    assert simulation.entry("acme").keyspace != before, "epochs stay rolled"


def test_a_lazy_invalidation_without_a_domain_ends_unproven_at_the_deadline() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    found, start = simulation.world.invalidations["now"], simulation.now
    pending = found.model_copy(update={"status": CacheInvalidationStatus()})
    keyless = replace(simulation.world, domain_key=None, invalidations={"now": pending})
    (write,) = plan_invalidation(keyless, "now", start).statuses
    assert write.status["startTime"] == format_timestamp(start)
    waiting = found.model_copy(update={"status": CacheInvalidationStatus(start_time=start)})
    keyless = replace(keyless, invalidations={"now": waiting})
    assert all(
        "phase" not in one.status for one in plan_invalidation(keyless, "now", start + timedelta(hours=23)).statuses
    )
    (write,) = plan_invalidation(keyless, "now", start + timedelta(hours=25)).statuses
    assert write.status["phase"] == "Failed"
    assert "NotProven" in {one["reason"] for one in write.status["conditions"]}
    assert "no epoch is rolled" in write.status["message"]


def test_a_lazy_invalidation_whose_bundles_do_not_follow_ends_unproven_at_the_deadline() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    found, world = simulation.world.invalidations["now"], simulation.world
    rolling = found.model_copy(
        update={"status": found.status.model_copy(update={"phase": Phase.ROLLING, "rolled_time": None})}
    )
    stuck = replace(world, bundles={}, invalidations={"now": rolling})
    start = found.status.start_time
    assert start is not None
    assert not plan_invalidation(stuck, "now", start + timedelta(hours=23)).statuses
    (write,) = plan_invalidation(stuck, "now", start + timedelta(hours=25)).statuses
    assert write.status["phase"] == "Failed"
    assert "not every bundle" in write.status["message"]


def test_without_pods_an_invalidation_completes_at_once() -> None:
    simulation = at_rest(policy("acme"), pods=0)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_a_pod_that_vanished_while_no_operator_ran_is_counted_too() -> None:
    simulation = at_rest(policy("acme"))
    simulation.kube.remove("Pod", NAMESPACE, "pod-1")
    simulation.restart()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(FENCE_S + TOKEN_CACHE_S + 5)
    assert phase(simulation) == "Complete"


def test_a_silent_pod_fences_itself_by_the_rules_that_it_knows_not_by_todays() -> None:
    simulation = at_rest(policy("acme"), staleAfter="24h")
    simulation.edit("CacheDomain", "default", staleAfter="10s")
    simulation.settle()
    simulation.ack("pod-0")
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(3600)
    assert phase(simulation) == "AwaitingAcks"
    simulation.ack("pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_pods_of_a_model_that_was_deleted_are_waited_for_until_they_end() -> None:
    simulation = at_rest(policy("acme"), model("gone"), pod("pod-g", "gone"))
    simulation.come_to_rest()
    simulation.delete("CachedModel", "gone")
    simulation.put(invalidation("now", scope={"all": True}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.advance(FENCE_S + 5)
    assert phase(simulation) == "AwaitingAcks"
    simulation.put(pod("pod-g", "gone", state="terminated", ready=False))
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_a_pod_that_the_control_plane_calls_failed_is_not_ended() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    lost = pod("pod-1", ready=False)
    lost["status"]["phase"] = "Failed"
    simulation.put(lost)
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
