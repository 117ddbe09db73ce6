"""A tier that is deleted and created again under its name, before Kubernetes removed what the first one left."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.objects import names
from kvstrata.reconcile.secrets import decode
from tests.support.objects import NAMESPACE, redis_tier
from tests.support.worlds import Simulation

MANAGED = {"one shard": {}, "three": {"shards": 3}}


def made_again(managed: dict[str, Any]) -> Simulation:
    """A tier at rest that was deleted, its finalizer by force, and is there again; nothing of the first one has been
    collected yet."""
    simulation = Simulation(redis_tier(redis={"managed": managed}))
    simulation.come_to_rest()
    simulation.kube.api._collects = False
    raw = simulation.kube.objects[("CacheTier", NAMESPACE, "shared")]
    simulation.kube.put({**raw, "metadata": {**raw["metadata"], "finalizers": []}})
    simulation.kube.remove("CacheTier", NAMESPACE, "shared")
    fresh = {"name": "shared", "namespace": NAMESPACE, "uid": "uid-second"}
    simulation.put({**raw, "metadata": fresh, "status": {}})
    simulation.advance(10)
    return simulation


def left(simulation: Simulation) -> list[tuple[str, str]]:
    """What is there of the first tier, Secrets last."""
    found = [
        (kind, name)
        for (kind, _, name), raw in simulation.kube.objects.items()
        for owner in raw["metadata"].get("ownerReferences") or ()
        if owner["name"] == "shared" and owner["uid"] != "uid-second"
    ]
    return sorted(found, key=lambda one: (one[0] == "Secret", one))


def password(simulation: Simulation) -> bytes:
    return decode(simulation.kube.objects[("Secret", NAMESPACE, names.redis_auth("shared"))])["admin-password"]


@pytest.mark.parametrize("managed", MANAGED.values(), ids=MANAGED)
@pytest.mark.parametrize("secrets_first", [True, False])
def test_nothing_is_made_with_what_is_about_to_go_and_everything_once_it_is_gone(
    managed: dict[str, Any], secrets_first: bool
) -> None:
    simulation = made_again(managed)
    before = password(simulation)
    remains = left(simulation)
    assert {kind for kind, _ in remains} >= {"Secret", "StatefulSet", "Service"}
    versions = {slot: raw["metadata"]["resourceVersion"] for slot, raw in simulation.kube.objects.items()}
    for kind, name in reversed(remains) if secrets_first else remains:
        assert simulation.condition("CacheTier", "shared", "Ready") == ("False", "PredecessorRemains"), (kind, name)
        assert simulation.condition("CacheTier", "shared", "Stalled") == ("", "")
        assert (
            simulation.kube.objects[(kind, NAMESPACE, name)]["metadata"]["resourceVersion"]
            == versions[(kind, NAMESPACE, name)]
        ), "what is about to go was written to"
        simulation.delete(kind, name)
        simulation.settle()
    simulation.come_to_rest()
    assert left(simulation) == []
    assert password(simulation) != before
    for kind, name in remains:
        (owner,) = simulation.kube.objects[(kind, NAMESPACE, name)]["metadata"]["ownerReferences"]
        assert owner["uid"] == "uid-second"
    assert simulation.condition("CacheTier", "shared", "Ready")[1] != "PredecessorRemains"
    assert simulation.unsettled() == {}


def test_what_stands_in_the_way_is_named_with_what_to_do_if_it_stays() -> None:
    simulation = made_again({})
    (ready,) = (c for c in simulation.status("CacheTier", "shared")["conditions"] if c["type"] == "Ready")
    assert ready["message"].startswith("Secret kvs-shared-redis-auth belongs to a CacheTier shared that was deleted")
    assert ready["message"].endswith("If it stays, delete it")
