"""Admission of guarantees: who has one, who waits and is told why, and what pods are told of it."""

from __future__ import annotations

from typing import Any

from kvstrata.contract.policy.bundle import EnforcedBudget
from kvstrata.model.refs import Key
from tests.support.objects import (
    NAMESPACE,
    Raw,
    cpu_tier,
    domain,
    group,
    model,
    pod,
    policy,
    redis_tier,
)
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"
TIER = redis_tier(capacity="100Mi")
"""Of which blocks may take 80Mi."""


def has(guaranteed: str | None, tier: str = "shared", **more: Any) -> list[Raw]:
    budget = {"tier": tier, "guaranteed": guaranteed, "limit": "1000Mi", **more}
    return [{name: value for name, value in budget.items() if value is not None}]


def world(*objects: Raw, tier: Raw = TIER) -> Simulation:
    """Return a world at rest in which the objects were created one after the other."""
    simulation = Simulation(domain(), tier, cpu_tier(), model(tiers=("cpu", "shared")), pod("pod-0"))
    for raw in objects:
        simulation.put(raw)
        simulation.advance(2)
    simulation.come_to_rest()
    return simulation


def admitted(simulation: Simulation, name: str, kind: str = TCP) -> tuple[str, str]:
    return simulation.condition(kind, name, "Admitted")


def message(simulation: Simulation, name: str, condition: str = "Admitted", kind: str = TCP) -> str:
    conditions = simulation.status(kind, name)["conditions"]
    return str(next(c["message"] for c in conditions if c["type"] == condition))


def told(simulation: Simulation, tenant: str, tier: str = "shared", model_name: str = "tiny") -> EnforcedBudget:
    """Return what pods are told of a tenant's budget."""
    return next(b for b in simulation.entry(tenant, model_name).budgets if b.tier == tier)


def mebibytes(simulation: Simulation, tenant: str, tier: str = "shared") -> int:
    return (told(simulation, tenant, tier).guaranteed_bytes or 0) >> 20


GRANTED, WAITS = ("True", "GuaranteesAdmitted"), ("False", "InsufficientCapacity")


class TestWaiting:
    def test_who_does_not_fit_is_told_the_numbers_and_names_and_runs_without_a_guarantee(self) -> None:
        simulation = world(
            policy("a", budgets=has("40Mi")), policy("b", budgets=has("20Mi")), policy("c", budgets=has("30Mi"))
        )
        assert admitted(simulation, "a") == admitted(simulation, "b") == GRANTED
        assert admitted(simulation, "c") == WAITS
        said = message(simulation, "c")
        assert "30Mi on CacheTier shared" in said
        assert "of 80Mi 20Mi is free for it" in said
        assert "(reserved for TenantCachePolicy a 40Mi, TenantCachePolicy b 20Mi)" in said
        assert told(simulation, "c") == EnforcedBudget("shared", 1000 << 20)
        assert simulation.condition(TCP, "c", "Ready") == ("False", "InsufficientCapacity")
        assert simulation.condition(TCP, "c", "Enforced")[0] == "True"
        assert simulation.status("CacheTier", "shared")["guaranteed"] == "60Mi"
        assert simulation.condition("CacheTier", "shared", "CapacityCommitted") == ("False", "GuaranteesWaiting")
        assert simulation.unsettled() == {}

    def test_of_many_who_hold_a_tier_the_largest_are_named_and_the_others_counted(self) -> None:
        small = [policy(f"s{n}", budgets=has(f"{10 + n}Mi")) for n in range(5)]
        simulation = world(*small, policy("late", budgets=has("40Mi")))
        assert (
            "(reserved for TenantCachePolicy s4 14Mi, TenantCachePolicy s3 13Mi, TenantCachePolicy s2 12Mi and 2 more)"
            in (message(simulation, "late"))
        )

    def test_a_younger_smaller_one_waits_behind_an_older_larger_one(self) -> None:
        simulation = world(
            policy("a", budgets=has("60Mi")), policy("big", budgets=has("50Mi")), policy("small", budgets=has("5Mi"))
        )
        assert admitted(simulation, "small") == WAITS
        assert "TenantCachePolicy big, which is older, waits for it" in message(simulation, "small")
        simulation.edit(TCP, "big", budgets=has(None))
        simulation.come_to_rest()
        assert admitted(simulation, "small") == GRANTED
        assert mebibytes(simulation, "small") == 5

    def test_room_that_is_freed_goes_to_the_eldest_that_waits(self) -> None:
        simulation = world(
            policy("a", budgets=has("60Mi")), policy("b", budgets=has("50Mi")), policy("c", budgets=has("50Mi"))
        )
        simulation.delete(TCP, "a")
        simulation.come_to_rest()
        assert (admitted(simulation, "b"), admitted(simulation, "c")) == (GRANTED, WAITS)
        assert (mebibytes(simulation, "b"), mebibytes(simulation, "c")) == (50, 0)
        simulation.edit("CacheTier", "shared", capacity="200Mi")
        simulation.come_to_rest()
        assert admitted(simulation, "c") == GRANTED
        assert mebibytes(simulation, "c") == 50
        assert simulation.condition("CacheTier", "shared", "CapacityCommitted") == ("True", "GuaranteesFit")
        assert simulation.unsettled() == {}

    def test_far_back_in_the_line_a_status_does_not_follow_every_change(self) -> None:
        waiting = [policy(f"w{n:02}", budgets=has("70Mi")) for n in range(12)]
        simulation = world(policy("a", budgets=has("40Mi")), policy("b", budgets=has("20Mi")), *waiting)
        before = {name: message(simulation, name) for name in ("w00", "w10")}
        simulation.edit(TCP, "b", budgets=has("10Mi"))
        simulation.come_to_rest()
        assert message(simulation, "w00") != before["w00"]
        assert message(simulation, "w10") == before["w10"]
        assert "8 or more that are older wait before it" in before["w10"]
        assert simulation.unsettled() == {}

    def test_what_one_tier_lacks_another_may_have(self) -> None:
        both = [*has("30Mi"), *has("100Mi", "cpu")]
        simulation = world(policy("a", budgets=has("60Mi")), policy("b", budgets=both))
        assert admitted(simulation, "b") == WAITS
        assert (mebibytes(simulation, "b"), mebibytes(simulation, "b", "cpu")) == (0, 100)
        assert simulation.status(TCP, "b")["usage"]["guaranteed"] == "100Mi"


