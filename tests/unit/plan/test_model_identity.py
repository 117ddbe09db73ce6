"""Fingerprints in a CachedModel's status, and the condition that follows."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.objects import names
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, policy
from tests.support.worlds import Simulation

ONE, OTHER = "1" * 16, "2" * 16
RESTARTED = "kubectl.kubernetes.io/restartedAt"
"""The annotation that `kubectl rollout restart` writes."""


class Scene:
    """A model with two pods, whose gates report fingerprints as a test says."""

    def __init__(self) -> None:
        self.simulation = Simulation(
            cpu_tier(), model(tiers=("cpu",), replicas=2), pod("pod-0"), pod("pod-1"), policy("acme")
        )
        self.simulation.come_to_rest()

    def report(self, number: int, **fields: Any) -> None:
        """Have a pod's gate report these fields."""
        world = self.simulation.world
        found = next(one for one in world.live_pods("tiny") if one.name == f"pod-{number}")
        self.simulation._report(found, replace(world.states[found.uid].state, **fields))
        self.simulation.settle()

    @property
    def verdict(self) -> tuple[str, str]:
        return self.simulation.condition("CachedModel", "tiny", "IdentityResolved")

    @property
    def status(self) -> Any:
        return self.simulation.world.models["tiny"].status


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_pods_with_one_fingerprint_are_resolved(scene: Scene) -> None:
    for number in (0, 1):
        scene.report(number, identity="a" * 16, fingerprint=ONE, facts={"vllm": "1", "files": "f"})
    assert scene.verdict == ("True", "IdentityResolved")
    (row,) = scene.status.fingerprints
    assert (row.fingerprint, row.identity, row.pods) == (ONE, "a" * 16, 2)
    assert [(fact.name, fact.value) for fact in row.facts] == [("files", "f"), ("vllm", "1")]


def test_pods_of_one_identity_with_different_fingerprints_share_nothing_and_status_names_the_difference(
    scene: Scene,
) -> None:
    scene.report(0, identity="a" * 16, fingerprint=ONE, facts={"vllm": "1", "files": "f"})
    scene.report(1, identity="a" * 16, fingerprint=OTHER, facts={"vllm": "2", "files": "f"})
    assert scene.verdict == ("False", "FingerprintsDiffer")
    condition = next(one for one in scene.status.conditions if one.type == "IdentityResolved")
    assert "vllm (1, 2)" in condition.message
    assert "files" not in condition.message
    assert f"kubectl -n {NAMESPACE} rollout restart deployment {names.model_child('tiny')}" in condition.message
    assert sorted(row.fingerprint for row in scene.status.fingerprints) == [ONE, OTHER]


def test_other_fingerprints_restart_no_pod_and_a_restart_that_a_user_orders_stays_in_the_template(scene: Scene) -> None:
    simulation, key = scene.simulation, ("Deployment", NAMESPACE, names.model_child("tiny"))
    before = simulation.kube.objects[key]["spec"]["template"]
    scene.report(1, fingerprint=OTHER)
    simulation.advance(3600)
    assert simulation.kube.objects[key]["spec"]["template"] == before
    ordered = copy.deepcopy(simulation.kube.objects[key])
    ordered["spec"]["template"]["metadata"].setdefault("annotations", {})[RESTARTED] = "2026-01-01T01:00:00Z"
    simulation.put(ordered)
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:2", "replicas": 2})
    simulation.come_to_rest()
    after = simulation.kube.objects[key]["spec"]["template"]
    assert after["spec"]["containers"][0]["image"] != before["spec"]["containers"][0]["image"]
    assert after["metadata"]["annotations"][RESTARTED] == "2026-01-01T01:00:00Z"
    assert simulation.unsettled() == {}


def test_pods_of_two_declared_identities_differ_as_they_should_during_a_rollout(scene: Scene) -> None:
    scene.report(0, identity="a" * 16, fingerprint=ONE)
    scene.report(1, identity="b" * 16, fingerprint=OTHER)
    assert scene.verdict == ("True", "IdentityResolved")


def test_a_pod_without_a_fingerprint_is_named_with_its_reason_and_the_model_stays_ready(scene: Scene) -> None:
    for number in (0, 1):
        scene.report(number, identity="a" * 16, fingerprint=ONE)
    ready = scene.simulation.condition("CachedModel", "tiny", "Ready")
    scene.report(1, fingerprint="", unresolved="OSError: no weights")
    assert scene.verdict == ("False", "FingerprintMissing")
    condition = next(one for one in scene.status.conditions if one.type == "IdentityResolved")
    assert condition.message == "pod pod-1 serves without reuse: OSError: no weights"
    assert scene.simulation.condition("CachedModel", "tiny", "Ready") == ready


def test_a_pod_with_a_version_that_is_not_governed_has_no_fingerprint_for_that_reason(scene: Scene) -> None:
    scene.report(1, fingerprint="", withheld="ungoverned", unresolved="engine: LMCache 0.5.7")
    condition = next(one for one in scene.status.conditions if one.type == "IdentityResolved")
    assert condition.message == "pod pod-1 serves without reuse: engine: LMCache 0.5.7"
