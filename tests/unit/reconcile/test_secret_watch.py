"""Secrets that somebody deletes or changes are noticed by their events, and own writes are told from others'."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import pytest

from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, Root
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.objects import names
from kvstrata.reconcile.bundles import read_bundle
from kvstrata.reconcile.secret_watch import SecretWatch
from kvstrata.reconcile.secrets import SecretStore, decode
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, cpu_tier, model, pod, policy, redis_tier
from tests.support.worlds import Simulation, finish

TINY = Key(BUNDLE, NAMESPACE, "tiny")
ROOT = ("Secret", NAMESPACE, "kvs-tiny-bundle")
DOMAIN_KEY = ("Secret", NAMESPACE, names.DOMAIN_KEY_SECRET)


def at_rest() -> Simulation:
    simulation = Simulation(cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), policy("acme"), policy("globex"))
    simulation.settle()
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def keyspaces(simulation: Simulation) -> dict[str, Any]:
    return {tenant: entry.keyspace for tenant, entry in simulation.bundle().entries.items()}


def stored(simulation: Simulation) -> Any:
    return finish(
        read_bundle(
            simulation.kube,
            simulation.store.domain(NAMESPACE),
            "tiny",
            simulation.world.models["tiny"].owner_reference(),
        )
    )


def change_root(simulation: Simulation, **fields: Any) -> Root:
    """Change the root by hand, as somebody with the right to write Secrets could."""
    raw = simulation.kube.objects[ROOT]
    root = replace(Root.decode(decode(raw)[ROOT_DATA_KEY]), **fields)
    simulation.put({**raw, "data": {ROOT_DATA_KEY: _base64(root.encode())}})
    return root


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@pytest.mark.parametrize("name", ["kvs-tiny-gate-tls", "kvs-shared-redis-auth", "kvs-shared-redis-tls"])
def test_a_deleted_secret_comes_back_at_once(name: str) -> None:
    simulation = at_rest()
    slot = ("Secret", NAMESPACE, name)
    assert slot in simulation.kube.objects
    simulation.delete("Secret", name)
    simulation.settle()
    assert slot in simulation.kube.objects
    simulation.come_to_rest()
    assert simulation.unsettled() == {}


def test_users_of_an_earlier_version_or_another_domain_are_written_anew_and_keep_their_passwords() -> None:
    simulation = at_rest()
    slot = ("Secret", NAMESPACE, names.redis_auth("shared"))
    server = ("StatefulSet", NAMESPACE, names.redis_shard("shared", 0))
    before = dict(decode(simulation.kube.objects[slot]))
    acl = before[names.ACL_FILE_KEY]
    domain = simulation.world.domain_id
    assert domain is not None
    for earlier in (
        acl.replace(b" +evalsha", b""),
        acl.replace(domain.encode(), b"0" * 16),
        b"",
    ):
        raw, template = simulation.kube.objects[slot], simulation.kube.objects[server]["spec"]["template"]
        simulation.put({**raw, "data": raw["data"] | {names.ACL_FILE_KEY: _base64(earlier)}})
        assert simulation.kube.objects[server]["spec"]["template"] == template
        simulation.come_to_rest()
        assert decode(simulation.kube.objects[slot]) == before
        assert simulation.unsettled() == {}


def test_a_server_with_rights_of_an_earlier_version_is_told_and_not_started_anew() -> None:
    simulation = at_rest()
    slot = ("Secret", NAMESPACE, names.redis_auth("shared"))
    server = ("StatefulSet", NAMESPACE, names.redis_shard("shared", 0))
    raw, before = simulation.kube.objects[slot], simulation.kube.objects[server]
    acl = decode(raw)[names.ACL_FILE_KEY]
    simulation.put({**raw, "data": raw["data"] | {names.ACL_FILE_KEY: _base64(acl.replace(b" +evalsha", b""))}})
    ((name, it),) = simulation.servers.items()
    simulation.servers[name] = replace(it, marker="rules-before")
    simulation.restart()
    simulation.come_to_rest()
    assert decode(simulation.kube.objects[slot])[names.ACL_FILE_KEY] == acl
    assert simulation.servers[name].marker in acl.decode()
    assert simulation.kube.objects[server]["spec"] == before["spec"]
    assert simulation.unsettled() == {}


def test_a_deleted_domain_key_is_drawn_anew_and_every_tenant_gets_another_keyspace() -> None:
    simulation = at_rest()
    before, key = keyspaces(simulation), simulation.world.domain_key
    simulation.delete("Secret", names.DOMAIN_KEY_SECRET)
    assert simulation.world.domain_key is None
    simulation.come_to_rest()
    assert simulation.world.domain_key not in (None, key)
    after = keyspaces(simulation)
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())
    assert simulation.condition("TenantCachePolicy", "acme", "Enforced")[0] == "True"
    assert simulation.unsettled() == {}


def test_a_domain_key_that_was_replaced_by_hand_changes_every_keyspace() -> None:
    simulation = at_rest()
    before = keyspaces(simulation)
    raw = simulation.kube.objects[DOMAIN_KEY]
    simulation.put({**raw, "data": {names.DOMAIN_KEY_DATA_KEY: _base64(bytes(range(32)))}})
    simulation.come_to_rest()
    assert not set(keyspaces(simulation).values()) & set(before.values())


def test_a_deleted_root_comes_back_with_a_higher_revision_and_the_same_keyspaces() -> None:
    simulation = at_rest()
    before, spaces = simulation.bundle().root.revision, keyspaces(simulation)
    simulation.delete("Secret", ROOT[2])
    simulation.settle()
    assert stored(simulation) == simulation.world.bundles["tiny"]
    assert simulation.bundle().root.revision > before
    assert keyspaces(simulation) == spaces


def test_a_shard_that_was_deleted_or_damaged_comes_back_in_the_other_slot() -> None:
    simulation = at_rest()
    for damaged in (None, {"shard.json": "e30="}):
        before = simulation.bundle()
        ref = before.root.shards[0]
        raw = simulation.kube.objects[("Secret", NAMESPACE, names.bundle_shard("tiny", 0, ref.slot))]
        if damaged is None:
            simulation.delete("Secret", raw["metadata"]["name"])
        else:
            simulation.put({**raw, "data": damaged})
        simulation.settle()
        after = stored(simulation).bundle
        assert after == simulation.bundle()
        assert after.root.revision > before.root.revision
        assert after.root.shards[0].slot == ref.other_slot
        assert after.entries.keys() == before.entries.keys()


def test_a_policy_that_is_invalid_keeps_its_entry_when_the_bundle_is_deleted() -> None:
    simulation = at_rest()
    before = simulation.entry("acme")
    simulation.edit("TenantCachePolicy", "acme", budgets=[{"tier": "gone", "limit": "1Mi"}])
    simulation.come_to_rest()
    simulation.delete("Secret", ROOT[2])
    simulation.come_to_rest()
    assert simulation.entry("acme").keyspace == before.keyspace


def test_a_root_changed_by_hand_is_superseded_and_nothing_is_enforced_before_that_is_acknowledged() -> None:
    simulation = at_rest()
    theirs = change_root(simulation, revision=1000, term=7)
    simulation.settle()
    assert stored(simulation) == simulation.world.bundles["tiny"]
    root = simulation.bundle().root
    assert (root.revision, root.rules_since) == (theirs.revision + 1, theirs.revision + 1)
    assert root.term >= 7
    assert {entry.since for entry in simulation.bundle().entries.values()} == {1001}
    assert simulation.condition("TenantCachePolicy", "acme", "Enforced") == ("False", "AwaitingAcks")
    simulation.come_to_rest()
    assert simulation.condition("TenantCachePolicy", "acme", "Enforced")[0] == "True"
    assert simulation.unsettled() == {}


def test_labels_put_on_a_root_by_hand_cause_no_commit() -> None:
    simulation = at_rest()
    before = simulation.bundle()
    raw = simulation.kube.objects[ROOT]
    simulation.put({**raw, "metadata": {**raw["metadata"], "annotations": {"mine": "1"}}})
    simulation.settle()
    assert simulation.bundle() == before
    simulation.edit("TenantCachePolicy", "acme", suspend=True)
    simulation.settle()
    assert stored(simulation) == simulation.world.bundles["tiny"]


def test_events_of_own_commits_are_no_news_before_and_after_the_answer() -> None:
    simulation = at_rest()
    raised: list[frozenset[Key]] = []

    def tell_at_once(verb: str, kind: str, name: str) -> None:
        """The watch is faster than the answer."""
        if kind != "Secret":
            return
        raised.append(simulation.secret_watch.observe(simulation.kube.objects[(kind, NAMESPACE, name)]))
        for key in raised[-1]:
            simulation.queue.add(key)

    simulation.kube.after_write = tell_at_once
    before = simulation.bundle().root.revision
    simulation.edit("TenantCachePolicy", "acme", suspend=True)
    simulation.settle()
    assert {TINY} in raised
    simulation.come_to_rest()
    assert simulation.bundle().root.revision == before + 1
    assert simulation.store.domain(NAMESPACE).suspected_bundles == {}


def test_a_deletion_that_is_told_before_the_answer_to_the_write_is_not_lost() -> None:
    simulation = at_rest()
    deleted: list[str] = []

    def delete_at_once(verb: str, kind: str, name: str) -> None:
        if name == ROOT[2] and not deleted:
            deleted.append(name)
            simulation.kube.remove(*ROOT)
            raw = next(raw for event, raw in reversed(simulation.kube.events) if event == "DELETED")
            for key in simulation.secret_watch.forget(raw):
                simulation.queue.add(key)

    simulation.kube.after_write = delete_at_once
    simulation.edit("TenantCachePolicy", "acme", suspend=True)
    simulation.kube.take_events()
    simulation.come_to_rest()
    assert deleted
    assert stored(simulation) == simulation.world.bundles["tiny"]


def test_an_answer_that_is_older_than_the_deletion_brings_no_secret_back() -> None:
    simulation = at_rest()
    old = simulation.kube.objects[DOMAIN_KEY]
    domain = simulation.store.domain(NAMESPACE)
    simulation.kube.remove(*DOMAIN_KEY)
    ((_, gone),) = simulation.kube.take_events()
    simulation.secret_watch.forget(gone)
    simulation.secret_store.observe(domain, {**old, "metadata": {**old["metadata"], "resourceVersion": "101"}})
    assert domain.domain_key is None
    assert names.DOMAIN_KEY_SECRET not in domain.secrets


def test_a_process_that_does_not_lead_looks_at_no_secret() -> None:
    simulation = at_rest()
    closed = SecretWatch(simulation.store, SecretStore(MemoryKube(), "kvstrata-system", bytes, lambda: simulation.now))
    gone = simulation.kube.objects[DOMAIN_KEY]
    assert closed.forget({**gone, "metadata": {**gone["metadata"], "resourceVersion": "99999"}}) == frozenset()
    assert simulation.world.domain_key is not None
