"""Pools in a bundle: a shard for each, written before the root and emptied after it, whole at every moment."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.contract.messages.pools import WarmOutcome
from kvstrata.contract.policy.bundle import ROOT_DATA_KEY, SHARD_DATA_KEY, Bundle, Root, decode_shard
from kvstrata.contract.policy.cache_view import reads_of
from kvstrata.contract.policy.pools import MAX_POOLS, PoolShard, PoolState, PoolVersion
from kvstrata.objects import names
from kvstrata.objects.pod.access import build_role
from kvstrata.objects.quantities import MIB
from tests.support.objects import NAMESPACE, Raw, cpu_tier, model, pod, policy, pool, redis_tier
from tests.support.renderer import rendered_by
from tests.support.worlds import Killed, Simulation

KIND, POLICY = "PrefixPool", "TenantCachePolicy"
TEXT = "You are a patient assistant who answers in one sentence."
TINY = model(tiers=("cpu", "shared"))


def prefixes(*texts: str) -> list[Raw]:
    return [{"name": f"p{number}", "text": text} for number, text in enumerate(texts)]


def at_rest(*objects: Raw, tier: Raw | None = None, pods: int = 2) -> Simulation:
    made = [pod(f"pod-{number}", render_id=rendered_by(TINY)) for number in range(pods)]
    simulation = Simulation(
        cpu_tier(), tier or redis_tier(), TINY, policy("acme", pools=[{"name": "manual"}]), *objects
    )
    simulation.put(*made)
    # What is published here says the test, and not what pods hold.
    simulation.renderer.outcome = WarmOutcome.ENGINE
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def manual(**spec: Any) -> Raw:
    return pool("manual", **{"prefixes": prefixes(TEXT), "tiers": [{"name": "shared"}]} | spec)


def say(simulation: Simulation, name: str = "manual", **fields: Any) -> None:
    """Write fields of a pool's status, as its own plan would, and let nobody acknowledge what follows."""
    stored = simulation.kube.objects[(KIND, NAMESPACE, name)]
    status = {**stored["status"], **fields}
    simulation.put({**stored, "status": {key: value for key, value in status.items() if value is not None}})
    simulation.settle()


def gate_reads(simulation: Simulation, model_name: str = "tiny") -> Bundle:
    """Read the bundle from its Secrets as a gate does; raises for one that no gate could read."""
    objects = simulation.kube.objects

    def data(name: str, key: str) -> bytes:
        return base64.b64decode(objects[("Secret", NAMESPACE, name)]["data"][key])

    root = Root.decode(data(names.bundle_root(model_name), ROOT_DATA_KEY))
    shards = [(names.bundle_shard(model_name, ref.index, ref.slot), ref.digest) for ref in root.shards]
    pools = [(names.pool_shard(model_name, ref.index, ref.slot), ref.digest) for ref in root.pools]
    entries = [entry for name, digest in shards for entry in decode_shard(data(name, SHARD_DATA_KEY), digest)]
    return Bundle.assemble(root, entries, [PoolShard.decode(data(name, SHARD_DATA_KEY), d) for name, d in pools])


def versions(simulation: Simulation, name: str = "manual") -> tuple[PoolVersion, ...]:
    found = gate_reads(simulation)
    assert found.pools == simulation.bundle().pools
    return found.pools[name].versions if name in found.pools else ()


def filled(simulation: Simulation) -> set[str]:
    """The slots of pools that hold something."""
    return {
        name
        for (kind, _, name), raw in simulation.kube.objects.items()
        if kind == "Secret" and name.startswith("kvs-tiny-bundle-p") and raw.get("data")
    }


