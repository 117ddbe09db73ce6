"""Nothing is reported as enforced or complete before every pod that could still serve the old said so."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvstrata.clients.resources import Resource
from kvstrata.contract.messages.adapter import TierState
from kvstrata.objects import names
from tests.support.objects import NAMESPACE, Raw, cpu_tier, domain, invalidation, model, pod, policy, redis_tier
from tests.support.worlds import Killed, Simulation, finish

TCP = "TenantCachePolicy"
TWO_MODELS = (cpu_tier(), model("m1", tiers=("cpu",)), model("m2", tiers=("cpu",)))


def running(*objects: Raw, pods: tuple[Raw, ...] = (pod("p1", "m1"), pod("p2", "m2")), **spec: Any) -> Simulation:
    simulation = Simulation(domain(**spec), *objects)
    simulation.put(*pods)
    simulation.come_to_rest()
    return simulation


def one_model(**spec: Any) -> Simulation:
    objects = (cpu_tier(), model(tiers=("cpu",)), policy("acme"))
    return running(*objects, pods=(pod("pod-0"), pod("pod-1")), **spec)


def phase(simulation: Simulation) -> str:
    return str(simulation.status("CacheInvalidation", "now")["phase"])


def invalidate(simulation: Simulation) -> None:
    simulation.put(invalidation("now", scope={"tenant": "acme"}))
    simulation.settle()
    simulation.ack("pod-0")
    simulation.settle()


def test_a_removal_that_comes_long_after_its_edit_waits_for_the_pods_that_must_forget() -> None:
    simulation = running(*TWO_MODELS, policy("acme", models={"names": ["m1"]}), policy("other"))
    simulation.edit(TCP, "acme", models={"names": ["m2"]}, budgets=[{"tier": "late", "retention": "1h"}])
    simulation.ack_all()
    simulation.put(policy("third"))
    simulation.ack_all()
    simulation.put(cpu_tier("late"))
    simulation.settle()
    simulation.ack("p2")
    simulation.advance(6)
    assert "acme" not in simulation.bundle("m1").entries
    assert simulation.condition(TCP, "acme", "Enforced") == ("False", "AwaitingAcks")
    simulation.ack("p1")
    simulation.settle()
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_a_policy_that_takes_over_from_its_rival_waits_for_the_rivals_pods() -> None:
    old = policy("acme", name="old", models={"names": ["m1"]})
    simulation = running(*TWO_MODELS, old, policy("other"))
    simulation.advance(3)
    simulation.put(policy("acme", name="young", models={"names": ["m2"]}))
    simulation.ack_all()
    simulation.put(policy("third"))
    simulation.ack_all()
    simulation.delete(TCP, "old")
    simulation.settle()
    simulation.ack("p2")
    simulation.advance(6)
    assert simulation.condition(TCP, "young", "Enforced") == ("False", "AwaitingAcks")


def test_an_invalidation_does_not_take_a_damaged_bundle_for_an_empty_one() -> None:
    simulation = one_model()
    ref = simulation.bundle().root.shards[0]

    def die(_verb: str, kind: str, _name: str) -> None:
        if kind == "Secret":
            raise Killed

    simulation.kube.before_write = die
    try:
        simulation.put(invalidation("now", scope={"tenant": "acme"}))
        simulation.settle()
    except Killed:
        pass
    simulation.kube.before_write = lambda verb, kind, name: None
    simulation.kube.remove("Secret", NAMESPACE, names.bundle_shard("tiny", ref.index, ref.slot))
    simulation.restart()
    simulation.settle()
    assert phase(simulation) == "AwaitingAcks"
    needed = simulation.status("CacheInvalidation", "now")["targets"][0]["revision"]
    assert needed == simulation.bundle().root.revision > simulation.world.acked_revision(simulation.pod("pod-0"))


def test_a_stuck_pod_whose_connection_broke_once_has_not_fenced_itself_off() -> None:
    simulation = one_model()
    uid = simulation.pod("pod-1").uid
    old = simulation.acks[uid].acked
    invalidate(simulation)
    for _ in range(40):
        simulation.advance(10)
        simulation.ack("pod-1", old)
    simulation.store.lose_contact(NAMESPACE, uid)
    simulation.advance(2)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(600)
    assert phase(simulation) == "Complete", "a pod that stays silent has fenced itself off in the end"


def test_what_one_leader_heard_of_a_pod_the_next_one_knows() -> None:
    simulation = one_model()
    simulation.acks.pop(simulation.pod("pod-1").uid)  # its node is lost together with the leader's
    simulation.restart()
    simulation.advance(10)
    recorded = {witness["name"]: witness["acked"] for witness in simulation.status("CachedModel", "tiny")["witnesses"]}
    assert recorded == {"pod-0": 1, "pod-1": 1}
    simulation.delete("Pod", "pod-1")
    simulation.advance(5)
    invalidate(simulation)
    assert phase(simulation) == "AwaitingAcks"
    simulation.advance(600)
    assert phase(simulation) == "Complete"


def test_a_pod_that_never_fences_itself_is_not_taken_for_fenced_after_a_restart() -> None:
    simulation = one_model(onStale="ServeStale")
    simulation.acks.pop(simulation.pod("pod-1").uid)
    simulation.restart()
    simulation.advance(10)
    simulation.delete("Pod", "pod-1")
    simulation.advance(5)
    simulation.edit("CacheDomain", "default", onStale="Fence")
    simulation.settle()
    simulation.ack("pod-0")
    simulation.advance(10)
    simulation.restart()
    simulation.advance(2)
    invalidate(simulation)
    simulation.advance(3600)
    assert phase(simulation) == "AwaitingAcks"


def test_an_object_that_is_made_anew_while_a_list_is_read_is_not_forgotten() -> None:
    simulation = one_model()
    simulation.edit(TCP, "acme", deletionPolicy="Abandon")
    simulation.come_to_rest()
    real = simulation.kube.list
    done: list[bool] = []

    async def slow(resource: Resource, namespace: str | None, selector: str | None = None) -> AsyncIterator[Raw]:
        if resource.kind != TCP or done:
            async for found in real(resource, namespace, selector):
                yield found
            return
        done.append(True)
        simulation.delete(TCP, "acme")
        snapshot = [found async for found in real(resource, namespace, selector)]
        simulation.put(policy("acme"))
        for found in snapshot:
            yield found

    simulation.kube.list = slow  # type: ignore[method-assign,assignment]
    finish(simulation.resync.objects(simulation.queue.add))
    simulation.come_to_rest()
    assert "acme" in simulation.world.policies
    assert simulation.condition(TCP, "acme", "Enforced")[0] == "True"


def test_a_tier_does_not_believe_pods_that_are_silent() -> None:
    objects = (redis_tier(), model(tiers=("shared",)), policy("acme"))
    simulation = running(*objects, pods=(pod("pod-0"), pod("pod-1")))
    simulation.ack("pod-1", tiers=(TierState("shared", "Redis", "open"),))
    simulation.advance(1)
    assert simulation.condition("CacheTier", "shared", "BackendReachable") == ("False", "PodsDisconnected")
    simulation.store.lose_contact(NAMESPACE, simulation.pod("pod-1").uid)
    simulation.advance(60)
    assert simulation.condition("CacheTier", "shared", "BackendReachable")[0] == "True"
