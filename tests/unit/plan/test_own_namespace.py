"""The operator's own namespace is never served: objects there are refused by name, and nothing is made for them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support import worlds
from tests.support.objects import (
    NAMESPACE,
    Raw,
    cpu_tier,
    domain,
    group,
    invalidation,
    model,
    policy,
    pool,
    redis_tier,
)
from tests.support.worlds import CONTEXT, Simulation

GIVEN = (
    domain(), cpu_tier(), redis_tier(), model(tiers=("cpu",)), policy("acme"), group("ops", "acme"), pool("prompt"),
    invalidation("now", scope={"tenant": "acme"}),
)  # fmt: skip


def own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the simulated namespace be the operator's."""
    monkeypatch.setattr(worlds, "CONTEXT", replace(CONTEXT, operator_namespace=NAMESPACE))


@pytest.mark.parametrize("given", [GIVEN, GIVEN[1:]], ids=["with a CacheDomain", "without"])
def test_objects_there_are_refused_by_name_and_nothing_is_made(
    monkeypatch: pytest.MonkeyPatch, given: tuple[Raw, ...]
) -> None:
    own(monkeypatch)
    simulation = Simulation(*given)
    simulation.advance(600)
    for raw in given:
        slot = raw["kind"], raw["metadata"]["name"]
        assert simulation.condition(*slot, "Stalled") == ("True", "OperatorNamespace"), slot
        assert simulation.condition(*slot, "Ready") == ("False", "OperatorNamespace"), slot
    made = {(kind, name) for kind, _, name in simulation.kube.objects if kind != "Event"}
    assert made == {(raw["kind"], raw["metadata"]["name"]) for raw in given}
    assert simulation.asked == [], "no server of a tier is asked"
    assert not simulation.unsettled()


def test_objects_that_an_earlier_version_served_there_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(*GIVEN[:4], policy("acme", deletionPolicy="Abandon"))
    simulation.come_to_rest()
    own(monkeypatch)
    simulation.enqueue_all()
    simulation.advance(60)
    assert simulation.condition("TenantCachePolicy", "acme", "Stalled") == ("True", "OperatorNamespace")
    assert "acme" in simulation.bundle().entries, "pods keep their policy"
    simulation.delete("TenantCachePolicy", "acme")
    simulation.advance(60)
    assert "acme" not in simulation.bundle().entries
    simulation.delete("CachedModel", "tiny")
    simulation.advance(60)
    left = {(kind, name) for kind, _, name in simulation.kube.objects}
    assert left.isdisjoint({("TenantCachePolicy", "acme"), ("CachedModel", "tiny"), ("Deployment", "kvs-tiny")})


def test_other_namespaces_are_served() -> None:
    simulation = Simulation(*GIVEN[:5])
    simulation.come_to_rest()
    assert simulation.condition("TenantCachePolicy", "acme", "Stalled")[1] != "OperatorNamespace"
    assert simulation.entry("acme").keyspace
