"""Who reads a PrefixPool: both sides agree, and nobody reads by the right of a neighbour in the same scope."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from kvstrata.contract.policy.cache_view import effective_pools
from kvstrata.model.refs import Key
from tests.support.amounts import examples
from tests.support.objects import NAMESPACE, Raw, cpu_tier, domain, group, model, pod, policy, pool
from tests.support.worlds import Simulation

POLICY, POOL, GROUP = "TenantCachePolicy", "PrefixPool", "TenantGroup"


def reading(*names: str) -> dict[str, Any]:
    return {"pools": [{"name": name} for name in names]}


def at_rest(*objects: Raw, models: tuple[Raw, ...] = ()) -> Simulation:
    simulation = Simulation(cpu_tier(), *(models or (model(tiers=("cpu",)),)), *objects)
    pods = [(f"pod-{number}", name) for name in simulation.world.models for number in (0, 1)]
    simulation.put(*(pod(f"{pod_name}-{name}", name) for pod_name, name in pods))
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def resolved(simulation: Simulation, name: str) -> tuple[str, str]:
    return simulation.condition(POLICY, name, "PoolsResolved")


def message(simulation: Simulation, name: str) -> str:
    told = simulation.status(POLICY, name)["conditions"]
    return next(str(c["message"]) for c in told if c["type"] == "PoolsResolved")


class TestBothSides:
    @pytest.mark.parametrize("readers", [{"tenants": ["acme"]}, {"groups": ["lab"]}, {"public": True}])
    def test_a_tenant_reads_a_pool_that_it_lists_and_that_lists_it(self, readers: Raw) -> None:
        # The tenant stays isolated: the group need not be named by its policy.
        simulation = at_rest(
            group("lab", "acme", sharing="PoolsOnly"),
            pool("manual", readers=readers),
            policy("acme", **reading("manual")),
        )
        assert simulation.entry("acme").pools == ("manual",)
        assert resolved(simulation, "acme") == ("True", "PoolsResolved")

    def test_a_tenant_that_does_not_list_a_pool_reads_none(self) -> None:
        simulation = at_rest(pool("manual"), policy("acme"))
        assert simulation.entry("acme").pools == ()
        assert resolved(simulation, "acme") == ("", "")

    def test_a_tenant_that_a_pool_does_not_list_is_told_so(self) -> None:
        simulation = at_rest(pool("manual", "globex"), policy("acme", **reading("manual")))
        assert simulation.entry("acme").pools == ()
        assert resolved(simulation, "acme") == ("False", "NotAReader")
        assert simulation.condition(POLICY, "acme", "Enforced") == ("True", "AllPodsAcknowledged")

    def test_the_order_is_that_of_the_policy(self) -> None:
        simulation = at_rest(pool("a"), pool("b"), pool("c"), policy("acme", **reading("c", "a", "b")))
        assert simulation.entry("acme").pools == ("c", "a", "b")

    def test_one_name_that_is_wrong_does_not_cost_the_others(self) -> None:
        simulation = at_rest(pool("manual"), policy("acme", **reading("gone", "manual")))
        assert simulation.entry("acme").pools == ("manual",)
        assert resolved(simulation, "acme") == ("False", "PoolNotFound")
        assert "there: manual" in message(simulation, "acme")

    def test_a_pool_that_comes_later_is_read_from_then_on(self) -> None:
        simulation = at_rest(policy("acme", **reading("manual")))
        assert resolved(simulation, "acme") == ("False", "PoolNotFound")
        simulation.put(pool("manual"))
        simulation.come_to_rest()
        assert simulation.entry("acme").pools == ("manual",)
        assert resolved(simulation, "acme") == ("True", "PoolsResolved")

    @pytest.mark.parametrize(
        "take_off",
        [
            lambda s: s.edit(POOL, "manual", readers={"tenants": ["globex"]}),
            lambda s: s.edit(GROUP, "lab", members=["globex"]),
            lambda s: s.delete(GROUP, "lab"),
            lambda s: s.delete(POOL, "manual"),
            lambda s: s.edit(POOL, "manual", modelRef={"name": "other"}),
        ],
    )
    @pytest.mark.parametrize("broken", [False, True])
    def test_a_reader_that_is_taken_off_reads_no_more_even_under_a_broken_spec(
        self, take_off: Any, broken: bool
    ) -> None:
        simulation = at_rest(
            group("lab", "acme"), pool("manual", readers={"groups": ["lab"]}), policy("acme", **reading("manual"))
        )
        since = simulation.entry("acme").since
        if broken:
            simulation.edit(POLICY, "acme", budgets=[{"tier": "gone", "limit": "1Mi"}])
            simulation.come_to_rest()
            assert simulation.entry("acme").pools == ("manual",)
        take_off(simulation)
        simulation.come_to_rest()
        assert simulation.entry("acme").pools == ()
        assert simulation.entry("acme").since > since
        assert simulation.unsettled() == {}


class TestModels:
    MODELS = (model("one", tiers=("cpu",), labels={"kind": "chat"}), model("two", tiers=("cpu",)))

    def test_a_bundle_names_the_pools_of_its_own_model(self) -> None:
        simulation = at_rest(
            pool("a", model="one"), pool("b", model="two"), policy("acme", **reading("a", "b")), models=self.MODELS
        )
        assert simulation.entry("acme", "one").pools == ("a",)
        assert simulation.entry("acme", "two").pools == ("b",)
        assert simulation.condition(POLICY, "acme", "Enforced")[0] == "True"
        assert resolved(simulation, "acme") == ("True", "PoolsResolved")

    @pytest.mark.parametrize(
        "chosen", [{"names": ["one"]}, {"selector": {"matchLabels": {"kind": "chat"}}}, {"names": ["one", "two"]}]
    )
    def test_a_pool_of_a_model_that_the_policy_does_not_select_is_told(self, chosen: Raw) -> None:
        simulation = at_rest(pool("b", model="two"), policy("acme", models=chosen, **reading("b")), models=self.MODELS)
        expected = ("True", "PoolsResolved") if "two" in chosen.get("names", ()) else ("False", "PoolOfOtherModel")
        assert resolved(simulation, "acme") == expected


class TestScopes:
    SHARING = (policy("a", isolation="Public", **reading("manual")), policy("b", isolation="Public"))

    def test_a_tenant_of_a_scope_that_may_not_read_narrows_it_for_all(self) -> None:
        simulation = at_rest(pool("manual"), *self.SHARING)
        assert effective_pools(simulation.bundle().entries.values()) == {}
        assert resolved(simulation, "a") == ("False", "NarrowedByScope")
        assert "because b of" in message(simulation, "a")

    @pytest.mark.parametrize(
        "mend",
        [
            lambda s: s.edit(POLICY, "b", **reading("manual")),
            lambda s: s.edit(POLICY, "b", suspend=True),
            lambda s: s.edit(POLICY, "b", isolation="Isolated"),
            lambda s: s.delete(POLICY, "b"),
        ],
    )
    def test_it_is_read_as_soon_as_nobody_narrows_it_and_back(self, mend: Any) -> None:
        simulation = at_rest(pool("manual"), *self.SHARING)
        mend(simulation)
        simulation.come_to_rest()
        assert resolved(simulation, "a") == ("True", "PoolsResolved")
        assert simulation.unsettled() == {}
        simulation.put(policy("c", isolation="Public"))
        simulation.come_to_rest()
        assert resolved(simulation, "a") == ("False", "NarrowedByScope")
        assert "because c of" in message(simulation, "a")

    def test_who_is_missing_follows_also_while_it_stays_narrowed(self) -> None:
        simulation = at_rest(pool("manual"), *self.SHARING)
        simulation.put(policy("c", isolation="Public"))
        simulation.come_to_rest()
        assert "because b, c of" in message(simulation, "a")
        simulation.edit(POLICY, "b", **reading("manual"))
        simulation.come_to_rest()
        assert "because c of" in message(simulation, "a")

    def test_what_does_not_concern_the_pool_plans_no_neighbour(self) -> None:
        simulation = at_rest(pool("manual"), *self.SHARING)
        done = len(simulation.plans)
        simulation.edit(POLICY, "b", classification="Internal")
        simulation.come_to_rest()
        assert Key(POLICY, NAMESPACE, "a") not in [key for key, _ in simulation.plans[done:]]


class TestPoolsOnly:
    def test_members_share_no_block_and_the_group_says_when_its_pools_are_enforced(self) -> None:
        simulation = at_rest(
            group("lab", "a", "b", sharing="PoolsOnly"),
            pool("manual", readers={"groups": ["lab"]}),
            policy("a", group="lab", **reading("manual")),
            policy("b", budgets=[{"tier": "cpu", "limit": "1Mi"}], **reading("manual")),
        )
        assert simulation.entry("a").keyspace != simulation.entry("b").keyspace
        assert simulation.entry("a").pools == simulation.entry("b").pools == ("manual",)
        assert simulation.condition(GROUP, "lab", "Ready")[0] == "True"
        assert simulation.condition(GROUP, "lab", "Enforced") == ("True", "AllPodsAcknowledged")
        assert simulation.condition(GROUP, "lab", "MembersResolved") == ("True", "AllMembersJoined")
        assert simulation.status(GROUP, "lab")["joined"] == 2
        assert "usage" not in simulation.status(GROUP, "lab")

    def test_it_is_not_enforced_before_the_pods_acknowledged_the_members_entries(self) -> None:
        simulation = at_rest(
            group("lab", "a", sharing="PoolsOnly"), pool("manual", readers={"groups": ["lab"]}), policy("a")
        )
        simulation.edit(POLICY, "a", **reading("manual"))
        simulation.settle()
        assert simulation.condition(GROUP, "lab", "Enforced") == ("False", "AwaitingAcks")
        simulation.ack("pod-0-tiny")
        simulation.ack("pod-1-tiny")
        simulation.come_to_rest()
        assert simulation.condition(GROUP, "lab", "Enforced")[0] == "True"

    def test_a_member_without_policy_is_told(self) -> None:
        simulation = at_rest(group("lab", "a", "b", sharing="PoolsOnly"), policy("a"))
        assert simulation.condition(GROUP, "lab", "MembersResolved") == ("False", "MembersWithoutPolicy")
        simulation.put(policy("b"))
        simulation.come_to_rest()
        assert simulation.condition(GROUP, "lab", "MembersResolved") == ("True", "AllMembersJoined")
        simulation.delete(POLICY, "a")
        simulation.come_to_rest()
        assert simulation.condition(GROUP, "lab", "MembersResolved") == ("False", "MembersWithoutPolicy")

    def test_members_that_shared_fully_before_remember_it(self) -> None:
        simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
        epoch, shared = simulation.status(GROUP, "lab")["scope"]["epoch"], simulation.entry("a").keyspace
        simulation.edit(GROUP, "lab", sharing="PoolsOnly")
        simulation.come_to_rest()
        assert simulation.status(GROUP, "lab")["scope"]["epoch"] == epoch
        assert shared not in simulation.bundle().keyspaces
        for tenant in "ab":
            assert simulation.status(POLICY, tenant)["formerScopes"] == [
                {"kind": "Group", "name": "lab", "epoch": epoch}
            ]
        simulation.edit(GROUP, "lab", sharing="Full")
        simulation.come_to_rest()
        assert simulation.entry("a").keyspace == simulation.entry("b").keyspace == shared


TENANTS, POOLS, GROUPS = ("t0", "t1", "t2", "t3"), ("p0", "p1"), ("g0", "g1")


@st.composite
def worlds(draw: st.DrawFn) -> list[Raw]:
    def some(of: tuple[str, ...]) -> list[str]:
        return sorted(draw(st.sets(st.sampled_from(of))))

    objects = [
        group(name, *some(TENANTS), sharing=draw(st.sampled_from(("Full", "PoolsOnly"))))
        for name in GROUPS
        if draw(st.booleans())
    ]
    for name in POOLS:
        readers = {"tenants": some(TENANTS), "groups": some(GROUPS)}
        readers = {kind: listed for kind, listed in readers.items() if listed}
        objects.append(pool(name, model=draw(st.sampled_from(("m0", "m1"))), readers=readers or {"public": True}))
    for tenant in TENANTS:
        isolation = draw(st.sampled_from(("Isolated", "Public", *GROUPS)))
        spec: dict[str, Any] = {"group": isolation} if isolation in GROUPS else {"isolation": isolation}
        objects.append(policy(tenant, suspend=draw(st.booleans()), **reading(*some(POOLS)), **spec))
    return objects


def run(objects: list[Raw], seed: int = 0, *, shuffle: bool = False) -> Simulation:
    simulation = Simulation(
        domain(), cpu_tier(), model("m0", tiers=("cpu",)), model("m1", tiers=("cpu",)), seed=seed, shuffle=shuffle
    )
    for raw in objects:
        simulation.put(raw)
        if shuffle and simulation.random.random() < 0.5:
            simulation.settle()
    simulation.put(pod("pod-0", "m0"), pod("pod-1", "m1"))
    simulation.come_to_rest()
    return simulation


def by_the_specs(objects: list[Raw], tenant: str, name: str) -> bool:
    """Whether a tenant may read a pool, computed from the specs alone and not by the planner's code."""
    specs = {(raw["kind"], raw["metadata"]["name"]): raw["spec"] for raw in objects}
    readers = specs[POOL, name]["readers"]
    groups = [g for g in readers.get("groups", ()) if tenant in specs.get((GROUP, g), {}).get("members", ())]
    listed = readers.get("public") or tenant in readers.get("tenants", ()) or groups
    return bool(listed) and {"name": name} in specs[POLICY, tenant].get("pools", ())


