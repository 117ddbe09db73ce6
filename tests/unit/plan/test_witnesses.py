"""Who may still hold a policy is known to whoever leads next; what has failed goes when its time is up."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from kvstrata.contract.policy.bundle import Rules
from kvstrata.contract.receipt.facts import Target
from kvstrata.contract.receipt.vocabulary import Standing
from kvstrata.model.erasure.facts import Rolled, Witness
from kvstrata.model.erasure.record import Erasure, ErasureRecord
from kvstrata.plan.erasure.gather import reports
from kvstrata.plan.witnesses import account_for, awaited, longest_fence, not_started, witnesses_of
from tests.support.objects import NAMESPACE, cpu_tier, domain, invalidation, model, pod, policy
from tests.support.worlds import Simulation

from .erasures import order

FENCED_AFTER_S = 400
"""More than the domain's staleAfter and maxRequestDuration together."""

SHORT = {"maxRequestDuration": "1m"}


def at_rest() -> Simulation:
    simulation = Simulation(domain(**SHORT), cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.put(pod("pod-0"), pod("pod-1"))
    simulation.come_to_rest()
    return simulation


def witnesses(simulation: Simulation) -> list[str]:
    return [witness["name"] for witness in simulation.status("CachedModel", "tiny")["witnesses"]]


def test_a_pod_holds_nothing_only_if_the_kubelet_reported_that_nothing_of_it_ran() -> None:
    simulation = at_rest()
    unreported = pod("unreported", ready=False)
    restarted = [{"name": "engine", "state": {"waiting": {}}, "restartCount": 1}]
    simulation.put(
        pod("waiting", ready=False, state="waiting"),
        {**unreported, "status": {}},
        {**pod("pending", ready=False), "spec": {}, "status": {}},
        {**pod("restarted"), "status": {"containerStatuses": restarted}},
    )
    empty = not_started(simulation.world)
    assert empty == {simulation.pod(name).uid for name in ("waiting", "pending")}


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_pod_that_vanished_is_waited_for_by_an_operator_that_never_saw_it(restarts: int) -> None:
    simulation = at_rest()
    simulation.delete("Pod", "pod-1")
    simulation.come_to_rest()
    assert witnesses(simulation) == ["pod-1", "pod-0"]
    for _ in range(restarts):
        simulation.restart()
        simulation.come_to_rest()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    status = simulation.status("CacheInvalidation", "now")
    assert [pod["pod"] for pod in status["awaiting"]] == ["pod-1", "pod-0"]
    assert status["phase"] == "AwaitingAcks"
    simulation.advance(FENCED_AFTER_S)
    status = simulation.status("CacheInvalidation", "now")
    assert (status["phase"], status["pods"]["fenced"]) == ("Complete", 1)


def test_a_pod_that_vanished_is_a_witness_until_it_has_fenced_itself_off_and_no_longer() -> None:
    simulation = at_rest()
    simulation.delete("Pod", "pod-1")
    simulation.come_to_rest()
    assert witnesses(simulation) == ["pod-1", "pod-0"]
    simulation.advance(FENCED_AFTER_S)
    assert witnesses(simulation) == ["pod-0"]


def test_what_a_vanished_pod_had_acknowledged_is_known_after_a_restart_amid_a_rollout() -> None:
    simulation = at_rest()
    simulation.put(policy("globex"))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    simulation.delete("Pod", "pod-1")
    simulation.restart()
    simulation.come_to_rest()
    assert witnesses(simulation) == ["pod-1", "pod-0"]
    simulation.advance(FENCED_AFTER_S)
    assert witnesses(simulation) == ["pod-0"]


def test_a_pod_that_vanished_before_its_first_acknowledgement_is_fenced_by_the_longest_rules_that_it_may_have() -> None:
    simulation = at_rest()
    simulation.put(domain(staleAfter="2h", **SHORT))
    simulation.come_to_rest()
    simulation.put(pod("pod-2"))
    simulation.settle()
    simulation.delete("Pod", "pod-2")
    simulation.put(domain(staleAfter="5m", **SHORT))
    simulation.come_to_rest()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    assert simulation.status("CacheInvalidation", "now")["phase"] == "AwaitingAcks"
    simulation.advance(FENCED_AFTER_S)
    assert simulation.status("CacheInvalidation", "now")["phase"] == "AwaitingAcks", "it may have the longer rules"
    simulation.advance(7200)
    status = simulation.status("CacheInvalidation", "now")
    assert (status["phase"], status["pods"]["fenced"]) == ("Complete", 1)


def test_rules_that_every_pod_has_left_count_no_longer() -> None:
    simulation = at_rest()
    simulation.put(domain(staleAfter="2h", **SHORT))
    simulation.come_to_rest()
    assert simulation.bundle().root.fence_s == 7200
    simulation.put(domain(staleAfter="5m", **SHORT))
    simulation.come_to_rest()
    assert simulation.bundle().root.fence_s == 7200, "it is committed before pods have the shorter one"
    simulation.put(policy("globex"))
    simulation.come_to_rest()
    assert simulation.bundle().root.fence_s == 300


def test_a_pod_that_may_serve_stale_policy_is_never_counted_as_fenced() -> None:
    simulation = at_rest()
    simulation.put(domain(onStale="ServeStale", **SHORT))
    simulation.come_to_rest()
    simulation.put(pod("pod-2"))
    simulation.settle()
    simulation.delete("Pod", "pod-2")
    simulation.put(domain(**SHORT))
    simulation.come_to_rest()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.advance(FENCED_AFTER_S)
    assert simulation.status("CacheInvalidation", "now")["phase"] == "AwaitingAcks"


def test_a_pod_whose_containers_were_never_reported_may_have_started_them() -> None:
    simulation = at_rest()
    unreported = pod("pod-2", ready=False)
    unreported["status"] = {"phase": "Pending", "conditions": []}
    simulation.put(unreported)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.ack("pod-1")
    simulation.settle()
    assert [one["pod"] for one in simulation.status("CacheInvalidation", "now")["awaiting"]] == [
        "pod-0",
        "pod-1",
        "pod-2",
    ]
    assert simulation.status("CacheInvalidation", "now")["phase"] == "AwaitingAcks"
    simulation.put(pod("pod-2", state="waiting", ready=False))
    simulation.settle()
    assert simulation.status("CacheInvalidation", "now")["phase"] == "AwaitingAcks", "it may have started since"
    simulation.advance(11)
    assert simulation.status("CacheInvalidation", "now")["phase"] == "Complete"


def test_a_pod_that_the_kubelet_rejected_is_no_witness() -> None:
    simulation = at_rest()
    rejected = pod("pod-2", ready=False)
    rejected["status"] = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "startTime": "2026-01-01T00:00:00Z"}
    simulation.put(rejected)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    assert simulation.status("CacheInvalidation", "now")["phase"] == "Complete"
    assert witnesses(simulation) == ["pod-0", "pod-1"]


