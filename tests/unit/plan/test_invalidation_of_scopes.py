"""What an invalidation reaches: the scopes that it names, shared ones by choice, and no others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.objects import cpu_tier, domain, group, invalidation, model, pod, policy
from tests.support.worlds import Simulation

from .invalidations import KIND, at_rest, phase


def test_all_leaves_no_keyspace_as_it_was() -> None:
    simulation = at_rest(
        group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"), policy("c"),
        policy("d", isolation="Public"),
    )  # fmt: skip
    before = simulation.bundle().keyspaces
    simulation.put(invalidation("now", scope={"all": True}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert not before & simulation.bundle().keyspaces
    assert len(before) == len(simulation.bundle().keyspaces) == 3


def test_a_groups_invalidation_leaves_the_others_alone() -> None:
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"), policy("c"))
    before = {tenant: simulation.entry(tenant).keyspace for tenant in "abc"}
    simulation.put(invalidation("now", scope={"group": "lab"}))
    simulation.come_to_rest()
    after = {tenant: simulation.entry(tenant).keyspace for tenant in "abc"}
    assert phase(simulation) == "Complete"
    assert after["a"] == after["b"] != before["a"]
    assert after["c"] == before["c"]


@pytest.mark.parametrize(("choice", "rolled"), [("Roll", True), ("Exclude", False)])
def test_a_sharing_tenants_scope_is_rolled_or_left_and_named(choice: str, rolled: bool) -> None:
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    before = simulation.entry("a").keyspace
    simulation.put(invalidation("now", scope={"tenant": "a"}, sharedScopes=choice))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert (simulation.entry("a").keyspace != before) == rolled
    assert simulation.entry("a").keyspace == simulation.entry("b").keyspace
    assert ("shared" in simulation.status(KIND, "now")["message"]) == (not rolled)


def test_of_two_policies_for_a_tenant_the_one_in_force_is_invalidated() -> None:
    simulation = at_rest(policy("acme", name="zz-older"), policy("acme", name="aa-younger"))
    before = simulation.entry("acme").keyspace
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert simulation.entry("acme").keyspace != before


@pytest.mark.parametrize(
    "change",
    [
        {"budgets": [{"tier": "gone", "limit": "1Mi"}]},
        {"models": {"names": ["gone"]}},
        {"isolation": "Public", "models": {"names": ["gone"]}},
    ],
)
def test_an_invalid_spec_does_not_shield_a_tenant_from_invalidation(change: dict[str, Any]) -> None:
    simulation = at_rest(policy("acme"))
    simulation.edit("TenantCachePolicy", "acme", **change)
    simulation.come_to_rest()
    before = simulation.entry("acme").keyspace
    choice = {"sharedScopes": "Roll"} if "isolation" in change else {}
    simulation.put(invalidation("now", scope={"tenant": "acme"}, **choice))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert before not in simulation.bundle().keyspaces
    assert simulation.unsettled() == {}


def test_a_groups_invalidation_reaches_a_member_whose_spec_is_invalid() -> None:
    simulation = at_rest(group("lab", "a"), policy("a", group="lab"))
    simulation.edit("TenantCachePolicy", "a", models={"names": ["tiny", "gone"]})
    simulation.come_to_rest()
    before = simulation.entry("a").keyspace
    simulation.put(invalidation("now", scope={"group": "lab"}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert before not in simulation.bundle().keyspaces


def test_two_invalidations_of_one_tenant_at_once_both_complete_and_agree_on_one_epoch() -> None:
    for seed in range(10):
        simulation = Simulation(domain(), cpu_tier(), model(), policy("acme"), pod("pod-0"), seed=seed, shuffle=True)
        simulation.come_to_rest()
        before = simulation.entry("acme").keyspace
        simulation.put(invalidation("one", scope={"tenant": "acme"}), invalidation("two", scope={"tenant": "acme"}))
        simulation.come_to_rest()
        assert (phase(simulation, "one"), phase(simulation, "two")) == ("Complete", "Complete")
        assert simulation.entry("acme").keyspace != before
        assert simulation.status("TenantCachePolicy", "acme")["scope"]["rolls"] in (1, 2)
        assert simulation.unsettled() == {}


@pytest.mark.parametrize(("choice", "rolled"), [("Roll", True), ("Exclude", False)])
def test_a_scope_that_the_tenant_has_left_counts_as_shared(choice: str, rolled: bool) -> None:
    simulation = Simulation(model(), group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    simulation.put(pod("pod-0"))
    simulation.come_to_rest()
    simulation.edit("TenantGroup", "lab", members=["b"])
    simulation.come_to_rest()
    before = simulation.status("TenantGroup", "lab")["scope"]["epoch"]
    simulation.put(invalidation("unsaid", scope={"tenant": "a"}))
    simulation.put(invalidation("said", scope={"tenant": "a"}, sharedScopes=choice))
    simulation.come_to_rest()
    assert simulation.condition("CacheInvalidation", "unsaid", "Failed") == ("True", "SharedScopeChoiceRequired")
    assert simulation.status("CacheInvalidation", "said")["phase"] == "Complete"
    assert (simulation.status("TenantGroup", "lab")["scope"]["epoch"] != before) is rolled


def test_a_models_invalidation_reaches_all_scopes_that_use_it_and_no_others() -> None:
    simulation = at_rest(
        model("other"), group("lab", "b"), group("away", "e"), policy("a"),
        policy("b", group="lab", models={"names": ["tiny"]}), policy("c", models={"names": ["other"]}),
        policy("d", isolation="Public"), policy("e", group="away", models={"names": ["other"]}),
    )  # fmt: skip
    tiny = simulation.bundle().keyspaces
    others = {tenant: simulation.bundle("other").entries[tenant].keyspace for tenant in "ce"}
    simulation.put(invalidation("now", scope={"model": "tiny"}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["scopeSummary"] == "model/tiny"
    assert len(tiny) == len(simulation.bundle().keyspaces) == 3
    assert not tiny & (simulation.bundle().keyspaces | simulation.bundle("other").keyspaces)
    assert {tenant: simulation.bundle("other").entries[tenant].keyspace for tenant in "ce"} == others


def test_a_models_invalidation_reaches_a_tenant_whose_new_spec_is_invalid_and_does_not_name_it_any_more() -> None:
    simulation = at_rest(policy("a"), policy("b"))
    simulation.edit("TenantCachePolicy", "a", models={"names": ["gone"]})
    simulation.come_to_rest()
    before = simulation.entry("a").keyspace
    simulation.put(invalidation("now", scope={"model": "tiny"}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert before not in simulation.bundle().keyspaces
    assert simulation.unsettled() == {}


def test_a_models_invalidation_reaches_a_group_that_its_tenant_has_left() -> None:
    elsewhere = {"names": ["other"]}
    simulation = at_rest(
        model("other"), group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab", models=elsewhere)
    )
    simulation.edit("TenantGroup", "lab", members=["b"])
    simulation.come_to_rest()
    before = simulation.status("TenantGroup", "lab")["scope"]["epoch"]
    simulation.put(invalidation("now", scope={"model": "tiny"}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert simulation.status("TenantGroup", "lab")["scope"]["epoch"] != before


def test_a_scope_whose_policy_is_being_deleted_gets_no_successor() -> None:
    simulation = at_rest(policy("acme"), policy("globex"))
    simulation.delete("TenantCachePolicy", "acme")
    simulation.settle()
    simulation.put(invalidation("now", scope={"all": True}, mode="Eager"))
    simulation.settle()
    rolled = {one["name"]: one.get("newEpoch") for one in simulation.status(KIND, "now")["scopes"]}
    assert rolled["acme"] is None
    assert rolled["globex"]