class TestStanding:
    def test_an_older_one_that_wants_more_keeps_what_it_has_and_evicts_nobody(self) -> None:
        simulation = world(policy("old", budgets=has("40Mi")), policy("young", budgets=has("40Mi")))
        simulation.edit(TCP, "old", budgets=has("50Mi"))
        simulation.come_to_rest()
        assert (admitted(simulation, "old"), admitted(simulation, "young")) == (WAITS, GRANTED)
        assert (mebibytes(simulation, "old"), mebibytes(simulation, "young")) == (40, 40)
        assert "40Mi of it stay guaranteed" in message(simulation, "old")
        assert simulation.unsettled() == {}

    def test_a_restart_decides_nothing_anew(self) -> None:
        simulation = world(policy("old", budgets=has("40Mi")), policy("young", budgets=has("40Mi")))
        simulation.edit(TCP, "old", budgets=has("50Mi"))
        simulation.come_to_rest()
        writes = simulation.kube.writes
        simulation.restart()
        simulation.settle()
        assert simulation.kube.writes == writes
        assert (admitted(simulation, "old"), admitted(simulation, "young")) == (WAITS, GRANTED)

    def test_when_capacity_is_lowered_the_youngest_lose_theirs(self) -> None:
        simulation = world(
            policy("a", budgets=has("40Mi")), policy("b", budgets=has("20Mi")), policy("c", budgets=has("20Mi"))
        )
        simulation.edit("CacheTier", "shared", capacity="75Mi")
        simulation.come_to_rest()
        assert [mebibytes(simulation, name) for name in "abc"] == [40, 20, 0]
        assert [admitted(simulation, name) for name in "abc"] == [GRANTED, GRANTED, WAITS]
        assert simulation.condition("CacheTier", "shared", "CapacityCommitted") == ("False", "GuaranteesWaiting")
        assert simulation.unsettled() == {}

    def test_pods_are_told_of_less_before_anybody_else_gets_it(self) -> None:
        simulation = world(policy("a", budgets=has("60Mi")), policy("b", budgets=has("60Mi")))
        simulation.edit(TCP, "a", budgets=has("10Mi"))
        seen = []

        def note(verb: str, kind: str, name: str) -> None:
            record = simulation.status(TCP, "b").get("admission", {}).get("tiers")
            seen.append((mebibytes(simulation, "a"), bool(record)))

        simulation.kube.after_write = note
        simulation.come_to_rest()
        assert (60, True) not in seen
        assert seen[-1] == (10, True)
        assert mebibytes(simulation, "b") == 60

    def test_a_wrong_spec_keeps_what_its_last_valid_one_was_given(self) -> None:
        simulation = world(policy("a", budgets=has("40Mi")), policy("b", budgets=has("60Mi")))
        simulation.edit(TCP, "a", budgets=[*has("10Mi"), {"tier": "gone"}])
        simulation.come_to_rest()
        assert admitted(simulation, "a") == ("False", "TierNotFound")
        assert mebibytes(simulation, "a") == 40
        assert admitted(simulation, "b") == WAITS
        simulation.edit("CacheTier", "shared", capacity="40Mi")
        simulation.come_to_rest()
        assert mebibytes(simulation, "a") == 0, "also of a wrong spec no more stands than fits"
        assert simulation.unsettled() == {}

    def test_a_wrong_spec_that_never_had_anything_keeps_nobody_waiting(self) -> None:
        wrong = [*has("60Mi"), {"name": "gone"}]
        simulation = world(policy("a", budgets=wrong), policy("b", budgets=has("60Mi")))
        assert admitted(simulation, "b") == GRANTED

    def test_of_two_policies_for_a_tenant_the_younger_reserves_nothing(self) -> None:
        simulation = world(
            policy("a", budgets=has("40Mi")),
            policy("a", name="rival", budgets=has("40Mi")),
            policy("b", budgets=has("40Mi")),
        )
        assert admitted(simulation, "rival") == ("False", "TenantConflict")
        assert admitted(simulation, "b") == GRANTED

    def test_a_policy_that_an_older_one_replaces_reserves_nothing_any_more(self) -> None:
        simulation = world(policy("a", budgets=has("60Mi")), policy("b", budgets=has("60Mi")))
        restored = policy("a", name="restored")
        simulation.put({**restored, "metadata": {**restored["metadata"], "creationTimestamp": "2020-01-01T00:00:00Z"}})
        simulation.come_to_rest()
        assert admitted(simulation, "a") == ("False", "TenantConflict")
        assert admitted(simulation, "b") == GRANTED

    def test_who_leaves_for_a_group_lets_go_of_its_own(self) -> None:
        simulation = world(group("lab", "a"), policy("a", budgets=has("60Mi")), policy("b", budgets=has("60Mi")))
        simulation.edit(TCP, "a", isolation="Group", groupRef={"name": "lab"}, budgets=None)
        simulation.come_to_rest()
        assert admitted(simulation, "b") == GRANTED
        assert "admission" not in simulation.status(TCP, "a")


