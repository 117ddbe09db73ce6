"""Whom a change concerns that pools look at: what pods can be asked, models, tiers, and who reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.messages.pod_state import PodState
from kvstrata.model.pods import VerifiedState
from kvstrata.model.refs import Key
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, pool
from tests.support.worlds import Simulation

POOL = Key("PrefixPool", NAMESPACE, "manual")


def world() -> Simulation:
    other = model("other", tiers=("cpu",))
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), other, pod("pod-0"), pod("pod-1", "other"))
    simulation.put(pool("manual"))
    simulation.come_to_rest()
    return simulation


def said(simulation: Simulation, name: str = "pod-0", *, in_contact: bool = True, **changes: Any) -> frozenset[Key]:
    """The keys that a pod's next word concerns."""
    found = simulation.pod(name)
    state: PodState = replace(simulation.acks[found.uid], **changes)
    if not in_contact:
        simulation.store.lose_contact(NAMESPACE, found.uid)
    return simulation.store.observe_state(found, NAMESPACE, VerifiedState(state, simulation.now))


@pytest.mark.parametrize("changes", [{"gate_boot": "new"}, {"cache_boot": ""}, {"engine_ready": False}])
def test_a_pod_whose_processes_change_concerns_its_models_pools(changes: dict[str, Any]) -> None:
    assert POOL in said(world(), **changes)
    assert POOL not in said(world(), "pod-1", **changes)


def test_a_pod_that_is_heard_of_again_concerns_its_models_pools() -> None:
    assert POOL in said(world(), in_contact=False)


def test_a_pod_that_says_the_same_concerns_no_pool() -> None:
    assert POOL not in said(world(), fresh_age_ms=5)


def test_a_pod_that_appears_or_goes_concerns_its_models_pools() -> None:
    simulation = world()
    simulation.kube.put(pod("pod-2"))
    raw = simulation.kube.objects["Pod", NAMESPACE, "pod-2"]
    assert POOL in simulation.store.observe(raw)
    assert POOL in simulation.store.forget("Pod", NAMESPACE, "pod-2", raw)


def test_an_edited_model_concerns_its_own_pools_and_an_edited_tier_all() -> None:
    simulation = world()

    def observed(kind: str, name: str, **spec: Any) -> frozenset[Key]:
        raw = simulation.kube.objects[kind, NAMESPACE, name]
        version = str(10_000 + len(spec) + int(raw["metadata"]["resourceVersion"]))
        metadata = {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1, "resourceVersion": version}
        return simulation.store.observe({**raw, "metadata": metadata, "spec": {**raw["spec"], **spec}})

    engine = {"image": "engine:1", "replicas": 1, "args": ["--max-num-seqs", "8"]}
    assert POOL not in observed("CachedModel", "other", engine=engine)
    assert POOL in observed("CachedModel", "tiny", engine=engine)
    assert POOL in observed("CacheTier", "cpu", capacityPerPod="2Gi")


def test_a_pod_that_went_leaves_nothing_behind() -> None:
    simulation = world()
    uid = simulation.pod("pod-0").uid
    domain = simulation.store.domain(NAMESPACE)
    for facts in (domain.renders, domain.warmed, domain.holdings):
        facts[uid] = {}  # type: ignore[assignment]
    simulation.delete("Pod", "pod-0")
    assert not any(uid in facts for facts in (domain.renders, domain.warmed, domain.holdings))