def test_a_pod_that_is_bound_after_the_revocation_and_never_starts_is_not_waited_for() -> None:
    simulation = at_rest()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    unreported = pod("pod-2", ready=False)
    unreported["status"] = {"phase": "Pending"}
    simulation.put(unreported)
    simulation.ack("pod-0")
    simulation.ack("pod-1")
    simulation.settle()
    assert simulation.status("CacheInvalidation", "now")["phase"] == "Complete"


def test_rules_of_a_bundle_that_is_lost_may_have_been_any() -> None:
    simulation = at_rest()
    world = replace(simulation.store.world(NAMESPACE), bundles={})
    assert longest_fence(world, "tiny", Rules(), simulation.now) == (None, None)
    assert longest_fence(replace(world, pods={}, states={}), "tiny", Rules(), simulation.now) == (300, 1200)


def test_requests_of_a_gate_of_the_version_before_may_run_for_the_drain_timeout() -> None:
    assert Rules(drain_timeout_s=3600).end_s == 300 + 3600
    assert Rules(on_stale="ServeStale").end_s is None


def test_a_pod_that_vanishes_after_the_revocation_and_is_in_no_list_is_waited_for() -> None:
    simulation = at_rest()
    simulation.delete("Pod", "pod-1")
    now, world = simulation.now, simulation.store.world(NAMESPACE)
    account = account_for(world, (), {"tiny": simulation.bundle().root.revision + 1}, now)
    assert [one.pod for one in account.open] == ["pod-0", "pod-1"]
    later = now + timedelta(seconds=FENCED_AFTER_S)
    assert [one.pod for one in account_for(world, (), {"tiny": 99}, later).open] == ["pod-0"]


