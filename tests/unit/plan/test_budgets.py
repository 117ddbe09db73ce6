"""Budgets that cannot be right are refused alike wherever they stand: in a policy, a group or the public budget."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvstrata.api.common import Budget
from kvstrata.contract.policy.budget import EnforcedBudget
from kvstrata.plan.bundle.compile import as_admitted, enforced
from tests.support.objects import cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

WRONG = [
    ({"tier": "gone", "limit": "1Mi"}, "TierNotFound"),
    ({"tier": "cpu", "guaranteed": "2Gi"}, "GuaranteeExceedsCapacity"),
    ({"tier": "shared", "retention": "2h"}, "RetentionExceedsTier"),
]


def at_rest(*objects: Any) -> Simulation:
    tiers = (cpu_tier(), redis_tier(maxRetention="1h"))
    simulation = Simulation(*tiers, model(tiers=("cpu",)), pod("pod-0"), *objects)
    simulation.come_to_rest()
    return simulation


@pytest.mark.parametrize(("budget", "reason"), WRONG)
def test_a_wrong_budget_is_refused_with_the_same_reason_everywhere(budget: Any, reason: str) -> None:
    simulation = at_rest(
        domain(publicBudgets=[budget]), group("lab", "a", budgets=[budget]), policy("a", budgets=[budget])
    )
    for kind, name in (("TenantCachePolicy", "a"), ("TenantGroup", "lab"), ("CacheDomain", "default")):
        assert simulation.condition(kind, name, "Stalled") == ("True", reason), kind
        assert simulation.condition(kind, name, "Ready") == ("False", reason), kind
        judged = ("False", reason) if budget["tier"] == "cpu" else ("", "")
        assert simulation.condition(kind, name, "WithinBudget") == judged, "pods use the tier cpu alone"
    assert simulation.unsettled() == {}


def test_a_groups_wrong_budget_never_counts_as_an_enforced_generation() -> None:
    simulation = at_rest(group("lab", "a"), policy("a", group="lab"))
    simulation.come_to_rest()
    before = simulation.status("TenantGroup", "lab")
    assert before["enforcedGeneration"] == before["observedGeneration"]
    simulation.edit("TenantGroup", "lab", budgets=[{"tier": "cpu", "guaranteed": "2Gi"}])
    simulation.come_to_rest()
    after = simulation.status("TenantGroup", "lab")
    assert after["observedGeneration"] > before["observedGeneration"]
    assert after["enforcedGeneration"] == before["enforcedGeneration"]
    simulation.edit("TenantGroup", "lab", budgets=[])
    simulation.come_to_rest()
    assert simulation.status("TenantGroup", "lab")["enforcedGeneration"] > before["enforcedGeneration"]


def test_a_public_budget_that_is_put_right_lets_the_domain_be_ready() -> None:
    simulation = at_rest(domain(publicBudgets=[{"tier": "late", "limit": "1Mi"}]))
    assert simulation.condition("CacheDomain", "default", "Stalled") == ("True", "TierNotFound")
    simulation.put(cpu_tier("late"))
    simulation.come_to_rest()
    assert simulation.condition("CacheDomain", "default", "Ready")[0] == "True"
    assert simulation.condition("CacheDomain", "default", "WithinBudget") == ("", "")


@pytest.mark.parametrize("tier", ["cpu", "shared"])
def test_a_tier_that_begins_to_keep_less_is_obeyed_at_once_by_a_policy_that_asked_for_more(tier: str) -> None:
    simulation = at_rest(domain(), policy("a", budgets=[{"tier": tier, "retention": "30m"}]))
    assert {budget.tier: budget.retention_s for budget in simulation.entry("a").budgets} == {tier: 1800}
    simulation.edit("CacheTier", tier, maxRetention="10m")
    simulation.come_to_rest()
    assert {budget.tier: budget.retention_s for budget in simulation.entry("a").budgets} == {tier: 600}
    assert simulation.condition("TenantCachePolicy", "a", "Stalled") == ("True", "RetentionExceedsTier")
    simulation.edit("TenantCachePolicy", "a", budgets=[{"tier": tier, "retention": "10m"}])
    simulation.come_to_rest()
    assert simulation.condition("TenantCachePolicy", "a", "Stalled")[0] != "True"
    assert simulation.unsettled() == {}


def test_a_memory_that_begins_to_keep_less_is_obeyed_by_a_policy_that_is_invalid_and_never_named_it() -> None:
    simulation = at_rest(domain(), policy("a"))
    simulation.edit("TenantCachePolicy", "a", budgets=[{"tier": "gone", "limit": "1Mi"}])
    simulation.edit("CacheTier", "cpu", maxRetention="10m")
    simulation.come_to_rest()
    assert simulation.condition("TenantCachePolicy", "a", "Stalled") == ("True", "TierNotFound")
    assert {budget.tier: budget.retention_s for budget in simulation.entry("a").budgets} == {"cpu": 600}


BUDGET = {"tier": "shared", "guaranteed": "1Mi", "limit": "2Mi", "retention": "1h"}


def test_every_field_of_a_declared_budget_reaches_the_pods() -> None:
    assert BUDGET.keys() == Budget.model_fields.keys()
    whole = enforced(Budget.model_validate(BUDGET))
    for name in BUDGET.keys() - {"tier"}:
        assert enforced(Budget.model_validate({**BUDGET, name: None})) != whole, name


def test_admission_changes_the_guarantee_of_a_budget_and_nothing_else() -> None:
    whole = EnforcedBudget("shared", limit_bytes=2, guaranteed_bytes=1, retention_s=3)
    admitted = as_admitted({}, whole)
    changed = {
        field.name for field in fields(EnforcedBudget) if getattr(admitted, field.name) != getattr(whole, field.name)
    }
    assert changed == {"guaranteed_bytes"}
