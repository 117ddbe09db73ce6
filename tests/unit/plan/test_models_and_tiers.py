"""Models and tiers: each reason to be stalled, and what stays meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.contract.messages.adapter import TierState
from kvstrata.contract.policy.bundle import Root
from kvstrata.model.refs import Key
from tests.support.objects import (
    NAMESPACE,
    STALLED_REDIS,
    cpu_tier,
    domain,
    group,
    invalidation,
    model,
    older_tier,
    pod,
    policy,
    redis_tier,
)
from tests.support.server_answers import NO_PODS
from tests.support.worlds import Simulation


def at_rest(*objects: Any) -> Simulation:
    simulation = Simulation(*objects)
    simulation.come_to_rest()
    return simulation


@pytest.mark.parametrize(
    ("redis", "reason"),
    [
        (STALLED_REDIS, "TiersConflict"),
        ({"managed": {"tls": {"mode": "Secret", "secretRef": {"name": "kvs-ca"}}}}, "InvalidSpec"),
    ],
)
def test_a_tier_that_cannot_keep_its_promise_is_stalled_and_gets_no_server(redis: dict[str, Any], reason: str) -> None:
    simulation = at_rest(older_tier(), redis_tier(redis=redis))
    assert simulation.condition("CacheTier", "shared", "Stalled") == ("True", reason)
    assert simulation.condition("CacheTier", "shared", "Ready") == ("False", reason)
    assert not [kind for kind, _, _ in simulation.kube.objects if kind == "StatefulSet"]
    assert simulation.unsettled() == {}


def test_a_model_serves_without_its_stalled_tier_and_says_so() -> None:
    simulation = at_rest(older_tier(), redis_tier(redis=STALLED_REDIS), model(tiers=("shared",)))
    assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("False", "TierStalled")
    assert ("Deployment", NAMESPACE, "kvs-tiny") in simulation.kube.objects
    assert simulation.condition("CachedModel", "tiny", "Stalled")[0] != "True"


def test_a_tier_that_becomes_ready_or_is_lost_shows_on_its_models() -> None:
    simulation = at_rest(redis_tier(), model(tiers=("shared",)))
    assert simulation.condition("CacheTier", "shared", "Ready") == ("True", "TierReady")
    assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("True", "TiersBound")
    simulation.backends_up = False
    simulation.advance(40)
    assert simulation.condition("CacheTier", "shared", "Ready")[0] == "False"
    assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("False", "TierNotReady")
    assert simulation.condition("CachedModel", "tiny", "Ready")[0] == "True"
    simulation.backends_up = True
    simulation.advance(40)
    assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("True", "TiersBound")


def test_a_tier_says_at_once_that_no_model_lists_it_any_more() -> None:
    simulation = at_rest(
        *(cpu_tier(name, maxRetention="1h") for name in ("one", "other")), model(tiers=("one",)), pod("pod-0")
    )
    assert simulation.condition("CacheTier", "one", "RetentionKept") != ("", "")
    simulation.edit("CachedModel", "tiny", tiers=[{"name": "other"}])
    simulation.settle()
    assert simulation.condition("CacheTier", "one", "RetentionKept") == ("", "")
    assert simulation.condition("CacheTier", "other", "RetentionKept") != ("", "")


def test_a_managed_tiers_server_is_not_restarted_while_it_is_set_up() -> None:
    simulation = at_rest(redis_tier())
    written = [name for verb, kind, name in simulation.kube.log if (verb, kind) == ("apply", "StatefulSet")]
    assert written == ["kvs-shared-redis-0"]


def test_an_operator_that_starts_repeats_what_a_tier_without_servers_waits_for() -> None:
    simulation = Simulation(redis_tier())
    simulation.looks["shared"] = NO_PODS
    simulation.come_to_rest()
    assert "wait for a server" in str(simulation.status("CacheTier", "shared")["conditions"])
    simulation.restart()
    assert simulation.step(Key("CacheTier", NAMESPACE, "shared")).statuses == ()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tiers": [{"name": "gone"}]}, "TierNotFound"),
        ({"tiers": [{"name": "cpu"}, {"name": "cpu2"}]}, "TiersConflict"),
        ({"gate": {"authentication": {"trustedHeader": {"name": "X-Tenant"}}}}, "InvalidSpec"),
        ({"reuse": {"mode": "Blend"}}, "InvalidSpec"),
    ],
)
def test_a_model_that_cannot_be_served_as_asked_is_stalled_and_keeps_its_pods(
    change: dict[str, Any], reason: str
) -> None:
    simulation = at_rest(cpu_tier(), cpu_tier("cpu2"), model(tiers=("cpu",)))
    before = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    simulation.edit("CachedModel", "tiny", **change)
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "Stalled") == ("True", reason)
    after = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    assert after["spec"] == before["spec"]


def test_a_model_follows_its_spec_and_removes_what_is_no_longer_wanted() -> None:
    simulation = at_rest(cpu_tier(), model(tiers=("cpu",), engine={"image": "engine:1", "replicas": 2}))
    assert ("PodDisruptionBudget", NAMESPACE, "kvs-tiny") in simulation.kube.objects
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:2", "replicas": 1})
    simulation.come_to_rest()
    deployment = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    assert deployment["spec"]["replicas"] == 1
    assert simulation.condition("CachedModel", "tiny", "RolledOut") == ("True", "RolledOut")
    assert simulation.unsettled() == {}


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"updatedReplicas": 1, "readyReplicas": 2, "replicas": 2}, "RollingOut"),
        ({"updatedReplicas": 2, "readyReplicas": 2, "replicas": 3}, "RollingOut"),
        ({"updatedReplicas": 2, "readyReplicas": 1, "replicas": 2}, "PodsNotReady"),
        ({"conditions": [{"type": "Progressing", "status": "False", "reason": "X"}]}, "RolloutStuck"),
    ],
)
def test_a_rollout_is_not_called_done_before_it_is(status: dict[str, Any], reason: str) -> None:
    simulation = at_rest(cpu_tier(), model(tiers=("cpu",), engine={"image": "engine:1", "replicas": 2}))
    deployment = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    observed = {"observedGeneration": deployment["metadata"]["generation"]}
    simulation.put({**deployment, "status": {**observed, **status}})
    simulation.settle()
    assert simulation.condition("CachedModel", "tiny", "RolledOut") == ("False", reason)
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", reason)


def test_a_group_is_enforced_only_when_its_members_entries_are() -> None:
    simulation = at_rest(cpu_tier(), model(), pod("pod-0"))
    simulation.put(group("lab", "a"), policy("a", group="lab"))
    simulation.settle()
    assert simulation.condition("TenantGroup", "lab", "Enforced") == ("False", "AwaitingAcks")
    simulation.ack("pod-0")
    simulation.settle()
    assert simulation.condition("TenantGroup", "lab", "Enforced") == ("True", "AllPodsAcknowledged")
    assert simulation.condition("TenantGroup", "lab", "MembersResolved")[0] == "True"


def test_a_group_with_a_new_epoch_is_not_enforced_before_a_bundle_holds_it() -> None:
    simulation = at_rest(cpu_tier(), model(), pod("pod-0"), group("lab", "a"), policy("a", group="lab"))
    assert simulation.condition("TenantGroup", "lab", "Enforced")[0] == "True"
    simulation.edit("TenantGroup", "lab", cacheGeneration=1)
    lab = Key("TenantGroup", NAMESPACE, "lab")
    simulation.step(lab)
    simulation.step(lab)
    assert simulation.condition("TenantGroup", "lab", "Enforced") == ("False", "NotCommitted")
    simulation.come_to_rest()
    assert simulation.condition("TenantGroup", "lab", "Enforced")[0] == "True"


def test_a_groups_tier_that_appears_lets_it_act() -> None:
    simulation = at_rest(group("lab", "a", budgets=[{"tier": "late", "limit": "1Mi"}]), policy("a", group="lab"))
    assert simulation.condition("TenantGroup", "lab", "Stalled") == ("True", "TierNotFound")
    simulation.put(cpu_tier("late"))
    simulation.come_to_rest()
    assert simulation.condition("TenantGroup", "lab", "Stalled")[0] != "True"


def test_the_first_object_of_a_namespace_makes_its_domain_and_its_key() -> None:
    simulation = at_rest(invalidation("now", scope={"all": True}))
    status = simulation.status("CacheDomain", "default")
    assert len(status["domainID"]) == 16
    assert simulation.condition("CacheDomain", "default", "Ready")[0] == "True"
    assert len(simulation.world.domain_key or b"") == 32


def test_two_domains_never_share_identity_or_epoch() -> None:
    one, other = (Simulation(domain(), seed=seed) for seed in (1, 2))
    for simulation in (one, other):
        simulation.come_to_rest()
    a, b = one.status("CacheDomain", "default"), other.status("CacheDomain", "default")
    assert a["domainID"] != b["domainID"]
    assert a["scope"]["epoch"] != b["scope"]["epoch"]
    assert one.world.domain_key != other.world.domain_key


def test_a_damaged_domain_key_is_replaced_without_turning_in_circles() -> None:
    simulation = at_rest(cpu_tier(), model(), policy("acme"))
    before = simulation.entry("acme").keyspace
    secret = simulation.kube.objects[("Secret", NAMESPACE, "kvstrata-domain")]
    simulation.kube.put({**secret, "data": {"domain.key": "AAAA"}})
    simulation.restart()
    simulation.come_to_rest()
    assert simulation.entry("acme").keyspace != before
    assert simulation.unsettled() == {}


def test_a_pods_problem_is_the_models_problem() -> None:
    simulation = at_rest(model(), pod("pod-0"))
    simulation.ack("pod-0", problem="the API-key Secret keys does not exist", lasting=True)
    simulation.settle()
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "PodsReportProblem")
    assert simulation.condition("CachedModel", "tiny", "Stalled") == ("True", "PodsReportProblem")
    for passing in ("the bundle Secret tiny does not exist", "the cache server does not answer (no socket)"):
        simulation.ack("pod-0", problem=passing)
        simulation.advance(3)
        assert simulation.condition("CachedModel", "tiny", "Stalled")[0] != "True"
        assert simulation.condition("CachedModel", "tiny", "Reconciling") == ("True", "PodsReportProblem")
    simulation.ack("pod-0")
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "Ready")[1] != "PodsReportProblem"


def test_a_pod_whose_lmcache_cannot_be_governed_is_named_with_its_version() -> None:
    simulation = at_rest(model(), pod("pod-0"))
    simulation.ack("pod-0", ungoverned="cache: LMCache 0.5.7 is none of the governed versions (0.5.6)")
    simulation.settle()
    assert simulation.condition("CachedModel", "tiny", "Ready") == ("False", "VersionNotGoverned")
    conditions = simulation.status("CachedModel", "tiny")["conditions"]
    (message,) = {one["message"] for one in conditions if one["type"] == "Ready"}
    assert message == "pod pod-0 serves without reuse; cache: LMCache 0.5.7 is none of the governed versions (0.5.6)"
    simulation.ack("pod-0")
    simulation.come_to_rest()
    assert simulation.condition("CachedModel", "tiny", "Ready")[0] == "True"


def test_a_tier_that_pods_do_not_reach_is_not_reachable_whatever_the_operator_sees() -> None:
    simulation = at_rest(redis_tier("shared"), model(tiers=("shared",)), pod("pod-0"))
    assert simulation.condition("CacheTier", "shared", "BackendReachable")[0] == "True"
    simulation.ack("pod-0", tiers=(TierState("shared", "Redis", "open"),))
    simulation.settle()
    assert simulation.condition("CacheTier", "shared", "BackendReachable") == ("False", "PodsDisconnected")
    simulation.ack("pod-0", tiers=(TierState("shared", "Redis", "closed"),))
    simulation.settle()
    assert simulation.condition("CacheTier", "shared", "BackendReachable")[0] == "True"


def test_the_reuse_mode_of_a_stalled_spec_reaches_no_bundle() -> None:
    simulation = at_rest(model(reuse={"mode": "Disabled"}), policy("acme"), pod("pod-0"))
    simulation.edit("CachedModel", "tiny", reuse={"mode": "Prefix"}, tiers=[{"name": "gone"}])
    simulation.settle()
    assert simulation.condition("CachedModel", "tiny", "Stalled") == ("True", "TierNotFound")
    root = simulation.bundle("tiny").root
    assert root.rules.reuse == "Disabled"
    assert Root.decode(root.encode()) == root


def test_a_new_template_is_not_rolled_out_before_its_deployment_is_there() -> None:
    simulation = at_rest(model(), pod("pod-0"))
    simulation.edit("CachedModel", "tiny", engine={"image": "engine:2", "replicas": 1})
    simulation.step(Key("CachedModel", NAMESPACE, "tiny"))
    assert simulation.status("CachedModel", "tiny")["observedGeneration"] == 1
    simulation.advance(1)
    assert simulation.status("CachedModel", "tiny")["observedGeneration"] == 2
    assert simulation.condition("CachedModel", "tiny", "RolledOut") == ("False", "RollingOut")


def model_without_tiers(**engine: Any) -> Any:
    raw = model()
    del raw["spec"]["tiers"], raw["spec"]["gate"]
    raw["spec"]["engine"].update(engine)
    return raw


@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ({}, "1Gi"),
        ({"resources": {"requests": {"memory": "8Gi"}}}, "1Gi"),
        ({"resources": {"limits": {"memory": "6Gi"}}}, "1536Mi"),
        ({"resources": {"limits": {"memory": "10Mi"}}}, "16Mi"),
    ],
)
def test_a_model_that_names_no_tier_gets_a_cpu_tier_of_its_name_and_size(engine: dict[str, Any], size: str) -> None:
    simulation = at_rest(model_without_tiers(**engine))
    made = simulation.kube.objects[("CacheTier", NAMESPACE, "tiny")]
    assert made["spec"] == {"medium": "CPU", "capacityPerPod": size}
    (owner,) = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("CachedModel", "tiny")
    assert simulation.condition("CacheTier", "tiny", "Ready") == ("True", "InPod")
    assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("True", "TiersBound")
    assert "--l2-prefetch-policy" in str(simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")])
    assert simulation.unsettled() == {}


def test_defaults_are_shown_in_status_and_not_written_into_the_spec() -> None:
    declared = model_without_tiers()
    simulation = at_rest(declared)
    stored = simulation.kube.objects[("CachedModel", NAMESPACE, "tiny")]
    assert stored["spec"] == declared["spec"]
    assert stored["status"]["effective"] == {
        "tiers": ["tiny"],
        "apiKeysSecret": "tiny-api-keys",
        "chunkSize": 256,
        "cacheImage": "engine:1",
    }


def test_the_tier_of_a_models_name_that_a_user_made_is_its_default_and_stays_as_it_is() -> None:
    simulation = at_rest(cpu_tier("tiny", capacityPerPod="64Mi"), model_without_tiers())
    made = simulation.kube.objects[("CacheTier", NAMESPACE, "tiny")]
    assert made["spec"]["capacityPerPod"] == "64Mi"
    assert "ownerReferences" not in made["metadata"]
    assert simulation.condition("CachedModel", "tiny", "TiersBound") == ("True", "TiersBound")


def test_an_edit_of_the_default_tier_stays_and_a_deleted_one_is_made_again() -> None:
    simulation = at_rest(model_without_tiers())
    simulation.edit("CacheTier", "tiny", capacityPerPod="2Gi")
    simulation.come_to_rest()
    assert simulation.kube.objects[("CacheTier", NAMESPACE, "tiny")]["spec"]["capacityPerPod"] == "2Gi"
    simulation.delete("CacheTier", "tiny")
    simulation.come_to_rest()
    assert simulation.kube.objects[("CacheTier", NAMESPACE, "tiny")]["spec"]["capacityPerPod"] == "1Gi"


def test_a_model_with_an_empty_list_of_tiers_gets_none() -> None:
    simulation = at_rest(model(tiers=()))
    assert not [kind for kind, _, _ in simulation.kube.objects if kind == "CacheTier"]
    assert simulation.status("CachedModel", "tiny")["effective"]["tiers"] == []
