"""Invalidations: every pod's word, every phase resumable, and no success that nobody earned."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.model.refs import Key
from kvstrata.plan.custody import TOKEN_CACHE_S
from tests.support.memory_kube import MemoryKube
from tests.support.objects import NAMESPACE, cpu_tier, domain, group, invalidation, model, pod, policy
from tests.support.worlds import Simulation

KIND = "CacheInvalidation"
FENCE_S = 70
"""staleAfter + drainTimeout of these worlds."""


def at_rest(*objects: Any, pods: int = 2, **domain_spec: Any) -> Simulation:
    spec = {"staleAfter": "1m", "drainTimeout": "10s", **domain_spec}
    simulation = Simulation(domain(**spec), cpu_tier(), model(tiers=("cpu",)), *objects)
    simulation.settle()
    simulation.put(*(pod(f"pod-{n}") for n in range(pods)))
    simulation.come_to_rest()
    return simulation


def phase(simulation: Simulation, name: str = "now") -> str:
    return str(simulation.status(KIND, name).get("phase", ""))


def phases(simulation: Simulation, name: str = "now") -> list[str]:
    """Every phase that a plan wrote, in order, each once."""
    written = [
        str(write.status["phase"])
        for _, made in simulation.plans
        for write in made.statuses
        if write.key == Key(KIND, NAMESPACE, name) and "phase" in write.status
    ]
    return list(dict.fromkeys(written))


def test_an_invalidation_waits_for_every_pod_and_then_completes() -> None:
    simulation = at_rest(policy("acme"), policy("globex"))
    before = {tenant: simulation.entry(tenant).keyspace for tenant in ("acme", "globex")}
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    assert before["acme"] not in simulation.bundle().keyspaces
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    assert simulation.condition(KIND, "now", "LogicallyInvalid") == ("False", "AwaitingAcks")
    simulation.ack("pod-1")
    simulation.settle()
    assert phases(simulation) == ["Rolling", "AwaitingAcks", "Complete"]
    assert simulation.condition(KIND, "now", "LogicallyInvalid")[0] == "True"
    assert simulation.condition(KIND, "now", "Ready")[0] == "True"
    assert simulation.status(KIND, "now")["pods"] == {"acked": 2, "live": 2, "fenced": 0}
    assert simulation.entry("globex").keyspace == before["globex"]
    assert simulation.status("TenantCachePolicy", "acme")["scope"]["rolls"] == 1
    assert simulation.unsettled() == {}


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


def test_a_pod_that_vanished_without_a_word_delays_until_it_has_fenced_itself_off() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.delete("Pod", "pod-1")
    simulation.advance(FENCE_S - 10)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(15)
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"]["fenced"] == 1


def test_a_live_pod_that_nobody_reaches_delays_until_it_has_fenced_itself_off() -> None:
    simulation = at_rest(policy("acme"))
    simulation.store.lose_contact(NAMESPACE, simulation.pod("pod-1").uid)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(FENCE_S - 10)
    assert phase(simulation) == "AwaitingAcks"
    assert "pod-1" in simulation.status(KIND, "now")["message"]
    simulation.advance(15)
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"] == {"acked": 1, "live": 2, "fenced": 1}
    assert "1 could not be reached" in simulation.status(KIND, "now")["message"]


def test_a_pod_that_says_that_its_policy_is_fresh_has_not_fenced_itself_off() -> None:
    simulation = at_rest(policy("acme"))
    before = simulation.bundle().root.revision
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.ack("pod-1", before)
    simulation.advance(FENCE_S + 600)
    assert phase(simulation) == "AwaitingAcks"
    simulation.ack("pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"]["fenced"] == 0


def test_a_pod_that_vanished_just_before_is_counted_too() -> None:
    simulation = at_rest(policy("acme"))
    simulation.delete("Pod", "pod-1")
    simulation.advance(20)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(FENCE_S + 5)
    assert phase(simulation) == "Complete"


def test_a_pod_that_vanished_long_before_is_not() -> None:
    simulation = at_rest(policy("acme"))
    simulation.delete("Pod", "pod-1")
    simulation.advance(FENCE_S + TOKEN_CACHE_S + 5)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "Complete"


@pytest.mark.parametrize("gone", [True, False])
def test_a_pod_whose_containers_ended_delays_nothing(gone: bool) -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.put(pod("pod-1", state="terminated", ready=False))
    if gone:
        simulation.delete("Pod", "pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"
    assert simulation.status(KIND, "now")["pods"]["fenced"] == 0


def test_a_pod_that_was_deleted_before_its_engine_started_delays_nothing() -> None:
    simulation = at_rest(policy("acme"))
    starting = pod("pod-2", ready=False)
    gate = {"name": "gate", "state": {"running": {}}}
    starting["status"] |= {"initContainerStatuses": [gate], "containerStatuses": [_waiting("engine")]}
    simulation.put(starting)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    ended = {"name": "gate", "state": {"terminated": {}}}
    starting["status"] |= {"initContainerStatuses": [ended]}
    simulation.put(starting)
    assert not simulation.pod("pod-2").finished  # kubelet may start its gate again
    last = simulation.kube.objects[("Pod", NAMESPACE, "pod-2")]
    last = {**last, "metadata": {**last["metadata"], "deletionTimestamp": "2026-01-01T00:00:09Z"}}
    for key in simulation.store.forget("Pod", NAMESPACE, "pod-2", last):
        simulation.queue.add(key)
    simulation.settle()
    assert phase(simulation) == "Complete"


def _waiting(container: str) -> dict[str, Any]:
    return {"name": container, "state": {"waiting": {"reason": "PodInitializing"}}}


def test_with_serve_stale_a_silent_pod_is_never_counted_as_fenced() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(24 * 3600)
    assert phase(simulation) == "AwaitingAcks"
    simulation.ack("pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_past_its_deadline_it_fails_and_says_what_stays() -> None:
    simulation = at_rest(policy("acme"), onStale="ServeStale")
    before = simulation.entry("acme").keyspace
    simulation.put(invalidation("now", scope={"tenant": "acme"}, deadline="1m"))
    simulation.settle()
    simulation.advance(50)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(20)
    assert phase(simulation) == "Failed"
    assert simulation.condition(KIND, "now", "Failed") == ("True", "DeadlineExceeded")
    assert simulation.entry("acme").keyspace != before


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"scope": {"tenant": "acme"}, "mode": "Eager"}, "EagerNotReconciled"),
        ({"scope": {"tenant": "acme"}, "hbm": "ResetEngine"}, "ResetNotReconciled"),
        ({"scope": {"model": "tiny"}}, "ScopeNotReconciled"),
        ({"scope": {"pool": "p"}}, "ScopeNotReconciled"),
        ({"scope": {"prefix": {"modelRef": {"name": "tiny"}, "content": {"text": "x"}}}}, "ScopeNotReconciled"),
        ({"scope": {"tenant": "nobody"}}, "TenantNotFound"),
        ({"scope": {"group": "nobody"}}, "GroupNotFound"),
        ({"scope": {"tenant": "member"}}, "SharedScopeChoiceRequired"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason_and_changes_nothing(spec: dict[str, Any], reason: str) -> None:
    simulation = at_rest(policy("acme"), group("lab", "member"), policy("member", group="lab"))
    before = simulation.bundle()
    simulation.put(invalidation("now", **spec))
    simulation.come_to_rest()
    assert phase(simulation) == "Failed"
    assert simulation.condition(KIND, "now", "Stalled") == ("True", reason)
    assert simulation.bundle() == before


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
        {"tiers": [{"name": "gone", "limit": "1Mi"}]},
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


class Killed(BaseException):
    """The operator's process is gone."""


