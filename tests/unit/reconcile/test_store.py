"""The store: old news stays out, the gone stay gone, and a change concerns only those whom it concerns."""

from __future__ import annotations

import copy
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from secrets import token_bytes
from typing import Any

import pytest

from kvstrata.contract.policy.tiers import AllowedServers
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import OBJECTS, World
from kvstrata.reconcile.domain_store import REMEMBERED_S
from kvstrata.reconcile.parse import OWN_KINDS
from kvstrata.reconcile.store import Store
from tests.support.objects import NAMESPACE, Raw, group, model, pod, policy
from tests.support.worlds import Simulation

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def at(version: int, raw: Raw, **metadata: Any) -> Raw:
    """Return the object as the API server would hold it."""
    base = {"uid": f"uid-{raw['metadata']['name']}", "generation": 1, "resourceVersion": str(version), **metadata}
    return {**raw, "metadata": {**raw["metadata"], **base}}


def store() -> Store:
    return Store(lambda: token_bytes(64), lambda: NOW)


def key(kind: str, name: str) -> Key:
    return Key(kind, NAMESPACE, name)


def test_every_namespace_has_the_limits_of_the_installation() -> None:
    known = store()
    known.world("one")
    limits = known.allowed_servers, known.allowed_folders = AllowedServers(("*.cache.example",)), ("/disks",)
    worlds = [known.world(namespace) for namespace in ("one", "two")]
    assert {(world.allowed_servers, world.allowed_folders) for world in worlds} == {limits}


def test_an_older_version_changes_nothing() -> None:
    known = store()
    known.observe(at(5, policy("acme", suspend=True)))
    assert known.observe(at(4, policy("acme"))) == frozenset()
    assert known.observe(at(5, policy("acme"))) == frozenset()
    assert known.world(NAMESPACE).policies["acme"].spec.suspend


def test_an_answer_that_arrives_after_the_deletion_does_not_bring_the_object_back() -> None:
    known = store()
    known.observe(at(5, policy("acme")))
    known.forget("TenantCachePolicy", NAMESPACE, "acme", at(9, policy("acme")))
    assert known.observe(at(8, policy("acme"))) == frozenset()
    assert "acme" not in known.world(NAMESPACE).policies
    known.observe(at(12, policy("acme"), uid="another"))
    assert known.world(NAMESPACE).policies["acme"].uid == "another"


def test_what_is_gone_for_long_is_forgotten_and_what_was_made_anew_is_not() -> None:
    clock = [NOW]
    known = Store(lambda: token_bytes(64), lambda: clock[0])
    for number in range(100):
        known.observe(at(2 * number + 1, policy(f"t{number}")))
        known.forget("TenantCachePolicy", NAMESPACE, f"t{number}", at(2 * number + 2, policy(f"t{number}")))
    known.observe(at(300, policy("t7"), uid="another"))
    versions = known.domain(NAMESPACE).versions
    assert len(versions) == 100
    clock[0] += timedelta(seconds=REMEMBERED_S + 1)
    known.observe(at(400, policy("last")))
    known.forget("TenantCachePolicy", NAMESPACE, "last", at(401, policy("last")))
    assert len(versions) == 2
    assert known.observe(at(299, policy("t7"), uid="another")) == frozenset()
    assert known.observe(at(400, policy("last"))) == frozenset()


def test_the_deletion_of_a_predecessor_does_not_remove_its_successor() -> None:
    known = store()
    known.observe(at(12, policy("acme"), uid="another"))
    assert known.forget("TenantCachePolicy", NAMESPACE, "acme", at(9, policy("acme"))) == frozenset()
    assert "acme" in known.world(NAMESPACE).policies


def test_policies_are_found_by_tenant() -> None:
    known = store()
    known.observe(at(1, policy("acme", name="one")))
    known.observe(at(2, policy("acme", name="two")))
    assert known.world(NAMESPACE).policies_of_tenant == {"acme": ("one", "two")}
    known.forget("TenantCachePolicy", NAMESPACE, "one")
    assert known.world(NAMESPACE).policies_of_tenant == {"acme": ("two",)}
    known.forget("TenantCachePolicy", NAMESPACE, "two")
    assert known.world(NAMESPACE).policies_of_tenant == {}


