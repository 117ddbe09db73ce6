"""List and diff: whatever no event told is found, and nothing newer is forgotten for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.clients.resources import Resource
from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.refs import BUNDLE, Key
from tests.support.objects import NAMESPACE, Raw, cpu_tier, model, policy, redis_tier
from tests.support.worlds import Simulation, finish


def at_rest() -> Simulation:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"), policy("globex"))
    simulation.come_to_rest()
    return simulation


def resync(simulation: Simulation) -> set[Key]:
    """One pass, as the operator makes it every ten minutes; return what it reported as missed."""
    missed: set[Key] = set()
    finish(simulation.resync.objects(missed.add))
    finish(simulation.resync.secrets())
    simulation.enqueue_all()
    simulation.come_to_rest()
    return missed


def test_a_pass_over_a_world_that_is_known_finds_and_writes_nothing() -> None:
    simulation = at_rest()
    simulation.kube.log.clear()
    assert resync(simulation) == set()
    assert [entry for entry in simulation.kube.log if entry[0] != "put"] == []


def test_objects_that_came_changed_or_went_without_an_event_are_found() -> None:
    simulation = at_rest()
    simulation.kube.put(policy("late"))
    simulation.kube.put(policy("acme", suspend=True))
    simulation.kube.remove("TenantCachePolicy", NAMESPACE, "globex")
    simulation.kube.take_events()
    missed = resync(simulation)
    assert {Key("TenantCachePolicy", NAMESPACE, name) for name in ("late", "acme", "globex")} <= missed
    assert set(simulation.bundle().entries) == {"acme", "late"}
    assert simulation.entry("acme").suspended


def test_an_object_that_cannot_be_read_is_reported_by_name_and_all_others_are_compared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    simulation = at_rest()
    simulation.kube.put(policy("late"))
    simulation.kube.take_events()
    observe = simulation.store.observe

    def fails(raw: Mapping[str, Any]) -> frozenset[Key]:
        if raw["metadata"]["name"] == "acme":
            raise TypeError("odd")
        return observe(raw)

    monkeypatch.setattr(simulation.store, "observe", fails)
    missed: set[Key] = set()
    finish(simulation.resync.objects(missed.add))
    assert Key("TenantCachePolicy", NAMESPACE, "late") in missed
    assert Key("TenantCachePolicy", NAMESPACE, "acme") not in missed, "it is known as it was"
    (reported,) = (one for one in caplog.records if one.levelno == logging.ERROR)
    assert (reported.kind, reported.object) == ("TenantCachePolicy", "acme")  # type: ignore[attr-defined]


def test_a_child_that_went_without_an_event_comes_back() -> None:
    simulation = at_rest()
    simulation.kube.remove("Service", NAMESPACE, "kvs-tiny")
    simulation.kube.take_events()
    resync(simulation)
    assert ("Service", NAMESPACE, "kvs-tiny") in simulation.kube.objects


def test_a_bundle_or_certificate_that_somebody_deleted_comes_back() -> None:
    simulation = at_rest()
    before = simulation.bundle()
    for name in ("kvs-tiny-bundle", "kvs-tiny-gate-tls"):
        simulation.kube.remove("Secret", NAMESPACE, name)
    resync(simulation)
    assert ("Secret", NAMESPACE, "kvs-tiny-gate-tls") in simulation.kube.objects
    assert ("Secret", NAMESPACE, "kvs-tiny-bundle") in simulation.kube.objects
    assert simulation.bundle().root.revision > before.root.revision
    assert {t: e.keyspace for t, e in simulation.bundle().entries.items()} == {
        t: e.keyspace for t, e in before.entries.items()
    }


def test_a_bundle_that_was_read_before_a_commit_does_not_replace_it() -> None:
    simulation = at_rest()
    committed = simulation.world.bundles["tiny"]
    newer = replace(committed, resource_version=str(int(committed.resource_version) + 1000))
    simulation.store.domain(NAMESPACE).bundles["tiny"] = newer
    finish(simulation.resync.secrets())
    assert simulation.world.bundles["tiny"] is newer
    assert Key(BUNDLE, NAMESPACE, "tiny") in set(simulation.store.all_keys())


def test_a_namespace_that_goes_and_may_not_be_looked_into_holds_up_nobody() -> None:
    simulation = at_rest()
    simulation.kube.put(policy("late"))
    simulation.kube.take_events()
    listed = simulation.kube.list

    async def forbidden(resource: Resource, namespace: str | None, selector: str | None = None) -> AsyncIterator[Raw]:
        if resource.kind != "TenantCachePolicy":
            raise KubeError(403, "Forbidden", f"{resource.plural} is forbidden")
        async for found in listed(resource, namespace, selector):
            yield found

    simulation.kube.list = forbidden  # type: ignore[method-assign,assignment]
    with pytest.raises(KubeError):
        resync(simulation)
    simulation.kube.api.ending.add(NAMESPACE)
    assert Key("TenantCachePolicy", NAMESPACE, "late") in resync(simulation)
    assert "tiny" in simulation.world.models, "what cannot be seen is not taken for gone"


def endpoints_of_the_api_server(*addresses: str) -> Raw:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "kubernetes", "namespace": "default"},
        "endpoints": [{"addresses": [one]} for one in addresses],
        "ports": [{"name": "https", "port": 6443}],
    }


def test_addresses_at_which_the_api_server_listens_are_refused_to_tiers_by_pods_too() -> None:
    external = {"external": {"endpoints": ["far:6379"]}}
    simulation = Simulation(redis_tier("far", redis=external), model(tiers=("far",)), policy("acme"))
    allowed = AllowedServers(reserved=("10.96.0.1",))
    simulation.come_to_rest()
    for addresses in (("192.0.2.8", "192.0.2.7"), ("192.0.2.9",)):
        simulation.kube.put(endpoints_of_the_api_server(*addresses))
        simulation.kube.take_events()
        finish(simulation.resync.api_server(allowed))
        resync(simulation)
        reserved = ("10.96.0.1", *(f"[{one}]:6443" for one in sorted(addresses)))
        assert simulation.bundle().root.tiers[0].allowed == AllowedServers(reserved=reserved)


def test_without_the_right_to_read_them_the_service_of_the_api_server_is_refused_and_a_line_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def forbidden(*_: object) -> None:
        raise KubeError(403, "Forbidden", "endpointslices is forbidden")

    simulation = at_rest()
    allowed = simulation.store.allowed_servers = AllowedServers(reserved=("10.96.0.1",))
    monkeypatch.setattr(simulation.kube, "get", forbidden)
    finish(simulation.resync.api_server(AllowedServers()))
    assert simulation.store.allowed_servers == allowed
    (line,) = caplog.records
    assert "API server" in line.getMessage()
