"""What users, the kubelet and time do to a namespace, in steps; after each of them the operator comes to rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from tests.support.memory_secret_store import CERTIFICATE_LIFE
from tests.support.objects import (
    NAMESPACE,
    STALLED_REDIS,
    Raw,
    cpu_tier,
    domain,
    group,
    invalidation,
    model,
    older_tier,
    pod,
    policy,
    pool,
    redis_tier,
)  # fmt: skip
from tests.support.renderer import rendered_by
from tests.support.worlds import Simulation, finish

Step = Callable[[Simulation], None]
POLICY, GROUP, TIER, MODEL, DOMAIN = "TenantCachePolicy", "TenantGroup", "CacheTier", "CachedModel", "CacheDomain"
POOL = "PrefixPool"


@dataclass(frozen=True, slots=True)
class Scenario:
    """`steps` over a namespace that begins with `start`, at rest; `by_hand` if a step damages a bundle."""

    start: tuple[Raw, ...]
    steps: tuple[Step, ...]
    by_hand: bool = False


def put(*objects: Raw) -> Step:
    """Users create these."""
    return lambda simulation: simulation.put(*objects)


def edit(kind: str, name: str, **spec: object) -> Step:
    """A user changes fields of a spec; None removes one."""
    return lambda simulation: simulation.edit(kind, name, **spec)


def delete(kind: str, name: str) -> Step:
    """Somebody deletes an object."""
    return lambda simulation: simulation.delete(kind, name)


def leave(name: str) -> Step:
    """Somebody deletes a policy, and wants nothing of it to be erased: nobody erases anything here."""
    return together(edit(POLICY, name, deletionPolicy="Abandon"), delete(POLICY, name))


def wait(seconds: float) -> Step:
    """Time passes."""
    return lambda simulation: simulation.advance(seconds)


def together(*steps: Step) -> Step:
    """Several of these at once."""

    def act(simulation: Simulation) -> None:
        for step in steps:
            step(simulation)

    return act


def _certificates_age(simulation: Simulation) -> None:
    simulation.now += CERTIFICATE_LIFE + timedelta(days=1)
    _list_and_diff(simulation)


def _list_and_diff(simulation: Simulation) -> None:
    finish(simulation.resync.objects(simulation.queue.add))
    finish(simulation.resync.secrets())
    simulation.enqueue_all()


def _scale_by_hand(simulation: Simulation) -> None:
    raw = simulation.kube.objects[("Deployment", NAMESPACE, "kvs-tiny")]
    simulation.put({**raw, "spec": {**raw["spec"], "replicas": 9}})


def _damage_shard(simulation: Simulation) -> None:
    slot = simulation.bundle().root.shards[0].slot
    raw = simulation.kube.objects[("Secret", NAMESPACE, f"kvs-tiny-bundle-0{slot}")]
    simulation.put({**raw, "data": {"shard.json": "e30="}})


def _engine(**changes: object) -> Raw:
    return {"image": "engine:1", "replicas": 1, **changes}


READING: Any = {"pools": [{"name": "manual"}]}
MANUAL = pool("manual", prefixes=[{"name": "text", "text": "You are a patient assistant who answers at length."}])
CHANGED: Any = {"prefixes": [{"name": "text", "text": "You are an assistant without patience, and brief."}]}
TEAM: tuple[Raw, ...] = (
    cpu_tier(),
    redis_tier(),
    model(tiers=("cpu", "shared")),
    group("lab", "a", "b"),
    policy("a", group="lab"),
    policy("b", group="lab"),
    policy("c", budgets=[{"tier": "shared", "limit": "1Mi"}]),
    policy("d", isolation="Public"),
    pod("pod-0"),
    pod("pod-1"),
)
"""One model with both kinds of tiers and two pods; tenants of every kind of scope."""
SOLO: tuple[Raw, ...] = (cpu_tier(), model(tiers=("cpu",)), policy("c"), pod("pod-0"))
"""As little as there can be."""
SEALED: tuple[Raw, ...] = (
    redis_tier(encryption="Required"),
    model(tiers=("shared",)),
    group("lab", "a"),
    policy("a", group="lab"),
    policy("c"),
    pod("pod-0"),
)
"""A tier that holds ciphertext only, and scopes with data keys."""
SHARING: tuple[Raw, ...] = (
    cpu_tier(),
    redis_tier(encryption="Required"),
    model(tiers=("cpu", "shared")),
    group("lab", "a", "b"),
    policy("a", group="lab", **READING),
    policy("b", group="lab", **READING),
    policy("c", **READING),
    *(pod(f"pod-{number}", render_id=rendered_by(model(tiers=("cpu", "shared")))) for number in (0, 1)),
)
"""Tenants that want to read a pool, and pods that can render it."""
DISK = cpu_tier("disk", medium="NVMe", capacityPerPod="1Gi", nvme={"emptyDir": {}}, encryption="Required")
NOWHERE = {"budgets": [{"tier": "gone", "limit": "1Mi"}]}
BY_TENANT = {"scope": {"tenant": "c"}}

SCENARIOS: Mapping[str, Scenario] = {
    "a pool comes and goes": Scenario(SHARING, (put(MANUAL), delete(POOL, "manual"), _list_and_diff, _list_and_diff)),
    "a pool gets other content, beside the old and at once": Scenario(
        (*SHARING, MANUAL),
        (edit(POOL, "manual", **CHANGED), edit(POOL, "manual", invalidation="Eager", cacheGeneration=1),
         _list_and_diff, _list_and_diff),
    ),
    "a pool's readers change": Scenario(
        (*SHARING, MANUAL),
        (edit(POOL, "manual", readers={"groups": ["lab"]}), edit(GROUP, "lab", members=["a"], sharing="PoolsOnly")),
    ),
    "a pool is invalidated while its content changes": Scenario(
        (*SHARING, MANUAL),
        (edit(POOL, "manual", **CHANGED), put(invalidation("now", scope={"pool": "manual"})), _list_and_diff,
         _list_and_diff),
    ),
    "everything is created": Scenario((), (put(*TEAM[:8]), put(*TEAM[8:]))),
    "policies come before all that they need": Scenario((), (put(*reversed(SOLO[:3])), put(*SOLO[3:]))),
    "a policy is edited": Scenario(
        TEAM,
        (edit(POLICY, "c", budgets=[{"tier": "shared", "limit": "2Mi", "retention": "1h"}]),
         edit(POLICY, "c", suspend=True, budgets=None)),
    ),
    "guarantees wait, get room and lose it": Scenario(
        (cpu_tier(capacityPerPod="100Mi"), model(tiers=("cpu",)), pod("pod-0"),
         policy("e", budgets=[{"tier": "cpu", "guaranteed": "60Mi"}])),
        (put(policy("f", budgets=[{"tier": "cpu", "guaranteed": "50Mi"}])),
         edit(POLICY, "e", budgets=[{"tier": "cpu", "guaranteed": "20Mi"}]),
         edit(TIER, "cpu", capacityPerPod="70Mi"),
         leave("e")),
    ),
    "a tenant comes and goes": Scenario(TEAM, (put(policy("e")), leave("e"), put(policy("e")))),
    "a member is taken out of its group": Scenario(TEAM, (edit(GROUP, "lab", members=["a"]),)),
    "a group goes": Scenario(TEAM, (delete(GROUP, "lab"),)),
    "a tenant goes from its group to itself and to the public": Scenario(
        TEAM,
        (edit(POLICY, "b", isolation="Isolated", groupRef=None), edit(POLICY, "b", isolation="Public")),
    ),
    "a tenant leaves its group and comes back": Scenario(
        TEAM,
        (edit(POLICY, "b", isolation="Isolated", groupRef=None),
         edit(POLICY, "b", isolation="Group", groupRef={"name": "lab"})),
    ),
    "of two policies for a tenant the older goes": Scenario(
        (*SOLO[:2], policy("c", deletionPolicy="Abandon"), *SOLO[3:]),
        (put(policy("c", name="younger", suspend=True)), delete(POLICY, "c")),
    ),
    "a model gets another image and more pods": Scenario(
        TEAM, (edit(MODEL, "tiny", engine=_engine(image="engine:2", replicas=2)),)
    ),
    "a model's pods lose a disruption budget and a tier": Scenario(
        TEAM, (edit(MODEL, "tiny", engine=_engine(replicas=2)), edit(MODEL, "tiny", engine=_engine(replicas=0)),
               edit(MODEL, "tiny", tiers=[{"name": "cpu"}])),
    ),
    "a model is deleted and made anew": Scenario(
        SOLO, (delete(MODEL, "tiny"), put(model(tiers=("cpu",))))
    ),
    "a second model comes": Scenario(TEAM, (put(model("other", tiers=("shared",))),)),
    "a tier grows, loses TLS and is deleted": Scenario(
        (redis_tier(),),
        (edit(TIER, "shared", capacity="128Mi"),
         edit(TIER, "shared", redis={"managed": {"tls": {"mode": "Disabled"}}}),
         delete(TIER, "shared")),
    ),
    "a tenant is invalidated": Scenario(TEAM, (put(invalidation("now", **BY_TENANT)),)),
    "a group is invalidated": Scenario(TEAM, (put(invalidation("now", scope={"group": "lab"})),)),
    "all are invalidated": Scenario(TEAM, (put(invalidation("now", scope={"all": True})),)),
    "a sharing tenant is invalidated with its scope": Scenario(
        TEAM, (put(invalidation("now", scope={"tenant": "a"}, sharedScopes="Roll")),)
    ),
    "an invalidation waits for a pod that vanished": Scenario(
        TEAM, (together(delete("Pod", "pod-1"), put(invalidation("now", **BY_TENANT))), *[wait(1300)] * 3)
    ),
    "an invalidation of nobody fails and is deleted in time": Scenario(
        SOLO, (put(invalidation("now", scope={"tenant": "nobody"}, ttlSecondsAfterFinished=60)), wait(90))
    ),
    "cacheGeneration is bumped on both holders": Scenario(
        TEAM, (together(edit(POLICY, "c", cacheGeneration=1), edit(GROUP, "lab", cacheGeneration=1)),)
    ),
    "certificates are renewed": Scenario(TEAM, (_certificates_age,)),
    "the domain's settings change": Scenario(
        TEAM, (edit(DOMAIN, "default", staleAfter="1m", onStale="ServeStale", unknownTenants="Refuse"),)
    ),
    "reuse is switched off and on": Scenario(
        SOLO, (edit(MODEL, "tiny", reuse={"mode": "Disabled"}), edit(MODEL, "tiny", reuse=None))
    ),
    "a policy is stalled and repaired": Scenario(
        TEAM, (edit(POLICY, "c", **NOWHERE), edit(POLICY, "c", budgets=None, suspend=True))
    ),
    "a policy is stalled while it is invalidated": Scenario(
        TEAM, (edit(POLICY, "c", **NOWHERE), put(invalidation("now", **BY_TENANT)), edit(POLICY, "c", budgets=None))
    ),
    "a tier is stalled and repaired": Scenario(
        (older_tier(), *TEAM),
        (edit(TIER, "shared", redis=STALLED_REDIS), edit(TIER, "shared", redis={"managed": {}})),
    ),
    "a tier is closed to some and opened again": Scenario(
        TEAM,
        (
            edit(TIER, "shared", allowedClassifications=["Public", "Internal"]),
            edit(POLICY, "c", classification="Internal"),
            edit(TIER, "shared", allowedClassifications=None),
        ),
    ),
    "a member of a group becomes stricter while another leaves": Scenario(
        TEAM,
        (
            edit(TIER, "shared", allowedClassifications=["Internal"]),
            together(edit(POLICY, "a", classification="Internal"), edit(POLICY, "b", classification="Internal")),
            together(edit(POLICY, "a", classification="Confidential"), edit(GROUP, "lab", members=["a"])),
        ),
    ),
    "a tier comes that requires encryption": Scenario(SEALED[2:], (put(*SEALED[:2]),)),
    "epochs roll where data keys are": Scenario(
        SEALED,
        (together(edit(POLICY, "c", cacheGeneration=1), put(policy("e"))), edit(GROUP, "lab", cacheGeneration=1),
         _list_and_diff, _list_and_diff),
    ),
    "tenants with data keys come and go": Scenario(
        SEALED, (put(policy("e")), leave("c"), delete(GROUP, "lab"), _list_and_diff, _list_and_diff)
    ),
    "no tier encrypts for a while": Scenario(
        SEALED,
        (
            edit(MODEL, "tiny", tiers=[]), delete(TIER, "shared"),
            together(put(DISK), edit(MODEL, "tiny", tiers=[{"name": "disk"}])),
        ),
    ),
    "children are changed and deleted by hand": Scenario(
        TEAM, (_scale_by_hand, together(delete("Service", "kvs-tiny"), delete("StatefulSet", "kvs-shared-redis-0")))
    ),
    "the domain's key is deleted": Scenario(TEAM, (delete("Secret", "kvstrata-domain"),)),
    "the domain is deleted": Scenario(SOLO, (delete(DOMAIN, "default"),)),
    "a bundle's root is deleted and a shard damaged": Scenario(
        SOLO, (delete("Secret", "kvs-tiny-bundle"), _damage_shard), by_hand=True
    ),
    "a user's domain comes after all others": Scenario(
        (), (put(*SOLO), put(domain(staleAfter="2m")))
    ),
}  # fmt: skip

CLAIMED = (
    "everything is created",
    "guarantees wait, get room and lose it",
    "a model gets another image and more pods",
    "an invalidation waits for a pod that vanished",
    "tenants with data keys come and go",
    "a bundle's root is deleted and a shard damaged",
)
"""Those that have the least in common."""


def prepared(scenario: Scenario) -> Simulation:
    """Return the namespace at rest before the first step."""
    simulation = Simulation()
    for raw in scenario.start:
        simulation.put(raw)
        simulation.now += timedelta(seconds=1)
    if scenario.start:
        simulation.come_to_rest()
    return simulation