class TestSharedScopes:
    def test_a_groups_guarantee_waits_as_a_policys_does(self) -> None:
        simulation = world(
            policy("a", budgets=has("60Mi")),
            group("lab", "b", budgets=has("40Mi")),
            policy("b", group="lab"),
        )
        assert admitted(simulation, "lab", "TenantGroup") == WAITS
        assert mebibytes(simulation, "b") == 0
        assert told(simulation, "b").limit_bytes == 1000 << 20
        simulation.delete(TCP, "a")
        simulation.come_to_rest()
        assert admitted(simulation, "lab", "TenantGroup") == GRANTED
        assert mebibytes(simulation, "b") == 40
        assert simulation.status("TenantGroup", "lab")["usage"]["guaranteed"] == "40Mi"
        assert simulation.unsettled() == {}

    def test_the_public_budget_waits_as_well(self) -> None:
        simulation = world(policy("a", budgets=has("60Mi")), policy("p", isolation="Public"))
        simulation.edit("CacheDomain", "default", publicBudgets=has("40Mi"))
        simulation.come_to_rest()
        assert admitted(simulation, "default", "CacheDomain") == WAITS
        assert mebibytes(simulation, "p") == 0
        simulation.edit(TCP, "a", budgets=has("40Mi"))
        simulation.come_to_rest()
        assert admitted(simulation, "default", "CacheDomain") == GRANTED
        assert mebibytes(simulation, "p") == 40
        assert simulation.unsettled() == {}

    def test_objects_without_guarantees_have_nothing_to_say(self) -> None:
        simulation = world(group("lab", "a"), policy("a", group="lab"))
        assert admitted(simulation, "lab", "TenantGroup") == ("", "")
        assert admitted(simulation, "a") == ("True", "Accepted")
        assert "admission" not in simulation.status(TCP, "a")


