"""What scopes hold, in status: as pods report, and rewritten rarely."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from kvstrata.contract.messages.adapter import ScopeUsage, TierState
from kvstrata.contract.policy.keyspace import SCOPE_DIGITS
from kvstrata.objects.quantities import MIB
from kvstrata.plan.budgets.usage import REPORTED_EVERY_S
from tests.support.objects import cpu_tier, domain, group, invalidation, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
KEEPS = (TierState("cpu", "CPU", "closed"), TierState("shared", "Redis", "closed", capacity_bytes=1 << 30))
BUDGETS = [{"tier": "cpu", "limit": "64Mi"}, {"tier": "shared", "guaranteed": "8Mi", "limit": "32Mi"}]


def at_rest(*objects: Any) -> Simulation:
    """A model on memory and Redis, and two pods."""
    base = (cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), pod("pod-0"), pod("pod-1"))
    simulation = Simulation(*base, *objects)
    simulation.come_to_rest()
    return simulation


def holds(simulation: Simulation, tenant: str, **tiers: int) -> tuple[ScopeUsage, ...]:
    scope = simulation.entry(tenant).keyspace[:SCOPE_DIGITS]
    return tuple(ScopeUsage(scope, tier, used, 1) for tier, used in tiers.items())


def usage(simulation: Simulation, name: str = "acme", kind: str = TCP) -> dict[str, Any]:
    found: dict[str, Any] = simulation.status(kind, name).get("usage") or {}
    return found


def tell(simulation: Simulation, pod_name: str, *rows: ScopeUsage, left_out: int = 0) -> int:
    """Have a pod tell its use; return how many writes follow."""
    before = simulation.kube.writes
    memory = tuple(row for row in rows if row.tier == "cpu")
    shared = tuple(row for row in rows if row.tier != "cpu")
    simulation.ack(pod_name, usage=memory, usage_left_out=left_out, tier_usage=shared)
    simulation.settle()
    return simulation.kube.writes - before


def test_a_policy_tells_what_its_scope_holds_and_may_hold_on_each_tier() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    assert usage(simulation)["tiers"] == [
        {"tier": "cpu", "limit": "64Mi"},
        {"tier": "shared", "limit": "32Mi", "guaranteed": "8Mi"},
    ]
    tell(simulation, "pod-0", *holds(simulation, "acme", cpu=3 * MIB, shared=16 * MIB))
    told = usage(simulation)
    assert (told["used"], told["limit"], told["guaranteed"]) == ("19Mi", "96Mi", "8Mi")
    assert told["observedAt"]
    assert told["tiers"] == [
        {"tier": "cpu", "used": "3Mi", "limit": "64Mi"},
        {"tier": "shared", "used": "16Mi", "limit": "32Mi", "guaranteed": "8Mi"},
    ]
    assert simulation.unsettled() == {}


def test_the_columns_used_and_limit_are_of_the_same_tiers() -> None:
    simulation = at_rest(policy("acme", budgets=[{"tier": "shared", "limit": "40Mi"}]), policy("free"))
    held = (*holds(simulation, "acme", cpu=149 * MIB, shared=30 * MIB), *holds(simulation, "free", cpu=3 * MIB))
    tell(simulation, "pod-0", *held)
    assert usage(simulation)["used"] == "179Mi"
    summary = simulation.status(TCP, "acme")["summary"]
    assert (summary["used"], summary["limit"]) == ("30Mi", "40Mi")
    assert simulation.status(TCP, "free")["summary"]["used"] == "3Mi"
    assert simulation.unsettled() == {}


def test_of_several_pods_the_highest_word_counts_and_models_that_are_not_selected_do_not() -> None:
    other = (model("other", tiers=("cpu",)), pod("pod-9", "other"))
    simulation = at_rest(policy("acme", budgets=BUDGETS, models={"names": ["tiny"]}), *other)
    tell(simulation, "pod-9", *holds(simulation, "acme", cpu=32 * MIB))
    tell(simulation, "pod-1", *holds(simulation, "acme", cpu=4 * MIB))
    simulation.now += timedelta(seconds=REPORTED_EVERY_S)
    tell(simulation, "pod-0", *holds(simulation, "acme", cpu=8 * MIB))
    assert usage(simulation)["tiers"][0]["used"] == "8Mi"


def test_it_is_rewritten_for_a_good_part_only_and_not_at_once() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    assert tell(simulation, "pod-0", *holds(simulation, "acme", shared=16 * MIB)) == 1
    assert tell(simulation, "pod-0", *holds(simulation, "acme", shared=30 * MIB)) == 0
    simulation.now += timedelta(seconds=REPORTED_EVERY_S)
    for close in (14, 18, 16):
        assert tell(simulation, "pod-0", *holds(simulation, "acme", shared=close * MIB)) == 0
    assert tell(simulation, "pod-0", *holds(simulation, "acme", shared=30 * MIB)) == 1
    assert usage(simulation)["used"] == "30Mi"
    assert simulation.unsettled() == {}


def test_a_size_above_the_limit_is_not_shown_once_pods_report_less() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    assert tell(simulation, "pod-0", *holds(simulation, "acme", shared=33 * MIB)) == 1
    simulation.now += timedelta(seconds=REPORTED_EVERY_S)
    assert tell(simulation, "pod-0", *holds(simulation, "acme", shared=32 * MIB)) == 1
    assert usage(simulation)["used"] == "32Mi"
    simulation.now += timedelta(seconds=REPORTED_EVERY_S)
    tell(simulation, "pod-0", *holds(simulation, "acme", shared=33 * MIB))
    assert usage(simulation)["used"] == "32Mi"


def test_the_first_word_about_a_tier_is_told_at_once_and_an_empty_one_is_no_news() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    assert tell(simulation, "pod-0", *holds(simulation, "acme", cpu=2 * MIB)) == 1
    assert tell(simulation, "pod-0", *holds(simulation, "acme", cpu=2 * MIB, shared=0)) == 0
    assert tell(simulation, "pod-0", *holds(simulation, "acme", cpu=2 * MIB, shared=32 * MIB)) == 1
    assert [row["used"] for row in usage(simulation)["tiers"]] == ["2Mi", "32Mi"]
    assert tell(simulation, "pod-0", *holds(simulation, "acme", cpu=2 * MIB, shared=16 * MIB)) == 0
    assert simulation.unsettled() == {}


def test_a_model_whose_pods_hold_less_than_anothers_wakes_nobody() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS), model("other", tiers=("cpu",)), pod("pod-9", "other"))
    tell(simulation, "pod-0", *holds(simulation, "acme", cpu=32 * MIB))
    simulation.now += timedelta(seconds=REPORTED_EVERY_S)
    simulation.plans.clear()
    for small in (4, 5, 6):
        assert tell(simulation, "pod-9", *holds(simulation, "acme", cpu=small * MIB)) == 0
    assert [key for key, _ in simulation.plans if key.kind == TCP] == []


def test_other_budgets_are_told_at_once() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    tell(simulation, "pod-0", *holds(simulation, "acme", shared=16 * MIB))
    simulation.edit(TCP, "acme", budgets=[{"tier": "shared", "limit": "20Mi"}])
    simulation.settle()
    assert usage(simulation)["tiers"] == [{"tier": "shared", "used": "16Mi", "limit": "20Mi"}]


def test_memory_that_no_pod_names_is_empty_and_redis_is_as_it_was_told_last_for_an_hour() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    both = holds(simulation, "acme", cpu=16 * MIB, shared=16 * MIB)
    tell(simulation, "pod-1")
    tell(simulation, "pod-0", *both)
    for left_out, expected in ((1, "16Mi"), (0, "0")):
        simulation.now += timedelta(seconds=REPORTED_EVERY_S)
        tell(simulation, "pod-0", left_out=left_out)
        simulation.enqueue_all()
        simulation.settle()
        assert [row["used"] for row in usage(simulation)["tiers"]] == [expected, "16Mi"]
    simulation.now += timedelta(hours=2)
    simulation.enqueue_all()
    simulation.settle()
    assert "used" not in usage(simulation)["tiers"][1]
    assert usage(simulation)["tiers"][1]["limit"] == "32Mi"


def test_a_group_tells_what_its_members_hold_together_and_they_do_not() -> None:
    simulation = at_rest(group("lab", "a", "b", budgets=BUDGETS), policy("a", group="lab"), policy("b", group="lab"))
    tell(simulation, "pod-0", *holds(simulation, "a", cpu=8 * MIB))
    assert usage(simulation, "lab", "TenantGroup")["used"] == "8Mi"
    assert usage(simulation, "a") == usage(simulation, "b") == {}


def test_the_domain_tells_what_the_public_scope_holds_and_may_hold() -> None:
    public = domain(publicBudgets=BUDGETS)
    simulation = at_rest(public, policy("a", isolation="Public"), policy("b", isolation="Public"))
    assert usage(simulation, "default", "CacheDomain")["limit"] == "96Mi"
    assert tell(simulation, "pod-0", *holds(simulation, "a", shared=8 * MIB)) == 1
    told = usage(simulation, "default", "CacheDomain")
    assert (told["used"], told["tiers"][1]["used"]) == ("8Mi", "8Mi")
    assert usage(simulation, "a") == usage(simulation, "b") == {}
    simulation.now += timedelta(seconds=REPORTED_EVERY_S)
    assert tell(simulation, "pod-0", *holds(simulation, "a", shared=9 * MIB)) == 0, "not off by a good part"
    simulation.put(invalidation("now", scope={"all": True}))
    simulation.come_to_rest()
    assert "used" not in usage(simulation, "default", "CacheDomain")
    assert simulation.unsettled() == {}


@pytest.mark.parametrize("kind", ["generation", "invalidation"])
def test_what_was_held_under_an_old_epoch_is_told_no_more(kind: str) -> None:
    simulation = at_rest(policy("acme"))
    tell(simulation, "pod-0", *holds(simulation, "acme", shared=8 * MIB))
    assert usage(simulation)["used"] == "8Mi"
    if kind == "generation":
        simulation.edit(TCP, "acme", cacheGeneration=1)
    else:
        simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.come_to_rest()
    assert usage(simulation) == {}
    assert simulation.unsettled() == {}


def test_a_tier_that_the_model_has_not_is_not_told_whatever_a_pod_says() -> None:
    simulation = at_rest(policy("acme"))
    assert tell(simulation, "pod-0", *holds(simulation, "acme", **{"<b>": 8 * MIB})) == 0
    assert usage(simulation) == {}


@pytest.mark.parametrize("hours", [0, 2])
def test_an_operator_that_starts_anew_writes_nothing(hours: int) -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    tell(simulation, "pod-0", *holds(simulation, "acme", shared=13 * MIB))
    simulation.now += timedelta(hours=hours)
    writes = simulation.kube.writes
    simulation.restart()
    simulation.settle()
    assert simulation.kube.writes == writes


def test_what_was_told_stays_while_the_pod_that_may_hold_it_cannot_be_asked() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    tell(simulation, "pod-0", *holds(simulation, "acme", cpu=16 * MIB, shared=16 * MIB))
    before = usage(simulation)
    simulation.now += timedelta(hours=2)
    del simulation.acks[simulation.pod("pod-0").uid]
    simulation.restart()
    simulation.settle()
    assert usage(simulation) == before


def test_sizes_are_exact_and_columns_show_mebibytes() -> None:
    simulation = at_rest(policy("acme", budgets=BUDGETS))
    tell(simulation, "pod-0", *holds(simulation, "acme", cpu=3 * MIB + 1, shared=1025))
    assert [row["used"] for row in usage(simulation)["tiers"]] == [str(3 * MIB + 1), "1025"]
    assert usage(simulation)["used"] == str(3 * MIB + 1026)
    summary = simulation.status(TCP, "acme")["summary"]
    assert summary == {"limit": "96Mi", "guaranteed": "8Mi", "used": "4Mi"}
    simulation.edit(TCP, "acme", cacheGeneration=1, budgets=[])
    simulation.come_to_rest()
    assert simulation.status(TCP, "acme").get("summary") is None
    assert simulation.unsettled() == {}


class TestAboveALimit:
    """64Mi of memory and 32Mi on Redis."""

    def test_the_condition_follows_every_report_whatever_pods_enforce(self) -> None:
        simulation = at_rest(policy("acme", budgets=BUDGETS))
        for pod_name in ("pod-0", "pod-1"):
            simulation.ack(pod_name, tiers=KEEPS)
        for memory, shared, expected in (
            (64 * MIB, 32 * MIB, ("True", "BudgetsEnforced")),
            (64 * MIB + 1, 0, ("False", "UsedAboveLimit")),
            (60 * MIB, 33 * MIB, ("False", "UsedAboveLimit")),
            (60 * MIB, 32 * MIB, ("True", "BudgetsEnforced")),
            (200 * MIB, 0, ("False", "UsedAboveLimit")),
            (0, 0, ("True", "BudgetsEnforced")),
        ):
            rows = holds(simulation, "acme", cpu=memory, shared=shared)
            told = tuple(row for row in rows if row.used_bytes)
            simulation.ack("pod-0", tiers=KEEPS, usage=told[:1] if memory else (), tier_usage=told[1:])
            simulation.settle()
            assert simulation.condition(TCP, "acme", "WithinBudget") == expected

    def test_the_message_names_tier_use_and_limit(self) -> None:
        simulation = at_rest(policy("acme", budgets=BUDGETS))
        tell(simulation, "pod-1", *holds(simulation, "acme", cpu=160 * MIB))
        (found,) = (one for one in simulation.status(TCP, "acme")["conditions"] if one["type"] == "WithinBudget")
        assert found["message"].startswith("CacheTier cpu: 160Mi used in one pod, limit 64Mi;")

    def test_a_group_and_the_public_scope_have_it_too(self) -> None:
        simulation = at_rest(
            domain(publicBudgets=BUDGETS),
            group("lab", "a", budgets=BUDGETS),
            policy("a", isolation="Group", group="lab"),
            policy("b", isolation="Public"),
        )
        tell(simulation, "pod-0", *holds(simulation, "a", cpu=65 * MIB), *holds(simulation, "b", cpu=65 * MIB))
        for kind, name in (("TenantGroup", "lab"), ("CacheDomain", "default")):
            assert simulation.condition(kind, name, "WithinBudget") == ("False", "UsedAboveLimit")
