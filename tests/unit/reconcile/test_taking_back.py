"""Objects that lost their owner reference: restored from a backup or orphaned, they are taken back by their mark."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from kvstrata.objects import names
from kvstrata.objects.mark import MARK
from tests.support.objects import NAMESPACE, Raw, cpu_tier, redis_tier
from tests.support.worlds import Simulation
from tests.unit.reconcile.test_foreign_objects import (
    APPLIED,
    DOMAIN,
    EACH_CHILD,
    MODEL,
    OBJECTS,
    SECRETS,
    TIER,
    in_the_way,
    live,
    owners,
)
from tests.unit.reconcile.test_webhooks import admitted_with, inject, rewrite

EVERY = (*APPLIED, *SECRETS)
LOST = ("uid", "resourceVersion", "ownerReferences", "managedFields", "creationTimestamp", "generation")


def settled(*more: Raw) -> Simulation:
    simulation = Simulation(*OBJECTS, *more)
    simulation.come_to_rest()
    return simulation


def orphaned(raw: Raw) -> Raw:
    return {**raw, "metadata": {key: value for key, value in raw["metadata"].items() if key != "ownerReferences"}}


def is_owned(simulation: Simulation, kind: str, name: str, owner: tuple[str, str]) -> bool:
    raw = live(simulation, kind, name)
    reference = [(one["kind"], one["name"], one["uid"]) for one in raw["metadata"].get("ownerReferences", ())]
    return reference == [(*owner, live(simulation, *owner)["metadata"]["uid"])]


def as_backup_tools_do(simulation: Simulation, mark_key: bytes | None = None) -> Simulation:
    """Return a cluster with the namespace's objects: without status, UID, owners and managed fields. `mark_key` is the
    key of its installation, by default the same."""
    kept = []
    own = {kind for kind, _ in (TIER, MODEL, DOMAIN)} | {"TenantCachePolicy"}
    for raw in sorted(simulation.kube.objects.values(), key=lambda raw: raw["kind"] in own):
        if raw["metadata"]["namespace"] != NAMESPACE or raw["kind"] in ("Pod", "Event"):
            continue
        metadata = {key: value for key, value in raw["metadata"].items() if key not in (*LOST, "finalizers")}
        kept.append({key: value for key, value in raw.items() if key != "status"} | {"metadata": metadata})
    other = Simulation()
    if mark_key is not None:
        other.store.take_mark_key(mark_key)
    other.put(*kept)
    return other


def test_every_child_has_a_mark() -> None:
    simulation = settled()
    for kind, name, owner in EVERY:
        marked = live(simulation, kind, name)["metadata"]["annotations"][MARK]
        assert marked.startswith("/".join(owner) + "/"), (kind, name)


@EACH_CHILD
def test_a_child_that_loses_its_owner_reference_gets_it_back(kind: str, name: str, owner: tuple[str, str]) -> None:
    simulation = settled()
    before = live(simulation, kind, name)
    simulation.put(orphaned(before))
    simulation.advance(2)
    assert is_owned(simulation, kind, name, owner)
    after = live(simulation, kind, name)
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert [after.get(part) for part in ("spec", "data")] == [before.get(part) for part in ("spec", "data")]
    simulation.come_to_rest()
    assert in_the_way(simulation, owner) == ""
    writes = simulation.kube.writes
    simulation.advance(180)
    assert simulation.kube.writes == writes, "something is written at rest"


def test_data_keys_get_their_owner_back_with_the_same_keys() -> None:
    simulation = Simulation(cpu_tier(), redis_tier(encryption="Required"), *OBJECTS[2:])
    simulation.come_to_rest()
    kept = {name: raw["data"] for (kind, _, name), raw in simulation.kube.objects.items() if "data-keys" in name}
    assert any(kept.values())
    for name in kept:
        simulation.put(orphaned(live(simulation, "Secret", name)))
    simulation.advance(2)
    for name, data in kept.items():
        assert is_owned(simulation, "Secret", name, DOMAIN)
        assert live(simulation, "Secret", name)["data"] == data


@pytest.mark.parametrize("change", [inject, rewrite])
@pytest.mark.parametrize("restarted", [False, True])
def test_children_that_a_webhook_changes_are_taken_back_too(change: Any, *, restarted: bool) -> None:
    simulation = admitted_with(change)
    for kind, name, owner in (("Deployment", "kvs-tiny", MODEL), ("StatefulSet", "kvs-shared-redis-0", TIER)):
        before = live(simulation, kind, name)
        simulation.put(orphaned(before))
        if restarted:
            simulation.restart()
        simulation.advance(2)
        assert is_owned(simulation, kind, name, owner)
        assert live(simulation, kind, name)["spec"] == before["spec"]
    simulation.come_to_rest()
    writes = simulation.kube.writes
    simulation.advance(180)
    assert simulation.kube.writes == writes, "something is written at rest"


def test_a_restored_namespace_is_taken_back_with_its_keys_and_pods() -> None:
    before = settled()
    simulation = as_backup_tools_do(before)
    uids = {(kind, name): live(simulation, kind, name)["metadata"]["uid"] for kind, name, _ in EVERY}
    simulation.come_to_rest()
    for kind, name, owner in EVERY:
        assert is_owned(simulation, kind, name, owner), (kind, name)
        assert live(simulation, kind, name)["metadata"]["uid"] == uids[kind, name]
    for kind, name, owner in SECRETS:
        if "bundle" not in name:
            known, kept = (live(one, kind, name)["data"] for one in (before, simulation))
            assert {**kept, "users.acl": ""} == {**known, "users.acl": ""}, name  # of the new domain
        assert simulation.condition(*owner, "Stalled")[0] != "True"
    assert simulation.unsettled() == {}


def forged(raw: Raw) -> Raw:
    """The same object with other content, as an attacker or a careless copy would have it."""
    raw = orphaned(raw)
    if raw["kind"] == "Secret":
        return {**raw, "data": {**raw["data"], "mine": base64.b64encode(b"known").decode()}}
    raw["metadata"] = {**raw["metadata"], "annotations": {MARK: "CachedModel/tiny/" + "0" * 64}}
    return raw


@EACH_CHILD
def test_without_a_mark_that_holds_it_stays_a_conflict_despite_the_label(
    kind: str, name: str, owner: tuple[str, str]
) -> None:
    before = settled()
    taken = forged(live(before, kind, name))
    simulation = Simulation(taken)
    untouched = live(simulation, kind, name)
    simulation.put(*OBJECTS)
    simulation.advance(60)
    assert live(simulation, kind, name) == untouched
    assert owners(untouched) == []
    assert f"{kind} {name}" in in_the_way(simulation, owner)


def test_a_labelled_secret_of_others_is_no_key_of_the_domain() -> None:
    """Its maker would know every keyspace."""
    key = base64.b64encode(b"k" * 32).decode()
    labels = {"app.kubernetes.io/managed-by": "kvstrata", "app.kubernetes.io/name": "cache-domain"}
    metadata = {"name": names.DOMAIN_KEY_SECRET, "namespace": NAMESPACE, "labels": labels}
    simulation = Simulation(
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": {names.DOMAIN_KEY_DATA_KEY: key}}
    )
    simulation.put(*OBJECTS)
    simulation.advance(60)
    assert simulation.world.domain_key is None
    assert "Secret kvstrata-domain" in in_the_way(simulation, DOMAIN)


def test_the_mark_of_another_installation_proves_nothing() -> None:
    simulation = as_backup_tools_do(settled(), b"another installation")
    simulation.advance(60)
    assert "Secret kvstrata-domain" in in_the_way(simulation, DOMAIN)
    assert owners(live(simulation, "Secret", "kvstrata-domain")) == []


@pytest.mark.parametrize("name", [name for _, name, _ in SECRETS])
def test_a_secret_of_an_earlier_version_gets_a_mark(name: str) -> None:
    simulation = settled()
    raw: Any = live(simulation, "Secret", name)
    simulation.put({**raw, "metadata": {**raw["metadata"], "annotations": {}}})
    simulation.come_to_rest()
    assert MARK in live(simulation, "Secret", name)["metadata"]["annotations"]
    assert live(simulation, "Secret", name)["data"] == raw["data"]