class TestPods:
    def test_a_guarantee_in_pods_must_fit_into_those_of_every_model_that_lists_the_tier(self) -> None:
        simulation = world(
            model("other", tiers=("cpu",)),
            policy("a", budgets=has("800Mi", "cpu"), models={"names": ["tiny"]}),
            policy("b", budgets=has("800Mi", "cpu"), models={"names": ["other"]}),
            policy("c", budgets=has("400Mi", "cpu")),
        )
        assert [admitted(simulation, name) for name in "abc"] == [GRANTED, GRANTED, WAITS]
        assert "of each pod of CachedModel other" in message(simulation, "c")

    def test_the_number_of_pods_changes_nothing(self) -> None:
        simulation = world(policy("a", budgets=has("800Mi", "cpu")))
        simulation.edit("CachedModel", "tiny", engine={"image": "engine:1", "replicas": 0})
        simulation.put(policy("b", budgets=has("400Mi", "cpu")))
        simulation.come_to_rest()
        assert admitted(simulation, "b") == WAITS
        simulation.edit("CachedModel", "tiny", engine={"image": "engine:1", "replicas": 40})
        simulation.come_to_rest()
        assert [admitted(simulation, name) for name in "ab"] == [GRANTED, WAITS]

    def test_a_model_that_comes_later_finds_what_is_for_all_models_admitted(self) -> None:
        simulation = world(policy("a", budgets=has("800Mi", "cpu")), policy("b", budgets=has("400Mi", "cpu")))
        simulation.put(model("other", tiers=("cpu",)), pod("pod-1", "other"))
        simulation.come_to_rest()
        assert [admitted(simulation, name) for name in "ab"] == [GRANTED, WAITS]
        assert told(simulation, "a", "cpu", "other").guaranteed_bytes == 800 << 20

    def test_a_policy_that_turns_to_other_models_evicts_nobody_there(self) -> None:
        simulation = world(
            model("other", tiers=("cpu",)),
            policy("a", budgets=has("800Mi", "cpu"), models={"names": ["tiny"]}),
            policy("b", budgets=has("800Mi", "cpu"), models={"names": ["other"]}),
            pod("pod-1", "other"),
        )
        simulation.edit(TCP, "a", models={"names": ["other"]})
        simulation.come_to_rest()
        assert [admitted(simulation, name) for name in "ab"] == [WAITS, GRANTED]
        assert simulation.unsettled() == {}


class TestOrder:
    def test_no_entry_is_compiled_before_it_was_decided_on(self) -> None:
        simulation = world(policy("a", budgets=has(None)))
        simulation.edit(TCP, "a", budgets=has("10Mi"))
        simulation.step(Key("Bundle", NAMESPACE, "tiny"))
        assert told(simulation, "a").guaranteed_bytes is None
        simulation.step(Key(TCP, NAMESPACE, "a"))
        assert simulation.condition(TCP, "a", "Enforced") == ("False", "NotCommitted")
        simulation.come_to_rest()
        assert mebibytes(simulation, "a") == 10

    def test_an_upgrade_takes_no_guarantee_away_while_it_is_decided_on(self) -> None:
        simulation = world(policy("a", budgets=has("10Mi")), policy("b", budgets=has("10Mi")))
        for name in "ab":
            raw = simulation.kube.objects[(TCP, NAMESPACE, name)]
            simulation.put({**raw, "status": {k: v for k, v in raw["status"].items() if k != "admission"}})
        simulation.restart()
        seen = set()
        simulation.kube.after_write = lambda verb, kind, name: seen.add(
            (mebibytes(simulation, "a"), mebibytes(simulation, "b"))
        )
        assert "admission" not in simulation.status(TCP, "a")
        simulation.step(Key("Bundle", NAMESPACE, "tiny"))
        simulation.step(Key(TCP, NAMESPACE, "a"))
        simulation.step(Key("Bundle", NAMESPACE, "tiny"))
        simulation.come_to_rest()
        assert seen == {(10, 10)}
        assert simulation.status(TCP, "a")["admission"]["tiers"] == [{"tier": "shared", "guaranteed": "10Mi"}]

    def test_what_is_being_written_for_one_is_not_given_to_another(self) -> None:
        simulation = world()
        simulation.put(policy("a", budgets=has("60Mi")))
        simulation.put(policy("b", budgets=has("60Mi")))
        under_way = {Key(TCP, NAMESPACE, "b"): {"shared": 60 << 20}}
        simulation.store.domain(NAMESPACE).granting.update(under_way)
        simulation.step(Key(TCP, NAMESPACE, "a"))  # its finalizer
        simulation.step(Key(TCP, NAMESPACE, "a"))
        assert simulation.status(TCP, "a")["admission"] == {"models": "", "tiers": []}
