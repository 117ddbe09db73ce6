"""A pool whose pods have other fingerprints than those that computed its chunks: no pod reads chunks of others."""

from __future__ import annotations

import pytest

from kvstrata.contract.messages.pools import WarmOutcome
from tests.support.renderer import FINGERPRINT
from tests.support.worlds import Simulation
from tests.unit.plan.test_pool_life import message, reason, status, world

OTHER = "2" * 16


@pytest.fixture
def simulation() -> Simulation:
    """A model with two pods of one fingerprint and a warm pool on a shared tier."""
    made = world()
    made.renderer.computed.clear()
    assert identities(made) == [named(made, FINGERPRINT)]
    return made


def named(simulation: Simulation, fingerprint: str) -> str:
    return f"{simulation.world.models['tiny'].status.identity}.{fingerprint}"


def identities(simulation: Simulation) -> list[str]:
    return list(status(simulation)["identities"])


def change(simulation: Simulation, *pods: str, fingerprint: str = OTHER) -> None:
    """Have these pods report another fingerprint, as after a restart with other files."""
    for name in pods:
        simulation.fingerprints[name] = fingerprint
        simulation.ack(name)
    simulation.advance(15)


def test_a_pod_with_another_fingerprint_computes_the_chunks_again_and_the_pool_is_not_ready_before(
    simulation: Simulation,
) -> None:
    simulation.renderer.outcome = WarmOutcome.INCOMPLETE
    change(simulation, "pod-1")
    assert reason(simulation, "Warm") == ("False", "FingerprintChanged")
    assert reason(simulation, "Ready") == ("False", "FingerprintChanged")
    assert f"pod pod-1, with identity {named(simulation, OTHER)}, finds no chunk" in message(simulation, "Warm")
    assert {pod for pod, _ in simulation.renderer.computed} == {"pod-1"}, "the other one has them"
    assert identities(simulation) == [named(simulation, FINGERPRINT)]
    simulation.renderer.outcome = WarmOutcome.STORED
    simulation.advance(60)
    assert reason(simulation, "Ready")[0] == "True"
    assert identities(simulation) == sorted(named(simulation, one) for one in (FINGERPRINT, OTHER))
    assert simulation.unsettled() == {}


def test_chunks_of_a_fingerprint_that_no_pod_has_any_more_do_not_count(simulation: Simulation) -> None:
    change(simulation, "pod-0", "pod-1")
    simulation.advance(60)
    assert simulation.renderer.computed, "they were computed again"
    assert reason(simulation, "Ready")[0] == "True"
    assert identities(simulation) == [named(simulation, OTHER)]


def test_a_pod_that_reuses_nothing_reads_no_pool_and_one_that_no_pod_reads_is_not_ready(
    simulation: Simulation,
) -> None:
    change(simulation, "pod-1", fingerprint="")
    assert reason(simulation, "Ready")[0] == "True"
    change(simulation, "pod-0", fingerprint="")
    assert reason(simulation, "Warm") == ("Unknown", "FingerprintMissing")
    assert reason(simulation, "Ready") == ("False", "FingerprintMissing")
    assert "pod pod-0 serves without reuse" in message(simulation, "Warm")
    assert simulation.renderer.computed == []
    change(simulation, "pod-0", "pod-1", fingerprint=FINGERPRINT)
    assert reason(simulation, "Ready")[0] == "True"
    assert simulation.renderer.computed == [], "a fingerprint that is back finds its chunks"
