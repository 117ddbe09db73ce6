"""An object that the API server will not have is told in its owner's status until it works."""

from __future__ import annotations

from typing import Any

import pytest

from kvstrata.clients.kube import KubeError
from kvstrata.plan.erasure.policy_deletion import ABANDON
from tests.support.objects import NAMESPACE, cpu_tier, model, policy, redis_tier
from tests.support.worlds import Simulation
from tests.unit.plan.invalidations import at_rest

SENTENCE = "requests.cpu: Invalid value: must be less than or equal to cpu limit"
CASES = [
    (redis_tier(), "CacheTier", "shared", "StatefulSet", "kvs-shared-redis-0", "TierReady"),
    (model(tiers=("cpu",)), "CachedModel", "tiny", "Deployment", "kvs-tiny", "ModelReady"),
]


def refusing(kind: str, status: int, *objects: Any) -> Simulation:
    """A world in which the API server refuses to take objects of a kind."""
    simulation = Simulation()

    def refuse(verb: str, written: str, name: str) -> None:
        if (verb, written) == ("apply", kind):
            raise KubeError(status, "Invalid", SENTENCE)

    simulation.kube.before_write = refuse
    simulation.put(*objects)
    simulation.advance(5)
    return simulation


@pytest.mark.parametrize("status", [400, 403, 422])
@pytest.mark.parametrize(("subject", "kind", "name", "child", "child_name", "ready"), CASES)
def test_a_refused_child_stalls_its_owner_until_it_is_taken(
    subject: Any, kind: str, name: str, child: str, child_name: str, ready: str, status: int
) -> None:
    simulation = refusing(child, status, cpu_tier(), subject)
    assert simulation.condition(kind, name, "Stalled") == ("True", "ChildRefused")
    assert simulation.condition(kind, name, "Ready") == ("False", "ChildRefused")
    told = next(c for c in simulation.status(kind, name)["conditions"] if c["type"] == "Stalled")
    assert told["message"] == f"{child} {child_name}: {SENTENCE}"
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(90)
    assert (child, NAMESPACE, child_name) in simulation.kube.objects
    assert simulation.condition(kind, name, "Stalled")[0] != "True"