class TestVersions:
    def test_rendered_content_is_in_the_bundle_and_nobody_reads_it(self) -> None:
        simulation = at_rest(manual())
        (version,) = versions(simulation)
        assert version.state is PoolState.WARMING
        assert version.manifest == simulation.status(KIND, "manual")["manifestDigest"]
        assert version.chunks == simulation.status(KIND, "manual")["chunks"] == 3
        assert version.render_id == rendered_by(TINY)
        assert version.tiers == ("shared",)
        assert simulation.entry("acme").pools == ("manual",)
        assert reads_of(gate_reads(simulation)) == {}

    def test_what_is_published_is_read_and_no_policy_is_told_anew(self) -> None:
        simulation = at_rest(manual())
        since = simulation.entry("acme").since
        written = [entry for entry in simulation.kube.log if entry[1] == POLICY]
        say(simulation, published=True)
        (version,) = versions(simulation)
        assert reads_of(gate_reads(simulation)) == {simulation.entry("acme").keyspace: (version.keyspace,)}
        simulation.come_to_rest()
        assert simulation.entry("acme").since == since
        assert [entry for entry in simulation.kube.log if entry[1] == POLICY] == written
        assert simulation.bundle().root.pools[0].since == simulation.bundle().root.revision

    def test_new_content_waits_behind_the_old_and_goes_before_it_when_it_is_published(self) -> None:
        simulation = at_rest(manual())
        say(simulation, published=True)
        (old,) = versions(simulation)
        simulation.edit(KIND, "manual", prefixes=prefixes(TEXT.upper()))
        simulation.come_to_rest()
        first, second = versions(simulation)
        assert (first, second.state) == (old, PoolState.WARMING)
        following = simulation.status(KIND, "manual")["next"]
        say(simulation, next={**following, "published": True})
        assert [version.keyspace for version in versions(simulation)] == [second.keyspace, old.keyspace]
        assert len(reads_of(gate_reads(simulation))[simulation.entry("acme").keyspace]) == 2

    def test_content_that_is_cut_off_is_gone_at_once(self) -> None:
        simulation = at_rest(manual(invalidation="Eager"))
        say(simulation, published=True)
        (old,) = versions(simulation)
        simulation.edit(KIND, "manual", prefixes=prefixes(TEXT.upper()))
        simulation.come_to_rest()
        (new,) = versions(simulation)
        assert new.keyspace != old.keyspace
        assert new.state is PoolState.WARMING
        assert reads_of(gate_reads(simulation)) == {}

    def test_a_wrong_spec_keeps_what_readers_have_on_tiers_that_are_still_there(self) -> None:
        simulation = at_rest(manual(tiers=[{"name": "cpu"}, {"name": "shared"}]))
        say(simulation, published=True)
        (before,) = versions(simulation)
        simulation.edit(KIND, "manual", tiers=[{"name": "gone"}])
        simulation.come_to_rest()
        assert simulation.condition(KIND, "manual", "Stalled") == ("True", "TierNotFound")
        assert versions(simulation) == (before,)
        simulation.edit("CacheTier", "shared", allowedClassifications=["Public"])
        simulation.come_to_rest()
        assert [version.tiers for version in versions(simulation)] == [("cpu",)]
        assert simulation.unsettled() == {}

    @pytest.mark.parametrize(("longest", "expected_s"), [(None, 7 * 86_400), ("1h", 3600), ("720h", 7 * 86_400)])
    def test_blocks_of_pools_end_by_themselves(self, longest: str | None, expected_s: int) -> None:
        simulation = at_rest(manual(), tier=redis_tier(maxRetention=longest))
        (version,) = versions(simulation)
        assert {b.tier: (b.limit_bytes, b.guaranteed_bytes, b.retention_s) for b in version.budgets} == {
            "cpu": (None, None, 7 * 86_400), "shared": (None, None, expected_s)
        }  # fmt: skip

    def test_what_is_pinned_is_guaranteed_as_much_as_was_measured_and_counts_in_its_tier(self) -> None:
        simulation = at_rest(manual(pinned=True))
        rows = [{"name": "shared", "stored": 3, "expected": 3, "bytes": 15 * MIB}]
        say(simulation, tiers=rows)
        assert {b.guaranteed_bytes for b in versions(simulation)[0].budgets} == {None}
        say(simulation, published=True, tiers=rows)
        assert {b.tier: b.guaranteed_bytes for b in versions(simulation)[0].budgets} == {
            "cpu": None,
            "shared": 15 * MIB,
        }
        simulation.edit("CacheTier", "shared", capacity="16Mi")
        simulation.come_to_rest()
        assert simulation.condition("CacheTier", "shared", "CapacityCommitted")[1] == "GuaranteesWaiting"
        assert {b.guaranteed_bytes for b in versions(simulation)[0].budgets} == {None}

    def test_a_new_pod_waits_for_what_its_own_memory_is_to_hold(self) -> None:
        waiting = {"beforeReady": True, "timeout": "1m"}
        simulation = at_rest(manual(warmup=waiting))
        assert versions(simulation)[0].before_ready_s == 0
        simulation.edit(KIND, "manual", tiers=[{"name": "cpu"}])
        simulation.come_to_rest()
        assert versions(simulation)[0].before_ready_s == 60

    def test_keys_come_with_the_version_and_go_after_it(self) -> None:
        simulation = at_rest(manual(), tier=redis_tier(encryption="Required"))
        (version,) = versions(simulation)
        (key,) = version.keys

        def kept() -> bool:
            return any(
                base64.b64decode(value) == key.secret
                for (kind, _, name), raw in simulation.kube.objects.items()
                if kind == "Secret" and name.startswith(names.DATA_KEYS_PREFIX)
                for value in (raw.get("data") or {}).values()
            )

        assert kept()
        simulation.delete(KIND, "manual")
        simulation.settle()
        assert versions(simulation) == ()
        assert kept(), "pods may still read by it"
        simulation.come_to_rest()
        assert not kept()