def test_of_more_pods_than_a_status_holds_those_that_vanished_stay() -> None:
    simulation = at_rest()
    simulation.delete("Pod", "pod-1")
    world = simulation.store.world(NAMESPACE)
    assert [one.pod for one in witnesses_of(world, "tiny", simulation.now)][:1] == ["pod-1"]


def test_of_more_pods_than_an_invalidation_holds_vanished_ones_of_every_model_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstrata.plan.kinds.invalidation.MAX_AWAITING", 2)
    simulation = at_rest()
    simulation.put(model("other"), pod("one", "other"), pod("two", "other"), pod("three", "other"))
    simulation.come_to_rest()
    simulation.delete("Pod", "pod-1")
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    awaiting = simulation.status("CacheInvalidation", "now")["awaiting"]
    assert [one["pod"] for one in awaiting] == ["pod-1", "one"]


def test_an_acknowledgement_of_a_lost_history_proves_nothing_of_an_erasure() -> None:
    simulation = at_rest()
    world = simulation.store.world(NAMESPACE)
    uid = world.pods["tiny"]["pod-0"].uid
    witness = Witness("tiny", uid, "pod-0", ())
    told = Rolled(simulation.now, (), (Target("tiny", 1),), (witness,), ())
    record = ErasureRecord(NAMESPACE, "now", "", (), (), Erasure(order()).with_facts(told))

    def seen(contradicted: bool) -> list[Standing]:
        state = replace(world.states[witness.uid], contradicted=contradicted)
        shown = replace(world, states={**world.states, witness.uid: state})
        return [one.standing for one in reports(shown, record, (), simulation.now)]

    assert seen(contradicted=False) == [Standing.ACKED]
    assert seen(contradicted=True) == []


def test_an_erasure_counts_a_waiting_pod_once_a_start_before_the_revocation_would_have_been_reported() -> None:
    simulation = at_rest()
    simulation.put(pod("pod-2", state="waiting", ready=False))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    assert "pod-2" in [one["pod"] for one in simulation.status("CacheInvalidation", "now")["awaiting"]]
    uid = simulation.pod("pod-2").uid
    rolled = Rolled(simulation.now, (), (Target("tiny", 1),), (Witness("tiny", uid, "pod-2", ()),), ())
    record = ErasureRecord(NAMESPACE, "now", "", (), (), Erasure(order()).with_facts(rolled))

    def seen(after_s: float) -> list[Standing]:
        return [
            one.standing for one in reports(simulation.world, record, (), simulation.now + timedelta(seconds=after_s))
        ]

    assert (seen(9), seen(11)) == ([], [Standing.ENDED])


@pytest.mark.parametrize("ahead_h", [2, -2])
def test_an_erasure_waits_out_fences_by_the_clock_of_the_present_leader(ahead_h: int) -> None:
    simulation = at_rest()
    uid = simulation.pod("pod-1").uid
    simulation.store.lose_contact(NAMESPACE, uid)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    del simulation.acks[uid]
    simulation.now += timedelta(hours=ahead_h)
    simulation.restart()
    world, found = simulation.world, simulation.world.invalidations["now"]
    rolled = Rolled(simulation.now, (), (Target("tiny", 99),), (Witness("tiny", uid, "pod-1", ()),), ())
    record = ErasureRecord(NAMESPACE, "now", "", (), (), Erasure(order()).with_facts(rolled))
    (seen,) = reports(world, record, awaited(world, found), simulation.now + timedelta(seconds=FENCED_AFTER_S))
    assert seen.standing is Standing.FENCED
    assert not list(reports(world, record, awaited(world, found), simulation.now + timedelta(seconds=299)))


def test_an_invalidation_that_failed_is_deleted_when_its_time_to_live_is_over() -> None:
    simulation = at_rest()
    simulation.put(invalidation("now", scope={"tenant": "nobody"}, ttlSecondsAfterFinished=60))
    simulation.advance(30)
    assert simulation.status("CacheInvalidation", "now")["phase"] == "Failed"
    simulation.advance(60)
    assert ("CacheInvalidation", NAMESPACE, "now") not in simulation.kube.objects
