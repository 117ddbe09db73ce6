"""Retention of shared blocks: the shortest that the scope or a tenant in it sets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind
from kvstrata.plan.budgets.retention import retentions_in
from tests.support.objects import NAMESPACE, cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

POLICY, GROUP, DOMAIN = "TenantCachePolicy", "TenantGroup", "CacheDomain"
HOW: dict[str, dict[str, Any]] = {"group": {"group": "lab"}, "public": {"isolation": "Public"}}


def kept_for(retention: str, tier: str = "shared") -> dict[str, Any]:
    return {"budgets": [{"tier": tier, "retention": retention}]}


def at_rest(*objects: Any) -> Simulation:
    tiers = (cpu_tier(), redis_tier())
    simulation = Simulation(*tiers, model(tiers=("cpu", "shared")), pod("pod-0"), *objects)
    simulation.come_to_rest()
    return simulation


def retention_s(simulation: Simulation, tenant: str) -> dict[str, int | None]:
    return {budget.tier: budget.retention_s for budget in simulation.entry(tenant).budgets}


@pytest.mark.parametrize("how", sorted(HOW))
def test_a_shared_scope_keeps_blocks_no_longer_than_its_strictest_member(how: str) -> None:
    shared = [{"tier": "shared", "limit": "2Mi", "retention": "4h"}]
    simulation = at_rest(domain(publicBudgets=shared), group("lab", "a", "b", budgets=shared), policy("a", **HOW[how]))
    assert retention_s(simulation, "a") == {"shared": 4 * 3600}
    simulation.put(policy("b", **HOW[how], **kept_for("1h")))
    simulation.come_to_rest()
    row = EnforcedBudget("shared", limit_bytes=2 << 20, retention_s=3600)
    assert (simulation.entry("a").budgets, simulation.entry("b").budgets) == ((row,), (row,))
    for kind, name in ((POLICY, "a"), (POLICY, "b"), (GROUP, "lab"), (DOMAIN, "default")):
        assert simulation.condition(kind, name, "Stalled")[0] != "True"
    assert simulation.condition(POLICY, "a", "Enforced")[0] == "True"
    assert simulation.unsettled() == {}
    simulation.edit(POLICY, "b", **kept_for("9h"))
    simulation.come_to_rest()
    assert retention_s(simulation, "a") == retention_s(simulation, "b") == {"shared": 4 * 3600}, "none lengthens it"
    simulation.edit(POLICY, "b", **kept_for("10m"))
    simulation.come_to_rest()
    assert retention_s(simulation, "a") == {"shared": 600}
    simulation.delete(POLICY, "b")
    simulation.come_to_rest()
    assert retention_s(simulation, "a") == {"shared": 4 * 3600}
    assert simulation.unsettled() == {}


@pytest.mark.parametrize("tier", ["cpu", "shared"])
def test_a_members_retention_holds_on_tiers_without_a_budget_of_the_group(tier: str) -> None:
    strict = policy("b", group="lab", suspend=True, **kept_for("30m", tier))
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), strict)
    assert simulation.entry("a").budgets == (EnforcedBudget(tier, retention_s=1800),)
    simulation.edit(GROUP, "lab", members=["a"])
    simulation.come_to_rest()
    assert simulation.entry("a").budgets == ()
    assert simulation.entry("b").budgets == (EnforcedBudget(tier, retention_s=1800),), "its own, while it is isolated"
    assert simulation.unsettled() == {}


def test_tenants_that_share_nothing_shorten_no_other_tenants_retention() -> None:
    alone, outsider = policy("b", **kept_for("1h")), policy("c", group="lab", **kept_for("1h"))
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), alone, outsider)
    assert retention_s(simulation, "a") == {}
    assert retention_s(simulation, "b") == retention_s(simulation, "c") == {"shared": 3600}


def test_a_member_that_becomes_isolated_shortens_the_groups_retention_at_no_moment() -> None:
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    simulation.edit(POLICY, "b", isolation="Isolated", groupRef=None, **kept_for("1m"))
    world = simulation.world
    assert retentions_in(world, world.policies["a"], Scope(ScopeKind.GROUP, "lab")) == {}


def concerned(simulation: Simulation, tenant: str, **spec: Any) -> set[str]:
    """Return the policies that are planned again when a policy is edited, besides itself."""
    raw = simulation.kube.objects[POLICY, NAMESPACE, tenant]
    metadata = {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1, "resourceVersion": "1000000"}
    keys = simulation.store.observe({**raw, "metadata": metadata, "spec": {**raw["spec"], **spec}})
    return {key.name for key in keys if key.kind == POLICY} - {tenant}


@pytest.mark.parametrize("how", sorted(HOW))
@pytest.mark.parametrize(
    ("tenant", "spec", "others"),
    [
        ("a", {"suspend": True}, ""),
        ("b", kept_for("2h"), "ac"),
        ("c", {**kept_for("1h"), "suspend": True}, ""),
        ("c", kept_for("1m"), "ab"),
        ("c", {"budgets": []}, "ab"),
    ],
)
def test_sharers_are_planned_again_when_a_retention_changes_and_only_then(
    how: str, tenant: str, spec: dict[str, Any], others: str
) -> None:
    shared = (policy("a", **HOW[how]), policy("b", **HOW[how]), policy("c", **HOW[how], **kept_for("1h")))
    simulation = at_rest(group("lab", "a", "b", "c"), *shared, policy("alone"))
    assert concerned(simulation, tenant, **spec) == set(others)


retentions = st.lists(st.integers(1, 48), min_size=1, max_size=4)


@given(retentions, st.integers(1, 48), st.booleans())
def test_a_tenant_that_joins_lengthens_no_retention(present: list[int], joining: int, public: bool) -> None:
    tenants = [f"t{number}" for number in range(len(present))]
    how = HOW["public" if public else "group"]
    scope = PUBLIC_SCOPE if public else Scope(ScopeKind.GROUP, "lab")
    simulation = Simulation(
        redis_tier(),
        group("lab", *tenants, "new"),
        *(policy(tenant, **how, **kept_for(f"{hours}h")) for tenant, hours in zip(tenants, present, strict=True)),
    )
    simulation.put(policy("new", **how, **kept_for(f"{joining}h")))
    world = simulation.world
    found = {tenant: retentions_in(world, world.policies[tenant], scope) for tenant in (*tenants, "new")}
    assert all(one == {"shared": 3600 * min(*present, joining)} for one in found.values())
