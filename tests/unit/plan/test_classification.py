"""Tiers for data of some classifications: who is kept off, what pods are told, and what conditions say of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstrata.api.common import Classification
from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.contract.policy.cache_view import CacheView
from kvstrata.contract.policy.keyspace import PUBLIC_SCOPE, Scope, ScopeKind
from kvstrata.model.refs import Key
from kvstrata.plan.budgets.classification import denied_tiers
from tests.support.objects import NAMESPACE, cpu_tier, group, model, pod, policy, pool, redis_tier
from tests.support.worlds import Simulation

TIER, POLICY, GROUP, DOMAIN = "CacheTier", "TenantCachePolicy", "TenantGroup", "CacheDomain"
LEVELS = [str(level) for level in Classification]
ADMITTED = ("True", "TiersAdmitted")
LEFT_OUT = ("False", "ClassificationNotAllowed")


def at_rest(*objects: Any, allowed: list[str] | None = None, serving: int = 1) -> Simulation:
    """A model with memory and a shared tier, which takes data of the classifications in `allowed`."""
    tiers = (cpu_tier(), redis_tier(allowedClassifications=allowed or ["Public", "Internal"]))
    pods = (pod(f"pod-{number}") for number in range(serving))
    simulation = Simulation(*tiers, model(tiers=("cpu", "shared")), *pods, *objects)
    simulation.come_to_rest()
    return simulation


def denied(simulation: Simulation, tenant: str) -> set[str]:
    return {budget.tier for budget in simulation.entry(tenant).budgets if budget.denied}


def said(simulation: Simulation, kind: str, name: str, condition: str = "TiersAdmitted") -> str:
    conditions = simulation.status(kind, name)["conditions"]
    return str(next(one["message"] for one in conditions if one["type"] == condition))


@pytest.mark.parametrize(("level", "kept_off"), [*zip(LEVELS, [False, False, True, True], strict=True), (None, True)])
def test_a_tenant_is_kept_off_tiers_that_do_not_take_its_classification(level: str | None, kept_off: bool) -> None:
    simulation = at_rest(policy("acme", **({"classification": level} if level else {})))
    (row,) = simulation.entry("acme").budgets or (None,)
    assert row == (EnforcedBudget("shared", limit_bytes=0, denied=True) if kept_off else None)
    assert simulation.condition(POLICY, "acme", "TiersAdmitted") == (LEFT_OUT if kept_off else ADMITTED)
    assert simulation.condition(POLICY, "acme", "Enforced")[0] == "True"
    assert simulation.condition(POLICY, "acme", "Ready")[0] == "True"
    assert simulation.condition(TIER, "shared", "Ready")[0] == "True"
    assert simulation.unsettled() == {}


def test_where_no_tier_asks_for_a_classification_nothing_is_said() -> None:
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), policy("acme"), policy("b", isolation="Public"))
    simulation.come_to_rest()
    for kind, name in ((POLICY, "acme"), (POLICY, "b"), (DOMAIN, "default")):
        assert "TiersAdmitted" not in {one["type"] for one in simulation.status(kind, name)["conditions"]}


def test_a_tier_of_another_model_is_closed_to_the_tenant_and_not_told_of() -> None:
    simulation = at_rest(redis_tier("else", allowedClassifications=["Internal"]), policy("a", classification="Public"))
    assert denied(simulation, "a") == {"else"}
    assert simulation.condition(POLICY, "a", "TiersAdmitted") == ADMITTED


def test_a_group_is_as_strict_as_its_strictest_member() -> None:
    lab = group("lab", "a", "b", budgets=[{"tier": "shared", "limit": "2Mi", "guaranteed": "1Mi", "retention": "1h"}])
    simulation = at_rest(lab, policy("a", group="lab", classification="Public"))
    open_row = EnforcedBudget("shared", 2 << 20, 1 << 20, 3600)
    assert simulation.entry("a").budgets == (open_row,)
    simulation.put(policy("b", group="lab", classification="Confidential"))
    simulation.come_to_rest()
    closed = (EnforcedBudget.denying("shared", 3600),)
    assert (simulation.entry("a").budgets, simulation.entry("b").budgets) == (closed, closed)
    for kind, name in ((GROUP, "lab"), (POLICY, "a"), (POLICY, "b")):
        assert simulation.condition(kind, name, "TiersAdmitted") == LEFT_OUT
        assert simulation.condition(kind, name, "Stalled")[0] != "True", "a member must not stop its group"
        assert simulation.condition(kind, name, "Enforced")[0] == "True"
    assert "TenantCachePolicy b" in said(simulation, GROUP, "lab")
    assert simulation.condition(GROUP, "lab", "WithinBudget") == LEFT_OUT
    assert simulation.unsettled() == {}
    simulation.edit(POLICY, "b", classification="Internal")
    simulation.come_to_rest()
    assert simulation.entry("a").budgets == (open_row,)
    assert simulation.condition(POLICY, "a", "TiersAdmitted") == ADMITTED
    assert simulation.condition(GROUP, "lab", "WithinBudget")[0] != "False"
    assert simulation.unsettled() == {}


def test_who_does_not_share_blocks_makes_nobody_stricter() -> None:
    lab = group("lab", "a", "b")
    strict = policy("b", classification="Restricted")
    outsider = policy("c", group="lab", classification="Restricted")
    simulation = at_rest(lab, policy("a", group="lab", classification="Public"), strict, outsider)
    assert denied(simulation, "a") == set()
    assert denied(simulation, "b") == denied(simulation, "c") == {"shared"}


def test_a_member_that_leaves_opens_the_tier_for_those_that_stay() -> None:
    members = [policy(tenant, group="lab", classification=level) for tenant, level in (("a", "Public"), ("b", None))]
    members[1]["spec"].pop("classification")
    simulation = at_rest(group("lab", "a", "b"), *members)
    assert denied(simulation, "a") == {"shared"}
    simulation.edit(GROUP, "lab", members=["a"])
    simulation.come_to_rest()
    assert denied(simulation, "a") == set()
    assert denied(simulation, "b") == {"shared"}
    assert simulation.unsettled() == {}


def test_the_public_scope_is_as_strict_as_the_strictest_public_policy() -> None:
    simulation = at_rest(*(policy(tenant, isolation="Public", classification="Public") for tenant in "ab"))
    assert denied(simulation, "a") == denied(simulation, "b") == set()
    assert simulation.condition(DOMAIN, "default", "TiersAdmitted") == ADMITTED
    simulation.put(policy("c", isolation="Public"))
    simulation.come_to_rest()
    assert denied(simulation, "a") == {"shared"}
    assert simulation.condition(DOMAIN, "default", "TiersAdmitted") == LEFT_OUT
    assert "TenantCachePolicy c, which sets none" in said(simulation, DOMAIN, "default")
    assert simulation.unsettled() == {}
    simulation.delete(POLICY, "c")
    simulation.come_to_rest()
    assert denied(simulation, "a") == set()
    assert simulation.condition(POLICY, "a", "TiersAdmitted") == ADMITTED
    assert simulation.unsettled() == {}


def concerned(simulation: Simulation, tenant: str, **spec: Any) -> set[str]:
    """Return the policies that are planned again when a policy is edited, besides itself."""
    raw = simulation.kube.objects[POLICY, NAMESPACE, tenant]
    metadata = {**raw["metadata"], "generation": raw["metadata"]["generation"] + 1, "resourceVersion": "1000000"}
    keys = simulation.store.observe({**raw, "metadata": metadata, "spec": {**raw["spec"], **spec}})
    return {key.name for key in keys if key.kind == POLICY} - {tenant}


HOW: dict[str, dict[str, Any]] = {"group": {"group": "lab"}, "public": {"isolation": "Public"}}


def sharing(how: str, allowed: list[str] | None = None, **levels: str) -> Simulation:
    shared = [policy(tenant, classification=level, **HOW[how]) for tenant, level in levels.items()]
    return at_rest(group("lab", *levels), *shared, policy("alone", classification="Public"), allowed=allowed)


@pytest.mark.parametrize("how", sorted(HOW))
class TestSharersArePlannedAgain:
    """When the classifications of a shared scope change, and only then."""

    def test_when_a_classification_is_new_to_the_scope(self, how: str) -> None:
        simulation = sharing(how, a="Public", b="Public", c="Public")
        assert concerned(simulation, "c", classification="Confidential") == {"a", "b"}

    def test_when_the_last_of_a_classification_changes(self, how: str) -> None:
        simulation = sharing(how, a="Public", b="Public", c="Confidential")
        assert concerned(simulation, "c", classification="Public") == {"a", "b"}

    def test_not_when_others_keep_both_classifications_there(self, how: str) -> None:
        simulation = sharing(how, a="Public", b="Public", c="Public", d="Internal", e="Internal")
        assert concerned(simulation, "c", classification="Internal") == set()

    def test_not_where_no_tier_is_restricted(self, how: str) -> None:
        simulation = sharing(how, a="Public", b="Public")
        simulation.edit(TIER, "shared", allowedClassifications=None)
        simulation.come_to_rest()
        assert concerned(simulation, "b", classification="Restricted") == set()

    def test_when_the_only_one_of_a_classification_is_deleted(self, how: str) -> None:
        simulation = sharing(how, a="Public", b="Public", c="Confidential")
        raw = simulation.kube.objects[POLICY, NAMESPACE, "c"]
        keys = simulation.store.forget(POLICY, NAMESPACE, "c", raw)
        assert {Key(POLICY, NAMESPACE, "a"), Key(POLICY, NAMESPACE, "b")} <= keys
        assert Key(POLICY, NAMESPACE, "alone") not in keys


def test_a_suspended_member_counts_because_its_blocks_stay() -> None:
    strict = policy("b", group="lab", classification="Restricted", suspend=True)
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab", classification="Public"), strict)
    assert denied(simulation, "a") == {"shared"}


BUDGET = {"tier": "shared", "limit": "1Mi"}


class TestBlockedPolicies:
    """While a spec is invalid the last valid one stands, but for what a tier admits no more."""

    @pytest.mark.parametrize("level", ["Restricted", None])
    def test_a_budget_on_a_closed_tier_is_refused_and_the_tier_stays_closed(self, level: str | None) -> None:
        simulation = at_rest(policy("acme", budgets=[BUDGET], classification="Internal"))
        assert denied(simulation, "acme") == set()
        simulation.edit(POLICY, "acme", classification=level)
        simulation.come_to_rest()
        assert simulation.condition(POLICY, "acme", "Stalled") == ("True", "ClassificationNotAllowed")
        assert denied(simulation, "acme") == {"shared"}
        assert simulation.unsettled() == {}

    def test_a_tier_that_is_closed_later_is_closed_to_who_has_a_budget_there(self) -> None:
        simulation = at_rest(policy("acme", budgets=[BUDGET], classification="Internal"))
        simulation.edit(TIER, "shared", allowedClassifications=["Public"])
        simulation.come_to_rest()
        assert simulation.condition(POLICY, "acme", "Stalled") == ("True", "ClassificationNotAllowed")
        assert denied(simulation, "acme") == {"shared"}
        simulation.edit(TIER, "shared", allowedClassifications=None)
        simulation.come_to_rest()
        assert simulation.entry("acme").budgets == (EnforcedBudget("shared", limit_bytes=1 << 20),)
        assert simulation.unsettled() == {}

    def test_an_invalid_spec_opens_no_tier(self) -> None:
        simulation = at_rest(policy("acme", classification="Restricted"))
        simulation.edit(POLICY, "acme", classification="Public", budgets=[{"tier": "gone", "limit": "1Mi"}])
        simulation.come_to_rest()
        assert simulation.condition(POLICY, "acme", "Stalled") == ("True", "TierNotFound")
        assert denied(simulation, "acme") == {"shared"}


def test_what_one_entry_of_a_keyspace_denies_is_denied_to_the_whole_keyspace() -> None:
    """Entries of one scope differ while one of its policies is invalid: the order of tenants must not matter."""
    for invalid in "ab":
        simulation = at_rest(
            group("lab", "a", "b"),
            *(policy(tenant, group="lab", classification="Restricted") for tenant in "ab"),
        )
        broken = {"models": {"names": ["gone"]}, "classification": "Public"}
        simulation.edit(POLICY, invalid, **broken)
        simulation.edit(POLICY, "b" if invalid == "a" else "a", classification="Public")
        simulation.come_to_rest()
        view = CacheView.of(simulation.bundle())
        (budgets,) = view.keyspaces.values()
        assert [(budget.tier, budget.denied) for budget in budgets] == [("shared", True)]


def test_pools_are_kept_off_every_tier_that_asks_for_a_classification() -> None:
    simulation = at_rest(pool("manual", tiers=[{"name": "cpu"}, {"name": "shared"}]), allowed=LEVELS)
    assert simulation.condition("PrefixPool", "manual", "Stalled") == ("True", "TierNotAllowed")


levels = st.sampled_from(LEVELS)
allowed_lists = st.lists(levels, min_size=1, max_size=4, unique=True)


@given(allowed_lists, st.lists(levels, min_size=1, max_size=3), levels, st.booleans())
def test_whoever_joins_opens_no_tier_to_those_who_are_there(
    allowed: list[str], present: list[str], joining: str, public: bool
) -> None:
    tenants = [f"t{number}" for number in range(len(present))]
    how: dict[str, Any] = {"isolation": "Public"} if public else {"group": "lab"}
    scope = PUBLIC_SCOPE if public else Scope(ScopeKind.GROUP, "lab")
    simulation = Simulation(
        redis_tier(allowedClassifications=allowed),
        group("lab", *tenants, "new"),
        *(policy(tenant, classification=level, **how) for tenant, level in zip(tenants, present, strict=True)),
    )

    def kept_off() -> list[bool]:
        world = simulation.world
        return ["shared" in denied_tiers(world, world.policies[tenant], scope) for tenant in tenants]

    before = kept_off()
    assert before == [any(level not in allowed for level in present)] * len(tenants)
    simulation.put(policy("new", classification=joining, **how))
    simulation.settle()
    assert kept_off() == [one or joining not in allowed for one in before]


@given(st.sampled_from(LEVELS), st.integers(1, 4))
def test_a_stricter_classification_opens_no_tier_that_takes_the_least_strict_first(level: str, count: int) -> None:
    simulation = Simulation(redis_tier(allowedClassifications=LEVELS[:count]), policy("acme", classification=level))
    world = simulation.world
    scope = Scope(ScopeKind.TENANT, "acme")
    kept_off = bool(denied_tiers(world, world.policies["acme"], scope))
    assert kept_off is (LEVELS.index(level) >= count)
