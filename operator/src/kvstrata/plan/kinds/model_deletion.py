"""Deletion of a CachedModel or a managed CacheTier: the object stays until its workloads are deleted.

These are a model's Deployment, with its bundle, and a tier's StatefulSets. Garbage collection does not reach children
that lost their owner reference: pods would serve on from a bundle that no longer follows any policy, and servers would
keep blocks that no erasure reaches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvstrata.api.cachedmodel import CachedModel
from kvstrata.api.cachetier import CacheTier
from kvstrata.model.world import World
from kvstrata.plan.actions import Action, Plan, Remove, SetFinalizers, key_of
from kvstrata.plan.ownership import is_ours

FINALIZER = "kvstrata.io/end-serving"
WORKLOADS = ("Deployment", "StatefulSet")


def finalizer_due(owner: CachedModel | CacheTier) -> Plan | None:
    """Return the plan that sets the finalizer of a live object, before anything serves it; None if it has it."""
    metadata = owner.metadata
    if FINALIZER in metadata.finalizers:
        return None
    order = SetFinalizers((*metadata.finalizers, FINALIZER), metadata.resource_version)
    return Plan(actions=(order,), enqueue=(key_of(owner),))


def departure(
    world: World, owner: CachedModel | CacheTier, children: Iterable[Mapping[str, Any]]
) -> tuple[Action, ...]:
    """Return the deletions of workloads and bundle of a deleted object, then its release. Objects that do not exist
    are done, and foreign ones are left alone. `children` are its desired ones, if they can be built."""
    if FINALIZER not in owner.metadata.finalizers:
        return ()
    me, reference = (owner.INFO.kind, owner.name), owner.owner_reference()
    desired = {(child["kind"], child["metadata"]["name"]): child for child in children}
    workloads = (
        Remove(*slot, live["metadata"]["uid"])
        for slot, live in sorted(world.children.items())
        if slot[0] in WORKLOADS and is_ours(world.mark_key, reference, live, desired.get(slot))
    )
    bundle = (
        Remove("Secret", name, facts.uid)
        for name, facts in sorted(world.secrets.items())
        if facts.of_bundle and (owner.uid in facts.owners or facts.parent == me)
    )
    return *workloads, *bundle, released(owner.metadata.finalizers, owner.metadata.resource_version)


def released(finalizers: tuple[str, ...], resource_version: str) -> SetFinalizers:
    return SetFinalizers(tuple(one for one in finalizers if one != FINALIZER), resource_version)
