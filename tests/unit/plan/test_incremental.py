"""Compiling only what changed gives what compiling everything gives."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import split_into_shards
from kvstrata.contract.wire import digest_bytes
from kvstrata.model.memo import Memo
from kvstrata.model.refs import BUNDLE, Key
from kvstrata.model.world import World
from kvstrata.plan.actions import CommitBundle, Plan
from kvstrata.plan.bundle.commit import plan_bundle
from kvstrata.plan.bundle.compile import compile_policy, gather
from tests.support.amounts import examples
from tests.support.objects import NAMESPACE, cpu_tier, domain, group, model, policy, redis_tier
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"

EDITS: dict[str, Any] = {
    "budget": lambda s: s.edit(TCP, "acme", budgets=[{"tier": "shared", "limit": "2Mi"}]),
    "unknown tier": lambda s: s.edit(TCP, "acme", budgets=[{"tier": "nowhere"}]),
    "suspended": lambda s: s.edit(TCP, "globex", suspend=True),
    "joins": lambda s: s.edit(TCP, "globex", isolation="Group", groupRef={"name": "lab"}, budgets=None),
    "leaves": lambda s: s.edit(TCP, "globex", isolation="Isolated", groupRef=None),
    "public": lambda s: s.edit(TCP, "globex", isolation="Public", groupRef=None, budgets=None),
    "other models": lambda s: s.edit(TCP, "acme", models={"names": ["other"]}),
    "all models": lambda s: s.edit(TCP, "acme", models=None),
    "members": lambda s: s.edit("TenantGroup", "lab", members=["a"]),
    "all members": lambda s: s.edit("TenantGroup", "lab", members=["a", "b", "globex"]),
    "group budget": lambda s: s.edit("TenantGroup", "lab", budgets=[{"tier": "shared", "retention": "1h"}]),
    "member's retention": lambda s: s.edit(TCP, "b", budgets=[{"tier": "shared", "retention": "20m"}]),
    "generation": lambda s: s.edit(TCP, "acme", cacheGeneration=7),
    "group generation": lambda s: s.edit("TenantGroup", "lab", cacheGeneration=3),
    "tier": lambda s: s.edit("CacheTier", "shared", maxRetention="30m"),
    "tier again": lambda s: s.edit("CacheTier", "shared", maxRetention="2h"),
    "public budget": lambda s: s.edit("CacheDomain", "default", publicBudgets=[{"tier": "shared"}]),
    "new tier": lambda s: s.put(cpu_tier("nowhere")),
    "new model": lambda s: s.put(model("other")),
    "rival": lambda s: s.put(policy("acme", name="acme-again")),
    "no rival": lambda s: ("acme-again" in s.world.policies) and s.delete(TCP, "acme-again"),
}


def start() -> Simulation:
    simulation = Simulation(
        domain(),
        redis_tier(),
        model(tiers=("shared",)),
        group("lab", "a", "b", "globex"),
        policy("acme", budgets=[{"tier": "shared", "limit": "1Mi"}]),
        policy("globex", group="lab"),
        policy("a", group="lab"),
        policy("b", group="lab"),
    )
    simulation.settle()
    return simulation


def without_memory(world: World) -> World:
    return replace(world, memo=Memo())


def committed(plan: Plan) -> tuple[Any, ...]:
    return tuple(
        (action.root, dict(action.entries), dict(action.shards))
        for action in plan.actions
        if isinstance(action, CommitBundle)
    )


@settings(max_examples=examples(25), derandomize=True)
@given(st.lists(st.sampled_from(sorted(EDITS)), min_size=1, max_size=6))
def test_what_is_remembered_is_what_would_be_computed(names: list[str]) -> None:
    simulation = start()
    for name in names:
        EDITS[name](simulation)
        world, fresh = simulation.world, without_memory(simulation.world)
        for found in world.policies.values():
            assert compile_policy(world, gather(world, found)) == compile_policy(fresh, gather(fresh, found)), (
                name,
                found.name,
            )
        for other in world.models:
            assert committed(plan_bundle(world, other, simulation.now)) == committed(
                plan_bundle(fresh, other, simulation.now)
            ), name
        simulation.settle()
        for other, kept in simulation.world.bundles.items():
            entries = tuple(kept.bundle.entries.values())
            whole = split_into_shards(entries, minimum_count=len(kept.bundle.root.shards))
            assert [ref.digest for ref in kept.bundle.root.shards] == [digest_bytes(d) for d in whole], other


def test_one_edit_among_many_writes_one_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstrata.contract.policy.bundle.MAX_SHARD_BYTES", 2000)
    monkeypatch.setattr("kvstrata.plan.bundle.commit.MAX_SHARD_BYTES", 2000)
    simulation = Simulation(domain(), model(), *(policy(f"tenant-{number:03}") for number in range(30)))
    simulation.come_to_rest()
    before = simulation.bundle().root
    assert len(before.shards) > 1, "the test needs a bundle of several shards"
    simulation.edit(TCP, "tenant-007", suspend=True)
    simulation.settle()
    after = simulation.bundle().root
    moved = [old.index for old, new in zip(before.shards, after.shards, strict=True) if old != new]
    assert len(moved) == 1
    assert after.revision == before.revision + 1


def test_a_status_that_was_written_makes_no_object_anew() -> None:
    simulation = start()
    before = simulation.step(Key("CachedModel", NAMESPACE, "tiny")).apply
    for kind, name in (("CachedModel", "tiny"), ("CacheTier", "shared")):
        raw = deepcopy(simulation.kube.objects[(kind, NAMESPACE, name)])
        raw["metadata"]["resourceVersion"] = "99999"
        raw["status"]["conditions"][0]["message"] = "something else"
        simulation.store.observe(raw)
    after = simulation.step(Key("CachedModel", NAMESPACE, "tiny")).apply
    assert before
    assert all(one is other for one, other in zip(before, after, strict=True))


def test_a_model_that_is_made_again_gets_a_bundle_that_was_compiled_for_it() -> None:
    simulation = start()
    simulation.delete("CachedModel", "tiny")
    assert (BUNDLE, "tiny") not in simulation.world.memo._known