def _kill_at(kube: MemoryKube, number: int, *, after: bool) -> None:
    count = 0

    def hook(verb: str, kind: str, name: str) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise Killed

    if after:
        kube.after_write = hook
    else:
        kube.before_write = hook


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(1, 13))
def test_an_operator_killed_at_any_write_resumes_and_never_rolls_twice(number: int, after: bool) -> None:
    simulation = at_rest(group("lab", "a", "b"), policy("a", group="lab"), policy("b", group="lab"), policy("c"))
    before = simulation.bundle().keyspaces
    revision = simulation.bundle().root.revision
    _kill_at(simulation.kube, number, after=after)
    try:
        simulation.kube.objects  # noqa: B018  (the user's write is not the operator's)
        hook, simulation.kube.after_write = simulation.kube.after_write, lambda verb, kind, name: None
        simulation.kube.put(invalidation("now", scope={"all": True}))
        simulation.kube.after_write = hook
        simulation._deliver()
        simulation.come_to_rest()
    except Killed:
        pass
    simulation.restart()
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    assert not before & simulation.bundle().keyspaces
    for kind, name in (("TenantGroup", "lab"), ("TenantCachePolicy", "c"), ("CacheDomain", "default")):
        assert simulation.status(kind, name)["scope"]["rolls"] == 1
    assert simulation.bundle().root.revision > revision
    assert simulation.unsettled() == {}


def test_a_finished_invalidation_is_deleted_after_its_time_to_live_and_not_before() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}, ttlSecondsAfterFinished=60))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"
    simulation.advance(40)
    assert "now" in simulation.world.invalidations
    simulation.advance(30)
    assert "now" not in simulation.world.invalidations


def test_without_pods_an_invalidation_completes_at_once() -> None:
    simulation = at_rest(policy("acme"), pods=0)
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_an_invalidation_that_comes_before_the_domain_waits_for_it() -> None:
    simulation = Simulation(invalidation("now", scope={"all": True}))
    simulation.come_to_rest()
    assert phase(simulation) == "Complete"


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


def test_a_pod_that_vanished_while_no_operator_ran_is_counted_too() -> None:
    simulation = at_rest(policy("acme"))
    simulation.kube.remove("Pod", NAMESPACE, "pod-1")
    simulation.restart()
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(FENCE_S + TOKEN_CACHE_S + 5)
    assert phase(simulation) == "Complete"


def test_a_silent_pod_fences_itself_by_the_rules_that_it_knows_not_by_todays() -> None:
    simulation = at_rest(policy("acme"), staleAfter="24h")
    simulation.edit("CacheDomain", "default", staleAfter="10s")
    simulation.settle()
    simulation.ack("pod-0")
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(3600)
    assert phase(simulation) == "AwaitingAcks"
    simulation.ack("pod-1")
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_pods_of_a_model_that_was_deleted_are_waited_for_until_they_end() -> None:
    simulation = at_rest(policy("acme"), model("gone"), pod("pod-g", "gone"))
    simulation.come_to_rest()
    simulation.delete("CachedModel", "gone")
    simulation.put(invalidation("now", scope={"all": True}))
    simulation.settle()
    for name in ("pod-0", "pod-1"):
        simulation.ack(name)
    simulation.advance(FENCE_S + 5)
    assert phase(simulation) == "AwaitingAcks"
    simulation.put(pod("pod-g", "gone", state="terminated", ready=False))
    simulation.settle()
    assert phase(simulation) == "Complete"


def test_a_pod_that_the_control_plane_calls_failed_is_not_ended() -> None:
    simulation = at_rest(policy("acme"))
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    lost = pod("pod-1", ready=False)
    lost["status"]["phase"] = "Failed"
    simulation.put(lost)
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