def test_a_pod_that_goes_is_remembered_with_whether_it_had_ended() -> None:
    known = store()
    for number, state in enumerate(("running", "terminated", "waiting")):
        name = f"pod-{number}"
        known.observe(at(number + 1, pod(name, state=state)))
        known.forget("Pod", NAMESPACE, name, at(number + 11, pod(name, state=state)))
    gone = known.world(NAMESPACE).departures["tiny"]
    assert [(departure.uid, departure.clean) for departure in gone] == [
        ("uid-pod-0", False), ("uid-pod-1", True), ("uid-pod-2", True)
    ]  # fmt: skip


@pytest.mark.parametrize("last", [None, at(5, pod("pod-0"))], ids=["not known", "known"])
def test_a_list_that_was_begun_before_a_pods_deletion_does_not_bring_it_back(last: dict[str, Any] | None) -> None:
    known = store()
    known.observe(at(4, pod("pod-0")))
    known.forget("Pod", NAMESPACE, "pod-0", last)
    known.observe(at(4, pod("pod-0")))
    assert known.world(NAMESPACE).live_pods("tiny") == ()
    known.observe(at(6, pod("pod-0"), uid="another"))
    assert [p.uid for p in known.world(NAMESPACE).live_pods("tiny")] == ["another"]


def test_a_pod_of_the_same_name_is_another_pod() -> None:
    known = store()
    known.observe(at(1, pod("pod-0")))
    known.observe(at(2, pod("pod-0"), uid="another"))
    world = known.world(NAMESPACE)
    assert [departure.uid for departure in world.departures["tiny"]] == ["uid-pod-0"]
    assert [p.uid for p in world.live_pods("tiny")] == ["another"]


def test_a_models_bundle_is_forgotten_with_it() -> None:
    simulation = Simulation(model())
    simulation.settle()
    simulation.delete("CachedModel", "tiny")
    simulation.settle()
    assert simulation.world.bundles == {}


def test_a_status_that_says_nothing_to_others_concerns_only_its_object() -> None:
    known = store()
    known.observe(at(1, model()))
    for number in range(5):
        known.observe(at(number + 2, policy(f"t{number}")))
    written = at(20, policy("t3")) | {"status": {"enforcedGeneration": 1, "conditions": []}}
    assert known.observe(written) == {key("TenantCachePolicy", "t3")}


def test_a_new_epoch_concerns_the_bundles_and_no_other_tenant() -> None:
    known = store()
    known.observe(at(1, model()))
    known.observe(at(2, policy("a")))
    known.observe(at(3, policy("b")))
    scope = {"kind": "Tenant", "name": "a", "epoch": "0" * 32, "rolls": 0}
    concerned = known.observe(at(4, policy("a")) | {"status": {"scope": scope}})
    assert key(BUNDLE, "tiny") in concerned
    assert key("TenantCachePolicy", "b") not in concerned


def test_a_groups_change_concerns_those_who_name_it_and_no_one_else() -> None:
    known = store()
    known.observe(at(1, policy("a", group="lab")))
    known.observe(at(2, policy("b")))
    concerned = known.observe(at(3, group("lab", "a")))
    assert key("TenantCachePolicy", "a") in concerned
    assert key("TenantCachePolicy", "b") not in concerned


def test_an_unreadable_object_keeps_what_was_read_last() -> None:
    known = store()
    known.observe(at(1, policy("a")))
    broken = copy.deepcopy(at(2, policy("a")))
    broken["spec"]["isolation"] = "Sideways"
    assert known.observe(broken) == {key("TenantCachePolicy", "a")}
    world = known.world(NAMESPACE)
    assert world.policies["a"].metadata.resource_version == "1"
    assert "isolation" in world.unreadable[key("TenantCachePolicy", "a")].problem
    assert "a" in known.names("TenantCachePolicy", NAMESPACE)
    known.forget("TenantCachePolicy", NAMESPACE, "a")
    assert not known.world(NAMESPACE).unreadable


def test_every_object_and_bundle_has_its_key() -> None:
    known = store()
    known.observe(at(1, model()))
    known.observe(at(2, policy("a")))
    assert set(known.all_keys()) == {
        key("CachedModel", "tiny"), key(BUNDLE, "tiny"), key("TenantCachePolicy", "a"), key("CacheDomain", "default")
    }  # fmt: skip


def test_a_world_has_a_place_for_the_objects_of_every_kind() -> None:
    assert OBJECTS.keys() == OWN_KINDS.keys()
    assert {*OBJECTS.values()} <= {field.name for field in fields(World)}
