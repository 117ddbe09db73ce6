"""Data keys: one for each epoch while a tier requires encryption, in Secrets and nowhere else."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.clients.kube import KubeError
from kvstrata.contract.messages.adapter import TierState
from kvstrata.objects import names
from kvstrata.objects.quantities import MIB
from kvstrata.objects.sizing import GATE_LIMIT_BYTES, gate_limit_bytes, policy_volume_bytes
from tests.support.objects import (
    NAMESPACE,
    STALLED_REDIS,
    cpu_tier,
    group,
    invalidation,
    model,
    older_tier,
    pod,
    policy,
    redis_tier,
)
from tests.support.worlds import Simulation, finish

TCP = "TenantCachePolicy"
OBJECTS = (model(tiers=("shared",)), policy("acme"), policy("globex"))
SEALED = redis_tier(encryption="Required")


def at_rest(*objects: Any) -> Simulation:
    simulation = Simulation(*objects)
    simulation.settle()
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def stored(simulation: Simulation) -> dict[str, bytes]:
    """The data keys in Secrets, by epoch."""
    return {
        epoch: base64.b64decode(value)
        for (kind, _, name), raw in simulation.kube.objects.items()
        if kind == "Secret" and name.startswith(names.DATA_KEYS_PREFIX)
        for epoch, value in (raw.get("data") or {}).items()
    }


def epoch(simulation: Simulation, tenant: str) -> str:
    told: str = simulation.status(TCP, tenant)["scope"]["epoch"]
    return told


def list_and_diff(simulation: Simulation) -> None:
    finish(simulation.resync.objects(simulation.queue.add))
    finish(simulation.resync.secrets())
    simulation.enqueue_all()
    simulation.settle()


class TestDrawing:
    def test_each_epoch_has_a_key_of_its_own_and_entries_carry_it(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        keys = stored(simulation)
        assert len(keys) == len(set(keys.values())) == 3  # the public scope's as well
        for tenant in ("acme", "globex"):
            (key,) = simulation.entry(tenant).keys
            assert key.secret == keys[epoch(simulation, tenant)]
            assert len(key.secret) == 32

    def test_members_of_a_group_share_its_key(self) -> None:
        members = (group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
        simulation = at_rest(SEALED, model(tiers=("shared",)), *members)
        assert simulation.entry("a").keyspace == simulation.entry("b").keyspace
        assert simulation.entry("a").keys == simulation.entry("b").keys != ()
        assert simulation.condition("TenantGroup", "lab", "Enforced")[0] == "True"

    def test_a_pod_that_encrypts_nothing_gets_no_key(self) -> None:
        plain = (cpu_tier(), model("plain", tiers=("cpu",)), pod("pod-1", "plain"))
        simulation = at_rest(SEALED, *OBJECTS, *plain)
        assert simulation.entry("acme", "tiny").keys != ()
        assert simulation.entry("acme", "plain").keys == ()
        assert simulation.condition(TCP, "acme", "Enforced") == ("True", "AllPodsAcknowledged")
        simulation.edit("CachedModel", "plain", tiers=[{"name": "cpu"}, {"name": "shared"}])
        simulation.come_to_rest()
        assert simulation.entry("acme", "plain").keys == simulation.entry("acme", "tiny").keys
        assert simulation.unsettled() == {}

    def test_a_key_that_cannot_be_written_holds_nobody_up(self) -> None:
        simulation = Simulation(SEALED, *OBJECTS, pod("pod-0"))

        def refuse(verb: str, kind: str, name: str) -> None:
            if name.startswith(names.DATA_KEYS_PREFIX):
                raise KubeError(403, "Forbidden", name)

        simulation.kube.before_write = refuse
        simulation.come_to_rest()
        assert simulation.entry("acme").keys == ()
        assert simulation.world.acked_revision(simulation.pod("pod-0")) == simulation.bundle().root.revision
        assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingKeys")
        simulation.kube.before_write = lambda verb, kind, name: None
        simulation.advance(120)
        simulation.come_to_rest()
        assert simulation.entry("acme").keys != ()
        assert simulation.unsettled() == {}

    def test_an_operator_that_starts_anew_draws_nothing(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        keys, revision = stored(simulation), simulation.bundle().root.revision
        simulation.restart()
        simulation.come_to_rest()
        assert stored(simulation) == keys
        assert simulation.bundle().root.revision == revision

    def test_keys_that_were_deleted_are_drawn_anew(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        keys = stored(simulation)
        for name in {names.data_keys_secret(one) for one in keys}:
            simulation.delete("Secret", name)
        simulation.come_to_rest()
        assert stored(simulation).keys() == keys.keys()
        assert not set(stored(simulation).values()) & set(keys.values())
        assert simulation.entry("acme").keys[0].secret == stored(simulation)[epoch(simulation, "acme")]

    def test_keys_that_were_deleted_and_cannot_be_drawn_are_named_and_pods_keep_theirs(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        held = simulation.entry("acme").keys

        def refuse(verb: str, kind: str, name: str) -> None:
            if name.startswith(names.DATA_KEYS_PREFIX) and verb != "delete":
                raise KubeError(403, "Forbidden", name)

        simulation.kube.before_write = refuse
        simulation.delete("Secret", names.data_keys_secret(epoch(simulation, "acme")))
        simulation.come_to_rest()
        assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingKeys")
        assert simulation.entry("acme").keys in ((), held)
        simulation.kube.before_write = lambda verb, kind, name: None
        simulation.advance(120)
        simulation.come_to_rest()
        assert simulation.entry("acme").keys not in ((), held)
        assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"

    def test_a_secret_that_lost_its_labels_gets_them_back_and_keeps_its_keys(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        keys, name = stored(simulation), names.data_keys_secret(epoch(simulation, "acme"))
        raw = simulation.kube.objects[("Secret", NAMESPACE, name)]
        simulation.put({**raw, "metadata": {**raw["metadata"], "labels": {"mine": "yes"}}})
        simulation.restart()  # Its list has the Secret no more.
        simulation.come_to_rest()
        after = simulation.kube.objects[("Secret", NAMESPACE, name)]
        assert after["metadata"]["labels"] == raw["metadata"]["labels"]
        assert stored(simulation) == keys
        revision = simulation.bundle().root.revision
        simulation.restart()
        simulation.come_to_rest()
        assert simulation.bundle().root.revision == revision

    @pytest.mark.parametrize("damage", ["", "AAAA", base64.b64encode(bytes(32)).decode()])
    def test_a_damaged_key_is_drawn_anew_and_the_others_stay(self, damage: str) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        keys, acme = stored(simulation), epoch(simulation, "acme")
        raw = simulation.kube.objects[("Secret", NAMESPACE, names.data_keys_secret(acme))]
        simulation.put({**raw, "data": {**raw["data"], acme: damage}})
        simulation.come_to_rest()
        after = stored(simulation)
        assert {name for name in keys if keys[name] != after[name]} == {acme}
        assert len(after[acme]) == 32
        assert any(after[acme])


class TestDropping:
    def test_a_new_epoch_has_a_new_key_and_the_old_one_goes(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        (old,), other = simulation.entry("acme").keys, simulation.entry("globex").keys
        simulation.edit(TCP, "acme", cacheGeneration=1)
        simulation.come_to_rest()
        (new,) = simulation.entry("acme").keys
        assert new.secret != old.secret
        assert new.generation == old.generation + 1
        assert old.secret not in stored(simulation).values()
        assert simulation.entry("globex").keys == other

    def test_not_before_every_pod_acknowledged_a_revision_without_it(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        simulation.put(pod("pod-1"))
        simulation.come_to_rest()
        (old,) = simulation.entry("acme").keys
        simulation.edit(TCP, "acme", cacheGeneration=1)
        simulation.settle()
        revision = simulation.bundle().root.revision
        simulation.ack("pod-0")
        simulation.advance(600)
        assert old.secret in stored(simulation).values()
        # Edits that come later do not put it off.
        simulation.edit(TCP, "globex", suspend=True)
        simulation.settle()
        assert simulation.bundle().root.revision > revision
        simulation.ack("pod-1", revision)
        simulation.settle()
        assert old.secret not in stored(simulation).values()

    def test_a_pod_that_vanished_is_waited_for_until_it_has_fenced_itself_off(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        (old,) = simulation.entry("acme").keys
        simulation.delete("Pod", "pod-0")
        simulation.put(pod("pod-1"))
        simulation.edit(TCP, "acme", cacheGeneration=1)
        simulation.come_to_rest()
        simulation.advance(600)
        assert old.secret in stored(simulation).values(), "its requests may still run"
        simulation.advance(700)
        assert old.secret not in stored(simulation).values()

    def test_the_keys_of_a_tenant_that_goes_go_with_it(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        gone = epoch(simulation, "acme")
        simulation.edit(TCP, "acme", deletionPolicy="Abandon")
        simulation.delete(TCP, "acme")
        simulation.come_to_rest()
        assert gone not in stored(simulation)
        assert epoch(simulation, "globex") in stored(simulation)

    def test_an_invalidation_of_all_replaces_every_key(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        before = stored(simulation)
        simulation.put(invalidation("now", scope={"all": True}))
        simulation.come_to_rest()
        after = stored(simulation)
        assert len(after) == len(before)
        assert not after.keys() & before.keys()
        assert not set(after.values()) & set(before.values())

    def test_a_key_lives_as_long_as_its_epoch_although_no_tier_requires_encryption_meanwhile(self) -> None:
        simulation = at_rest(redis_tier(), *OBJECTS)
        assert stored(simulation) == {}
        assert simulation.entry("acme").keys == ()
        simulation.put(redis_tier("sealed", encryption="Required"))
        simulation.edit("CachedModel", "tiny", tiers=[{"name": "sealed"}])
        simulation.come_to_rest()
        keys = stored(simulation)
        assert simulation.entry("acme").keys != ()
        simulation.edit("CachedModel", "tiny", tiers=[{"name": "shared"}])
        simulation.delete("CacheTier", "sealed")
        simulation.come_to_rest()
        assert simulation.entry("acme").keys == ()
        assert stored(simulation) == keys
        simulation.edit(TCP, "acme", deletionPolicy="Abandon")
        simulation.delete(TCP, "acme")
        simulation.come_to_rest()
        assert len(stored(simulation)) == len(keys) - 1
        assert simulation.unsettled() == {}

    def test_a_key_whose_status_may_be_news_to_come_is_left_alone(self) -> None:
        """Another leader wrote epoch and key; the key's event came first."""
        simulation = at_rest(SEALED, *OBJECTS)
        raw = simulation.kube.objects[("Secret", NAMESPACE, names.data_keys_secret(epoch(simulation, "acme")))]
        foreign = raw["metadata"]["name"][-1] + "0" * 31
        simulation.put({**raw, "data": {**raw["data"], foreign: base64.b64encode(b"k" * 32).decode()}})
        simulation.come_to_rest()
        simulation.advance(120)
        assert foreign in stored(simulation)
        list_and_diff(simulation)  # All objects were read after the key was seen, and none names its epoch.
        assert foreign not in stored(simulation)

    def test_while_a_holder_of_epochs_cannot_be_read_nothing_is_dropped(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        keys = stored(simulation)
        raw = simulation.kube.objects[(TCP, NAMESPACE, "acme")]
        simulation.put({**raw, "spec": {**raw["spec"], "isolation": "OfALaterVersion"}})
        simulation.restart()
        simulation.come_to_rest()
        for _ in range(2):
            list_and_diff(simulation)
        assert stored(simulation) == keys


class TestTelling:
    def test_no_object_but_a_secret_and_no_plan_shows_a_key(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        texts = [
            json.dumps(raw, default=str) for (kind, _, _), raw in simulation.kube.objects.items() if kind != "Secret"
        ]
        texts += [repr(plan) for _, plan in simulation.plans]
        texts += [repr(simulation.world), repr(simulation.bundle()), repr(simulation.store.domain(NAMESPACE))]
        for secret in stored(simulation).values():
            forms = (base64.b64encode(secret).decode(), secret.hex(), repr(secret)[2:-1])
            assert not any(form in text for form in forms for text in texts)

    def test_no_gate_may_read_the_secrets_of_data_keys(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        roles = [raw for (kind, _, _), raw in simulation.kube.objects.items() if kind == "Role"]
        readable = {name for role in roles for rule in role["rules"] for name in rule["resourceNames"]}
        assert readable
        assert not any(name.startswith(names.DATA_KEYS_PREFIX) for name in readable)

    def test_a_tier_is_encrypted_when_every_serving_pod_says_so(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        assert simulation.condition("CacheTier", "shared", "Stalled")[0] != "True"
        for told, expected in [
            (TierState("shared", "Redis", "closed"), ("False", "AwaitingKeys")),  # a pod of a version before
            (TierState("shared", "Redis", "closed", encrypted=True, keyless=1), ("False", "AwaitingKeys")),
            (TierState("shared", "Redis", "closed", encrypted=True), ("True", "KeysHeld")),
            (TierState("other", "Redis", "closed", encrypted=True), ("False", "AwaitingKeys")),
        ]:
            simulation.ack("pod-0", tiers=(told,))
            simulation.settle()
            assert simulation.condition("CacheTier", "shared", "Encrypted") == expected

    def test_an_edit_of_a_policy_leaves_it_encrypted(self) -> None:
        simulation = at_rest(SEALED, *OBJECTS)
        simulation.ack("pod-0", tiers=(TierState("shared", "Redis", "closed", encrypted=True),))
        simulation.settle()
        before = simulation.status("CacheTier", "shared")
        simulation.edit(TCP, "acme", suspend=True)
        simulation.settle()
        assert simulation.status("CacheTier", "shared") == before

    def test_encryption_of_a_tier_that_no_pod_uses_is_not_judged(self) -> None:
        simulation = Simulation(older_tier(), SEALED, *OBJECTS)
        simulation.come_to_rest()
        assert simulation.condition("CacheTier", "shared", "Encrypted") == ("", "")
        simulation.edit("CacheTier", "shared", redis=STALLED_REDIS)
        simulation.settle()
        assert simulation.condition("CacheTier", "shared", "Encrypted") == ("", "")


class TestPods:
    def test_the_adapter_is_told_to_encrypt_where_nothing_says_otherwise(self) -> None:
        simulation = at_rest(redis_tier(encryption=None), *OBJECTS)
        (tier,) = simulation.world.bundles["tiny"].bundle.root.tiers
        assert tier.encrypts

    def test_the_policy_volume_has_room_for_the_keys_of_twice_as_many_shards(self) -> None:
        assert [policy_volume_bytes(1 << n) // MIB for n in range(10)] == [64] * 6 + [256] * 2 + [1024] * 2
        assert policy_volume_bytes(48) == 256 * MIB, "pools' manifests need room beside the keys"
        assert gate_limit_bytes(CachedModel.parse(model()), 1) == GATE_LIMIT_BYTES
        assert gate_limit_bytes(CachedModel.parse(model()), 64) == GATE_LIMIT_BYTES + 192 * MIB
