"""Events record what a status write changed, each once; a status at rest causes none."""

from __future__ import annotations

from typing import Any

from kvstrata.reconcile.events import LATE_S
from tests.support.objects import NAMESPACE, cpu_tier, domain, model, pod, policy
from tests.support.worlds import Simulation
from tests.unit.plan.test_model_pods import observed
from tests.unit.reconcile.erasing import World
from tests.unit.reconcile.erasure_stories import acked, order, run, world


def events(simulation: Simulation, name: str) -> list[tuple[str, str]]:
    """Reasons and types of the Events about an object, in the order in which they were written."""
    found: list[Any] = [raw for (kind, _, _), raw in simulation.kube.objects.items() if kind == "Event"]
    return [(one["reason"], one["type"]) for one in found if one["involvedObject"]["name"] == name]


def test_a_model_that_stalls_and_recovers_has_an_event_of_each_and_none_at_rest() -> None:
    simulation = Simulation(domain(), cpu_tier(), model(tiers=("cpu",)))
    simulation.advance(5)
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: small"}
    observed(simulation, conditions=[refused])
    assert events(simulation, "tiny") == [("Stalled", "Warning")]
    simulation.enqueue_all()
    simulation.advance(600)
    simulation.restart()
    simulation.advance(60)
    assert events(simulation, "tiny") == [("Stalled", "Warning")]
    simulation.put(pod("pod-0"))
    simulation.roll_out()
    simulation.ack_all()
    simulation.come_to_rest()
    assert events(simulation, "tiny") == [("Stalled", "Warning"), ("Recovered", "Normal")]


def test_only_a_change_that_pods_enforce_late_has_an_event() -> None:
    simulation = Simulation(domain(), cpu_tier(), model(tiers=("cpu",)), pod("pod-0"), policy("acme"))
    simulation.come_to_rest()
    assert events(simulation, "acme") == []
    for wait_s, expected in ((LATE_S / 2, []), (LATE_S + 5, [("EnforcedLate", "Warning")])):
        simulation.edit("TenantCachePolicy", "acme", suspend=wait_s < LATE_S)
        simulation.advance(wait_s)
        simulation.ack_all()
        simulation.come_to_rest()
        assert simulation.condition("TenantCachePolicy", "acme", "Enforced")[0] == "True"
        assert events(simulation, "acme") == expected


def test_the_time_before_a_wrong_spec_is_corrected_makes_no_enforcement_late() -> None:
    simulation = Simulation(domain(), cpu_tier(), model(tiers=("cpu",)), pod("pod-0"), policy("acme"))
    simulation.come_to_rest()
    simulation.edit("TenantCachePolicy", "acme", budgets=[{"tier": "gone", "limit": "1Mi"}])
    simulation.advance(LATE_S * 10)
    assert simulation.condition("TenantCachePolicy", "acme", "Enforced") == ("False", "LastValidInForce")
    simulation.edit("TenantCachePolicy", "acme", budgets=[{"tier": "cpu", "limit": "1Mi"}])
    simulation.come_to_rest()
    assert simulation.condition("TenantCachePolicy", "acme", "Enforced")[0] == "True"
    assert "EnforcedLate" not in dict(events(simulation, "acme"))


def test_each_step_of_an_erasure_has_one_event() -> None:
    made = world()

    async def story(w: World) -> None:
        order(w.sim)
        await acked(w)
        await w.until(lambda: w.phase == "Complete")
        w.sim.enqueue_all()
        await w.turn(60)

    run(story, made)
    found = [reason for reason, _ in events(made.sim, "leave")]
    assert found[0] == "Begun"
    steps = ["Begun", "LogicallyInvalid", "KeysRevoked", "Erased", "Verified", "ErasedAndVerified", "ReceiptWritten"]
    assert sorted(found) == sorted(steps)
    assert made.sim.kube.objects[("CacheInvalidation", NAMESPACE, "leave")]["status"]["phase"] == "Complete"
