"""Who may still hold a policy is known to whoever leads next; what has failed goes when its time is up."""

from __future__ import annotations

import pytest

from tests.support.objects import NAMESPACE, cpu_tier, domain, invalidation, model, pod, policy
from tests.support.worlds import Simulation

FENCED_AFTER_S = 400
"""More than the domain's staleAfter and drainTimeout together."""


def at_rest() -> Simulation:
    simulation = Simulation(domain(), cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    simulation.put(pod("pod-0"), pod("pod-1"))
    simulation.come_to_rest()
    return simulation


def witnesses(simulation: Simulation) -> list[str]:
    return [witness["name"] for witness in simulation.status("CachedModel", "tiny")["witnesses"]]


@pytest.mark.parametrize("restarts", [1, 2])
def test_a_pod_that_vanished_is_waited_for_by_an_operator_that_never_saw_it(restarts: int) -> None:
    simulation = at_rest()
    simulation.delete("Pod", "pod-1")
    simulation.come_to_rest()
    assert witnesses(simulation) == ["pod-0", "pod-1"]
    for _ in range(restarts):
        simulation.restart()
        simulation.come_to_rest()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    status = simulation.status("CacheInvalidation", "now")
    assert [pod["pod"] for pod in status["awaiting"]] == ["pod-0", "pod-1"]
    assert status["phase"] == "AwaitingAcks"
    simulation.advance(FENCED_AFTER_S)
    status = simulation.status("CacheInvalidation", "now")
    assert (status["phase"], status["pods"]["fenced"]) == ("Complete", 1)


def test_a_pod_that_vanished_is_a_witness_until_it_has_fenced_itself_off_and_no_longer() -> None:
    simulation = at_rest()
    simulation.delete("Pod", "pod-1")
    simulation.come_to_rest()
    assert witnesses(simulation) == ["pod-0", "pod-1"]
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
    assert witnesses(simulation) == ["pod-0", "pod-1"]
    simulation.advance(FENCED_AFTER_S)
    assert witnesses(simulation) == ["pod-0"]


def test_an_invalidation_that_failed_is_deleted_when_its_time_to_live_is_over() -> None:
    simulation = at_rest()
    simulation.put(invalidation("now", scope={"tenant": "nobody"}, ttlSecondsAfterFinished=60))
    simulation.advance(30)
    assert simulation.status("CacheInvalidation", "now")["phase"] == "Failed"
    simulation.advance(60)
    assert ("CacheInvalidation", NAMESPACE, "now") not in simulation.kube.objects
