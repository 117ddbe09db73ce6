"""Policies: epochs before bundles, the last valid spec in force, and honest conditions."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.contract.policy.keyspace import Scope, ScopeKind, derive_keyspace
from kvstrata.contract.policy.rate import UNLIMITED, RateLimit
from kvstrata.model.refs import BUNDLE, Key
from tests.support.objects import NAMESPACE, cpu_tier, group, model, pod, policy, redis_tier
from tests.support.worlds import Simulation

TCP = "TenantCachePolicy"


def settled(*objects: Any, pods: int = 1) -> Simulation:
    """A world at rest, with `pods` serving pods that acknowledged everything."""
    simulation = Simulation(cpu_tier(), model(tiers=("cpu",)), *objects)
    simulation.settle()
    simulation.put(*(pod(f"pod-{n}") for n in range(pods)))
    simulation.come_to_rest()
    return simulation


def ready(simulation: Simulation, name: str) -> tuple[str, str]:
    return simulation.condition(TCP, name, "Ready")


def test_no_bundle_holds_a_keyspace_whose_epoch_is_not_in_status() -> None:
    simulation = Simulation(model())
    simulation.settle()
    simulation.put(policy("acme"))
    bundle = Key(BUNDLE, NAMESPACE, "tiny")
    simulation.step(bundle)
    assert "acme" not in simulation.bundle().entries
    simulation.step(Key(TCP, NAMESPACE, "acme"))  # its finalizer
    drawn = simulation.step(Key(TCP, NAMESPACE, "acme"))
    assert drawn.statuses[0].status["scope"]["kind"] == "Tenant"
    assert bundle in drawn.enqueue
    simulation.step(bundle)
    key = simulation.world.domain_key or b""
    epoch = simulation.status(TCP, "acme")["scope"]["epoch"]
    expected = derive_keyspace(key, Scope(ScopeKind.TENANT, "acme"), epoch)
    assert simulation.entry("acme").keyspace == expected


def test_enforced_needs_every_serving_pods_acknowledgement() -> None:
    simulation = settled(pods=2)
    simulation.put(policy("acme"))
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingAcks")
    simulation.ack("pod-0")
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingAcks")
    assert ready(simulation, "acme") == ("False", "AwaitingAcks")
    simulation.ack("pod-1")
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced") == ("True", "AllPodsAcknowledged")
    assert ready(simulation, "acme")[0] == "True"
    assert simulation.status(TCP, "acme")["enforcedGeneration"] == 1


def test_an_acknowledgement_of_an_older_revision_enforces_nothing_newer() -> None:
    simulation = settled()
    before = simulation.bundle().root.revision
    simulation.put(policy("acme"))
    simulation.settle()
    simulation.ack("pod-0", before)
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "False"


def test_without_pods_a_policy_is_ready_and_there_is_nothing_to_enforce() -> None:
    simulation = settled(policy("acme"), pods=0)
    assert simulation.condition(TCP, "acme", "Enforced") == ("", "")
    assert simulation.condition(TCP, "acme", "Ready") == ("True", "NoLivePods")
    assert simulation.status(TCP, "acme")["enforcedBy"] == "no pods"
    assert "enforcedGeneration" not in simulation.status(TCP, "acme")


def test_without_a_model_a_policy_is_ready_and_there_is_nothing_to_enforce() -> None:
    simulation = settled(policy("acme", models={"selector": {"matchLabels": {"team": "x"}}}))
    assert simulation.condition(TCP, "acme", "Enforced") == ("", "")
    assert simulation.condition(TCP, "acme", "Ready") == ("True", "NoModels")
    assert "acme" not in simulation.bundle().entries


def test_a_pod_that_never_ran_is_not_waited_for_and_one_that_starts_is_not_either() -> None:
    simulation = settled(policy("acme"))
    simulation.put(pod("pod-1", state="waiting", ready=False))
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"
    simulation.put(pod("pod-1", ready=False))
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


@pytest.mark.parametrize("ready_before", [True, False])
def test_a_pod_that_ends_is_no_longer_waited_for(ready_before: bool) -> None:
    simulation = settled(pods=2)
    simulation.put(pod("pod-1", ready=ready_before))
    simulation.put(policy("acme"))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "False"
    simulation.put(pod("pod-1", state="terminated", ready=False))
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_of_two_policies_for_a_tenant_the_older_stands() -> None:
    simulation = settled(policy("acme", name="zz-older"))
    before = simulation.entry("acme")
    simulation.put(policy("acme", name="aa-younger", isolation="Public"))
    simulation.come_to_rest()
    assert simulation.entry("acme") == before
    assert simulation.condition(TCP, "aa-younger", "Stalled") == ("True", "TenantConflict")
    assert simulation.condition(TCP, "aa-younger", "Enforced") == ("False", "NeverEnforced")
    assert ready(simulation, "zz-older")[0] == "True"


def test_a_policy_that_was_never_in_force_is_in_the_scope_that_its_spec_names_now() -> None:
    """Whether its group is there before or after it makes no difference."""
    for late in (False, True):
        lab, younger = group("lab", "acme"), policy("acme", name="younger", group="lab")
        simulation = settled(policy("acme", name="older", isolation="Public"), *(() if late else (lab,)), younger)
        if late:
            assert simulation.condition(TCP, "younger", "ErasesOnDeletion") == ("True", "Erases")
            simulation.put(lab)
            simulation.come_to_rest()
        assert simulation.condition(TCP, "younger", "Enforced") == ("False", "NeverEnforced")
        shared = {**simulation.status("TenantGroup", "lab")["scope"]}
        assert shared.pop("models") == ["tiny"]
        assert simulation.status(TCP, "younger")["scope"] == shared
        assert simulation.condition(TCP, "younger", "ErasesOnDeletion") == ("False", "SharesAll")
        assert simulation.unsettled() == {}


@pytest.mark.parametrize(("pods", "bundled"), [(0, True), (1, False)])
def test_a_policy_that_was_in_force_stays_in_its_scope_while_it_is_invalid(pods: int, bundled: bool) -> None:
    simulation = settled(policy("acme", group="lab"), pods=pods)
    own = simulation.status(TCP, "acme")["scope"]
    simulation.edit(TCP, "acme", models={"names": ["tiny", "gone"]})
    if not bundled:
        simulation.delete("CachedModel", "tiny")
    simulation.settle()
    simulation.put(group("lab", "acme"))
    simulation.settle()
    assert ("tiny" in simulation.world.bundles) is bundled
    assert ready(simulation, "acme") == ("False", "ModelNotFound")
    assert simulation.status(TCP, "acme")["scope"] == own


def test_the_younger_policy_takes_over_when_the_older_goes() -> None:
    simulation = settled(policy("acme", name="zz-older"), policy("acme", name="aa-younger"))
    before = simulation.entry("acme")
    simulation.delete(TCP, "zz-older")
    simulation.come_to_rest()
    assert simulation.entry("acme").keyspace != before.keyspace
    assert ready(simulation, "aa-younger")[0] == "True"


def test_a_deleted_policy_leaves_the_bundle_and_a_recreated_one_reaches_nothing_of_it() -> None:
    simulation = settled(policy("acme", deletionPolicy="Abandon"), policy("globex"))
    before = simulation.entry("acme").keyspace
    simulation.delete(TCP, "acme")
    simulation.come_to_rest()
    assert set(simulation.bundle().entries) == {"globex"}
    simulation.put(policy("acme"))
    simulation.come_to_rest()
    assert simulation.entry("acme").keyspace != before


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"budgets": [{"tier": "gone", "limit": "1Mi"}]}, "TierNotFound"),
        ({"budgets": [{"tier": "cpu", "guaranteed": "2Gi"}]}, "GuaranteeExceedsCapacity"),
        ({"budgets": [{"tier": "short", "retention": "2h"}]}, "RetentionExceedsTier"),
        ({"budgets": [{"tier": "open", "limit": "1Mi"}], "classification": "Restricted"}, "ClassificationNotAllowed"),
        ({"models": {"names": ["gone"]}}, "ModelNotFound"),
    ],
)
def test_while_a_spec_is_invalid_the_last_one_stays_in_force(change: dict[str, Any], reason: str) -> None:
    tiers = (redis_tier("short", maxRetention="1h"), redis_tier("open", allowedClassifications=["Public"]))
    simulation = settled(*tiers, policy("acme", budgets=[{"tier": "cpu", "limit": "1Mi"}]))
    before = simulation.bundle()
    simulation.edit(TCP, "acme", **change)
    simulation.come_to_rest()
    assert simulation.bundle() == before
    assert simulation.condition(TCP, "acme", "Stalled") == ("True", reason)
    assert simulation.condition(TCP, "acme", "Admitted") == ("False", reason)
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "LastValidInForce")
    assert simulation.status(TCP, "acme")["enforcedGeneration"] == 1
    assert ready(simulation, "acme") == ("False", reason)


def test_a_tier_that_appears_lets_the_policy_act() -> None:
    simulation = settled(policy("acme", budgets=[{"tier": "late", "limit": "1Mi"}]))
    assert simulation.condition(TCP, "acme", "Stalled") == ("True", "TierNotFound")
    assert simulation.bundle().entries == {}
    simulation.put(cpu_tier("late"))
    simulation.come_to_rest()
    assert ready(simulation, "acme")[0] == "True"
    assert [b.limit_bytes for b in simulation.entry("acme").budgets] == [2**20]


def test_an_object_that_cannot_be_read_leaves_the_last_one_in_force() -> None:
    simulation = settled(policy("acme"))
    before = simulation.bundle()
    simulation.edit(TCP, "acme", isolation="Sideways")
    simulation.come_to_rest()
    assert simulation.bundle() == before
    assert simulation.condition(TCP, "acme", "Stalled") == ("True", "InvalidSpec")
    assert not simulation.unsettled()
    simulation.edit(TCP, "acme", isolation="Isolated")
    simulation.come_to_rest()
    assert ready(simulation, "acme")[0] == "True"


@pytest.mark.parametrize(("groups", "reason"), [((), "GroupNotFound"), ((group("lab", "other"),), "NotAMember")])
def test_a_policy_whose_group_does_not_list_it_is_stalled_and_isolated(groups: Any, reason: str) -> None:
    simulation = settled(*groups, policy("acme", group="lab"))
    assert simulation.condition(TCP, "acme", "Stalled") == ("True", reason)
    assert simulation.entry("acme").scope == Scope(ScopeKind.TENANT, "acme")
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_members_share_a_keyspace_and_a_tenant_that_leaves_loses_it() -> None:
    simulation = settled(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    shared = simulation.entry("a").keyspace
    assert simulation.entry("b").keyspace == shared
    simulation.edit("TenantGroup", "lab", members=["b"])
    simulation.come_to_rest()
    assert simulation.entry("a").keyspace != shared
    assert simulation.entry("b").keyspace == shared
    assert simulation.condition(TCP, "a", "Stalled") == ("True", "NotAMember")


def test_a_removed_member_loses_the_groups_keyspace_even_while_its_policy_is_invalid() -> None:
    simulation = settled(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    shared = simulation.entry("a").keyspace
    simulation.edit(TCP, "a", models={"names": ["tiny", "gone"]})
    simulation.come_to_rest()
    assert simulation.entry("a").keyspace == shared
    simulation.edit("TenantGroup", "lab", members=["b"])
    simulation.come_to_rest()
    assert simulation.entry("a").suspended or simulation.entry("a").keyspace != shared
    assert not simulation.unsettled()


def test_a_deleted_group_isolates_its_members() -> None:
    simulation = settled(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    shared = simulation.entry("a").keyspace
    simulation.delete("TenantGroup", "lab")
    simulation.come_to_rest()
    keyspaces = [simulation.entry(tenant).keyspace for tenant in "ab"]
    assert len({shared, *keyspaces}) == 3


def test_public_policies_share_and_nobody_else_with_them() -> None:
    simulation = settled(policy("a", isolation="Public"), policy("b", isolation="Public"), policy("c"))
    a, b, c = (simulation.entry(tenant).keyspace for tenant in "abc")
    assert a == b != c


def test_raising_cache_generation_changes_exactly_that_tenants_keyspace() -> None:
    simulation = settled(policy("acme"), policy("globex"))
    before = {tenant: simulation.entry(tenant) for tenant in ("acme", "globex")}
    simulation.edit(TCP, "acme", cacheGeneration=1)
    simulation.come_to_rest()
    assert simulation.entry("acme").keyspace != before["acme"].keyspace
    assert simulation.entry("globex") == before["globex"]
    assert simulation.status(TCP, "acme")["scope"]["rolls"] == 1
    assert ready(simulation, "acme")[0] == "True"


def test_raising_a_groups_cache_generation_changes_all_its_members_keyspaces() -> None:
    simulation = settled(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"), policy("c"))
    before = {tenant: simulation.entry(tenant).keyspace for tenant in "abc"}
    simulation.edit("TenantGroup", "lab", cacheGeneration=1)
    simulation.come_to_rest()
    after = {tenant: simulation.entry(tenant).keyspace for tenant in "abc"}
    assert after["a"] == after["b"] != before["a"]
    assert after["c"] == before["c"]


def test_an_edit_redates_its_own_entry_only_and_rewrites_no_other_policys_status() -> None:
    simulation = settled(*(policy(f"t{n}") for n in range(5)))
    before = {tenant: entry.since for tenant, entry in simulation.bundle().entries.items()}
    simulation.kube.log.clear()
    simulation.edit(TCP, "t3", suspend=True)
    simulation.come_to_rest()
    after = {tenant: entry.since for tenant, entry in simulation.bundle().entries.items()}
    assert {tenant for tenant in after if after[tenant] != before[tenant]} == {"t3"}
    assert {name for verb, kind, name in simulation.kube.log if (verb, kind) == ("status", TCP)} == {"t3"}


def test_a_condition_keeps_its_transition_time_while_its_status_stays() -> None:
    simulation = settled(policy("acme"))

    def times() -> dict[str, str]:
        return {c["type"]: c["lastTransitionTime"] for c in simulation.status(TCP, "acme")["conditions"]}

    before = times()
    simulation.advance(60)
    simulation.edit(TCP, "acme", cacheGeneration=1)
    simulation.come_to_rest()
    after = times()
    assert {kind for kind in after if before.get(kind) != after[kind]} == {"Ready", "Enforced"}
    reread = simulation.status(TCP, "acme")["conditions"]
    assert {c["observedGeneration"] for c in reread} == {2}


def test_a_retention_is_bounded_by_the_tiers() -> None:
    simulation = settled(cpu_tier("capped", maxRetention="30m"), policy("acme", budgets=[{"tier": "capped"}]))
    assert [b.retention_s for b in simulation.entry("acme").budgets] == [1800]


def test_a_suspended_tenant_stays_in_the_bundle_without_reuse() -> None:
    simulation = settled(policy("acme", suspend=True))
    assert simulation.entry("acme").suspended
    assert simulation.bundle().keyspaces == frozenset()


def test_rate_limits_of_policies_and_their_default_are_in_the_bundle_until_they_are_removed() -> None:
    limits = {"requestsPerMinute": 60, "tokensPerMinute": 9000}
    simulation = settled(policy("acme", rateLimit=limits), policy("globex", rateLimit={"tokensPerMinute": 5}))
    assert simulation.entry("acme").rate == RateLimit(60, 9000)
    assert simulation.entry("globex").rate == RateLimit(None, 5)
    assert simulation.bundle().root.rules.rate == UNLIMITED
    simulation.edit(TCP, "acme", rateLimit=None)
    simulation.edit("CachedModel", "tiny", gate={"rateLimit": {"requestsPerMinute": 7}})
    simulation.come_to_rest()
    assert simulation.entry("acme").rate == UNLIMITED
    assert simulation.bundle().root.rules.rate == RateLimit(7)
    assert ready(simulation, "acme")[0] == "True"


def test_a_tenant_that_left_a_shared_scope_is_remembered_there_until_its_epoch_is_gone() -> None:
    simulation = settled(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    shared = simulation.status("TenantGroup", "lab")["scope"]["epoch"]
    simulation.edit("TenantGroup", "lab", members=["b"])
    simulation.come_to_rest()
    assert simulation.status(TCP, "a")["scope"]["kind"] == "Tenant"
    assert simulation.status(TCP, "a")["formerScopes"] == [{"kind": "Group", "name": "lab", "epoch": shared}]
    simulation.edit("TenantGroup", "lab", cacheGeneration=1)
    simulation.come_to_rest()
    assert not simulation.status(TCP, "a").get("formerScopes")


def test_a_change_of_the_rules_is_enforced_only_once_pods_acknowledged_it() -> None:
    simulation = settled(policy("acme"))
    simulation.edit("CachedModel", "tiny", reuse={"mode": "Disabled"})
    simulation.step(Key("CachedModel", NAMESPACE, "tiny"))
    assert simulation.status("CachedModel", "tiny")["observedGeneration"] == 1
    simulation.settle()
    assert simulation.condition("CachedModel", "tiny", "PolicyEnforced") == ("False", "AwaitingAcks")
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingAcks")
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "PolicyEnforced")[0] == "True"


def test_a_removed_members_pods_must_say_so_before_the_group_counts_as_enforced() -> None:
    simulation = settled(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"))
    assert simulation.condition("TenantGroup", "lab", "Enforced")[0] == "True"
    simulation.edit("TenantGroup", "lab", members=["b"])
    simulation.settle()
    assert simulation.condition("TenantGroup", "lab", "Enforced") == ("False", "AwaitingAcks")
    simulation.come_to_rest()
    assert simulation.condition("TenantGroup", "lab", "Enforced")[0] == "True"


def test_a_policy_that_leaves_a_model_waits_for_that_models_pods() -> None:
    simulation = settled(model("other"), policy("acme"))
    simulation.put(pod("pod-o", "other"))
    simulation.come_to_rest()
    simulation.edit(TCP, "acme", models={"names": ["tiny"]})
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingAcks")
    simulation.ack("pod-o")
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_policies_that_come_one_after_another_are_all_enforced_when_the_last_revision_is() -> None:
    simulation = settled(pods=2)
    for number in range(5):
        simulation.put(policy(f"t{number}"))
        simulation.settle()
        for name in ("pod-0", "pod-1"):
            simulation.ack(name, simulation.bundle().root.revision - 1)
        simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.settle()
    assert {simulation.condition(TCP, f"t{number}", "Enforced")[0] for number in range(5)} == {"True"}


def test_a_stream_of_other_edits_does_not_keep_a_policy_from_being_enforced() -> None:
    simulation = settled(policy("acme"), policy("globex"))
    simulation.edit(TCP, "acme", suspend=True)
    simulation.settle()
    needed = simulation.bundle().root.revision
    simulation.edit(TCP, "globex", suspend=True)
    simulation.settle()
    assert simulation.bundle().root.revision > needed
    simulation.ack("pod-0", needed)
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"
    assert simulation.condition(TCP, "globex", "Enforced") == ("False", "AwaitingAcks")


def test_a_restart_forgets_which_revision_brought_a_generation_and_waits_for_the_newest() -> None:
    simulation = settled(policy("acme"), policy("globex"))
    simulation.edit(TCP, "acme", suspend=True)
    simulation.settle()
    needed = simulation.bundle().root.revision
    simulation.edit(TCP, "globex", suspend=True)
    simulation.settle()
    simulation.restart()
    simulation.ack("pod-0", needed)
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingAcks")
    simulation.come_to_rest()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"
