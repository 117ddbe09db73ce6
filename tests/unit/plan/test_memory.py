"""Budgets on CPU tiers: pods carry them out, and nothing says so before the pods do."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.contract.messages.adapter import TierState
from tests.support.objects import cpu_tier, domain, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
KEEPS = (TierState("cpu", "CPU", "closed"),)
FAILS = (TierState("cpu", "CPU", "open"),)


def settled(*objects: Any, said: tuple[TierState, ...] = KEEPS, **tier: Any) -> Simulation:
    """A model on 1Gi of memory of one pod, of which 90% can be guaranteed, and what the pod says."""
    simulation = Simulation(cpu_tier(**tier), redis_tier(), model(tiers=("cpu", "shared")), pod("pod-0"), *objects)
    simulation.come_to_rest()
    simulation.ack("pod-0", tiers=said)
    simulation.come_to_rest()
    assert simulation.unsettled() == {}
    return simulation


def within(simulation: Simulation, kind: str = TCP, name: str = "acme") -> tuple[str, str]:
    return simulation.condition(kind, name, "WithinBudget")


@pytest.mark.parametrize("budget", [{"limit": "1Mi"}, {"guaranteed": "1Mi"}, {"retention": "1h"}])
def test_a_budget_is_kept_when_every_pod_says_so(budget: dict[str, str]) -> None:
    simulation = settled(policy("acme", budgets=[{"tier": "cpu", **budget}]))
    assert within(simulation) == ("True", "BudgetsEnforced")
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_groups_and_the_public_scope_say_the_same() -> None:
    budget = [{"tier": "cpu", "limit": "1Mi"}]
    simulation = settled(domain(publicBudgets=budget), group("lab", "a", budgets=budget))
    assert within(simulation, "TenantGroup", "lab") == ("True", "BudgetsEnforced")
    assert within(simulation, "CacheDomain", "default") == ("True", "BudgetsEnforced")


@pytest.mark.parametrize("said", [(), FAILS, (TierState("cpu", "Redis", "closed"),)])
def test_a_pod_that_does_not_say_so_leaves_it_open(said: tuple[TierState, ...]) -> None:
    simulation = settled(
        policy("acme", budgets=[{"tier": "cpu", "limit": "1Mi"}]),
        group("lab", "a", budgets=[{"tier": "cpu", "limit": "1Mi"}]),
        said=said,
    )
    assert within(simulation) == ("Unknown", "MemoryNotGoverned")
    assert within(simulation, "TenantGroup", "lab") == ("Unknown", "MemoryNotGoverned")
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_what_a_pod_says_later_is_followed_both_ways() -> None:
    simulation = settled(policy("acme", budgets=[{"tier": "cpu", "limit": "1Mi"}]))
    for said, expected in ((FAILS, "MemoryNotGoverned"), (KEEPS, "BudgetsEnforced")):
        simulation.ack("pod-0", tiers=said)
        simulation.settle()
        assert within(simulation)[1] == expected


def test_the_end_of_the_pod_that_did_not_say_so_is_noticed() -> None:
    simulation = settled(policy("acme", budgets=[{"tier": "cpu", "limit": "1Mi"}]), pod("pod-1"))
    assert within(simulation) == ("Unknown", "MemoryNotGoverned")
    simulation.delete("Pod", "pod-1")
    simulation.come_to_rest()
    assert within(simulation) == ("True", "BudgetsEnforced")


class TestTheTiersLongestRetention:
    def test_holds_for_every_tenant_whatever_its_policy_names(self) -> None:
        simulation = settled(
            policy("silent"),
            policy("strict", budgets=[{"tier": "cpu", "retention": "10m"}]),
            policy("limited", budgets=[{"tier": "cpu", "limit": "1Mi"}, {"tier": "shared", "limit": "1Mi"}]),
            policy("shared", isolation="Public"),
            maxRetention="1h",
        )
        kept = {
            tenant: {budget.tier: budget.retention_s for budget in simulation.entry(tenant).budgets}
            for tenant in ("silent", "strict", "limited", "shared")
        }
        assert kept == {
            "silent": {"cpu": 3600},
            "strict": {"cpu": 600},
            "limited": {"cpu": 3600, "shared": None},
            "shared": {"cpu": 3600},
        }
        assert within(simulation, name="silent") == ("", "")

    def test_is_kept_when_every_pod_says_so_and_followed_when_it_changes(self) -> None:
        simulation = settled(policy("acme"), maxRetention="1h")
        assert simulation.condition("CacheTier", "cpu", "RetentionKept") == ("True", "RemovedInTime")
        simulation.edit("CacheTier", "cpu", maxRetention="2h")
        simulation.come_to_rest()
        assert simulation.entry("acme").budgets[0].retention_s == 7200
        simulation.ack("pod-0", tiers=FAILS)
        simulation.settle()
        assert simulation.condition("CacheTier", "cpu", "RetentionKept") == ("Unknown", "BudgetsNotEnforced")
        simulation.edit("CacheTier", "cpu", maxRetention=None)
        simulation.come_to_rest()
        assert simulation.entry("acme").budgets == ()
        assert simulation.unsettled() == {}


def test_a_tier_that_no_pod_has_holds_nothing() -> None:
    simulation = settled(cpu_tier("other"), policy("acme", budgets=[{"tier": "other", "limit": "1Mi"}]))
    assert within(simulation) == ("", "")


def test_a_guarantee_above_the_mark_is_refused() -> None:
    simulation = settled(policy("acme", budgets=[{"tier": "cpu", "guaranteed": "922Mi"}]))
    assert simulation.condition(TCP, "acme", "Stalled") == ("True", "GuaranteeExceedsCapacity")
    simulation.edit(TCP, "acme", budgets=[{"tier": "cpu", "guaranteed": "921Mi"}])
    simulation.come_to_rest()
    assert simulation.condition(TCP, "acme", "Stalled")[0] != "True"
    assert simulation.condition("CacheTier", "cpu", "CapacityCommitted") == ("True", "GuaranteesFit")
    assert simulation.status("CacheTier", "cpu")["guaranteed"] == "921Mi"


def test_a_guarantee_that_does_not_fit_beside_an_older_one_is_told_on_the_tier_and_kept_by_nobody() -> None:
    simulation = settled(
        policy("acme", budgets=[{"tier": "cpu", "guaranteed": "500Mi"}]),
        policy("globex", budgets=[{"tier": "cpu", "guaranteed": "500Mi"}]),
        policy("modest", budgets=[{"tier": "cpu", "limit": "500Mi"}]),
    )
    assert simulation.condition("CacheTier", "cpu", "CapacityCommitted") == ("False", "GuaranteesWaiting")
    assert simulation.status("CacheTier", "cpu")["guaranteed"] == "500Mi"
    for name in ("acme", "globex", "modest"):
        assert within(simulation, name=name) == ("True", "BudgetsEnforced")
    simulation.delete(TCP, "globex")
    simulation.come_to_rest()
    assert simulation.condition("CacheTier", "cpu", "CapacityCommitted") == ("True", "GuaranteesFit")
    simulation.ack("pod-0", tiers=KEEPS)
    simulation.come_to_rest()
    assert within(simulation) == ("True", "BudgetsEnforced")
    assert simulation.unsettled() == {}


def test_a_scope_that_many_share_and_a_suspended_tenant_count_as_pods_count_them() -> None:
    simulation = settled(
        group("lab", "a", "b", budgets=[{"tier": "cpu", "guaranteed": "300Mi"}]),
        policy("a", group="lab"),
        policy("b", group="lab"),
        policy("paused", suspend=True, budgets=[{"tier": "cpu", "guaranteed": "600Mi"}]),
    )
    assert simulation.status("CacheTier", "cpu")["guaranteed"] == "300Mi"
    assert simulation.condition("CacheTier", "cpu", "CapacityCommitted") == ("True", "GuaranteesFit")