class TestPlaces:
    def test_a_pool_keeps_its_index_and_a_new_one_takes_one_that_is_free(self) -> None:
        simulation = at_rest(pool("a", prefixes=prefixes(TEXT)), pool("b", prefixes=prefixes(TEXT)))
        assert simulation.world.bundles["tiny"].pool_indexes == {"a": 0, "b": 1}
        simulation.delete(KIND, "a")
        simulation.come_to_rest()
        simulation.put(pool("c", prefixes=prefixes(TEXT)), pool("d", prefixes=prefixes(TEXT)))
        simulation.come_to_rest()
        assert simulation.world.bundles["tiny"].pool_indexes == {"b": 1, "c": 0, "d": 2}
        assert set(gate_reads(simulation).pools) == {"b", "c", "d"}

    def test_a_model_has_as_many_pools_as_a_bundle_has_room_for_the_eldest_first(self) -> None:
        many = [pool(f"p{number:02}", prefixes=prefixes(TEXT)) for number in range(MAX_POOLS + 2)]
        simulation = at_rest(*many)
        assert sorted(gate_reads(simulation).pools) == [f"p{number:02}" for number in range(MAX_POOLS)]
        simulation.delete(KIND, "p07")
        simulation.come_to_rest()
        assert f"p{MAX_POOLS:02}" in gate_reads(simulation).pools

    def test_slots_are_emptied_when_every_pod_has_the_newest_root_and_not_before(self) -> None:
        simulation = at_rest(manual())
        before = filled(simulation)
        say(simulation, published=True)
        assert filled(simulation) > before
        simulation.ack("pod-0")
        simulation.advance(300)
        assert filled(simulation) > before
        simulation.ack("pod-1")
        simulation.settle()
        (slot,) = filled(simulation)
        assert slot not in before
        assert simulation.unsettled() == {}
        simulation.delete(KIND, "manual")
        simulation.come_to_rest()
        assert filled(simulation) == set()

    def test_the_role_names_all_slots_before_the_root_does(self) -> None:
        simulation = at_rest()

        def named() -> set[str]:
            role = simulation.kube.objects[("Role", NAMESPACE, "kvs-tiny")]
            return {name for rule in role["rules"] for name in rule["resourceNames"]}

        assert not any(name.startswith("kvs-tiny-bundle-p") for name in named())
        simulation.put(manual())
        simulation.come_to_rest()
        used = {names.pool_shard("tiny", ref.index, ref.slot) for ref in simulation.bundle().root.pools}
        assert used <= named()
        told = CachedModel.parse({**TINY, "metadata": {**TINY["metadata"], "uid": "u"}})
        rules = build_role(told, 1, has_pools=True)["rules"]
        assert len({name for rule in rules for name in rule["resourceNames"]}) == 2 + 2 + 2 * MAX_POOLS