@settings(max_examples=examples(40), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(worlds(), st.integers(0, 2**16))
def test_a_keyspace_reads_what_each_of_its_tenants_may_in_whatever_order_things_come(
    objects: list[Raw], seed: int
) -> None:
    shuffled = objects[:]
    random.Random(seed).shuffle(shuffled)
    simulation = run(shuffled, seed, shuffle=True)
    assert simulation.unsettled() == {}
    for name in ("m0", "m1"):
        entries = simulation.bundle(name).entries
        effective = effective_pools(entries.values())
        for tenant, entry in entries.items():
            own = [p for p in POOLS if simulation.world.pools[p].spec.model_ref.name == name]
            assert sorted(entry.pools) == [p for p in own if by_the_specs(objects, tenant, p)]
            for read in effective.get(entry.keyspace, ()):
                assert entry.suspended or by_the_specs(objects, tenant, read), (tenant, read)
    straight = run(objects)
    for tenant in TENANTS:
        assert resolved(simulation, tenant) == resolved(straight, tenant)


@settings(max_examples=examples(20), phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(worlds(), worlds())
def test_one_state_of_readers_after_another_is_the_same_as_the_second_alone(
    first: list[Raw], second: list[Raw]
) -> None:
    simulation = run(first)
    kept = {(raw["kind"], raw["metadata"]["name"]) for raw in second}
    for raw in first:
        if (raw["kind"], raw["metadata"]["name"]) not in kept:
            simulation.delete(raw["kind"], raw["metadata"]["name"])
    for raw in second:
        simulation.put(raw)
    simulation.come_to_rest()
    fresh = run(second)
    for name in ("m0", "m1"):
        for tenant, entry in fresh.bundle(name).entries.items():
            assert simulation.entry(tenant, name).pools == entry.pools
    for tenant in TENANTS:
        assert resolved(simulation, tenant) == resolved(fresh, tenant)
    assert simulation.unsettled() == {}