@pytest.mark.parametrize(
    ("written", "subject"),
    [
        ("kvs-shared-redis-auth", ("CacheTier", "shared")),
        ("kvs-tiny-gate-tls", ("CachedModel", "tiny")),
        ("kvs-tiny-bundle", ("CachedModel", "tiny")),
        ("kvstrata-domain", ("CacheDomain", "default")),
    ],
    ids=["a tier's password", "a gate's certificate", "a bundle", "the domain's key"],
)
def test_a_refused_write_is_reported_by_the_object_that_it_is_for(written: str, subject: tuple[str, str]) -> None:
    simulation = Simulation()
    said = f'"{written}" is forbidden: exceeded quota: count/secrets'

    def refuse(verb: str, kind: str, name: str) -> None:
        if name == written and verb in ("create", "apply", "replace"):
            raise KubeError(403, "Forbidden", said)

    simulation.kube.before_write = refuse
    simulation.put(cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), policy("acme"))
    simulation.advance(20)
    stalled = next(c for c in simulation.status(*subject)["conditions"] if c["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ChildRefused")
    assert said in stalled["message"]
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(120)
    assert simulation.condition(*subject, "Stalled")[0] != "True"


@pytest.mark.parametrize("subject", [("CacheTier", "shared"), ("CachedModel", "tiny"), ("TenantCachePolicy", "acme")])
def test_a_refused_finalizer_is_reported_by_its_object(subject: tuple[str, str]) -> None:
    simulation = Simulation()

    def refuse(verb: str, kind: str, name: str) -> None:
        if (verb, kind, name) == ("finalizers", *subject):
            raise KubeError(403, "Forbidden", "a policy of the cluster admits no finalizers")

    simulation.kube.before_write = refuse
    simulation.put(cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), policy("acme"))
    simulation.advance(20)
    stalled = next(c for c in simulation.status(*subject)["conditions"] if c["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", "ChildRefused")
    assert stalled["message"] == "a policy of the cluster admits no finalizers"
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(120)
    assert simulation.condition(*subject, "Stalled")[0] != "True"


def test_where_no_cachedomain_is_admitted_all_that_wait_for_it_say_why() -> None:
    simulation = Simulation()
    said = 'cachedomains.kvstrata.io "default" is forbidden: exceeded quota: count/cachedomains'

    def refuse(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "CacheDomain"):
            raise KubeError(403, "Forbidden", said)

    simulation.kube.before_write = refuse
    simulation.put(cpu_tier(), redis_tier(), model(tiers=("cpu", "shared")), policy("acme"))
    simulation.advance(20)
    for subject in (("CacheTier", "shared"), ("CachedModel", "tiny"), ("TenantCachePolicy", "acme")):
        told = [one["message"] for one in simulation.status(*subject)["conditions"]]
        assert any(said in message and "create it" in message for message in told), subject
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(120)
    assert simulation.condition("TenantCachePolicy", "acme", "Ready")[0] == "True"
    assert said not in str(simulation.status("CachedModel", "tiny"))


def test_an_object_that_is_not_of_its_type_is_refused_although_the_api_server_calls_it_its_own_error() -> None:
    said = "failed to create typed patch object (ns/kvs-shared-redis; apps/v1, Kind=StatefulSet): duplicate entries"
    assert KubeError(500, "InternalServerError", said).is_refusal
    assert not KubeError(500, "InternalServerError", "etcdserver: leader changed").is_refusal


def test_a_refusal_that_repeats_is_written_once_and_its_attempts_grow_rarer() -> None:
    simulation = refusing("StatefulSet", 422, redis_tier())
    written = simulation.kube.log.count(("status", "CacheTier", "shared"))
    assert written > 0
    plans = len(simulation.plans)
    simulation.advance(120)
    assert simulation.kube.log.count(("status", "CacheTier", "shared")) == written
    assert len(simulation.plans) - plans < 40


def test_a_refused_child_leaves_the_other_conditions_as_they_are() -> None:
    simulation = Simulation(redis_tier())
    simulation.come_to_rest()
    before = {c["type"]: c for c in simulation.status("CacheTier", "shared")["conditions"]}

    def refuse(verb: str, written: str, name: str) -> None:
        if (verb, written) == ("apply", "StatefulSet"):
            raise KubeError(403, "Forbidden", "exceeded quota: memory")

    simulation.kube.before_write = refuse
    simulation.edit("CacheTier", "shared", capacity="128Mi")
    simulation.advance(5)
    after = {c["type"]: c for c in simulation.status("CacheTier", "shared")["conditions"]}
    assert after["Ready"]["reason"] == "ChildRefused"
    assert after["Encrypted"] == before["Encrypted"]


def test_an_api_server_that_does_not_answer_is_no_refusal() -> None:
    simulation = refusing("StatefulSet", 0, redis_tier())
    assert simulation.condition("CacheTier", "shared", "Stalled")[0] != "True"


def test_a_deleted_policy_whose_erasure_may_not_be_created_says_so_and_how_out() -> None:
    simulation = at_rest(policy("acme"))

    def refuse(verb: str, written: str, name: str) -> None:
        if (verb, written) == ("create", "CacheInvalidation"):
            raise KubeError(403, "Forbidden", "exceeded quota: invalidations")

    simulation.kube.before_write = refuse
    simulation.delete("TenantCachePolicy", "acme")
    simulation.advance(5)
    assert simulation.condition("TenantCachePolicy", "acme", "Stalled") == ("True", "CreationRefused")
    assert simulation.condition("TenantCachePolicy", "acme", "Enforced") == ("False", "BeingDeleted")
    told = next(c for c in simulation.status("TenantCachePolicy", "acme")["conditions"] if c["type"] == "Stalled")
    assert "exceeded quota: invalidations" in told["message"]
    assert ABANDON in told["message"]
    assert told["message"].endswith(f"; waiting since {deleted_at(simulation)}")
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.advance(90)
    assert simulation.condition("TenantCachePolicy", "acme", "Reconciling") == ("True", "Erasing")
    waiting = next(c for c in simulation.status("TenantCachePolicy", "acme")["conditions"] if c["type"] == "Ready")
    assert waiting["message"].startswith("CacheInvalidation erase-acme-")
    assert waiting["message"].endswith(f"; waiting since {deleted_at(simulation)}")


def deleted_at(simulation: Simulation) -> str:
    """The time at which the policy was deleted."""
    metadata = simulation.kube.objects[("TenantCachePolicy", NAMESPACE, "acme")]["metadata"]
    return str(metadata["deletionTimestamp"])