class TestFaults:
    def test_an_operator_that_starts_anew_reads_pools_back_and_writes_nothing(self) -> None:
        simulation = at_rest(manual())
        say(simulation, published=True)
        simulation.come_to_rest()
        pools, written = simulation.bundle().pools, simulation.kube.writes
        simulation.renderer.silent = {"pod-0", "pod-1"}
        simulation.restart()
        simulation.settle()
        assert simulation.bundle().pools == pools
        assert simulation.kube.writes == written

    def test_a_damaged_shard_costs_its_pool_alone_and_is_written_anew_when_pods_have_rendered(self) -> None:
        simulation = at_rest(manual(), pool("other", prefixes=prefixes(TEXT.upper())))
        before, entry = versions(simulation), simulation.entry("acme")
        (ref, _) = simulation.bundle().root.pools
        name = names.pool_shard("tiny", ref.index, ref.slot)
        raw = simulation.kube.objects[("Secret", NAMESPACE, name)]
        simulation.put({**raw, "data": {SHARD_DATA_KEY: "e30="}})
        simulation.renderer.silent = {"pod-0", "pod-1"}
        simulation.restart()
        simulation.come_to_rest()
        assert set(gate_reads(simulation).pools) == {"other"}
        assert simulation.entry("acme") == entry
        simulation.renderer.silent = set()
        simulation.advance(60)
        simulation.come_to_rest()
        assert versions(simulation) == before
        assert simulation.unsettled() == {}

    def test_a_shard_that_somebody_changes_is_written_back(self) -> None:
        simulation = at_rest(manual())
        (ref,) = simulation.bundle().root.pools
        before = versions(simulation)
        name = names.pool_shard("tiny", ref.index, ref.slot)
        raw = simulation.kube.objects[("Secret", NAMESPACE, name)]
        simulation.put({**raw, "data": {SHARD_DATA_KEY: "e30="}})
        simulation.come_to_rest()
        assert versions(simulation) == before
        assert simulation.unsettled() == {}

    def test_pools_come_back_after_an_operator_of_the_version_before_has_led(self) -> None:
        simulation = at_rest(manual())
        before = versions(simulation)
        stored = simulation.kube.objects[("Secret", NAMESPACE, names.bundle_root("tiny"))]
        root = json.loads(base64.b64decode(stored["data"][ROOT_DATA_KEY]))
        del root["pools"]
        root["revision"] += 1
        plain = base64.b64encode(json.dumps(root).encode()).decode()
        simulation.put({**stored, "data": {ROOT_DATA_KEY: plain}})
        simulation.restart()
        simulation.come_to_rest()
        assert versions(simulation) == before
        assert simulation.unsettled() == {}

    @pytest.mark.parametrize("after", [False, True])
    def test_an_operator_that_dies_at_any_write_leaves_a_bundle_that_gates_can_read(self, after: bool) -> None:
        start = at_rest()
        for number in count(1):
            simulation = start.clone()
            deaths = live(simulation, die_at=number, after=after)
            assert gate_reads(simulation).pools == {}
            assert filled(simulation) == set()
            assert simulation.unsettled() == {}
            if not deaths:
                break
        assert number > 20, "it was done before it had begun"


def live(simulation: Simulation, *, die_at: int, after: bool) -> int:
    """Let a pool come, be published, change and go, under an operator that dies once; return how often it did."""
    steps: list[Callable[[], None]] = [
        lambda: simulation.put(manual()),
        lambda: say(simulation, published=True),
        lambda: simulation.edit(KIND, "manual", prefixes=prefixes(TEXT.upper())),
        lambda: simulation.delete(KIND, "manual"),
    ]
    deaths = 0
    simulation.kill_at(die_at, after=after)
    for step in steps:
        try:
            step()
            simulation.come_to_rest()
        except Killed:
            deaths += 1
            gate_reads(simulation)
            simulation.restart()
            simulation.come_to_rest()
    return deaths
